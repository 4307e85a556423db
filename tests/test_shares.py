"""Places are shared out evenly between clients, and none is lost."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from e2sci.runtime.shares import Shares


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Crowd:
    """Requests that hold a place until they are told to go."""

    def __init__(self, places: int) -> None:
        self.shares = Shares(places)
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._go: dict[str, asyncio.Event] = {}

    async def come(self, *names: str) -> None:
        """`names`: the client's letter, then which of its requests."""
        for name in names:
            self._go[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._hold(name))
            await settle()

    async def _hold(self, name: str) -> None:
        async with self.shares.place(name[0]):
            self.served.append(name)
            await self._go[name].wait()

    async def leave(self, name: str) -> None:
        self._go[name].set()
        await settle()


async def test_a_place_goes_to_who_has_fewest_then_to_who_waits_longest_for_a_turn():
    crowd = Crowd(2)
    await crowd.come("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    assert crowd.served == ["a1", "a2"]
    assert (crowd.shares.full, len(crowd.shares._line)) == (True, 5)
    for leaving in ("a1", "a2", "b1", "c1", "a3", "b2", "a4"):
        await crowd.leave(leaving)
    assert crowd.served == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert (crowd.shares.full, len(crowd.shares._line)) == (False, 0)


async def test_with_one_place_clients_alternate():
    crowd = Crowd(1)
    await crowd.come("a1", "a2", "a3", "b1", "b2")
    for leaving in ("a1", "b1", "a2", "b2", "a3"):
        await crowd.leave(leaving)
    assert crowd.served == ["a1", "b1", "a2", "b2", "a3"]


async def test_no_place_is_lost_when_requests_are_cancelled():
    """In line, in the moment they are served, and while they hold a place."""
    rng = random.Random(3)
    crowd = Crowd(3)
    for number in range(200):
        name = f"{rng.choice('abc')}{number}"
        await crowd.come(name)
        other = rng.choice([*crowd.tasks])
        if rng.random() < 0.5:
            crowd._go[other].set()  # and cancelled, maybe, in the very moment
        if rng.random() < 0.7:
            crowd.tasks[rng.choice([other, name])].cancel()
        if rng.random() < 0.5:
            await settle()
    for task in crowd.tasks.values():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    fresh = Crowd(3)
    fresh.shares = crowd.shares
    await fresh.come("x1", "y1", "z1", "z2")
    assert fresh.served == ["x1", "y1", "z1"]
    for name in ("x1", "y1", "z1", "z2"):
        await fresh.leave(name)
