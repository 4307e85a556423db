"""A stand-in for a vLLM server with the proposer in it: real proposer, synthetic model.

with StreamingServer(address) as server: … server.url …   It decodes on and on, `seconds` a step,
and judges in each what the proposer finds. `die`: steps behind which a stream breaks off, for each
of the next requests; `steps`: tokens of each step, by request.
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np

from e2sci.decoding.sampling import History, SamplingParams, pick
from e2sci.engines.base import Step
from e2sci.engines.synthetic import REAL_VOCAB, Synthetic
from e2sci.vllm_plugin import Proposer
from remote_servers import MODEL, StandIn, demand

MOST = 6
SHAPE = {
    "model": str,
    "prompt": list,
    "max_tokens": int,
    "stream": bool,
    "return_token_ids": bool,
    "ignore_eos": bool,
    "stop_token_ids": list,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "seed": int,
}
SCORES = {"logprobs": int, "return_tokens_as_token_ids": bool}


class StreamingServer(StandIn):
    """`address`: where its proposer takes drafts; empty: it has none."""

    path = "/v1/completions"

    def __init__(
        self, address: str = "", *, seconds: float = 0.0, version="0.32.0", **more
    ) -> None:
        super().__init__(**more)
        self.address, self.seconds, self.version = address, seconds, version
        self.die: list[int] = []
        self.broken = False
        self.steps: list[list[int]] = []
        self.proposer: Proposer | None = None

    def __enter__(self):
        if self.address:
            config = SimpleNamespace(
                speculative_config=SimpleNamespace(num_speculative_tokens=MOST),
                model_config=SimpleNamespace(
                    max_model_len=self.max_len, get_vocab_size=lambda: REAL_VOCAB
                ),
                parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_index=0),
            )
            self.proposer = Proposer(config, self.address)
            assert self.proposer._receiver is not None
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self.proposer:
            self.proposer.close()

    def get(self, path, headers):
        if path == "/version":
            return 200, {"version": self.version}
        if path == "/metrics":
            return 200, b"vllm:generation_tokens_total 5.0\n"
        return super().get(path, headers)

    def answer(self, request):
        shape = SHAPE | (SCORES if "logprobs" in request else {})
        demand({k: type(v) for k, v in request.items()} == shape, f"unknown fields: {request}")
        demand(request["model"] == MODEL, f"The model `{request['model']}` does not exist.")
        ids, most = request["prompt"], request["max_tokens"]
        demand(request["stream"] and request["return_token_ids"], "expected a stream of ids")
        demand(len(ids) + most <= self.max_len, f"at most {self.max_len} tokens")
        return self._stream(request, self.die.pop(0) if self.die else None)

    def error(self, message):
        return {"error": {"message": message, "type": "BadRequestError", "code": 400}}

    def _stream(self, request, die):
        steps: list[int] = []
        self.steps.append(steps)
        engine = Synthetic(self._engine.config, 1)
        sampling = SamplingParams(temperature=request["temperature"], seed=request["seed"])
        history = History(request["prompt"])
        end = len(history) + request["max_tokens"]
        while die is None or len(steps) < die:
            time.sleep(self.seconds)
            rows = self._judged(engine, history, sampling)
            ended = self._ends(request, rows, end - len(history) + len(rows))
            del rows[ended or len(rows) :]
            steps.append(len(rows))
            yield self._event(rows, request.get("logprobs"), ended)
            if ended:
                yield b"data: [DONE]\n\n"
                return

    def _judged(self, engine, history, sampling):
        """(token, distribution) of what one step makes final."""
        drafts = self._drafts(history.tokens)
        held = engine.length(0)
        fed = [*history.tokens[held:], *drafts]
        rows = engine.forward([Step(0, fed, len(drafts) + 1)])[0]
        final = []
        for p, draft in zip(rows, [*drafts, None], strict=True):
            token = pick(p, sampling, history)
            if self.broken and drafts and not sampling.greedy:
                token = len(history) % 200  # as vLLM's CPU builds: whatever is there
            history.append(token)
            final.append((token, p))
            if token != draft:
                break
        engine.truncate(0, len(history) - 1)
        return final

    def _drafts(self, tokens):
        if self.proposer is None or len(tokens) >= self.max_len:
            return []
        with self._lock:
            row = np.array([tokens], dtype=np.int32)
            return self.proposer.propose([tokens[-1:]], np.array([len(tokens)]), row)[0]

    def _ends(self, request, rows, room):
        """How many of `rows` end the text; 0 if it goes on."""
        for n, (token, _) in enumerate(rows, 1):
            if n == room or token in request["stop_token_ids"]:
                return n
        return 0

    def _event(self, rows, k, ended):
        choice = {"index": 0, "text": "?", "token_ids": [token for token, _ in rows]}
        choice["finish_reason"] = "stop" if ended else None
        if k is not None:
            choice["logprobs"] = {
                "token_logprobs": [float(p.log_prob(np.array([t]))[0]) for t, p in rows],
                "top_logprobs": [self._top(t, p, k) for t, p in rows],
            }
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    def _top(self, token, p, k):
        ids = [token, *(p.top(k).ids.tolist() if k else [])]
        return {f"token_id:{t}": float(p.log_prob(np.array([t]))[0]) for t in ids}
