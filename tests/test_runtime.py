"""Edge and cloud for real on an event loop, over queues and over WebSockets, synthetic models."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import aclosing

import pytest

from e2sci.decoding.sampling import SamplingParams
from e2sci.engines.base import text_of
from e2sci.engines.synthetic import EOS, SyntheticConfig
from e2sci.runtime.connection import CloudUnreachable
from e2sci.runtime.options import Options
from e2sci.runtime.text import prompt_ids
from e2sci.runtime.transport import ChannelClosed
from live import BlockingEdge, Edge, LiveCloud, Watched, cached, draft, idle, pair, target, until
from world import alone, opening

RULES = ["strict", "rejection", "fuzzy", "elastic", "typical"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}])
async def test_strict_text_is_the_clouds(sampling):
    async with pair() as edge:
        options = {"max_tokens": 40, **sampling}
        alone = await edge.generate("hello", mode="cloud", **options)
        for mode in ("sync", "pipelined"):
            for fill in (False, True):
                both = await edge.generate("hello", mode=mode, fill=fill, **options)
                assert both.token_ids == alone.token_ids
                assert both.text == alone.text
                assert fill or both.stats.accepted > 0
        drafted = await edge.generate("hello", mode="draft", **options)
        assert drafted.token_ids != alone.token_ids


async def test_the_cloud_alone_is_the_world_without_time():
    """The event loop gives what the sessions give without it."""
    async with pair() as edge:
        got = await edge.generate(
            "tell me: ", raw=True, mode="cloud", temperature=0.8, max_tokens=40
        )
        ask = opening(sampling=SamplingParams(temperature=0.8))
        assert got.token_ids == alone(ask, target())


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
@pytest.mark.parametrize("accept", RULES)
async def test_every_rule_runs_in_every_mode(accept, mode):
    async with pair() as edge:
        result = await edge.generate(
            "hello", mode=mode, accept=accept, temperature=0.8, seed=4, max_tokens=40
        )
        assert result.finish_reason in ("stop", "length")
        assert len(result.token_ids) == len(result.commits) <= 40
        assert result.text == text_of(edge.engine.tokenizer, result.token_ids)


@pytest.mark.parametrize("accept", RULES)
async def test_a_synchronous_window_yields_a_bonus_token(accept):
    """Under every rule: an identical draft's windows of 5 yield 6 tokens a pass."""
    async with pair(target()) as edge:
        result = await edge.generate("hello", mode="sync", accept=accept, window=5, max_tokens=60)
        assert len(result.token_ids) == 60
        assert result.stats.windows <= 11
        assert result.stats.cloud_passes <= 12


async def test_sockets_make_no_difference():
    async with pair() as edge:
        inside = await edge.generate("hello", temperature=0.7, max_tokens=50)
    with LiveCloud() as cloud:
        async with Edge(cloud.url, draft()) as edge:
            outside = await edge.generate("hello", temperature=0.7, max_tokens=50)
        assert outside.token_ids == inside.token_ids
        cloud.idle()


# ---- the Python API ---------------------------------------------------------------------------


