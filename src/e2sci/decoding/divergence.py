"""How far two next-token distributions are apart, in nats: JS, KL, TV and FSD's released variant.

Each is an f-divergence, so merging outcomes can only lower it. Where one side is known on its top
k only, both are compared on the *common outcomes*: the ids both know, and everything else as one.
`js_bounds` says how much that can hide:

    JS_coarse ≤ JS ≤ JS_coarse + m_r · h₂(p_r / (p_r + q_r))        (ours)

with p_r, q_r the merged masses, m_r = (p_r + q_r)/2 and h₂ the binary entropy. It holds because
the merged outcome's share of JS is m_r · (h₂(π) − E[h₂(π_i)]), π = p_r/(p_r+q_r), and h₂ ≥ 0.

Thresholds never carry over from one divergence to another.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from e2sci.decoding.distribution import CODE_STEP, Dense, Distribution, Floats, TopK

LN2 = float(np.log(2))
"""Upper bound of the Jensen-Shannon divergence."""

_LEAST = float(np.exp(-255 / CODE_STEP))
"""The least mass of all others. Less is lost in a sketch and in single precision; taken for zero it
would make KL infinite. Raising it to this keeps both bounds."""


def common_outcomes(p: Distribution, q: Distribution) -> tuple[Floats, Floats]:
    """Probabilities of p and q over the outcomes both can tell apart; each sums to 1 (± 1e-7).

    Two dense distributions: every id below the smaller size (ids beyond it are padding on one side
    and merged). Otherwise the ids known to both, and last the mass of all others.
    """
    if isinstance(p, Dense) and isinstance(q, Dense):
        n = min(p.size, q.size)
        a, b = np.exp(p.all_log_probs()), np.exp(q.all_log_probs())
        if p.size == q.size:
            return a, b
        return np.append(a[:n], a[n:].sum()), np.append(b[:n], b[n:].sum())
    if isinstance(p, TopK) and isinstance(q, TopK):
        ids = np.intersect1d(p.ids, q.ids)
    else:
        ids = p.ids if isinstance(p, TopK) else q.ids if isinstance(q, TopK) else np.arange(0)
        ids = ids[ids < min(p.size, q.size)]
    a, b = np.exp(p.log_prob(ids)), np.exp(q.log_prob(ids))
    return np.append(a, max(_LEAST, 1.0 - a.sum())), np.append(b, max(_LEAST, 1.0 - b.sum()))


def kl(p: Floats, q: Floats) -> float:
    """KL(p‖q) = Σ p log(p/q) in nats, in [0, ∞]."""
    used = p > 0
    with np.errstate(divide="ignore"):
        return max(0.0, float((p[used] * (np.log(p[used]) - np.log(q[used]))).sum()))


def js(p: Floats, q: Floats) -> float:
    """Jensen-Shannon: ½KL(p‖m) + ½KL(q‖m), m = (p+q)/2, in [0, ln 2] (the paper's measure)."""
    m = (p + q) / 2
    return min(LN2, (kl(p, m) + kl(q, m)) / 2)


def js_fsd(p: Floats, q: Floats) -> float:
    """½KL(m‖p) + ½KL(m‖q), in [0, ∞]: what the released code of Fuzzy Speculative Decoding
    computes under the name of JS."""
    m = (p + q) / 2
    return (kl(m, p) + kl(m, q)) / 2


def tv(p: Floats, q: Floats) -> float:
    """Total variation: ½ Σ |p − q|, in [0, 1]. 1 − TV bounds the acceptance of any coupling."""
    return float(np.abs(p - q).sum() / 2)


MEASURES: dict[str, Callable[[Floats, Floats], float]] = {
    "js": js,
    "kl": kl,
    "tv": tv,
    "js_fsd": js_fsd,
}


def divergence(measure: str, p: Distribution, q: Distribution) -> float:
    """`measure` between p (target) and q (draft) on their common outcomes.

    A lower bound of the true value unless both are dense. Raises KeyError for an unknown measure.
    """
    return MEASURES[measure](*common_outcomes(p, q))


def js_bounds(p: Distribution, q: Distribution) -> tuple[float, float]:
    """Bounds of JS(p, q) when one side is known on its top k only; equal when both are dense."""
    a, b = common_outcomes(p, q)
    low = js(a, b)
    if isinstance(p, Dense) and isinstance(q, Dense) and p.size == q.size:
        return low, low
    return low, min(LN2, low + _hidden(float(a[-1]), float(b[-1])))


def _hidden(p_rest: float, q_rest: float) -> float:
    """m_r · h₂(p_r/(p_r+q_r)): the most JS that merging the rest can hide."""
    total = p_rest + q_rest
    if p_rest <= 0 or q_rest <= 0:
        return 0.0
    share = p_rest / total
    return total / 2 * float(-share * np.log(share) - (1 - share) * np.log(1 - share))
