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
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from e2sci.decoding.distribution import Floats
from e2sci.decoding.predictor import NetworkPredictor
from e2sci.emulation.profile import Profile
from e2sci.evaluation import sweep
from e2sci.evaluation.bench import Plan, bench, todo
from e2sci.evaluation.calibration import Calibration, Check, Measured, measure
from e2sci.evaluation.figures import safe, speedup
from e2sci.evaluation.follow import centre, follow, kept_share, used
from e2sci.evaluation.methods import Setting, elastic_credit
from e2sci.evaluation.pair import PairSpec
from e2sci.evaluation.recorder import Recording, record
from e2sci.evaluation.records import Header, Record, Results
from e2sci.evaluation.tasks import Problem, Task
from e2sci.evaluation.traces import Bools, Trace, TraceHeader, TraceWriter
from e2sci.evaluation.training import exported, fit

T = TypeVar("T")

JS_GRID = (0.02, 0.05, 0.1, 0.2)
REGRET_GRID = (0.1, 0.3, 0.7)
GRIDS = {
    "elastic": JS_GRID,
    "elastic-regret": REGRET_GRID,
    "fsd": JS_GRID,
    "fsd-released": JS_GRID,
}
RULES = ("elastic", "elastic-regret", "fsd")
SAMPLES = 32
"""Requests in the sweep at most, as many as the paper's."""
_ROWS = 1_000_000  # more than a task has: rows of several tasks are told apart by it


class Track(Protocol):
    """Shows how far a long step is."""

    def __call__(self, items: Iterable[T], total: int, label: str) -> Iterator[T]: ...


@dataclass(frozen=True)
class Asked:
    """Rows of one task: `file` by its base name."""

    task: Task
    file: str | None
    problems: Sequence[Problem]

    @property
    def name(self) -> str:
        return f"{self.task.name}:{self.file}" if self.file else self.task.name


@dataclass(frozen=True)
class Order:
    """What to calibrate: `draft`, `target` are identities; `folder` keeps the work; `delta`: the
    accuracy that may be lost, as a share. Raises ValueError on rules or tasks it can't be done for.
    """

    pair: PairSpec
    draft: str
    target: str
    asked: Sequence[Asked]
    first: int
    last: int
    profile: Profile
    folder: Path
    rules: Sequence[str] = RULES
    delta: float = 0.01
    max_tokens: int = 400
    jobs: int = 1
    command: str = ""

    def __post_init__(self) -> None:
        unknown = [rule for rule in self.rules if rule not in GRIDS]
        if unknown or not self.rules:
            raise ValueError(
                f"no rule {', '.join(unknown) or 'given'}; calibrated are {', '.join(GRIDS)}"
            )
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta is {self.delta}; expected a share of answers, 0 to 1")
        for asked in self.asked:
            if not asked.task.scored:
                raise ValueError(
                    f"{asked.task.name} isn't scored, and thresholds are calibrated on accuracy; "
                    "take humaneval, gsm8k, csqa or mmlu"
                )
        names = [asked.name for asked in self.asked]
        if len(set(names)) < len(names) or not names:
            raise ValueError("name each task once, and at least one")

    def place(self, asked: Asked) -> Path:
        """Where what concerns one task is kept."""
        return self.folder / re.sub(r"[^\w.-]+", "-", asked.name)


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


# ---- trace and bench ----------------------------------------------------------------------


def traced(order: Order, asked: Asked, track: Track) -> Trace:
    """The trace of a task's rows, in their order."""
    header = TraceHeader(
        draft=order.draft,
        target=order.target,
        task=asked.name,
        first=order.first,
        last=order.last,
        max_tokens=order.max_tokens,
    )
    recording = Recording(order.pair, asked.task, order.max_tokens)
    path = order.place(asked) / "trace.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"can't make the folder {path.parent}: {error.strerror}") from None
    with TraceWriter(path, header) as writer:
        left = sum(problem.row not in writer.rows for problem in asked.problems)
        with closing(record(recording, writer, asked.problems, jobs=order.jobs)) as recorded:
            for _ in track(recorded, left, f"trace {asked.name}"):
                pass
    rows = {problem.row for problem in asked.problems}
    found = Trace.load(path)
    requests = [request for request in found.requests if request.row in rows]
    return Trace(found.header, sorted(requests, key=lambda request: request.row))


Records = Mapping[str, Sequence[Record]]


def benched(
    order: Order, setting: Setting, methods: Sequence[str], label: str, track: Track
) -> Records:
    """Records of `methods` on all rows, by name; kept under `label`, which names the setting."""
    merged: dict[str, list[Record]] = {name: [] for name in methods}
    for number, asked in enumerate(order.asked):
        header = Header(
            profile=order.profile.to_dict(),
            task=asked.task.name,
            file=asked.file,
            first=order.first,
            last=order.last,
            draft=order.draft,
            target=order.target,
            max_tokens=order.max_tokens,
            clock="virtual",
            command=order.command,
            setting=setting.described(),
        )
        results = Results.create_or_resume(order.place(asked) / label, header)
        plan = Plan(order.pair, asked.task, setting, methods, order.max_tokens)
        left = todo(results, asked.problems, methods)
        answers = bench(plan, results, asked.problems, jobs=order.jobs)
        for _ in track(answers, left, f"bench {asked.name}, {label}"):
            pass
        rows = {problem.row for problem in asked.problems}
        for name in methods:
            merged[name] += [
                msgspec.structs.replace(found, row=_key(number, found.row))
                for found in results.records(name)
                if found.row in rows
            ]
    return merged


def _key(number: int, row: int) -> int:
    """A row of the task of that number, among those of all."""
    return number * _ROWS + row


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
            row = _key(number, request.row)
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
