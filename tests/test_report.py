"""Tables and plots of made-up results: right numbers, colours, and the same bytes every time."""

from __future__ import annotations

import io
import json
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from e2sci.evaluation import report
from e2sci.evaluation.figures import frontier, summary
from e2sci.evaluation.records import Results
from test_records import header, record

SECONDS = {
    "elastic": 2.0,
    "sd-w8": 2.5,
    "strict": 2.2,
    "sd-w2": 4.0,
    "cloud": 5.0,
    "draft": 8.0,
    "elastic@0.1": 2.1,
    "sd": 3.0,
}
WRONG = {"elastic": 2, "draft": 15}


@pytest.fixture
def results(tmp_path):
    made = Results.create_or_resume(tmp_path / "out", header(last=20))
    for method, seconds in SECONDS.items():
        for row in range(20):
            right = row >= WRONG.get(method, 0)
            one = record(row, seconds=seconds + 0.1 * (row % 3), correct=right)
            made.append(method, one, "", [])
    return made


def shown(renderable, width: int = 200, colour: bool = False) -> str:
    system = "standard" if colour else None
    console = Console(width=width, file=io.StringIO(), force_terminal=colour, color_system=system)
    console.print(renderable)
    return console.file.getvalue()


# ---- rows ---------------------------------------------------------------------------------


def test_base_first_then_the_methods_in_their_order(results):
    rows = report.compare(results)
    assert [row["label"] for row in rows] == [
        "cloud",
        "draft",
        "sd (W = 5)",
        "sd-best (W = 8)",
        "strict",
        "elastic",
        "elastic@0.1",
    ]
    by_method = {row["method"]: row for row in rows}
    assert by_method["cloud"]["speedup"] == 1
    assert by_method["elastic"]["speedup"] == pytest.approx(5.095 / 2.095)
    assert by_method["elastic"]["speedup_sd"] == pytest.approx(3.095 / 2.095)
    assert by_method["elastic"]["accuracy_diff"] == pytest.approx(-0.1)


def test_another_base_and_other_methods(results):
    rows = report.compare(results, "elastic", ["strict", "sd-w2"])
    assert [row["label"] for row in rows] == ["strict", "sd (W = 2)"]
    assert rows[0]["speedup"] == pytest.approx(2.095 / 2.295)
    assert rows[0]["accuracy_diff"] == pytest.approx(0.1)


def test_the_usual_window_can_be_the_best(tmp_path):
    made = Results.create_or_resume(tmp_path, header())
    for method, seconds in {"cloud": 5.0, "sd-w2": 4.0, "sd": 3.0}.items():
        made.append(method, record(0, seconds=seconds), "", [])
    assert [row["label"] for row in report.compare(made)] == ["cloud", "sd-best (W = 5)"]


def test_an_unfinished_run_shows_what_there_is(tmp_path):
    made = Results.create_or_resume(tmp_path, header())
    made.append("cloud", record(0), "", [])
    made.append("strict", record(1), "", [])
    row = report.compare(made)[1]
    assert row["speedup"] is row["speedup_sd"] is row["accuracy_diff"] is None
    line = next(line for line in shown(report.table(made)).splitlines() if "strict" in line)
    assert line.split() == ["strict", "20.0", "–", "–", "100.0", "–", "100", "5.0", "0.05"]


def test_a_base_without_records_is_named(results):
    with pytest.raises(ValueError, match="mean 'cloud'"):
        report.table(results, base="clod")


# ---- tables -------------------------------------------------------------------------------


def test_the_terminal_shows_speed_and_cost(results):
    text = shown(report.table(results))
    assert "paper · gsm8k 0…20" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "elastic 47.7 2.43 1.48 90.0 -10.0 [-24.0, +5.9] 100 2.1 0.05" in lines
    assert "elastic 80.0 20.0 0.300 3.0 / 2.0 72 / 60 6.00 / 0.25" in lines
    assert "sd-w2" not in text


