"""How long a target pass takes by its size, and how many drafts are worth judging in one.

On a large GPU a pass over 32 tokens takes hardly longer than one over a single token; on a CPU it
takes ten times as long. So the cloud measures at start and sizes its passes by it: with α the
recent acceptance and c(n) the time of a pass over n tokens, it judges the number of drafts that
maximises expected tokens per second, (1 + α + … + αⁿ) / c(n + 1)   (ours). That may be none: the
target then decodes plainly, and the first draft is compared with what comes out, at no cost. Where
s requests share a pass it is c(s·(n + 1)): what is judged in vain is then taken from the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from e2sci.engines.base import Engine, Step

SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class PassTimes:
    """Measured (tokens, milliseconds), ascending by tokens, at least one."""

    points: tuple[tuple[int, float], ...]

    def ms(self, tokens: int) -> float:
        """Time of a pass over `tokens`, interpolated; beyond the last point by its slope."""
        sizes, times = zip(*self.points, strict=True)
        if tokens <= sizes[-1] or len(sizes) == 1:
            return float(np.interp(tokens, sizes, times))
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return float(times[-1] + max(0.0, slope) * (tokens - sizes[-1]))

    def best_drafts(self, acceptance: float, waiting: int, seats: int = 1) -> int:
        """How many of `waiting` drafts to judge in the next pass, which `seats` requests share by
        equal parts; 0 if plain decoding is faster."""
        best, best_rate, expected = 0, 1 / self.ms(seats), 1.0
        for n in range(1, waiting + 1):
            expected += acceptance**n
            rate = expected / self.ms(seats * (n + 1))
            if rate > best_rate:
                best, best_rate = n, rate
        return best


def measure_passes(engine: Engine, sizes: Sequence[int] = SIZES) -> PassTimes:
    """Time passes of each of `sizes` (ascending) on an empty cache: the better of two, which is the
    machine's own time and not its neighbours'. A first pass goes untimed: it reads the weights from
    disk."""
    points = []
    token = min(100, engine.info.real_vocab - 1)
    engine.forward([Step(0, [token])])
    engine.truncate(0, 0)
    for size in sizes:
        if size * 2 > engine.info.context:
            break
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            engine.forward([Step(0, [token] * size, size)])
            seconds.append(time.perf_counter() - began)
            engine.truncate(0, 0)
        points.append((size, 1000 * min(seconds)))
    return PassTimes(tuple(points))
