"""The analytic yardsticks: known values, limits, and no simulated schedule above the best one."""

from __future__ import annotations

from random import Random

import pytest

from e2sci.decoding import yardsticks
from e2sci.decoding.schedule import best_schedule
from e2sci.runtime.passes import PassTimes

CPU = PassTimes(((1, 47.0), (2, 93.0), (4, 172.0), (8, 329.0), (16, 471.0), (32, 936.0)))


def flat(tokens: int) -> float:
    return 50.0


def test_tokens_of_a_window():
    assert yardsticks.tokens_per_window(0, 5) == 1
    assert yardsticks.tokens_per_window(1, 5) == 6
    assert yardsticks.tokens_per_window(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)


def test_known_values():
    assert yardsticks.cloud_alone(50) == 20
    assert yardsticks.synchronous(1, 5, 10, flat, 40) == pytest.approx(1000 * 6 / (50 + 40 + 50))
    assert yardsticks.pipelined(0.9, 10, flat, 40) == pytest.approx(1000 / (10 + 0.1 * 90))
    assert yardsticks.break_even_rtt(0.8, 10, 50) == pytest.approx((40 - 10) / 0.2)
    assert yardsticks.break_even_rtt(0.1, 10, 50) < 0
    assert yardsticks.break_even_rtt(1.0, 10, 50) == float("inf")


def test_verifying_pays_in_the_size_that_suits_the_acceptance():
    assert yardsticks.verify_ms(1.0, CPU.ms) == pytest.approx(min(936 / 32, 471 / 16), rel=0.01)
    assert yardsticks.verify_ms(0.0, CPU.ms) == 47


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_the_best_schedule_is_never_below_the_cloud_alone(alpha):
    assert best_schedule(alpha, 33, CPU.ms, 40) >= 1000 / 47 - 0.1


def test_a_perfect_draft_sets_the_pace():
    assert best_schedule(1.0, 10, flat, 40) == pytest.approx(100, rel=0.02)


def simulated(alpha: float, t_draft: float, t_pass, rtt: float, most: int) -> float:
    """Tokens/s, drawn at random, of a schedule that judges up to `most` waiting drafts."""
    random, time, tokens = Random(1), 0.0, 0
    cut = lead = -rtt / t_draft  # drafts that the cloud has waiting
    while tokens < 20_000:
        judge = min(most, max(0, int(lead)))
        time += t_pass(judge + 1)
        agreed = next((i for i in range(judge) if random.random() >= alpha), judge)
        tokens += agreed + 1
        differs = lead >= judge + 1 and random.random() >= alpha  # the next draft, from the pick
        lead = max(cut, lead + t_pass(judge + 1) / t_draft - (judge + 1))
        if agreed < judge or differs:
            lead = cut
    return 1000 * tokens / time


@pytest.mark.parametrize(("t_draft", "t_pass"), [(33.5, CPU.ms), (10, flat)])
@pytest.mark.parametrize("alpha", [0.85, 0.967])
def test_no_simple_schedule_exceeds_it(alpha, t_draft, t_pass):
    best = best_schedule(alpha, t_draft, t_pass, 40)
    rates = [simulated(alpha, t_draft, t_pass, 40, n) for n in (0, 1, 3, 7, 15, 31)]
    assert max(rates) <= 1.03 * best
    assert max(rates) >= 0.75 * best
