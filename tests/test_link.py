"""The arithmetic of the emulated link."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2sci.emulation.link import LINKS, LinkProfile, Outages, Pipe

EPS = 1e-6

spans = st.lists(st.tuples(st.floats(0, 5), st.floats(1e-3, 2)), max_size=4)
sends = st.lists(st.tuples(st.integers(0, 20_000), st.floats(0, 0.5)), min_size=1, max_size=20)


@st.composite
def profiles(draw: st.DrawFn, jitter: bool = True, outages: bool = True) -> LinkProfile:
    rtt = draw(st.floats(0, 200))
    return LinkProfile(
        rtt,
        jitter_ms=draw(st.floats(0, rtt)) if jitter else 0,
        up_mbps=draw(st.none() | st.floats(0.1, 1000)),
        outages=draw(spans) if outages else (),
        seed=draw(st.integers(0, 9)),
    )


def run_pipe(pipe: Pipe, chunks: list[tuple[int, float]]) -> list[tuple[int, float, float]]:
    """(size, sent, arrived) of chunks given as (size, pause before it)."""
    now, seen = 0.0, []
    for size, pause in chunks:
        now += pause
        seen.append((size, now, pipe.send(size, now)))
    return seen


def test_a_chunk_takes_serialisation_and_half_the_round_trip() -> None:
    up = Pipe(LinkProfile(40, up_mbps=10, down_mbps=50), "up")
    assert up.send(50_000, 1.0) == pytest.approx(1.060)  # 40 ms at 10 Mbit/s + 20 ms
    assert up.send(1250, 1.001) == pytest.approx(1.061)  # behind the first, 1 ms of its own
    assert up.send(1250, 2.0) == pytest.approx(2.021)  # the queue is empty again
    down = Pipe(LinkProfile(40, up_mbps=10, down_mbps=50), "down")
    assert down.send(50_000, 1.0) == pytest.approx(1.028)


def test_an_outage_stops_queue_and_flight() -> None:
    up = Pipe(LinkProfile(40, up_mbps=10, outages=[(1.0, 0.5)]), "up")
    assert up.send(0, 0.9) == pytest.approx(0.920)
    assert up.send(0, 0.99) == pytest.approx(1.510)  # half of its way lies behind the outage
    assert up.send(1250, 1.2) == pytest.approx(1.521)  # leaves when the outage ends
    assert up.send(0, 2.0) == pytest.approx(2.020)


def test_a_cut_outage_is_not_the_pipes_affair() -> None:
    profile = LinkProfile(40, outages=[(1.0, 0.5)], outage_mode="cut")
    assert Pipe(profile, "up").send(10, 1.2) == pytest.approx(1.220)


def test_flush_empties_the_queue() -> None:
    up = Pipe(LinkProfile(0, up_mbps=1), "up")
    up.send(1_000_000, 0.0)
    up.flush()
    assert up.send(125, 1.0) == pytest.approx(1.001)


@given(profiles(), sends)
def test_order_is_kept(profile: LinkProfile, chunks: list[tuple[int, float]]) -> None:
    arrivals = [arrived for _, _, arrived in run_pipe(Pipe(profile, "up"), chunks)]
    assert arrivals == sorted(arrivals)


@given(profiles(), sends)
def test_never_earlier_than_the_link_allows(
    profile: LinkProfile, chunks: list[tuple[int, float]]
) -> None:
    least = (profile.rtt_ms - profile.jitter_ms) / 2e3
    per_byte = profile.seconds_per_byte("up")
    for size, sent, arrived in run_pipe(Pipe(profile, "up"), chunks):
        assert arrived >= sent
        assert arrived >= sent + least + size * per_byte - EPS


@given(profiles(outages=False), st.integers(0, 20_000))
def test_jitter_stays_within_its_range(profile: LinkProfile, size: int) -> None:
    took = Pipe(profile, "up").send(size, 0) - size * profile.seconds_per_byte("up")
    assert (profile.rtt_ms - profile.jitter_ms) / 2e3 - EPS <= took
    assert took <= (profile.rtt_ms + profile.jitter_ms) / 2e3 + EPS


def test_jitter_varies_and_repeats_with_its_seed() -> None:
    def delays(seed: int, direction: str = "up") -> list[float]:
        pipe = Pipe(LinkProfile(60, jitter_ms=20, seed=seed), direction)  # type: ignore[arg-type]
        return [pipe.send(1, float(t)) - t for t in range(50)]

    assert delays(1) == delays(1)
    assert delays(1) != delays(2)
    assert delays(1) != delays(1, "down")
    assert min(delays(1)) < 0.025
    assert max(delays(1)) > 0.035


@given(profiles(jitter=False), sends)
def test_throughput_stays_below_the_bandwidth(
    profile: LinkProfile, chunks: list[tuple[int, float]]
) -> None:
    seen = run_pipe(Pipe(profile, "up"), chunks)
    per_byte = profile.seconds_per_byte("up")
    for i, (_, _, first) in enumerate(seen):
        carried = 0
        for size, _, arrived in seen[i + 1 :]:
            carried += size
            assert arrived - first >= carried * per_byte - EPS


@given(profiles(), sends)
def test_nothing_arrives_in_an_outage(
    profile: LinkProfile, chunks: list[tuple[int, float]]
) -> None:
    for _, _, arrived in run_pipe(Pipe(profile, "up"), chunks):
        assert not any(s <= arrived < s + d - EPS for s, d in profile.outages)


@given(profiles(), sends)
def test_outages_only_delay(profile: LinkProfile, chunks: list[tuple[int, float]]) -> None:
    """A chunk is late by no more than all outages together, and not at all without them."""
    with_outages = run_pipe(Pipe(profile, "up"), chunks)
    without = run_pipe(Pipe(profile, "up", Outages()), chunks)
    for (_, _, late), (_, _, plain) in zip(with_outages, without, strict=True):
        assert plain - EPS <= late <= plain + sum(d for _, d in profile.outages) + EPS


@given(spans, st.floats(0, 10))
def test_up_time_and_time_are_each_others_inverse(
    outages: list[tuple[float, float]], now: float
) -> None:
    clock = Outages(outages)
    back = clock.when(clock.uptime(now))
    assert back >= now - EPS
    assert not clock.down(back)
    if not clock.down(now):
        assert back == pytest.approx(now, abs=EPS)


def test_rounding_leads_neither_into_an_outage_nor_before_it() -> None:
    draw = random.Random(0)
    for _ in range(300):
        clock = Outages([(draw.uniform(0, 9), draw.uniform(0, 1)) for _ in range(5)])
        for now in (edge for span in clock.spans for edge in span):
            back = clock.when(clock.uptime(now))
            assert not clock.down(back)
            assert back >= now - EPS
        for now in sorted(draw.uniform(0, 15) for _ in range(5)):
            assert Pipe(LinkProfile(0), "up", clock).send(1, now) >= now


def test_overlapping_outages_are_one() -> None:
    assert Outages([(3, 1), (1, 1), (1.5, 1), (2.5, 0.1)]).spans == [(1, 2.6), (3, 4)]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"rtt_ms": -1}, "rtt_ms"),
        ({"rtt_ms": float("nan")}, "rtt_ms"),
        ({"rtt_ms": float("inf")}, "rtt_ms"),
        ({"rtt_ms": 10, "jitter_ms": 11}, "jitter_ms"),
        ({"rtt_ms": 10, "jitter_ms": -1}, "jitter_ms"),
        ({"rtt_ms": 10, "up_mbps": 0}, "up_mbps"),
        ({"rtt_ms": 10, "down_mbps": float("nan")}, "down_mbps"),
        ({"rtt_ms": 10, "outages": [(-1, 1)]}, "outage"),
        ({"rtt_ms": 10, "outages": [(1, 0)]}, "outage"),
        ({"rtt_ms": 10, "outage_mode": "slow"}, "outage_mode"),
    ],
)
def test_profiles_are_checked(fields: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        LinkProfile(**fields)  # type: ignore[arg-type]


def test_named_profiles_and_unlimited() -> None:
    assert LINKS["mobile"] == LinkProfile(60, jitter_ms=20, up_mbps=1, down_mbps=10)
    assert LinkProfile(1, up_mbps=float("inf")) == LinkProfile(1)
    assert LinkProfile(1).seconds_per_byte("up") == 0
    assert LINKS["paper"].seconds_per_byte("down") == pytest.approx(8 / 50e6)
