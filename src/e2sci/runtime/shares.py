"""A fixed number of places, shared out between the clients that wait for one.

async with shares.place(client):        # waits for its turn, see `turns`
    ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from e2sci.runtime.turns import Turns


@dataclass(eq=False)
class _Request:
    owner: str
    turn: asyncio.Future[None]


class Shares:
    """`places` ≥ 1 at once."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._line: list[_Request] = []
        self._seated: list[_Request] = []
        self._turns = Turns()

    @property
    def full(self) -> bool:
        """Whether who comes now has to wait."""
        return len(self._seated) == self._places

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """A place for `owner`, as soon as it is its turn."""
        request = _Request(owner, asyncio.get_running_loop().create_future())
        self._line.append(request)
        self._give()
        try:
            await request.turn
            yield
        finally:
            (self._line if request in self._line else self._seated).remove(request)
            self._give()

    def _give(self) -> None:
        while self._line and not self.full:
            request = self._turns.next(self._line, self._seated)
            self._line.remove(request)
            self._seated.append(request)
            if not request.turn.done():  # else cancelled, and about to give it back
                request.turn.set_result(None)
