"""Figures over made-up records whose answers are known."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from e2sci.evaluation import figures
from e2sci.evaluation.figures import (
    accuracy_difference,
    best_window,
    bound_share,
    frontier,
    safe,
    speedup,
    summary,
)
from e2sci.evaluation.records import Results
from test_records import header, record

pytestmark = pytest.mark.filterwarnings("error")


def judged(right: str, **changes):
    """Records whose answers are right where the letter is x, wrong at -, unscored at ?."""
    verdict = {"x": True, "-": False, "?": None}
    return [record(row, correct=verdict[r], **changes) for row, r in enumerate(right)]


# ---- summary ------------------------------------------------------------------------------


def test_a_summary_by_hand():
    records = [
        record(0, seconds=4.0, ttft_s=0.1, correct=True),
        record(1, seconds=2.0, ttft_s=0.3, correct=False, tokens=20, judged=0, accepted=0),
        record(2, seconds=6.0, ttft_s=0.2, correct=None, tokens=60, tolerated=1),
    ]
    made = summary(records)
    expected = {
        "requests": 3,
        "tokens_per_s": 180 / 12,
        "decode_tokens_per_s": 177 / (12 - 0.6),
        "ttft_s": 0.2,
        "seconds": 4.0,
        "median_seconds": 4.0,
        "mean_tokens": 60,
        "accuracy": 0.5,
        "acceptance": 160 / 200,
        "tolerated_share": 9 / 180,
        "wasted_share": 75 / 375,
        "passes_per_token": 90 / 180,
        "target_tokens_per_token": 390 / 180,
        "uplink_per_token": 900 / 180,
        "downlink_per_token": 600 / 180,
        "cloud_joules_per_token": 1800 / 180,
        "edge_joules_per_token": 75 / 180,
        "cloud_busy_share": 4.5 / 12,
        "edge_busy_share": 3.75 / 12,
    }
    low, high = made.pop("tokens_per_s_low"), made.pop("tokens_per_s_high")
    assert made == pytest.approx(expected)
    assert low < made["tokens_per_s"] < high


def test_nothing_to_divide_is_none():
    nothing = {"tokens": 0, "ttft_s": None, "judged": 0, "drafted": 0, "correct": None}
    made = summary([record(0, **nothing)], [record(1)])
    measured = {name for name, value in made.items() if value is not None}
    assert measured == {
        *("requests", "seconds", "median_seconds", "mean_tokens", "tokens_per_s"),
        *("cloud_busy_share", "edge_busy_share", "lost", "gained", "paired"),
    }
    with pytest.raises(ValueError, match="no records"):
        summary([])


def test_the_first_token_alone_has_no_speed():
    records = [record(0, tokens=1, seconds=9.0, ttft_s=9.0), record(1, seconds=2.0, ttft_s=1.0)]
    assert summary(records)["decode_tokens_per_s"] == 99.0


def test_the_interval_narrows_with_requests():
    def width(n: int) -> float:
        made = summary([record(row, seconds=4.0 + row % 3) for row in range(n)])
        return made["tokens_per_s_high"] - made["tokens_per_s_low"]

    assert width(300) < 0.5 * width(30)


def test_equal_texts_are_counted_on_shared_rows():
    ours = [record(0), record(1, digest="other"), record(2), record(9)]
    assert summary(ours, [record(row) for row in range(3)])["equal_text"] == pytest.approx(2 / 3)


# ---- accuracy -----------------------------------------------------------------------------


def test_the_difference_is_paired():
    made = accuracy_difference(judged("xx--x?x"), judged("x-xxxx?"))
    assert (made["paired"], made["gained"], made["lost"]) == (5, 1, 2)
    assert made["accuracy_diff"] == pytest.approx(-1 / 5)


def test_the_same_texts_differ_by_nothing():
    made = accuracy_difference(judged("xx-x"), judged("xx-x"))
    ends = ("accuracy_diff_low", "accuracy_diff", "accuracy_diff_high")
    assert [made[key] for key in ends] == [0, 0, 0]


def other(records):
    """The same records with other texts."""
    return [msgspec.structs.replace(one, digest=f"other{one.row}") for one in records]


def test_other_texts_with_the_same_answers_leave_room_for_a_difference():
    made = accuracy_difference(other(judged("xx-x" * 25)), judged("xx-x" * 25))
    assert made["accuracy_diff"] == 0
    assert made["accuracy_diff_high"] == -made["accuracy_diff_low"] == pytest.approx(1.96 / 102)


def test_an_interval_worked_out_by_hand():
    """Six lost, none gained, of 30: cells .5 and 6.5 of 32."""
    made = accuracy_difference(other(judged("-" * 6 + "x" * 24)), judged("x" * 30))
    middle, error = -6 / 32, 1.96 * (7 / 32 - (6 / 32) ** 2) ** 0.5 / 32**0.5
    assert made["accuracy_diff_low"] == pytest.approx(middle - error)
    assert made["accuracy_diff_high"] == pytest.approx(middle + error)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(40, 90))
def test_the_interval_goes_with_mcnemars_test(gained, lost, same):
    """It holds the difference, and zero unless the exact test comes near to rejecting."""
    ours = other(judged("x" * gained + "-" * lost + "x" * same))
    made = accuracy_difference(ours, judged("-" * gained + "x" * lost + "x" * same))
    low, high = made["accuracy_diff_low"], made["accuracy_diff_high"]
    assert low <= made["accuracy_diff"] <= high
    if gained + lost:
        p = binomtest(gained, gained + lost).pvalue
        assert not (low <= 0 <= high and p < 0.01)
        assert not (not low <= 0 <= high and p > 0.2)


# ---- speed --------------------------------------------------------------------------------


def test_identical_records_have_ratio_one():
    records = [record(row, seconds=1.0 + row) for row in range(8)]
    assert speedup(records, records) == (1.0, 1.0, 1.0)


def test_the_ratio_is_of_shared_rows_only():
    base = [record(row, seconds=5.0 + row) for row in range(20)]
    twice = [record(row, seconds=(5.0 + row) / 2) for row in range(20)]
    ratio, low, high = speedup([*twice, record(77, seconds=1e6)], base)
    assert (ratio, low, high) == pytest.approx((2.0, 2.0, 2.0))  # paired: no spread at all
    assert speedup(twice[:1], base) == (2.0, None, None)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    def covers(seed: int) -> bool:
        base, ours = [], []
        for row in range(30):
            noise = math.sin(12.9898 * (seed * 30 + row) + 78.233) * 43758.5453 % 1
            base.append(record(row, seconds=5.0))
            ours.append(record(row, seconds=2.0 + noise))  # 2.5 s on average
        _, low, high = speedup(ours, base)
        return low <= 2.0 <= high

    assert sum(covers(seed) for seed in range(20)) >= 16


def test_intervals_are_the_same_when_made_again():
    base = [record(row) for row in range(9)]
    ours = [record(row, seconds=2.0 + row % 4) for row in range(9)]
    assert speedup(ours, base) == speedup(ours, base)


@pytest.mark.parametrize(
    ("ours", "base"),
    [([record(0)], [record(1)]), ([record(0)], [record(0, tokens=0)]), ([], [record(0)])],
)
def test_nothing_to_compare_is_said(ours, base):
    with pytest.raises(ValueError, match="share no row"):
        speedup(ours, base)


def test_the_share_of_the_pipeline_bound():
    records = [record(row, tokens=101, seconds=5.0, ttft_s=1.0) for row in range(3)]  # 25 tok/s
    bound = 1000 / (10 + 0.2 * (40 + 50))
    assert bound_share(records, 10, 50, 40) == pytest.approx(25 / bound)
    assert bound_share(records, 10, lambda tokens: 50.0, 40) == pytest.approx(25 / bound)
    slow = bound_share(records, 10, lambda tokens: 50.0 * tokens, 40)
    assert slow > 25 / bound  # where large passes cost more, less can be reached
    assert bound_share([record(0, judged=0)], 10, 50, 40) is None


# ---- frontier -----------------------------------------------------------------------------


def moved(records, by: int):
    return [msgspec.structs.replace(one, row=one.row + by) for one in records]


def point(threshold: float, calib_lost: int, report_lost: int, rows: int = 100):
    """On calibration rows 0… and report rows 1000…, so many answers worse than all right."""
    calib = judged("-" * calib_lost + "x" * (rows - calib_lost), seconds=9.0)
    report = judged("-" * report_lost + "x" * (rows - report_lost), seconds=5.0 - 5 * threshold)
    return threshold, calib, moved(report, 1000)


ALONE = [*judged("x" * 100), *moved(judged("x" * 100), 1000)]


def test_the_frontier_tells_what_a_threshold_costs():
    loose, tight = point(0.4, 3, 20), point(0.1, 0, 0)
    rows = frontier([loose, tight], ALONE)
    assert [row["threshold"] for row in rows] == [0.1, 0.4]
    assert rows[1]["speedup"] == pytest.approx(5 / 3)
    assert rows[1]["tokens_per_s"] == pytest.approx(100 / 3)
    assert rows[1]["accuracy"] == pytest.approx(0.8)
    assert rows[1]["accuracy_diff"] == pytest.approx(-0.2)
    assert rows[1]["calib_accuracy_diff"] == pytest.approx(-0.03)
    assert rows[1]["acceptance"] == pytest.approx(0.8)
    assert rows[1]["tolerated_share"] == pytest.approx(0.04)
    assert rows[1]["mean_tokens"] == 100


@pytest.mark.parametrize(
    ("points", "threshold"),
    [
        ([(0.1, 0, 0), (0.2, 1, 1)], 0.2),  # one point of a hundred is allowed
        ([(0.1, 0, 0), (0.2, 4, 4)], 0.2),  # four lost and none gained may be chance
        ([(0.1, 0, 0), (0.2, 6, 0)], 0.1),  # six may not, on either set
        ([(0.1, 0, 0), (0.2, 0, 6)], 0.1),
        ([(0.1, 9, 9), (0.2, 0, 0), (0.3, 9, 9)], 0.2),  # a tighter one that fails doesn't count
        ([(0.1, 9, 9)], None),
        ([], None),
    ],
)
def test_the_loosest_threshold_that_keeps_the_accuracy(points, threshold):
    assert safe(frontier([point(*values) for values in points], ALONE)) == threshold


def test_a_point_of_many_rows_is_allowed_though_it_is_certain():
    alone = [*judged("x" * 1000), *moved(judged("x" * 1000), 1000)]
    rows = frontier([point(0.1, 10, 10, rows=1000), point(0.2, 11, 0, rows=1000)], alone)
    assert rows[0]["accuracy_diff_high"] < 0
    assert [row["keeps"] for row in rows] == [True, False]


def test_unscored_rows_keep_nothing():
    threshold, calib, report = point(0.1, 0, 0)
    unscored = [record(r.row, correct=None) for r in calib]
    assert safe(frontier([(threshold, unscored, report)], ALONE)) is None


# ---- the best window ----------------------------------------------------------------------


def test_the_best_window_is_the_fastest(tmp_path):
    results = Results.create_or_resume(tmp_path, header())
    for method, seconds in {"sd": 4.0, "sd-w12": 3.0, "sd-w3": 3.5, "elastic": 1.0}.items():
        assert (best_window(results) is None) == (method in ("sd", "sd-w12"))
        for row in range(2):
            results.append(method, record(row, seconds=seconds), "", [])
    assert best_window(results) == 12


def test_what_is_missing_is_named():
    with pytest.raises(RuntimeError, match=r"nowhere is missing; pip install \"e2sci\[bench\]\""):
        figures.bench_module("nowhere.at_all")
