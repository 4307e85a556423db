"""Our own overhead: CPU a delivered token costs outside the engine's forward, at both ends.

Edge and cloud run in one process, each on an event loop in a thread of its own and joined by a
real WebSocket, so that every thread's CPU time can be told apart. Of each engine's thread the time
inside `forward` is taken off; what remains, over the delivered tokens, is ours: sessions,
acceptance, codec, sockets, event loop.

    python benchmarks/overhead.py [--max-tokens 128]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import CODE
from e2sci.decoding.distribution import Distribution
from e2sci.engines.base import Engine, Step
from e2sci.engines.load import DEFAULT, load_engine
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.edge import Edge
from e2sci.runtime.passes import PassTimes
from e2sci.server.cloud_app import listening

METHODS: dict[str, dict[str, Any]] = {
    "strict": {},
    "strict, sampled": {"temperature": 0.8, "seed": 1},
    "elastic on JS": {"accept": "elastic"},
    "elastic on regret": {"accept": "elastic", "measure": "regret"},
    "rejection, sampled": {"accept": "rejection", "temperature": 0.8, "seed": 1},
}
ROUNDS = 3


class Metered:
    """An engine that tells its thread's CPU seconds outside `forward`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inside = self._thread = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        began = time.thread_time()
        try:
            return self._engine.forward(steps)
        finally:
            self._thread = time.thread_time()
            self._inside += self._thread - began

    @property
    def outside(self) -> float:
        return self._thread - self._inside


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def cpu(self) -> float:
        """CPU seconds of the thread so far."""

        async def read() -> float:
            return time.thread_time()

        return float(self.run(read()))


@asynccontextmanager
async def serving(engine: Metered) -> AsyncIterator[str]:
    times = PassTimes(((1, 50.0), (8, 400.0), (16, 520.0), (32, 860.0)))
    async with Cloud(engine, times=times) as cloud, listening(cloud, "127.0.0.1", 0) as port:
        yield f"ws://127.0.0.1:{port}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    target = Metered(load_engine(DEFAULT, "target", threads=1))
    draft = Metered(load_engine(DEFAULT, "draft", threads=1))
    at_cloud, at_edge = Loop(), Loop()
    served = serving(target)
    edge = Edge(at_cloud.run(served.__aenter__()), draft)
    at_edge.run(edge.__aenter__())
    at_edge.run(edge.generate(CODE[0], mode="pipelined", max_tokens=8))
    limits = {"mode": "pipelined", "fill": False, "max_tokens": args.max_tokens}
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    for prompt in track(CODE[:ROUNDS], "rounds"):
        for name, settings in METHODS.items():
            before = (at_edge.cpu() + draft.outside, at_cloud.cpu() + target.outside)
            call = edge.generate(prompt, **limits, **settings)
            tokens = len(at_edge.run(call).token_ids)
            after = (at_edge.cpu() + draft.outside, at_cloud.cpu() + target.outside)
            spent = [1000 * (b - a) / tokens for a, b in zip(before, after, strict=True)]
            figures[name].append((spent[0], spent[1]))
    at_edge.run(edge.__aexit__())
    at_cloud.run(served.__aexit__(None, None, None))
    table = Table("CPU ms a delivered token", "edge", "cloud", box=None)
    for name, rows in figures.items():
        ends = (statistics.median(end) for end in zip(*rows, strict=True))
        table.add_row(name, *(f"{ms:.2f}" for ms in ends))
    Console().print(table)


if __name__ == "__main__":
    main()
