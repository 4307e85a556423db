"""`e2sci demo`: both ends on this machine with a network between them, five ways to decode."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from e2sci.cli.common import BadInput, download_bar, friendly
from e2sci.cli.draft import Draft, draft_options
from e2sci.cli.printer import LEGEND, STYLES, coloured
from e2sci.decoding import yardsticks
from e2sci.decoding.schedule import best_schedule
from e2sci.emulation.link import LinkProfile
from e2sci.emulation.local import EDGE_CORE, cloud_process, edge_over, pinned
from e2sci.engines.base import Engine
from e2sci.engines.load import DEFAULT
from e2sci.runtime.edge import Edge, options_from
from e2sci.runtime.options import Options, Result
from e2sci.runtime.passes import PassTimes
from e2sci.session.edge import Origin

METHODS: dict[str, dict[str, Any]] = {
    "cloud alone": {"mode": "cloud"},
    "sync SD": {"mode": "sync"},
    "FSD": {"mode": "sync", "accept": "fuzzy", "threshold": 0.2},
    "pipelined strict": {"mode": "pipelined"},
    "pipelined elastic": {"mode": "pipelined", "accept": "elastic", "threshold": 0.2},
}
PROMPT = "Write a Python function that checks whether a number is prime. Only the code."


@dataclass(frozen=True)
class Row:
    """One method's result."""

    name: str
    result: Result
    same_text: bool


@click.command()
@click.option("--prompt", default=PROMPT, show_default=True)
@click.option("--max-tokens", type=click.IntRange(8, 1024), default=96, show_default=True)
@click.option("--model", default=DEFAULT, show_default=True, help="The target model.")
@draft_options
@click.option("--rtt", type=float, default=40.0, show_default=True, help="Round trip in ms.")
@click.option("--up", type=float, default=10.0, show_default=True, help="Mbit/s to the cloud.")
@click.option("--down", type=float, default=50.0, show_default=True, help="Mbit/s to the edge.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def demo(
    prompt: str,
    max_tokens: int,
    model: str,
    draft: Draft,
    rtt: float,
    up: float,
    down: float,
    as_json: bool,
) -> None:
    """Watch an edge and a cloud write one text, and compare five ways to do it.

    A cloud on one core and an edge on another, with an emulated network in between; one prompt
    through the cloud alone, classic speculative decoding, Fuzzy SD, and the pipelined strict and
    elastic modes. Models are downloaded at the first run.
    """
    with friendly():
        link = LinkProfile(rtt_ms=rtt, up_mbps=up, down_mbps=down)
    console = Console(highlight=False, stderr=as_json)
    with ExitStack() as stack:
        _fetch(model)
        console.print(f"Starting the cloud ({model}) on a core of its own …", style="dim")
        with friendly():
            url = stack.enter_context(cloud_process(_cloud_command(model)))
        stack.enter_context(pinned(EDGE_CORE))
        engine = draft.load(context=4096, threads=1, gpu_layers=0)
        stack.callback(engine.close)
        with friendly():
            rows, times, draft_ms = asyncio.run(
                _compare(console, engine, url, link, prompt, max_tokens)
            )
    if as_json:
        click.echo(json.dumps({"methods": [_figures(row, rows[0]) for row in rows]}))
    else:
        console.print(_table(rows))
        console.print(_bound(rows, times, draft_ms, rtt))


def _fetch(model: str) -> None:
    """Download the target here, where the progress can be seen, before the cloud needs it."""
    if model.startswith("synthetic"):
        return
    from e2sci.engines import catalog

    with friendly(), download_bar(model) as progress:
        catalog.local_path(model, "target", progress=progress)


def _cloud_command(model: str) -> list[str]:
    return [
        *("-m", "e2sci", "cloud", "--listen", "127.0.0.1:0"),
        *("--model", model, "--threads", "1", "--slots", "1"),
    ]


