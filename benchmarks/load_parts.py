"""What benchmarks/load.py measures, a function a part; each returns plain figures."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from common import CODE, PROSE
from e2sci.emulation.clock import run
from e2sci.emulation.device import Device, Metered
from e2sci.emulation.profile import PROFILES
from e2sci.emulation.wire import link_pair
from e2sci.engines.base import Engine, Step
from e2sci.engines.load import DEFAULT, load_engine
from e2sci.engines.synthetic import EOS, Synthetic, SyntheticConfig
from e2sci.runtime.admission import TIMELESS
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.edge import Edge
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.transport import Channel, memory_pair

HERE = Path(__file__).parent.parent
ENDLESS = {EOS: -100.0}
FLAT = PassTimes(((1, 1.0), (32, 1.0)))
Figures = dict[str, Any]


def synthetic(**config: Any) -> Synthetic:
    return Synthetic(SyntheticConfig(**{"seed": 11, **config}))


@asynccontextmanager
async def served(
    engine: Engine, drafts: Sequence[Engine], times: PassTimes | None = FLAT
) -> AsyncIterator[tuple[Cloud, list[Edge]]]:
    """A cloud and an edge for each of `drafts`, joined in memory."""
    async with AsyncExitStack() as stack:
        cloud = await stack.enter_async_context(Cloud(engine, times=times))

        async def dial() -> Channel:
            here, there = memory_pair()
            stack.callback(asyncio.create_task(cloud.serve(there)).cancel)
            return here

        yield cloud, [await stack.enter_async_context(Edge(dial, d)) for d in drafts]


# ---- 64 edges -----------------------------------------------------------------------------


def asked(i: int) -> tuple[str, Figures]:
    """Mixed lengths; greedy and sampled; pipelined, synchronous, plain."""
    sampled = {"temperature": 0.8, "seed": i} if i % 2 else {}
    mode = ("pipelined", "sync", "cloud")[i % 3]
    return f"number {i} " * (1 + i % 9), {"mode": mode, "max_tokens": 20 + 9 * i % 200, **sampled}


def edges() -> Figures:
    async def alone() -> list[list[int]]:
        async with served(synthetic(), [synthetic(divergence=0.5)]) as (_, [edge]):
            results = [await edge.generate(p, **o) for p, o in map(asked, range(64))]
            return [result.token_ids for result in results]

    async def together() -> list[list[int]]:
        drafts = [synthetic(divergence=0.5) for _ in range(64)]
        async with served(synthetic(), drafts) as (_, many):
            requests = zip(many, map(asked, range(64)), strict=True)
            jobs = [edge.generate(p, **o) for edge, (p, o) in requests]
            return [result.token_ids for result in await asyncio.gather(*jobs)]

    async def evenly() -> list[float]:
        """Tokens of the fastest over those of the slowest, while the slowest gets ten."""
        crowded = PassTimes(((1, 1.0), (16, 100.0), (64, 1000.0)))  # room for 16 tokens a pass
        async with served(synthetic(), [synthetic() for _ in range(64)], crowded) as (_, many):
            counts = [0] * 64
            jobs = [asyncio.create_task(_counted(e, counts, i)) for i, e in enumerate(many)]
            await _gained(counts, [0] * 64, 5)
            ratios = []
            for _ in range(10):
                before = list(counts)
                gained = await _gained(counts, before, 10)
                ratios.append(max(gained) / min(gained))
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            return ratios

    solo, crowd, ratios = asyncio.run(alone()), asyncio.run(together()), asyncio.run(evenly())
    equal = sum(a == b for a, b in zip(solo, crowd, strict=True))
    return {"edges": 64, "equal": equal, "ratio": max(ratios), "median": statistics.median(ratios)}


async def _gained(counts: list[int], before: list[int], least: int) -> list[int]:
    """What each has gained, once all have gained so much."""
    while True:
        gained = [n - b for n, b in zip(counts, before, strict=True)]
        if min(gained) >= least:
            return gained
        await asyncio.sleep(0.02)


async def _counted(edge: Edge, counts: list[int], i: int) -> None:
    options: Figures = {"mode": "cloud", "max_tokens": 4000, "logit_bias": ENDLESS}
    async for piece in edge.stream("go", **options):
        counts[i] += len(piece.commits)


# ---- memory -------------------------------------------------------------------------------


def memory() -> Figures:
    async def main() -> Figures:
        drafts = [synthetic(divergence=0.5) for _ in range(4)]
        async with served(synthetic(), drafts) as (_, many):

            async def some(n: int) -> float:
                # Few texts, since the synthetic engine keeps what it computed (up to a bound).
                for i in range(n // 4):
                    options: Figures = {
                        "mode": "pipelined",
                        "max_tokens": 8,
                        "raw": True,
                        "seed": i % 16,
                        "temperature": i % 2,
                    }
                    await asyncio.gather(*(e.generate("hi", **options) for e in many))
                gc.collect()
                return _resident_mb()

            after = {"1000": await some(1000), "10000": await some(9000)}
            return {"mb": after, "ratio": after["10000"] / after["1000"]}

    return asyncio.run(main())


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# ---- batches on the real target -----------------------------------------------------------


def batch(at_once: int = 16, tokens: int = 48) -> Figures:
    """Plain streams, so that the ratio is that of batching alone; the ceiling is the same tokens
    fed by hand, a pass of one token for each of the sequences."""
    prompts = [*CODE, *PROSE][:at_once]
    target = load_engine(DEFAULT, "target", context=512, slots=at_once)
    try:
        times = PassTimes(((1, 1.0), (at_once, 1.0)))

        async def main() -> list[float]:
            # The edge needs a tokenizer only: nothing is drafted.
            async with served(target, [target], times) as (_, [edge]):
                await _streamed(edge, prompts[:1], 4)
                alone = await _streamed(edge, prompts[:2], tokens, together=False)
                return [alone, await _streamed(edge, prompts, tokens)]

        alone, together = asyncio.run(main())
        ceiling = _ceiling(target, at_once, tokens)
    finally:
        target.close()
    return {
        "requests": at_once,
        "alone": alone,
        "together": together,
        "ceiling": ceiling,
        "ratio": together / alone,
        "of_ceiling": together / ceiling,
    }


async def _streamed(
    edge: Edge, prompts: Sequence[str], tokens: int, *, together: bool = True
) -> float:
    """Tokens a second over all, while all are writing: prompts are read before."""

    async def written(prompt: str) -> list[float]:
        options: Figures = {"mode": "cloud", "max_tokens": tokens, "logit_bias": _NO_END}
        return [
            time.perf_counter()
            async for piece in edge.stream(prompt, **options)
            for _ in piece.commits
        ]

    groups = [prompts] if together else [[prompt] for prompt in prompts]
    rates = []
    for group in groups:
        times = await asyncio.gather(*map(written, group))
        began, ended = max(each[0] for each in times), min(each[-1] for each in times)
        count = sum(began < at <= ended for each in times for at in each)
        rates.append(count / (ended - began))
    return statistics.median(rates)


_NO_END = {151645: -100.0, 151643: -100.0}


def _ceiling(engine: Engine, at_once: int, tokens: int) -> float:
    for sequence in range(at_once):
        engine.forward([Step(sequence, list(range(100, 140)))])
    seconds = []
    for i in range(tokens):
        began = time.perf_counter()
        engine.forward([Step(sequence, [200 + i]) for sequence in range(at_once)])
        seconds.append(time.perf_counter() - began)
    for sequence in range(at_once):
        engine.truncate(sequence, 0)
    return at_once / statistics.median(seconds)


# ---- who costs more than he should --------------------------------------------------------


def wrong() -> Figures:
    """Target tokens of an edge whose drafts are always wrong, against the cloud alone; and seven
    neighbours' tokens a second beside it, against beside a plain stream."""
    rows = {}
    for name, options in (
        ("pipelined", {"mode": "pipelined"}),
        ("pipelined, W = 16", {"mode": "pipelined", "window": 16}),
        ("without fill", {"mode": "pipelined", "fill": False}),
        ("synchronous, W = 16", {"mode": "sync", "window": 16}),
    ):
        hostile, plain = _beside(options), _beside({"mode": "cloud"})
        rows[name] = {
            "tokens": hostile["fed"] / plain["fed"],
            "neighbours": hostile["neighbours"] / plain["neighbours"],
        }
    return rows


