"""A vLLM server as it decodes by itself: token ids in, a stream of token ids out.

One request of /v1/completions a text, with `stream` and `return_token_ids`: each event holds what
one step has made final (several steps', if the reader was slow). Closing the stream ends the
request at the server. The drafts that a step may find go another way (`vllm_plugin`); `counters`
tells how many of them were right.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from e2sci.decoding.sampling import SamplingParams
from e2sci.engines.base import EngineError
from e2sci.engines.remote import (
    CONNECT_TIMEOUT,
    MAX_ANSWER,
    Busy,
    base_url,
    complaint,
    http_library,
    one_line,
)
from e2sci.engines.vllm import by_id

T = TypeVar("T")

SILENT_SECONDS = 120.0
"""How long a stream may say nothing: a prompt is read, or the server's queue is long."""
MAX_EVENT = 1 << 20
"""Bytes of one event at most."""

_LEAST = -9999.0  # how vLLM spells -inf
_COUNTED = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "generation_tokens")


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class _Version(msgspec.Struct):
    version: str


@dataclass(frozen=True)
class Scored:
    """The log-probability of a token at temperature 1 in nats, and the best ids with theirs, most
    probable first."""

    log_prob: float
    best: list[tuple[int, float]]


@dataclass(frozen=True)
class Delivered:
    """Ids that have become final, with `scores` if they were asked for."""

    ids: list[int]
    scores: list[Scored]


@dataclass(frozen=True)
class Counters:
    """Of a server since its start: draft tokens judged and accepted, tokens written."""

    judged: float
    accepted: float
    written: float


class Streaming:
    """The vLLM server at `url` (http://host:port), asked for `model`. `key`: sent as a bearer
    token. Its methods raise EngineError, and Busy where another server may help."""

    def __init__(self, url: str, model: str, key: str | None = None) -> None:
        self.url, self._http = base_url(url), http_library()
        self._model = model
        self._client = self._http.AsyncClient(
            timeout=self._http.Timeout(SILENT_SECONDS, connect=CONNECT_TIMEOUT),
            limits=self._http.Limits(max_connections=None, max_keepalive_connections=64),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def stream(
        self,
        ids: Sequence[int],
        most: int,
        sampling: SamplingParams,
        *,
        eos: Collection[int] = (),
        top: int | None = None,
    ) -> AsyncGenerator[Delivered, None]:
        """Nothing, once the server has taken the request; then what comes behind `ids`: `most` ≥ 1
        tokens, or fewer with one of `eos` the last (without any, the model's own don't end it).
        `top`: how many of the best to score tokens with, None for no scores. To be closed
        (`aclosing`), which ends the request."""
        body = self._body(ids, most, sampling, eos, top)
        async with self._answer("POST", "/v1/completions", body) as response:
            yield Delivered([], [])
            async for data in self._events(response):
                event = self._decoded(data, _Event)
                if event.error is not None:
                    raise Busy(f"{self.url} failed in mid-answer: {one_line(event.error)}")
                for choice in event.choices:
                    if choice.finish_reason not in (None, "stop", "length"):
                        raise Busy(f"{self.url} gave up in mid-answer ({choice.finish_reason})")
                    yield Delivered(choice.token_ids, self._scores(choice, top))
                    if choice.finish_reason:
                        return
        raise Busy(f"{self.url} broke off in mid-answer")

    async def version(self) -> str:
        """Of the server's vLLM."""
        return self._decoded(await self._get("/version"), _Version).version

    async def counters(self) -> Counters:
        """What it has counted, of all its engines together."""
        sums = dict.fromkeys(_COUNTED, 0.0)
        text = (await self._get("/metrics")).decode("utf-8", errors="replace")
        try:
            for family in text_string_to_metric_families(text):
                name = family.name.removeprefix("vllm:")
                if name in sums:
                    sums[name] = sum(s.value for s in family.samples if s.name.endswith("_total"))
        except ValueError as error:
            raise EngineError(f"{self.url}/metrics gave an unexpected answer: {error}") from None
        return Counters(*sums.values())

    def _body(
        self,
        ids: Sequence[int],
        most: int,
        sampling: SamplingParams,
        eos: Collection[int],
        top: int | None,
    ) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": most,
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": not eos,
            "stop_token_ids": sorted(eos),
            # All of them, or the defaults of the model's own generation_config.json would hold.
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "seed": sampling.seed,
        }
        if top is not None:
            body |= {"logprobs": top, "return_tokens_as_token_ids": True}
        return body

    def _scores(self, choice: _Choice, top: int | None) -> list[Scored]:
        if top is None or choice.logprobs is None:
            return []
        own, rows = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        # A row begins with the token itself, wherever among the best it is.
        best = [
            sorted(
                ((token, _nats(p)) for token, p in by_id(row, self.url)),
                key=lambda pair: -pair[1],
            )[:top]
            for row in rows
        ]
        if not len(own) == len(best) == len(choice.token_ids):
            raise EngineError(f"{self.url} didn't give log-probs for each token")
        return [Scored(_nats(p), row) for p, row in zip(own, best, strict=True)]

    # ---- HTTP -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: object = None) -> AsyncIterator[Any]:
        """The answer to a request, if it is none of refusal."""
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._client.stream(
                method, self.url + path, content=content, headers=headers
            ) as response:
                if response.status_code != 200:
                    raise self._refusal(path, response.status_code, await self._whole(response))
                yield response
        except (self._http.ConnectError, self._http.ConnectTimeout) as error:
            raise Busy(f"no server answers at {self.url} ({error}); is it running?") from error
        except self._http.TimeoutException as error:
            raise Busy(f"{self.url}{path} said nothing for {SILENT_SECONDS:g} s") from error
        except (self._http.HTTPError, self._http.InvalidURL) as error:
            raise Busy(f"{self.url}{path} broke off: {one_line(error)}") from error

    async def _get(self, path: str) -> bytes:
        async with self._answer("GET", path) as response:
            return await self._whole(response)

    async def _whole(self, response: Any) -> bytes:
        data = bytearray()
        async for part in response.aiter_bytes():
            data += part
            if len(data) > MAX_ANSWER:
                raise EngineError(f"{self.url} answered with more than {MAX_ANSWER >> 20} MiB")
        return bytes(data)

    async def _events(self, response: Any) -> AsyncIterator[bytes]:
        """The data of server-sent events, as vLLM writes them: one line each."""
        held = b""
        async for part in response.aiter_bytes():
            *lines, held = (held + part).split(b"\n")
            if len(held) > MAX_EVENT:
                raise EngineError(f"{self.url} sent an event of more than {MAX_EVENT >> 20} MiB")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if data and data != line.strip() and data != b"[DONE]":
                    yield data

    def _refusal(self, path: str, status: int, data: bytes) -> EngineError:
        said = f"{self.url}{path} answered {status}: {complaint(status, data)}"
        return Busy(said) if status >= 500 or status == 429 else EngineError(said)

    def _decoded(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise EngineError(
                f"{self.url} gave an unexpected answer: {error}; is it a vLLM server?"
            ) from None


def _nats(p: float) -> float:
    return float("-inf") if p <= _LEAST else p