def test_a_narrow_terminal_loses_nothing(results):
    text = shown(report.table(results), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text.replace("0…20", "")
    assert all(name in text for name in ("cloud", "strict", "47.7"))


def test_colours_only_beyond_the_interval(results):
    """elastic: faster for certain, two answers lost not; draft: slower, fifteen lost."""
    lines = shown(report.table(results), colour=True).splitlines()
    elastic = next(line for line in lines if re.search(r"\belastic\b", line))
    draft = next(line for line in lines if re.search(r"\bdraft\b", line))
    cloud = next(line for line in lines if re.search(r"\bcloud\b", line))
    assert coloured(elastic) == {"2.43": 32, "1.48": 32}
    assert coloured(draft) == {"0.63": 31, "0.38": 31, "-75.0 [-89.6, -46.8]": 31}
    assert coloured(cloud) == {"0.61": 31}


def coloured(line: str) -> dict[str, int]:
    return {text.strip(): int(code) for code, text in re.findall(r"\x1b\[(3\d)m([^\x1b]+)", line)}


def test_markdown():
    columns = (report.Column("a|b", lambda row: row["x"]), report.Column("n", report.number("n")))
    rows = [{"x": "one|two", "n": 1.26}, {"x": "", "n": None}]
    assert report.markdown_table(rows, columns) == (
        "| a\\|b | n |\n| :--- | ---: |\n| one\\|two | 1.3 |\n|  | – |\n"
    )


def test_every_shipped_column_can_be_written(results):
    columns = (*report.SPEED, *report.COST[1:], *report.INTERVALS[1:])
    text = report.markdown_table(report.compare(results), columns)
    assert text.count("\n") == 2 + 7
    assert len({line.count("|") for line in text.splitlines()}) == 1
    assert "| 2.43 [2.41, 2.46] |" in text


@pytest.mark.parametrize(
    ("cell", "row", "text"),
    [
        (report.number("x", 1, 100), {"x": 0.5}, "50.0"),
        (report.number("x"), {"x": -0.01}, "0.0"),
        (
            report.interval("x", 1, 100, "+"),
            {"x": 0.0, "x_low": -0.01, "x_high": 0.01},
            "+0.0 [-1.0, +1.0]",
        ),
        (report.interval("x"), {"x": 1.0, "x_low": None, "x_high": None}, "1.0"),
        (report.interval("x"), {}, "–"),
        (report.both("x", "y", 0), {"x": 1.0}, "1 / –"),
    ],
)
def test_cells(cell, row, text):
    assert cell(row) == text


def test_json_has_the_documented_shape(results):
    made = json.loads(json.dumps(report.to_json(results), allow_nan=False))
    assert list(made) == ["profile", "devices", "task", "rows", "base", "methods"]
    assert (made["profile"], made["task"], made["rows"]) == ("paper", "gsm8k", "0:21")
    assert [row["method"] for row in made["methods"]][:2] == ["cloud", "draft"]
    assert {"tokens_per_s", "accuracy", "accuracy_diff", "speedup"} <= set(made["methods"][0])


# ---- plots --------------------------------------------------------------------------------


def points(lost_loose: int):
    """Cloud alone, and two thresholds, on 30 calibration and 30 report rows."""

    def rows(first: int, seconds: float, lost: int):
        return [
            record(first + i, seconds=seconds + 0.1 * (i % 4), correct=i >= lost) for i in range(30)
        ]

    alone = [*rows(0, 5.0, 0), *rows(30, 5.0, 0)]
    loose = (0.4, rows(0, 2.0, lost_loose), rows(30, 2.0, lost_loose))
    return frontier([(0.1, rows(0, 3.0, 0), rows(30, 3.0, 1)), loose], alone), alone


def draw(name: str, results: Results, path) -> bytes:
    if name == "speed":
        report.speed_bars(report.compare(results), path, "paper, gsm8k")
    elif name == "ablation":
        methods = ["elastic", "strict", "elastic@0.1"]
        report.ablation_bars(report.compare(results, "elastic", methods), path)
    else:
        (safe_rows, alone), (rows, _) = points(3), points(12)
        rules = {"elastic": safe_rows, "fsd": rows}
        report.frontier_plot(rules, summary(alone[30:]), path, "paper, gsm8k")
    return path.read_bytes()


@pytest.mark.parametrize("name", ["speed", "ablation", "frontier"])
def test_plots_are_the_same_bytes_every_time(results, tmp_path, name):
    one = draw(name, results, tmp_path / "one.svg")
    assert one == draw(name, results, tmp_path / "other.svg")
    assert ElementTree.fromstring(one).tag.endswith("svg")
    assert b"<dc:date>" not in one


def words(svg: bytes) -> str:
    """Matplotlib writes each text as a comment beside its outlines."""
    return "\n".join(re.findall(r"<!-- (.*?) -->", svg.decode()))


def test_plots_say_what_they_show(results, tmp_path):
    speed = words(draw("speed", results, tmp_path / "a.svg"))
    assert all(name in speed for name in ("sd-best (W = 8)", "elastic@0.1", "tokens/s", "47.7"))
    ablation = words(draw("ablation", results, tmp_path / "b.svg"))
    assert all(name in ablation for name in ("strict", "elastic = 1", "0.913"))
    plot = words(draw("frontier", results, tmp_path / "c.svg"))
    assert all(
        name in plot for name in ("elastic", "fsd", "cloud alone", "accuracy, %", "safe: T = 0.4")
    )


def test_bars_show_their_intervals(results, tmp_path):
    rows = report.compare(results)
    sure = [{**row, "tokens_per_s_low": None, "tokens_per_s_high": None} for row in rows]
    report.speed_bars(rows, tmp_path / "with.svg")
    report.speed_bars(sure, tmp_path / "without.svg")
    one, other = ((tmp_path / name).read_text() for name in ("with.svg", "without.svg"))
    assert one != other
    assert "LineCollection" in one


def test_the_frontier_table_marks_what_is_safe():
    text = report.markdown_table(points(12)[0], report.FRONTIER)
    assert text.splitlines()[2].startswith("| 0.1 (safe) |")
    assert text.splitlines()[3].startswith("| 0.4 |")
    assert "-40.0 [-55.4, " in text


def test_the_star_stands_at_the_loosest_safe_threshold(tmp_path):
    def stars(rows, alone) -> list[str]:
        report.frontier_plot({"elastic": rows}, summary(alone[30:]), tmp_path / "x.svg")
        return re.findall(r"safe: T = \S+", words((tmp_path / "x.svg").read_bytes()))

    (both_safe, alone), (tight_safe, _) = points(3), points(12)
    assert stars(both_safe, alone) == ["safe: T = 0.4"]
    assert stars(tight_safe, alone) == ["safe: T = 0.1"]
    assert stars([{**row, "keeps": False} for row in both_safe], alone) == []
