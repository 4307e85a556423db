"""Which way of writing pays, by what was measured: a pure function."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from e2sci.runtime.choice import MARGIN, Measured, Way, choose, estimate
from e2sci.runtime.passes import PassTimes


def flat(ms: float) -> PassTimes:
    return PassTimes(((1, ms), (32, ms)))


GROWING = PassTimes(((1, 47), (2, 93), (4, 172), (8, 329), (16, 471), (32, 936)))
measured = st.builds(
    Measured,
    draft_ms=st.floats(1, 100),
    rtt_ms=st.floats(0, 1000),
    acceptance=st.floats(0, 1),
    passes=st.floats(5, 200).map(flat) | st.just(GROWING),
    load=st.floats(0.5, 4),
)


@given(measured)
@settings(max_examples=60, deadline=None)
def test_the_fastest_is_never_expected_to_be_slower_than_the_cloud_alone(m: Measured) -> None:
    choice = choose(m)
    assert choice.best.ms <= m.pass_ms(1)
    assert choice.pays == (choice.cloud.ms > MARGIN * choice.draft.ms)


@given(measured)
@settings(max_examples=60, deadline=None)
def test_fill_is_never_expected_to_cost_time(m: Measured) -> None:
    filled, waiting = (estimate(m, Way("pipelined", fill, 1)).ms for fill in (True, False))
    assert filled <= min(waiting, m.pass_ms(1)) * (1 + 1e-9)


@given(measured, st.lists(st.floats(0, 20), min_size=2, max_size=4).map(sorted))
@settings(max_examples=60, deadline=None)
def test_the_more_the_cloud_is_worth_the_less_of_it_is_used(
    m: Measured, gammas: list[float]
) -> None:
    """By MARGIN, since below it the cloud alone is preferred."""
    chosen = [choose(m, gamma).best for gamma in gammas]
    for dear, cheap in zip(chosen[1:], chosen, strict=False):
        assert dear.cloud_ms <= MARGIN * cheap.cloud_ms * (1 + 1e-9)
        assert dear.ms * MARGIN >= cheap.ms * (1 - 1e-9)


@given(measured, st.floats(1.01, 3))
@settings(max_examples=60, deadline=None)
def test_better_circumstances_never_make_it_slower(m: Measured, factor: float) -> None:
    ms = choose(m).best.ms
    better = (
        replace(m, draft_ms=m.draft_ms / factor),
        replace(m, rtt_ms=m.rtt_ms / factor),
        replace(m, acceptance=min(1.0, m.acceptance * factor)),
    )
    for other in better:
        assert choose(other).best.ms <= MARGIN * ms * (1 + 1e-9)


def test_known_choices() -> None:
    paper = Measured(10, 40, 0.8, flat(50))
    assert [choose(paper, g).best.way.mode for g in (0, 1, 4)] == ["pipelined", "pipelined", "sync"]
    assert choose(paper).best.way == Way("pipelined", True, 8, doubt=0.9, early=1)
    assert not choose(paper, 1).best.way.fill
    assert not choose(replace(paper, draft_ms=60)).pays
    assert not choose(replace(paper, acceptance=0.1)).pays
    assert not choose(Measured(34, 40, 0.9, GROWING)).pays
    assert choose(paper, window=7).draft.way == Way("pipelined", True, 7)
    assert choose(paper, 9, fill=True).draft.way.fill
    assert choose(replace(paper, draft_ms=2)).draft.way.early == 5  # a frame every 10 ms
    assert choose(replace(paper, draft_ms=1)).draft.way.window == 10
