"""How far the edge drafts past what has been verified.

Progressive lookahead concurrency (paper): the window drafted concurrently with verification grows
with every positive feedback since the last rejection, and falls back to W on a rejection:

    W^P = W · Π_{j ≤ l} (1 + η_j),   at most what fills one round trip.

Ours: η_j = η for all j, and the edge may hold W + W^P unjudged tokens, one window on its way and
W^P behind it. By default (η = None) W^P is what fills a round trip from the start: an edge that has
fallen back to W idles until the next feedback, a loss at every rejection that no growth makes up.
"""

from __future__ import annotations

_WEIGHT = 0.3  # of the latest round trip in the average
_HEADROOM = 1.5  # lets a queue form at a cloud whose passes pay only when they are large


class Lookahead:
    """The limit on unjudged draft tokens. `window` ≥ 1; `eta` ≥ 0 or None; `most`: never more."""

    def __init__(self, window: int, eta: float | None = None, most: int = 64) -> None:
        self.window = window
        self._eta = eta
        self._most = most
        self._round_trip: float | None = None
        self._grown = 1.0

    @property
    def limit(self) -> int:
        """Unjudged tokens the edge may hold now."""
        fill = float(self._most)
        if self._round_trip is not None:
            fill = max(self.window, _HEADROOM * self._round_trip)
        concurrent = fill if self._eta is None else min(fill, self.window * self._grown)
        return min(self._most, self.window + int(concurrent))

    def advanced(self) -> None:
        """Positive feedback: draft tokens were accepted."""
        if self._eta is not None:
            self._grown = min(self._grown * (1 + self._eta), float(self._most))

    def rejected(self) -> None:
        """The branch died."""
        self._grown = 1.0

    def measured(self, round_trip: float) -> None:
        """Tokens that are drafted in the time from a window to its verdict, as just seen."""
        before = round_trip if self._round_trip is None else self._round_trip
        self._round_trip = before + _WEIGHT * (round_trip - before)
