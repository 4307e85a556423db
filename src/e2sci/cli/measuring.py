"""What the measuring commands share: tasks, rows, pairs of models, progress."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from e2sci.cli.common import BadInput, download_bar, stderr
from e2sci.emulation.profile import PROFILES
from e2sci.engines.catalog import Role
from e2sci.engines.load import DEFAULT
from e2sci.evaluation.pair import identity
from e2sci.evaluation.tasks import MAX_TOKENS

T = TypeVar("T")

pair_option = click.option(
    "--pair",
    default=DEFAULT,
    show_default=True,
    metavar="DRAFT,TARGET",
    help="Two models, or the name of a pair.",
)
rows_option = click.option(
    "--rows", "span", required=True, metavar="A:B", help="Rows A up to, without, B; from 0."
)
max_tokens_option = click.option(
    "--max-tokens", type=click.IntRange(1, 1 << 16), default=MAX_TOKENS, show_default=True
)
jobs_option = click.option(
    "--jobs", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes."
)
abreast_option = click.option(
    "--abreast",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Requests at once in each process, in common passes.",
)
profile_option = click.option(
    "--profile",
    "profile_spec",
    default="paper",
    show_default=True,
    metavar="NAME|FILE",
    help=f"Devices and link: {', '.join(PROFILES)}, or a .toml file.",
)


def rows_of(span: str) -> tuple[int, int]:
    """A:B as (A, B). Raises ValueError."""
    found = re.fullmatch(r"(\d+):(\d+)", span)
    if not found or int(found[1]) >= int(found[2]):
        raise ValueError(f"--rows {span!r}: expected A:B with A < B, as in 0:30")
    return int(found[1]), int(found[2])


def models(pair: str) -> tuple[str, str]:
    """Draft and target of "DRAFT,TARGET" or of a pair's name; a comma before `key=` is part of a
    synthetic model's name. Raises BadInput."""
    names = re.split(r",(?!\w+=)", pair)
    if len(names) > 2 or not all(names):
        raise BadInput(f"--pair {pair!r}: expected DRAFT,TARGET or the name of a pair")
    return names[0], names[-1]


def command_line() -> str:
    """The command under way, to be kept with its results: of whole paths only the names, since
    results may be published."""
    parts = (re.sub(r"(^|[:=])/\S*/", r"\1", arg) for arg in sys.argv[1:])
    return shlex.join(["e2sci", *parts])


def identities(draft: str, target: str) -> tuple[str, str]:
    """Identities of both models, fetched if need be. Raises EngineError."""
    roles: tuple[tuple[str, Role], ...] = ((draft, "draft"), (target, "target"))
    found = []
    for name, role in roles:
        with download_bar(name) as progress:
            found.append(identity(name, role, progress=progress))
    return found[0], found[1]


def bar(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """`items`, counted on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, disable=not total) as progress:
        yield from progress.track(items, total=total, description=label)
