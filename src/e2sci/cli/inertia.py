"""`e2sci inertia`: does acceptance in one window say something about the next?"""

from __future__ import annotations

import math
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from e2sci.cli.common import friendly
from e2sci.evaluation.inertia import Bands, Inertia, analyse
from e2sci.evaluation.plots import check_picture, plot_inertia
from e2sci.evaluation.traces import Trace
from e2sci.evaluation.windows import parse_signal


@click.command()
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=Path)
@click.option("--window", type=click.IntRange(1), default=5, show_default=True, help="Positions.")
@click.option(
    "--signal",
    default="agree",
    show_default=True,
    help="What is accepted: agree (same pick), accept:T (or JS ≤ T nats), tv (1 − TV).",
)
@click.option(
    "--permutations",
    type=click.IntRange(20, 100_000),
    default=1000,
    show_default=True,
    help="Shuffles that make the null.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a figure: .png or .svg.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list, one object a trace.")
def inertia(
    traces: tuple[Path, ...],
    window: int,
    signal: str,
    permutations: int,
    seed: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Ask of each TRACE whether acceptance has inertia: whether a window says something about the
    next one of the same request, beyond how requests differ.

    Needs the bench extra. Traces are written by `e2sci trace`.

    \b
    e2sci inertia gsm8k.jsonl humaneval.jsonl --plot inertia.svg
    e2sci inertia gsm8k.jsonl --signal accept:0.2 --window 8
    """
    with friendly():
        parse_signal(signal)
        if picture:
            check_picture(picture)
        loaded = [(Trace.load(path), path.stem) for path in traces]
        options = {"window": window, "permutations": permutations, "seed": seed}
        results = [analyse(trace, name, signal=signal, **options) for trace, name in loaded]
        if picture:
            plot_inertia(results, picture)
    if as_json:
        click.echo(msgspec.json.encode(results).decode())
        return
    for result in results:
        _show(Console(highlight=False, soft_wrap=True), result)


def _show(console: Console, result: Inertia) -> None:
    console.print(
        f"[bold]{result.name}[/]: {result.signal}, {result.windows} windows of {result.window} in "
        f"{result.requests} requests ({result.left_out} too short), mean {result.mean:.3f}"
    )
    console.print(_lags(result))
    between = result.between
    noiseless = "" if between.icc_noiseless is None else f", {_n(between.icc_noiseless)} noise-free"
    console.print(
        f"Between requests: {_n(between.share)} of the variance; intraclass correlation "
        f"{_n(between.icc)}{noiseless} (p = {between.p:.2g})"
    )
    for cut, bands in result.bands.items():
        console.print(_bands(cut, bands))
    console.print(
        "R² of the next window: "
        + ", ".join(f"{name} {_n(value)}" for name, value in result.r2.items())
    )
    console.print(f"[bold]→ {result.verdict}[/]\n")


def _lags(result: Inertia) -> Table:
    table = Table("lag", "correlation", "shuffled", "difference", "p", box=None)
    for lag in result.lags:
        null = f"{_n(lag.null)} ± {_n(lag.null_sd)}"
        table.add_row(str(lag.lag), _n(lag.observed), null, _n(lag.excess), f"{lag.p:.3f}")
    return table


def _bands(cut: str, bands: Bands) -> Table:
    table = Table(f"credit ({cut})", "windows", "acceptance", "95 %", "shuffled", box=None)
    for band in bands.bands:
        name = f"{band.name} {band.low:.2f}–{band.high:.2f}"
        null = f"{_n(band.null)} ± {_n(band.null_sd)}"
        interval = "–".join(_n(end) for end in band.interval)
        table.add_row(name, str(band.windows), _n(band.mean), interval, null)
    null = f"{_n(bands.gap_null)} ± {_n(bands.gap_null_sd)} (p = {bands.p:.3f})"
    interval = "–".join(_n(end) for end in bands.gap_interval)
    table.add_row("high − low", "", _n(bands.gap), interval, null)
    return table


def _n(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
