"""Calibrates a pair: thresholds that keep the accuracy, τ, and a predictor that earns its place.

    trace       both models along the target's own text, on the calibration rows    → τ
    grid        the bench: the cloud alone, and each rule at each T of a grid       → thresholds
    sweep       elastic on the trace at every (T, W), in the virtual world          → labels, g_θ
    check       the bench: with the predictor, with ω = 1, with T = T_min for good

A rule's threshold is the loosest T of its grid that is *safe* on the calibration rows: its paired
difference to the cloud alone is at least -δ, or its 95 % interval holds zero. With few rows the
second lets much pass, so the intervals are kept beside it. Where none is safe the threshold is 0,
which tolerates nothing. The predictor stays only if it is safe by the same measure and faster than
ω = 1. Both are judged on the rows they were made from: report on others.

Everything is kept in a working folder, so an interrupted calibration goes on where it stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from e2sci.decoding.distribution import Floats
from e2sci.decoding.predictor import NetworkPredictor
from e2sci.evaluation import sweep
from e2sci.evaluation.calibration import Calibration, Check, Measured, measure
from e2sci.evaluation.figures import safe, speedup
from e2sci.evaluation.follow import centre, follow, kept_share, used
from e2sci.evaluation.methods import Setting, elastic_credit
from e2sci.evaluation.order import GRIDS, JS_GRID, Order, Records, Track, benched, key, traced
from e2sci.evaluation.traces import Bools, Trace
from e2sci.evaluation.training import exported, fit

SAMPLES = 32
"""Requests in the sweep at most, as many as the paper's."""


def calibrate(order: Order, track: Track) -> Calibration:
    """All of it; takes as long as the bench does. Raises ValueError, and what a worker raises."""
    traces = [traced(order, asked, track) for asked in order.asked]
    tau = centre(traces)
    setting = Setting(order.profile, tau=tau)
    grid = [f"{rule}@{t:g}" for rule in order.rules for t in GRIDS[rule]]
    records = benched(order, setting, ["cloud", *grid], f"tau-{tau:g}", track)
    measured = {rule: frontier(order, records, rule) for rule in order.rules}
    thresholds = {rule: _safe(rows) for rule, rows in measured.items()}
    t = thresholds.get("elastic", 0.0)
    made = learn(order, traces, records, tau, t, track) if t else None
    predictor, check = None, Check(passed=False, verdict=_nothing(thresholds))
    if made:
        predictor, check = checked(order, records, tau, t, exported(fit(made)), track)
    network = NetworkPredictor.parse(predictor) if predictor else None
    matched, recorded = used(traces, elastic_credit(t, tau), network)
    return Calibration(
        draft=order.draft,
        target=order.target,
        tasks=[asked.name for asked in order.asked],
        first=order.first,
        last=order.last,
        max_tokens=order.max_tokens,
        profile=order.profile.name,
        delta=order.delta,
        tau=tau,
        thresholds=thresholds,
        window=made.window if made else None,
        matched=matched if t else None,
        recorded=recorded if t else [],
        measured=measured,
        check=check,
        predictor=predictor,
        command=order.command,
    )


# ---- thresholds ---------------------------------------------------------------------------


def frontier(order: Order, records: Records, rule: str) -> list[Measured]:
    """What a rule did at each threshold of its grid, ascending."""
    return [
        measure(f"{rule}@{t:g}", t, records[f"{rule}@{t:g}"], records["cloud"], order.delta)
        for t in GRIDS[rule]
    ]


def _safe(rows: Sequence[Measured]) -> float:
    return safe([msgspec.structs.asdict(row) for row in rows]) or 0.0


# ---- the predictor ------------------------------------------------------------------------


def learn(
    order: Order, traces: Sequence[Trace], records: Records, tau: float, t: float, track: Track
) -> sweep.Labels | None:
    """Labels of a sweep over some of the requests, under the accuracy that all of them show; None
    where they are too short for any."""
    chosen = sampled(traces)
    requests = sweep.sweep(chosen, order.profile, t, tau, jobs=order.jobs)
    swept = list(track(requests, sum(len(trace.requests) for trace in chosen), "sweep"))
    credit, thresholds, kept = histories(traces, records, tau, t)
    floor = (kept[:, JS_GRID.index(t)].sum() + 1) / (len(kept) + 2)
    share = kept_share(credit, thresholds, kept)
    if not any(len(each.states) for each in swept):
        return None
    return sweep.labels(swept, share, float(floor), elastic_credit(t, tau))


