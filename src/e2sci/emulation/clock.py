"""The virtual clock: an event loop whose time jumps to whatever happens next.

    result = run(main)          # like asyncio.run, in no time

Code on the loop must wait for nothing but the loop: sleeps, timeouts, queues, futures set by other
tasks. Then two runs do exactly the same things at exactly the same times. What computes meanwhile
takes no virtual time; `emulation.device` makes it take its device's.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(RuntimeError):
    """Everyone waits and nothing is due: a deadlock, or a wait for the real world."""


class _Jumping(selectors.DefaultSelector):
    """Where a real loop sleeps until a time, this one makes it that time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Stuck("nothing is due on the virtual clock, and all tasks wait")
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at time 0 and never sleeps."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` on a virtual clock of its own. Raises Stuck when nothing can go on."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
