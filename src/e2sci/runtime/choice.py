"""Whether drafting pays, and how to draft: a pure function of what has been measured.

Every way to write has a time a token and, for the cloud, a computing time a token. With t a draft
token, c(n) a pass over n tokens, R the round trip and α the acceptance:

    cloud alone          c(1); of the cloud the same
    pipelined, filled    c(1) − α^f · (c(1) − p₀),  f = R / (c(1) − t); of the cloud the same
    pipelined            p_R, and what a large window waits; c(W) · (1/W + 1 − α)
    sync                 (W·t + R + c(W+1)) / E[tokens of W];  c(W+1) / E[tokens of W]

p_R is `yardsticks.pipelined` at round trip R, p₀ without one: t + (1−α)·c(1) if passes take the
same time at any size. The formula with fill is ours. Behind a rejection the cloud writes by itself,
and the edge, faster by c(1) − t a token, has caught up f tokens later, if it drafted just these,
which has probability α^f. Then it is ahead, and a token takes p₀ until the next rejection. So with
fill drafting pays if p₀ < c(1), at any distance; the distance decides how much.

What is least is (paper's objective, E_cloud in the cloud's milliseconds)

    ms a token + γ · cloud ms a token
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from e2sci.decoding import yardsticks
from e2sci.runtime.passes import PassTimes

MARGIN = 1.03
"""Drafting must be expected to be this much cheaper than the cloud alone (ours)."""
HOLD_MS = 10.0
"""How long a filled request's drafts are gathered for a window at least (ours): fewer than a
hundred frames a second."""
DOUBT = 0.9
"""Where the draft gives nothing this probability, a filled request's window ends (ours)."""
DOUBTING_WINDOW = 8
"""Draft tokens a window where doubt ends it (ours)."""
WINDOWS = range(1, 17)
"""The windows to choose among where the cloud waits for them."""


class Way(NamedTuple):
    """How a text is written. `fill`: the cloud decodes while no draft is there; `window`: draft
    tokens sent together (without meaning for the cloud alone); `doubt`: where the draft gives
    nothing this probability, `early` of them are enough."""

    mode: Literal["cloud", "sync", "pipelined"]
    fill: bool
    window: int
    doubt: float = 0.0
    early: int = 1


class Estimate(NamedTuple):
    """What a way is expected to take, in milliseconds a token: for the user, and of the cloud."""

    way: Way
    ms: float
    cloud_ms: float

    @property
    def tokens_per_s(self) -> float:
        return 1000 / self.ms

    def cost(self, gamma: float) -> float:
        return self.ms + gamma * self.cloud_ms


@dataclass(frozen=True)
class Measured:
    """What a choice stands on: ms a draft token (> 0), ms of a round trip (≥ 0), acceptance in
    [0, 1], and the cloud's pass times, which a busy cloud's `load` multiplies."""

    draft_ms: float
    rtt_ms: float
    acceptance: float
    passes: PassTimes
    load: float = 1.0

    def pass_ms(self, tokens: int) -> float:
        return self.load * self.passes.ms(tokens)


@dataclass(frozen=True)
class Choice:
    """The cloud alone, the best way with a draft, and which of the two is better (`pays`)."""

    cloud: Estimate
    draft: Estimate
    pays: bool

    @property
    def best(self) -> Estimate:
        return self.draft if self.pays else self.cloud


def choose(
    measured: Measured,
    gamma: float = 0.0,
    *,
    mode: str | None = None,
    fill: bool | None = None,
    window: int | None = None,
) -> Choice:
    """The way with the least ms + γ · cloud ms a token, γ ≥ 0; a draft must earn MARGIN.

    `mode`, `fill`, `window`: only ways like that, beside the cloud alone.
    """
    cloud = estimate(measured, Way("cloud", True, 1))
    draft = min(
        (estimate(measured, way) for way in _ways(measured, mode, fill, window)),
        key=lambda e: e.cost(gamma),
    )
    return Choice(cloud, draft, cloud.cost(gamma) > MARGIN * draft.cost(gamma))


def estimate(measured: Measured, way: Way) -> Estimate:
    """What `way` takes."""
    m, alpha, w = measured, measured.acceptance, way.window
    alone = m.pass_ms(1)
    if way.mode == "cloud":
        return Estimate(way, alone, alone)
    if way.mode == "sync":
        tokens = yardsticks.tokens_per_window(alpha, w)
        speed = yardsticks.synchronous(alpha, w, m.draft_ms, m.pass_ms, m.rtt_ms)
        return Estimate(way, 1000 / speed, m.pass_ms(w + 1) / tokens)
    if way.fill:
        ms = _filled(m)
        return Estimate(way, ms, ms)  # the cloud is never idle
    speed = yardsticks.pipelined(alpha, m.draft_ms, m.pass_ms, m.rtt_ms)
    paced = max(w, round(alone / m.draft_ms))  # drafts in a pass: a window's, or a pass time's
    waits = (1 - alpha) * max(0.0, w * m.draft_ms - alone) / 2
    passes = min(1.0, 1 / paced + (1 - alpha))
    return Estimate(way, 1000 / speed + waits, passes * m.pass_ms(w))


def why_not(measured: Measured) -> str:
    """Why drafting does not pay, for the user."""
    alone = measured.pass_ms(1)
    if measured.draft_ms > 0.7 * alone:
        return f"a draft token takes {measured.draft_ms:.0f} ms, a token of the cloud {alone:.0f}"
    return (
        f"at {measured.acceptance:.0%} acceptance and {measured.rtt_ms:.0f} ms round trip too much "
        "is waited for"
    )


def _filled(m: Measured) -> float:
    alone = m.pass_ms(1)
    gain = alone - 1000 / yardsticks.pipelined(m.acceptance, m.draft_ms, m.pass_ms, 0.0)
    if gain <= 0:
        return alone
    return alone - float(m.acceptance ** (m.rtt_ms / (alone - m.draft_ms))) * gain


def _ways(m: Measured, mode: str | None, fill: bool | None, window: int | None) -> Iterator[Way]:
    windows = WINDOWS if window is None else (window,)
    if mode != "sync" and fill is not False:
        held = max(1, min(WINDOWS[-1], round(HOLD_MS / m.draft_ms)))
        largest = max(DOUBTING_WINDOW, held)
        yield Way("pipelined", True, window or largest, 0.0 if window else DOUBT, held)
    if mode != "sync" and fill is not True:
        yield from (Way("pipelined", False, w) for w in windows)
    if mode != "pipelined" and fill is not True:
        yield from (Way("sync", False, w) for w in windows)
