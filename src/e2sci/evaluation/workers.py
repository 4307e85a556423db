"""Worker processes that load something heavy once and then work on one item after another.

spread(partial(Recorder, recording), Recorder.record, problems, jobs=2, in_order=True)
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from typing import Any, Protocol, TypeVar


class Worker(Protocol):
    """What is loaded once a process."""

    def close(self) -> None: ...


W = TypeVar("W", bound=Worker)
Item = TypeVar("Item")
Done = TypeVar("Done")


def spread(
    make: Callable[[], W],
    step: Callable[[W, Item], Done],
    items: Sequence[Item],
    *,
    jobs: int,
    in_order: bool,
) -> Iterator[Done]:
    """`step` of every item, by `jobs` processes with a worker each, or here for 0. In the items'
    order, or as they are done: then none waits for another to be kept. Closing the iterator stops
    after the items under way. Raises what a step raises."""
    if jobs == 0:
        worker = make()
        try:
            for item in items:
                yield step(worker, item)
        finally:
            worker.close()
        return
    # Spawned, not forked: llama.cpp's threads don't survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(make, step)) as pool:
        try:
            found = pool.map(_step, items) if in_order else _as_done(pool, items, jobs)
            yield from (done for done in found if done is not None)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _as_done(pool: ProcessPoolExecutor, items: Sequence[Any], jobs: int) -> Iterator[Any]:
    running: set[Future[Any]] = set()
    for item in items:
        running.add(pool.submit(_step, item))
        if len(running) > jobs:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in done)


_worker: tuple[Any, Callable[[Any, Any], Any]]


def _start(make: Callable[[], Any], step: Callable[[Any, Any], Any]) -> None:
    global _worker
    _worker = make(), step


def _step(item: Any) -> Any:
    with suppress(KeyboardInterrupt):  # the parent stops us in its own way
        worker, step = _worker
        return step(worker, item)
    return None
