"""Whether an answer is right: a number, a letter, or code that passes its tests.

Models are asked to end with "The answer is …"; where they don't, the last number, or the last
letter of the last line, counts. Code is the first fenced block, else the whole text; it runs in
`sandbox`. All ours.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple, cast

from e2sci.evaluation import sandbox


class CodeTests(NamedTuple):
    """HumanEval's reference: `test` defines check(function); `prompt` is the code to complete."""

    prompt: str
    entry_point: str
    test: str


class Choice(NamedTuple):
    """A multiple choice's reference: the right letter, and all of them."""

    letter: str
    letters: str


_ANSWER_IS = re.compile(r"\banswer\s+is\b", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)")
_SENTENCE = re.compile(r"[\s:*]*(.*?)(?:[.!?]\s|\n|$)", re.DOTALL)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}")
_NAMING = (
    r"(?i:\banswer\s+is\b[\W_]*"
    r"(?:(?:the|option|choice|letter|boxed|text|textbf|mathrm)\b[\W_]*)*)"
)
_NUMBER = re.compile(
    r"(?:(?<![\w.)])-)?"  # in 16-18 it is no sign
    r"(?<!\d)(?<!\d/)(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?!\d|\.\d|/\d)"
)


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(number.replace(",", "")) for number in _NUMBER.findall(text)]


def number_right(reference: Decimal, text: str) -> bool:
    """The number that "answer is" names, what stands in \\boxed{}, or the last number at all."""
    text = re.sub(r"\\?\$|\\!", "", text).replace("{,}", ",").replace("−", "-")
    text = _FRACTION.sub("", text)
    *before, after = _ANSWER_IS.split(text)
    if before:
        sentence = cast(re.Match[str], _SENTENCE.match(after))[1]
        named = _numbers(sentence.rpartition("=")[2]) or _numbers(sentence)
        if named:
            return named[0] == reference
    boxed = _BOXED.findall(text)
    last = (_numbers(boxed[-1]) if boxed else []) or _numbers(text)
    return bool(last) and last[-1] == reference


def letter_right(reference: Choice, text: str) -> bool:
    """The letter that the last "answer is" names, or the last one that stands alone in the last
    line; an A before a small letter is an article there."""
    letter = rf"([{reference.letters}])(?![A-Za-z0-9]|['’]\w)"
    named = re.findall(_NAMING + letter, text)
    if not named:
        end = text.rstrip().rpartition("\n")[2]
        named = re.findall(r"(?<![A-Za-z0-9'’])(?!A\s+[a-z])" + letter, end)
    return bool(named) and named[-1] == reference.letter


_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def program(reference: CodeTests, text: str) -> str:
    """The answer's code with what the prompt has before the function, then the tests. Code that
    doesn't define the function continues the prompt."""
    prompt, entry_point, test = reference
    fenced = _FENCED.search(text)
    code = fenced[1] if fenced else text
    defines = re.compile(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}\b", re.MULTILINE)
    if defines.search(code):
        start = defines.search(prompt)
        before = prompt[: start.start()] if start else ""
    else:
        before = prompt.rstrip()
    return f"{before}\n{code}\n\n{test}\n\ncheck({entry_point})\n"


def passes(reference: CodeTests, text: str) -> bool:
    return sandbox.run(program(reference, text)).passed
