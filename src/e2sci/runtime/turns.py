"""Whose turn it is, when a pass has no room for all.

Between clients all are equal, however many requests each has open: they are served in turn. Of one
client's requests, who was passed over comes first, and then who has more credit, since its drafts
are the likelier to stand. Nobody starves: who was left out of a pass is ahead of all others in the
next.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import Protocol, TypeVar


class Waiting(Protocol):
    """Someone with something to feed."""

    @property
    def owner(self) -> str: ...

    @property
    def passed_over(self) -> int: ...

    @property
    def acceptance(self) -> float: ...


W = TypeVar("W", bound=Waiting)


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
