"""Whose turn it is, when a pass has no room for all or a place falls free.

Between clients all are equal, however many requests each has open: they are served in turn.

In a pass, who was passed over comes first of one client's requests, and then who has more credit,
since its drafts are the likelier to stand. Nobody starves: who was left out of a pass is ahead of
all others in the next.

A place goes to the client with the fewest, of those to whose last turn was longest ago, and of one
client's requests to the first that came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from typing import Protocol, TypeVar


class Owned(Protocol):
    """A request of somebody's."""

    @property
    def owner(self) -> str: ...


class Waiting(Owned, Protocol):
    """Someone with something to feed."""

    @property
    def passed_over(self) -> int: ...

    @property
    def acceptance(self) -> float: ...


W = TypeVar("W", bound=Waiting)
Request = TypeVar("Request", bound=Owned)


def in_turn(waiting: Iterable[W]) -> list[W]:
    """All of them, in the order in which they are to be served."""
    own: dict[str, list[W]] = {}
    for each in waiting:
        own.setdefault(each.owner, []).append(each)
    for queue in own.values():
        queue.sort(key=lambda each: (-each.passed_over, -each.acceptance))
    queues = sorted(own.values(), key=lambda queue: -queue[0].passed_over)
    rounds = chain.from_iterable(zip_longest(*queues))
    return [each for each in rounds if each is not None]


class Turns:
    """Who is next in a line for places."""

    def __init__(self) -> None:
        self._count = 0
        self._last: dict[str, int] = {}  # by owner: which turn was theirs

    def next(self, line: Sequence[Request], seated: Iterable[Owned]) -> Request:
        """The one of `line` whose turn it is, beside those who have places. Raises ValueError when
        there is none in line."""
        held = Counter(each.owner for each in seated)
        chosen = min(line, key=lambda each: (held[each.owner], self._last.get(each.owner, 0)))
        self._count += 1
        known = {chosen.owner, *held, *(each.owner for each in line)}
        self._last = {owner: n for owner, n in self._last.items() if owner in known}
        self._last[chosen.owner] = self._count
        return chosen
