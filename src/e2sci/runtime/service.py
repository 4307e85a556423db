"""What edges connect to, whatever serves their requests: handshake, routing, draining.

`Service.serve(channel)` is one connection from handshake to end: it reads frames, takes requests to
the desk (`Desk`: a scheduler with an engine of its own, or a relay to a server that has one), and
sends what their sessions say. Errors stay as small as they are: a bad request ends that request, a
bad frame that connection, and neither touches anyone else.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

from e2sci.engines.base import Fingerprint, ModelInfo
from e2sci.runtime.admission import ANYONE, Bucket, Client, Limits
from e2sci.runtime.metrics import Metrics
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.text import template_print
from e2sci.runtime.transport import Channel, ChannelClosed
from e2sci.runtime.worker import now
from e2sci.session.line import CloudModel, Line
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

_AT_ONCE = 10.0  # seconds' worth of messages that may come at once


class Place(Protocol):
    """A request as a connection sees it."""

    closed: bool

    @property
    def session(self) -> Line: ...


class Desk(Protocol):
    """Where requests are served. `empty`: set while there are none."""

    empty: asyncio.Event

    def take(
        self,
        session: Any,
        send: Callable[[Sequence[Message]], None],
        opening: Open,
        client: Client,
    ) -> Any:
        """Give a session a `Place`, or put it in line. Raises ProtocolError."""
        ...

    def window(self, seat: Any, message: Window) -> None:
        """A window has come for a place. Raises ProtocolError."""
        ...

    def leave(self, seat: Any, reason: str = "gone") -> None:
        """Free a place at once."""
        ...


def different_vocabularies(edge: str, cloud: str) -> ProtocolError:
    """The error of two models that don't share their token ids."""
    return ProtocolError(
        "tokenizer",
        f"the edge's model {edge} and the cloud's {cloud} have different vocabularies, so token "
        "ids don't mean the same; use two models of one family",
    )


class Service(ABC):
    """A model at the service of edges; `desk` is there while it is entered as a context manager.

    `times`: pass times, for edges to reckon with.
    """

    def __init__(self, info: ModelInfo, fingerprint: Fingerprint, limits: Limits | None) -> None:
        self.info = info
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.draining = False
        self.times: PassTimes | None = None
        self._fingerprint = fingerprint
        self._nobodies = count(1)

    @abstractmethod
    async def __aenter__(self) -> Service: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    @property
    @abstractmethod
    def desk(self) -> Desk: ...

    @property
    @abstractmethod
    def failing(self) -> bool:
        """Whether the engine has failed just now: for a while it is better left alone."""

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
        self.draining = True
        self.metrics.draining.set(1)
        try:
            async with asyncio.timeout(seconds):
                await self.desk.empty.wait()
        except TimeoutError:
            return False
        return True

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
        info = self.info
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

    def session(self, opening: Open, vocab: int, client: Client) -> Line:
        """A session for `opening`. Raises ProtocolError."""
        if self.draining:
            raise ProtocolError(
                "draining", "this cloud is about to stop; try another", retryable=True
            )
        context = min(self.info.context, client.context or self.info.context)
        return self._begin(opening, CloudModel(vocab, context, self.info.eos_ids))

    @abstractmethod
    def _begin(self, opening: Open, model: CloudModel) -> Line:
        """A session of the kind that the desk takes. Raises ProtocolError."""


class _Connection:
    """One edge: its seats by request number, and its outbox."""

    def __init__(self, cloud: Service, channel: Channel, client: Client) -> None:
        self._cloud = cloud
        self._client = client
        self._limits = cloud.limits
        rate = self._limits.messages_per_s
        self._messages = Bucket(rate, _AT_ONCE * rate, now())
        self._desk = cloud.desk
        self._channel = channel
        self._seats: dict[int, Place] = {}
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
            self._desk.leave(seat)

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
                    self._desk.leave(seat, "cancelled")
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
            self._desk.leave(seat, error.code)
        self._post([error_message(error, request)])

    def _open(self, message: Open, vocab: int) -> None:
        if message.request <= self._latest:
            raise ProtocolError(
                "bad_request", f"request numbers ascend; {message.request} follows {self._latest}"
            )
        self._latest = message.request
        self._seats = {n: seat for n, seat in self._seats.items() if not seat.closed}
        session = self._cloud.session(message, vocab, self._client)
        seat = self._desk.take(session, self._post, message, self._client)
        self._seats[message.request] = seat

    def _window(self, message: Window) -> None:
        if message.request > self._latest:
            raise ProtocolError("unknown_request", f"request {message.request} is not open")
        seat = self._seats.get(message.request)
        if seat is not None and not seat.closed:  # else it ended while the window was on its way
            self._desk.window(seat, message)

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


def error_message(error: ProtocolError, request: int = 0) -> Error:
    """The wire form of an error."""
    return Error(
        request=request,
        code=error.code,
        message=str(error),
        retryable=error.retryable,
        retry_after_s=error.retry_after_s,
    )
