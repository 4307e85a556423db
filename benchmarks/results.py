"""Makes docs/results.md and its figures from the result files that are committed beside it.

    python benchmarks/results.py                      # make the page anew
    python benchmarks/results.py --take DIR NAME      # first copy a bench's records (no texts)

    docs/results/bench/<task>-<profile>[-<part>]/     records of `e2sci bench`, report rows
    docs/results/calibration/<task>-<profile>/        the same on the calibration rows
    docs/results/wall/                                `e2sci bench --wall`: virtual, wall-1, …
    docs/results/inertia.json, fleet.json             `e2sci inertia --json`, `e2sci fleet --json`
    docs/results/tau.json, matched.json               what benches took as --calibration: τ of the
                                                      traces of `e2sci calibrate`, and with it what
                                                      `follow.used` finds on them at T = .2
    docs/results/discussion.md                        what it means, in words

Every number on the page comes from these files; nothing is run. Pages that quote it are brought up
to date with it (`quotes`).
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from e2sci.emulation.profile import Profile, from_dict
from e2sci.evaluation import report
from e2sci.evaluation.figures import (
    accuracy_difference,
    bound_share,
    frontier,
    safe,
    speedup,
    summary,
)
from e2sci.evaluation.methods import VARIANTS
from e2sci.evaluation.order import key
from e2sci.evaluation.records import Record, Results
from e2sci.evaluation.report import Column, both, interval, number
from quotes import refilled
from sections import fleet_section, inertia_section, wall_section

HERE = Path(__file__).parent.parent / "docs"
DATA = HERE / "results"
RULES = ("fsd", "fsd-released", "elastic", "elastic-regret")
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--take", nargs=2, metavar=("DIR", "NAME"), action="append", default=[])
    args = parser.parse_args()
    for source, name in args.take:
        take(Path(source), DATA / name)
    results = "\n".join(page())
    try:
        made = {path: refilled(path.read_text(encoding="utf-8"), results) for path in quoting()}
    except ValueError as error:
        parser.error(str(error))
    for path, text in {**made, HERE / "results.md": results}.items():
        path.write_text(text, encoding="utf-8")


def quoting() -> list[Path]:
    """The pages that may quote the results: the README, and all of docs/ but the results."""
    return [HERE.parent / "README.md", *sorted({*HERE.glob("*.md")} - {HERE / "results.md"})]


def take(source: Path, place: Path) -> None:
    """Copy the header and the records of a bench, without the texts."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.name == "bench.json" or (
            path.suffix == ".jsonl" and not path.stem.endswith(".texts")
        ):
            shutil.copy(path, place / path.name)


def page() -> Iterator[str]:
    """The lines of docs/results.md."""
    yield "# Results\n"
    yield (DATA / "discussion.md").read_text(encoding="utf-8")
    yield from accuracy_section()
    for place in sorted((DATA / "bench").iterdir()):
        yield from bench_section(place.name, Results.load(place))
    yield from inertia_section(DATA)
    yield from wall_section(DATA)
    yield from fleet_section(DATA)
    yield "\nMade by `python benchmarks/results.py` from the files in `docs/results`.\n"


# ---- all tasks ----------------------------------------------------------------------------


def accuracy_section() -> Iterator[str]:
    """What tolerating costs on the tasks together, each problem counting once."""
    benches = [Results.load(place) for place in sorted((DATA / "bench").glob("*-paper"))]
    rows = []
    for method, reference in contrasts(benches):
        found = [b for b in benches if {method, reference} <= {*b.methods()}]
        own, other = pooled(found, method), pooled(found, reference)
        rows.append(
            {
                "label": f"{method} against {reference}",
                "tasks": ", ".join(bench.header.task for bench in found),
                **accuracy_difference(own, other),
            }
        )
    yield "\n## Accuracy, all tasks\n"
    columns = (
        report.METHOD,
        Column("tasks", lambda row: row["tasks"]),
        Column("requests", number("paired", 0)),
        Column("Δ points", interval("accuracy_diff", 1, 100, "+")),
        Column("lost / gained", both("lost", "gained", 0)),
    )
    yield report.markdown_table(rows, columns)


def contrasts(benches: Sequence[Results]) -> Iterator[tuple[str, str]]:
    """Each rule at each T against the cloud alone, then elastic against FSD at the same T."""
    found = {rule: sorted({t for b in benches for t in by_threshold(b, rule)}) for rule in RULES}
    for rule, thresholds in found.items():
        yield from ((f"{rule}@{t:g}", "cloud") for t in thresholds)
    for t in found["elastic"]:
        if t in found["fsd"]:
            yield f"elastic@{t:g}", f"fsd@{t:g}"


def pooled(benches: Sequence[Results], method: str) -> list[Record]:
    """A method's records of all benches."""
    return [
        msgspec.structs.replace(record, row=key(n, record.row))
        for n, bench in enumerate(benches)
        for record in bench.records(method)
    ]


# ---- one bench ----------------------------------------------------------------------------


def bench_section(name: str, results: Results) -> Iterator[str]:
    header, methods = results.header, results.methods()
    profile = from_dict(header.profile)
    part = name.removeprefix(f"{header.task}-{profile.name}").replace("-", " ").strip()
    yield f"\n## {header.task}, profile `{profile.name}`{f', {part}' if part else ''}\n"
    done, asked = len(results.records("cloud")), header.last - header.first + 1
    some = "" if done == asked else f" ({done} of {asked} so far)"
    yield f"Rows {header.first} to {header.last}{some}, at most {header.max_tokens} tokens, greedy;"
    yield f"`{header.target}` verifies `{header.draft}`.\n"
    yield f"```\n{header.command}\n```\n"
    main = [m for m in methods if _variant(m) is None and _in_the_table(m)]
    rows = with_bound(report.compare(results, methods=_shown(results, main)), results, profile)
    yield report.markdown_table(rows, (*report.SPEED, BOUND))
    yield report.markdown_table(rows, report.INTERVALS)
    yield report.markdown_table(rows, report.COST)
    report.speed_bars(rows, DATA / f"{name}-speed.svg", f"{header.task}, {profile.name}")
    yield f"![Speed of each method](results/{name}-speed.svg)\n"
    yield from frontier_section(name, results)
    yield from equal_section(results)
    yield from ablation_section(name, results)