def _beside(options: Figures, neighbours: int = 7, tokens: int = 300) -> Figures:
    """One edge with `options` and a random draft, and neighbours who agree mostly."""
    profile = PROFILES["paper"]

    async def main() -> Figures:
        engine = Metered(synthetic())
        device = Device(profile.target, engine)
        async with AsyncExitStack() as stack:
            cloud = Cloud(engine, times=profile.pass_times, worker=device, limits=TIMELESS)
            await stack.enter_async_context(cloud)

            async def edge(draft: Engine) -> Edge:
                here, there = link_pair(profile.link)
                stack.callback(asyncio.create_task(cloud.serve(there)).cancel)
                metered = Metered(draft)
                worker = Device(profile.draft, metered)
                return await stack.enter_async_context(Edge(_dial(here), metered, worker=worker))

            alone = await (await edge(synthetic(random=True))).generate(
                "go", max_tokens=tokens, logit_bias=ENDLESS, **options
            )
            fed = engine.fed
            others = [await edge(synthetic(divergence=0.3)) for _ in range(neighbours)]
            one = await edge(synthetic(random=True))
            endless: Figures = {"max_tokens": 2000, "logit_bias": ENDLESS}
            noise = asyncio.create_task(one.generate("go", **endless, **options))
            jobs = [
                e.generate(f"n{i}", mode="pipelined", max_tokens=tokens, logit_bias=ENDLESS)
                for i, e in enumerate(others)
            ]
            results = await asyncio.gather(*jobs)
            noise.cancel()
            await asyncio.gather(noise, return_exceptions=True)
            assert len(alone.token_ids) == tokens
            speed = statistics.median(r.stats.decode_tokens_per_s for r in results)
            return {"fed": fed, "neighbours": speed}

    return run(main)


def _dial(end: Channel) -> Callable[[], Awaitable[Channel]]:
    async def dial() -> Channel:
        return end

    return dial


# ---- the tests at their full numbers ------------------------------------------------------


def tests() -> Figures:
    environment = {**os.environ, "E2SCI_FRAMES": "100000", "E2SCI_FAULT_RUNS": "200"}
    figures = {}
    for name in ("test_fuzz.py", "test_faults.py"):
        command = [sys.executable, "-m", "pytest", "-rA", f"tests/{name}"]
        done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
        told = re.findall(r"^(PASSED|FAILED|ERROR) \S+?::(\S+)", done.stdout, re.MULTILINE)
        figures[name] = {test: outcome for outcome, test in told}
    return figures
