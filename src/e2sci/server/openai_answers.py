"""How an answer is sent: whole, or in events while it is written.

A writer hears the pieces of all texts of an `Answer` and sends what they make. `Events` is the
response below: it begins with the first thing that is sent, so that whatever goes wrong before can
still be told by an HTTP status; what goes wrong later is the last event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from e2sci.runtime.options import Piece
from e2sci.server.openai_errors import Failure
from e2sci.server.openai_requests import Ask
from e2sci.server.openai_shapes import Choice, Shapes, Shown, encode
from e2sci.server.openai_tale import told

SEND_SECONDS = 60.0
"""How long a client may leave what it was sent unread."""


class ClientGone(Exception):
    """The client has left, so nobody will read the answer."""


@dataclass(frozen=True)
class Answer:
    """What is told to `ask`: its texts, `prompts` as ids."""

    ask: Ask
    shapes: Shapes
    prompts: Sequence[list[int]]
    choices: Sequence[Choice]

    @property
    def usage(self) -> dict[str, int]:
        """Each prompt counts once, however many texts it gets; an EOS is not counted."""
        prompt = sum(map(len, self.prompts))
        completion = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    @property
    def ending(self) -> dict[str, Any]:
        """Our own part: what it takes to ask the same again, and how it went."""
        return {
            "request_id": self.shapes.id,
            "seed": self.ask.seed(0),
            "notices": [notice for choice in self.choices for notice in choice.notices],
            "stats": [vars(choice.result.stats) for choice in self.choices if choice.result],
        }

    @property
    def traced(self) -> bool:
        """Whether the tale is wanted too."""
        return self.ask.options.tale


class Writer(Protocol):
    """Hears the pieces of an answer's texts, then `end`. Raises ClientGone."""

    async def hear(self, choice: Choice, piece: Piece) -> None: ...

    async def end(self) -> None: ...


class Whole:
    """An answer at once."""

    def __init__(self, events: Events, answer: Answer) -> None:
        self._events = events
        self._answer = answer
        self._shown: list[list[Shown]] = [[] for _ in answer.choices]
        self._trace: list[dict[str, Any]] = []

    async def hear(self, choice: Choice, piece: Piece) -> None:
        placed = choice.take(piece)
        self._shown[choice.index] += choice.shown()
        if self._answer.traced:
            self._trace.append(told(self._answer.shapes, choice, piece, placed))

    async def end(self) -> None:
        answer = self._answer
        texts = answer.shapes.whole(answer.choices, self._shown)
        trace = {"trace": self._trace} if answer.traced else {}
        own = {"usage": answer.usage, "e2sci": {**answer.ending, **trace}}
        await self._events.whole({**texts, **own})


class Streamed:
    """An answer in events, as it is written."""

    def __init__(self, events: Events, answer: Answer) -> None:
        self._events = events
        self._answer = answer
        self._begun: set[Choice] = set()

    async def hear(self, choice: Choice, piece: Piece) -> None:
        answer, shapes = self._answer, self._answer.shapes
        placed, shown = choice.take(piece), choice.shown()
        tale = {"e2sci": told(shapes, choice, piece, placed)} if answer.traced else {}
        if shapes.chat and choice not in self._begun and (piece.commits or piece.result):
            self._begun.add(choice)
            await self._send(shapes.first(choice))
        if piece.text or shown:
            await self._send(shapes.more(choice, piece.text, shown), **tale)
        elif tale:
            await self._send(shapes.chunk(None, {}), **tale)
        if piece.result:
            last = not answer.ask.usage and all(each.result for each in answer.choices)
            await self._send(shapes.last(choice), **self._ending if last else {})

    async def end(self) -> None:
        answer = self._answer
        if answer.ask.usage:
            await self._send(answer.shapes.chunk(None, {}), usage=answer.usage, **self._ending)
        await self._events.end()

    @property
    def _ending(self) -> dict[str, Any]:
        return {"e2sci": self._answer.ending}

    async def _send(self, chunk: dict[str, Any], **more: Any) -> None:
        """Who has asked for usage finds it in every chunk, empty but for the last one."""
        usage = {"usage": None} if self._answer.ask.usage else {}
        await self._events.event({**chunk, **usage, **more})


class Events:
    """A response: JSON, or server-sent events. Raises ClientGone when it is left unread."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False
        self._turn = asyncio.Lock()

    async def whole(self, data: dict[str, Any]) -> None:
        """All of it."""
        body = encode(data)
        await self._start("application/json", (b"content-length", str(len(body)).encode()))
        await self._body(body, more=False)

    async def event(self, data: dict[str, Any]) -> None:
        """One event."""
        async with self._turn:  # several texts may have something to say
            if not self._begun:
                await self._start("text/event-stream; charset=utf-8")
            await self._body(b"data: " + encode(data) + b"\n\n")

    async def end(self) -> None:
        """Behind the last event."""
        await self._body(b"data: [DONE]\n\n", more=False)

    async def fail(self, failure: Failure, scope: Scope) -> None:
        """The error instead of a response, or as its last event."""
        with suppress(ClientGone):
            if self._begun:
                await self._body(b"data: " + encode(failure.body) + b"\n\n", more=False)
            else:
                await failure.response()(scope, _nothing, self._send)

    async def _start(self, kind: str, *more: tuple[bytes, bytes]) -> None:
        self._begun = True
        headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-store"), *more]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _body(self, data: bytes, *, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": more}
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError:
            raise ClientGone from None


async def while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` while the client waits for it. Raises ClientGone when it does not any more.

    Plain tasks, cancelled once: what a generation tells its cloud while it ends must still go.
    """

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
