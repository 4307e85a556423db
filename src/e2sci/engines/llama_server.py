"""A draft model on llama.cpp's own server, through its native /completion.

A distribution is one call: the whole prefix as ids, one token to generate, its k best
log-probabilities. `id_slot` gives each sequence a slot of the server's, whose cache then holds the
prefix but for what is new (`cache_prompt`).

    completion_probabilities   one entry, for the token generated
        top_logprobs           {id, logprob, …} of the k best, by the model's raw logits: samplers,
                               penalties and biases have no say in it (`post_sampling_probs` off)

The token generated is thrown away, and forced: for one that ends within a character the server
gives no entry, so a bias makes it generate a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from e2sci.decoding.distribution import TopK
from e2sci.engines.base import EngineError, Step
from e2sci.engines.remote import CONNECT_TIMEOUT, Model, Remote, Server

_FORCE = 10_000.0  # nats: beyond what any logit is


class _Settings(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    default_generation_settings: _Settings  # of one slot
    model_path: str


class _Token(msgspec.Struct):
    id: int
    logprob: float


class _Position(msgspec.Struct):
    top_logprobs: list[_Token]


class _Completion(msgspec.Struct):
    completion_probabilities: list[_Position]


class LlamaServer(Remote):
    """The model that a llama-server runs; see Remote. It runs one, so `model` says nothing."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._whole = self.tokenizer.encode("a", special=False)[0]

    def ask(self, work: Sequence[Step]) -> list[list[TopK]]:
        return [
            [
                self._behind(step.tokens[: len(step.tokens) - n], step.sequence)
                for n in reversed(range(step.outputs))
            ]
            for step in work
        ]

    def _behind(self, ids: Sequence[int], sequence: int) -> TopK:
        body = {
            "prompt": ids,
            "n_predict": 1,
            "n_probs": self.info.top,
            "post_sampling_probs": False,
            "cache_prompt": True,
            "id_slot": sequence,
            "samplers": ["top_k"],
            "top_k": 1,
            "logit_bias": [[self._whole, _FORCE]],
            "response_fields": ["completion_probabilities"],
        }
        found = self._server.post("/completion", body, _Completion).completion_probabilities
        if len(found) != 1:
            raise EngineError(f"{self._server.url} gave {len(found)} rows of log-probs, not one")
        return self._top((token.id, token.logprob) for token in found[0].top_logprobs)

    def _served(self, model: str | None) -> Model:
        props = self._server.get("/props", _Props)
        n_ctx = props.default_generation_settings.n_ctx
        return Model(model or Path(props.model_path).stem, n_ctx)


def served_file(url: str, key: str | None) -> Path | None:
    """The GGUF file of the model, if the server says which and it is on this machine. Raises
    EngineError if no llama-server answers."""
    server = Server(url, key, CONNECT_TIMEOUT)
    try:
        path = Path(server.get("/props", _Props).model_path)
        return path if path.suffix == ".gguf" and path.is_file() else None
    except (OSError, ValueError):  # too long, a null byte
        return None
    finally:
        server.close()