async def test_a_stream_is_its_result_in_pieces():
    async with pair() as edge:
        pieces = [p async for p in edge.stream("hello", max_tokens=50)]
        result = pieces[-1].result
        assert [p.result for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert "".join(p.text for p in pieces) == result.text
        assert [c.token for p in pieces for c in p.commits] == result.token_ids


@pytest.mark.parametrize("mode", ["cloud", "draft", "sync", "pipelined"])
async def test_abandoning_a_stream_frees_both_ends_at_once(mode):
    engine, far = Watched(seconds=0.001, slots=1), Watched(seconds=0.001, slots=1)
    async with pair(engine, far) as edge:
        async with aclosing(edge.stream("hello", mode=mode, max_tokens=500)) as pieces:
            async for _ in pieces:
                break
        assert len(edge._free) == 1
        await idle(edge.cloud)
        await until(lambda: cached(engine) == 0)
        assert (await edge.generate("hello", mode=mode, max_tokens=5)).token_ids


async def test_leaving_the_loop_early_frees_both_ends():
    async with pair(Watched(slots=1), Watched(seconds=0.001, slots=1)) as edge:
        async for _ in edge.stream("hello", max_tokens=500):
            break
        assert (await edge.generate("hello", max_tokens=5)).token_ids
        await idle(edge.cloud)


@pytest.mark.parametrize("mode", ["cloud", "draft", "sync", "pipelined"])
async def test_cancelling_the_task_frees_both_ends(mode):
    engine, far = Watched(seconds=0.001, slots=1), Watched(seconds=0.001, slots=1)
    async with pair(engine, far) as edge:
        task = asyncio.create_task(edge.generate("hello", mode=mode, max_tokens=500))
        await until(lambda: len(engine.passes) + len(far.passes) > 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(edge._free) == 1
        await idle(edge.cloud)
        await until(lambda: cached(engine) == 0)


async def test_generations_beyond_the_drafts_slots_wait_their_turn():
    async with pair(Watched(SyntheticConfig(seed=11), slots=1)) as edge:
        results = await asyncio.gather(*(edge.generate("hello", max_tokens=20) for _ in range(4)))
        assert len({tuple(r.token_ids) for r in results}) == 1


async def test_two_edges_at_once():
    with LiveCloud() as cloud:
        async with Edge(cloud.url, draft()) as one, Edge(cloud.url, draft(divergence=2.0)) as two:
            first, second = await asyncio.gather(
                one.generate("hello", max_tokens=60), two.generate("hello", max_tokens=60)
            )
            assert first.token_ids == second.token_ids
            assert first.stats.acceptance_rate > second.stats.acceptance_rate


async def test_a_fresh_edge_says_what_it_is_connected_to():
    async with pair() as edge:
        with pytest.raises(ValueError, match="connect"):
            _ = edge.cloud_model
        assert await edge.connect() == []
        assert edge.cloud_model == "synthetic"
        assert edge.pass_times.ms(1) == 1.0
        assert await edge.ping() >= 0


async def test_options_come_from_the_edge_and_change_by_call():
    base = Options(max_tokens=7, sampling=SamplingParams(temperature=0.5, seed=2))
    async with pair(options=base) as edge:
        usual = await edge.generate("hello")
        assert len(usual.token_ids) == 7
        assert (await edge.generate("hello", max_tokens=3)).token_ids == usual.token_ids[:3]
        assert (await edge.generate("hello", seed=3)).token_ids != usual.token_ids
        with pytest.raises(ValueError, match="no such option: maxtokens"):
            await edge.generate("hello", maxtokens=3)


async def test_drafting_alone_needs_no_cloud():
    async with Edge(None, draft()) as edge:
        result = await edge.generate("hello", mode="draft", max_tokens=20)
        assert result.token_ids
        assert {str(c.origin) for c in result.commits} == {"drafted"}
        with pytest.raises(ValueError, match="no cloud"):
            await edge.generate("hello")


async def test_a_draft_slot_survives_a_cloud_that_is_not_there():
    engine = Watched(slots=1)
    async with Edge("ws://127.0.0.1:9", engine, patience=0) as edge:
        for _ in range(2):
            with pytest.raises(CloudUnreachable, match="nothing listens there"):
                await edge.generate("hello")
        assert len(edge._free) == 1


def test_blocking():
    with LiveCloud() as cloud, BlockingEdge(cloud.url, draft()) as edge:
        result = edge.generate("hello", max_tokens=30)
        pieces = list(edge.stream("hello", max_tokens=30))
        assert pieces[-1].result.token_ids == result.token_ids
        with pytest.raises(ValueError, match="empty"):
            edge.generate(" ")


def test_a_blocking_stream_abandoned_early():
    with LiveCloud(Watched(seconds=0.001)) as cloud, BlockingEdge(cloud.url, draft()) as edge:
        for _ in edge.stream("hello", max_tokens=500):
            break
        cloud.idle()
        assert edge.generate("hello", max_tokens=5).token_ids


async def test_a_chat_is_a_prompt():
    chat = [{"role": "user", "content": "hello"}]
    async with pair() as edge:
        text = await edge.generate("hello", max_tokens=20)
        assert (await edge.generate(chat, max_tokens=20)).token_ids == text.token_ids
        assert text.prompt_tokens == len(prompt_ids(edge.engine, "hello", system=None, raw=False))
        told = await edge.generate("hello", system="Be brief.", max_tokens=20)
        assert told.token_ids != text.token_ids


# ---- a connection that breaks -----------------------------------------------------------------


async def test_a_connection_lost_while_waiting_for_a_slot():
    """The one that waits has a connection, no slot, and nobody to tell it that both are gone."""
    with LiveCloud() as cloud:
        async with Edge(cloud.url, Watched(seconds=0.002, slots=1), patience=5) as edge:
            await edge.connect()
            local = asyncio.create_task(edge.generate("hello", mode="draft", max_tokens=100))
            await until(lambda: not edge._free)
            waiting = asyncio.create_task(edge.generate("hello", max_tokens=10))
            await asyncio.sleep(0.02)
            await asyncio.to_thread(cloud.kill)
            cloud.start()
            await until(lambda: edge._known.connections[0]._channel is None)
            await local
            assert len((await asyncio.wait_for(waiting, 5)).token_ids) == 10


async def test_many_that_wait_for_a_lost_cloud_give_up_together():
    tries = 0

    async def dial():
        nonlocal tries
        tries += 1
        await asyncio.sleep(0.005)
        raise ChannelClosed("nobody home")

    async with Edge(dial, draft(), patience=0) as edge:
        results = await asyncio.gather(
            *(edge.generate("hello") for _ in range(8)), return_exceptions=True
        )
        assert {type(r) for r in results} == {CloudUnreachable}
        assert tries == 1


async def test_a_place_is_free_again_at_once():
    """One slot at the cloud: whoever is done makes room for the next request, pass or no pass."""
    async with pair(draft(), Watched(seconds=0.01, slots=1)) as edge:
        for _ in range(3):
            stopped = await edge.generate("hello", stop=("1",), max_tokens=50)
            assert stopped.finish_reason == "stop"


def test_ctrl_c_in_a_blocking_generation_ends_it():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    far = Watched(seconds=0.01)
    far.hook = lambda n: n == 5 and signal.pthread_kill(main.ident, signal.SIGINT)
    main = threading.main_thread()
    try:
        with LiveCloud(far) as cloud, BlockingEdge(cloud.url, draft()) as edge:
            with pytest.raises(KeyboardInterrupt):
                edge.generate("hello", max_tokens=3000, logit_bias={EOS: -100.0})
            cloud.check()
    finally:
        signal.signal(signal.SIGINT, handler)


def test_ctrl_c_in_a_blocking_stream_ends_it():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    far = Watched(seconds=0.01)
    far.hook = lambda n: n == 9 and signal.pthread_kill(main.ident, signal.SIGINT)
    main = threading.main_thread()
    try:
        with LiveCloud(far) as cloud, BlockingEdge(cloud.url, draft()) as edge:
            with pytest.raises(KeyboardInterrupt):
                for _ in edge.stream("hello", max_tokens=3000, logit_bias={EOS: -100.0}):
                    pass
            cloud.idle()
            assert edge.generate("hello", max_tokens=5).token_ids
            cloud.check()
    finally:
        signal.signal(signal.SIGINT, handler)
