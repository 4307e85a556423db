"""The edge's connection to one cloud: handshake, and routing by request.

One channel serves all requests of an edge at that cloud. When it breaks, everyone with a request
open is told (`ConnectionLost` in its inbox); whoever comes first calls `open()` and thereby
connects again for all. Which cloud to turn to, and for how long, is decided in `clouds`; what to
say again on a new channel is each request's own business: it holds its whole state.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from e2sci.engines.base import Fingerprint, ModelInfo
from e2sci.runtime.service import different_vocabularies
from e2sci.runtime.text import template_print
from e2sci.runtime.transport import OPEN_SECONDS, Channel, ChannelClosed, framed
from e2sci.runtime.worker import now
from e2sci.session.messages import (
    Error,
    Finished,
    Hello,
    Message,
    Opened,
    ProtocolError,
    Verdict,
    Welcome,
    decode_message,
    encode_message,
)

log = logging.getLogger("e2sci.edge")

Connector = Callable[[], Awaitable[Channel]]
ForRequest = Opened | Verdict | Finished | Error

SHUN_SECONDS = 60.0
"""How long a cloud that has failed comes behind the others."""


class EdgeError(Exception):
    """A generation can't go on; the message is for the user."""


class CloudUnreachable(EdgeError):
    """No connection came about within the time allowed."""


