"""Mode auto: the edge measures as it writes, chooses, and says so.

Theory of operation
-------------------
`Learnt` is what an edge knows of its draft and its cloud, and outlives requests. An `Auto` guides
one request: at its opening it chooses the `Way`; from then on it may stop drafting, so that the
cloud writes by itself, and begin again.

    drafting ──► a trial or a span is over, and drafting does not pay by the mean of `choose`
                 and the clock, or is slower than the cloud alone by the clock  ──► resting
    resting  ──► the rest is over, or drafting pays by `choose` after all
                 (the link has changed, or the cloud): a trial                  ──► drafting

A trial is 16 judged drafts or 32 tokens, or 16 tokens that were far slower than the cloud alone; a
span is 32 tokens. Each rest is twice as long as the one before, and twice that if the clock was the
reason, until a trial is passed. Measured are: a draft token's time; acceptance, over everything
that a draft could be compared with; the round trip, by pings; and, while resting, what a token of
the cloud takes, which is more than the cloud's own measurement if it is busy.

All of this is ours; the paper has no such mode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median

from e2sci.runtime.choice import MARGIN, Choice, Measured, Way, choose, why_not
from e2sci.runtime.passes import PassTimes

PING_SECONDS = 1.0
"""Between two measurements of the round trip."""
_PINGS = 3  # the latest ones, of which the median counts
_SPAN = 32  # tokens that are timed together
_TRIAL = 16  # judged drafts that end a trial without fill, which would cost time
_SLOWER = 1.05  # than the cloud alone, by the clock: that is no chance
_FAR_SLOWER = 1.25  # in half a span: enough to end a trial
_RESTS = (32, 4096)  # tokens of the first rest, and of the longest
_SETTLE = 8  # tokens of a rest behind which nothing of the drafts is left
_UNKNOWN_PASS_MS = 50.0  # of a cloud that has not measured itself
_UNKNOWN_DRAFT = 0.2  # of a pass: a draft token's time before any has been seen
_DROPPED = "speculation does not pay here, {}: the cloud goes on alone"

Points = Sequence[tuple[int, float]]


@dataclass
class Mean:
    """A running mean that starts as `value`, worth `strength` samples; each new one then weighs
    `floor` at least."""

    value: float
    strength: int = 0
    floor: float = 0.2
    samples: int = 0

    def add(self, sample: float) -> None:
        self.samples += 1
        weight = max(self.floor, 1 / (self.samples + self.strength))
        self.value += weight * (sample - self.value)

    def doubt(self) -> None:
        """Something may have changed: new samples weigh as if they were the first."""
        self.samples = 0


@dataclass
class Learnt:
    """What an edge knows, from all its requests. `rest`: tokens left to rest, 0 while drafting;
    `next_rest`: of the next one; `slow_ms`: a token's time while drafting, if the clock was why it
    was dropped."""

    acceptance: Mean = field(default_factory=lambda: Mean(0.8, strength=8, floor=0.05))
    draft_ms: Mean = field(default_factory=lambda: Mean(0.0))
    load: Mean = field(default_factory=lambda: Mean(1.0, floor=0.5))
    rest: int = 0
    next_rest: int = _RESTS[0]
    slow_ms: float | None = None


class Auto:
    """The guide of one request. `passes` (tokens, ms) and `rtt_s`: of its cloud; `gamma`, `fill`
    and `window` as in Options; `tell` takes what the user should know.

    `way`: how to write; its mode and fill are those of the opening, its window may change.
    `drafting`: whether to draft now.
    """

    drafting: bool
    _began: float
    _tokens: int
    _judged: int
    _passed: bool
    _settling: bool

    def __init__(
        self,
        learnt: Learnt,
        passes: Points,
        rtt_s: float,
        *,
        gamma: float,
        fill: bool | None,
        window: int | None,
        tell: Callable[[str], None],
    ) -> None:
        self._learnt = learnt
        self._gamma = gamma
        self._window = window
        self._tell = tell
        self._told = learnt.rest == 0
        self._written = {True: 0, False: 0}
        self._first = True
        self.linked(passes, rtt_s)
        choice = choose(self._measured(), gamma, fill=fill, window=window)
        if not choice.pays and fill is None:  # then a trial should cost no time
            choice = choose(self._measured(), gamma, fill=True, window=window)
        self.way: Way = choice.draft.way
        self._turn(learnt.rest == 0, 0.0)

    @property
    def mode(self) -> str:
        """What was mainly used."""
        return self.way.mode if self._written[True] >= self._written[False] else "cloud"

    # ---- what is measured -----------------------------------------------------------------

    def linked(self, passes: Points, rtt_s: float) -> None:
        """The request is at this cloud now."""
        points = tuple((n, ms) for n, ms in passes if n > 0 and 0 < ms < inf)
        self._passes = PassTimes(points or ((1, _UNKNOWN_PASS_MS),))
        self._rtts = deque([rtt_s], _PINGS)

    def pinged(self, rtt_s: float) -> None:
        """A round trip took so long."""
        self._rtts.append(rtt_s)

    def drafted(self, seconds: float) -> None:
        """A draft token took so long."""
        self._learnt.draft_ms.add(1000 * seconds)

    def judged(self, accepted: int, refuted: int) -> None:
        """So many drafts stood, and so many did not."""
        for sample in [1.0] * accepted + [0.0] * refuted:
            self._learnt.acceptance.add(sample)
        self._judged += accepted + refuted

    def _measured(self) -> Measured:
        known = self._learnt
        pass_ms = known.load.value * self._passes.ms(1)
        draft_ms = known.draft_ms.value if known.draft_ms.samples else _UNKNOWN_DRAFT * pass_ms
        return Measured(
            draft_ms=max(1e-3, draft_ms),
            rtt_ms=1000 * median(self._rtts),
            acceptance=known.acceptance.value,
            passes=self._passes,
            load=known.load.value,
        )

    # ---- what follows ---------------------------------------------------------------------

    def wrote(self, tokens: int, at: float) -> None:
        """`tokens` were committed, at `at` seconds of a steady clock."""
        if self._first:  # the time from the first token on counts
            self._first = False
            self._span(at)
            return
        self._written[self.drafting] += tokens
        self._tokens += tokens
        if self.drafting:
            self._draft(at)
        else:
            self._rest(tokens, at)

    def _draft(self, at: float) -> None:
        """When a trial or a span is over: go on, or drop the draft."""
        whole = self._tokens >= _SPAN
        timed = whole or self._far_slower(at)
        if not timed and (self.way.fill or self._passed or self._judged < _TRIAL):
            return
        choice, gamma = self._choose(), self._gamma
        self.way = choice.draft.way
        alone = choice.cloud.cost(gamma)
        ms = self._ms(at) if timed else choice.draft.ms
        cost = ms + gamma * (ms if self.way.fill else choice.draft.cloud_ms)
        if choice.pays and cost > _SLOWER * alone:  # is the cloud what it says? a rest will tell
            self._drop(at, slow_ms=ms)
        elif MARGIN * (cost + choice.draft.cost(gamma)) / 2 > alone or not (
            self._told or choice.pays  # what was dropped must pay by both
        ):
            self._drop(at)
            self._say(False, _DROPPED.format(why_not(self._measured())))
        else:
            self._passed = True
            self._learnt.next_rest = _RESTS[0]
            self._say(True, "speculation pays again: drafting goes on")
            if whole:
                self._span(at)

    def _far_slower(self, at: float) -> bool:
        """Whether a trial that should have cost no time does, as where both models share a
        machine."""
        if not self.way.fill or self._passed or self._tokens < _SPAN / 2:
            return False
        return self._ms(at) > _FAR_SLOWER * self._measured().pass_ms(1)

    def _drop(self, at: float, slow_ms: float | None = None) -> None:
        known, longer = self._learnt, 1 if slow_ms is None else 2
        known.slow_ms = slow_ms
        known.rest = min(_RESTS[1], longer * known.next_rest)
        known.next_rest = min(_RESTS[1], 2 * known.rest)
        self._turn(False, at)

    def _rest(self, tokens: int, at: float) -> None:
        """Measure the cloud, until there is reason for another trial."""
        known = self._learnt
        known.rest = max(0, known.rest - tokens)
        if self._settling and self._tokens >= 0:
            self._settling = False
            self._span(at)
        if self._tokens >= _SPAN / 2:
            known.load.add(self._ms(at) / self._passes.ms(1))
            self._span(at)
            self._look_up()
        if known.rest == 0:
            known.acceptance.doubt()
            known.draft_ms.doubt()
            self._turn(True, at)

    def _look_up(self) -> None:
        """End a rest that has lost its reason."""
        known, choice = self._learnt, self._choose()
        if known.slow_ms is not None and known.slow_ms >= choice.cloud.ms:
            why = f"a token takes {known.slow_ms:.0f} ms, the cloud alone {choice.cloud.ms:.0f}"
            self._say(False, _DROPPED.format(why))
        elif choice.pays:
            known.rest = 0

    def _choose(self) -> Choice:
        """Among the ways that are open to a request that has begun."""
        way, measured = self.way, self._measured()
        return choose(measured, self._gamma, mode=way.mode, fill=way.fill, window=self._window)

    def _turn(self, drafting: bool, at: float) -> None:
        self.drafting = drafting
        self._passed = False
        self._span(at)
        self._settling = not drafting
        if self._settling:
            self._tokens = -_SETTLE

    def _span(self, at: float) -> None:
        """Count tokens and time from here."""
        self._began = at
        self._tokens = self._judged = 0

    def _ms(self, at: float) -> float:
        return 1000 * (at - self._began) / self._tokens

    def _say(self, drafting: bool, notice: str) -> None:
        """Tell the user, if it is news."""
        if drafting != self._told:
            self._told = drafting
            self._tell(notice)
