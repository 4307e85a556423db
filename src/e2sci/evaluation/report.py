"""Tables and plots of results: for the terminal, as JSON, Markdown and pictures.

`compare` gives one row of figures a method; everything else shows such rows, or those of
`figures.frontier`. A column says how a row is written and, for some, whether the row is better or
worse beyond its interval. Plots are SVG or PNG by suffix, byte for byte the same when made again
from the same records with the same matplotlib; they raise what `plots.figure` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from e2sci.evaluation.figures import best_window, safe, speedup, summary, window_of
from e2sci.evaluation.methods import NAMES, SD_WINDOW
from e2sci.evaluation.plots import figure
from e2sci.evaluation.records import Record, Results

Row = Mapping[str, Any]

SD = "sd"
"""What `× SD` is relative to: synchronous speculative decoding at its usual window."""


@dataclass(frozen=True)
class Column:
    """`cell`: how a row is written. `verdict`: key of a difference and the value at which nothing
    has changed; larger is better. Coloured where `<key>_low` to `<key>_high` excludes it."""

    title: str
    cell: Callable[[Row], str]
    verdict: tuple[str, float] | None = None

    def style(self, row: Row) -> str:
        if self.verdict is None:
            return ""
        key, neutral = self.verdict
        low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
        if low is not None and low > neutral:
            return "green"
        return "red" if high is not None and high < neutral else ""


def number(key: str, digits: int = 1, scale: float = 1) -> Callable[[Row], str]:
    """A cell of one value; "–" where there is none."""

    def cell(row: Row) -> str:
        return _number(row.get(key), digits, scale)

    return cell


def interval(key: str, digits: int = 1, scale: float = 1, sign: str = "") -> Callable[[Row], str]:
    """A cell of a value with its interval, "2.31 [2.20, 2.43]"; `sign` "+" shows the sign."""

    def cell(row: Row) -> str:
        value, low, high = (
            _number(row.get(key + end), digits, scale, sign) for end in ("", "_low", "_high")
        )
        return value if row.get(f"{key}_low") is None else f"{value} [{low}, {high}]"

    return cell


def both(first: str, second: str, digits: int = 1, scale: float = 1) -> Callable[[Row], str]:
    """A cell of two values with a stroke between."""
    one, other = number(first, digits, scale), number(second, digits, scale)
    return lambda row: f"{one(row)} / {other(row)}"


METHOD = Column("method", lambda row: str(row["label"]))
ACCURACY = (
    Column("accuracy %", number("accuracy", 1, 100)),
    Column("Δ points", interval("accuracy_diff", 1, 100, "+"), ("accuracy_diff", 0)),
)
SPEED = (
    METHOD,
    Column("tok/s", number("tokens_per_s")),
    Column("× base", number("speedup", 2), ("speedup", 1)),
    Column("× SD", number("speedup_sd", 2), ("speedup_sd", 1)),
    *ACCURACY,
    Column("tokens", number("mean_tokens", 0)),
    Column("answer s", number("seconds")),
    Column("first s", number("ttft_s", 2)),
)
COST = (
    METHOD,
    Column("accepted %", number("acceptance", 1, 100)),
    Column("wasted %", number("wasted_share", 1, 100)),
    Column("passes/tok", number("passes_per_token", 3)),
    Column("B/tok up / down", both("uplink_per_token", "downlink_per_token")),
    Column("busy % cloud / edge", both("cloud_busy_share", "edge_busy_share", 0, 100)),
    Column("J/tok cloud / edge", both("cloud_joules_per_token", "edge_joules_per_token", 2)),
)
INTERVALS = (
    METHOD,
    Column("requests", number("requests", 0)),
    Column("tok/s [95 %]", interval("tokens_per_s")),
    Column("× base [95 %]", interval("speedup", 2), ("speedup", 1)),
    Column("× SD [95 %]", interval("speedup_sd", 2), ("speedup_sd", 1)),
    Column("tok/s behind the first", number("decode_tokens_per_s")),
    Column("median answer s", number("median_seconds")),
    Column("lost / gained", both("lost", "gained", 0)),
    Column("same text %", number("equal_text", 1, 100)),
)
FRONTIER = (
    Column("threshold", lambda row: f"{row['threshold']:g}{' (safe)' if row['keeps'] else ''}"),
    Column("tok/s [95 %]", interval("tokens_per_s")),
    Column("× cloud [95 %]", interval("speedup", 2), ("speedup", 1)),
    *ACCURACY,
    Column("Δ calibration", interval("calib_accuracy_diff", 1, 100, "+")),
    Column("accepted %", number("acceptance", 1, 100)),
    Column("tolerated %", number("tolerated_share", 1, 100)),
    Column("tokens", number("mean_tokens", 0)),
    Column("requests", number("requests", 0)),
)


def compare(
    results: Results, base: str = "cloud", methods: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """One row a method: method, label, `figures.summary` against `base`, speedup and speedup_sd
    over `base` and `SD` (_low, _high; None where no rows are shared).

    `methods`: which and in what order; by default base, SD, best window, then the others, without
    other windows of SD. Raises ValueError for a method without records, naming the nearest.
    """
    shown = list(methods) if methods is not None else _order(results, base)
    records = {method: results.records(method) for method in {*shown, base}}
    sd = results.records(SD) if SD in results.methods() else []
    best = best_window(results)
    return [
        {
            "method": method,
            "label": _label(method, best),
            **summary(records[method], records[base]),
            **_speedup("speedup", records[method], records[base]),
            **_speedup("speedup_sd", records[method], sd),
        }
        for method in shown
    ]


def table(results: Results, base: str = "cloud") -> Group:
    """For the terminal: speed and quality, then cost; a row a method. Green is better than `base`
    (or SD) beyond the 95 % interval, red worse. Raises ValueError like `compare`."""
    rows = compare(results, base)
    header = results.header
    title = f"{header.profile.get('name', '')} · {header.task} {header.first}…{header.last}"
    caption = f"base: {base}; SD at W = {SD_WINDOW}; Δ to base, 95 % interval"
    return Group(
        rich_table(rows, SPEED, title=title), rich_table(rows, COST, title="cost", caption=caption)
    )


def rich_table(rows: Sequence[Row], columns: Sequence[Column], **options: Any) -> Table:
    """Rows as a table for the terminal; `options` are rich's."""
    made = Table(box=box.SIMPLE_HEAD, collapse_padding=True, **options)
    for i, column in enumerate(columns):
        made.add_column(column.title, justify="right" if i else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(column.cell(row), column.style(row)) for column in columns))
    return made


