"""How far the edge drafts past what has been verified.

Progressive lookahead concurrency (paper): the window drafted concurrently with verification grows
with every positive feedback since the last rejection,

    W^P = W · Π_{j ≤ l} (1 + η_j),

and falls back on a rejection. Ours: η_j = η for all j; the edge may hold W + W^P unjudged tokens
(one window on its way, W^P behind it), and W^P is capped at what fills one round trip, since
drafting further only makes more to throw away.
"""

from __future__ import annotations


class Lookahead:
    """The limit on unjudged draft tokens. `window` ≥ 1; `eta` ≥ 0; `most`: at most so many."""

    def __init__(self, window: int, eta: float = 0.25, most: int = 64) -> None:
        self.window = window
        self._eta = eta
        self._most = most
        self._round_trip: int | None = None
        self._concurrent = float(window)

    @property
    def limit(self) -> int:
        """Unjudged tokens the edge may hold now."""
        concurrent = self._concurrent
        if self._round_trip is not None:
            concurrent = min(concurrent, max(self.window, self._round_trip))
        return min(self._most, self.window + int(concurrent))

    def advanced(self) -> None:
        """Positive feedback: draft tokens were accepted."""
        self._concurrent = min(self._concurrent * (1 + self._eta), float(self._most))

    def rejected(self) -> None:
        """The branch died."""
        self._concurrent = float(self.window)

    def measured(self, round_trip: int) -> None:
        """Tokens that are drafted in the time from a window to its verdict."""
        self._round_trip = round_trip
