"""Judging for one request: the acceptance rule, credit, and the record of why.

    judge(draft, p, tokens)   is this draft token let pass, and if not, what stands in its place?
    pick(p, tokens)           the target's own choice, where no draft is
    report()                  what has been judged since the last report, as a verdict carries it

Where the request is, and what becomes of a rejection, is the session's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from e2sci.decoding.acceptance import Judgement, Place, make_rule
from e2sci.decoding.credit import Credit, CreditParams, CreditState
from e2sci.decoding.distribution import Distribution, TopK, decode, pack_ids
from e2sci.decoding.divergence import divergence
from e2sci.decoding.sampling import History
from e2sci.session.messages import (
    MAX_WINDOW,
    CreditView,
    Judged,
    Open,
    ProtocolError,
    Score,
    Window,
    ids_of,
)


@dataclass(frozen=True)
class Draft:
    """A queued draft token and the draft's distribution, where it was sent."""

    token: int
    q: TopK | None


@dataclass(frozen=True)
class Report:
    """The parts of a verdict that say why."""

    credit: CreditView | None
    trace: tuple[Judged, ...]
    scores: tuple[Score, ...]


class Judge:
    """`vocab`: ids below it may occur; `credit` makes what the threshold follows."""

    def __init__(
        self,
        opening: Open,
        vocab: int,
        credit: Callable[[CreditParams, CreditState | None], Credit],
    ) -> None:
        self.rule = make_rule(opening.rule)
        self._credit = credit(opening.credit, opening.state)
        self._opening = opening
        self._vocab = vocab
        self._trace: list[Judged] = []
        self._scores: list[Score] = []

    def judge(self, draft: Draft, p: Distribution, tokens: History, passes: int) -> Judgement:
        """Judge `draft` behind `tokens`, in pass number `passes`. Raises ProtocolError on a sketch
        that doesn't fit."""
        place = Place(self.limited(p), self._opening.sampling, tokens)
        threshold = self._credit.threshold
        try:
            outcome = self.rule.judge(place, draft.token, draft.q, threshold)
        except ValueError as error:
            raise ProtocolError("bad_window", str(error)) from None
        if self._opening.trace:
            self._trace.append(self._record(place, draft, outcome, threshold, passes))
        self._observe(place, outcome)
        self._score(place.p, outcome.token)
        return outcome

    def pick(self, p: Distribution, tokens: History) -> int:
        """The target's own token behind `tokens`."""
        token = Place(p, self._opening.sampling, tokens).y
        self._score(p, token)
        return token

    def limited(self, p: Distribution) -> Distribution:
        """p without the ids that mean nothing at the other end (padding, foreign tails)."""
        return p.limited(self._vocab)

    def drafts(self, message: Window) -> list[Draft]:
        """The draft tokens of a window. Raises ProtocolError."""
        ids = ids_of(message.ids, self._vocab, MAX_WINDOW, "window")
        if not self.rule.needs_sketch and not message.sketches:
            return [Draft(token, None) for token in ids]
        if len(message.sketches) != len(ids):
            raise ProtocolError(
                "bad_window",
                f"{len(ids)} tokens with {len(message.sketches)} sketches; expected one a token",
            )
        try:
            sketches = [decode(data, self._vocab) for data in message.sketches]
        except ValueError as error:
            raise ProtocolError("bad_window", str(error)) from None
        return [Draft(token, q) for token, q in zip(ids, sketches, strict=True)]

    def report(self) -> Report:
        """Why, since the last report."""
        trace, self._trace = tuple(self._trace), []
        scores, self._scores = tuple(self._scores), []
        return Report(None if self.rule.lossless else self._view(), trace, scores)

    def _observe(self, place: Place, outcome: Judgement) -> None:
        params = self._credit.params
        base = outcome.agreed
        if outcome.distance is not None:
            base = base or outcome.distance <= params.t_base
        spends = params.budget is not None and not outcome.agreed and outcome.accepted
        regret = place.regret(outcome.token) if spends else 0.0
        self._credit.observe(accepted=outcome.accepted, base=base, regret=regret)

    def _view(self) -> CreditView:
        credit = self._credit
        return CreditView(
            credit=credit.value,
            threshold=credit.threshold,
            window=credit.suggested_window,
            state=msgspec.structs.replace(credit.state),
        )

    def _score(self, p: Distribution, token: int) -> None:
        """Keep what p says of a token that is committed, if the edge wants to know."""
        if self._opening.top is None:
            return
        best = p.top(self._opening.top) if self._opening.top else None
        self._scores.append(
            Score(
                log_prob=float(p.log_prob(np.array([token]))[0]),
                ids=pack_ids(best.ids.tolist()) if best else b"",
                log_probs=tuple(best.log_probs.tolist()) if best else (),
            )
        )

    def _record(
        self, place: Place, draft: Draft, outcome: Judgement, threshold: float, passes: int
    ) -> Judged:
        # Under rejection q is the processed, truncated q', which is no match for the raw p.
        q = draft.q if self._opening.rule.name != "rejection" else None
        return Judged(
            position=place.position,
            draft=draft.token,
            pick=place.y,
            js=divergence("js", place.p, q) if q else None,
            tv=divergence("tv", place.p, q) if q else None,
            p=float(np.exp(place.p.log_prob(np.array([draft.token]))[0])),
            agreed=outcome.agreed,
            accepted=outcome.accepted,
            threshold=threshold,
            credit=self._credit.value,
            window=passes,
        )
