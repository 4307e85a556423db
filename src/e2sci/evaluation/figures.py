"""Statistics over records: speed, accuracy, cost, and how sure they are.

Speeds are sums over sums, so a request counts by its length. Two methods are compared on the rows
they share. All intervals are 95 %:

    speed      percentile bootstrap over requests (they are what varies), pairs kept together
    accuracy   paired difference by Agresti and Min (2005): half a row is added to each of the four
               cells of right and wrong, then ± 1.96 standard errors. So few rows give a wide
               interval even where none differs. Texts that are all equal can't differ: [0, 0]

The bootstrap draws with a fixed seed: the same records give the same numbers.
"""

from __future__ import annotations

import importlib
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from e2sci.decoding import yardsticks
from e2sci.decoding.distribution import Floats
from e2sci.evaluation.methods import SD_WINDOW
from e2sci.evaluation.records import Record, Results

Figures = dict[str, float | None]
Records = Sequence[Record]
Point = tuple[float, Records, Records]
"""A threshold with its records on the calibration rows and on the report rows."""

RESAMPLES = 2000
SEED = 0
MARGIN = 0.01
"""Accuracy, as a share, that a safe setting may lose."""


def summary(records: Records, reference: Records | None = None) -> Figures:
    """Figures of one method; None where there is nothing to divide. Times in seconds, energy in
    joules, shares and accuracy in [0, 1]. Raises ValueError without records.

    tokens_per_s (with _low, _high), decode_tokens_per_s (behind the first token), ttft_s, seconds
    and median_seconds (time to answer), mean_tokens, accuracy; acceptance (of judged drafts),
    tolerated_share (of delivered tokens), wasted_share (of drafts); passes, target_tokens, uplink,
    downlink (bytes), cloud_joules, edge_joules a delivered token; cloud_busy_share,
    edge_busy_share (of the time to answer). With `reference` on the rows of both: equal_text and
    what `accuracy_difference` gives.
    """
    if not records:
        raise ValueError("no records to summarise; run the method on at least one row")
    tokens, seconds = _total(records, "tokens"), _total(records, "seconds")
    low, high = _bootstrap(_rate, _counts(records))
    scored = [record.correct for record in records if record.correct is not None]
    first = [record.ttft_s for record in records if record.ttft_s is not None]
    figures: Figures = {
        "requests": len(records),
        "tokens_per_s": _ratio(tokens, seconds),
        "tokens_per_s_low": low,
        "tokens_per_s_high": high,
        "decode_tokens_per_s": _decode_rate(records),
        "ttft_s": statistics.fmean(first) if first else None,
        "seconds": seconds / len(records),
        "median_seconds": statistics.median(record.seconds for record in records),
        "mean_tokens": tokens / len(records),
        "accuracy": _ratio(sum(scored), len(scored)),
        "acceptance": _ratio(_total(records, "accepted"), _total(records, "judged")),
        "tolerated_share": _ratio(_total(records, "tolerated"), tokens),
        "wasted_share": _ratio(_total(records, "wasted"), _total(records, "drafted")),
        "passes_per_token": _ratio(_total(records, "passes"), tokens),
        "target_tokens_per_token": _ratio(_total(records, "fed"), tokens),
        "uplink_per_token": _ratio(_total(records, "uplink"), tokens),
        "downlink_per_token": _ratio(_total(records, "downlink"), tokens),
        "cloud_joules_per_token": _ratio(_total(records, "cloud_joules"), tokens),
        "edge_joules_per_token": _ratio(_total(records, "edge_joules"), tokens),
        "cloud_busy_share": _ratio(_total(records, "cloud_busy_s"), seconds),
        "edge_busy_share": _ratio(_total(records, "edge_busy_s"), seconds),
    }
    if reference is not None:
        pairs = shared(records, reference)
        equal = sum(ours.digest == theirs.digest for ours, theirs in pairs)
        figures["equal_text"] = _ratio(equal, len(pairs))
        figures |= accuracy_difference(records, reference)
    return figures


def accuracy_difference(records: Records, reference: Records) -> Figures:
    """Paired on the shared rows that both have scored: accuracy_diff (with _low, _high; method
    minus reference, in [-1, 1]), lost and gained (rows right only in the reference, only here) and
    paired (rows compared). The difference is None where there are no such rows."""
    scored = [
        pair
        for pair in shared(records, reference)
        if pair[0].correct is not None and pair[1].correct is not None
    ]
    pairs = [(ours.correct, theirs.correct) for ours, theirs in scored]
    gained, lost = pairs.count((True, False)), pairs.count((False, True))
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    if pairs:
        difference, low, high = (gained - lost) / len(pairs), 0.0, 0.0
        if gained or lost or any(ours.digest != theirs.digest for ours, theirs in scored):
            low, high = _paired_interval(gained, lost, len(pairs))
    return {
        "accuracy_diff": difference,
        "accuracy_diff_low": low,
        "accuracy_diff_high": high,
        "lost": lost,
        "gained": gained,
        "paired": len(pairs),
    }


def _paired_interval(gained: int, lost: int, n: int) -> tuple[float, float]:
    """Agresti and Min (2005), §3: cells (n₁₂ + ½), (n₂₁ + ½) of n + 2 rows."""
    n += 2
    middle = (gained - lost) / n
    error = 1.96 * math.sqrt((gained + lost + 1) / n - middle**2) / math.sqrt(n)
    return max(-1.0, middle - error), min(1.0, middle + error)


