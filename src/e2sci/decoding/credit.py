"""Credit and the elastic threshold: verification loosens where the draft has earned it.

Per window of W judged positions with acceptance p_acc, over the last k windows (paper, §3):

    r̂_t = (1-β) r̂_{t-1} + β p_acc          credit, an exponential average
    Δr̂  = r̂_t − r̂_{t-1}
    ω, W = g_θ(r̂, Δr̂)                       predictor
    T    = clip(T_base + a·ω·(r̂ − τ_credit), T_min, T_max)

with hysteresis (T moves only by at least `hysteresis`), a minimum refresh interval, and the
conservative T_min while the predictor's estimated accuracy is below δ. Ours: all constants; that
p_acc is *counterfactual* by default, the share of positions that T_base would have accepted, so
that a loose T can't raise the very credit that loosens it; the quality budget; and that windows
are counted in judged positions, not messages, so that T and hence the text don't depend on timing.

The whole state is one small value (`CreditState`) that travels to the edge and back on resume.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from e2sci.decoding.predictor import ConstantPredictor, Predictor

_MAX_REGRET = 100.0
"""Nats: a token the target thinks impossible costs so much of a budget, not all of it for good."""


class CreditParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constants of credit and threshold. Raises ValueError when they contradict each other.

    Thresholds in nats. `window`: judged positions a history entry; `history`: k entries;
    `elastic`: False keeps T = t_base for good; `budget`: mean regret in nats a token that may be
    spent on accepted tokens before T falls to t_min (None: no budget). The default thresholds are
    starting points only: calibrate them on accuracy.
    """

    window: int = 5
    history: int = 5
    beta: float = 0.3
    a: float = 0.3
    tau: float = 0.6
    t_base: float = 0.20
    t_min: float = 0.05
    t_max: float = 0.35
    hysteresis: float = 0.02
    refresh: int = 2
    elastic: bool = True
    source: Literal["counterfactual", "observed"] = "counterfactual"
    budget: float | None = None
    safety: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.t_min <= self.t_base <= self.t_max:
            raise ValueError(
                f"thresholds must satisfy 0 <= t_min <= t_base <= t_max, not "
                f"{self.t_min}, {self.t_base}, {self.t_max}"
            )
        if not (0 < self.beta <= 1 and 0 <= self.tau <= 1 and self.a >= 0):
            raise ValueError("beta must lie in (0, 1], tau in [0, 1], a at 0 or more")
        if not (1 <= self.window <= 64 and 1 <= self.history <= 64 and self.refresh >= 1):
            raise ValueError("window and history must lie in 1..64, refresh at 1 or more")
        if not (self.hysteresis >= 0 and 0 <= self.safety <= 1):
            raise ValueError("hysteresis must be 0 nats or more, safety must lie in [0, 1]")
        if self.budget is not None and not self.budget >= 0:
            raise ValueError(f"budget is {self.budget}; expected 0 nats a token or more")

    @classmethod
    def constant(cls, threshold: float, window: int = 5) -> CreditParams:
        """A threshold that never moves: FSD's. Raises ValueError when negative."""
        if not threshold >= 0:
            raise ValueError(f"threshold is {threshold}; expected 0 nats or more")
        return cls(
            t_base=threshold, t_min=0.0, t_max=max(threshold, 1.0), elastic=False, window=window
        )


class CreditState(msgspec.Struct, kw_only=True, array_like=True):
    """Everything the threshold depends on; small, and enough to go on elsewhere. Raises ValueError
    on what no `Credit` can have left behind.

    `windows`: acceptance of the last k windows, oldest first, each in [0, 1]; `judged`, `passed`:
    positions of the window under way; `since`: windows since T last moved; `spent`: total regret
    of accepted tokens in nats, over `kept` tokens.
    """

    windows: list[float] = []
    judged: int = 0
    passed: int = 0
    since: int = 0
    threshold: float = 0.0
    spent: float = 0.0
    kept: int = 0

    def __post_init__(self) -> None:
        if len(self.windows) > 64 or not all(0 <= p_acc <= 1 for p_acc in self.windows):
            raise ValueError("a credit state holds at most 64 windows, each in [0, 1]")
        if not 0 <= self.passed <= self.judged <= 64:
            raise ValueError("a credit state has 0 <= passed <= judged <= 64")
        if not (self.since >= 0 and self.threshold >= 0 and self.spent >= 0 and self.kept >= 0):
            raise ValueError("since, threshold, spent and kept of a credit state are 0 or more")


class Credit:
    """Follows acceptance and gives the threshold for the next position."""

    def __init__(
        self,
        params: CreditParams,
        state: CreditState | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        self.params = params
        self._predictor = predictor or ConstantPredictor()
        self.state = (
            msgspec.structs.replace(state) if state else CreditState(threshold=params.t_base)
        )
        self.suggested_window: int | None = None

    @property
    def value(self) -> float:
        """r̂ in [0, 1]; τ_credit while nothing is known."""
        return self._average(self.state.windows)

    @property
    def threshold(self) -> float:
        """T for the next position, in nats."""
        budget = self.params.budget
        if budget is not None and self.state.spent > budget * max(self.state.kept, 1):
            return min(self.params.t_min, self.state.threshold)
        return self.state.threshold

    def observe(self, *, accepted: bool, base: bool, regret: float = 0.0) -> None:
        """One judged position: whether it was accepted, whether T_base would have accepted it,
        and the regret (nats) of the token that now stands there."""
        state = self.state
        state.judged += 1
        state.passed += accepted if self.params.source == "observed" else base
        state.spent += min(max(0.0, regret), _MAX_REGRET)
        state.kept += 1
        cut = self.params.source == "observed" and not accepted
        if state.judged >= self.params.window or cut:
            # Observed: the paper's L_acc/W_t, a rejection ends the window. Counterfactual: a mean.
            self._close(state.passed / self.params.window)

    def _close(self, p_acc: float) -> None:
        state, before = self.state, self.value
        state.windows = [*state.windows, p_acc][-self.params.history :]
        state.judged = state.passed = 0
        state.since += 1
        if self.params.elastic and state.since >= self.params.refresh:
            self._refresh(self.value, self.value - before)

    def _refresh(self, r: float, delta: float) -> None:
        forecast = self._predictor(r, delta)
        self.suggested_window = forecast.window
        p = self.params
        target = p.t_base + p.a * forecast.omega * (r - p.tau)
        if forecast.accuracy is not None and forecast.accuracy < p.safety:
            target = p.t_min
        target = min(p.t_max, max(p.t_min, target))
        if abs(target - self.state.threshold) >= p.hysteresis:
            self.state.threshold = target
            self.state.since = 0

    def _average(self, windows: list[float]) -> float:
        """r̂ over the last k windows, started from τ_credit: older ones are forgotten."""
        r = self.params.tau
        for p_acc in windows:
            r += self.params.beta * (p_acc - r)
        return r
