"""`e2sci bench`: methods side by side, on the virtual clock or on this machine's own."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from e2sci.cli.common import BadInput, friendly, load
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
)
from e2sci.emulation.local import EDGE_CORE, pinned
from e2sci.emulation.profile import Profile, measured, profile
from e2sci.evaluation import report, wall
from e2sci.evaluation.bench import Plan, todo
from e2sci.evaluation.bench import bench as run_bench
from e2sci.evaluation.calibration import Calibration, shipped
from e2sci.evaluation.figures import bench_module
from e2sci.evaluation.methods import NAMES, Setting, expanded, method
from e2sci.evaluation.pair import PairSpec
from e2sci.evaluation.records import Header, Results
from e2sci.evaluation.tasks import Problem, task

METHODS = "cloud,sd,fsd,strict,elastic"


@click.command()
@click.option("--task", "spec", metavar="NAME[:FILE]", help="What is asked.")
@click.option("--rows", "span", metavar="A:B", help="Rows A up to, without, B; from 0.")
@click.option(
    "--methods",
    default=METHODS,
    show_default=True,
    metavar="LIST",
    help="Separated by commas; `all` for every one. See below.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False))
@profile_option
@click.option("--measure", is_flag=True, help="Measure this machine's engines for the profile.")
@click.option(
    "--wall",
    "on_wall",
    type=click.IntRange(1, 20),
    is_flag=False,
    flag_value=3,
    metavar="[N]",
    help="On this machine's own clock, N times (3).",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Thresholds and predictor of this pair.  [default: the shipped one, if any]",
)
@pair_option
@max_tokens_option
@jobs_option
@abreast_option
@click.option("--show", is_flag=True, help="Run nothing: show what is in --out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    spec: str | None,
    span: str | None,
    methods: str,
    out: Path,
    profile_spec: str,
    measure: bool,
    on_wall: int | None,
    calibration: Path | None,
    pair: str,
    max_tokens: int,
    jobs: int,
    abreast: int,
    show: bool,
    as_json: bool,
) -> None:
    """Measure methods side by side, with real models on emulated devices and an emulated link.

    The edge and the cloud that serve users run on a virtual clock, so figures are exact and a busy
    machine does no harm. Every answer is kept in --out: an interrupted bench goes on where it
    stopped, and methods or rows can be added. What a model said once is remembered, so a further
    method costs little. Needs the bench extra.

    \b
    e2sci bench --task gsm8k --rows 32:64 --out results/gsm8k
    e2sci bench --task humaneval --rows 32:62 --methods strict,elastic@0.1 --out results/code
    e2sci bench --out results/gsm8k --show

    Methods: cloud, draft, colocated, sd, sd-wN, sd-best, fsd, fsd-released, pearl, amusd, strict,
    elastic, elastic-regret, and variants that leave one thing out: strict-no-fill, elastic-no-plc
    and so on. `elastic@0.1` sets the threshold, in nats.

    --measure takes the times of this machine's engines in place of the profile's, and keeps them as
    profile.toml in --out. --wall runs on this machine's own clock, N times, one core each for
    edge and cloud and the profile's link between, and shows how far the virtual clock predicts it.
    """
    console = Console(highlight=False)
    with friendly():
        bench_module("scipy.stats")
        if show:
            _show(console, [Results.load(out)], as_json)
            return
        if spec is None or span is None:
            raise BadInput("what is to be asked? give --task and --rows, or --show")
        names = expanded(NAMES if methods == "all" else methods.split(","))
        chosen, file = task(spec)
        problems = chosen.load(file, rows_of(span))
        draft, target = models(pair)
        which = PairSpec(draft, target, abreast=abreast)
        ids = identities(draft, target)
        devices = profile(profile_spec)
        if measure or on_wall:
            devices = _measured(out, which, devices)
        setting = _setting(calibration, ids, devices)
        for name in names:
            method(name, setting)
        header = Header(
            profile=devices.to_dict(),
            task=chosen.name,
            file=file.name if file else None,
            first=problems[0].row,
            last=problems[-1].row,
            draft=ids[0],
            target=ids[1],
            max_tokens=max_tokens,
            abreast=abreast,
            clock="virtual",
            command=command_line(),
            setting=setting.described(),
        )
        order = _Order(Plan(which, chosen, setting, names, max_tokens), header, problems, jobs)
        if on_wall:
            _wall(console, order, out, on_wall, as_json)
        else:
            _show(console, [_run(order, out)], as_json)


@dataclass(frozen=True)
class _Order:
    plan: Plan
    header: Header
    problems: list[Problem]
    jobs: int


def _run(order: _Order, out: Path) -> Results:
    """What is missing in `out`, with a bar."""
    results = Results.create_or_resume(out, order.header)
    left = todo(results, order.problems, order.plan.methods)
    with closing(run_bench(order.plan, results, order.problems, jobs=order.jobs)) as answers:
        for _ in bar(answers, left, f"bench {order.header.task}"):
            pass
    return results


def _setting(path: Path | None, ids: tuple[str, str], devices: Profile) -> Setting:
    """Thresholds and predictor from a calibration of this pair. Raises ValueError."""
    found = Calibration.load(path) if path else shipped(*ids)
    if found is None:
        return Setting(devices)
    found.require_pair(*ids)
    return found.setting(devices)


def _measured(out: Path, pair: PairSpec, devices: Profile) -> Profile:
    """This machine's engines, one core each, over the profile's link; kept for the next run."""
    path = out / "profile.toml"
    if path.exists():
        return profile(str(path))
    with pinned(EDGE_CORE):
        draft = load(pair.draft, "draft", context=pair.context, threads=1, gpu_layers=0)
        target = load(pair.target, "target", context=pair.context, threads=1, gpu_layers=0)
        found = measured(f"measured-{devices.name}", draft, target, devices.link)
        draft.close()
        target.close()
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(found.to_toml(), encoding="utf-8")
    return profile(str(path))


def _show(console: Console, found: list[Results], as_json: bool) -> None:
    for results in found:
        if as_json:
            click.echo(json.dumps(report.to_json(results)))
        else:
            console.print(report.table(results))


def _wall(console: Console, order: _Order, out: Path, times: int, as_json: bool) -> None:
    """N runs on the wall clock, one on the virtual one, and how they compare."""
    virtual = _run(order, out / "virtual")
    runs = []
    for n in range(1, times + 1):
        header = wall.header(order.header)
        results = Results.create_or_resume(out / f"wall-{n}", header)
        left = todo(results, order.problems, order.plan.methods)
        with closing(wall.bench(order.plan, results, order.problems)) as answers:
            for _ in bar(answers, left, f"wall clock, run {n} of {times}"):
                pass
        runs.append(results)
    rows = wall.compare(virtual, runs)
    if as_json:
        click.echo(json.dumps({"task": order.header.task, "methods": rows}))
    else:
        console.print(report.rich_table(rows, wall.COLUMNS, title="wall clock and virtual clock"))
