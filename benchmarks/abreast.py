"""What a token costs when requests go abreast: passes of N tokens through both default models.

    python benchmarks/abreast.py 1 16
    E2SCI_AMX=1 python benchmarks/abreast.py 1 16 --widened     # see widened.py

One thread; medians. The caches hold 150 tokens each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from e2sci import load_engine
from e2sci.engines.base import Step

PASSES = 12
HELD = range(1000, 1150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("abreast", nargs="+", type=int)
    parser.add_argument("--widened", action="store_true")
    args = parser.parse_args()
    if args.widened:
        import widened  # noqa: F401  (loads models its way from here on)
    table = Table("model", "abreast", "ms a pass", "ms a token")
    for role in ("draft", "target"):
        for abreast in args.abreast:
            ms = pass_ms(role, abreast)
            table.add_row(role, str(abreast), f"{ms:.0f}", f"{ms / abreast:.1f}")
    Console().print(table)


def pass_ms(role: Any, abreast: int) -> float:
    """Median time of a pass with a token for each of `abreast` sequences."""
    engine = load_engine("qwen2.5-coder", role, context=640, slots=abreast, threads=1, apart=True)
    for place in range(abreast):
        engine.forward([Step(place, list(HELD))])
    times = []
    for n in range(PASSES):
        began = time.perf_counter()
        engine.forward([Step(place, [2000 + n + place]) for place in range(abreast)])
        times.append(1000 * (time.perf_counter() - began))
    engine.close()
    return statistics.median(times)


if __name__ == "__main__":
    main()
