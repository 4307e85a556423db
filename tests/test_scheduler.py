"""The cloud's scheduler: shared passes, turns, failures, when to fill, and how much to judge."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2sci.engines.synthetic import EOS, Synthetic, SyntheticConfig
from e2sci.runtime.admission import Limits
from e2sci.runtime.connection import Refused
from e2sci.runtime.passes import PassTimes, measure_passes
from e2sci.runtime.scheduler import PREFILL, Scheduler
from e2sci.runtime.seat import Arrivals
from e2sci.runtime.worker import ThreadWorker
from e2sci.session.cloud import CloudSession
from e2sci.session.line import CloudModel
from e2sci.session.messages import Error, Verdict
from live import TIMES, Edge, LiveCloud, Watched, draft, idle, pair, raw_client, target, until
from world import PROMPT, opening

FLAT = TIMES
LINEAR = PassTimes(tuple((n, 1.0 * n) for n in (1, 2, 4, 8, 16, 32)))
STEEP = PassTimes(((1, 10.0), (16, 100.0), (32, 1000.0)))  # a shared pass has room for 16 tokens
ENDLESS = {"logit_bias": {EOS: -100.0}}


# ---- passes -----------------------------------------------------------------------------------


async def test_requests_share_passes():
    """Eight texts of forty tokens take not much more than forty passes."""
    far = Watched(seconds=0.005)
    async with pair(target_engine=far) as edge:
        options = {"mode": "cloud", "max_tokens": 40, **ENDLESS}
        await asyncio.gather(*(edge.generate(f"n{i}", **options) for i in range(8)))
        assert len(far.passes) < 60
        assert sum(len(p) == 8 for p in far.passes) > 25


async def test_an_own_sequence_each():
    far = Watched(seconds=0.002, slots=4)
    async with pair(target_engine=far) as edge:
        await asyncio.gather(*(edge.generate(f"n{i}", max_tokens=20) for i in range(4)))
        assert {s for p in far.passes for s in p} == {0, 1, 2, 3}


async def test_prompts_are_fed_in_chunks():
    far = Watched()
    async with pair(target_engine=far) as edge:
        await edge.generate("x" * 1200, mode="cloud", raw=True, max_tokens=2)
        assert [sum(p.values()) for p in far.passes] == [PREFILL, PREFILL, 1200 - 2 * PREFILL, 1]


async def test_no_one_starves_beside_a_long_prompt():
    """Whoever is at work gets its turn at least every second pass."""
    far = Watched(seconds=0.0005)
    async with pair(target_engine=far, times=STEEP) as edge:
        options = {"mode": "cloud", "max_tokens": 1000, **ENDLESS}
        short = asyncio.create_task(edge.generate("short", **options))
        await until(lambda: len(far.passes) > 5)
        [mine] = far.passes[-1]
        began = len(far.passes)
        await edge.generate("x" * 1500, raw=True, **{**options, "max_tokens": 1})
        between = far.passes[began:]
        assert len(between) > 90
        assert sum(mine in p for p in between) >= len(between) // 2
        assert max(sum(p.values()) for p in between) <= 16
        short.cancel()


async def test_long_prompts_take_turns():
    """Three at once: each is fed about as often as the others."""
    far = Watched(seconds=0.0005)
    async with pair(target_engine=far, times=STEEP) as edge:
        options = {"mode": "cloud", "raw": True, "max_tokens": 1}
        await asyncio.gather(*(edge.generate(c * 600, **options) for c in "abc"))
        together = far.passes[5:60]
        counts = [sum(s in p for p in together) for s in {s for p in together for s in p}]
        assert len(counts) == 3
        assert max(counts) - min(counts) <= 4


# ---- places -----------------------------------------------------------------------------------


async def test_no_place_is_an_error_that_passes():
    with LiveCloud(Watched(slots=1, seconds=0.005), limits=Limits(waiting=0)) as cloud:
        async with raw_client(cloud.url) as one, raw_client(cloud.url) as two:
            await one.send(opening(drafting=False, max_tokens=2000))
            await one.receive()
            await two.send(opening())
            error = await two.receive()
            assert isinstance(error, Error)
            assert (error.code, error.retryable, error.request) == ("busy", True, 1)
            assert 0.2 <= error.retry_after_s <= 60
        cloud.check()


async def test_a_place_is_taken_over_at_once_and_clean():
    """Its last user's pass may still be running."""
    async with pair() as edge:
        expected = (await edge.generate("second", mode="cloud", max_tokens=20)).token_ids
    far = Watched(slots=1, seconds=0.004)
    async with pair(target_engine=far) as edge:
        for _ in range(3):
            first = asyncio.create_task(edge.generate("first", mode="cloud", max_tokens=500))
            await until(lambda: edge.cloud.scheduler.busy)
            await asyncio.sleep(0.006)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            result = await edge.generate("second", mode="cloud", max_tokens=20)
            assert result.token_ids == expected


