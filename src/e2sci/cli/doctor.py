"""`e2sci doctor`: check a draft model, a cloud and their link, and say what to expect."""

from __future__ import annotations

import asyncio
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from e2sci.cli.common import BadInput, friendly, model_options
from e2sci.cli.draft import Draft, draft_options
from e2sci.cli.reach import dials, reach_options
from e2sci.cli.target import draft_addresses, drafts_option, engine_key
from e2sci.engines.base import Engine
from e2sci.runtime.choice import Measured, choose, why_not
from e2sci.runtime.edge import Edge
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.transport import Dial

if TYPE_CHECKING:
    from e2sci.runtime.gateway import Examined  # else only where it is used: an extra

PROBE = "Count from one to twenty in words."


@dataclass(frozen=True)
class Report:
    """What was measured, and what follows, by the choice of mode auto. Times in milliseconds,
    speeds in tokens/s; `synchronous` and `pipelined` at their best settings."""

    draft: str
    cloud: str
    notices: list[str]
    draft_ms: float
    rtt_ms: float
    pass_ms: dict[int, float]
    acceptance: float
    cloud_alone: float
    synchronous: float
    pipelined: float
    verdict: str


@click.command()
@reach_options
@draft_options
@click.option(
    "--vllm",
    metavar="URL",
    help="Examine this vLLM server instead, http://HOST:PORT: its version, and whether it accepts "
    "drafts. On its own machine.",
)
@drafts_option
@click.option(
    "--engine-key-env",
    "key_variable",
    metavar="NAME",
    help="With --vllm: the environment variable with the key that it wants.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@model_options(4096)
def doctor(
    cloud: tuple[str, ...],
    key_file: Path | None,
    ca: Path | None,
    allow_insecure: bool,
    draft: Draft,
    vllm: str | None,
    drafts: tuple[str, ...],
    key_variable: str | None,
    as_json: bool,
    context: int,
    threads: int | None,
    gpu_layers: int,
) -> None:
    """Check a draft model, a cloud and the link between them; say whether speculation pays.

    Loads the draft, connects, compares vocabularies and templates, measures draft time, round trip
    and acceptance on a short text, and sets what to expect beside the cloud alone.

    \b
    e2sci doctor --cloud ws://cloud.example:7071
    e2sci doctor --vllm http://127.0.0.1:8000    # where --engine vllm-native is to be used
    """
    if vllm is not None:
        _show_server(_server(vllm, drafts, engine_key(key_variable)), as_json)
        return
    if drafts or key_variable:
        raise BadInput("--drafts and --engine-key-env go with --vllm")
    reached = dials(cloud, key_file, ca, allow_insecure)
    engine = draft.load(context=context, threads=threads, gpu_layers=gpu_layers)
    try:
        with friendly():
            report = asyncio.run(_examine(reached, engine))
    finally:
        engine.close()
    if as_json:
        click.echo(json.dumps(asdict(report)))
    else:
        _show(report)


def _server(url: str, drafts: tuple[str, ...], key: str | None) -> Examined:
    """What a vLLM server does with drafts. Raises BadInput."""
    with friendly(), draft_addresses(drafts) as chosen:
        from e2sci.runtime.gateway import examined  # only here: an extra

        return asyncio.run(examined(url, chosen, key))


def _show_server(found: Examined, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(found) | {"trouble": found.trouble}))
        return
    console = Console(highlight=False)
    mark = "[green]✓[/]" if found.tried else "[yellow]![/]"
    console.print(f"{mark} {found.url} runs vLLM {found.version}")
    steps = ", ".join(f"{n}: {ms:.1f}" for n, ms in found.times.points)
    console.print(f"[green]✓[/] ms of a step by tokens — {steps}")
    if found.accepted:
        console.print(
            f"[green]✓[/] it accepts drafts: {found.accepted} of {found.drafted} tokens took no "
            "step of their own"
        )
    if found.trouble:
        console.print(f"[bold]→ {found.trouble}[/]")


async def _examine(clouds: list[Dial], engine: Engine) -> Report:
    async with Edge(clouds, engine) as edge:
        notices = await edge.connect()
        rtts = [await edge.ping() for _ in range(7)]
        endless = dict.fromkeys(engine.info.eos_ids, -100.0)
        drafted = await edge.generate(PROBE, mode="draft", max_tokens=24, logit_bias=endless)
        draft_ms = 1000 / drafted.stats.decode_tokens_per_s
        probe = await edge.generate(PROBE, mode="pipelined", fill=False, max_tokens=48)
        return _judge(
            engine.info.name,
            edge.cloud_model,
            notices,
            draft_ms,
            1000 * statistics.median(rtts),
            edge.pass_times,
            probe.stats.acceptance_rate or 0.0,
        )


def _judge(
    draft: str,
    cloud: str,
    notices: list[str],
    draft_ms: float,
    rtt: float,
    times: PassTimes,
    alpha: float,
) -> Report:
    measured = Measured(draft_ms, rtt, alpha, times)
    choice = choose(measured)
    sync = choose(measured, mode="sync").draft.tokens_per_s
    both = choose(measured, mode="pipelined").draft.tokens_per_s
    if choice.pays:
        gain = choice.cloud.ms / choice.draft.ms
        verdict = f"use --mode {choice.draft.way.mode}: about {gain:.1f}x the cloud alone"
    else:
        reason = why_not(measured)
        verdict = f"use --mode cloud: speculation does not pay here, {reason}"
    return Report(
        draft,
        cloud,
        notices,
        draft_ms,
        rtt,
        dict(times.points),
        alpha,
        choice.cloud.tokens_per_s,
        sync,
        both,
        verdict,
    )


def _show(report: Report) -> None:
    console = Console(highlight=False)
    ok = "[green]✓[/]"
    console.print(f"{ok} draft {report.draft}: {report.draft_ms:.1f} ms a token")
    passes = ", ".join(f"{n}: {ms:.0f}" for n, ms in report.pass_ms.items())
    console.print(f"{ok} cloud {report.cloud}: pass times in ms by tokens — {passes}")
    console.print(f"{ok} vocabularies fit; round trip {report.rtt_ms:.1f} ms")
    for notice in report.notices:
        console.print(f"[yellow]![/] {notice}")
    console.print(f"{ok} {report.acceptance:.1%} of draft tokens accepted on a short text (strict)")
    console.print(
        f"  expected: cloud alone {report.cloud_alone:.1f} tok/s, sync SD "
        f"{report.synchronous:.1f}, pipelined {report.pipelined:.1f}"
    )
    console.print(f"[bold]→ {report.verdict}[/]")
