"""Many users on few engines: what each of them gets, and how many an engine can serve.

    load = Load(trace, profile)
    figures = fleet(load, ["cloud", "strict"], users=1000, engines=20)
    found = capacity(load, ["cloud", "strict"], target=10.0)

Users are spread evenly over the engines, and engines share nothing. So each is simulated by itself
(evaluation.crowd), in any number of processes, with the same outcome.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import msgspec
import numpy as np

from e2sci.evaluation.crowd import EngineRun, Load, Use, engine_run
from e2sci.evaluation.plots import figure
from e2sci.evaluation.replay import Script

MOST_USERS = 4096
"""Of one engine, in a search."""

PRECISION = 0.02
"""Of what a search finds."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A method with `users` in all on `engines`.

    Speeds are tokens/s over a request's own time, from sending it to its last token: `speed_p50`,
    the median; `speed_95`, `speed_99`: what 95 and 99 % of the requests get at least. `ttft_p…`:
    seconds to the first token, quantiles. Of an engine: `engine_tokens_per_s`, all its users
    together; `busy`, the share of time that it computes; `tokens_per_pass` that reach users;
    `fed_per_pass`, tokens it is fed, prompts included.
    """

    method: str
    users: int
    engines: int
    requests: int
    speed_p50: float
    speed_95: float
    speed_99: float
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    engine_tokens_per_s: float
    busy: float
    tokens_per_pass: float
    fed_per_pass: float


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The largest number of busy users of one engine of whose requests 95 % get at least `target`
    tokens/s, to 2 %; 0 if one alone doesn't. `points`: all that was tried, by users."""

    method: str
    target: float
    users: int
    points: list[Figures]

    @property
    def point(self) -> Figures | None:
        """The figures with `users`."""
        return next((point for point in self.points if point.users == self.users), None)


def fleet(
    load: Load,
    names: Sequence[str],
    *,
    users: int,
    engines: int = 1,
    jobs: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> list[Figures]:
    """Each of the methods with `users` in all. `jobs`: processes, 0 for this one; `advance` is
    called engines × methods times. Raises ValueError."""
    if not 1 <= engines <= users:
        raise ValueError(f"{users} edges on {engines} engines: expected 1 or more edges an engine")
    shares = [users // engines + (k < users % engines) for k in range(engines)]
    with _Farm(load, names, jobs) as farm:
        runs = {name: [farm.submit(name, n, k) for k, n in enumerate(shares)] for name in names}
        for done in as_completed(future for futures in runs.values() for future in futures):
            done.result()
            advance()
        return [
            summary(name, users, [future.result() for future in futures], load.seconds)
            for name, futures in runs.items()
        ]


def capacity(
    load: Load,
    names: Sequence[str],
    *,
    target: float = 10.0,
    most: int = MOST_USERS,
    jobs: int = 0,
    advance: Callable[[Figures], None] = lambda _: None,
) -> list[Capacity]:
    """How many users one engine can serve by each of the methods; users are busy all the time, so
    `load.think_s` doesn't count. `advance` is called with each point tried. Raises ValueError."""
    if not 0 < target < 1e6:
        raise ValueError(f"target is {target:g} tokens/s; expected more than 0, below 1 000 000")
    searches = {name: search(target, most) for name in names}
    tried: dict[str, list[Figures]] = {name: [] for name in names}
    found: dict[str, int] = {}
    with _Farm(replace(load, think_s=0.0), names, jobs) as farm:
        pending: dict[Future[EngineRun], tuple[str, int]] = {}

        def start(name: str, users: int) -> None:
            pending[farm.submit(name, users, 0)] = name, users

        for name in searches:
            start(name, next(searches[name]))
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                name, users = pending.pop(future)
                point = summary(name, users, [future.result()], load.seconds)
                tried[name].append(point)
                advance(point)
                try:
                    start(name, searches[name].send(point.speed_95))
                except StopIteration as stop:
                    found[name] = stop.value
    return [
        Capacity(
            method=name,
            target=target,
            users=found[name],
            points=sorted(tried[name], key=lambda point: point.users),
        )
        for name in names
    ]


def search(target: float, most: int = MOST_USERS) -> Generator[int, float, int]:
    """Yields numbers of users, takes the speed of each, returns the largest of at most `most` that
    reaches the target: doubled until one does not, then halved in between, to PRECISION."""
    low, high = 0, 1
    while (yield high) >= target:
        if high >= most:
            return most
        low, high = high, min(most, 2 * high)
    while high - low > max(1.0, PRECISION * low):
        middle = (low + high) // 2
        if (yield middle) >= target:
            low = middle
        else:
            high = middle
    return low


def summary(name: str, users: int, runs: Sequence[EngineRun], seconds: float) -> Figures:
    """The figures of a method's engines. Raises ValueError if no request was measured."""
    samples = np.array([sample for run in runs for sample in run.samples])
    if not samples.size:
        raise ValueError(f"no request was begun within {seconds:g} s: measure for more seconds")
    speeds, ttft = samples[:, 2] / samples[:, 0], samples[:, 1]
    # Of the values that occur, so that the share is at least what it says.
    speed_50, speed_5, speed_1 = np.quantile(speeds, [0.5, 0.05, 0.01], method="lower").tolist()
    ttft_50, ttft_95, ttft_99 = np.quantile(ttft, [0.5, 0.95, 0.99], method="higher").tolist()
    use = Use(*np.sum([run.use for run in runs], axis=0).tolist())
    return Figures(
        method=name,
        users=users,
        engines=len(runs),
        requests=len(samples),
        speed_p50=speed_50,
        speed_95=speed_5,
        speed_99=speed_1,
        ttft_p50=ttft_50,
        ttft_p95=ttft_95,
        ttft_p99=ttft_99,
        engine_tokens_per_s=use.tokens / seconds / len(runs),
        busy=min(1.0, use.busy_s / seconds / len(runs)),
        tokens_per_pass=use.tokens / max(1.0, use.passes),
        fed_per_pass=use.fed / max(1.0, use.passes),
    )


def plot_capacity(found: Sequence[Capacity], path: Path) -> None:
    """The speed that 95 % of requests get at least, over users of an engine; see plots.figure."""
    with figure(path, (8, 5)) as whole:
        axes = whole.subplots()
        for one in found:
            users = [point.users for point in one.points]
            speeds = [point.speed_95 for point in one.points]
            axes.plot(users, speeds, "o-", markersize=4, label=f"{one.method}: {one.users} users")
        axes.axhline(found[0].target, color="0.3", linestyle="--", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="busy users of an engine", ylabel="tokens/s that 95 % of requests get")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)


# ---- processes ----------------------------------------------------------------------------


class _Farm:
    """Runs engines of a load in `jobs` processes, or at once in this one for 0."""

    def __init__(self, load: Load, names: Sequence[str], jobs: int) -> None:
        for name in names:
            load.method(name)  # mistakes show before anything is started
        self._pool: ProcessPoolExecutor | None = None
        if jobs:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                jobs, context, initializer=_start_process, initargs=(load,)
            )
        else:
            _start(load)

    def submit(self, name: str, users: int, index: int) -> Future[EngineRun]:
        if self._pool is not None:
            return self._pool.submit(_run, name, users, index)
        future: Future[EngineRun] = Future()
        future.set_result(_run(name, users, index))
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        return False


_load: Load
_script: Script


def _start(load: Load) -> None:
    global _load, _script
    _load, _script = load, Script(load.trace)


def _start_process(load: Load) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    _start(load)


def _run(name: str, users: int, index: int) -> EngineRun:
    return engine_run(_load, _script, name, users, index)
