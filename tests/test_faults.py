"""What may go wrong between an edge and its clouds, many times each, in ways drawn by lot.

Whatever happens: no token is lost or said twice, strict text is the target's, and afterwards no
cloud holds a place or a cache for anyone. `E2SCI_FAULT_RUNS=200` makes more runs of each kind.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack, asynccontextmanager
from random import Random

import pytest

from e2sci.engines.synthetic import EOS, Synthetic
from e2sci.runtime.cloud import Cloud
from e2sci.server.cloud_app import listening
from e2sci.session.messages import Finished, Opened, ProtocolError, Verdict, decode_message
from live import HOST, TIMES, Edge, draft, free_port, idle, listens, process, target, until
from replicas import Inline, Proxy, Site, cut_within
from world import DRAFT, World, alone, opening

RUNS, AT_ONCE = int(os.environ.get("E2SCI_FAULT_RUNS", "60")), 20
TOKENS = 16
KINDS = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 3, "top_k": 20}}
NEAR, FAR = draft(), target()  # what they have computed is known to all their copies


def engine(original):
    copy = Synthetic(original.config)
    copy._remembered = original._remembered
    return copy


def edge(clouds, **options):
    return Edge(clouds, engine(NEAR), worker=Inline(), patience=60, **options)


@pytest.fixture(scope="module")
def expected():
    """The target's own text, by kind."""

    async def texts():
        async with site() as cloud, edge(cloud) as alone:
            return {
                name: (await alone.generate("hello", mode="cloud", **ask(name))).token_ids
                for name in KINDS
            }

    return asyncio.run(texts())


def ask(kind):
    return {**KINDS[kind], "max_tokens": TOKENS}


def drawn(random):
    """A kind of request, with options drawn by lot."""
    kind = random.choice(list(KINDS))
    mode = random.choice(["pipelined", "pipelined", "sync", "cloud"])
    options = ask(kind) | {"mode": mode}
    if mode != "cloud":
        options["window"] = random.choice([1, 3, 8])
    return kind, options


def site(name="cloud"):
    return Site(name, lambda: engine(FAR), worker=lambda: Inline(0.001))


@asynccontextmanager
async def on_a_port():
    """A cloud behind a real socket; yields the port."""
    cloud = Cloud(engine(FAR), times=TIMES, worker=Inline(0.001))
    async with cloud, listening(cloud, HOST, 0) as port:
        yield port
        await idle(cloud)