async def _compare(
    console: Console, engine: Engine, url: str, profile: LinkProfile, prompt: str, max_tokens: int
) -> tuple[list[Row], PassTimes, float]:
    async with edge_over(url, engine, profile) as edge:
        for notice in await edge.connect():
            console.print(f"note: {notice}", style="yellow")
        draft_ms = await _draft_ms(edge, prompt)
        await edge.generate(prompt, mode="pipelined", max_tokens=8)  # warm caches at both ends
        rows: list[Row] = []
        for name, settings in METHODS.items():
            console.rule(name, align="left")
            result = await _watch(console, edge, prompt, {**settings, "max_tokens": max_tokens})
            same = not rows or result.token_ids == rows[0].result.token_ids
            if not result.token_ids:
                raise BadInput("the answer to this prompt is empty; give another with --prompt")
            rows.append(Row(name, result, same))
        return rows, edge.pass_times, draft_ms


async def _draft_ms(edge: Edge, prompt: str) -> float:
    endless = dict.fromkeys(edge.engine.info.eos_ids, -100.0)
    result = await edge.generate(prompt, mode="draft", max_tokens=24, logit_bias=endless)
    return 1000 / result.stats.decode_tokens_per_s


async def _watch(console: Console, edge: Edge, prompt: str, settings: dict[str, Any]) -> Result:
    options = options_from(Options(), settings)
    async for piece in edge.stream(prompt, **vars(options)):
        console.print(coloured(edge.engine, piece.commits), end="")
        if piece.result is not None:
            console.print()
            return piece.result
    raise BadInput("the stream ended without a result")


def _figures(row: Row, alone: Row) -> dict[str, Any]:
    stats, tokens = row.result.stats, max(1, len(row.result.token_ids))
    return {
        "method": row.name,
        "tokens_per_s": stats.tokens_per_s,
        "speedup": stats.tokens_per_s / alone.result.stats.tokens_per_s,
        "acceptance": stats.acceptance_rate,
        "passes_per_token": stats.cloud_passes / tokens,
        "uplink_bytes_per_token": stats.uplink_bytes / tokens,
        "ttft_s": stats.ttft_s,
        "same_text": row.same_text,
    }


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))  # fits 80 columns
    for name in ("", "tok/s", "vs cloud", "accepted", "passes/tok", "up B/tok", "target's text"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    best = max(row.result.stats.tokens_per_s for row in rows)
    for row in rows:
        figures = _figures(row, rows[0])
        accepted = figures["acceptance"]
        table.add_row(
            row.name,
            f"{figures['tokens_per_s']:.1f}",
            f"{figures['speedup']:.2f}x",
            "–" if accepted is None else f"{accepted:.1%}",
            f"{figures['passes_per_token']:.2f}",
            f"{figures['uplink_bytes_per_token']:.1f}",
            "[green]yes[/]" if row.same_text else "[yellow]no[/]",
            style="bold" if row.result.stats.tokens_per_s == best else "",
        )
    table.caption = "  ".join(f"[{STYLES[o]}]{LEGEND[o]}[/]" for o in list(Origin)[:4])
    return table


def _bound(rows: list[Row], times: PassTimes, draft_ms: float, rtt: float) -> str:
    """What holds the pipelined modes back here, in one line."""
    strict = next(row for row in rows if row.name == "pipelined strict").result.stats
    alpha = strict.acceptance_rate or 0.0
    alone, verify = times.ms(1), yardsticks.verify_ms(alpha, times.ms)
    bound = best_schedule(alpha, draft_ms, times.ms, rtt)
    slower = "drafting" if draft_ms > verify else "verifying"
    return (
        f"What bounds it here: a draft token takes {draft_ms:.0f} ms; the target takes "
        f"{alone:.0f} ms a token alone and at best {verify:.0f} ms verifying several at once, so "
        f"{slower} sets the pace. With {alpha:.1%} accepted and {rtt:.0f} ms RTT no schedule "
        f"exceeds {bound:.1f} tok/s behind the first token; strict reached "
        f"{strict.decode_tokens_per_s / bound:.0%} of it."
    )