# ---- failures ---------------------------------------------------------------------------------

POISON = "\x01"


class Fragile(Watched):
    """Fails a pass, or returns nonsense, when a certain token is fed; counts failures."""

    def __init__(self, how):
        super().__init__(seconds=0.002)
        self.how, self.failures = how, 0

    def forward(self, steps):
        poisoned = [i for i, step in enumerate(steps) if POISON.encode()[0] in step.tokens]
        self.failures += bool(poisoned)
        if poisoned and self.how == "raises":
            raise RuntimeError("it burns")
        outputs = super().forward(steps)
        for i in poisoned:
            outputs[i] = []
        return outputs


@pytest.mark.parametrize("how", ["raises", "returns nothing"])
async def test_a_failure_hits_its_own_request_only(how):
    prompts = [f"n{i}" for i in range(6)]
    async with pair() as edge:
        expected = [(await edge.generate(p, max_tokens=40)).token_ids for p in prompts]
    far = Fragile(how)
    async with pair(target_engine=far) as edge:
        results = asyncio.gather(*(edge.generate(p, max_tokens=40) for p in prompts))
        await until(lambda: len(far.passes) > 3)
        with pytest.raises(Refused, match="the cloud's engine failed"):
            await edge.generate(POISON, max_tokens=40)
        assert far.failures > 0
        assert [r.token_ids for r in await results] == expected


async def test_who_has_left_is_not_tried_again():
    """A shared pass fails; before the second of its requests is tried alone, it leaves."""
    engine, worker = Watched(), ThreadWorker("target")
    scheduler = Scheduler(engine, worker, TIMES)
    model = CloudModel(EOS + 1, 4096, frozenset({EOS}))
    ask = opening(drafting=False)
    said = []
    one, two = (scheduler.take(CloudSession(ask, model), said.extend, ask) for _ in range(2))
    batch = scheduler._gather()
    assert [seat for seat, _ in batch] == [one, two]
    scheduler.leave(two)
    await scheduler._one_by_one(batch, RuntimeError("it burns"))
    assert [list(p) for p in engine.passes] == [[one.sequence]]
    scheduler.leave(one)
    worker.close()


# ---- fill -------------------------------------------------------------------------------------


def verdict(accepted=1, rejected=False):
    return Verdict(request=1, branch=0, start=0, accepted=accepted, rejected=rejected)


def fills(arrivals, now, pass_s, acceptance=1.0):
    return arrivals.fill_from(now, pass_s, acceptance) <= now


def test_a_window_expected_sooner_than_a_pass_is_waited_for():
    arrivals = Arrivals(0.0)
    arrivals.came(0.2)  # windows take 0.2 s
    arrivals.sent(1.0, verdict())
    assert fills(arrivals, 1.0, pass_s=0.1)  # there is time for a pass until 1.2
    assert fills(arrivals, 1.09, pass_s=0.1)
    assert not fills(arrivals, 1.15, pass_s=0.1)
    assert not fills(arrivals, 1.21, pass_s=0.1)  # it may be a little late
    assert fills(arrivals, 1.31, pass_s=0.1)  # but it is not waited for for ever
    assert not fills(arrivals, 1.0, pass_s=0.5)


