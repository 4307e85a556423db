"""Drafts inside vLLM: what the proposer costs where there are none, and what drafts save.

    python benchmarks/native.py load plain=http://127.0.0.1:8000 native=http://127.0.0.1:8001

sends the same requests to servers of one model in turns, and compares their throughput with the
first one's. No edges, so the drafts are none.

    python benchmarks/native.py edges --cloud ws://127.0.0.1:7071 --vllm http://127.0.0.1:8001

has edges write through a gateway, with drafts and without, and takes steps and acceptance from
vLLM's own counters. `python tests/vllm_env.py --port 8001 --drafts ADDRESS` serves a tiny model.

    python benchmarks/native.py step

times the proposer's own part of a step, without vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from types import SimpleNamespace

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from common import CODE, median
from e2sci import Edge, load_engine
from e2sci.engines.base import Engine
from e2sci.engines.vllm_stream import Counters, Streaming
from e2sci.runtime.options import Result
from e2sci.vllm_plugin.proposer import Proposer
from e2sci.vllm_plugin.store import prefix_key
from e2sci.vllm_plugin.wire import Drafts

TIMEOUT = 600


async def throughput(url: str, requests: int, tokens: int, turn: int) -> float:
    """Tokens a second of `requests` at once, `tokens` each, with prompts that are new."""
    async with httpx.AsyncClient(
        timeout=TIMEOUT, limits=httpx.Limits(max_connections=None)
    ) as http:
        model = (await http.get(f"{url}/v1/models")).json()["data"][0]["id"]

        async def ask(number: int) -> None:
            prompt = [(number * 31 + turn * 17 + i * 7) % 250 for i in range(64)]
            body = {"model": model, "prompt": prompt, "max_tokens": tokens}
            body |= {"temperature": 0, "ignore_eos": True}
            (await http.post(f"{url}/v1/completions", json=body)).raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*(ask(number) for number in range(requests)))
        return requests * tokens / (time.perf_counter() - began)


async def load(options: argparse.Namespace) -> Table:
    servers = dict(server.split("=", 1) for server in options.servers)
    found: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(-1, options.rounds):  # the first warms up
        for name, url in servers.items():
            speed = await throughput(url, options.requests, options.tokens, turn)
            if turn >= 0:
                found[name].append(speed)
    first = max(next(iter(found.values())))
    # The fastest round is the server's own time and not its neighbours'.
    table = Table("server", "tokens/s, the fastest", "of the first's", "median of all rounds")
    for name, speeds in found.items():
        best = max(speeds)
        table.add_row(name, f"{best:.0f}", f"{best / first:.3f}", median(speeds))
    return table


async def written(
    engine: Engine, cloud: str, vllm: Streaming, options: argparse.Namespace, mode: str
) -> tuple[list[Result], Counters, Counters]:
    """What the edges wrote, and vLLM's counters before and behind."""
    before = await vllm.counters()
    async with Edge(cloud, engine) as edge:

        async def write(first: int) -> list[Result]:
            prompts = CODE[first :: options.edges]
            return [
                await edge.generate(prompt, mode=mode, max_tokens=options.tokens)
                for prompt in prompts
            ]

        lists: Sequence[list[Result]] = await asyncio.gather(
            *(write(first) for first in range(options.edges))
        )
    return [result for some in lists for result in some], before, await vllm.counters()


async def edges(options: argparse.Namespace) -> Table:
    engine = load_engine(options.draft, "draft", slots=options.edges, threads=options.threads)
    vllm = Streaming(options.vllm, "")
    table = Table("mode", "tokens/s an edge", "steps a token", "drafts accepted", "texts equal")
    texts: list[list[int]] = []
    for mode in ("cloud", "pipelined"):
        results, before, after = await written(engine, options.cloud, vllm, options, mode)
        accepted, judged = after.accepted - before.accepted, after.judged - before.judged
        ids = [result.token_ids for result in results]
        texts = texts or ids
        table.add_row(
            mode,
            median([result.stats.tokens_per_s for result in results]),
            f"{1 - accepted / (after.written - before.written):.3f}",
            f"{accepted / judged:.3f} of {judged:.0f}" if judged else "none",
            f"{sum(a == b for a, b in zip(ids, texts, strict=True))} of {len(ids)}",
        )
    await vllm.close()
    engine.close()
    return table


def step(options: argparse.Namespace) -> Table:
    """Microseconds of one call, the fastest of many, by the batch and by who has drafts."""
    table = Table("requests", "no drafts at all", "drafts of others", "drafts of each")
    generator = np.random.default_rng(1)
    for batch in (1, 16, 64, 256):
        rows = generator.integers(0, 100_000, (batch, options.context), dtype=np.int32)
        lengths = np.full(batch, options.context - 100)
        cells = []
        for drafts in ("none", "others", "each"):
            with tempfile.TemporaryDirectory() as folder:
                proposer = Proposer(_config(options.context), f"ipc://{folder}/drafts")
                for row in rows if drafts != "none" else ():
                    at = lengths[0] if drafts == "each" else lengths[0] - 1
                    proposer.put(Drafts(prefix_key(row[:at]), int(at), list(range(16))))
                taken = []
                for _ in range(options.rounds):
                    began = time.perf_counter()
                    proposer.propose([[1]] * batch, lengths, rows)
                    taken.append(1e6 * (time.perf_counter() - began))
                proposer.close()
            cells.append(f"{min(taken):.0f}")
        table.add_row(str(batch), *cells)
    return table


def _config(context: int) -> SimpleNamespace:
    """As much of vLLM's configuration as the proposer looks at."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=8),
        model_config=SimpleNamespace(max_model_len=context, get_vocab_size=lambda: 151_936),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_index=0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure drafts inside vLLM.")
    parts = parser.add_subparsers(required=True)
    one = parts.add_parser("load", help="throughput without edges")
    one.add_argument("servers", nargs="+", metavar="NAME=URL")
    one.add_argument("--requests", type=int, default=16)
    one.add_argument("--tokens", type=int, default=128)
    one.add_argument("--rounds", type=int, default=9)
    one.set_defaults(run=load)
    two = parts.add_parser("edges", help="steps and acceptance through a gateway")
    two.add_argument("--cloud", default="ws://127.0.0.1:7071")
    two.add_argument("--vllm", default="http://127.0.0.1:8000")
    two.add_argument("--draft", default="qwen2.5-coder")
    two.add_argument("--edges", type=int, default=1)
    two.add_argument("--tokens", type=int, default=64)
    two.add_argument("--threads", type=int)
    two.set_defaults(run=edges)
    three = parts.add_parser("step", help="the proposer's part of a step")
    three.add_argument("--context", type=int, default=4096)
    three.add_argument("--rounds", type=int, default=200)
    three.set_defaults(run=step)
    options = parser.parse_args()
    found = options.run(options)
    Console().print(found if isinstance(found, Table) else asyncio.run(found))


if __name__ == "__main__":
    main()
