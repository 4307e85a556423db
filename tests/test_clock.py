"""The virtual clock, emulated devices and links: times are exact, runs are repeatable."""

from __future__ import annotations

import asyncio
import time

import pytest

from e2sci.emulation.clock import Stuck, run
from e2sci.emulation.device import Device, DeviceProfile, Metered
from e2sci.emulation.link import LinkProfile
from e2sci.emulation.profile import PROFILES, from_dict, profile
from e2sci.emulation.wire import link_pair
from e2sci.engines.base import Step
from e2sci.engines.synthetic import Synthetic, SyntheticConfig
from e2sci.runtime.transport import ChannelClosed


def test_an_hour_passes_in_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 60)
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run(main) == pytest.approx(3660)
    assert time.perf_counter() - began < 5


def test_events_come_in_the_order_of_their_times() -> None:
    async def main() -> list[str]:
        said: list[str] = []

        async def say(after: float, word: str) -> None:
            await asyncio.sleep(after)
            said.append(word)

        await asyncio.gather(say(3, "c"), say(1, "a"), say(2, "b"), say(2, "b2"))
        return said

    assert run(main) == ["a", "b", "b2", "c"]


def test_a_wait_that_nothing_ends_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        run(main)


# ---- devices ------------------------------------------------------------------------------


def device(points: tuple[tuple[int, float], ...], per_token: float = 0.0) -> tuple[Device, Metered]:
    engine = Metered(Synthetic(SyntheticConfig(), 2))
    return Device(DeviceProfile(points, per_token, watts=10, idle_watts=1), engine), engine


def test_calls_take_the_devices_time_one_behind_the_other() -> None:
    async def main() -> list[float]:
        worker, engine = device(((1, 10.0), (4, 40.0)), per_token=5.0)
        loop, ends = asyncio.get_running_loop(), []

        async def feed(sequence: int, n: int) -> None:
            await worker.submit(lambda: engine.forward([Step(sequence, [100] * n)]))
            ends.append(round(loop.time() * 1000, 6))

        await asyncio.gather(feed(0, 1), feed(1, 2), feed(0, 6))
        assert worker.busy_s == pytest.approx(0.08)
        assert worker.calls == 3
        return ends

    assert run(main) == [10.0, 30.0, 80.0]  # 10; 20 interpolated; 40 and 2 tokens beyond


def test_calls_that_feed_nothing_take_no_time_but_wait_their_turn() -> None:
    async def main() -> None:
        worker, engine = device(((1, 10.0),))
        loop = asyncio.get_running_loop()
        first = worker.submit(lambda: engine.forward([Step(0, [100])]))
        cut = worker.submit(lambda: engine.truncate(0, 0))
        await cut
        assert loop.time() == pytest.approx(0.01)
        assert first.done()
        assert engine.length(0) == 0

    run(main)


def test_a_cancelled_call_never_runs_and_an_error_reaches_the_caller() -> None:
    async def main() -> None:
        worker, engine = device(((1, 10.0),))
        running = worker.submit(lambda: engine.forward([Step(0, [100])]))
        dropped = worker.submit(lambda: engine.forward([Step(1, [100])]))
        wrong = worker.submit(lambda: engine.forward([Step(0, [10**6])]))
        dropped.cancel()
        with pytest.raises(ValueError, match="range"):
            await wrong
        assert running.done()
        assert engine.length(1) == 0
        worker.close()
        with pytest.raises(RuntimeError):
            worker.submit(lambda: None)

    run(main)


@pytest.mark.parametrize(
    ("points", "error"),
    [((), "points"), (((2, 1.0), (1, 2.0)), "ascending"), (((1, 0.0),), "more than 0")],
)
def test_devices_that_can_not_be(points: tuple[tuple[int, float], ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        DeviceProfile(points)


# ---- the wire -----------------------------------------------------------------------------


def test_frames_take_the_links_time_in_order() -> None:
    async def main() -> None:
        edge, cloud = link_pair(LinkProfile(40, up_mbps=1, down_mbps=8))
        loop = asyncio.get_running_loop()
        size = await edge.send(b"x" * 119)  # 125 bytes with header and mask: 1 ms at 1 Mbit/s
        await edge.send(b"y" * 119)
        assert size == 125
        assert await cloud.receive() == b"x" * 119
        assert loop.time() == pytest.approx(0.021)
        assert await cloud.receive() == b"y" * 119
        assert loop.time() == pytest.approx(0.022)
        assert edge.sent == [125, 125]
        before = loop.time()
        assert await edge.ping() == pytest.approx(0.04, abs=2e-4)
        assert loop.time() - before == pytest.approx(0.04, abs=2e-4)
        await cloud.close()
        with pytest.raises(ChannelClosed):
            await edge.receive()
        with pytest.raises(ChannelClosed):
            await edge.send(b"z")

    run(main)


def test_an_outage_stalls_frames_and_cuts_are_refused() -> None:
    async def main() -> float:
        edge, cloud = link_pair(LinkProfile(20, outages=[(0.0, 2.0)]))
        await edge.send(b"x")
        await cloud.receive()
        return asyncio.get_running_loop().time()

    assert run(main) == pytest.approx(2.01)
    with pytest.raises(ValueError, match="stall"):
        link_pair(LinkProfile(20, outages=[(0.0, 2.0)], outage_mode="cut"))


# ---- profiles -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_profiles_survive_their_file(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.toml"
    path.write_text(PROFILES[name].to_toml())
    assert profile(str(path)) == PROFILES[name]


def test_the_papers_profile_is_the_designs() -> None:
    paper = PROFILES["paper"]
    assert (paper.draft.ms(1), paper.target.ms(32), paper.link.rtt_ms) == (10, 50, 40)
    assert paper.target.ms(72) == 60
    assert PROFILES["slow-edge"].target.ms(1) == 60
    assert PROFILES["mobile"].link.jitter_ms == 20


def test_a_short_file_is_enough(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.toml"
    path.write_text("[draft]\nms = 8\n[target]\npoints = [[1, 40.0], [8, 54.0]]\n[link]\nrtt_ms=9")
    mine = profile(str(path))
    assert mine.name == "mine"
    assert mine.draft.ms(32) == 8
    assert mine.target.ms(10) == 58  # on by the slope of the last points
    assert mine.colocated.ms(1) == 4


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"draft": {"ms": 1, "points": [[1, 1.0]]}}, "either ms or points"),
        ({"draft": {"msec": 1}}, "no 'msec'"),
        ({"link": {"rtt": 1}}, "rtt"),
        ({"link": {"rtt_ms": -1}}, "rtt_ms"),
        ({"cloud": {}}, "expected sections"),
    ],
)
def test_bad_profiles(change: dict, error: str) -> None:  # type: ignore[type-arg]
    good = {"name": "x", "draft": {"ms": 1}, "target": {"ms": 2}, "link": {"rtt_ms": 1}}
    with pytest.raises(ValueError, match=error):
        from_dict({**good, **change})


def test_an_unknown_profile_names_the_nearest(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="paper"):
        profile("papper")
    with pytest.raises(ValueError, match="can't read"):
        profile(str(tmp_path / "none.toml"))


def test_frames_that_arrive_together_keep_their_order() -> None:
    """Jitter can make many arrive at once."""

    async def main() -> None:
        edge, cloud = link_pair(LinkProfile(60, jitter_ms=60, seed=3))
        frames = [bytes([n]) for n in range(200)]
        for frame in frames:
            await edge.send(frame)
            await asyncio.sleep(0.001)
        assert [await cloud.receive() for _ in frames] == frames

    run(main)
