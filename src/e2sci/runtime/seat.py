"""A seat: one request at the cloud, with what the scheduler has learnt of it.

Three things are learnt from what comes and goes. *When* to expect the next window (`Arrivals`), so
that the cloud fills in place of waiting. *How many* drafts stand (`acceptance`), so that passes
have the size that pays. *How much* was judged in vain, so that an edge whose drafts are wrong costs
hardly more than one without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from e2sci.runtime.admission import ANYONE, Client
from e2sci.runtime.passes import PassTimes
from e2sci.session.cloud import CloudSession
from e2sci.session.messages import Message, Open, Verdict

ACCEPTANCE = 0.95
"""What is expected of a client that is not known yet."""
_GRACE = 0.5  # of what waiting is worth: how long an overdue window is waited for
_RUN = 4  # drafts in a row that must stand for a wait to have paid
# Drafts that may be judged in vain (ours): some on trust, then by what was accepted and written.
# 1.5 an accepted one hardly bind a useful draft; trust and 2 % of the text keep a useless one under
# 1.1 times the tokens of the cloud alone.
_TRUST = 8
_PER_ACCEPTED = 1.5
_PER_TOKEN = 0.02


@dataclass
class Arrivals:
    """When to expect a request's next window: seconds after a verdict, by what the verdict was."""

    idle_since: float
    cut: bool = False
    _usual: dict[bool, float] = field(default_factory=dict)

    def sent(self, now: float, verdict: Verdict) -> None:
        """A verdict has gone out."""
        if verdict.accepted or verdict.rejected:
            self.idle_since, self.cut = now, verdict.rejected

    def came(self, now: float) -> None:
        """A window has come while none was waiting."""
        took, usual = now - self.idle_since, self._usual.get(self.cut)
        self._usual[self.cut] = took if usual is None else usual + 0.3 * (took - usual)

    def fill_from(self, now: float, pass_s: float, acceptance: float) -> float:
        """The time from which a fill pass is in place.

        Waiting for a window saves a pass if its drafts stand, and is lost if they don't; filling
        loses little either way. So it is waited for less the less is accepted, and hardly at all
        where nothing is: then this is the cloud alone.
        """
        worth = pass_s * acceptance**_RUN
        expected = self.idle_since + self._usual.get(self.cut, 0.0)
        return now if expected - now >= worth else expected + _GRACE * worth


@dataclass(frozen=True)
class Ended:
    """What became of a request. `reason`: that of Finished, or the code of an error, or `gone`;
    `tokens`: output; `passes`, `fed`: target passes and tokens, the prompt left out."""

    id: str
    client: str
    reason: str
    seconds: float
    prompt: int
    tokens: int
    passes: int
    fed: int
    acceptance: float


@dataclass(eq=False)
class Seat:
    """A request at work: its session, its client, and where its messages go.

    `sequence`: its place in the engine, None while it waits for one; `acceptance`: recent share of
    draft tokens accepted, in [0, 1]; `passed_over`: rounds since it was last served, of those in
    which it had something to feed; `active`: when it last was (seconds).
    """

    session: CloudSession
    opening: Open
    send: Callable[[Sequence[Message]], None]
    now: float
    client: Client = ANYONE
    acceptance: float = ACCEPTANCE
    sequence: int | None = None
    passed_over: int = 0
    opened: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self.began = self.active = self.now
        self.arrivals = Arrivals(self.now)
        self._trust = _TRUST * self.acceptance

    @property
    def owner(self) -> str:
        """Whom fairness counts it for."""
        return self.client.name

    @property
    def fills(self) -> bool:
        """Whether the cloud may decode by itself: always, or now that no drafts will come."""
        return self.opening.fill or self.session.by_itself

    @property
    def missing(self) -> int:
        """Tokens committed and not cached."""
        return len(self.session.tokens) - self.session.cached

    def sent(self, now: float, verdict: Verdict) -> None:
        """A verdict has gone out: learn from it."""
        self.arrivals.sent(now, verdict)
        for accepted in [1.0] * verdict.accepted + [0.0] * verdict.rejected:
            self.acceptance += 0.05 * (accepted - self.acceptance)

    def share(self, times: PassTimes, crowd: int) -> int:
        """Tokens of this seat in a pass that `crowd` seats share: what is missing, and as many
        drafts as pay and may still be judged in vain."""
        session = self.session
        waiting = min(len(session.queue), self._trusted())
        if self.opening.lookahead:
            waiting = times.best_drafts(self.acceptance, waiting, crowd)
        # Else the edge waits for its whole window, and a second pass costs more than a long one.
        return max(1, self.missing + waiting)

    def _trusted(self) -> int:
        session = self.session
        earned = _PER_ACCEPTED * session.accepted + _PER_TOKEN * session.written
        return max(0, int(self._trust + earned) - session.in_vain)

    def fill_at(self, now: float, pass_s: float) -> float | None:
        """The time from which the cloud is to decode by itself; None if only a message can change
        anything."""
        session = self.session
        if not self.fills or session.queue or session.finished:
            return None
        if session.by_itself or not self.opening.drafting:
            return now
        return self.arrivals.fill_from(now, pass_s, self.acceptance)

    def ended(self, now: float, reason: str) -> Ended:
        """What became of it, now that it is over."""
        session = self.session
        return Ended(
            id=self.opening.id,
            client=self.client.name,
            reason=reason,
            seconds=now - self.began,
            prompt=session.prompt,
            tokens=session.written,
            passes=session.passes,
            fed=session.fed,
            acceptance=self.acceptance,
        )
