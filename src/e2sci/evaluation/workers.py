"""Worker processes that load something heavy once and then work on one item after another.

spread(partial(Recorder, recording), Recorder.record, problems, jobs=2, in_order=True)

A worker can work on several items at once, in threads: `abreast`. They are handed to a process by
groups then, since it takes one thing at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

_GROUP = 4  # items for each thread of a process: the last ones of a group leave threads idle


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
    abreast: int = 1,
    in_order: bool,
) -> Iterator[Done]:
    """`step` of every item, by `jobs` processes with a worker each, or here for 0, and `abreast`
    threads in each. In the items' order, or as they are done: then none waits for another to be
    kept. Closing the iterator stops after the items under way. Raises what a step raises."""
    if jobs == 0:
        worker = make()
        try:
            yield from _threaded(partial(step, worker), items, abreast, in_order)
        finally:
            worker.close()
        return
    size = min(_GROUP * abreast, -(-len(items) // jobs)) if abreast > 1 else 1
    groups = [items[at : at + size] for at in range(0, len(items), size)]
    # Spawned, not forked: llama.cpp's threads don't survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _start, (make, step, abreast)) as pool:
        for group in _results(pool, _group, groups, jobs, in_order):
            yield from group


def _threaded(
    step: Callable[[Item], Done], items: Sequence[Item], threads: int, in_order: bool
) -> Iterator[Done]:
    if threads == 1:
        yield from map(step, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from _results(pool, step, items, threads, in_order)


def _results(
    pool: Executor, step: Callable[[Any], Any], items: Sequence[Any], workers: int, in_order: bool
) -> Iterator[Any]:
    try:
        yield from pool.map(step, items) if in_order else _as_done(pool, step, items, workers)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _as_done(
    pool: Executor, step: Callable[[Any], Any], items: Sequence[Any], workers: int
) -> Iterator[Any]:
    running: set[Future[Any]] = set()
    for item in items:
        running.add(pool.submit(step, item))
        if len(running) > workers:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in done)


_worker: tuple[Callable[[Any], Any], int]


def _start(make: Callable[[], Any], step: Callable[[Any, Any], Any], threads: int) -> None:
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = partial(step, make()), threads


def _end_with_parent() -> None:
    """A parent that is killed can't stop its workers, and a group may take hours."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _group(items: Sequence[Any]) -> list[Any]:
    done: list[Any] = []
    with suppress(KeyboardInterrupt):  # the parent stops us in its own way
        step, threads = _worker
        done.extend(_threaded(step, items, threads, in_order=True))
    return done
