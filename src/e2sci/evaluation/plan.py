"""Which mode will be fastest, and whether to use speculation at all: before anything is run.

From a profile (device and link times) and an acceptance α, by the yardsticks of `decoding`: the
speeds of the cloud alone, of synchronous speculative decoding (SD) and of drafting and verifying at
once (pipelined); where each break-even lies; what to set. Bandwidth, jitter and queueing behind
other requests are left out, and rejections are taken as independent.

Where SD is faster than the cloud alone pipelined is faster still (by these formulas), so the choice
is between pipelined and the cloud alone. Break-even is for speculation by itself. What the cloud
decodes while no draft is there (fill) comes on top: with it pipelined mode is never slower than the
cloud alone, but beyond the break-even it lives on fill, hence on the cloud's own passes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import ceil, floor

import msgspec
import numpy as np

from e2sci.decoding import yardsticks
from e2sci.decoding.predictor import MAX_WINDOW
from e2sci.decoding.schedule import best_schedule
from e2sci.decoding.yardsticks import PassMs
from e2sci.emulation.profile import Profile

MARGIN = 1.05
"""Speculation is not worth the trouble below this gain over the cloud alone (doctor's)."""

WINDOWS = range(1, 33)
MOST_LOOKAHEAD = 64
MOST_MS = 10_000
"""A break-even of this is that or more."""

_POINTS = 9  # round trips in a plot; the bound takes most of a second each


class Speeds(msgspec.Struct, frozen=True):
    """Tokens/s. `sync`: at the window asked for; `pipelined`: without fill; `pipelined_fill`: what
    no schedule exceeds (a loose bound at long round trips); `colocated`: SD with the draft beside
    the target, at its best W."""

    cloud: float
    sync: float
    sync_best: float
    pipelined: float
    pipelined_fill: float
    colocated: float


class Passes(msgspec.Struct, frozen=True):
    """Cloud passes a token; of `pipelined` an estimate, without fill."""

    cloud: float
    sync: float
    sync_best: float
    pipelined: float
    colocated: float


class BreakEven(msgspec.Struct, frozen=True):
    """Where pipelined without fill is as fast as the cloud alone, all else as given; None: nowhere.
    Round trip and draft time must lie below (MOST_MS: or more), acceptance above. Optimistic where
    passes grow with their size."""

    rtt_ms: float | None
    draft_ms: float | None
    acceptance: float | None


class Advice(msgspec.Struct, frozen=True):
    """What to use: `mode` cloud or pipelined, window and lookahead in tokens (None for the cloud
    alone), and why in one line."""

    mode: str
    window: int | None
    lookahead: int | None
    verdict: str


class Plan(msgspec.Struct, frozen=True):
    """All of it; as JSON the shape of `e2sci plan --json`. `window`: that of `speeds.sync`;
    `cloud_ms`: a pass over one token; `best_window`, `colocated_window`: of SD."""

    profile: str
    acceptance: float
    window: int
    rtt_ms: float
    draft_ms: float
    colocated_draft_ms: float
    cloud_ms: float
    speeds: Speeds
    best_window: int
    colocated_window: int
    passes_per_token: Passes
    break_even: BreakEven
    advice: Advice


class _World(msgspec.Struct, frozen=True):
    """Acceptance and times (ms) a plan stands on."""

    alpha: float
    draft: float
    colocated: float
    target: PassMs
    rtt: float

    @property
    def alone(self) -> float:
        return yardsticks.cloud_alone(self.target(1))

    def sync(self, window: int) -> float:
        return yardsticks.synchronous(self.alpha, window, self.draft, self.target, self.rtt)

    def beside(self, window: int) -> float:
        """SD with the draft in the cloud."""
        return yardsticks.synchronous(self.alpha, window, self.colocated, self.target, 0.0)

    @property
    def pipelined(self) -> float:
        return yardsticks.pipelined(self.alpha, self.draft, self.target, self.rtt)

    @property
    def best_window(self) -> int:
        return max(WINDOWS, key=self.sync)

    @property
    def best_beside(self) -> int:
        return max(WINDOWS, key=self.beside)

    def speeds(self, window: int) -> Speeds:
        bound = best_schedule(self.alpha, self.draft, self.target, self.rtt)
        return Speeds(
            self.alone,
            self.sync(window),
            self.sync(self.best_window),
            min(self.pipelined, bound),
            bound,
            self.beside(self.best_beside),
        )

    def pays(self, **changed: float) -> bool:
        other = msgspec.structs.replace(self, **changed)
        return other.pipelined > other.alone * (1 + 1e-9)


def plan(
    profile: Profile,
    acceptance: float,
    *,
    window: int = 5,
    rtt_ms: float | None = None,
    draft_ms: float | None = None,
) -> Plan:
    """The plan for `profile`, its round trip and draft time replaced if given. Takes about a
    second. Raises ValueError out of range."""
    world = _world(profile, acceptance, rtt_ms, draft_ms)
    if not 1 <= window <= MOST_LOOKAHEAD:
        raise ValueError(f"window is {window}; expected 1 to {MOST_LOOKAHEAD}")
    speeds, even = world.speeds(window), _break_even(world)
    return Plan(
        profile.name,
        acceptance,
        window,
        world.rtt,
        world.draft,
        world.colocated,
        world.target(1),
        speeds,
        world.best_window,
        world.best_beside,
        _passes(world, window),
        even,
        _advice(world, speeds, even),
    )


def over_rtt(plan: Plan, profile: Profile) -> list[tuple[float, Speeds]]:
    """Speeds from no round trip to four times the plan's: for the figure. Takes some seconds."""
    rtts = np.linspace(0, 4 * (plan.rtt_ms or 25.0), _POINTS).tolist()
    worlds = [_world(profile, plan.acceptance, rtt, plan.draft_ms) for rtt in rtts]
    return [(world.rtt, world.speeds(plan.window)) for world in worlds]


def _world(profile: Profile, alpha: float, rtt_ms: float | None, draft_ms: float | None) -> _World:
    rtt = profile.link.rtt_ms if rtt_ms is None else rtt_ms
    draft = profile.draft.ms(1) if draft_ms is None else draft_ms
    if not 0 <= alpha <= 1:
        raise ValueError(f"acceptance is {alpha}; expected 0 to 1")
    if not (0 <= rtt < MOST_MS and 0 < draft < MOST_MS):
        raise ValueError(
            f"round trip {rtt:g} ms, draft {draft:g} ms a token: expected 0 or more and more than "
            f"0, below {MOST_MS} each"
        )
    return _World(alpha, draft, profile.colocated.ms(1), profile.target.ms, rtt)


def _break_even(world: _World) -> BreakEven:
    """To a tenth of a millisecond and a thousandth of acceptance; speed is monotone in each."""
    tenths, thousandths = range(10 * MOST_MS), range(1001)

    def falls(pays: Callable[[float], bool]) -> float | None:
        return bisect_left(tenths, True, key=lambda i: not pays(i / 10)) / 10 or None

    at = bisect_left(thousandths, True, key=lambda i: world.pays(alpha=i / 1000))
    return BreakEven(
        falls(lambda ms: world.pays(rtt=ms)),
        falls(lambda ms: world.pays(draft=ms)),
        at / 1000 if at < len(thousandths) else None,
    )


def _passes(world: _World, window: int) -> Passes:
    def sync(w: int) -> float:
        return 1 / yardsticks.tokens_per_window(world.alpha, w)

    # While drafts flow a pass takes what was drafted during the one before; a rejection costs one.
    flow = 1 / _pipelined_window(world) + (1 - world.alpha)
    return Passes(
        1.0, sync(window), sync(world.best_window), min(1.0, flow), sync(world.best_beside)
    )


def _pipelined_window(world: _World) -> int:
    """The drafts made during the pass that judges as many (ours): smaller windows would wait for
    the pass under way, larger ones delay a rejection. At most MAX_WINDOW."""
    paced = (w for w in range(1, MAX_WINDOW + 1) if w * world.draft >= world.target(w))
    return next(paced, MAX_WINDOW)


def _lookahead(world: _World, window: int) -> int:
    """One window on its way, and what is drafted until its verdict."""
    return min(MOST_LOOKAHEAD, window + ceil((world.rtt + world.target(window)) / world.draft))


def _advice(world: _World, speeds: Speeds, even: BreakEven) -> Advice:
    gain, beside = speeds.pipelined / speeds.cloud, speeds.colocated / speeds.cloud
    elsewhere = ""
    if beside > MARGIN * max(gain, 1):
        elsewhere = f"; with the draft in the cloud too, SD reaches {beside:.1f}x"
    if gain < MARGIN:
        verdict = f"{_why_not(world, even, gain)}: stream from the cloud alone"
        return Advice("cloud", None, None, verdict + _with_fill(speeds) + elsewhere)
    window = _pipelined_window(world)
    verdict = f"use --mode pipelined: about {gain:.1f}x the cloud alone{elsewhere}"
    return Advice("pipelined", window, _lookahead(world, window), verdict)


def _why_not(world: _World, even: BreakEven, gain: float) -> str:
    if world.pays():
        return f"speculation gains {max(0.0, gain - 1):.0%}, too little"
    if even.rtt_ms is not None:
        return f"RTT {world.rtt:g} ms is beyond the break-even of {floor(even.rtt_ms)} ms"
    if even.draft_ms is not None:
        limit = f"the break-even of {even.draft_ms:g} ms"
        return f"a draft token takes {world.draft:g} ms, beyond {limit}"
    need = "none" if even.acceptance is None else f"{even.acceptance:g}"
    return f"acceptance {world.alpha:g} is too low, {need} breaks even"


def _with_fill(speeds: Speeds) -> str:
    gain = speeds.pipelined_fill / speeds.cloud
    if gain < MARGIN:
        return ""
    return f"; --mode pipelined with fill reaches at most {gain:.1f}x, and saves few cloud passes"
