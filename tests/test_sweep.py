"""The sweep in the virtual world, and the labels that are made of it."""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from calibrated import (
    HEADER,
    PAPER,
    TORN,
    request,
)
from e2sci.decoding.distribution import TopK, encode
from e2sci.evaluation import sweep
from e2sci.evaluation.methods import elastic_credit
from e2sci.evaluation.sweep import MULTIPLES, SEGMENT, WINDOWS, Swept
from e2sci.evaluation.traces import RequestTrace, Trace

# ---- the sweep ----------------------------------------------------------------------------


def swept(made: RequestTrace, t: float = 0.2) -> Swept:
    [found] = sweep.sweep([Trace(HEADER, [made])], PAPER, t, 0.9, jobs=0)
    return found


def test_a_perfect_draft_in_the_virtual_world():
    found = swept(request([True] * 80))
    assert len(found.states) == (80 - SEGMENT) // 5
    assert (found.lengths <= SEGMENT).all()
    assert found.lengths[:, :, 1:].mean() > 9
    assert (found.times == found.times[:, :1]).all()  # no threshold makes a difference
    rate = found.times[5:].mean() / SEGMENT
    assert 0.9 * PAPER.draft.ms(1) < rate < 15 < PAPER.target.ms(1)


def test_rejections_cost_time_unless_tolerated():
    found = swept(request([i % 10 != 7 for i in range(80)]), t=0.9 * TORN)
    tolerating = np.array(MULTIPLES) * 0.9 >= 1
    assert found.lengths[:, tolerating].mean() > found.lengths[:, ~tolerating].mean() + 0.5
    slow, fast = found.times[:, ~tolerating].mean(), found.times[:, tolerating].mean()
    assert slow > 1.3 * fast


def test_a_tolerated_end_leaves_the_rest_out():
    made = request([i != 40 for i in range(80)])
    ends = encode(TopK(np.array([1, 7]), np.log([0.2, 0.79]), 10))
    torn = encode(TopK(np.array([1, 7]), np.log([0.6, 0.39]), 10))
    made = msgspec.structs.replace(
        made,
        drafts=[7 if x == 2 else x for x in made.drafts[:-1]] + [7],
        tokens=[*made.tokens[:-1], 7],
        p=[*made.p[:40], torn, *made.p[41:-1], ends],
        q=[*made.q[:40], ends, *made.q[41:-1], ends],
    )
    found = swept(made, t=2 * TORN)
    assert len(found.states) == 6  # up to the end that is tolerated at 40, a segment in between
    assert np.isfinite(found.times).all()


# ---- labels -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_dinkelbach_finds_the_best_ratio(data):
    shape = (3, 4)
    lengths = data.draw(arrays.arrays(float, shape, elements=st.floats(0.5, 10)))
    times = data.draw(arrays.arrays(float, shape, elements=st.floats(1, 50)))
    allowed = data.draw(arrays.arrays(bool, shape))
    allowed[:, 0] = True
    chosen, ratio = sweep.dinkelbach(lengths, times, allowed)
    rows = range(3)
    choices = product(*([j for j in range(4) if allowed[i, j]] for i in rows))
    sums = ([sum(a[i, c[i]] for i in rows) for a in (lengths, times)] for c in choices)
    assert ratio == pytest.approx(max(length / time for length, time in sums))
    assert allowed[list(rows), chosen].all()


PARAMS = elastic_credit(0.2, 0.9)


@given(st.floats(0, 1), st.floats(0.06, 7.9))
def test_omega_gives_the_threshold_back(r, omega):
    t = PARAMS.t_base + PARAMS.a * omega * (r - PARAMS.tau)
    [found] = sweep.omega_of(np.array([t]), np.array([r]), PARAMS)
    assert found == pytest.approx(omega if abs(r - PARAMS.tau) >= 0.02 else 1.0)


def test_omega_stays_in_range():
    r = np.array([0.5, 0.5, 0.99, 0.99, 0.9])
    t = np.array([0.05, 0.35, 0.05, 9.0, 0.35])
    low, high = sweep.OMEGA
    found = sweep.omega_of(t, r, PARAMS)
    assert found == pytest.approx([0.15 / (0.3 * 0.4), low, low, high, 1.0])


def every(r: np.ndarray, t: np.ndarray) -> np.ndarray:
    return np.ones(np.broadcast_shapes(r.shape, t.shape))


def made_up(states: int = 400) -> Swept:
    """High credit: T pays and so does a large window. Low credit: a small window is best."""
    r = np.linspace(0.5, 1.0, states)
    shape = (states, len(MULTIPLES), len(WINDOWS))
    lengths = np.full(shape, 8.0) + np.array(MULTIPLES)[None, :, None]
    wide = np.arange(len(WINDOWS)) * np.where(r > 0.8, -6.0, 6.0)[:, None]
    times = np.broadcast_to(150.0 + wide[:, None], shape)
    return Swept(np.stack([r, np.zeros(states)], 1), lengths, times.copy())


def test_labels_have_the_known_optimum():
    found = sweep.labels([made_up()], every, 0.5, PARAMS)
    low, high = found.states[:, 0] < 0.6, found.states[:, 0] > 0.97
    assert (found.windows[low] == 2).all()
    assert (found.windows[high] == 16).all()
    t = PARAMS.t_base + PARAMS.a * found.omega * (found.states[:, 0] - PARAMS.tau)
    assert t[high] == pytest.approx(PARAMS.t_max)
    assert (found.omega[low] == sweep.OMEGA[0]).all()  # it would loosen there, which ω > 0 can't
    assert (found.accuracy == 1).all()


def test_labels_keep_the_accuracy():
    def harmful(r, t):
        return np.where(t > np.where(r > 0.8, 0.31, 0.11), 0.6, 0.98) + 0 * r

    found = sweep.labels([made_up()], harmful, 0.9, PARAMS)
    r = found.states[:, 0]
    t = PARAMS.t_base + PARAMS.a * found.omega * (r - PARAMS.tau)
    assert t[r > 0.96] == pytest.approx(0.3)
    assert t[r < 0.8] == pytest.approx(0.1)
    assert (found.accuracy == 0.98).all()
    nothing = sweep.labels([made_up()], lambda r, t: 0 * r + 0 * t, 0.9, PARAMS)
    assert nothing.omega[0] == pytest.approx(0.15 / (0.3 * 0.4))  # T_min: the tightest
