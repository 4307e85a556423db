"""One engine, one thread: how blocking model calls run beside the event loop.

Calls queue up in order and run one at a time, since engines are not thread-safe. Everything that
touches an engine goes through its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


def now() -> float:
    """Seconds on the running event loop's clock, the only one that the runtime reads."""
    return asyncio.get_running_loop().time()


class Worker(Protocol):
    """Runs the calls of one engine, one at a time."""

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start `call`, or queue it; the future is the running loop's."""
        ...

    def close(self) -> None:
        """Drop what is queued, wait for the call that runs."""
        ...


class ThreadWorker:
    """A thread of its own for one engine."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, call)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
