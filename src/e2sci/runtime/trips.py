"""How long it takes from a window to its verdict."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from e2sci.decoding.distribution import unpack_ids
from e2sci.session.messages import MAX_WINDOW, Verdict, Window


class _Sent(NamedTuple):
    """A window on its way: its branch, the position behind it, when it went."""

    branch: int
    end: int
    at: float


class Trips:
    """The windows of one request that are on their way."""

    def __init__(self) -> None:
        self._under_way: deque[_Sent] = deque()

    def sent(self, window: Window, at: float) -> None:
        """A window went out; one without tokens gets no verdict."""
        if window.ids:
            end = window.start + len(unpack_ids(window.ids, MAX_WINDOW))
            self._under_way.append(_Sent(window.branch, end, at))

    def took(self, verdict: Verdict, at: float) -> float | None:
        """Seconds since the window that a verdict begins in; None if it is about none."""
        if not verdict.accepted and not verdict.rejected:
            return None
        while self._under_way and not self._answers(verdict):
            self._under_way.popleft()
        return at - self._under_way[0].at if self._under_way else None

    def lost(self) -> None:
        """None of them will be answered."""
        self._under_way.clear()

    def _answers(self, verdict: Verdict) -> bool:
        """Whether the verdict begins in the oldest window, and not behind it."""
        oldest = self._under_way[0]
        return oldest.branch == verdict.branch and oldest.end > verdict.start
