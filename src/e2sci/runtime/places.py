"""The engine's sequences, and the line of requests that wait for one.

A seat keeps its place as long as it has something to do. One that has been quiet for a while (its
edge is slow, stalled or gone) loses its place, and its cache, to whoever is in line: least recently
active first. When it has something to do again it stands in line like others; its session feeds the
whole text anew, from ids it holds. In line, the client with the fewest places comes first, then who
came first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from e2sci.runtime.seat import Seat


class Places:
    """`slots` sequences. `freed(sequence)` is told of each that must be emptied."""

    def __init__(self, slots: int, freed: Callable[[int], None]) -> None:
        self.line: list[Seat] = []
        self.taken: list[Seat] = []
        self.slots = slots
        self.evictions = 0
        self._free = list(reversed(range(slots)))
        self._freed = freed

    def join(self, seat: Seat) -> None:
        """Get in line, unless there already or seated."""
        if seat.sequence is None and seat not in self.line:
            self.line.append(seat)

    def give(self, quiet: Callable[[Seat], bool]) -> list[Seat]:
        """Give places to those in line, first the free ones, then those of `quiet` seats; returns
        who got one."""
        placed = []
        while self.line and (self._free or self._evict(quiet)):
            held = Counter(seat.owner for seat in self.taken)
            seat = min(self.line, key=lambda each: held[each.owner])
            self.line.remove(seat)
            seat.sequence = self._free.pop()
            self.taken.append(seat)
            placed.append(seat)
        return placed

    def leave(self, seat: Seat) -> None:
        """A seat is over, wherever it was."""
        if seat in self.line:
            self.line.remove(seat)
        if seat.sequence is not None:
            self._release(seat)

    def _evict(self, quiet: Callable[[Seat], bool]) -> bool:
        candidates = [seat for seat in self.taken if quiet(seat)]
        if not candidates:
            return False
        seat = min(candidates, key=lambda each: each.active)
        self._release(seat)
        seat.session.evicted()
        self.evictions += 1
        return True

    def _release(self, seat: Seat) -> None:
        assert seat.sequence is not None
        self._freed(seat.sequence)
        self._free.append(seat.sequence)
        self.taken.remove(seat)
        seat.sequence = None
