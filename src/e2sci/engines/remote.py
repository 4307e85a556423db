"""What engines in front of a running server share: the gateway's half of a pass.

    forward ── plan: check, ids of each sequence ──► ask: HTTP, by the API's own file
            ◄── grow the sequences ──────────────── top-k distributions

Such a server keeps no sequence of ours. Here a sequence is a list of ids, `truncate` cuts the list,
and each pass sends whole prefixes; what the server remembers of them is its prefix cache's affair.
So a pass may be sent again after a broken connection, and one that fails leaves everything as it
was. The server gives log-probabilities of the k best tokens a position: `ModelInfo.top` says so.
"""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from e2sci.decoding.distribution import Distribution, TopK
from e2sci.engines.base import EngineError, ModelInfo, Step, require_feasible
from e2sci.engines.hf_tokenizer import Description, describe

T = TypeVar("T")

MAX_ANSWER = 1 << 25
"""Bytes of one answer at most: 16 sequences with 65 outputs of 100 tokens each fit."""

CONNECT_TIMEOUT = 5.0
_TRIES = 3
BUSY = frozenset({429, 502, 503, 504})


class Busy(EngineError):
    """The server can't be reached or is overloaded: worth another try."""


class Model(msgspec.Struct):
    """One entry of /v1/models; both servers add how long a sequence may be."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model]


class Remote(ABC):
    """An engine whose passes are calls to a server at `url` (http://host:port).

    `model`: its name there (None: the first one served); `tokenizer`: folder, owner/repo, or a
    Description; `key`: sent as a bearer token; `slots`: sequences at once; `context`: tokens a
    sequence may have if less than the server allows; `timeout`: seconds for one pass; `top`:
    log-probabilities a position to ask for. Raises EngineError if it can't be used.
    """

    def __init__(
        self,
        url: str,
        *,
        tokenizer: str | Path | Description,
        model: str | None = None,
        key: str | None = None,
        slots: int = 16,
        context: int | None = None,
        timeout: float = 60.0,
        top: int = 20,
    ) -> None:
        if slots < 1 or top < 1:
            raise EngineError(f"{slots} slots and {top} log-probs; expected at least one of each")
        about = tokenizer if isinstance(tokenizer, Description) else describe(tokenizer)
        self.slots = slots
        self.tokenizer = about.tokenizer
        self._server = Server(url, key, timeout)
        try:
            self.info = info_of(about, self._served(model), context, top)
        except BaseException:
            self.close()
            raise
        self._sequences: list[list[int]] = [[] for _ in range(slots)]

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        """One pass. Also raises ValueError on steps that make no sense, and EngineError when the
        server fails; either leaves every sequence as it was."""
        require_feasible(self, steps)
        grown = [
            Step(s.sequence, [*self._sequences[s.sequence], *s.tokens], s.outputs) for s in steps
        ]
        answers = iter(self.ask([step for step in grown if step.outputs]))
        outputs: list[list[Distribution]] = [
            list(next(answers)) if step.outputs else [] for step in steps
        ]
        for step in grown:
            self._sequences[step.sequence] = list(step.tokens)
        return outputs

    @abstractmethod
    def ask(self, work: Sequence[Step]) -> list[list[TopK]]:
        """For each step, whose tokens are the whole sequence: what comes behind each of the last
        `outputs` ≥ 1."""

    def length(self, sequence: int) -> int:
        return len(self._sequences[self._checked(sequence)])

    def truncate(self, sequence: int, length: int) -> None:
        """Also raises ValueError if `length` is not 0 … the present length."""
        held = self.length(sequence)
        if not 0 <= length <= held:
            raise ValueError(f"can't cut a sequence of {held} tokens to {length}")
        del self._sequences[sequence][length:]

    def close(self) -> None:
        self._server.close()

    def _served(self, model: str | None) -> Model:
        """What the server says of the model. Raises EngineError."""
        return self._server.served(model)

    def _checked(self, sequence: int) -> int:
        if not 0 <= sequence < self.slots:
            raise ValueError(f"sequence {sequence} is out of range; slots: {self.slots}")
        return sequence

    def _top(self, found: Iterable[tuple[int, float]]) -> TopK:
        """A distribution from (id, log-prob) pairs. Raises EngineError on what can't be one."""
        known = dict(found)
        ids = np.fromiter(known.keys(), dtype=np.int64)
        log_probs = np.fromiter(known.values(), dtype=np.float64)
        size = self.info.vocab_size
        if len(ids) < min(self.info.top or 1, size):
            raise EngineError(
                f"{self._server.url} gave {len(ids)} log-probs a position; expected {self.info.top}"
            )
        if ids.min() < 0 or ids.max() >= size:
            raise EngineError(
                f"{self._server.url} knows token ids from {size} on; is the tokenizer the model's, "
                "with its config.json?"
            )
        if np.isnan(log_probs).any() or np.exp(log_probs).sum() > 1.01:
            raise EngineError(f"{self._server.url} gave log-probs that are no distribution")
        return TopK(ids, log_probs, size)


class Server:
    """JSON to and from one HTTP server, within bounds of size and time."""

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        self.url, self._http = base_url(url), http_library()
        self._timeout = timeout
        self._client = self._http.Client(
            timeout=self._http.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT)),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    def get(self, path: str, kind: type[T]) -> T:
        """The answer to a GET. Raises EngineError."""
        return self._call("GET", path, None, kind)

    def post(self, path: str, body: object, kind: type[T]) -> T:
        """The answer to a POST of `body` as JSON. Raises EngineError."""
        return self._call("POST", path, msgspec.json.encode(body), kind)

    def served(self, model: str | None) -> Model:
        """The model of that name, None for the first one. Raises EngineError if it hasn't got
        it."""
        models = self.get("/v1/models", _Models).data
        found = [m for m in models if model in (None, m.id)]
        if not found:
            names = ", ".join(m.id for m in models[:10]) or "nothing"
            raise EngineError(f"{self.url} doesn't serve {model}; it serves {names}")
        return found[0]

    def close(self) -> None:
        self._client.close()

    def _call(self, method: str, path: str, body: bytes | None, kind: type[T]) -> T:
        again = Retrying(
            retry=retry_if_exception_type(Busy),
            stop=stop_after_attempt(_TRIES),
            wait=wait_exponential(multiplier=0.1, max=1.0),
            reraise=True,
        )
        status, data = again(self._once, method, path, body)
        if status != 200:
            raise EngineError(f"{self.url}{path} answered {status}: {complaint(status, data)}")
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise EngineError(f"{self.url}{path} gave an unexpected answer: {error}") from None

    def _once(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Status and body of one try. Raises Busy when another may help."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            with self._client.stream(
                method, self.url + path, content=body, headers=headers
            ) as response:
                status, data = response.status_code, self._read(response)
        except (self._http.ConnectError, self._http.ConnectTimeout) as error:
            raise Busy(f"no server answers at {self.url} ({error}); is it running?") from error
        except self._http.TimeoutException as error:
            raise EngineError(
                f"{self.url}{path} gave no answer within {self._timeout:g} s"
            ) from error
        except (self._http.HTTPError, self._http.InvalidURL) as error:
            raise Busy(f"{self.url}{path} can't be asked: {one_line(error)}") from error
        if status in BUSY:
            raise Busy(f"{self.url}{path} answered {status}: {complaint(status, data)}")
        return status, data

    def _read(self, response: Any) -> bytes:
        """The body. The library bounds the wait for each part; this, the whole."""
        data, until = bytearray(), time.monotonic() + self._timeout
        for part in response.iter_bytes():
            data += part
            if len(data) > MAX_ANSWER:
                raise EngineError(f"{self.url} answered with more than {MAX_ANSWER >> 20} MiB")
            if time.monotonic() > until:
                raise EngineError(f"{self.url} took longer than {self._timeout:g} s to answer")
        return bytes(data)


