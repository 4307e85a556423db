"""Credit along a trace: the thresholds it sets, and the answers that stay right with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrated import (
    HEADER,
    mixed,
    request,
)
from e2sci.decoding.credit import CreditParams
from e2sci.evaluation import calibration as files
from e2sci.evaluation import follow
from e2sci.evaluation.methods import elastic_credit
from e2sci.evaluation.traces import Trace


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.sampled_from([0.0, 0.1, 0.3]))
def test_a_constant_threshold_accepts_what_the_trace_says(seed, t):
    made = mixed(seed)
    followed = follow.follow(made, CreditParams.constant(t))
    assert (followed.accepted == made.accepted(t)).all()
    assert (followed.thresholds == t).all()
    assert followed.ends.tolist() == list(range(5, 121, 5))
    shares = made.accepted(t).reshape(-1, 5).mean(1)
    r = 0.6  # τ of the defaults
    first = r + 0.3 * (shares[0] - r)
    assert followed.states[0] == pytest.approx([first, first - r])


def test_thresholds_follow_credit():
    good, bad = request([True] * 60), request([False] * 60, [0.5] * 60)
    params = elastic_credit(0.2, 0.5)
    assert follow.follow(good, params).thresholds[-1] == pytest.approx(0.35, abs=0.1)
    assert follow.follow(good, params).thresholds[-1] > 0.2
    assert follow.follow(bad, params).thresholds[-1] < 0.2


def test_the_matched_threshold_accepts_as_much_as_elastic():
    traces = [Trace(HEADER, [mixed(seed) for seed in range(4)])]
    params = elastic_credit(0.2, 0.8)
    constant, recorded = follow.used(traces, params)
    accepted = [follow.follow(r, params).accepted for r in traces[0].requests]
    assert traces[0].acceptance(constant) == pytest.approx(np.concatenate(accepted).mean())
    assert traces[0].acceptance(constant - 1e-6) < np.concatenate(accepted).mean()
    assert len(recorded) == 4 * 24
    assert params.t_min <= min(recorded) < max(recorded) <= params.t_max
    long = [Trace(HEADER, [mixed(seed, 700) for seed in range(5)])]
    assert len(follow.used(long, params)[1]) == files.MOST_RECORDED
    assert follow.matched([Trace(HEADER, [request([True] * 9)])], 9) == 0


def test_kept_share_follows_the_records():
    n = 90
    credit = np.linspace(0.6, 1.0, n)
    thresholds = np.tile([0.05, 0.1, 0.3], (n, 1))
    kept = np.ones((n, 3), bool)
    kept[:30, 2] = False  # loose hurts where credit is low
    share = follow.kept_share(credit, thresholds, kept)
    at = np.array([0.0, 0.05, 0.1, 0.2, 0.3, 0.5])
    low, high = (share(np.full(6, r), at) for r in (0.62, 0.98))
    assert low[0] == high[0] == 1
    assert (np.diff(low) <= 0).all()
    assert (np.diff(high) <= 0).all()
    assert low[4] == low[5] < 0.35
    assert high[4] > 0.85
    assert low[2] > low[3] > low[4]
    assert share(np.array([[0.62], [0.98]]), at[None]).shape == (2, 6)
