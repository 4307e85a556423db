"""Clouds to be lost: in memory and cut at will, scripted, or behind a proxy that misbehaves; and
texts during which they are."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from random import Random

from e2sci.engines.base import fingerprint
from e2sci.engines.synthetic import EOS, REAL_VOCAB, SyntheticConfig
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.text import template_print
from e2sci.runtime.transport import ChannelClosed, MemoryChannel, memory_pair
from e2sci.session.messages import (
    Hello,
    ProtocolError,
    Welcome,
    decode_message,
    encode_message,
)
from live import HOST, TIMES, Watched, idle, pair, target

ENDLESS = {"logit_bias": {EOS: -100.0}, "max_tokens": 60}


class Inline:
    """A worker without a thread: a call runs on the event loop, `seconds` late, one at a time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task] = set()

    def submit(self, call):
        self._running.add(task := asyncio.create_task(self._run(call)))
        task.add_done_callback(self._running.discard)
        return task

    async def _run(self, call):
        async with self._lock:
            await asyncio.sleep(self.seconds)
            return call()

    def close(self) -> None:
        for task in self._running:
            task.cancel()


class Site:
    """A cloud in memory, on `engine()`. Call it for a channel; `down`: nobody answers; `refusals`:
    what its next openings are refused with; `dials`, `openings`: how often it was called, and what
    it was asked; `passes` it has made."""

    def __init__(self, name="cloud", engine=target, *, delay_s=0.0, worker=None) -> None:
        self.url = name
        self.delay_s = delay_s
        self.down = False
        self.refusals: list[ProtocolError] = []
        self.dials = self.passes = 0
        self.openings: list = []
        self.channels: set[MemoryChannel] = set()
        self.serving: set[asyncio.Task] = set()
        self._make, self._worker = engine, worker or (lambda: None)
        self._stack = AsyncExitStack()

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *_):
        if not self.down:
            await idle(self.cloud)
        await self.kill()

    async def start(self) -> None:
        """A new cloud that knows nothing of the one before."""
        self.down = False
        self.cloud = Cloud(self._make(), times=TIMES, worker=self._worker())
        await self._stack.enter_async_context(self.cloud)
        session, forward = self.cloud.session, self.cloud.engine.forward

        def watched(opening, *rest):
            self.openings.append(opening)
            if self.refusals:
                raise self.refusals.pop(0)
            return session(opening, *rest)

        def counted(steps):
            self.passes += 1
            return forward(steps)

        self.cloud.session, self.cloud.engine.forward = watched, counted

    async def kill(self) -> None:
        """As a crash would."""
        self.die()
        await asyncio.gather(*self.serving)
        self.serving.clear()
        await self._stack.aclose()

    def die(self) -> None:
        """Be out of reach."""
        self.down = True
        self.cut()

    def cut(self) -> None:
        """Every connection breaks, and what is on its way is lost."""
        for channel in self.channels:
            for way in (channel._outbox, channel._inbox):
                while not way.empty():
                    way.get_nowait()
                way.put_nowait(None)
            channel._closed = True
        self.channels.clear()

    async def __call__(self):
        self.dials += 1
        if self.down:
            raise ChannelClosed(f"can't reach {self.url}")
        here, there = _Slow.pair(self.delay_s) if self.delay_s else memory_pair()
        self.channels.add(there)
        self.serving.add(asyncio.create_task(self.cloud.serve(there)))
        return here


class _Slow(MemoryChannel):
    """Frames arrive `delay_s` late."""

    delay_s = 0.0

    @classmethod
    def pair(cls, delay_s):
        a, b = asyncio.Queue(), asyncio.Queue()
        ends = cls(a, b), cls(b, a)
        for end in ends:
            end.delay_s = delay_s
        return ends

    def _deliver(self, frame, size):
        loop = asyncio.get_running_loop()
        loop.call_later(self.delay_s, super()._deliver, frame, size)


@asynccontextmanager
async def sites(*them: Site):
    async with AsyncExitStack() as stack:
        for site in them:
            await stack.enter_async_context(site)
        yield them


