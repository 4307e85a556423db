"""A trace cut into windows: acceptance, draft entropy and credit of each.

Windows are consecutive, W positions each; the last, partial one is dropped, and so are requests
of fewer than three. Credit r̂ is `decoding.credit`'s average of the last k = 5 windows with β = .3,
but without its start from τ: the weights are normalised over the windows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from e2sci.decoding.distribution import Floats
from e2sci.evaluation.traces import Bools, RequestTrace, Trace

LEAST_WINDOWS = 3
BETA, HISTORY = 0.3, 5

Signal = Callable[[RequestTrace], Floats]


@dataclass(frozen=True)
class Windows:
    """Shape (requests, most windows), NaN behind a request's last window.

    `acceptance`: mean of the signal over a window; `entropy`: the draft's, likewise, in nats;
    `noise`: variance of that acceptance by its own W positions, NaN at W = 1.
    """

    acceptance: Floats
    entropy: Floats
    noise: Floats
    left_out: int

    @property
    def known(self) -> Bools:
        return ~np.isnan(self.acceptance)


def parse_signal(spec: str) -> Signal:
    """What counts as acceptance at a position, by name. Raises ValueError.

    `agree`: x = y; `accept:T`: x = y or JS ≤ T nats; `tv`: 1 − TV, what the best coupling accepts.
    """
    kind, _, value = spec.partition(":")
    if spec == "agree":
        return lambda request: request.agreed.astype(np.float64)
    if spec == "tv":
        return lambda request: 1 - np.array(request.tv)
    try:
        threshold = float(value) if kind == "accept" else -1.0
    except ValueError:
        threshold = -1.0
    if not threshold >= 0:
        raise ValueError(f"no signal {spec!r}; expected agree, tv or accept:T as in accept:0.2")
    return lambda request: request.accepted(threshold).astype(np.float64)


def windows_of(trace: Trace, signal: Signal, window: int) -> Windows:
    """Cut each request into windows. Raises ValueError if `window` < 1 or too few remain."""
    if window < 1:
        raise ValueError(f"window is {window}; expected 1 or more positions")
    used = [r for r in trace.requests if len(r.tokens) >= LEAST_WINDOWS * window]
    left_out = len(trace.requests) - len(used)
    if len(used) < 2:
        raise ValueError(
            f"too few requests: {len(used)} of {len(trace.requests)} have {LEAST_WINDOWS} windows "
            f"of {window} positions; expected 2 or more: record more rows or take a smaller window"
        )
    cut = [_cut(signal(request), window) for request in used]
    noise = [w.var(axis=1, ddof=1) / window if window > 1 else w[:, 0] * np.nan for w in cut]
    entropy = [_cut(np.array(request.entropy), window).mean(axis=1) for request in used]
    return Windows(
        _padded([w.mean(axis=1) for w in cut]), _padded(entropy), _padded(noise), left_out
    )


def _cut(values: Floats, window: int) -> Floats:
    return values[: len(values) // window * window].reshape(-1, window)


def _padded(rows: Sequence[Floats]) -> Floats:
    out = np.full((len(rows), max(map(len, rows))), np.nan)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def credit(acceptance: Floats) -> Floats:
    """r̂ from the windows before each; NaN at a request's first. Same shape."""
    total, weights = np.zeros_like(acceptance), np.zeros_like(acceptance)
    for back in range(1, min(HISTORY, acceptance.shape[1] - 1) + 1):
        weight = BETA * (1 - BETA) ** (back - 1)
        total[:, back:] += weight * acceptance[:, :-back]
        weights[:, back:] += weight
    with np.errstate(invalid="ignore"):
        return np.round(total / weights, 9)  # so that equal histories are equal


def mean_so_far(acceptance: Floats) -> Floats:
    """The plain mean of all windows before each; NaN at a request's first. Same shape."""
    out = np.full_like(acceptance, np.nan)
    out[:, 1:] = np.cumsum(acceptance, axis=1)[:, :-1] / np.arange(1, acceptance.shape[1])
    return out
