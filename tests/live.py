"""Clouds and edges for tests: joined in memory, or a cloud on a real port in its own thread."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

import numpy as np
import websockets
from websockets.asyncio.client import connect as websocket_connect

from e2sci.decoding.distribution import Dense
from e2sci.engines.base import fingerprint
from e2sci.engines.synthetic import EOS, REAL_VOCAB, Synthetic, SyntheticConfig, SyntheticTokenizer
from e2sci.runtime import edge as runtime
from e2sci.runtime.admission import Limits
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.options import Options
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.text import template_print
from e2sci.runtime.transport import memory_pair
from e2sci.server.cloud_app import listening
from e2sci.session.messages import Hello, Message, decode_message, encode_message

TIMES = PassTimes(((1, 1.0), (32, 1.0)))
HOST = "127.0.0.1"
PIPELINED = Options(mode="pipelined")


class Edge(runtime.Edge):
    """One that writes pipelined unless told otherwise. What auto chooses hangs on times, and those
    are here what else the machine has to do."""

    def __init__(self, *args, options=PIPELINED, **more) -> None:
        super().__init__(*args, options=options, **more)


class BlockingEdge(runtime.BlockingEdge):
    """The same for an Edge without asyncio."""

    def __init__(self, *args, options=PIPELINED, **more) -> None:
        super().__init__(*args, options=options, **more)


class Watched(Synthetic):
    """A synthetic engine that counts its passes, and may take its time or call a hook in each.

    `passes`: tokens by sequence of each forward call; `hook(n)` runs before pass n, n from 1.
    """

    def __init__(
        self,
        config: SyntheticConfig | None = None,
        slots: int = 64,
        *,
        seconds: float = 0.0,
        hook: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__(config or SyntheticConfig(seed=11), slots)
        self.seconds, self.hook = seconds, hook
        self.passes: list[dict[int, int]] = []

    def forward(self, steps):
        self.passes.append({step.sequence: len(step.tokens) for step in steps})
        if self.hook:
            self.hook(len(self.passes))
        time.sleep(self.seconds)
        return super().forward(steps)


class Scripted(Watched):
    """Writes `script` after a prompt of `prompt` bytes; errs at positions that `errs` says."""

    def __init__(self, script: str, prompt: int, errs=lambda at: False) -> None:
        self._script, self._prompt, self._errs = script.encode(), prompt, errs
        super().__init__()

    def _compute(self, state, position, text):
        at = position + 1 - self._prompt
        token = self._script[at] if at < len(self._script) else EOS
        logits = np.zeros(self.info.vocab_size, dtype=np.float32)
        logits[ord("#") if self._errs(at) else token] = 30.0
        return Dense(logits)


class Named(Synthetic):
    """A model under its own name, optionally with other tokens or a longer tail of them."""

    def __init__(self, name, *, other=None, tail=0, **config):
        super().__init__(SyntheticConfig(**{"seed": 11, "padding": tail, **config}))
        names = [SyntheticTokenizer().name(i) for i in range(REAL_VOCAB)]
        names += [b"<tail %d>" % i for i in range(tail)]
        if other is not None:
            names[other] = b"<other>"
        self.info = replace(self.info, name=name, real_vocab=len(names))
        self.tokenizer.name = names.__getitem__
        self.tokenizer.piece = lambda token: b"" if token >= REAL_VOCAB - 1 else names[token]


def target(**config) -> Synthetic:
    return Synthetic(SyntheticConfig(**{"seed": 11, **config}))


def draft(**config) -> Synthetic:
    return Synthetic(SyntheticConfig(**{"seed": 11, "divergence": 0.5, **config}))


def cached(engine: Synthetic) -> int:
    """Tokens in all caches of an engine together."""
    return sum(engine.length(sequence) for sequence in range(engine.slots))


def running(pid: int) -> bool:
    """A zombie that nobody has collected doesn't run."""
    ps = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(ps.stdout.strip()) and not ps.stdout.startswith("Z")


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait for `condition`, which must come true."""
    for _ in range(int(seconds / 0.002)):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not come true in time")


async def idle(cloud: Cloud) -> None:
    """Wait until no request holds anything at the cloud, which has what it keeps and no more."""
    await until(lambda: cloud.scheduler.busy == 0)
    await until(lambda: cached(cloud.engine) == cloud.scheduler.kept)


@asynccontextmanager
async def pair(
    draft_engine=None,
    target_engine=None,
    *,
    times=TIMES,
    limits=None,
    keep_caches=False,
    **edge_options,
):
    """An edge (`edge.cloud`: its cloud) joined in memory; at the end nothing may be left behind but
    what both are to keep."""
    engine = draft_engine or draft()
    tasks = set()
    far = target_engine or target()
    async with Cloud(far, times=times, limits=limits, keep_caches=keep_caches) as cloud:

        async def dial():
            here, there = memory_pair()
            tasks.add(asyncio.create_task(cloud.serve(there)))
            return here

        async with Edge(dial, engine, keep_caches=keep_caches, **edge_options) as edge:
            edge.cloud = cloud
            yield edge
            await until(lambda: len(edge._free) == engine.slots)
            await until(lambda: cached(engine) == edge._free.tokens)
        await asyncio.gather(*tasks)
        await idle(cloud)


class LiveCloud:
    """A cloud on a real loopback port, on an event loop in a thread of its own.

    with LiveCloud(engine) as cloud: … cloud.url …; `kill()` drops every connection without a word
    and stops listening; `start()` then brings up a new one on the same port.
    """

    def __init__(
        self,
        engine: Synthetic | None = None,
        *,
        times: PassTimes | None = TIMES,
        limits: Limits | None = None,
        keep_caches: bool = False,
        **front: object,
    ) -> None:
        """`front`: what else `listening` takes."""
        self.engine = engine or target()
        self.times = times
        self.limits = limits
        self.keep_caches = keep_caches
        self.front = front
        self.port = 0

    def __enter__(self) -> LiveCloud:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"ws://{HOST}:{self.port}"

    @property
    def busy(self) -> int:
        return self.cloud.scheduler.busy

    def idle(self) -> None:
        """Wait until no request holds anything."""
        for _ in range(2500):
            if self.busy == 0 and cached(self.engine) == self.cloud.scheduler.kept:
                return
            time.sleep(0.002)
        raise AssertionError("a request is still held")

    def check(self) -> None:
        """Nothing has stayed behind, and the next request is answered."""
        self.idle()
        with BlockingEdge(self.url, draft()) as edge:
            answer = edge.generate("hello", max_tokens=10, logit_bias={EOS: -100.0})
            assert len(answer.token_ids) == 10
        self.idle()

    def start(self) -> None:
        self.engine.close()  # what a crash has left
        ready: list[Exception | None] = []
        up = threading.Event()

        def main() -> None:
            try:
                asyncio.run(self._main(lambda: (ready.append(None), up.set())))
            except Exception as error:
                ready.append(error)
                up.set()

        self._thread = threading.Thread(target=main, daemon=True)
        self._thread.start()
        assert up.wait(10)
        if ready[0]:
            raise ready[0]

    def kill(self) -> None:
        """As a crash would: connections are reset, nothing is said. Any thread may call it."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._drop)
        if threading.current_thread() is not self._thread and not _is_worker():
            self._thread.join(10)
            assert not self._thread.is_alive()

    def _drop(self) -> None:
        for channel in self._channels:
            channel._socket.transport.abort()
        self._stop.set()

    async def _main(self, ready: Callable[[], object]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._channels = set()
        cloud = self.cloud = Cloud(
            self.engine, times=self.times, limits=self.limits, keep_caches=self.keep_caches
        )
        serve = cloud.serve

        async def tracked(channel, client):
            self._channels.add(channel)
            await serve(channel, client)
            self._channels.discard(channel)

        cloud.serve = tracked
        async with cloud, listening(cloud, HOST, self.port, **self.front) as self.port:
            ready()
            await self._stop.wait()


def _is_worker() -> bool:
    return threading.current_thread().name.startswith("target")


class LivePeer:
    """Something else that listens: every WebSocket that comes is given to `handler`."""

    def __init__(self, handler: Callable[[object], Awaitable[None]]) -> None:
        self._handler = handler

    def __enter__(self) -> LivePeer:
        up = threading.Event()

        async def main() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            async with websockets.asyncio.server.serve(
                self._handler, HOST, 0, close_timeout=0.2
            ) as s:
                self.port = s.sockets[0].getsockname()[1]
                up.set()
                await self._stop.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        self._thread.start()
        assert up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"ws://{HOST}:{self.port}"


class RawClient:
    """A client that says whatever it is told, right or wrong."""

    def __init__(self, socket) -> None:
        self.socket = socket

    async def send(self, frame: Message | bytes | str) -> None:
        await self.socket.send(encode_message(frame) if isinstance(frame, Message) else frame)

    async def receive(self) -> Message:
        return decode_message(await asyncio.wait_for(self.socket.recv(), 5))

    async def hello(self, **fields) -> Message:
        """Shake hands as the synthetic model; `fields` instead of its own."""
        engine = target()
        hello = {
            "model": "raw",
            "real_vocab": REAL_VOCAB,
            "fingerprint": fingerprint(engine).at(REAL_VOCAB),
            "template": template_print(engine.info),
        }
        await self.send(Hello(**{**hello, **fields}))
        return await self.receive()

    async def closed(self) -> int:
        """Read to the end; the close code."""
        with suppress(websockets.ConnectionClosed):
            while True:
                await asyncio.wait_for(self.socket.recv(), 5)
        return self.socket.close_code

    def vanish(self) -> None:
        """Be gone without a word."""
        self.socket.transport.abort()


@asynccontextmanager
async def raw_client(url: str, *, greet: bool = True):
    async with websocket_connect(url, compression=None, max_size=None, close_timeout=0.2) as s:
        client = RawClient(s)
        if greet:
            await client.hello()
        yield client


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as s:
        s.bind((HOST, 0))
        return s.getsockname()[1]


@contextmanager
def process(*args):
    """`e2sci` as a process of its own, interruptible however the tests were started."""
    child = subprocess.Popen(
        [sys.executable, "-m", "e2sci", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def ended(child):
    """Wait for its end; (code, out, lines of stderr)."""
    out, err = child.communicate(timeout=60)
    assert "Traceback" not in err
    return child.returncode, out, err.splitlines()


def listens(child):
    """The URL that `e2sci cloud` says it listens on."""
    for line in child.stderr:
        if "listens on" in line:
            return line.split("listens on ")[1].split(";")[0]
    raise AssertionError("it ended before it listened")