def sampled(traces: Sequence[Trace], most: int = SAMPLES) -> list[Trace]:
    """At most `most` of the requests, evenly spaced."""
    every = [(n, request) for n, trace in enumerate(traces) for request in trace.requests]
    picked = np.linspace(0, len(every) - 1, min(most, len(every))).round().astype(int)
    return [
        Trace(trace.header, [every[i][1] for i in picked if every[i][0] == n])
        for n, trace in enumerate(traces)
    ]


def histories(
    traces: Sequence[Trace], records: Records, tau: float, t: float
) -> tuple[Floats, Floats, Bools]:
    """Of each request: its mean credit at T_base = t; the mean T it was judged by at each T_base of
    the grid; whether its answer then stayed as right. As `kept_share` takes them."""
    right = {
        name: {found.row: found.correct for found in records[name]}
        for name in ("cloud", *(f"elastic@{each:g}" for each in JS_GRID))
    }
    cloud, *others = right.values()
    credit, thresholds, kept = [], [], []
    for number, trace in enumerate(traces):
        for request in trace.requests:
            row = key(number, request.row)
            states = follow(request, elastic_credit(t, tau)).states
            credit.append(states[:, 0].mean() if len(states) else tau)
            params = [elastic_credit(each, tau) for each in JS_GRID]
            thresholds.append([follow(request, p).thresholds.mean() for p in params])
            kept.append([not (cloud[row] and not other[row]) for other in others])
    return np.array(credit), np.array(thresholds), np.array(kept)


def checked(
    order: Order, records: Records, tau: float, t: float, made: bytes, track: Track
) -> tuple[bytes | None, Check]:
    """The predictor if it is safe and gains, else None, and why."""
    lowest = elastic_credit(t, tau).t_min
    setting = Setting(
        order.profile,
        tau=tau,
        thresholds={"elastic": t},
        predictor=NetworkPredictor.parse(made),
        matched=lowest,
    )
    print_ = hashlib.sha256(made + f"{tau} {t}".encode()).hexdigest()[:12]
    tried = benched(order, setting, [_LEARNT, _CONSTANT], f"predictor-{print_}", track)
    cloud, before = records["cloud"], f"elastic@{t:g}"
    predicted = measure(_LEARNT, t, tried[_LEARNT], cloud, order.delta)
    gain, low, high = speedup(tried[_LEARNT], records[before])
    passed = predicted.keeps and gain > 1
    check = Check(
        passed=passed,
        verdict=_verdict(predicted, gain),
        predictor=predicted,
        constant=measure(before, t, records[before], cloud, order.delta),
        conservative=measure(_CONSTANT, lowest, tried[_CONSTANT], cloud, order.delta),
        gain=gain,
        gain_low=low,
        gain_high=high,
    )
    return made if passed else None, check


_LEARNT, _CONSTANT = "elastic", "elastic-no-history"


def _verdict(predicted: Measured, gain: float) -> str:
    difference, low, high = (
        100 * (value or 0.0) for value in (predicted.difference, predicted.low, predicted.high)
    )
    accuracy = f"accuracy {difference:+.1f} points [{low:+.1f}, {high:+.1f}]"
    speed = f"{gain:.3f}x the speed of ω = 1"
    if not predicted.keeps:
        return f"the predictor is left out, it costs accuracy: {accuracy}, {speed}"
    if gain <= 1:
        return f"the predictor is left out, it gains nothing: {speed}, {accuracy}"
    return f"the predictor is kept: {speed}, {accuracy}"


def _nothing(thresholds: Mapping[str, float]) -> str:
    if "elastic" not in thresholds:
        return "no predictor: elastic was not calibrated"
    if not thresholds["elastic"]:
        return "no predictor: no threshold of elastic is safe, so it tolerates nothing"
    return "no predictor: all texts are too short to learn from"
