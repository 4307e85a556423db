"""The cloud's side of one request, as a state machine: no I/O, no clock, no model.

Theory of operation
-------------------
`tokens` is prompt + output, all of it final. The first `cached` of them are in the engine's cache.
The *carry* is the target's distribution for the next position; it is known when everything
committed was cached, and stays known if the cache is then given away (`evicted()`). `queue` holds
draft tokens of the current branch, in order, not yet judged.

    window arrives ──► tokens already committed are compared and skipped (the first difference
                       kills the branch), the rest is queued
    carry + queue  ──► *pre-hit*: the first queued token is judged at once, without a pass
    empty window   ──► no drafts will come for now: until the next window the cloud decodes by
                       itself, also without fill (ours)
    no carry       ──► `plan()` says what the next pass feeds: what is committed but not cached
                       (the prompt, a correction, a pre-hit token), then the queue; `passed()`
                       judges the queue with what comes back: the longest accepted prefix stands
    rejection      ──► the target's token stands, the queue is dropped, the branch is dead
    all accepted   ──► the last distribution is the new carry

With lookahead off the bonus token is then taken from the carry at once, which is classic
speculative decoding. Rules whose text can't depend on the draft (strict) take it whenever no draft
is waiting: it costs no pass and tells the edge of a mismatch a window sooner (ours).

*Fill*: `fill()` commits the carry's pick, `plan(fill=True)` runs a pass with nothing queued. When
to do so is the runtime's decision, since only it knows the time; the text is right either way.

The end is at EOS and at the token budget; whatever was accepted beyond is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from e2sci.decoding.acceptance import Judgement
from e2sci.decoding.credit import Credit, CreditParams, CreditState
from e2sci.decoding.distribution import Distribution, pack_ids
from e2sci.session.judge import Draft, Judge
from e2sci.session.line import CloudModel, Line
from e2sci.session.messages import Message, Open, Verdict, Window


@dataclass(frozen=True)
class Pass:
    """One session's part of a target pass: cut its cache to `keep`, feed `tokens`, return the last
    `outputs` distributions. `drafts` of the tokens are unjudged."""

    keep: int
    tokens: list[int]
    outputs: int
    drafts: int


class CloudSession(Line):
    """One request at the cloud. Raises ProtocolError when the opening can't be served.

    `credit` makes what the threshold follows. `prehit=False` judges the first queued token with the
    rest of its window, behind the pass: there to measure what the pre-hit is worth.
    """

    def __init__(
        self,
        opening: Open,
        model: CloudModel,
        *,
        credit: Callable[[CreditParams, CreditState | None], Credit] = Credit,
        prehit: bool = True,
    ) -> None:
        super().__init__(opening, model)
        self.cached = 0
        self.carry: Distribution | None = None
        self.in_vain = 0
        self._begun = False
        self._prehit = prehit
        self._judging = Judge(opening, model.vocab, credit)

    # ---- events ---------------------------------------------------------------------------

    def window(self, message: Window) -> list[Message]:
        """Draft tokens have come, or word that none will for now (a window without tokens). Raises
        ProtocolError on a window that can't be ours."""
        self._receive(message)
        return self._use_carry()

    def plan(self, budget: int, *, fill: bool) -> Pass | None:
        """What the next pass should feed, at most `budget` ≥ 1 tokens; None if nothing.

        `fill`: also with no drafts waiting. The prompt is first fed in any case, in chunks.
        """
        missing = self.tokens.tokens[self.cached :]
        if self.finished:
            return None
        if not missing:
            return self._plan_behind_carry(budget)
        if self._begun and not self.queue and not fill:
            return None
        if len(missing) > budget:
            return Pass(self.cached, missing[:budget], 0, 0)
        room = min(budget - len(missing), self._end - len(self.tokens))
        drafts = [d.token for d in self.queue[:room]]
        return Pass(self.cached, missing + drafts, len(drafts) + 1, len(drafts))

    def _plan_behind_carry(self, budget: int) -> Pass | None:
        """Without pre-hit: the carry judges the first draft, but only when the pass is done."""
        if self._prehit or self.carry is None:
            return None
        drafts = [d.token for d in self.queue[: min(budget, self._end - len(self.tokens))]]
        return Pass(self.cached, drafts, len(drafts), len(drafts)) if drafts else None

    def passed(self, done: Pass, outputs: Sequence[Distribution]) -> list[Message]:
        """The planned pass is done; `outputs` are its distributions."""
        self._count(done)
        self.cached += len(done.tokens) - done.drafts
        if self.finished or not done.outputs:
            return []
        self._begun = True
        if len(outputs) == done.drafts and self.carry is not None:
            outputs = [self.carry, *outputs]
        start = len(self.tokens)
        judged, self.queue = self.queue[: done.drafts], self.queue[done.drafts :]
        outcomes: list[Judgement] = []
        for draft, p in zip(judged, outputs, strict=False):
            outcomes.append(self._judge(draft, p))
            if not outcomes[-1].accepted or self.finished:
                break
            self.cached += 1
        self.in_vain += done.drafts - sum(outcome.accepted for outcome in outcomes)
        rejected = bool(outcomes) and not outcomes[-1].accepted
        bonus: list[int] = []
        if not rejected and not self.finished:
            self.carry = self._judging.limited(outputs[-1])
            if not self.queue and (
                self._judging.rule.eager or (judged and not self._opening.lookahead)
            ):
                bonus = [self._own_token()]
        said = self._verdict(start, outcomes, bonus)
        return said + (self._ending() if self.finished else self._use_carry())

    def fill(self) -> list[Message]:
        """Nothing valid is queued and nothing is expected soon: commit the carry's own pick."""
        if self.carry is None or self.queue or self.finished:
            return []
        start = len(self.tokens)
        return [*self._verdict(start, [], [self._own_token()]), *self._ending()]

    def begins_cached(self, tokens: int) -> None:
        """The engine's cache holds the first `tokens` already, of an earlier text that began so;
        fewer than all, and before any pass."""
        self.cached = tokens

    def evicted(self) -> None:
        """The engine's cache was given to another request; between passes only."""
        self.cached = 0

    # ---- judging --------------------------------------------------------------------------

    def _read(self, message: Window) -> list[Draft]:
        return self._judging.drafts(message)

    def _use_carry(self) -> list[Message]:
        """Pre-hit: judge the first queued token against the carry."""
        if self.carry is None or not self.queue or self.finished or not self._prehit:
            return []
        start, p = len(self.tokens), self.carry
        outcome = self._judge(self.queue.pop(0), p)
        return [*self._verdict(start, [outcome], []), *self._ending()]

    def _judge(self, draft: Draft, p: Distribution) -> Judgement:
        """Judge one draft token and commit what stands there."""
        outcome = self._judging.judge(draft, p, self.tokens, self.passes)
        self.accepted += outcome.accepted
        self._commit(outcome.token)
        if not outcome.accepted:
            self.queue.clear()
            self.branch += 1
        return outcome

    def _own_token(self) -> int:
        """The carry's pick, committed."""
        assert self.carry is not None
        token = self._judging.pick(self.carry, self.tokens)
        self._commit(token)
        return token

    def _commit(self, token: int) -> None:
        super()._commit(token)
        self.carry = None

    # ---- messages -------------------------------------------------------------------------

    def _verdict(self, start: int, outcomes: Sequence[Judgement], own: list[int]) -> list[Message]:
        if not outcomes and not own:
            return []
        accepted = [o for o in outcomes if o.accepted]
        rejected = len(accepted) < len(outcomes)
        ids = [o.token for o in outcomes if not o.accepted] + own
        why = self._judging.report()
        return [
            Verdict(
                request=self.request,
                branch=self.branch - rejected,
                start=start,
                accepted=len(accepted),
                ids=pack_ids(ids),
                rejected=rejected,
                tolerated=pack_ids([i for i, o in enumerate(accepted) if not o.agreed]),
                passes=self.passes,
                fed=self.fed,
                credit=why.credit,
                trace=why.trace,
                scores=why.scores,
            )
        ]

    def _ending(self) -> list[Message]:
        if self.finished:
            self.carry = None
        return super()._ending()

    def _count(self, done: Pass) -> None:
        self.passes += done.outputs > 0
        self.fed += len(done.tokens) - max(0, min(self.prompt - done.keep, len(done.tokens)))
