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

from e2sci.engines.base import Engine, fingerprint
from e2sci.runtime.passes import PassTimes, measure_passes
from e2sci.runtime.scheduler import Scheduler, Seat, error_message
from e2sci.runtime.text import template_print
from e2sci.runtime.transport import Channel, ChannelClosed
from e2sci.runtime.worker import ThreadWorker, Worker
from e2sci.session.cloud import CloudModel, CloudSession
from e2sci.session.messages import (
    VERSION,
    Cancel,
    Hello,
    Message,
    Open,
    Opened,
    ProtocolError,
    Welcome,
    Window,
    decode_message,
    encode_message,
)

log = logging.getLogger("e2sci.cloud")

HELLO_SECONDS = 10.0
_OUTBOX = 4096  # messages a client may leave unread


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
    calls, a thread by default; closed with the cloud. `session` makes a request's session.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        session: Callable[[Open, CloudModel], CloudSession] = CloudSession,
        times: PassTimes | None = None,
        worker: Worker | None = None,
    ) -> None:
        require_truncation(engine)
        self.engine = engine
        self.times = times
        self.scheduler: Scheduler | None = None
        self._session = session
        self._worker = worker or ThreadWorker("target")
        self._fingerprint = fingerprint(engine)

    async def __aenter__(self) -> Cloud:
        if self.times is None:
            self.times = await self._worker.submit(lambda: measure_passes(self.engine))
        self.scheduler = Scheduler(self.engine, self._worker, self.times)
        self._running = asyncio.create_task(self.scheduler.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running
        self._worker.close()

    async def serve(self, channel: Channel) -> None:
        """One connection, until it ends."""
        connection = _Connection(self, channel)
        try:
            await connection.run()
        finally:
            connection.leave()

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

    def session(self, opening: Open, vocab: int) -> CloudSession:
        """A session for `opening`. Raises ProtocolError."""
        info = self.engine.info
        model = CloudModel(vocab, info.context, info.eos_ids)
        return self._session(opening, model)


class _Connection:
    """One edge: its seats by request number, and its outbox."""

    def __init__(self, cloud: Cloud, channel: Channel) -> None:
        assert cloud.scheduler is not None
        self._cloud = cloud
        self._scheduler = cloud.scheduler
        self._channel = channel
        self._seats: dict[int, Seat] = {}
        self._latest = 0
        self._outbox: asyncio.Queue[Message] = asyncio.Queue(_OUTBOX)

    async def run(self) -> None:
        sender = asyncio.create_task(self._send_out())
        try:
            vocab = await self._shake_hands()
            while True:
                await self._handle(await self._channel.receive(), vocab)
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

    async def _shake_hands(self) -> int:
        try:
            frame = await asyncio.wait_for(self._channel.receive(), HELLO_SECONDS)
        except TimeoutError:
            raise ProtocolError("slow", f"no hello within {HELLO_SECONDS:.0f} s") from None
        hello = decode_message(frame)
        if not isinstance(hello, Hello):
            raise ProtocolError("malformed", f"expected a hello, got {type(hello).__name__}")
        welcome = self._cloud.welcome(hello)
        self._post([welcome])
        log.info("edge connected: %s", hello.model)
        return welcome.shared_vocab

    async def _handle(self, frame: bytes | str, vocab: int) -> None:
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
                    self._scheduler.leave(seat)
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
        log.info("request %s refused: %s", request, error)
        seat = self._seats.pop(request, None)
        if seat is not None:
            self._scheduler.leave(seat)
        self._post([error_message(error, request)])

    def _open(self, message: Open, vocab: int) -> None:
        if message.request <= self._latest:
            raise ProtocolError(
                "bad_request", f"request numbers ascend; {message.request} follows {self._latest}"
            )
        self._latest = message.request
        self._seats = {n: seat for n, seat in self._seats.items() if not seat.closed}
        session = self._cloud.session(message, vocab)
        seat = self._scheduler.take(session, self._post, message)
        self._seats[message.request] = seat
        self._post([Opened(request=message.request, limit=session.limit)])

    def _window(self, message: Window) -> None:
        if message.request > self._latest:
            raise ProtocolError("unknown_request", f"request {message.request} is not open")
        seat = self._seats.get(message.request)
        if seat is not None and not seat.closed:  # else it ended while the window was on its way
            self._scheduler.window(seat, message)

    def _post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            try:
                self._outbox.put_nowait(message)
            except asyncio.QueueFull:
                self._closing = asyncio.create_task(self._channel.close())
                return

    async def _send_out(self) -> None:
        with suppress(ChannelClosed):
            while True:
                await self._channel.send(encode_message(await self._outbox.get()))