def base_url(url: str) -> str:
    """A server's address without a path. Raises EngineError if it is none."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise EngineError(f"{url!r} is no server's address; expected http://HOST:PORT")
    return base


def http_library() -> Any:
    """httpx, which is an extra. Raises EngineError without it."""
    try:
        return importlib.import_module("httpx")
    except ImportError as error:
        raise EngineError('httpx is missing; run: pip install "e2sci[gateway]"') from error


def info_of(
    about: Description, served: Model, context: int | None, top: int | None = None
) -> ModelInfo:
    """What a server's model is like. Raises EngineError if its context isn't known."""
    # One token of a server's context goes to the token that it must generate.
    known = None if served.max_model_len is None else served.max_model_len - 1
    room = [n for n in (context, known or about.context) if n is not None]
    if not room or min(room) < 1:
        raise EngineError(
            f"the server doesn't say how many tokens {served.id} holds; set a context"
        )
    size = max(about.vocab_size or 0, about.real_vocab)
    return ModelInfo(
        name=served.id,
        vocab_size=size,
        real_vocab=about.real_vocab,
        context=min(room),
        eos_ids=about.eos_ids,
        template=about.template,
        bos=about.bos,
        eos=about.eos,
        top=None if top is None else min(top, size),
    )


def complaint(status: int, data: bytes) -> str:
    """What a server says is wrong, in one line."""
    if status in (401, 403):
        return "it wants an API key, or another one"
    try:
        said = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        said = data.decode("utf-8", errors="replace")
    while isinstance(said, dict):
        said = next((said[k] for k in ("error", "message", "detail") if k in said), str(said))
    return one_line(said) or "it doesn't say why"


def one_line(said: object) -> str:
    return " ".join(str(said).split())[:200]