class Refused(EdgeError):
    """The cloud has said no. `code` is one word for machines (docs/protocol.md); `retry_after_s`:
    seconds behind which it may say yes, 0 if it names none."""

    def __init__(self, code: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class ConnectionLost(Exception):
    """The channel broke while a request was open."""


class Inbox:
    """What has come for one request, with the bytes it took; `wake` is set whenever more comes."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.items: list[ForRequest | ConnectionLost] = []
        self.bytes = 0

    def put(self, item: ForRequest | ConnectionLost, size: int = 0) -> None:
        self.items.append(item)
        self.bytes += size
        self.wake.set()

    def take(self) -> list[ForRequest | ConnectionLost]:
        items, self.items = self.items, []
        return items


class Connection:
    """A connection to one cloud that is there when needed.

    `connector` opens a channel; `number`: which of the edge's clouds this is, from 1. `rtt_s`: the
    round trip as last measured, None before. `shunned_until`: on the event loop's clock; the cloud
    has failed or has no place, and others are tried first. `notices`: what the user should know
    about the pair of models.
    """

    def __init__(
        self, connector: Connector, number: int, info: ModelInfo, fingerprint: Fingerprint
    ) -> None:
        self.name: str = getattr(connector, "url", f"cloud {number}")
        self.notices: list[str] = []
        self.welcome: Welcome | None = None
        self.rtt_s: float | None = None
        self.shunned_until = -math.inf
        self._connector = connector
        self._info = info
        self._fingerprint = fingerprint
        self._failure = ""
        self._channel: Channel | None = None
        self._reader: asyncio.Task[None] | None = None
        self._inboxes: dict[int, Inbox] = {}
        self._latest = 0
        self._lock = asyncio.Lock()

    @property
    def shunned(self) -> bool:
        """Whether other clouds are tried before this one now."""
        return now() < self.shunned_until

    def shun(self, seconds: float) -> None:
        """Let others go first for a while."""
        self.shunned_until = now() + seconds

    async def open(self) -> Welcome:
        """Connect if need be. Raises ChannelClosed, or Refused when the pair can't work."""
        waited = self._lock.locked()
        async with self._lock:
            if self._channel is None:
                if waited and self._failure:  # who tried meanwhile has failed for all
                    raise ChannelClosed(self._failure)
                self._failure = ""
                try:
                    await self._open()
                except ChannelClosed as error:
                    self._failure = str(error)
                    raise
            assert self.welcome is not None
            return self.welcome

    def request(self, inbox: Inbox) -> int:
        """A fresh request number whose messages go to `inbox`, the news of a loss included."""
        self._latest += 1
        self._inboxes[self._latest] = inbox
        if self._channel is None:
            inbox.put(ConnectionLost("the connection broke off"))
        return self._latest

    def forget(self, request: int) -> None:
        """Messages for `request` are dropped from now on."""
        self._inboxes.pop(request, None)

    async def send(self, message: Message) -> int:
        """Send a message; its bytes on the wire. Raises ConnectionLost."""
        if self._channel is None:
            raise ConnectionLost
        try:
            return await self._channel.send(encode_message(message))
        except ChannelClosed as error:
            raise ConnectionLost(str(error)) from None

    async def ping(self) -> float:
        """Seconds of one round trip. Raises CloudUnreachable."""
        try:
            if self._channel is None:
                raise ChannelClosed("not connected")
            async with asyncio.timeout(OPEN_SECONDS):
                self.rtt_s = await self._channel.ping()
            return self.rtt_s
        except (ChannelClosed, TimeoutError) as error:
            raise CloudUnreachable(f"no answer to a ping: {error}") from None

    async def close(self) -> None:
        if self._reader is not None:
            if self._channel is not None:  # else it is closing a lost one: let it
                self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    # ---- opening --------------------------------------------------------------------------

    async def _open(self) -> None:
        try:
            channel = await self._connector()
        except ProtocolError as error:
            raise Refused(error.code, str(error)) from None
        began = now()
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                welcome = await self._shake_hands(channel)
        except BaseException as error:
            await channel.close()
            if isinstance(error, TimeoutError):
                raise ChannelClosed("the cloud did not answer the handshake") from None
            raise
        self.rtt_s, self.shunned_until = now() - began, -math.inf
        self.notices = self._compare(welcome)
        self.welcome, self._channel = welcome, channel
        self._reader = asyncio.create_task(self._read(channel))

    async def _shake_hands(self, channel: Channel) -> Welcome:
        hello = Hello(
            model=self._info.name,
            real_vocab=self._info.real_vocab,
            fingerprint=self._fingerprint.at(self._info.real_vocab),
            template=template_print(self._info),
        )
        await channel.send(encode_message(hello))
        try:
            answer = decode_message(await channel.receive())
            if isinstance(answer, Error):
                if answer.retryable:
                    raise ChannelClosed(answer.message)
                raise Refused(answer.code, answer.message)
            if not isinstance(answer, Welcome):
                raise Refused("malformed", f"the cloud answered with {type(answer).__name__}")
            if answer.version != hello.version:
                raise Refused(
                    "version",
                    f"the cloud speaks protocol version {answer.version}, this edge "
                    f"{hello.version}; install the same e2sci release at both ends",
                )
            shared = answer.shared_vocab
            ours = 0 < shared <= self._info.real_vocab and self._fingerprint.at(shared)
            if ours != answer.fingerprint:
                raise different_vocabularies(self._info.name, answer.model)
        except ProtocolError as error:
            raise Refused(error.code, str(error)) from None
        return answer

    def _compare(self, welcome: Welcome) -> list[str]:
        notices = []
        if welcome.vocab_size != self._info.vocab_size:
            notices.append(
                f"vocabularies are padded differently ({self._info.vocab_size} and "
                f"{welcome.vocab_size} ids): only the {welcome.shared_vocab} shared ones are used"
            )
        ours = template_print(self._info)
        if welcome.template != ours:
            notices.append(
                f"{self._info.name} and {welcome.model} have different chat templates; "
                f"the prompt is written with the one of {self._info.name}"
            )
        return notices

    # ---- reading --------------------------------------------------------------------------

    async def _read(self, channel: Channel) -> None:
        reason = ""
        try:
            while True:
                frame = await channel.receive()
                self._route(decode_message(frame), framed(len(frame), masked=False))
        except (ChannelClosed, ProtocolError) as error:
            reason = str(error)
        log.info("connection to %s lost: %s", self.name, reason)
        self._channel = None
        if self._inboxes:  # else it was closed for being idle, which says nothing against it
            self.shun(SHUN_SECONDS)
        for inbox in self._inboxes.values():  # before anyone can reconnect
            inbox.put(ConnectionLost(reason))
        await channel.close()

    def _route(self, message: object, size: int) -> None:
        if isinstance(message, Error) and message.request == 0:
            raise ProtocolError(message.code, message.message)
        if isinstance(message, ForRequest):
            inbox = self._inboxes.get(message.request)
            if inbox is not None:
                inbox.put(message, size)
        else:
            raise ProtocolError("malformed", f"a cloud doesn't send {type(message).__name__} now")
