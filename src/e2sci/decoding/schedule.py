"""The best that any schedule of passes could do: the tight yardstick for targets on slow hardware.

Where a pass costs the same at any size, `yardsticks.pipelined` is close. On a CPU it is not: large
passes are cheap a token but need a long queue of drafts, which builds up slowly after a rejection.
So this bound solves the control problem (ours). The state is the *lead*, how many drafts the cloud
has waiting (negative: how long until the next arrives, in drafts); before each pass a schedule
chooses how many to judge, none for a plain decoding step, or waits. Rejections are independent,
drafts arrive every t_d, and an edge that was cut is back after a round trip; what is decoded
plainly meanwhile (fill) counts.

The rate ρ is found by bisection: at the best one, tokens − ρ · time breaks even.
"""

from __future__ import annotations

import numpy as np

from e2sci.decoding.distribution import Floats
from e2sci.decoding.yardsticks import PassMs, cloud_alone

_STEPS = 4  # grid points a draft
_MOST = 32  # drafts in a pass, and twice this in the lead
_ROUNDS = 200
_HALVINGS = 12


def best_schedule(alpha: float, t_draft: float, t_pass: PassMs, rtt: float) -> float:
    """Tokens a second that no schedule exceeds at acceptance α in [0, 1]; times in ms."""
    low, high = 0.0, 1.0 / t_draft + 1.0 / t_pass(1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _gains(middle, alpha, t_draft, t_pass, rtt) else (low, middle)
    return max(1000 * low, cloud_alone(t_pass(1)))


def _gains(rho: float, alpha: float, t_draft: float, t_pass: PassMs, rtt: float) -> bool:
    """Whether some schedule earns more than ρ tokens a ms."""
    cut = -rtt / t_draft
    leads = np.arange(np.floor(cut * _STEPS), 2 * _MOST * _STEPS + 1) / _STEPS
    moves = [_Move(n, leads, alpha, t_draft, t_pass(n + 1), cut) for n in range(_MOST)]
    value, half = np.zeros(len(leads)), 0.0
    for turn in range(2 * _ROUNDS):
        at_cut = float(value[0])
        waited = np.append(value[1:], value[-1]) - rho * t_draft / _STEPS
        value = np.maximum.reduce([waited, *(move.worth(value, at_cut, rho) for move in moves)])
        if turn == _ROUNDS - 1:
            half = float(value[0])
    return float(value[0]) > half  # still growing when the start no longer counts


class _Move:
    """Judge n drafts in a pass that takes `ms`, then take the target's own next token."""

    def __init__(
        self, n: int, leads: Floats, alpha: float, t_draft: float, ms: float, cut: float
    ) -> None:
        self._ms = ms
        self._allowed = (leads >= n) | (n == 0)  # plain decoding needs no edge
        drafted = leads >= n + 1  # is there a draft for the target's own token to differ from?
        through = alpha**n
        agreed = np.where(drafted, through * alpha, through)
        self._survives = agreed
        self._tokens = sum(alpha**j for j in range(n + 1))
        after = np.clip(leads + ms / t_draft - (n + 1), cut, leads[-1])
        self._next = np.round((after - leads[0]) * _STEPS).astype(np.int64)

    def worth(self, value: Floats, at_cut: float, rho: float) -> Floats:
        later = self._survives * value[self._next] + (1 - self._survives) * at_cut
        return np.where(self._allowed, self._tokens - rho * self._ms + later, -np.inf)
