"""Worker processes that load something heavy once and then work on one item after another.

spread(partial(Recorder, recording), Recorder.record, problems, jobs=2, in_order=True)

A worker can work on several items at once, in threads: `abreast`. A process of an executor does one
thing at a time, so it is asked in *turns*: begin these items, and say what has ended since.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
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
    abreast: int = 1,
    in_order: bool,
) -> Iterator[Done]:
    """`step` of every item, by `jobs` processes with a worker each, or here for 0, and `abreast`
    threads in each. In the items' order, or as they are done: then none waits for another to be
    kept. Closing the iterator waits for one item of each process and drops what else is under
    way. Raises what a step raises."""
    if jobs == 0:
        worker = make()
        try:
            yield from _threaded(partial(step, worker), items, abreast, in_order)
        finally:
            worker.close()
        return
    # Spawned, not forked: llama.cpp's threads don't survive a fork.
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = [
            stack.enter_context(ProcessPoolExecutor(1, context, _start, (make, step, abreast)))
            for _ in range(min(jobs, len(items)))
        ]
        found = _turns(pools, items, abreast)
        yield from _ordered(found) if in_order else (done for _, done in found)


def _threaded(
    step: Callable[[Item], Done], items: Sequence[Item], threads: int, in_order: bool
) -> Iterator[Done]:
    if threads == 1:
        yield from map(step, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(step, item) for item in items]
        try:
            yield from (each.result() for each in (running if in_order else as_completed(running)))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _turns(
    pools: Sequence[Executor], items: Sequence[Any], abreast: int
) -> Iterator[tuple[int, Any]]:
    """What each item became, with its number, as they end."""
    left = deque(enumerate(items))
    under_way = dict.fromkeys(pools, 0)
    turns: dict[Future[list[tuple[int, Any]]], Executor] = {}

    def turn(pool: Executor, most: int) -> None:
        begun = [left.popleft() for _ in range(min(most, len(left)))]
        under_way[pool] += len(begun)
        if under_way[pool]:
            turns[pool.submit(_turn, begun)] = pool

    for pool in pools:
        turn(pool, min(abreast, -(-len(items) // len(pools))))
    while turns:
        for future in wait(turns, return_when=FIRST_COMPLETED).done:
            pool, ended = turns.pop(future), future.result()
            under_way[pool] -= len(ended)
            turn(pool, len(ended))
            yield from ended


def _ordered(found: Iterator[tuple[int, Done]]) -> Iterator[Done]:
    early: dict[int, Done] = {}
    following = 0
    for number, done in found:
        early[number] = done
        while following in early:
            yield early.pop(following)
            following += 1


# ---- in a worker process ------------------------------------------------------------------

_inbox: SimpleQueue[tuple[int, Any]] = SimpleQueue()
_ended: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()


def _start(make: Callable[[], Any], step: Callable[[Any, Any], Any], threads: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = make()
    for _ in range(threads):  # daemons: an end needn't wait for what nobody will hear of
        threading.Thread(target=_work, args=(partial(step, worker),), daemon=True).start()


def _work(step: Callable[[Any], Any]) -> None:
    while True:
        number, item = _inbox.get()
        try:
            _ended.put((number, step(item), None))
        except BaseException as error:
            _ended.put((number, None, error))


def _turn(begun: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Begin these, and wait for what ends next. Raises what a step raises."""
    for each in begun:
        _inbox.put(each)
    try:
        ended = [_ended.get()]
    except KeyboardInterrupt:  # the parent's too, which stops in its own way
        os._exit(1)
    while not _ended.empty():
        ended.append(_ended.get())
    for _, _, error in ended:
        if error is not None:
            raise error
    return [(number, done) for number, done, _ in ended]


def _end_with_parent() -> None:
    """A parent that is killed can't stop its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
