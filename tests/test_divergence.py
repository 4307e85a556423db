"""Divergences: known values, their order, and what merging outcomes may hide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

from e2sci.decoding.distribution import Dense, TopK, decode, encode, sketch
from e2sci.decoding.divergence import (
    LN2,
    MEASURES,
    common_outcomes,
    divergence,
    js,
    js_bounds,
    js_fsd,
    kl,
    tv,
)

pytestmark = pytest.mark.filterwarnings("error")

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(2, 60)
spreads = st.sampled_from([0.1, 1.0, 3.0, 10.0])
EPS = 1e-6  # the engines' logits are single precision


def dense(*probs: float) -> Dense:
    with np.errstate(divide="ignore"):
        return Dense(np.log(np.array(probs)).astype(np.float32))


def pair(seed: int, size: int, spread: float) -> tuple[Dense, Dense]:
    """Two related distributions, as those of two models are."""
    rng = np.random.default_rng(seed)
    common = rng.normal(0, spread, size)
    near = common + rng.normal(0, spread / 2, size)
    return Dense(common.astype(np.float32)), Dense(near.astype(np.float32))


def exact(measure: str, p: Dense, q: Dense) -> float:
    return MEASURES[measure](np.exp(p.all_log_probs()), np.exp(q.all_log_probs()))


# ---- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measure", "p", "q", "value"),
    [
        ("js", (1, 0), (0.5, 0.5), 0.75 * np.log(4 / 3)),
        ("kl", (1, 0), (0.5, 0.5), LN2),
        ("kl", (0.5, 0.5), (1, 0), np.inf),
        ("kl", (0.5, 0.5), (0.25, 0.75), 0.5 * np.log(4 / 3)),
        ("tv", (0.7, 0.3, 0), (0.2, 0.3, 0.5), 0.5),
        ("js_fsd", (0.25, 0.75), (0.75, 0.25), 0.5 * np.log(4 / 3)),
        ("js_fsd", (1, 0), (0.5, 0.5), np.inf),
        ("js", (1, 0), (0, 1), LN2),
        ("tv", (1, 0), (0, 1), 1),
        ("kl", (1, 0), (0, 1), np.inf),
    ],
)
def test_values_in_closed_form(measure, p, q, value):
    assert divergence(measure, dense(*p), dense(*q)) == pytest.approx(value, abs=EPS)


@quick
@given(seeds, sizes, spreads)
def test_values_agree_with_scipy(seed, size, spread):
    p, q = (np.exp(d.all_log_probs()) for d in pair(seed, size, spread))
    m = (p + q) / 2
    assert kl(p, q) == pytest.approx(entropy(p, q), abs=EPS)
    assert js(p, q) == pytest.approx(jensenshannon(p, q) ** 2, abs=EPS)
    assert js_fsd(p, q) == pytest.approx((entropy(m, p) + entropy(m, q)) / 2, abs=EPS)
    assert tv(p, q) == pytest.approx(np.maximum(p - q, 0).sum(), abs=EPS)


@quick
@given(seeds, sizes, spreads)
def test_symmetry_and_bounds(seed, size, spread):
    p, q = pair(seed, size, spread)
    for measure in ("js", "tv", "js_fsd"):
        assert divergence(measure, p, q) == pytest.approx(divergence(measure, q, p))
    total = divergence("tv", p, q)
    assert 0 <= total <= 1
    # Lin 1991: TV²/2 ≤ JS ≤ TV·ln 2; and Pinsker.
    assert total**2 / 2 - EPS <= divergence("js", p, q) <= total * LN2 + EPS
    assert 2 * total**2 <= divergence("kl", p, q) + EPS


@quick
@given(seeds, sizes, spreads, st.sampled_from(sorted(MEASURES)))
def test_identical_distributions_do_not_differ(seed, size, spread, measure):
    p, _ = pair(seed, size, spread)
    shifted = Dense(p.logits + np.float32(3))
    assert divergence(measure, p, p) == 0
    assert divergence(measure, p, shifted) == pytest.approx(0, abs=1e-4)
    for k in (1, 5, size):
        assert divergence(measure, p, p.top(k)) == pytest.approx(0, abs=EPS)


def test_disjoint_top_k_share_no_outcome():
    def certain(token: int) -> TopK:
        return TopK(np.array([token]), np.zeros(1), 10)

    # Nothing is known to both: all is one outcome, and no difference can be seen.
    assert divergence("js", certain(1), certain(2)) == 0
    assert js_bounds(certain(1), certain(2))[1] == pytest.approx(LN2)
    assert divergence("js", dense(0, 1, 0), TopK(np.array([0]), np.zeros(1), 3)) == pytest.approx(
        LN2, abs=1e-5
    )


def test_unknown_measure():
    with pytest.raises(KeyError):
        divergence("hellinger", dense(1, 0), dense(0, 1))


# ---- partly known distributions ---------------------------------------------------------------


@quick
@given(seeds, sizes, spreads, st.integers(1, 40), st.integers(1, 40))
def test_exact_js_lies_within_its_bounds(seed, size, spread, k, j):
    p, q = pair(seed, size, spread)
    true = exact("js", p, q)
    for known in [(p, q.top(k)), (p.top(k), q), (p.top(j), q.top(k))]:
        low, high = js_bounds(*known)
        assert low - EPS <= true <= high + EPS
        assert 0 <= low <= high <= LN2
        assert low == divergence("js", *known)
    assert js_bounds(p, q) == (divergence("js", p, q), divergence("js", p, q))


@quick
@given(seeds, sizes, spreads, st.integers(1, 16))
def test_js_lies_within_its_bounds_for_all_a_sketch_may_stand_for(seed, size, spread, k):
    p, draft = pair(seed, size, spread)
    q = decode(encode(draft.top(k)), size)
    rest = np.setdiff1d(np.arange(size), q.ids)
    assume(rest.size)
    low, high = js_bounds(p, q)
    rng = np.random.default_rng(seed)
    for concentration in (0.01, 1.0):
        full = np.zeros(size)
        full[q.ids] = np.exp(q.log_probs)
        full[rest] = q.tail * rng.dirichlet(np.full(rest.size, concentration))
        assert low - EPS <= js(np.exp(p.all_log_probs()), full) <= high + EPS


def test_the_bounds_are_reached():
    """Rests that agree hide nothing, rests that are disjoint all of the bound."""
    p = dense(0.5, 0.5, 0)
    low, high = js_bounds(p, dense(0.5, 0, 0.5).top(1))
    assert low == pytest.approx(0, abs=EPS)
    assert high == pytest.approx(exact("js", p, dense(0.5, 0, 0.5)), abs=1e-5)


@quick
@given(
    seeds,
    sizes,
    st.sampled_from([0.1, 1.0, 3.0]),
    st.integers(1, 16),
    st.sampled_from(sorted(MEASURES)),
)
def test_merging_outcomes_never_adds(seed, size, spread, k, measure):
    p, q = pair(seed, size, spread)
    most = exact(measure, p, q) + 1e-4
    assert divergence(measure, p, q.top(k)) <= most
    assert divergence(measure, p.top(k), q) <= most
    assert divergence(measure, p.top(k), q.top(k)) <= most


@quick
@given(seeds, sizes, st.sampled_from(sorted(MEASURES)), st.floats(0, 60))
def test_every_measure_is_finite_through_a_sketch(seed, size, measure, lead):
    """Also where one side is all but certain and its rest too small to be written down."""
    p, q = pair(seed, size, 1.0)
    for logits in (p.logits, q.logits):
        sure = logits.copy()
        sure[int(np.argmax(logits))] += np.float32(lead)
        for a, b in [(Dense(sure), q), (p, Dense(sure)), (Dense(sure), p), (q, Dense(sure))]:
            coarse = divergence(measure, a, decode(sketch(b), size))
            assert np.isfinite(coarse)


def test_a_sketch_moves_js_very_little():
    moved = []
    for seed in range(60):
        p, q = pair(seed, 2000, 2.5)
        head = q.top(16)
        written = decode(encode(head), 2000)
        moved.append(abs(divergence("js", p, head) - divergence("js", p, written)))
    assert np.mean(moved) < 2e-3
    assert max(moved) < 1e-2


# ---- unequal vocabularies ---------------------------------------------------------------------


@quick
@given(seeds, sizes, spreads, st.integers(1, 20))
def test_padding_is_merged_and_stays_finite(seed, size, spread, padding):
    p, q = pair(seed, size, spread)
    rng = np.random.default_rng(seed)
    padded = Dense(np.append(p.logits, rng.normal(-5, spread, padding)).astype(np.float32))
    for a, b in [(padded, q), (q, padded), (padded, q.top(8)), (padded.top(8), q)]:
        assert 0 <= divergence("js", a, b) <= LN2
        assert 0 <= divergence("tv", a, b) <= 1 + 1e-9
    x, y = common_outcomes(padded, q)
    assert len(x) == len(y) == size + 1
    assert x[-1] == pytest.approx(np.exp(padded.all_log_probs()[size:]).sum(), abs=EPS)
    assert y[-1] == 0
    for measure in MEASURES:
        cut = divergence(measure, padded.limited(size), q)
        assert cut == pytest.approx(divergence(measure, p, q), abs=EPS)


def test_ids_beyond_the_smaller_vocabulary_count_as_the_rest():
    p, q = dense(0.5, 0.5), TopK(np.array([0, 3]), np.log([0.5, 0.5]), 4)
    a, b = common_outcomes(p, q)
    np.testing.assert_allclose(a, [0.5, 0.5], atol=EPS)
    np.testing.assert_allclose(b, [0.5, 0.5], atol=EPS)


@quick
@given(seeds, sizes, st.integers(1, 16), st.sampled_from(sorted(MEASURES)))
def test_impossible_tokens_give_no_nan(seed, size, k, measure):
    rng = np.random.default_rng(seed)
    p, q = pair(seed, size, 1.0)
    for d in (p, q):
        d.logits[rng.integers(0, size, size // 2)] = -np.inf
        d.logits[rng.integers(size)] = 0
    for a, b in [(p, q), (p, q.top(k)), (p.top(k), q), (p.top(k), decode(encode(q.top(k)), size))]:
        value = divergence(measure, a, b)
        assert value >= 0
        assert not np.isnan(value)
