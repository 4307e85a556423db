"""The cloud: a target model that verifies for any number of edges.

`Cloud.serve(channel)` is one connection from handshake to end: it reads frames, seats requests with
the scheduler, and sends what their sessions say. Errors stay as small as they are: a bad request
ends that request, a bad frame that connection, and neither touches anyone else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from e2sci.engines.base import Engine, fingerprint
from e2sci.runtime.admission import ANYONE, Bucket, Client, Limits
from e2sci.runtime.exactness import require_exact
from e2sci.runtime.metrics import Metrics
from e2sci.runtime.passes import PassTimes, measure_passes
from e2sci.runtime.scheduler import Scheduler, error_message
from e2sci.runtime.seat import Ended, Seat
from e2sci.runtime.text import template_print
from e2sci.runtime.transport import Channel, ChannelClosed
from e2sci.runtime.worker import ThreadWorker, Worker, now
from e2sci.session.cloud import CloudModel, CloudSession
from e2sci.session.messages import (
    VERSION,
    Cancel,
    Error,
    Hello,
    Message,
    Open,
    ProtocolError,
    Welcome,
    Window,
    decode_message,
    encode_message,
)

log = logging.getLogger("e2sci.cloud")

FAILED_SECONDS = 30.0
"""How long a cloud whose engine has failed says that it is not ready, unless a pass works."""
_AT_ONCE = 10.0  # seconds' worth of messages that may come at once


def different_vocabularies(edge: str, cloud: str) -> ProtocolError:
    """The error of two models that don't share their token ids."""
    return ProtocolError(
        "tokenizer",
        f"the edge's model {edge} and the cloud's {cloud} have different vocabularies, so token "
        "ids don't mean the same; use two models of one family",
    )


def require_truncation(engine: Engine) -> None:
    """Raises ValueError on a model whose cache can't be cut back."""
    if not engine.info.can_truncate:
        raise ValueError(
            f"{engine.info.name}: its cache can't be cut back after a rejection (recurrent or "
            "sliding-window); choose a model with plain attention"
        )