def test_a_window_that_will_hardly_stand_is_hardly_waited_for():
    arrivals = Arrivals(0.0)
    arrivals.came(0.05)
    arrivals.sent(1.0, verdict())
    assert not fills(arrivals, 1.0, pass_s=0.1)
    assert not fills(arrivals, 1.0, pass_s=0.1, acceptance=0.9)
    assert fills(arrivals, 1.0, pass_s=0.1, acceptance=0.8)  # .8⁴ of a pass is under .05 s
    assert fills(arrivals, 1.06, pass_s=0.1, acceptance=0.2)  # nor if it is late


def test_windows_after_a_rejection_are_expected_by_their_own_times():
    arrivals = Arrivals(0.0)
    arrivals.came(0.01)  # quick while all goes well
    arrivals.sent(1.0, verdict(rejected=True))
    arrivals.came(1.5)  # slow after a cut
    arrivals.sent(2.0, verdict())
    assert not fills(arrivals, 2.0, pass_s=0.1)
    arrivals.sent(3.0, verdict(rejected=True))
    assert fills(arrivals, 3.0, pass_s=0.1)
    assert not fills(arrivals, 3.45, pass_s=0.1)


def test_expectations_follow_what_happens():
    arrivals = Arrivals(0.0)
    for now in range(40):
        arrivals.sent(float(now), verdict())
        arrivals.came(now + (0.02 if now < 20 else 0.4))
    arrivals.sent(100.0, verdict())
    assert fills(arrivals, 100.0, pass_s=0.2)


def test_a_fill_does_not_put_off_the_expected_window():
    arrivals = Arrivals(0.0)
    arrivals.came(0.2)
    arrivals.sent(1.0, verdict())
    arrivals.sent(1.1, verdict(accepted=0))  # what the cloud decoded by itself
    assert not fills(arrivals, 1.15, pass_s=0.1)
    assert fills(arrivals, 1.31, pass_s=0.1)


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
async def test_without_fill_nothing_is_decoded_by_itself(mode):
    far = Watched()
    async with pair(Watched(seconds=0.005), far) as edge:
        task = asyncio.create_task(edge.generate("hello", mode=mode, fill=False, max_tokens=30))
        result = await task
        own = [c for c in result.commits if c.origin == "filled"]
        assert result.stats.cloud_passes <= result.stats.windows + 1
        assert len(own) <= result.stats.windows + 1  # a bonus token costs no pass


async def test_a_slow_draft_does_not_slow_the_cloud_down():
    """It takes a hundred passes' time a token: the cloud writes the text by itself."""
    far, near = Watched(seconds=0.001), Watched(seconds=0.1)
    async with pair(near, far) as edge:
        result = await edge.generate("hello", max_tokens=40, **ENDLESS)
        assert sum(c.origin == "filled" for c in result.commits) > 30
        assert len(near.passes) < 10


async def test_an_edge_that_says_nothing_is_filled_for():
    with LiveCloud() as cloud:
        async with raw_client(cloud.url) as client:
            await client.send(opening(fill=True, max_tokens=20))
            ids = []
            while getattr(message := await client.receive(), "reason", None) is None:
                ids += getattr(message, "ids", b"")
            async with pair() as edge:
                prompt = bytes(PROMPT).decode()
                alone = await edge.generate(prompt, raw=True, mode="cloud", max_tokens=20)
            assert message.reason == alone.finish_reason
            assert len(ids) >= len(alone.token_ids)
        cloud.check()


# ---- sizes of passes --------------------------------------------------------------------------


def test_on_flat_pass_times_everything_is_judged_at_once():
    for acceptance in (0.3, 0.6, 0.98):
        assert FLAT.best_drafts(acceptance, 16) == 16


def test_on_linear_pass_times_plain_decoding_is_faster():
    for acceptance in (0.3, 0.6, 0.98):
        assert LINEAR.best_drafts(acceptance, 16) == 0


