"""An engine in front of a vLLM server, through its OpenAI-compatible /v1/completions.

A pass asks, for each distribution wanted, for one token behind one prefix, with its k best
log-probabilities: prefixes P t₁, P t₁t₂, P t₁t₂t₃ … in a single request. All of them share vLLM's
prefix cache, so that only what lies behind the last full cache block is computed.

vLLM's own way to several positions of one prompt is `prompt_logprobs`, but that makes it compute
the whole prefix anew in each pass (it leaves the prefix cache unread, since nothing is kept of
cached positions but their keys and values) and write k log-probabilities for every position of the
prompt. docs/engines.md has both measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from e2sci.decoding.distribution import TopK
from e2sci.engines.base import EngineError, Step
from e2sci.engines.remote import Remote

_PREFIX = "token_id:"  # how ids are spelled on request


class _LogProbs(msgspec.Struct):
    top_logprobs: list[dict[str, float]]


class _Choice(msgspec.Struct):
    index: int
    logprobs: _LogProbs


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class Vllm(Remote):
    """A model on a vLLM server; see Remote. The server's `--max-logprobs` (20) bounds `top`."""

    def ask(self, work: Sequence[Step]) -> list[list[TopK]]:
        prompts = [s.tokens[: len(s.tokens) - n] for s in work for n in reversed(range(s.outputs))]
        if not prompts:
            return []
        body = {
            "model": self.info.name,
            "prompt": prompts,
            "max_tokens": 1,
            "temperature": 0,
            "repetition_penalty": 1.0,  # or the model's own default moves the token it takes
            "logprobs": self.info.top,
            "return_tokens_as_token_ids": True,
        }
        choices = self._server.post("/v1/completions", body, _Completion).choices
        rows = {choice.index: choice.logprobs.top_logprobs for choice in choices}
        if sorted(rows) != list(range(len(prompts))) or any(len(row) != 1 for row in rows.values()):
            raise EngineError(
                f"{self._server.url} didn't give one row of log-probs for each of "
                f"{len(prompts)} prompts"
            )
        tops = iter([self._row(rows[i][0]) for i in range(len(prompts))])
        return [[next(tops) for _ in range(step.outputs)] for step in work]

    def _row(self, row: dict[str, float]) -> TopK:
        return self._top(by_id(row, self._server.url))


def by_id(row: dict[str, float], url: str) -> list[tuple[int, float]]:
    """Log-probabilities by token id, in the order of `row`, which names tokens as the server at
    `url` spells ids on request. Raises EngineError on tokens by their text."""
    try:
        return [(int(name.removeprefix(_PREFIX)), p) for name, p in row.items()]
    except ValueError:
        raise EngineError(f"{url} gave tokens as text, not as ids; is it a vLLM server?") from None
