"""The edge: a draft model, a connection to a cloud, and `generate` / `stream` on top.

    async with Edge("ws://127.0.0.1:7071", engine) as edge:
        async for piece in edge.stream("Why is the sky blue?", max_tokens=100):
            print(piece.text, end="")
        result = await edge.generate("And the sea?", accept="elastic")

    with BlockingEdge("ws://127.0.0.1:7071", engine) as edge:      # without asyncio
        print(edge.generate("Why is the sky blue?").text)

Any number of generations may run at once; they share the connections and the draft engine's thread.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import fields, replace
from typing import Any, TypeVar

import msgspec

from e2sci.decoding.sampling import SamplingParams
from e2sci.engines.base import Engine
from e2sci.runtime.alone import alone
from e2sci.runtime.auto import Learnt
from e2sci.runtime.background import Background
from e2sci.runtime.caches import Cache, Caches
from e2sci.runtime.cloud import require_truncation
from e2sci.runtime.clouds import Clouds
from e2sci.runtime.connection import Connector, EdgeError
from e2sci.runtime.drafter import Drafter
from e2sci.runtime.options import Options, Piece, Result
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.record import Record
from e2sci.runtime.request import Request
from e2sci.runtime.text import Prompt, TextStream, prompt_ids
from e2sci.runtime.transport import HEARTBEAT_SECONDS, Dial
from e2sci.runtime.worker import ThreadWorker, Worker
from e2sci.session.messages import Welcome

log = logging.getLogger("e2sci.edge")

T = TypeVar("T")

_SAMPLING = {f.name for f in msgspec.structs.fields(SamplingParams)}
_OPTIONS = {f.name for f in fields(Options)}


def options_from(base: Options, changes: dict[str, Any]) -> Options:
    """`base` with options and sampling parameters replaced by name. Raises ValueError."""
    unknown = sorted(changes.keys() - _OPTIONS - _SAMPLING)
    if unknown:
        raise ValueError(f"no such option: {', '.join(unknown)}")
    sampling = {k: v for k, v in changes.items() if k in _SAMPLING}
    rest = {k: v for k, v in changes.items() if k in _OPTIONS}
    if sampling:
        chosen = rest.get("sampling", base.sampling)
        # Not structs.replace: the constructor checks ranges.
        rest["sampling"] = SamplingParams(**{**msgspec.structs.asdict(chosen), **sampling})
    return replace(base, **rest)


class Edge:
    """A draft engine that writes with a cloud. Use as an async context manager.

    `cloud`: a WebSocket URL or a function that opens a channel; several of them for replicas that
    serve one model (see `clouds` for their order); None for `mode="draft"` only. `engine`: the
    draft model; for `mode="cloud"` only its tokenizer is used. `patience`: seconds for which a
    cloud is waited for that is absent, lost or without a place. `options`: defaults of every
    generation. `worker`: what runs the engine's calls, a thread by default; closed with the edge.
    `keep_caches`: let the draft's caches outlive a generation, so that the next prompt of a
    conversation is read only from where it differs; not for users who must not know of each other.

    For URLs: `api_key`, `tls`, `allow_insecure` and `heartbeat_s` as in `transport.Dial`. Raises
    ValueError on a URL or a key that can't be used.
    """

    def __init__(
        self,
        cloud: str | Connector | Sequence[str | Connector] | None,
        engine: Engine,
        *,
        patience: float = 15.0,
        options: Options | None = None,
        worker: Worker | None = None,
        keep_caches: bool = False,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        allow_insecure: bool = False,
        heartbeat_s: float = HEARTBEAT_SECONDS,
    ) -> None:
        if not patience >= 0:
            raise ValueError(f"patience is {patience}; expected 0 seconds or more")
        given = cloud if isinstance(cloud, Sequence) and not isinstance(cloud, str) else [cloud]
        connectors = [
            Dial(c, api_key, tls, allow_insecure, heartbeat_s) if isinstance(c, str) else c
            for c in given
            if c is not None
        ]
        self.engine = engine
        self.options = options or Options()
        self._patience = patience
        self._worker = worker or ThreadWorker("draft")
        self._keep_caches = keep_caches
        self._free = Caches(engine.slots)
        self._turn = asyncio.Semaphore(engine.slots)
        self._learnt = Learnt()
        self._known = Clouds(connectors, engine) if connectors else None

    async def __aenter__(self) -> Edge:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._known is not None:
            await self._known.close()
        if self._keep_caches:
            await self._worker.submit(self._empty)
        self._worker.close()

    async def connect(self, *, patience: float = 0.0) -> list[str]:
        """Connect now, not at the first generation; returns notices about the pair of models, and
        about clouds that were left out.

        Raises CloudUnreachable, or Refused when the two can't work together.
        """
        notices: list[str] = []
        connection = await self._clouds.ensure(patience, tell=notices.append)
        return notices + connection.notices

    async def ping(self) -> float:
        """Seconds of one round trip to the cloud. Raises CloudUnreachable."""
        connection = await self._clouds.ensure(self._patience, tell=log.info)
        return await connection.ping()

    @property
    def has_cloud(self) -> bool:
        """Whether it knows of a cloud, be that reachable or not."""
        return self._known is not None

    @property
    def rtt_s(self) -> float | None:
        """Seconds of a round trip to the nearest cloud as last measured; None before. Raises
        ValueError without a cloud."""
        return self._clouds.rtt_s

    @property
    def pass_times(self) -> PassTimes:
        """The cloud's pass times, as it measured them. Raises ValueError before `connect`."""
        return PassTimes(self._welcome.pass_ms)

    @property
    def cloud_model(self) -> str:
        """Name of the target model. Raises ValueError before `connect`."""
        return self._welcome.model

    @property
    def _welcome(self) -> Welcome:
        welcome = self._clouds.welcome
        if welcome is None:
            raise ValueError("not connected yet; call connect() first")
        return welcome

    async def stream(self, prompt: Prompt, **changes: Any) -> AsyncGenerator[Piece, None]:
        """Generate; text and tokens as they become final. The last piece carries the `result`.

        `changes`: fields of Options and of SamplingParams. Raises ValueError on bad input and
        EdgeError (CloudUnreachable, Refused, CloudLost with the text so far) when it can't go on.
        """
        options = options_from(self.options, changes)
        if options.mode in ("sync", "pipelined", "auto"):
            require_truncation(self.engine)
        self._require_known(options.sampling.logit_bias)
        ids = prompt_ids(self.engine, prompt, system=options.system, raw=options.raw)
        pieces = (
            self._locally(ids, options) if options.mode == "draft" else self._both(ids, options)
        )
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def generate(self, prompt: Prompt, **changes: Any) -> Result:
        """`stream` to its end; the whole result."""
        async with aclosing(self.stream(prompt, **changes)) as pieces:
            async for piece in pieces:
                if piece.result is not None:
                    return piece.result
        raise EdgeError("the stream ended without a result")

    # ---- ways to generate -----------------------------------------------------------------

    async def _both(self, ids: list[int], options: Options) -> AsyncGenerator[Piece, None]:
        notices: list[str] = []
        async with AsyncExitStack() as stack:
            cache = None if options.mode == "cloud" else await self._cache(stack, ids)
            # Last, so that nothing is awaited between having a connection and using it.
            connection = await self._clouds.ensure(self._patience, tell=notices.append)
            welcome = connection.welcome
            assert welcome is not None
            drafter, context = None, welcome.context
            if cache is not None:
                context = min(context, self.engine.info.context)
                drafter = Drafter(
                    self.engine,
                    cache,
                    rule=options.rule,
                    sampling=options.sampling,
                    vocab=welcome.shared_vocab,
                    trace=options.trace,
                )
            limit = self._limit(ids, options, context)
            record = Record(TextStream(self.engine.tokenizer, options.stop), frozenset(welcome.eos))
            request = Request(
                self._clouds,
                connection,
                welcome,
                self._patience,
                self._worker,
                drafter,
                record,
                ids,
                options,
                limit,
                self._learnt,
            )
            for notice in notices:
                request.tell(notice)
            async with aclosing(request.pieces()) as pieces:
                async for piece in pieces:
                    yield piece

    async def _locally(self, ids: list[int], options: Options) -> AsyncGenerator[Piece, None]:
        """The draft model alone."""
        info = self.engine.info
        limit = self._limit(ids, options, info.context)
        record = Record(TextStream(self.engine.tokenizer, options.stop), info.eos_ids)
        async with AsyncExitStack() as stack:
            cache = await self._cache(stack, ids)
            pieces = alone(self.engine, self._worker, cache, record, ids, options, limit)
            async for piece in await stack.enter_async_context(aclosing(pieces)):
                yield piece

    # ---- resources ------------------------------------------------------------------------

    @property
    def _clouds(self) -> Clouds:
        if self._known is None:
            raise ValueError("this edge has no cloud; give a URL, or use mode='draft'")
        return self._known

    def _require_known(self, tokens: Iterable[int]) -> None:
        most = self.engine.info.vocab_size
        if unknown := [token for token in tokens if token >= most]:
            raise ValueError(f"logit_bias names token {unknown[0]}; ids lie below {most}")

    async def _cache(self, stack: AsyncExitStack, ids: list[int]) -> Cache:
        """A free sequence of the draft engine, with what it holds of `ids`; given back when `stack`
        closes: emptied, or with its tokens once the worker is done with it."""
        await self._turn.acquire()
        cache = self._free.take(ids)

        def free(settled: asyncio.Future[None] | None = None) -> None:
            sure = settled is not None and not (settled.cancelled() or settled.exception())
            self._free.give(cache.sequence, cache.tokens if sure else ())
            self._turn.release()

        def give_back() -> None:
            try:
                if self._keep_caches:
                    settling = self._worker.submit(lambda: cache.settle(self.engine))
                    settling.add_done_callback(free)
                    return
                self._worker.submit(lambda: self.engine.truncate(cache.sequence, 0))
            except RuntimeError:  # the worker is closed when the edge is
                pass
            free()

        stack.callback(give_back)
        return cache

    def _empty(self) -> None:
        for sequence in range(self.engine.slots):
            self.engine.truncate(sequence, 0)

    def _limit(self, ids: list[int], options: Options, context: int) -> int:
        if len(ids) >= context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; the context holds {context} and needs room "
                "for at least one more: shorten it, or raise --context at both ends"
            )
        return min(options.max_tokens, context - len(ids))


class BlockingEdge:
    """An `Edge` without asyncio: the same arguments, on an event loop in a thread of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._background = Background()
        self._edge = Edge(*args, **kwargs)

    def __enter__(self) -> BlockingEdge:
        self._background.__enter__()
        self._run(self._edge.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._edge.__aexit__())
        self._background.__exit__()

    def generate(self, prompt: Prompt, **changes: Any) -> Result:
        """As Edge.generate."""
        return self._run(self._edge.generate(prompt, **changes))

    def stream(self, prompt: Prompt, **changes: Any) -> Iterator[Piece]:
        """As Edge.stream."""
        pieces = self._edge.stream(prompt, **changes)
        try:
            while True:
                try:
                    yield self._run(anext(pieces))
                except StopAsyncIteration:
                    return
        finally:
            self._run(pieces.aclose())

    def _run(self, call: Awaitable[T]) -> T:
        return self._background.run(call)
