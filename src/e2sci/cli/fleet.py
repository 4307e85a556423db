"""`e2sci fleet`: what many users of few engines get, and how many an engine can serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from e2sci.cli.common import BadInput, friendly, stderr
from e2sci.cli.measuring import jobs_option, profile_option
from e2sci.emulation.profile import profile
from e2sci.evaluation.crowd import Load
from e2sci.evaluation.fleet import Capacity, Figures, plot_capacity
from e2sci.evaluation.fleet import capacity as find_capacity
from e2sci.evaluation.fleet import fleet as run_fleet
from e2sci.evaluation.methods import expanded
from e2sci.evaluation.plots import check_picture
from e2sci.evaluation.traces import Trace

METHODS = ("cloud", "colocated", "strict", "elastic")
TARGET, EDGES = 10.0, 100
FEW = 100  # requests


@click.command()
@click.option("--trace", "path", type=Path, required=True, help="What the models say.")
@profile_option
@click.option("--edges", type=click.IntRange(1, 1 << 16), help="Users in all.  [default: 100]")
@click.option("--engines", type=click.IntRange(1, 1 << 12), help="Cloud engines.  [default: 1]")
@click.option(
    "--method",
    "names",
    multiple=True,
    metavar="NAME[@T]",
    help=f"As in e2sci bench, but draft; may be repeated.  [default: {', '.join(METHODS)}]",
)
@click.option(
    "--think",
    type=click.FloatRange(0),
    help="Mean seconds between a user's requests.  [default: 0, always busy]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    help="Virtual time that is measured, behind a warm-up.",
)
@click.option(
    "--capacity",
    "searching",
    is_flag=True,
    help="Find how many busy users one engine can serve at --target.",
)
@click.option(
    "--target",
    type=click.FloatRange(0, min_open=True),
    help="With --capacity: tokens/s that 95 % of requests get at least.  [default: 10]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of who asks what, and when.")
@jobs_option
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --capacity: speed over users, .png or .svg; needs the bench extra.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fleet(
    path: Path,
    profile_spec: str,
    edges: int | None,
    engines: int | None,
    names: tuple[str, ...],
    think: float | None,
    seconds: float,
    searching: bool,
    target: float | None,
    seed: int,
    jobs: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Let many users share few cloud engines, and tell what each of them gets.

    Everything runs as it does for real users, on a virtual clock, with models that replay a trace:
    times are those of the profile, and nothing is said about texts. Thresholds are yours (@T), or
    the paper's.

    \b
    e2sci fleet --trace gsm8k.jsonl --profile paper --edges 200 --engines 4 --think 5
    e2sci fleet --trace gsm8k.jsonl --profile wan --capacity --target 10 --plot capacity.svg
    """
    if searching and not (edges is engines is think is None):
        raise BadInput(
            "--capacity tries busy users on one engine: drop --edges, --engines, --think"
        )
    if not searching and (picture or target is not None):
        raise BadInput("--target and --plot go with --capacity; add it")
    with friendly():
        if picture:
            check_picture(picture)
        load = Load(Trace.load(path), profile(profile_spec), seconds, think or 0.0, seed)
        methods = expanded(names or METHODS)
        found: list[Capacity] | list[Figures]
        if searching:
            found = _search(load, methods, target or TARGET, jobs, picture)
        else:
            found = _run(load, methods, edges or EDGES, engines or 1, jobs)
    if as_json:
        click.echo(msgspec.json.encode({**_described(load), "methods": found}).decode())
    else:
        _show(load, found)


def _run(load: Load, methods: list[str], edges: int, engines: int, jobs: int) -> list[Figures]:
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("engines", total=engines * len(methods))
        return run_fleet(
            load,
            methods,
            users=edges,
            engines=engines,
            jobs=jobs,
            advance=lambda: progress.advance(task),
        )


def _search(
    load: Load, methods: list[str], target: float, jobs: int, picture: Path | None
) -> list[Capacity]:
    with stderr.status("") as status:

        def tell(point: Figures) -> None:
            speed = f"{point.users} users get {point.speed_95:.1f} tok/s"
            status.update(f"{point.method}: {speed}")

        found = find_capacity(load, methods, target=target, jobs=jobs, advance=tell)
    if picture:
        plot_capacity(found, picture)
    return found


def _described(load: Load) -> dict[str, Any]:
    header = load.trace.header
    return {
        "draft": header.draft,
        "target": header.target,
        "task": header.task,
        "profile": load.profile.name,
        "seconds": load.seconds,
        "think_s": load.think_s,
        "seed": load.seed,
    }


def _show(load: Load, found: list[Capacity] | list[Figures]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    header, device = load.trace.header, load.profile
    console.print(f"[bold]{device.name}[/]: {header.task} by {header.draft} and {header.target}")
    titles = ("users", "requests", "tok/s", "TTFT s", "engine", "busy", "pass")
    table = Table("method", *(Column(title, justify="right") for title in titles), box=None)
    points = [(one.method, one.point if isinstance(one, Capacity) else one) for one in found]
    for name, point in points:
        table.add_row(name, *(_cells(point) if point else ["0"]))
    console.print(table)
    if isinstance(found[0], Capacity):
        target = f"{found[0].target:g} tok/s"
        console.print(f"users: the most of one engine with {target} or more in 95 % of requests")
    console.print("tok/s of a request: median/95 %/99 % get at least; TTFT: p50/p95/p99")
    console.print("engine: tok/s of all its users; pass: tokens that reach users by one")
    if any(point and point.requests < FEW for _, point in points):
        console.print(f"below {FEW} requests 95 and 99 % say little; raise --seconds")


def _cells(point: Figures) -> list[str]:
    speeds = point.speed_p50, point.speed_95, point.speed_99
    return [
        str(point.users),
        str(point.requests),
        "/".join(f"{speed:.1f}" for speed in speeds),
        "/".join(f"{t:.2f}" for t in (point.ttft_p50, point.ttft_p95, point.ttft_p99)),
        f"{point.engine_tokens_per_s:.0f}",
        f"{point.busy:.0%}",
        f"{point.tokens_per_pass:.1f}",
    ]