class Cloud:
    """An engine at the service of edges. Use as an async context manager.

    `times`: pass times if known; else they are measured at start. `worker`: what runs the engine's
    calls, a thread by default; closed with the cloud. `session` makes a request's session. `on_end`
    hears what became of each request. `keep_caches`: let what a request has read outlive it until
    its place is needed, for the same client's next turn of a conversation.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        session: Callable[[Open, CloudModel], CloudSession] = CloudSession,
        times: PassTimes | None = None,
        worker: Worker | None = None,
        limits: Limits | None = None,
        on_end: Callable[[Ended], None] | None = None,
        keep_caches: bool = False,
    ) -> None:
        require_truncation(engine)
        self.engine = engine
        self.times = times
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.draining = False
        self.scheduler: Scheduler | None = None
        self._session = session
        self._worker = worker or ThreadWorker("target")
        self._fingerprint = fingerprint(engine)
        self._on_end = on_end
        self._keep_caches = keep_caches
        self._nobodies = count(1)

    async def __aenter__(self) -> Cloud:
        if self.times is None:
            self.times = await self._worker.submit(lambda: measure_passes(self.engine))
        self.scheduler = Scheduler(
            self.engine,
            self._worker,
            self.times,
            limits=self.limits,
            metrics=self.metrics,
            on_end=self._on_end,
            keep_caches=self._keep_caches,
        )
        self._running = asyncio.create_task(self.scheduler.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running
        self._worker.close()

    async def serve(self, channel: Channel, client: Client | None = None) -> None:
        """One connection, until it ends. `client`: the key's holder; else each connection counts as
        a client of its own."""
        if client is None:
            client = replace(ANYONE, name=f"{ANYONE.name}-{next(self._nobodies)}")
        connection = _Connection(self, channel, client)
        self.metrics.connections.inc()
        try:
            await connection.run()
        finally:
            self.metrics.connections.dec()
            connection.leave()

    async def drain(self, seconds: float) -> bool:
        """Take no new request and let those under way end, for `seconds` at most; whether all did.
        An edge takes a refused or a cut request to another replica."""
        assert self.scheduler is not None
        self.draining = True
        self.metrics.draining.set(1)
        try:
            async with asyncio.timeout(seconds):
                await self.scheduler.empty.wait()
        except TimeoutError:
            return False
        return True

    @property
    def failing(self) -> bool:
        """Whether the engine has failed just now: for a while it is better left alone."""
        assert self.scheduler is not None
        at = self.scheduler.failed_at
        return self._running.done() or (at is not None and now() - at < FAILED_SECONDS)

    def welcome(self, hello: Hello) -> Welcome:
        """Compare vocabularies. Raises ProtocolError when ids don't mean the same.

        A tail that only one side has is tolerated, and no id from it is ever used. Where the tail
        is the edge's, it is the edge that compares, with the fingerprint it gets.
        """
        if hello.version != VERSION:
            raise ProtocolError(
                "version",
                f"the edge speaks protocol version {hello.version}, this cloud {VERSION}; "
                "install the same e2sci release at both ends",
            )
        info = self.engine.info
        shared = min(hello.real_vocab, info.real_vocab)
        ours = self._fingerprint.at(shared)
        if shared < 1 or (shared == hello.real_vocab and ours != hello.fingerprint):
            raise different_vocabularies(hello.model, info.name)
        assert self.times is not None
        return Welcome(
            model=info.name,
            vocab_size=info.vocab_size,
            shared_vocab=shared,
            fingerprint=ours,
            template=template_print(info),
            context=info.context,
            eos=tuple(sorted(info.eos_ids)),
            pass_ms=self.times.points,
        )

    def session(self, opening: Open, vocab: int, client: Client) -> CloudSession:
        """A session for `opening`. Raises ProtocolError."""
        if self.draining:
            raise ProtocolError(
                "draining", "this cloud is about to stop; try another", retryable=True
            )
        info = self.engine.info
        require_exact(info, opening)
        context = min(info.context, client.context or info.context)
        model = CloudModel(vocab, context, info.eos_ids)
        return self._session(opening, model)


class _Connection:
    """One edge: its seats by request number, and its outbox."""

    def __init__(self, cloud: Cloud, channel: Channel, client: Client) -> None:
        assert cloud.scheduler is not None
        self._cloud = cloud
        self._client = client
        self._limits = cloud.limits
        rate = self._limits.messages_per_s
        self._messages = Bucket(rate, _AT_ONCE * rate, now())
        self._scheduler = cloud.scheduler
        self._channel = channel
        self._seats: dict[int, Seat] = {}
        self._latest = 0
        self._outbox: asyncio.Queue[Message] = asyncio.Queue(self._limits.unread)

    async def run(self) -> None:
        sender = asyncio.create_task(self._send_out())
        try:
            vocab = await self._shake_hands()
            while True:
                self._handle(await self._receive(), vocab)
        except ChannelClosed:
            pass
        except ProtocolError as error:
            log.warning("connection ended: %s", error)
            with suppress(ChannelClosed):
                await self._channel.send(encode_message(error_message(error)))
        finally:
            sender.cancel()
            await self._channel.close()

    def leave(self) -> None:
        """The connection is gone: free its seats."""
        for seat in self._seats.values():
            self._scheduler.leave(seat)

    async def _receive(self) -> bytes | str:
        """The next frame, not before its turn: who sends faster is read slower, and the network
        holds the sender up. Raises ProtocolError("idle") where there is nothing to wait for."""
        if wait := self._messages.wait(now()):
            await asyncio.sleep(wait)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.idle_s):
                    frame = await self._channel.receive()
                break
            if all(seat.closed for seat in self._seats.values()):
                raise ProtocolError(
                    "idle", f"no request for {self._limits.idle_s:g} s", retryable=True
                )
        self._messages.take(1, now())
        self._cloud.metrics.received.inc(len(frame))
        return frame

    async def _shake_hands(self) -> int:
        allowed = self._limits.hello_s
        try:
            # Not wait_for: up to Python 3.11 it swallows a cancellation that comes with the frame.
            async with asyncio.timeout(allowed):
                frame = await self._channel.receive()
        except TimeoutError:
            raise ProtocolError("slow", f"no hello within {allowed:g} s") from None
        hello = decode_message(frame)
        if not isinstance(hello, Hello):
            raise ProtocolError("malformed", f"expected a hello, got {type(hello).__name__}")
        welcome = self._cloud.welcome(hello)
        self._post([welcome])
        log.info("edge connected: %s", hello.model, extra={"client": self._client.name})
        return welcome.shared_vocab

    def _handle(self, frame: bytes | str, vocab: int) -> None:
        try:
            message = decode_message(frame)
        except ProtocolError as error:
            if not error.request:
                raise
            self._refuse(error.request, error)
            return
        match message:
            case Open():
                self._guard(message.request, lambda: self._open(message, vocab))
            case Window():
                self._guard(message.request, lambda: self._window(message))
            case Cancel():
                seat = self._seats.pop(message.request, None)
                if seat is not None and not seat.closed:
                    self._post(seat.session.cancel())
                    self._scheduler.leave(seat, "cancelled")
            case _:
                kind = type(message).__name__
                raise ProtocolError("malformed", f"an edge doesn't send {kind} at this point")

    def _guard(self, request: int, action: Callable[[], None]) -> None:
        """Run `action`; its ProtocolError ends the request, not the connection."""
        try:
            action()
        except ProtocolError as error:
            self._refuse(request, error)

    def _refuse(self, request: int, error: ProtocolError) -> None:
        log.info("request refused: %s", error, extra={"client": self._client.name})
        seat = self._seats.pop(request, None)
        if seat is not None:
            self._scheduler.leave(seat, error.code)
        self._post([error_message(error, request)])

    def _open(self, message: Open, vocab: int) -> None:
        if message.request <= self._latest:
            raise ProtocolError(
                "bad_request", f"request numbers ascend; {message.request} follows {self._latest}"
            )
        self._latest = message.request
        self._seats = {n: seat for n, seat in self._seats.items() if not seat.closed}
        session = self._cloud.session(message, vocab, self._client)
        seat = self._scheduler.take(session, self._post, message, self._client)
        self._seats[message.request] = seat

    def _window(self, message: Window) -> None:
        if message.request > self._latest:
            raise ProtocolError("unknown_request", f"request {message.request} is not open")
        seat = self._seats.get(message.request)
        if seat is not None and not seat.closed:  # else it ended while the window was on its way
            self._scheduler.window(seat, message)

    def _post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Error):
                self._cloud.metrics.errors.labels(message.code).inc()
            try:
                self._outbox.put_nowait(message)
            except asyncio.QueueFull:
                self._closing = asyncio.create_task(self._channel.close())
                return

    async def _send_out(self) -> None:
        with suppress(ChannelClosed):
            while True:
                frame = encode_message(await self._outbox.get())
                await self._channel.send(frame)
                self._cloud.metrics.sent.inc(len(frame))
