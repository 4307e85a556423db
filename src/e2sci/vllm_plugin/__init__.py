"""What vLLM loads so that drafts from edges enter its own speculative decoding.

    gateway  e2sci cloud --engine vllm-native      vLLM  --speculative-config '{"method":
             windows of all its edges ── drafts ──►      "custom_class", "model":
                     (wire, a local socket)              "e2sci.vllm_plugin.Proposer", …}'
                                                         store ── propose() in every step

It knows requests by what they say and by nothing else: a draft is kept under the hash of all tokens
before it (`store`), so nothing of vLLM is touched but the documented call (`proposer`). It never
waits, and a draft that is wrong, late or missing costs speed at most. This room imports no other,
and no more than vLLM has installed anyway: numpy, msgspec, pyzmq.
"""

from e2sci.vllm_plugin.proposer import Proposer

__all__ = ["Proposer"]
