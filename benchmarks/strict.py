"""Strict text against the cloud alone, on the real pair: equal, or first different at a near tie.

llama.cpp on a CPU is not batch-invariant: logits of a pass over several tokens differ a little from
those of single-token passes, so two tokens whose logits nearly tie may change places. For every
prompt whose texts differ, the gap between the target's two best logits at the first difference is
printed; anything but a near tie would be a bug of ours.

    python benchmarks/strict.py [--max-tokens 96]
"""

from __future__ import annotations

import argparse
import asyncio

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import CODE, PROSE
from e2sci.engines.base import Engine, Step
from e2sci.engines.load import DEFAULT, load_engine
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.edge import Edge
from e2sci.runtime.text import prompt_ids
from e2sci.server.cloud_app import listening

NEAR_TIE = 1.0
"""Logit difference up to which batch sizes were seen to change an order on this engine."""


def gap_at(target: Engine, ids: list[int], a: int, b: int) -> float:
    """Log-probability of token a over b behind `ids`, in nats."""
    target.truncate(0, 0)
    [[p]] = target.forward([Step(0, ids)])
    at_a, at_b = p.log_prob(np.array([a, b]))
    return float(at_a - at_b)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    target = load_engine(DEFAULT, "target", threads=1)
    draft = load_engine(DEFAULT, "draft", threads=1)
    different = []
    prompts = [*CODE, *PROSE]
    async with (
        Cloud(target) as cloud,
        listening(cloud, "127.0.0.1", 0) as port,
        Edge(f"ws://127.0.0.1:{port}", draft) as edge,
    ):
        for prompt in track(prompts, "prompts"):
            alone = (
                await edge.generate(prompt, mode="cloud", max_tokens=args.max_tokens)
            ).token_ids
            both = (
                await edge.generate(
                    prompt, mode="pipelined", fill=False, max_tokens=args.max_tokens
                )
            ).token_ids
            if alone != both:
                at = next(
                    (i for i, (a, b) in enumerate(zip(alone, both, strict=False)) if a != b),
                    min(len(alone), len(both)),
                )
                different.append((prompt, alone, both, at))
    table = Table("first difference at", "alone", "with the edge", "log-prob gap", box=None)
    for prompt, alone, both, at in different:
        ids = prompt_ids(draft, prompt, system=None, raw=False) + alone[:at]
        eos = min(target.info.eos_ids)
        a, b = (text[at] if at < len(text) else eos for text in (alone, both))
        gap = gap_at(target, ids, a, b)
        names = [repr(target.tokenizer.piece(t).decode(errors="replace")) for t in (a, b)]
        verdict = "near tie" if abs(gap) <= NEAR_TIE else "[red]NOT a near tie[/]"
        table.add_row(str(at), *names, f"{gap:.3f} {verdict}")
    console = Console()
    console.print(f"{len(prompts) - len(different)} of {len(prompts)} texts equal")
    if different:
        console.print(table)


if __name__ == "__main__":
    asyncio.run(main())
