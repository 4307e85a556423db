"""`e2sci calibrate`: thresholds that keep the accuracy, and a predictor that earns its place."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from e2sci.cli.common import friendly
from e2sci.cli.measuring import (
    abreast_option,
    bar,
    command_line,
    identities,
    jobs_option,
    max_tokens_option,
    models,
    pair_option,
    profile_option,
    rows_of,
    rows_option,
)
from e2sci.emulation.profile import profile
from e2sci.evaluation import calibrate as calibrating
from e2sci.evaluation.calibration import Calibration, Measured
from e2sci.evaluation.figures import bench_module
from e2sci.evaluation.order import GRIDS, RULES, Asked, Order
from e2sci.evaluation.pair import PairSpec
from e2sci.evaluation.tasks import task


@click.command()
@click.option(
    "--task",
    "specs",
    required=True,
    multiple=True,
    metavar="NAME[:FILE]",
    help="What is asked; may be repeated. It must be scored.",
)
@rows_option
@profile_option
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False))
@pair_option
@click.option(
    "--rules",
    default=",".join(RULES),
    show_default=True,
    metavar="RULE,...",
    help=f"Among {', '.join(GRIDS)}.",
)
@click.option(
    "--delta",
    type=click.FloatRange(0, 100),
    default=1.0,
    show_default=True,
    help="Points of accuracy that a safe threshold may lose.",
)
@max_tokens_option
@jobs_option
@abreast_option
@click.option("--json", "as_json", is_flag=True, help="Print the calibration as JSON.")
def calibrate(
    specs: tuple[str, ...],
    span: str,
    profile_spec: str,
    out: Path,
    pair: str,
    rules: str,
    delta: float,
    max_tokens: int,
    jobs: int,
    abreast: int,
    as_json: bool,
) -> None:
    """Calibrate a pair of models: how much may be tolerated before answers get worse, and when.

    Runs the cloud alone and every rule at every threshold of a grid on rows A to B, which takes a
    while; report results on other rows. The work is kept in a folder beside FILE, so that an
    interrupted calibration goes on where it stopped. Needs the bench extra.

    \b
    e2sci calibrate --task gsm8k --rows 1000:1100 --profile paper --out gsm8k.json
    e2sci calibrate --task humaneval --rows 0:64 --profile wan --rules elastic --out code.json
    """
    with friendly():
        bench_module("scipy.stats")
        bench_module("sklearn")
        rows = rows_of(span)
        asked = [_asked(each, rows) for each in specs]
        chosen = profile(profile_spec)
        draft, target = models(pair)
        draft_id, target_id = identities(draft, target)
        order = Order(
            pair=PairSpec(draft, target, abreast=abreast),
            draft=draft_id,
            target=target_id,
            asked=asked,
            first=rows[0],
            last=rows[1] - 1,
            profile=chosen,
            folder=out.with_name(f"{out.stem}-work"),
            rules=list(dict.fromkeys(rules.split(","))),
            delta=delta / 100,
            max_tokens=max_tokens,
            jobs=jobs,
            command=command_line(),
        )
        found = calibrating.calibrate(order, bar)
        found.save(out)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        _show(Console(highlight=False), found, out)


def _asked(spec: str, rows: tuple[int, int]) -> Asked:
    chosen, file = task(spec)
    return Asked(chosen, file.name if file else None, chosen.load(file, rows))


def _show(console: Console, found: Calibration, out: Path) -> None:
    console.print(
        f"[bold]{', '.join(found.tasks)}[/], rows {found.first} to {found.last}, profile "
        f"{found.profile}: τ = {found.tau:g}"
    )
    table = Table(box=None)
    for name in ("rule", "T", "accuracy", "− cloud, points", "× cloud", "tokens", ""):
        table.add_column(name, no_wrap=True)
    for rule, rows in found.measured.items():
        for row in rows:
            table.add_row(*_cells(rule, row, found.thresholds[rule]))
    console.print(table)
    for rule, threshold in found.thresholds.items():
        if not threshold:
            console.print(f"[yellow]{rule}: no threshold is safe; it tolerates nothing[/]")
    console.print(found.check.verdict, soft_wrap=True)
    console.print(f"Written to {out}", soft_wrap=True)


def _cells(rule: str, row: Measured, chosen: float) -> list[str]:
    mark = "chosen" if row.threshold == chosen else "safe" if row.keeps else "loses"
    return [
        rule,
        f"{row.threshold:g}",
        "" if row.accuracy is None else f"{row.accuracy:.1%}",
        _points(row),
        f"{row.speedup:.2f}",
        f"{row.mean_tokens:.0f}",
        mark,
    ]


def _points(row: Measured) -> str:
    if row.difference is None or row.low is None or row.high is None:
        return ""
    return f"{100 * row.difference:+.1f} \\[{100 * row.low:+.1f}, {100 * row.high:+.1f}]"
