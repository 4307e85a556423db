"""The engine's sequences, and the line of requests that wait for one.

A seat keeps its place as long as it has something to do. One that has been quiet for a while (its
edge is slow, stalled or gone) loses its place, and its cache, to whoever is in line: least recently
active first. When it has something to do again it stands in line like others; its session feeds the
whole text anew, from ids it holds. Who is first in line is said in `turns`.

With `keep`, a place that is given up keeps its tokens until somebody needs it, for whoever comes
with a text of the same client that begins like them (`caches`).
"""

from __future__ import annotations

from collections.abc import Callable

from e2sci.runtime.caches import Caches
from e2sci.runtime.seat import Seat
from e2sci.runtime.turns import Turns


class Places:
    """`slots` sequences. `cut(sequence, length)` is told how much of each is still of use."""

    def __init__(self, slots: int, cut: Callable[[int, int], None], *, keep: bool = False) -> None:
        self.line: list[Seat] = []
        self.taken: list[Seat] = []
        self.slots = slots
        self.evictions = 0
        self._free = Caches(slots)
        self._cut = cut
        self._keep = keep
        self._turns = Turns()

    @property
    def kept(self) -> int:
        """Tokens that free sequences hold."""
        return self._free.tokens

    def join(self, seat: Seat) -> None:
        """Get in line, unless there already or seated."""
        if seat.sequence is None and seat not in self.line:
            self.line.append(seat)

    def give(self, quiet: Callable[[Seat], bool]) -> list[Seat]:
        """Give places to those in line, first the free ones, then those of `quiet` seats; returns
        who got one."""
        placed = []
        while self.line and (self._free or self._evict(quiet)):
            seat = self._turns.next(self.line, self.taken)
            self.line.remove(seat)
            self._seat(seat)
            self.taken.append(seat)
            placed.append(seat)
        return placed

    def leave(self, seat: Seat, *, sound: bool = True) -> None:
        """A seat is over, wherever it was. `sound`: it knows what its sequence holds."""
        if seat in self.line:
            self.line.remove(seat)
        if seat.sequence is not None:
            self._release(seat, sound)

    def spoiled(self, sequence: int) -> None:
        """A pass has failed: what a sequence holds is not known, whoever has it by now."""
        self._free.forget(sequence)
        for seat in self.taken:
            if seat.sequence == sequence:
                seat.session.evicted()

    def _seat(self, seat: Seat) -> None:
        text = seat.session.tokens.tokens if self._keep else ()
        cache = self._free.take(text, seat.owner)
        seat.sequence = cache.sequence
        if cache.tokens:
            seat.session.begins_cached(len(cache.tokens))

    def _evict(self, quiet: Callable[[Seat], bool]) -> bool:
        candidates = [seat for seat in self.taken if quiet(seat)]
        if not candidates:
            return False
        seat = min(candidates, key=lambda each: each.active)
        self._release(seat, sound=True)
        seat.session.evicted()
        self.evictions += 1
        return True

    def _release(self, seat: Seat, sound: bool) -> None:
        assert seat.sequence is not None
        session = seat.session
        kept: tuple[int, ...] = ()
        if self._keep and sound:
            kept = tuple(session.tokens.tokens[: session.cached])
        self._cut(seat.sequence, len(kept))
        self._free.give(seat.sequence, kept, seat.owner)
        self.taken.remove(seat)
        seat.sequence = None