def _variant(method: str) -> str | None:
    """What is different about a variant of elastic; None for other methods."""
    base = method.partition("@")[0]
    return next((v for v in VARIANTS if base == f"elastic-{v}"), None)


def _in_the_table(method: str) -> bool:
    """Methods without a threshold, of the others those at the paper's; and the regret, which the
    paper has not, at the one that every task has, with doubt at the loosest."""
    at = (
        *("fsd@0.2", "fsd-released@0.2", "elastic@0.2", "elastic-regret@0.3"),
        *("elastic-doubt@0.2", "elastic-regret-doubt@0.7"),
    )
    return "@" not in method or method in at


def _shown(results: Results, main: Sequence[str]) -> list[str]:
    """As the terminal's table has them, without windows of SD that are not the best."""
    return [row["method"] for row in report.compare(results) if row["method"] in main]


def with_bound(rows: Rows, results: Results, profile: Profile) -> Rows:
    """Rows with the share of the pipeline bound that each reached at its own acceptance."""
    for row in rows:
        records = results.records(row["method"])
        share = bound_share(records, profile.draft.ms(1), profile.target.ms, profile.link.rtt_ms)
        row["bound"] = share if row["method"] != "colocated" else None
    return rows


BOUND = Column("% of bound", number("bound", 0, 100))


# ---- thresholds ---------------------------------------------------------------------------


def by_threshold(results: Results, rule: str) -> dict[float, str]:
    """Methods `rule@T` by T."""
    found = (m.partition("@") for m in results.methods())
    return {float(t): f"{base}@{t}" for base, _, t in found if base == rule and t}


def frontier_section(name: str, results: Results) -> Iterator[str]:
    place = DATA / "calibration" / name
    if not place.exists():
        return
    calibration = Results.load(place)
    cloud = [*calibration.records("cloud"), *results.records("cloud")]
    curves: dict[str, Rows] = {}
    for rule in RULES:
        here, there = by_threshold(results, rule), by_threshold(calibration, rule)
        points = [
            (t, calibration.records(there[t]), results.records(here[t]))
            for t in sorted(here.keys() & there.keys())
        ]
        if points:
            curves[rule] = frontier(points, cloud)
    if not curves:
        return
    header = calibration.header
    yield "\n### Speed against accuracy\n"
    yield f"Calibration rows: {header.first} to {header.last}.\n"
    for rule, rows in curves.items():
        loosest = safe(rows)
        found = "none is safe" if loosest is None else f"safe setting: T = {loosest:g}"
        yield f"\n**{rule}** ({found})\n"
        yield report.markdown_table(rows, report.FRONTIER)
    alone = summary(results.records("cloud"))
    report.frontier_plot(curves, alone, DATA / f"{name}-frontier.svg", results.header.task)
    yield f"![Accuracy over speed](results/{name}-frontier.svg)\n"


RATIOS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("elastic", "fsd", lambda t: f"fsd@{t:g}"),
    ("elastic", "sd", lambda t: "sd"),
    ("elastic", "cloud", lambda t: "cloud"),
)


def equal_section(results: Results) -> Iterator[str]:
    """Elastic against FSD at the same T, SD and the cloud alone."""
    methods, rows = set(results.methods()), []
    found = [by_threshold(results, name) for name in ("elastic", "elastic-doubt")]
    for t, ours in (each for one in found for each in sorted(one.items())):
        row: dict[str, Any] = {"label": ours}
        for _, title, base in RATIOS:
            if base(t) in methods:
                ratio = speedup(results.records(ours), results.records(base(t)))
                row |= dict(zip((title, f"{title}_low", f"{title}_high"), ratio, strict=True))
        rows.append(row)
    if rows:
        yield "\n### Elastic at equal thresholds\n"
        columns = (
            report.METHOD,
            *(Column(f"× {title} [95 %]", interval(title, 2)) for _, title, _ in RATIOS),
        )
        yield report.markdown_table(rows, columns)


# ---- ablations ----------------------------------------------------------------------------


def ablation_section(name: str, results: Results) -> Iterator[str]:
    for t, elastic in by_threshold(results, "elastic").items():
        variants = [m for m in results.methods() if _variant(m) and m.endswith(f"@{t:g}")]
        if not variants:
            continue
        rows = report.compare(results, elastic, [elastic, *variants])
        for row in rows:
            row["what"] = VARIANTS.get(_variant(row["method"]) or "", "")
        yield f"\n### Ablations, T = {t:g}\n"
        columns = (
            report.METHOD,
            Column("what is different", lambda row: str(row["what"])),
            Column("tok/s", number("tokens_per_s")),
            Column("× elastic [95 %]", interval("speedup", 3)),
            Column("accuracy %", number("accuracy", 1, 100)),
            Column("accepted %", number("acceptance", 1, 100)),
            Column("passes/tok", number("passes_per_token", 3)),
            Column("requests", number("requests", 0)),
        )
        yield report.markdown_table(rows, columns)
        picture = f"{name.removesuffix('-ablations')}-ablations.svg"
        report.ablation_bars(rows, DATA / picture, results.header.task)
        yield f"![Ablations](results/{picture})\n"


if __name__ == "__main__":
    main()