def speedup(records: Records, base: Records) -> tuple[float, float | None, float | None]:
    """Tokens/s over the base's on the rows of both, with its interval (None for a single row).
    Raises ValueError when they share no row or nothing was delivered there."""
    pairs = shared(records, base)
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    seconds = _total(ours, "seconds") * _total(theirs, "seconds")
    if not (seconds and _total(theirs, "tokens")):
        raise ValueError("the two methods share no row with tokens; run both on the same rows")
    columns = [*_counts(ours), *_counts(theirs)]
    return (float(_rates_ratio(*columns)), *_bootstrap(_rates_ratio, columns))


def bound_share(
    records: Records, draft_ms: float, pass_ms: float | yardsticks.PassMs, rtt_ms: float
) -> float | None:
    """Tokens/s behind the first over the pipeline bound at the records' own acceptance α,
    1/(t_d + (1-α)(RTT + t_v)) where passes take `pass_ms` at any size, else the tighter bound of
    `yardsticks.pipelined`. Fill and clustered rejections may lift it above 1. None where nothing
    was judged or no request has two tokens."""
    alpha = _ratio(_total(records, "accepted"), _total(records, "judged"))
    rate = _decode_rate(records)
    if alpha is None or rate is None:
        return None
    if callable(pass_ms):
        return rate / yardsticks.pipelined(alpha, draft_ms, pass_ms, rtt_ms)
    return rate * (draft_ms + (1 - alpha) * (rtt_ms + pass_ms)) / 1000


def frontier(points: Sequence[Point], reference: Records) -> list[dict[str, Any]]:
    """One row a threshold, ascending: `threshold`; the report rows' `summary` against `reference`
    with speedup (_low, _high); calib_accuracy_diff (_low, _high) of the calibration rows; and
    `keeps`, see `safe`. `reference` is the cloud alone on both sets of rows. Raises ValueError
    where they share no rows."""
    rows = []
    for threshold, calib, report in sorted(points, key=lambda point: point[0]):
        ratio, low, high = speedup(report, reference)
        row: dict[str, Any] = {"threshold": threshold, **summary(report, reference)}
        row |= {"speedup": ratio, "speedup_low": low, "speedup_high": high}
        difference = accuracy_difference(calib, reference)
        row |= {f"calib_{key}": value for key, value in difference.items()}
        row["keeps"] = keeps(row) and keeps(row, "calib_")
        rows.append(row)
    return rows


def keeps(row: Mapping[str, Any], rows: str = "", margin: float = MARGIN) -> bool:
    """Whether accuracy is kept, by the figures of `accuracy_difference` under the prefix `rows`:
    the difference is at least -margin, or its interval holds zero. False where nothing is scored.
    """
    difference, low, high = (row[f"{rows}accuracy_diff{end}"] for end in ("", "_low", "_high"))
    return difference is not None and bool(difference >= -margin or low <= 0 <= high)


def safe(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The loosest (largest) threshold of `frontier` rows that keeps the accuracy; None: none does.

    On the calibration rows and on the report rows alike, either the paired difference is at least
    -0.01 or its interval holds zero. A tighter threshold that fails does not rule it out: with few
    rows one can fail by chance. By the same token, few rows let much pass; show the interval.
    """
    return max((row["threshold"] for row in rows if row["keeps"]), default=None)


def window_of(method: str) -> int | None:
    """W of a method of synchronous speculative decoding, `sd` or `sd-w<W>`; None for others."""
    found = re.fullmatch(r"sd-w([0-9]+)", method)
    return int(found[1]) if found else SD_WINDOW if method == "sd" else None


def best_window(results: Results) -> int | None:
    """W of the fastest synchronous speculative decoding; None where fewer than two were run."""
    rates = {
        window: summary(results.records(method))["tokens_per_s"] or 0.0
        for method in results.methods()
        if (window := window_of(method)) is not None
    }
    return max(rates, key=lambda window: rates[window]) if len(rates) > 1 else None


def shared(ours: Records, theirs: Records) -> list[tuple[Record, Record]]:
    """Pairs of records of the same row."""
    by_row = {record.row: record for record in theirs}
    return [(record, by_row[record.row]) for record in ours if record.row in by_row]


def bench_module(name: str) -> Any:
    """A module of the `bench` extra. Raises RuntimeError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RuntimeError(f'{error.name} is missing; pip install "e2sci[bench]"') from None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _total(records: Records, name: str) -> float:
    total: float = sum(getattr(record, name) for record in records)
    return total


def _decode_rate(records: Records) -> float | None:
    """Tokens/s behind the first token, of the requests that have more tokens than it."""
    longer = [
        (r.tokens - 1, r.seconds - r.ttft_s)
        for r in records
        if r.ttft_s is not None and r.tokens > 1
    ]
    return _ratio(sum(tokens for tokens, _ in longer), sum(seconds for _, seconds in longer))


def _counts(records: Records) -> list[Floats]:
    return [
        np.array([record.tokens for record in records], float),
        np.array([record.seconds for record in records], float),
    ]


def _rate(tokens: Floats, seconds: Floats, *, axis: int = -1) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(tokens.sum(axis) / seconds.sum(axis))


def _rates_ratio(
    tokens: Floats, seconds: Floats, base_tokens: Floats, base_seconds: Floats, *, axis: int = -1
) -> Floats:
    rate, base = _rate(tokens, seconds, axis=axis), _rate(base_tokens, base_seconds, axis=axis)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(rate / base)


def _bootstrap(
    statistic: Callable[..., Floats], columns: Sequence[Floats]
) -> tuple[float | None, float | None]:
    """95 % interval of a statistic over requests, which are drawn whole; None for a single one."""
    if len(columns[0]) < 2:
        return None, None
    interval = (
        bench_module("scipy.stats")
        .bootstrap(
            columns,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            method="percentile",
            random_state=np.random.default_rng(SEED),
        )
        .confidence_interval
    )
    low, high = (float(end) if np.isfinite(end) else None for end in interval)
    return low, high