def welcome(**fields) -> Welcome:
    """What a cloud with the usual target says; `fields` instead of its own."""
    engine = target()
    known = {
        "model": engine.info.name,
        "vocab_size": REAL_VOCAB,
        "shared_vocab": REAL_VOCAB,
        "fingerprint": fingerprint(engine).at(REAL_VOCAB),
        "template": template_print(engine.info),
        "context": 4096,
        "eos": (EOS,),
    }
    return Welcome(**{**known, **fields})


class Script:
    """A cloud that says what it is told: `answer(message, say)` for each message behind the Hello,
    which is answered with `greeting`."""

    def __init__(self, answer, greeting=None, name="script") -> None:
        self.url, self.dials = name, 0
        self._answer, self._greeting = answer, greeting or welcome()
        self._tasks: set[asyncio.Task] = set()

    async def __call__(self):
        self.dials += 1
        here, there = memory_pair()
        self._tasks.add(asyncio.create_task(self._serve(there)))
        return here

    async def _serve(self, channel):
        async def say(message):
            await channel.send(encode_message(message))

        try:
            assert isinstance(decode_message(await channel.receive()), Hello)
            await say(self._greeting)
            while True:
                await self._answer(decode_message(await channel.receive()), say)
        except ChannelClosed:
            pass
        finally:
            await channel.close()


class Proxy:
    """TCP to `port`, through which connections can be cut at any byte or frozen. `plan()` gives,
    for each connection, (direction, byte behind which it is cut) or None; `freeze()` stops the
    latest one for good, without closing it."""

    def __init__(self, port, plan=None) -> None:
        self._port = port
        self._plan = plan or (lambda: None)
        self._frozen: asyncio.Event | None = None
        self._open: set[asyncio.Task] = set()
        self.connections = self.cuts = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.url = f"ws://{HOST}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def freeze(self) -> None:
        if self._frozen is not None:
            self._frozen.set()

    def _accept(self, reader, writer):
        self._open.add(task := asyncio.create_task(self._carry(reader, writer)))
        task.add_done_callback(self._open.discard)

    async def _carry(self, reader, writer):
        self.connections += 1
        self._frozen = frozen = asyncio.Event()
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, self._port)
        except OSError:
            writer.transport.abort()
            return
        cut = self._plan()
        ways = {"up": (reader, far_writer), "down": (far_reader, writer)}
        flows = [
            asyncio.create_task(
                self._flow(*way, cut[1] if cut and cut[0] == name else None, frozen)
            )
            for name, way in ways.items()
        ]
        try:
            await asyncio.wait(flows, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for flow in flows:
                flow.cancel()
            writer.transport.abort()
            far_writer.transport.abort()

    async def _flow(self, reader, writer, left, frozen):
        with suppress(OSError):
            while data := await reader.read(4096):
                if frozen.is_set():
                    await asyncio.Event().wait()
                if left is not None and len(data) >= left:
                    writer.write(data[:left])
                    await writer.drain()
                    self.cuts += 1
                    return
                left = None if left is None else left - len(data)
                writer.write(data)
                await writer.drain()


def cut_within(random: Random, most: int, times: int):
    """A plan for `Proxy`: the first `times` connections are cut, behind up to `most` bytes."""
    left = [times]

    def plan():
        if not left[0]:
            return None
        left[0] -= 1
        return random.choice(["up", "down"]), random.randint(1, most)

    return plan


def slow():
    return Watched(SyntheticConfig(seed=11), seconds=0.002)


def busy(retry_after_s=0.0, code="busy"):
    return ProtocolError(code, f"{code}: not now", retryable=True, retry_after_s=retry_after_s)


async def alone(**options):
    async with pair() as edge:
        return (await edge.generate("hello", mode="cloud", **options)).token_ids


async def midway(edge, then, at=10, **options):
    """Generate; `then()` once `at` tokens are there. The pieces' notices, and the result."""
    notices, done = [], 0
    async for piece in edge.stream("hello", **options):
        done += len(piece.commits)
        if then is not None and done >= at:
            then, do = None, then
            do()
        if piece.notice:
            assert (piece.text, piece.commits) == ("", [])
            notices.append(piece.notice)
    assert piece.result.notices == notices
    return notices, piece.result
