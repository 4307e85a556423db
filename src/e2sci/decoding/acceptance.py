"""The acceptance rules: may a draft token stand, and what stands there if not?

One interface for all five (`Rule`). A rule says how the draft proposes a token, what must travel
up with it, and how the target judges it at one position:

    strict     accept x iff x = y, y the target's own pick            the target's text, exactly
    rejection  accept iff u < p'(x)/q'(x), else sample (p'-q')⁺        distributed as the target
    fuzzy      accept iff D(p,q) ≤ T, T constant, else y               Fuzzy SD (FSD)
    elastic    accept iff x = y or D(p,q) ≤ T_t, else y                E²-SCI
    typical    accept iff x = y or p'(x) > min(ε, δ·e^{-H(p')})        Medusa

p, q are target and draft at temperature 1; p', q' the same after penalties, temperature and
filters. `elastic` takes D = JS (the paper's) or the regret log p(y) − log p(x) (ours), which needs
nothing from the draft but its token. Accepting on agreement (x = y) is ours: rejecting x there
emits the same token and only wastes a round trip. `fuzzy` keeps FSD's own rule unless told.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import msgspec
import numpy as np

from e2sci.decoding import divergence as div
from e2sci.decoding.distribution import (
    SKETCH_SIZE,
    Distribution,
    TopK,
    decode,
    encode,
    sketch,
)
from e2sci.decoding.noise import Stream, uniform
from e2sci.decoding.sampling import (
    History,
    SamplingParams,
    Support,
    chance,
    pick,
    pick_from,
    support,
    support_head,
)

RuleName = Literal["strict", "rejection", "fuzzy", "elastic", "typical"]
Measure = Literal["js", "kl", "tv", "js_fsd", "regret"]


class RuleParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which rule judges, and its constants. Raises ValueError out of range.

    `measure`: D of fuzzy and elastic; `agreement`: accept on x = y (None: the rule's own way:
    all but fuzzy do); `p_min` in [0, 1]: never accept a token with p(x) below it, unless it is the
    target's pick (ours); `epsilon`, `delta` in (0, 1]: of the typical rule (Medusa's .09, .3).
    """

    name: RuleName = "strict"
    measure: Measure = "js"
    agreement: bool | None = None
    p_min: float = 0.0
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.p_min <= 1:
            raise ValueError(f"p_min is {self.p_min}; expected 0 to 1")
        if not (0 < self.epsilon <= 1 and 0 < self.delta <= 1):
            raise ValueError("epsilon and delta of the typical rule must lie in (0, 1]")
        if self.name == "fuzzy" and self.measure == "regret":
            raise ValueError("fuzzy compares distributions; regret goes with elastic")


@dataclass(frozen=True)
class Place:
    """One position under judgement: the target's distribution and what sampling makes of it."""

    p: Distribution
    params: SamplingParams
    history: History

    @property
    def position(self) -> int:
        return len(self.history)

    @cached_property
    def y(self) -> int:
        """The target's own pick."""
        return pick(self.p, self.params, self.history)

    @cached_property
    def support(self) -> Support:
        return support(self.p, self.params, self.history)

    def prob(self, x: int) -> float:
        """p'(x)."""
        return chance(self.p, self.params, self.history, x)

    def regret(self, x: int) -> float:
        """log p(y) − log p(x) in nats: what the target loses by x. ≥ 0 under greedy."""
        at_y, at_x = self.p.log_prob(np.array([self.y, x]))
        return float(at_y - at_x) if np.isfinite(at_y) else 0.0


@dataclass(frozen=True)
class Judgement:
    """The outcome at one position.

    `token` stands there: the draft's if `accepted`, the target's otherwise. `distance` is D(p, q)
    of a rule that has one, in nats, else None.
    """

    accepted: bool
    token: int
    agreed: bool
    distance: float | None = None


@dataclass(frozen=True)
class Proposal:
    """A draft token and the sketch of q that travels with it, if the rule needs one. `confidence`:
    max q, in (0, 1], where it was asked for."""

    token: int
    sketch: bytes | None = None
    confidence: float = 1.0


class Rule(Protocol):
    """How one position is proposed and judged."""

    @property
    def needs_sketch(self) -> bool:
        """Whether the uplink must carry a sketch of q beside the token."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether the text (or its distribution) is the target's."""
        ...

    @property
    def eager(self) -> bool:
        """Whether the text can't depend on the draft, so that a known pick may be sent at once."""
        ...

    def propose(
        self, q: Distribution, params: SamplingParams, history: History, *, with_sketch: bool
    ) -> Proposal:
        """The draft's token behind `history`."""
        ...

    def judge(self, place: Place, x: int, q: TopK | None, threshold: float) -> Judgement:
        """Judge draft token x. `threshold` in nats; ignored by rules without one."""
        ...


