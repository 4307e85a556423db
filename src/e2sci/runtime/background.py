"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Background:
    """Runs awaitables for a thread that waits for them. Use as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, call: Awaitable[T]) -> T:
        """What `call` returns or raises. Ctrl-C cancels it, and is raised when it has ended: what
        it held is then free."""
        ended = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        async def wrapped() -> T:
            return await call

        def start() -> None:
            tasks.append(self._loop.create_task(wrapped()))
            tasks[0].add_done_callback(lambda _: ended.set())

        self._loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait()
            if not tasks[0].cancelled():
                tasks[0].exception()  # seen: a warning of it would help nobody
            raise
        return tasks[0].result()
