"""The edge's side of one request, as a state machine: no I/O, no clock, no model.

Theory of operation
-------------------
`committed` is what the cloud has made final: prompt + output. `tail` is the speculative rest S:
drafted, unjudged; its first `sent` tokens are on their way. Together they are the line the draft
model writes on; `branch` counts how often that line was cut.

    draft wanted?  ──► while |S| < lookahead, and within the token budget, and not past an EOS
                       (lookahead off: only while nothing is on its way)
    drafted        ──► S grows; W unsent tokens, or the line's end, make a window; so does a token
                       that the draft doubts, as it may well be rejected (ours)
    verdict        ──► accepted tokens move from S to `committed`; then the cloud's own tokens:
                         equal to S's head  → committed, nothing lost
                         S empty            → committed (fill or bonus)
                         different          → S is cut, the branch dies, the token is committed
    no drafts now  ──► `rest()`: what is left of S goes, then a window without tokens: until the
                       next one the cloud decodes by itself, also without fill (ours)
    cloud lost     ──► `lost()`: S stays, and no windows go
                         `alone()`: S is committed unjudged, if the user wants that (ours)
                         `reopen()`: the request's whole state again, and S is sent anew

Every cut lowers `intact`, the length up to which the draft's cache still holds the line; the
driver feeds the draft from there. A correction or bonus token thus always reaches its cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from e2sci.decoding.acceptance import Proposal
from e2sci.decoding.distribution import pack_ids, unpack_ids
from e2sci.decoding.sampling import History
from e2sci.session.lookahead import Lookahead
from e2sci.session.messages import (
    MAX_QUEUE,
    MAX_WINDOW,
    CreditView,
    Finished,
    FinishReason,
    Open,
    Opened,
    ProtocolError,
    Score,
    Verdict,
    Window,
    ids_of,
)


class Origin(StrEnum):
    """Where a committed token came from."""

    AGREED = "agreed"  # drafted, and the target's own pick
    TOLERATED = "tolerated"  # drafted, let pass by the rule
    CORRECTED = "corrected"  # the cloud's, in place of a draft token
    FILLED = "filled"  # the cloud's, where no draft token was
    DRAFTED = "drafted"  # the draft model's, judged by no one: drafting alone


@dataclass(frozen=True)
class Commit:
    """A token that can no longer change."""

    position: int
    token: int
    origin: Origin
    score: Score | None = None  # the target's, if asked for


@dataclass
class EdgeStats:
    """Counts of one request: draft tokens made, sent and accepted, by the verdicts that came."""

    drafted: int = 0
    accepted: int = 0
    windows: int = 0
    corrections: int = 0
    filled: int = 0
    passes: int = 0
    fed: int = 0
    alone: int = 0


class EdgeSession:
    """One request at the edge. `opening`: its Open; `eos`: the target's ids that end a text;
    `doubt`: with lookahead, a token of less confidence closes a window of `early` or more."""

    def __init__(
        self,
        opening: Open,
        *,
        window: int,
        eos: frozenset[int],
        vocab: int,
        lookahead: Lookahead,
        doubt: float = 0.0,
        early: int = 1,
    ) -> None:
        if not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"window is {window}; expected 1 to {MAX_WINDOW}")
        prompt = unpack_ids(opening.prompt, len(opening.prompt))
        self.committed = list(prompt)
        self.line = History(prompt)
        self.tail: list[Proposal] = []
        self.sent = 0
        self.connected = True
        self.resting = False
        self.branch = opening.branch
        self.intact = 0
        self.window_size = window
        self.lookahead = lookahead
        self.doubt = doubt
        self.early = early
        self.finished: FinishReason | None = None
        self.credit: CreditView | None = None
        self.stats = EdgeStats()
        self._opening = opening
        self._prompt = len(prompt)
        self._end = len(prompt) + opening.max_tokens
        self._eos = eos
        self._vocab = vocab
        self._lost_passes = self._lost_fed = 0

    @property
    def output(self) -> list[int]:
        """Committed output ids, a closing EOS included."""
        return self.committed[self._prompt :]

    # ---- drafting -------------------------------------------------------------------------

    @property
    def wants_draft(self) -> bool:
        """Whether one more draft token should be made now."""
        if self.finished or not self._opening.drafting or self._at_end():
            return False
        if self.resting and self.connected:
            return False
        if not self._opening.lookahead:
            return self.sent == 0 and len(self.tail) < self.window_size
        return len(self.tail) < self.lookahead.limit

    def drafted(self, proposal: Proposal, position: int, branch: int) -> list[Window]:
        """The draft model proposes `proposal` at `position` of `branch`. Stale ones are dropped,
        and those of a rest: the cloud was told that none will come."""
        self.stats.drafted += 1
        if self.finished or (self.resting and self.connected):
            return []
        if branch != self.branch or position != len(self.line):
            return []
        self.tail.append(proposal)
        self.line.append(proposal.token)
        return self.flush()

    def flush(self) -> list[Window]:
        """The unsent tokens as a window, if there are W of them or no more will come.

        With lookahead (ours) a single token goes while nothing is on its way, as the cloud is
        waiting, and a doubted one with those before it: of a rejection the edge must hear soon.
        """
        if not self.connected:
            return []
        unsent = self.tail[self.sent :]
        if not unsent or (len(unsent) < self._enough(unsent) and self.wants_draft):
            return []
        window = self._window(unsent[:MAX_WINDOW])
        self.sent += min(len(unsent), MAX_WINDOW)
        self.stats.windows += 1
        return [window]

    def _enough(self, unsent: list[Proposal]) -> int:
        """So many of them make a window now."""
        if not self._opening.lookahead:
            return self.window_size
        if not self.sent:
            return 1
        doubted = min(proposal.confidence for proposal in unsent) < self.doubt
        return min(self.early, self.window_size) if doubted else self.window_size

    def rest(self) -> list[Window]:
        """Draft no more for now, and say so."""
        self.resting = True
        return [*self.flush(), self._window([])] if self.connected else []

    def _window(self, tokens: list[Proposal]) -> Window:
        return Window(
            request=self._opening.request,
            branch=self.branch,
            start=len(self.committed) + self.sent,
            ids=pack_ids([p.token for p in tokens]),
            sketches=tuple(p.sketch for p in tokens if p.sketch is not None),
        )

    def _at_end(self) -> bool:
        last = self.tail[-1].token if self.tail else None
        return last in self._eos or len(self.line) >= self._end

    # ---- the cloud's messages -------------------------------------------------------------

    def opened(self, message: Opened) -> None:
        """The cloud has a place for us, and may have shortened the budget to its context."""
        self._end = min(self._end, self._prompt + message.limit)

    def verdict(self, message: Verdict) -> list[Commit]:
        """Commit what the cloud says. Raises ProtocolError when it doesn't fit our line."""
        if self.finished:
            return []
        own = ids_of(message.ids, self._vocab, MAX_WINDOW, "verdict")
        tolerated = ids_of(message.tolerated, MAX_QUEUE, MAX_QUEUE, "verdict")
        self._check(message, own)
        self._count(message)
        commits = [
            self._agree(Origin.TOLERATED if i in tolerated else Origin.AGREED)
            for i in range(message.accepted)
        ]
        if message.rejected:
            self._cut()
            self.branch = message.branch + 1
            self.lookahead.rejected()
        elif commits:
            self.lookahead.advanced()
        for i, token in enumerate(own):
            corrects = message.rejected and i == 0
            commits.append(self._own(token, corrects))
        if message.scores:
            scored = zip(commits, message.scores, strict=True)
            commits = [replace(commit, score=score) for commit, score in scored]
        return commits

    def finish(self, message: Finished) -> None:
        """The cloud has ended the request."""
        self.finished = self.finished or message.reason
        self._cut()

    def lost(self) -> None:
        """The cloud is gone, and with it what it was sent."""
        self.connected = False
        self.sent = 0

    def alone(self) -> list[Commit]:
        """While the cloud is lost: S is final as it is, judged by no one."""
        commits = []
        while self.tail and not self.connected and not self.finished:
            self.stats.alone += 1
            commits.append(self._commit(self.tail.pop(0).token, Origin.DRAFTED))
        return commits

    def reopen(self, request: int) -> Open:
        """The request's whole state, to go on with on a new connection as number `request`; S is
        sent again."""
        self.connected = True
        self.sent = 0
        self._lost_passes, self._lost_fed = self.stats.passes, self.stats.fed
        self._opening = msgspec.structs.replace(self._opening, request=request)
        return msgspec.structs.replace(
            self._opening,
            committed=pack_ids(self.output),
            branch=self.branch,
            state=self.credit.state if self.credit else self._opening.state,
        )

    def _check(self, message: Verdict, own: list[int]) -> None:
        """Raises ProtocolError on a verdict about something that was never sent."""
        judged = message.accepted + message.rejected
        stale = judged > 0 and message.branch != self.branch
        fits = message.start == len(self.committed) and 0 <= message.accepted <= judged <= self.sent
        scored = len(message.scores) in (0, message.accepted + len(own))
        if not fits or stale or not scored or (message.rejected and not own):
            raise ProtocolError(
                "bad_verdict",
                f"verdict on {message.accepted} tokens at {message.start} fits nothing",
            )

    def _agree(self, origin: Origin) -> Commit:
        """S's head is final."""
        token = self.tail.pop(0).token
        self.sent = max(0, self.sent - 1)
        self.stats.accepted += 1
        return self._commit(token, origin)

    def _own(self, token: int, corrects: bool) -> Commit:
        if self.tail and self.tail[0].token == token and not corrects:
            return self._agree(Origin.AGREED)
        origin = Origin.CORRECTED if corrects or self.tail else Origin.FILLED
        if self.tail:
            self._cut()
            self.branch += 1
            self.lookahead.rejected()
        self.stats.corrections += origin is Origin.CORRECTED
        self.stats.filled += origin is Origin.FILLED
        self.line.append(token)
        return self._commit(token, origin)

    def _commit(self, token: int, origin: Origin) -> Commit:
        position = len(self.committed)
        self.committed.append(token)
        if token in self._eos:
            self.finished = "stop"
        elif len(self.committed) >= self._end:
            self.finished = "length"
        return Commit(position, token, origin)

    def _cut(self) -> None:
        """S is void."""
        self.tail.clear()
        self.sent = 0
        self.line.truncate(len(self.committed))
        self.intact = min(self.intact, len(self.committed))

    def _count(self, message: Verdict) -> None:
        self.stats.passes = self._lost_passes + message.passes
        self.stats.fed = self._lost_fed + message.fed
        if message.credit is not None:
            self.credit = message.credit
            if message.credit.window is not None and 1 <= message.credit.window <= MAX_WINDOW:
                self.window_size = self.lookahead.window = message.credit.window