def test_a_crowd_judges_fewer_drafts_each():
    """50 ms up to 32 tokens, a quarter of a millisecond each beyond."""
    gpu = PassTimes(((1, 50.0), (32, 50.0), (512, 170.0)))
    sizes = [gpu.best_drafts(0.9, 16, seats) for seats in (1, 4, 16, 64, 256)]
    assert sizes[0] == 16
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 2


def test_in_between_by_acceptance():
    times = PassTimes(((1, 20.0), (32, 82.0)))  # 18 ms, and 2 ms a token
    sizes = [times.best_drafts(a, 32) for a in (0.3, 0.6, 0.8, 0.9, 0.98)]
    assert sizes == sorted(sizes)
    assert 0 <= sizes[0] < sizes[-1] <= 32


@given(
    st.floats(0.01, 0.99), st.integers(1, 40), st.lists(st.floats(0.5, 50), min_size=1, max_size=6)
)
def test_the_best_number_of_drafts_is_the_best(acceptance, waiting, growth):
    points, ms = [], 0.0
    for i, more in enumerate(growth):
        ms += more
        points.append((2**i, ms))
    times = PassTimes(tuple(points))

    def rate(n):
        return sum(acceptance**i for i in range(n + 1)) / times.ms(n + 1)

    best = times.best_drafts(acceptance, waiting)
    assert 0 <= best <= waiting
    assert rate(best) == pytest.approx(max(rate(n) for n in range(waiting + 1)))


def test_times_between_and_beyond_the_measured_ones():
    times = PassTimes(((1, 10.0), (2, 12.0), (4, 20.0)))
    assert [times.ms(n) for n in (1, 2, 3, 4, 5, 14)] == [10, 12, 16, 20, 24, 60]
    assert PassTimes(((1, 10.0),)).ms(50) == 10
    assert PassTimes(((1, 10.0), (2, 9.0))).ms(50) == 9  # noise is no speed-up


@pytest.mark.parametrize(("times", "least", "most"), [(LINEAR, 1, 2), (FLAT, 5, 64)])
async def test_passes_are_sized_by_what_they_cost(times, least, most):
    far = Watched(seconds=0.004)
    async with pair(Synthetic(far.config), far, times=times) as edge:
        await edge.generate("hello", window=8, fill=False, max_tokens=60, **ENDLESS)
        sizes = [sum(p.values()) for p in far.passes[1:]]
        assert least <= max(sizes) <= most


async def test_a_synchronous_window_is_judged_whole():
    """Whatever a pass costs: the edge waits for all of it."""
    far = Watched()
    async with pair(Synthetic(far.config), far, times=LINEAR) as edge:
        await edge.generate("hello", mode="sync", window=6, max_tokens=40, **ENDLESS)
        assert min(sum(p.values()) for p in far.passes[1:5]) >= 6


@pytest.mark.parametrize(("context", "sizes"), [(4096, 6), (16, 4), (2, 1)])
def test_measuring_leaves_nothing_behind(context, sizes):
    engine = Watched(SyntheticConfig(context=context))
    times = measure_passes(engine)
    assert [n for n, _ in times.points] == [1, 2, 4, 8, 16, 32][:sizes]
    assert all(ms > 0 for _, ms in times.points)
    assert engine.length(0) == 0


async def test_a_cloud_measures_itself():
    async with pair(target_engine=target(), times=None) as edge:
        await edge.connect()
        assert edge.pass_times.points == edge.cloud.times.points
        assert len(edge.pass_times.points) == 6


async def test_it_ends_with_requests_under_way():
    """Closing a cloud frees what its clients hold."""
    far = Watched(seconds=0.002)
    with LiveCloud(far) as cloud:
        async with Edge(cloud.url, draft(), patience=0) as edge:
            task = asyncio.create_task(edge.generate("hello", max_tokens=2000, **ENDLESS))
            await until(lambda: cloud.busy)
            await asyncio.to_thread(cloud.kill)
            with pytest.raises(Exception, match="the cloud is gone"):
                await task
        cloud.start()
        await idle(cloud.cloud)
