"""How long a verification pass through a server takes, by the prefix in front of it.

Each pass feeds new draft tokens behind a prefix that the server has seen before, and asks for a
distribution behind each. For vLLM the same is then asked in its other way, `prompt_logprobs`.

    python benchmarks/gateway.py --engine vllm --url http://127.0.0.1:8000 --tokenizer FOLDER

`python tests/vllm_env.py --port 8000` serves a tiny model to try it on, and names its folder.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from e2sci.engines.base import Step
from e2sci.engines.remote import Remote
from e2sci.engines.sglang import SGLang
from e2sci.engines.vllm import Vllm

DRAFTS = (1, 4, 8, 16)
ENGINES = {"vllm": Vllm, "sglang": SGLang}


def timed(run: Callable[[], object], rounds: int) -> str:
    """Milliseconds of the fastest `run`, which is the server's own time and not its neighbours'."""
    taken = []
    for _ in range(rounds + 1):  # the first warms up
        began = time.perf_counter()
        run()
        taken.append(1000 * (time.perf_counter() - began))
    return f"{min(taken[1:]):.0f}"


def passes(engine: Remote, prefix: list[int], count: int, rounds: int, draw: random.Random) -> str:
    """Passes of `count` new tokens each behind `prefix`."""

    def run() -> None:
        engine.truncate(0, len(prefix))
        tokens = [draw.randrange(engine.info.real_vocab) for _ in range(count)]
        engine.forward([Step(0, tokens, count)])

    engine.truncate(0, 0)
    engine.forward([Step(0, prefix)])
    return timed(run, rounds)


def prompt_logprobs(
    url: str, engine: Remote, prefix: list[int], count: int, rounds: int, draw: random.Random
) -> tuple[str, int]:
    """The same positions in one prompt, and the bytes that come back."""
    size = 0

    def run() -> None:
        nonlocal size
        ids = prefix + [draw.randrange(engine.info.real_vocab) for _ in range(count)]
        body = {"model": engine.info.name, "prompt": ids, "max_tokens": 1, "temperature": 0}
        body |= {"logprobs": engine.info.top, "prompt_logprobs": engine.info.top}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
        size = len(answer.content)

    return timed(run, rounds), size


def measure(options: argparse.Namespace) -> Table:
    engine = ENGINES[options.engine](options.url, tokenizer=options.tokenizer)
    draw = random.Random(1)
    table = Table("prefix", *(f"{n} new" for n in DRAFTS), title="ms a pass, the fastest")
    if options.engine == "vllm":
        table.add_column("8 new by prompt_logprobs")
        table.add_column("its answer, KB")
    lengths: Sequence[int] = [n for n in options.prefixes if n + max(DRAFTS) <= engine.info.context]
    for length in track(lengths, console=Console(stderr=True), transient=True):
        prefix = [draw.randrange(engine.info.real_vocab) for _ in range(length)]
        row = [passes(engine, prefix, n, options.rounds, draw) for n in DRAFTS]
        if options.engine == "vllm":
            taken, size = prompt_logprobs(options.url, engine, prefix, 8, options.rounds, draw)
            row += [taken, f"{size / 1000:.0f}"]
        table.add_row(str(length), *row)
    engine.close()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Time verification passes through a server.")
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--url", required=True)
    parser.add_argument("--tokenizer", required=True, help="the model's folder or hub name")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[64, 256, 1024, 2048, 3800])
    parser.add_argument("--rounds", type=int, default=5)
    Console().print(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