def markdown_table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Rows as a Markdown table, the first column to the left, ending in a newline."""
    lines = [
        [column.title for column in columns],
        [":---" if i == 0 else "---:" for i in range(len(columns))],
        *([column.cell(row) for column in columns] for row in rows),
    ]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def to_json(results: Results, base: str = "cloud") -> dict[str, Any]:
    """For `json.dumps`: {profile, devices, task, rows: "A:B", base, methods: [row of `compare`]}.
    Raises ValueError like `compare`."""
    header = results.header
    return {
        "profile": header.profile["name"],
        "devices": header.profile,
        "task": header.task,
        "rows": f"{header.first}:{header.last + 1}",
        "base": base,
        "methods": compare(results, base),
    }


def speed_bars(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Tokens/s of each row of `compare`, with its 95 % interval."""
    _bars(rows, "tokens_per_s", path, title, "tokens/s")


def ablation_bars(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Speed of each row of `compare(results, base="elastic")` relative to it, with its interval."""
    _bars(rows, "speedup", path, title, "speed, elastic = 1", line=1.0)


def frontier_plot(
    rules: Mapping[str, Sequence[Row]], cloud: Row, path: Path, title: str = ""
) -> None:
    """Accuracy over tokens/s: a curve of `figures.frontier` rows a rule, thresholds beside the
    points, safe ones filled and the loosest of them starred. `cloud`: `figures.summary` of the
    cloud alone on the report rows. Bars are 95 %: down and up that of the difference to it."""
    with figure(path, (7.5, 5.0)) as whole:
        axes = whole.add_subplot()
        accuracy = 100 * cloud["accuracy"]
        axes.axhline(accuracy, color="0.6", linestyle="--", linewidth=1)
        axes.plot(cloud["tokens_per_s"], accuracy, "s", color="0.3", label="cloud alone")
        for i, (rule, rows) in enumerate(rules.items()):
            _curve(axes, rule, [row for row in rows if row["accuracy"] is not None], f"C{i}")
        axes.set(xlabel="tokens/s", ylabel="accuracy, %", title=title)
        axes.grid(alpha=0.3)
        axes.legend()


def _order(results: Results, base: str) -> list[str]:
    """Base first, then as `methods.NAMES` has them; of SD the usual and the best window."""
    best = best_window(results)
    shown = [
        m for m in results.methods() if m == SD or best is None or window_of(m) in (None, best)
    ]
    return list(dict.fromkeys([base, *sorted(shown, key=_place)]))


def _place(method: str) -> int:
    name = "sd" if window_of(method) else method.partition("@")[0]
    return NAMES.index(name) if name in NAMES else len(NAMES)


def _label(method: str, best: int | None) -> str:
    window = window_of(method)
    if window is None:
        return method
    return f"{'sd-best' if window == best else 'sd'} (W = {window})"


def _speedup(key: str, records: Sequence[Record], base: Sequence[Record]) -> dict[str, Any]:
    try:
        values: tuple[float | None, ...] = speedup(records, base)
    except ValueError:  # no row in common, as in an unfinished run
        values = (None, None, None)
    return dict(zip((key, f"{key}_low", f"{key}_high"), values, strict=True))


def _number(value: float | None, digits: int, scale: float, sign: str = "") -> str:
    return "–" if value is None else f"{value * scale:{sign}z.{digits}f}"


def _errors(rows: Sequence[Row], key: str, scale: float = 1) -> list[list[float]]:
    """Lengths of the bars below and above each value; 0 where there is no interval."""
    ends = [(row[key], row[f"{key}_low"], row[f"{key}_high"]) for row in rows]
    known = [(0, 0, 0) if None in end else end for end in ends]
    return [
        [scale * (value - low) for value, low, _ in known],
        [scale * (high - value) for value, _, high in known],
    ]


def _bars(
    rows: Sequence[Row], key: str, path: Path, title: str, label: str, line: float | None = None
) -> None:
    rows = [row for row in rows if row[key] is not None]
    with figure(path, (7.5, 1.2 + 0.4 * len(rows))) as whole:
        axes = whole.add_subplot()
        names, values = [row["label"] for row in rows], [row[key] for row in rows]
        errors = _errors(rows, key)
        axes.barh(range(len(rows)), values, xerr=errors, color="C0", capsize=3)
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        for i, value in enumerate(values):
            end = (value + errors[1][i], i)
            axes.annotate(f"{value:.3g}", end, (5, 0), textcoords="offset points", va="center")
        if line is not None:
            axes.axvline(line, color="0.6", linestyle="--", linewidth=1)
        axes.margins(x=0.12)
        axes.set(xlabel=label, title=title)


def _curve(axes: Any, rule: str, rows: Sequence[Row], color: str) -> None:
    """One rule's thresholds, in their order."""
    speeds = [row["tokens_per_s"] for row in rows]
    accuracies = [100 * row["accuracy"] for row in rows]
    faces = [color if row["keeps"] else "white" for row in rows]
    axes.errorbar(
        speeds,
        accuracies,
        xerr=_errors(rows, "tokens_per_s"),
        yerr=_errors(rows, "accuracy_diff", 100),
        color=color,
        elinewidth=0.6,
        label=rule,
    )
    axes.scatter(speeds, accuracies, c=faces, edgecolors=color, zorder=3)
    loosest = safe(rows)
    for row, speed, accuracy in zip(rows, speeds, accuracies, strict=True):
        if row["threshold"] == loosest:
            label = f"safe: T = {loosest:g}"
            axes.plot(speed, accuracy, "*", color=color, markersize=16, zorder=4, label=label)
        text = f"{row['threshold']:g}"
        axes.annotate(text, (speed, accuracy), (6, 6), textcoords="offset points", fontsize=8)
