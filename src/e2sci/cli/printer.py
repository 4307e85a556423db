"""How an answer is shown: text as it comes, coloured by where each token came from if asked, and
notices beside it."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.text import Text

from e2sci.cli.common import stderr
from e2sci.engines.base import Engine
from e2sci.runtime.options import Piece, Result
from e2sci.session.edge import Commit, Origin

STYLES = {
    Origin.AGREED: "green",
    Origin.TOLERATED: "yellow",
    Origin.CORRECTED: "red",
    Origin.FILLED: "blue",
    Origin.DRAFTED: "cyan",
}
LEGEND = {
    Origin.AGREED: "drafted and agreed",
    Origin.TOLERATED: "drafted and tolerated",
    Origin.CORRECTED: "corrected",
    Origin.FILLED: "filled by the cloud",
    Origin.DRAFTED: "drafted, unverified",
}


def show_notice(notice: str, *, mid_line: bool = False) -> None:
    """A line on standard error. `mid_line`: text stands before the cursor of this terminal."""
    line = Text(f"note: {notice}", "yellow")
    stderr.print(Text("\n" * mid_line) + line, soft_wrap=True)


class Printer:
    """Pieces of text to standard output, coloured by origin if asked."""

    def __init__(self, engine: Engine, coloured: bool) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._engine = engine
        self._coloured = coloured
        self._shown = 0
        self._open_line = False
        self._split: list[Commit] = []  # tokens of a character that is not whole yet
        self._seen: set[Origin] = set()

    def show(self, piece: Piece) -> None:
        if self._coloured:
            self._seen |= {c.origin for c in piece.commits}
            commits, self._split = self._split + piece.commits, []
            if piece.result is None:
                commits, self._split = split_off(self._engine, commits)
            self._console.print(coloured(self._engine, commits), end="")
        else:
            click.echo(piece.text, nl=False)
        self._shown += len(piece.text)
        if piece.text:
            self._open_line = not piece.text.endswith("\n")

    @property
    def mid_line(self) -> bool:
        """Whether the terminal's cursor stands behind text."""
        return self._open_line and sys.stdout.isatty() and sys.stderr.isatty()

    def rest(self, result: Result) -> None:
        """What was held back when the stream broke off."""
        if not self._coloured:
            click.echo(result.text[self._shown :], nl=False)

    def close(self) -> None:
        if self._shown or self._seen:
            click.echo()
        if self._seen:
            legend = [Text(LEGEND[o], STYLES[o]) for o in Origin if o in self._seen]
            stderr.print(Text(" · ").join(legend))


def coloured(engine: Engine, commits: list[Commit]) -> Text:
    """Tokens in the colours of their origins; a split character has that of its last byte."""
    text = Text()
    for run in _characters(engine, commits)[0]:
        data = b"".join(engine.tokenizer.piece(c.token) for c in run)
        text.append(data.decode("utf-8", errors="replace"), STYLES[run[-1].origin])
    return text


def split_off(engine: Engine, commits: list[Commit]) -> tuple[list[Commit], list[Commit]]:
    """`commits` up to the last whole character, and the rest."""
    runs, whole = _characters(engine, commits)
    rest = [] if whole else runs[-1]
    return commits[: len(commits) - len(rest)], rest


def _characters(engine: Engine, commits: list[Commit]) -> tuple[list[list[Commit]], bool]:
    """Runs of tokens that are whole characters, and whether the last one is."""
    runs: list[list[Commit]] = []
    whole = True
    for commit in commits:
        if whole:
            runs.append([])
        runs[-1].append(commit)
        data = b"".join(engine.tokenizer.piece(c.token) for c in runs[-1])
        try:
            data.decode()
            whole = True
        except UnicodeDecodeError as error:
            whole = error.reason != "unexpected end of data"
    return runs, whole
