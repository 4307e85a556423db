"""What pages take from the code when the site is built, so that it is never behind it.

<!-- commands -->    every command of `e2sci`, from its own help
<!-- examples -->    the files of examples/, from their docstrings and code
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from e2sci.cli import main

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its markers replaced."""
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", commands())
    if "<!-- examples -->" in markdown:
        markdown = markdown.replace("<!-- examples -->", examples())
    return markdown


# ---- the command line ---------------------------------------------------------------------


def commands() -> str:
    """A section for each command, a subsection for each command of a group."""
    with click.Context(main, info_name="e2sci") as ctx:
        return "\n\n".join(_sections(main, ctx, level=2))


def _sections(group: click.Group, ctx: click.Context, level: int) -> Iterator[str]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        within = command.context_class(command, info_name=name, parent=ctx)
        yield f"{'#' * level} {within.command_path}"
        yield from _help(command, within)
        if isinstance(command, click.Group):
            yield from _sections(command, within, level + 1)


def _help(command: click.Command, ctx: click.Context) -> Iterator[str]:
    pieces = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    yield f"```\n{pieces}\n```"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        as_it_stands = paragraph.startswith("\b\n")
        yield f"```\n{paragraph[2:]}\n```" if as_it_stands else paragraph
    records = [r for p in command.get_params(ctx) if (r := p.get_help_record(ctx))]
    rows = [
        f"| {_code(names)} | {_cell(what)} |" for names, what in records if "--help" not in names
    ]
    if rows:
        yield "\n".join(["| option | |", "|---|---|", *rows])


def _code(text: str) -> str:
    return f"<code>{_cell(text)}</code>"


def _cell(text: str) -> str:
    """Text that Markdown leaves alone in a table's cell, but for what is in backticks."""

    def escaped(found: re.Match[str]) -> str:
        return found[0] if found[0].startswith("`") else f"&#{ord(found[0])};"

    return re.sub(r"`[^`|]+`|[|*_<&`\[\]\\]", escaped, text)


# ---- the examples -------------------------------------------------------------------------


def examples() -> str:
    """A section for each file, the shortest first: what its docstring says, then its code."""
    shortest_first = sorted(EXAMPLES.glob("*.py"), key=lambda path: path.stat().st_size)
    return "\n\n".join(map(_example, shortest_first))


def _example(path: Path) -> str:
    source = path.read_text()
    module = ast.parse(source)
    title, _, rest = (ast.get_docstring(module) or "").partition("\n")
    code = "\n".join(source.splitlines()[module.body[0].end_lineno :]).strip()
    link = f"[{path.name}](../examples/{path.name})"
    return f"## {title.rstrip('.')}\n{rest}\n\n{link}\n\n```python\n{code}\n```"
