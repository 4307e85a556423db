"""Emulated devices: real models that take an emulated machine's time.

A `DeviceProfile` says how long a call takes and what the device draws; a `Device` is a worker (see
runtime.worker) that runs calls at once, one behind the other, and lets them take that long on the
event loop's clock. `Metered` tells it how many tokens a call has fed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from e2sci.decoding.distribution import Distribution
from e2sci.engines.base import Engine, Step, Wrapper

T = TypeVar("T")


@dataclass(frozen=True)
class DeviceProfile:
    """How a model runs on a device: measured (tokens, ms) points, and watts.

    `points`: ascending by tokens, at least one; constant before the first, interpolated between,
    and beyond the last `per_token` ms each. `watts` while computing, `idle_watts` otherwise.
    Raises ValueError on values that make no sense.
    """

    points: tuple[tuple[int, float], ...]
    per_token: float = 0.0
    watts: float = 0.0
    idle_watts: float = 0.0

    def __post_init__(self) -> None:
        sizes = [n for n, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError("points are (tokens, ms), ascending by tokens, from 1 token on")
        if not all(0 < ms < 1e6 for _, ms in self.points):
            raise ValueError("a call takes more than 0 and less than 1 000 000 ms")
        if not (0 <= self.per_token < 1e4 and 0 <= self.idle_watts <= self.watts < 1e6):
            raise ValueError("per_token, watts and idle_watts are 0 or more, idle below watts")

    def ms(self, tokens: int) -> float:
        """Time of one call over `tokens` ≥ 1."""
        sizes, times = zip(*self.points, strict=True)
        within = float(np.interp(tokens, sizes, times))
        return within + float(self.per_token * max(0, tokens - sizes[-1]))


class Metered(Wrapper):
    """An engine that counts the tokens it is fed."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.fed = 0

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        self.fed += sum(len(step.tokens) for step in steps)
        return super().forward(steps)


class Device:
    """A worker whose calls take `profile`'s time by the tokens that `engine` is fed in them.

    `busy_s`: seconds of computing so far; `calls`: calls that fed anything.
    """

    def __init__(self, profile: DeviceProfile, engine: Metered) -> None:
        self.profile = profile
        self.busy_s = 0.0
        self.calls = 0
        self._engine = engine
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._running: asyncio.Future[Any] | None = None
        self._closed = False

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        if self._closed:
            raise RuntimeError("the device is closed")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, future))
        if self._running is None:
            self._next()
        return cast("asyncio.Future[T]", future)

    def close(self) -> None:
        self._closed = True
        self._waiting.clear()

    def _next(self) -> None:
        """Run what waits, until a call takes time."""
        while self._waiting:
            call, future = self._waiting.popleft()
            if future.cancelled():
                continue
            before = self._engine.fed
            outcome = _outcome(call)
            fed = self._engine.fed - before
            if fed == 0:
                _settle(future, outcome)
                continue
            seconds = self.profile.ms(fed) / 1000
            self.busy_s += seconds
            self.calls += 1
            self._running = future
            asyncio.get_running_loop().call_later(seconds, self._done, future, outcome)
            return
        self._running = None

    def _done(self, future: asyncio.Future[Any], outcome: tuple[Any, Exception | None]) -> None:
        _settle(future, outcome)
        self._next()


def _outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _settle(future: asyncio.Future[Any], outcome: tuple[Any, Exception | None]) -> None:
    if future.cancelled():
        return
    value, error = outcome
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
