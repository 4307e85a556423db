"""Wall clock on this machine: the real pair, a core each, an emulated link in between.

Every round runs all methods on one prompt, one after the other, so that a noisy moment hits all
alike; figures are medians over rounds, with their range. Ratios are taken within a round.

    python benchmarks/wall_clock.py [--rounds 5] [--rtt 40] [--max-tokens 128] [--json FILE]
        [--methods cloud,auto]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import CLOUD, CODE, median
from e2sci.decoding import yardsticks
from e2sci.decoding.schedule import best_schedule
from e2sci.emulation.link import LinkProfile
from e2sci.emulation.local import EDGE_CORE, cloud_process, edge_over, pinned
from e2sci.engines.load import DEFAULT, load_engine
from e2sci.runtime.options import Result
from e2sci.runtime.passes import PassTimes

METHODS: dict[str, dict[str, Any]] = {
    "cloud": {"mode": "cloud"},
    "sd": {"mode": "sync"},
    "fsd": {"mode": "sync", "accept": "fuzzy", "threshold": 0.2},
    "strict": {"mode": "pipelined"},
    "auto": {"mode": "auto"},
    "elastic": {"mode": "pipelined", "accept": "elastic", "threshold": 0.2},
    "elastic-regret": {"mode": "pipelined", "accept": "elastic", "measure": "regret"},
}


@contextmanager
def drafting() -> Iterator[None]:
    """Keep a draft model busy on the edge's core until the cloud has measured its passes.

    The two cores share their memory, so passes take longer while the edge drafts, as it does in
    every mode but `cloud`. The bound should know that.
    """
    command = "from e2sci.engines.base import Step; from e2sci.engines.load import load_engine\n"
    command += f"engine = load_engine({DEFAULT!r}, 'draft', threads=1)\n"
    command += "while True: engine.forward([Step(0, [100])]); engine.truncate(0, 0)"
    with pinned(EDGE_CORE):
        process = subprocess.Popen([sys.executable, "-c", command])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    engine = load_engine(DEFAULT, "draft", threads=1)
    profile = LinkProfile(rtt_ms=args.rtt, up_mbps=10, down_mbps=50)
    rounds: list[dict[str, Result]] = []
    async with edge_over(url, engine, profile) as edge:
        drafted = await edge.generate(CODE[0], mode="draft", max_tokens=32)
        await edge.generate(CODE[0], mode="pipelined", max_tokens=16)
        for i in track(range(args.rounds), "rounds"):
            results = {}
            for name in args.methods:
                results[name] = await edge.generate(
                    CODE[i % len(CODE)], max_tokens=args.max_tokens, **METHODS[name]
                )
            rounds.append(results)
        draft_ms = 1000 / drafted.stats.decode_tokens_per_s
        times = edge.pass_times
    engine.close()
    return report(rounds, draft_ms, times, args.rtt)


def report(
    rounds: list[dict[str, Result]], draft_ms: float, times: PassTimes, rtt: float
) -> dict[str, Any]:
    """Figures by method."""
    methods = {}
    for name in rounds[0]:
        results = [r[name] for r in rounds]
        speeds = [r.stats.tokens_per_s for r in results]
        ratios = [r[name].stats.tokens_per_s / r["cloud"].stats.tokens_per_s for r in rounds]
        judged = [r.stats.acceptance_rate for r in results if r.stats.acceptance_rate is not None]
        alpha = statistics.mean(judged) if judged else None
        tokens = sum(len(r.token_ids) for r in results)
        methods[name] = {
            "tokens_per_s": speeds,
            "decode_tokens_per_s": [r.stats.decode_tokens_per_s for r in results],
            "vs_cloud": ratios,
            "acceptance": alpha,
            "passes_per_token": sum(r.stats.cloud_passes for r in results) / tokens,
            "fed_per_token": sum(r.stats.cloud_tokens for r in results) / tokens,
            "uplink_per_drafted": sum(r.stats.uplink_bytes for r in results)
            / max(1, sum(r.stats.drafted for r in results)),
            "same_text": sum(r[name].token_ids == r["cloud"].token_ids for r in rounds),
            "bound": bound(alpha, draft_ms, times, rtt),
        }
    return {
        "draft_ms": draft_ms,
        "pass_ms": dict(times.points),
        "rounds": len(rounds),
        "methods": methods,
    }


def bound(alpha: float | None, draft_ms: float, times: PassTimes, rtt: float) -> float:
    """The most that any schedule reaches on this machine at that acceptance, by its own times."""
    if alpha is None:
        return yardsticks.cloud_alone(times.ms(1))
    return best_schedule(alpha, draft_ms, times.ms, rtt)


def show(figures: dict[str, Any]) -> None:
    columns = ("method", "tok/s", "behind the first", "vs cloud", "accepted", "passes/tok",
               "fed/tok", "of bound", "same text")  # fmt: skip
    table = Table(*columns, box=None)
    for name, row in figures["methods"].items():
        share = statistics.median(row["decode_tokens_per_s"]) / row["bound"]
        table.add_row(
            name,
            median(row["tokens_per_s"]),
            median(row["decode_tokens_per_s"]),
            median(row["vs_cloud"]),
            "–" if row["acceptance"] is None else f"{row['acceptance']:.3f}",
            f"{row['passes_per_token']:.3f}",
            f"{row['fed_per_token']:.2f}",
            f"{share:.0%}",
            f"{row['same_text']}/{figures['rounds']}",
        )
    console = Console(width=130)
    console.print(table)
    passes = ", ".join(f"{n}: {ms:.0f}" for n, ms in figures["pass_ms"].items())
    console.print(f"draft {figures['draft_ms']:.1f} ms a token; pass ms by tokens {passes}")


def methods(value: str) -> list[str]:
    """Names with commas; the cloud, to which all are compared, comes first."""
    names = list(dict.fromkeys(["cloud", *value.split(",")]))
    if not METHODS.keys() >= set(names):
        raise argparse.ArgumentTypeError(f"there are {', '.join(METHODS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rtt", type=float, default=40.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--methods", type=methods, default=list(METHODS), help="some; with cloud")
    parser.add_argument("--json", help="also write the raw figures here")
    args = parser.parse_args()
    with ExitStack() as stack:
        with drafting():
            url = stack.enter_context(cloud_process([*CLOUD]))
        stack.enter_context(pinned(EDGE_CORE))
        figures = asyncio.run(measure(url, args))
    show(figures)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