@dataclass(frozen=True)
class _PickingRule:
    """What all rules but `rejection` share: the draft picks with the target's noise."""

    rule: RuleParams

    needs_sketch = False
    lossless = False
    eager = False

    def propose(
        self, q: Distribution, params: SamplingParams, history: History, *, with_sketch: bool
    ) -> Proposal:
        x = pick(q, params, history)
        return Proposal(x, sketch(q, keep=x) if with_sketch else None)

    def _sound(self, place: Place, x: int) -> bool:
        """Whether x passes the floor p_min."""
        if self.rule.p_min <= 0:
            return True
        return float(np.exp(place.p.log_prob(np.array([x]))[0])) >= self.rule.p_min


class Strict(_PickingRule):
    """x = y. Exact for greedy and sampling, since both ends share their noise."""

    lossless = True
    eager = True

    def judge(self, place: Place, x: int, q: TopK | None, threshold: float) -> Judgement:
        return Judgement(x == place.y, place.y, x == place.y)


class Thresholded(_PickingRule):
    """D ≤ T (fuzzy), and also x = y (elastic)."""

    @property
    def needs_sketch(self) -> bool:  # type: ignore[override]
        return self.rule.measure != "regret"

    @property
    def agreement(self) -> bool:
        if self.rule.agreement is None:
            return self.rule.name == "elastic"
        return self.rule.agreement

    def judge(self, place: Place, x: int, q: TopK | None, threshold: float) -> Judgement:
        agreed = x == place.y
        if self.rule.measure == "regret":
            distance = place.regret(x)
        else:
            assert q is not None
            distance = div.divergence(self.rule.measure, place.p, q)
        tolerated = distance <= threshold and (agreed or self._sound(place, x))
        accepted = tolerated or (agreed and self.agreement)
        return Judgement(accepted, x if accepted else place.y, agreed, distance)


class Typical(_PickingRule):
    """Medusa's typical acceptance (Cai et al. 2024, eq. 1), and x = y."""

    def judge(self, place: Place, x: int, q: TopK | None, threshold: float) -> Judgement:
        agreed = x == place.y
        # p at temperature 1 when greedy: p' is then a single token and its entropy says nothing.
        p_x, entropy = self._typicality(place, x)
        bound = min(self.rule.epsilon, self.rule.delta * float(np.exp(-entropy)))
        agreement = self.rule.agreement is not False
        accepted = (agreed and agreement) or (p_x > bound and (agreed or self._sound(place, x)))
        return Judgement(accepted, x if accepted else place.y, agreed)

    def _typicality(self, place: Place, x: int) -> tuple[float, float]:
        if place.params.greedy:
            return float(np.exp(place.p.log_prob(np.array([x]))[0])), place.p.entropy
        logp = place.support.log_probs[np.isfinite(place.support.log_probs)]
        return place.prob(x), float(-(np.exp(logp) * logp).sum())


class Rejection(_PickingRule):
    """Leviathan's and Chen's rule, exact in distribution.

    The draft samples from the *sketch* of q', so what the cloud divides by is exactly what the
    token was drawn from, however coarse the sketch.
    """

    needs_sketch = True
    lossless = True

    def propose(
        self, q: Distribution, params: SamplingParams, history: History, *, with_sketch: bool
    ) -> Proposal:
        head = support_head(q, params, history, SKETCH_SIZE)
        data = encode(TopK(head.ids, head.log_probs, q.size))
        drawn = self._drawn_from(decode(data, q.size))
        return Proposal(pick_from(drawn, params.seed, len(history), Stream.DRAFT), data)

    def judge(self, place: Place, x: int, q: TopK | None, threshold: float) -> Judgement:
        assert q is not None
        drawn = self._drawn_from(q)
        p_x, q_x = place.prob(x), drawn.prob(x)
        if q_x <= 0:
            raise ValueError(f"draft token {x} is not in its own sketch")
        seed, position = place.params.seed, place.position
        if uniform(seed, position, Stream.ACCEPT) < p_x / q_x:
            return Judgement(True, x, True)
        token = pick_from(_residual(place.support, drawn), seed, position, Stream.RESIDUAL)
        return Judgement(False, token, token == x)

    @staticmethod
    def _drawn_from(q: TopK) -> Support:
        known = q.without_tail()
        return Support(known.ids, known.log_probs)


def _residual(p: Support, q: Support) -> Support:
    """norm(max(p − q, 0)); p itself when rounding leaves nothing of it."""
    left = np.exp(p.log_probs)
    for token, log_prob in zip(q.ids, q.log_probs, strict=True):
        left[p.ids == token] -= np.exp(log_prob)
    keep = left > 0
    if not keep.any():
        return p
    return Support(p.ids[keep], np.log(left[keep] / left[keep].sum()))


def make_rule(params: RuleParams) -> Rule:
    """The rule that `params` describe."""
    match params.name:
        case "strict":
            return Strict(params)
        case "rejection":
            return Rejection(params)
        case "typical":
            return Typical(params)
        case _:
            return Thresholded(params)
