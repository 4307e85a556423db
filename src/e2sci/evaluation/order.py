"""What to calibrate, and the work that it takes: a trace of each task, and benches.

Both are kept in the order's working folder, and go on where they were interrupted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from e2sci.emulation.profile import Profile
from e2sci.evaluation.bench import Plan, bench, todo
from e2sci.evaluation.methods import Setting
from e2sci.evaluation.pair import PairSpec
from e2sci.evaluation.recorder import Recording, record
from e2sci.evaluation.records import Header, Record, Results
from e2sci.evaluation.tasks import Problem, Task
from e2sci.evaluation.traces import Trace, TraceHeader, TraceWriter

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
            abreast=order.pair.abreast,
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
                msgspec.structs.replace(found, row=key(number, found.row))
                for found in results.records(name)
                if found.row in rows
            ]
    return merged


def key(number: int, row: int) -> int:
    """A row of the task of that number, among those of all."""
    return number * _ROWS + row