async def many(run, runs=RUNS, at_once=AT_ONCE):
    """`run(random)` for every seed, some at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(seed):
        async with places:
            try:
                await run(Random(seed))
            except Exception as error:
                error.add_note(f"seed {seed}")
                raise

    async with asyncio.TaskGroup() as group:
        for seed in range(runs):
            group.create_task(one(seed))


def whole(result, expected):
    assert result.token_ids == expected
    first = result.prompt_tokens
    assert [c.position for c in result.commits] == list(range(first, first + len(expected)))
    assert result.finish_reason in ("length", "stop")


# ---- the link ---------------------------------------------------------------------------------


async def test_a_connection_cut_at_any_byte(expected):
    """In either direction, once or twice, in the handshake too."""
    cuts = 0

    async def run(random):
        nonlocal cuts
        plan = cut_within(random, random.choice([400, 1500]), random.choice([1, 2]))
        async with Proxy(port, plan) as proxy, edge(proxy.url) as ours:
            kind, options = drawn(random)
            whole(await ours.generate("hello", **options), expected[kind])
        cuts += proxy.cuts

    async with on_a_port() as port:
        await many(run)
    assert cuts > RUNS / 2


async def test_a_link_that_stalls_for_longer_than_the_heartbeat(expected):
    """Nothing is closed, nothing comes: the edge notices by itself."""
    resumed = 0

    async def run(random):
        nonlocal resumed
        left = random.randrange(1, TOKENS - 4)
        kind, options = drawn(random)
        async with (
            Proxy(port) as proxy,
            edge(proxy.url, heartbeat_s=0.5) as ours,
        ):
            async for piece in ours.stream("hello", **options):
                if left > 0 and (left := left - len(piece.commits)) <= 0:
                    proxy.freeze()
            whole(piece.result, expected[kind])
            resumed += piece.result.stats.reconnects > 0

    async with on_a_port() as port:
        await many(run, at_once=100)
    assert resumed > RUNS / 2


# ---- the cloud --------------------------------------------------------------------------------


async def passed(cloud, n, text):
    """Until the cloud has made `n` passes, or the text is done without them."""
    await until(lambda: cloud.passes >= n or text.done(), 60)


async def test_a_cloud_killed_and_started_again(expected):
    reconnects = 0

    async def run(random):
        nonlocal reconnects
        kind, options = drawn(random)
        async with site() as cloud, edge(cloud) as ours:
            text = asyncio.create_task(ours.generate("hello", **options))
            await passed(cloud, random.randint(1, 6), text)
            await cloud.kill()
            await asyncio.sleep(random.uniform(0, 0.02))
            await cloud.start()
            whole(await text, expected[kind])
            reconnects += text.result().stats.reconnects

    await many(run)
    assert reconnects > RUNS / 2


async def test_one_of_two_clouds_killed(expected):
    """And back again, or not."""
    moved = 0

    async def run(random):
        nonlocal moved
        kind, options = drawn(random)
        async with site("a") as first, site("b") as second, edge([first, second]) as ours:
            text = asyncio.create_task(ours.generate("hello", **options))
            await passed(first, random.randint(1, 6), text)
            await first.kill()
            if random.random() < 0.5:
                await first.start()
            whole(await text, expected[kind])
            moved += second.passes > 0

    await many(run)
    assert moved > RUNS / 2


async def test_a_process_that_is_killed(expected):
    """SIGKILL, for real."""
    args = ("cloud", "--model", "synthetic:seed=11", "--listen", f"{HOST}:{free_port()}")
    with ExitStack() as stack:
        child = stack.enter_context(process(*args))
        url = await asyncio.to_thread(listens, child)
        # Without fill the text takes as long as the draft does.
        slow = Edge(url, engine(NEAR), worker=Inline(0.05), patience=60)
        async with slow as ours:
            for kind in KINDS:
                killed = False
                async for piece in ours.stream("hello", fill=False, **ask(kind)):
                    if piece.commits and not killed:
                        killed = True
                        child.kill()
                        child.wait()
                        child = stack.enter_context(process(*args))
                whole(piece.result, expected[kind])
                assert piece.result.stats.reconnects == 1


# ---- the messages -----------------------------------------------------------------------------


class Echoing(World):
    """Any message that was ever sent may come again, at any time, a resume between or not. Where a
    session takes that for a breach of protocol, the request is resumed, as runtimes do."""

    def _start(self):
        self.ever = {"up": [], "down": []}
        self.echoes = 12
        super()._start()

    def _possible(self):
        events = super()._possible()
        if self.echoes and any(self.ever.values()):
            events.append(self._echo)
        return events

    def _echo(self):
        self.echoes -= 1
        way = self.random.choice([way for way, sent in self.ever.items() if sent])
        frame = self.random.choice(self.ever[way])
        (self.up if way == "up" else self.down).appendleft(frame)

    def _send_up(self, messages):
        before = len(self.up)
        super()._send_up(messages)
        self.ever["up"] += list(self.up)[before:]

    def _send_down(self, messages):
        before = len(self.down)
        super()._send_down(messages)
        self.ever["down"] += list(self.down)[before:]

    def _arrive_up(self):
        try:
            super()._arrive_up()
        except ProtocolError:
            self._kill()

    def _arrive_down(self):
        message = decode_message(self.down[0])
        edge = self.edge
        before = (list(edge.committed), len(edge.tail), edge.branch)
        ends = isinstance(message, Finished) and not edge.finished
        if ends or isinstance(message, Opened):
            self.down.popleft()  # of an old request: told from ours by its number
            return
        try:
            super()._arrive_down()
        except ProtocolError:
            assert isinstance(message, Verdict)
            assert (list(edge.committed), len(edge.tail), edge.branch) == before
            self._kill()


def test_messages_that_come_late_or_twice():
    for seed in range(RUNS):
        random = Random(seed)
        ask = opening(fill=random.random() < 0.5, lookahead=random.random() < 0.8, max_tokens=30)
        world = Echoing(
            ask, Random(seed), draft=DRAFT, window=random.choice([1, 4, 8]),
            kill_at=random.choice([None, random.randrange(1, 30)]),
        )  # fmt: skip
        outcome = world.run()
        assert outcome.output == alone(ask), seed
        positions = [c.position for c in outcome.commits]
        assert positions == list(range(positions[0], positions[0] + len(positions))), seed


# ---- the edge ---------------------------------------------------------------------------------


async def test_an_edge_that_is_gone_without_a_word():
    """In the middle of anything, to a cloud that another uses."""

    async def run(random):
        _, options = drawn(random)
        async with edge(url) as ours:
            running = asyncio.create_task(ours.generate("hello", **options))
            await asyncio.sleep(random.uniform(0, 0.1))
            if channel := ours._known.connections[0]._channel:
                channel._socket.transport.abort()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async with on_a_port() as port, edge(url := f"ws://{HOST}:{port}") as other:
        endless = {"logit_bias": {EOS: -100.0}, "max_tokens": 256}
        watched = asyncio.create_task(other.generate("hello", mode="cloud", **endless))
        await many(run)
        assert len((await watched).token_ids) == 256
