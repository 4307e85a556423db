"""A connection that is cut, a cloud that dies: the text goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from e2sci.emulation.link import LinkProfile
from e2sci.emulation.proxy import Link
from e2sci.engines.synthetic import Synthetic, SyntheticConfig
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.request import CloudLost
from e2sci.server.cloud_app import listening
from live import TIMES, Edge, LiveCloud, Watched, draft, idle, pair, target, until

GREEDY = {"max_tokens": 60}
SAMPLED = {"max_tokens": 60, "temperature": 0.9, "seed": 3, "repetition_penalty": 1.1}


@asynccontextmanager
async def far_away(engine, rtt_ms=4.0):
    """A cloud behind a function that gives an edge with a link of its own."""
    async with Cloud(engine, times=TIMES) as cloud, listening(cloud, "127.0.0.1", 0) as port:

        @asynccontextmanager
        async def edge(**options):
            async with AsyncExitStack() as stack:
                link = await stack.enter_async_context(Link("127.0.0.1", port, LinkProfile(rtt_ms)))
                yield await stack.enter_async_context(Edge(link.url(), draft(), **options)), link

        yield cloud, edge


async def alone(options):
    async with pair() as edge:
        return (await edge.generate("hello", mode="cloud", **options)).token_ids


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
async def test_cuts_at_any_time_change_nothing(options):
    expected = await alone(options)

    async def run(edge_on_link, seed):
        random = Random(seed)
        mode = random.choice(["sync", "pipelined", "cloud"])
        settings = {} if mode == "cloud" else {"window": random.choice([1, 3, 8])}
        cuts = sorted(random.choices(range(1, 50), k=3))
        async with edge_on_link() as (edge, link):
            done = 0
            async for piece in edge.stream("hello", mode=mode, **settings, **options):
                done += len(piece.commits)
                while cuts and done >= cuts[0]:
                    cuts.pop(0)
                    asyncio.get_running_loop().call_later(random.uniform(0, 0.01), link.cut)
            assert piece.result.token_ids == expected, (mode, settings)
            return piece.result.stats.reconnects

    async with far_away(Watched(seconds=0.003)) as (cloud, edge_on_link):
        reconnects = await asyncio.gather(*(run(edge_on_link, seed) for seed in range(10)))
        assert all(reconnects)
        await idle(cloud)


@pytest.mark.parametrize("accept", ["rejection", "fuzzy", "elastic", "typical"])
async def test_lossy_rules_go_on_where_they_were(accept):
    """Without fill the text depends on positions alone, credit included: it travels along."""
    options = {"accept": accept, "temperature": 0.8, "fill": False, "max_tokens": 60}
    async with (
        far_away(Watched(seconds=0.002)) as (_, edge_on_link),
        edge_on_link() as (edge, link),
    ):
        whole = await edge.generate("hello", **options)
        text = asyncio.create_task(edge.generate("hello", **options))
        for _ in range(3):
            await asyncio.sleep(0.03)
            link.cut()
        result = await text
        assert result.token_ids == whole.token_ids
        assert result.stats.reconnects > 0
        if accept == "elastic":
            assert result.stats.threshold == whole.stats.threshold
            assert result.stats.credit == whole.stats.credit


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
async def test_a_cloud_killed_and_restarted(options):
    expected = await alone(options)
    engine = Watched(seconds=0.001)
    engine.hook = lambda n: n in (3, 9) and cloud.kill()
    with LiveCloud(engine) as cloud:
        async with Edge(cloud.url, draft(), patience=10) as edge:
            text = asyncio.create_task(edge.generate("hello", **options))
            for _ in range(2):
                await until(lambda: not cloud._thread.is_alive())
                cloud.start()
            result = await text
        assert result.token_ids == expected
        assert result.stats.reconnects == 2
        cloud.idle()


async def test_any_number_of_losses_with_progress_between():
    expected = await alone(GREEDY)
    engine = Watched(seconds=0.002)
    async with far_away(engine, 1.0) as (_, edge_on_link), edge_on_link() as (edge, link):
        since = 0
        async for piece in edge.stream("hello", mode="cloud", **GREEDY):
            since += len(piece.commits)
            if since >= 4:
                since = 0
                link.cut()
        assert piece.result.token_ids == expected
        assert piece.result.stats.reconnects > 5


async def test_many_requests_share_one_broken_connection():
    async with pair() as edge:
        prompts = [f"question {i}" for i in range(8)]
        expected = [(await edge.generate(p, mode="cloud", **GREEDY)).token_ids for p in prompts]
    engine = Watched(seconds=0.004)
    async with far_away(engine) as (cloud, edge_on_link), edge_on_link() as (edge, link):
        texts = asyncio.gather(*(edge.generate(p, **GREEDY) for p in prompts))
        await until(lambda: cloud.scheduler.busy == 8)
        await asyncio.sleep(0.05)
        link.cut()
        results = await texts
        assert [r.token_ids for r in results] == expected
        assert [r.stats.reconnects for r in results] == [1] * 8
        assert link.connections == 2


async def test_its_own_ghost_does_not_keep_a_request_out():
    """One slot, and the cloud has not noticed yet that the old connection is dead."""
    expected = await alone(GREEDY)
    engine = Watched(SyntheticConfig(seed=11), slots=1, seconds=0.004)
    async with far_away(engine) as (cloud, edge_on_link), edge_on_link() as (edge, link):
        text = asyncio.create_task(edge.generate("hello", **GREEDY))
        await until(lambda: cloud.scheduler.busy)
        ghost = cloud.scheduler._seats[0]
        leave = cloud.scheduler.leave

        async def noticed_late():
            await asyncio.sleep(0.2)
            cloud.scheduler.leave = leave
            leave(ghost)

        cloud.scheduler.leave = lambda seat: None if seat is ghost else leave(seat)
        link.cut()
        noticed = asyncio.create_task(noticed_late())
        assert (await text).token_ids == expected
        await noticed


async def test_a_cloud_gone_for_good_leaves_the_text_so_far():
    expected = await alone(GREEDY)
    engine = Watched(seconds=0.001)
    engine.hook = lambda n: n == 6 and cloud.kill()
    with LiveCloud(engine) as cloud:
        async with Edge(cloud.url, draft(), patience=0.2) as edge:
            with pytest.raises(CloudLost, match=r"gone: can't reach ws://.+: nothing listens"):
                await edge.generate("hello", **GREEDY)
            cloud._thread.join()
            cloud.start()
            engine.hook = None
            assert (await edge.generate("hello", **GREEDY)).token_ids == expected


async def test_the_text_so_far_is_the_beginning_of_the_text():
    expected = await alone(GREEDY)
    engine = Watched(seconds=0.001)
    engine.hook = lambda n: n == 6 and cloud.kill()
    with LiveCloud(engine) as cloud:
        async with Edge(cloud.url, draft(), patience=0) as edge:
            shown = ""
            try:
                async for piece in edge.stream("hello", **GREEDY):
                    shown += piece.text
            except CloudLost as lost:
                result = lost.result
        assert result.finish_reason == "lost"
        assert 0 < len(result.token_ids) < 60
        assert result.token_ids == expected[: len(result.token_ids)]
        assert result.text.startswith(shown)
        assert len(result.commits) == len(result.token_ids)


async def test_another_model_does_not_go_on_with_the_text():
    """A cloud that comes back with a vocabulary of its own is refused in mid-answer."""

    class Foreign(Synthetic):
        def __post_init__(self):
            super().__post_init__()
            self.tokenizer.name = lambda token: b"x%d" % token

    engine = Watched(seconds=0.001)
    engine.hook = lambda n: n == 10 and cloud.kill()
    with LiveCloud(engine) as cloud:
        async with Edge(cloud.url, draft(), patience=5) as edge:
            text = asyncio.create_task(edge.generate("hello", **GREEDY))
            await until(lambda: not cloud._thread.is_alive())
            cloud.engine = Foreign(target().config)
            cloud.start()
            with pytest.raises(CloudLost, match="different vocabularies"):
                await text


async def test_another_model_of_the_same_vocabulary_does_not_either():
    engine = Watched(seconds=0.002)
    engine.hook = lambda n: n == 5 and cloud.kill()
    with LiveCloud(engine) as cloud:
        async with Edge(cloud.url, draft(), patience=10) as edge:
            text = asyncio.create_task(edge.generate("hello", mode="cloud", max_tokens=50))
            await until(lambda: not cloud._thread.is_alive())
            engine.info = replace(engine.info, name="another")
            cloud.start()
            with pytest.raises(CloudLost, match="it serves another, not synthetic") as caught:
                await text
        assert caught.value.result.finish_reason == "lost"
        cloud.idle()
