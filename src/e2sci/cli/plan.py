"""`e2sci plan`: which mode will be fastest on a profile, and whether speculation pays at all."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from e2sci.cli.common import BadInput, friendly
from e2sci.cli.measuring import profile_option
from e2sci.emulation.profile import profile
from e2sci.evaluation import plan as planning
from e2sci.evaluation.plan import Plan
from e2sci.evaluation.plots import check_picture, plot_plan
from e2sci.evaluation.traces import Trace

ACCEPTANCE = 0.9


@click.command()
@profile_option
@click.option(
    "--acceptance",
    type=click.FloatRange(0, 1),
    help=f"Share of draft tokens that is accepted.  [default: {ACCEPTANCE}]",
)
@click.option("--trace", type=Path, help="Take the acceptance from a trace.")
@click.option(
    "--threshold",
    type=click.FloatRange(0),
    help="With --trace: JS in nats that is tolerated.  [default: none, agreement only]",
)
@click.option(
    "--window",
    type=click.IntRange(1, planning.MOST_LOOKAHEAD),
    default=5,
    show_default=True,
    help="Of synchronous speculative decoding, beside its best one.",
)
@click.option("--rtt", type=float, help="Round-trip time in ms, in place of the profile's.")
@click.option("--draft-ms", type=float, help="ms a draft token, in place of the profile's.")
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write speed over round trip as a figure, .png or .svg; needs the bench extra.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    profile_spec: str,
    acceptance: float | None,
    trace: Path | None,
    threshold: float | None,
    window: int,
    rtt: float | None,
    draft_ms: float | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Say which mode will be fastest, what to set, and when not to use speculation.

    Computed, not run: speeds are what a mode reaches at best with one request at a time.

    \b
    e2sci plan --profile wan
    e2sci plan --profile my-setup.toml --trace gsm8k.jsonl --threshold 0.2 --plot plan.svg
    """
    with friendly():
        if picture:
            check_picture(picture)
        chosen = profile(profile_spec)
        alpha = _acceptance(acceptance, trace, threshold)
        made = planning.plan(chosen, alpha, window=window, rtt_ms=rtt, draft_ms=draft_ms)
        if picture:
            plot_plan(made, planning.over_rtt(made, chosen), picture)
    if as_json:
        click.echo(msgspec.json.encode(made).decode())
    else:
        _show(Console(highlight=False, soft_wrap=True), made)


def _acceptance(given: float | None, trace: Path | None, threshold: float | None) -> float:
    if trace is None:
        if threshold is not None:
            raise BadInput("--threshold is applied to a trace; add --trace, or use --acceptance")
        return ACCEPTANCE if given is None else given
    if given is not None:
        raise BadInput("give either --acceptance or --trace")
    return Trace.load(trace).acceptance(threshold)


def _show(console: Console, made: Plan) -> None:
    console.print(
        f"[bold]{made.profile}[/]: draft {made.draft_ms:g} ms a token, pass {made.cloud_ms:g} ms, "
        f"RTT {made.rtt_ms:g} ms, acceptance {made.acceptance:.3g}"
    )
    table = Table("mode", "tok/s", "× cloud", "cloud passes a token", box=None)
    passes = msgspec.structs.asdict(made.passes_per_token)
    for mode, speed in msgspec.structs.asdict(made.speeds).items():
        count = f"{passes[mode]:.2f}" if mode in passes else ""
        table.add_row(_label(mode, made), f"{speed:.1f}", f"{speed / made.speeds.cloud:.2f}", count)
    console.print(table)
    even = made.break_even
    bounds = (
        _bound("RTT below", even.rtt_ms, " ms", planning.MOST_MS),
        _bound("draft token below", even.draft_ms, " ms", planning.MOST_MS),
        _bound("acceptance above", even.acceptance, "", None),
    )
    console.print(f"Faster than the cloud alone, each by itself: {'; '.join(bounds)}")
    if made.advice.window is not None:
        console.print(
            f"Recommended: --window {made.advice.window} --lookahead {made.advice.lookahead}"
        )
    console.print(f"[bold]→ {made.advice.verdict}[/]")


def _label(mode: str, made: Plan) -> str:
    return {
        "cloud": "cloud alone",
        "sync": f"sync SD, W = {made.window}",
        "sync_best": f"sync SD, best W = {made.best_window}",
        "pipelined": "pipelined",
        "pipelined_fill": "pipelined with fill, at best",
        "colocated": f"SD with the draft in the cloud, W = {made.colocated_window}",
    }[mode]


def _bound(words: str, value: float | None, unit: str, most: float | None) -> str:
    if value is None:
        return f"no {words.rpartition(' ')[0]}"
    if value == most:
        return f"any {words.rpartition(' ')[0]}"
    return f"{words} {value:g}{unit}"
