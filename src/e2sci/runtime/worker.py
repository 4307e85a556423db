"""One engine, one thread: how blocking model calls run beside the event loop.

Calls queue up in order and run one at a time, since engines are not thread-safe. Everything that
touches an engine goes through its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """A thread of its own for one engine."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start `call` on the thread; the future is the running loop's."""
        return asyncio.get_running_loop().run_in_executor(self._executor, call)

    def close(self) -> None:
        """Drop what is queued, wait for the call that runs."""
        self._executor.shutdown(wait=True, cancel_futures=True)
