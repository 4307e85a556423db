"""The cloud under load: makes docs/load.md.

    python benchmarks/load.py                     # everything, then the page
    python benchmarks/load.py --only batch,wrong  # some parts anew; the rest as in docs/load.json

    edges    64 edges at once: is each text what it is alone, and how evenly do they progress?
    memory   the process after 1 000 and after 10 000 requests
    batch    the real 1.5B: 16 requests at once against one, and the engine's own ceiling
    wrong    drafts that are always wrong, and floods: target tokens, and the neighbours' speed
    tests    the fault and fuzz tests, at their full numbers

`edges`, `memory` and `tests` run on the synthetic engine and this machine's clock; `wrong` on the
virtual clock (profile `paper`), so its figures are exact.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from load_parts import Figures, batch, edges, memory, tests, wrong

DOCS = Path(__file__).parent.parent / "docs"
DATA, PAGE = DOCS / "load.json", DOCS / "load.md"

PARTS: dict[str, Callable[[], Figures]] = {
    "edges": edges,
    "memory": memory,
    "batch": batch,
    "wrong": wrong,
    "tests": tests,
}


def page(data: Figures) -> Iterator[str]:
    """The lines of docs/load.md."""
    yield "# The cloud under load\n"
    yield "Made by `python benchmarks/load.py`; how each part is measured is said at its top.\n"
    if e := data.get("edges"):
        yield "## Many edges\n"
        yield (
            f"{e['edges']} edges at once (mixed lengths, greedy and sampled, three modes): "
            f"{e['equal']} of {e['edges']} texts are token for token those of a run alone. With "
            "room for 16 tokens in a pass and 64 streams, while the slowest gets ten tokens the "
            f"fastest gets at most {e['ratio']:.2f} times as many (median of ten stretches "
            f"{e['median']:.2f}).\n"
        )
    if m := data.get("memory"):
        yield (
            f"Resident memory after 1 000 requests: {m['mb']['1000']:.0f} MB; after 10 000: "
            f"{m['mb']['10000']:.0f} MB ({m['ratio']:.3f}x).\n"
        )
    if b := data.get("batch"):
        yield "## Batches on the real target (1.5B, Q4_K_M, this machine's cores)\n"
        yield "| | tokens/s |\n|---|---|"
        yield f"| one request at a time | {b['alone']:.1f} |"
        yield f"| {b['requests']} at once | {b['together']:.1f} |"
        yield f"| the engine fed by hand, {b['requests']} sequences a pass | {b['ceiling']:.1f} |\n"
        yield (
            f"Batching gives {b['ratio']:.2f}x; the scheduler reaches {b['of_ceiling']:.1%} of "
            "what the engine can.\n"
        )
    if w := data.get("wrong"):
        yield "## Drafts that are always wrong\n"
        yield "Profile `paper`, virtual clock; 300 tokens alone, and beside seven neighbours.\n"
        yield "| the edge | target tokens, × cloud alone | neighbours' speed, × beside a stream |"
        yield "|---|---|---|"
        for name, row in w.items():
            yield f"| {name} | {row['tokens']:.3f} | {row['neighbours']:.3f} |"
        yield ""
    if t := data.get("tests"):
        yield "## Faults and hostile input\n"
        yield "100 000 mutated frames; 200 random runs of each fault.\n"
        yield "| test | |\n|---|---|"
        for found in t.values():
            for name, outcome in found.items():
                yield f"| {name.removeprefix('test_').replace('_', ' ')} | {outcome.lower()} |"
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    for name in parser.parse_args().only.split(","):
        print(name, file=sys.stderr)
        data[name] = PARTS[name]()
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text("\n".join(page(data)), encoding="utf-8")


if __name__ == "__main__":
    main()
