"""The sections of docs/results.md that are of no bench: inertia, the wall clock, users per engine.

Each takes the folder that its files are in, and says nothing where there are none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from e2sci.evaluation import report, wall
from e2sci.evaluation.inertia import Inertia
from e2sci.evaluation.plots import plot_inertia
from e2sci.evaluation.records import Results
from e2sci.evaluation.report import Column, number


def inertia_section(data: Path) -> Iterator[str]:
    path = data / "inertia.json"
    if not path.exists():
        return
    found = msgspec.convert(_known(msgspec.json.decode(path.read_bytes())), list[Inertia])
    plot_inertia(found, data / "inertia.svg")
    yield "\n## Credit inertia\n"
    for one in found:
        lag = one.lags[0]
        yield (
            f"**{one.name}** ({one.requests} requests, {one.windows} windows of {one.window}): "
            f"lag-1 autocorrelation {lag.observed:.2f}, shuffled {lag.null:.2f} ± "
            f"{lag.null_sd:.2f}, p = {lag.p:.3f}; between requests {one.between.share:.2f} of the "
            f"variance. {one.verdict}\n"
        )
        rows = [
            {"cut": cut, **msgspec.structs.asdict(band)}
            for cut, bands in one.bands.items()
            for band in bands.bands
        ]
        columns = (
            Column("bands", lambda row: str(row["cut"])),
            Column("credit", lambda row: f"{row['name']} {row['low']:.2f}-{row['high']:.2f}"),
            Column("windows", number("windows", 0)),
            Column("acceptance", number("mean", 3)),
            Column("95 %", lambda row: "-".join(f"{end:.2f}" for end in row["interval"])),
            Column("shuffled", lambda row: f"{row['null']:.2f} ± {row['null_sd']:.2f}"),
        )
        yield report.markdown_table(rows, columns)
        r2 = ", ".join(f"{name} {value:.3f}" for name, value in one.r2.items())
        yield f"R² of the next window's acceptance, across requests: {r2}.\n"
    yield "![Credit inertia](results/inertia.svg)\n"


def _known(value: Any) -> Any:
    """JSON has no NaN: figures that could not be computed are null there."""
    if isinstance(value, dict):
        return {key: _known(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_known(each) for each in value]
    return math.nan if value is None else value


def wall_section(data: Path) -> Iterator[str]:
    place = data / "wall"
    if not place.exists():
        return
    runs = [Results.load(path) for path in sorted(place.glob("wall-*"))]
    header = runs[0].header
    yield "\n## Wall clock\n"
    yield (
        f"{header.task}, rows {header.first} to {header.last}, at most {header.max_tokens} tokens, "
        f"{len(runs)} runs; one core for each end, an emulated link between. Most of the time goes "
        "into reading the prompts. The virtual clock has this machine's measured times.\n"
    )
    yield f"```\n{header.command}\n```\n"
    rows = wall.compare(Results.load(place / "virtual"), runs)
    yield report.markdown_table(rows, wall.COLUMNS)


def fleet_section(data: Path) -> Iterator[str]:
    path = data / "fleet.json"
    if not path.exists():
        return
    found = msgspec.json.decode(path.read_bytes())
    yield "\n## Users per engine\n"
    target = found["methods"][0]["target"]
    yield f"{found['task']}, profile `{found['profile']}`, users that are always busy: the most of"
    yield f"one engine with {target:g} tokens/s or more in 95 % of requests.\n"
    rows = [
        next((p for p in one["points"] if p["users"] == one["users"]), {"method": one["method"]})
        for one in found["methods"]
    ]
    columns = (
        Column("method", lambda row: str(row["method"])),
        Column("users", number("users", 0)),
        Column("95 % get at least, tok/s", number("speed_95")),
        Column("median tok/s", number("speed_p50")),
        Column("engine tok/s", number("engine_tokens_per_s", 0)),
        Column("busy %", number("busy", 0, 100)),
        Column("tokens/pass", number("tokens_per_pass")),
    )
    yield report.markdown_table(rows, columns)
