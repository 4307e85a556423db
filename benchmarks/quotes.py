"""Figures that other pages quote from docs/results.md: each is a link that says where it is from.

    [3.38](results.md#humaneval-profile-paper "strict: × base")

names the section, and the row (a method, without its window) and column of a table there.
`refilled` puts in what the table says; a test holds the pages to it.
"""

from __future__ import annotations

import re
from functools import partial

QUOTE = re.compile(
    r"\[(?:[^][]|\[[^][]*\])*\]"  # the figure, perhaps with an interval behind it
    r"(?P<link>\((?:docs/)?results\.md#(?P<section>[\w-]+)"
    r' "(?P<row>[^":]*):? ?(?P<column>[^"]*)"\))'
)


def refilled(text: str, results: str) -> str:
    """`text` with every figure that it quotes as `results`, the page, has it. Raises ValueError on
    a quote of what is not there."""
    parts = re.split(r"^## ", results, flags=re.MULTILINE)
    sections = {_anchor(part.partition("\n")[0]): part for part in parts}
    return QUOTE.sub(partial(_quoted, sections), text)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _quoted(sections: dict[str, str], quote: re.Match[str]) -> str:
    column = quote["column"]
    for head, *rows in _tables(sections.get(quote["section"], "")):
        for row in rows:
            if row[0].partition(" (")[0] == quote["row"] and column in head:
                return f"[{row[head.index(column)]}]{quote['link']}"
    raise ValueError(f'results.md#{quote["section"]} has no "{quote["row"]}: {column}" to quote')


def _tables(section: str) -> list[list[list[str]]]:
    """The cells of each table, row by row: the head comes first, the rule under it is left out."""
    found = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    tables = [[_cells(line) for line in table.splitlines()] for table in found]
    return [[head, *rows] for head, _, *rows in tables]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
