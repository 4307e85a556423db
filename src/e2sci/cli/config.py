"""`e2sci config`: the configuration file, and where each value in force comes from."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from e2sci.cli import settings
from e2sci.cli.common import Address, BadInput, stderr
from e2sci.cli.settings import SECTIONS, configurable_options, variable

HEAD = """\
# Defaults for e2sci. Stronger are environment variables, as in E2SCI_EDGE_MAX_TOKENS=512, and
# strongest the flags. `e2sci config show` says which value holds, and why.
# No keys here: set E2SCI_API_KEY, or let key-file name a file that holds the key.
"""


@dataclass
class Row:
    """A value in force, where it was set (None: nowhere), and for which commands."""

    option: str
    value: Any
    where: str | None
    commands: list[str]


@click.group()
def config() -> None:
    """The configuration file: where it is, what it says, and a first one.

    \b
    e2sci config init
    e2sci config show
    """


@config.command()
@click.pass_obj
def path(file: Path | None) -> None:
    """Print where the file is, or would be."""
    click.echo(file or settings.DEFAULT)


@config.command()
@click.pass_context
def init(ctx: click.Context) -> None:
    """Write a file in which every option stands as a comment. Never over one that is there."""
    path = ctx.obj or settings.DEFAULT
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(_template(ctx.find_root()))
    except FileExistsError:
        raise BadInput(f"{path} is there already; edit it, or remove it first") from None
    except OSError as error:
        raise BadInput(f"can't write {path}: {error.strerror}") from None
    click.echo(path)


@config.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def show(ctx: click.Context, as_json: bool) -> None:
    """Show every value, and whether it comes from the file, the environment or neither."""
    root = ctx.find_root()
    found = settings.use(root, ctx.obj)
    sections = {section: _rows(root, section) for section in SECTIONS}
    known = {variable(section, row.option) for section, rows in sections.items() for row in rows}
    strange = [name for name in settings.own_variables() if name not in known]
    if as_json:
        told = {section: [vars(row) for row in rows] for section, rows in sections.items()}
        click.echo(json.dumps({"file": str(found.path), "exists": found.path.exists(), **told}))
        return
    click.echo(f"{found.path}{'' if found.path.exists() else ' (not there)'}")
    for section, rows in sections.items():
        _print(section, rows)
    for name in strange:
        stderr.print(f"note: {name} is no option's variable", style="yellow", soft_wrap=True)


def _rows(root: click.Context, section: str) -> list[Row]:
    """The section's options in their order; one row more where commands differ."""
    rows: list[Row] = []
    for command in SECTIONS[section]:
        found = settings.command_of(root, command)
        with found.make_context(command, [], parent=root, resilient_parsing=True) as ctx:
            for name, option in configurable_options(found).items():
                _add(
                    rows,
                    Row(name, _value(ctx, option), settings.source(ctx, name, option), [command]),
                )
    order = list(dict.fromkeys(row.option for row in rows))
    return sorted(rows, key=lambda row: order.index(row.option))


def _add(rows: list[Row], new: Row) -> None:
    for row in rows:
        if (row.option, row.value, row.where) == (new.option, new.value, new.where):
            row.commands += new.commands
            return
    rows.append(new)


def _value(ctx: click.Context, option: click.Option) -> Any:
    """As JSON has it. Raises BadInput on a variable that says nothing the option understands."""
    value, variable = ctx.params[option.name or ""], str(option.envvar)
    if os.environ.get(variable) and value is None:
        raise BadInput(f"{variable} is {os.environ[variable]!r}; {option.opts[0]} can't be that")
    plain = str(value) if isinstance(value, Address) else value
    return json.loads(json.dumps(plain, default=str))


def _print(section: str, rows: list[Row]) -> None:
    table = Table(escape(f"[{section}]"), "value", "set by", "for", box=None, header_style="bold")
    for row in rows:
        value = "" if row.value is None else json.dumps(row.value, ensure_ascii=False)
        commands = "" if row.commands == list(SECTIONS[section]) else ", ".join(row.commands)
        cells = (row.option, value, row.where or "default", commands)
        table.add_row(*map(Text, cells), style="dim" if row.where is None else "")
    Console(highlight=False).print(table)


# ---- a first file -----------------------------------------------------------------------------


def _template(root: click.Context) -> str:
    """Every option with its help and default, commented out."""
    text = HEAD
    for section, commands in SECTIONS.items():
        text += f"\n[{section}]  # {', '.join(commands)}\n"
        found: dict[str, dict[str, click.Option]] = {}
        for command in commands:
            options = configurable_options(settings.command_of(root, command))
            for name, option in options.items():
                found.setdefault(name, {})[command] = option
        text += "".join(_entry(name, options) for name, options in found.items())
    return text


def _entry(name: str, options: dict[str, click.Option]) -> str:
    """One option; `options` by the commands that have it."""
    first = next(iter(options.values()))
    written = {command: _toml(option) for command, option in options.items()}
    others = [f"{c}: {v}" for c, v in written.items() if v != _toml(first)]
    about = [first.help or "", f"({', '.join(others)})" if others else ""]
    if isinstance(first.type, click.Choice):
        about.append(f"One of {', '.join(first.type.choices)}.")
    lines = textwrap.wrap(" ".join(filter(None, about)), 96, break_on_hyphens=False)
    return "\n" + "".join(f"# {line}\n" for line in lines) + f"#{name} = {_toml(first)}\n"


def _toml(option: click.Option) -> str:
    """The default, or what to put where there is none."""
    default = option.to_info_dict()["default"]
    if default is None or default == ():
        return f"({settings.kind(option)[1]})"
    return json.dumps(default, ensure_ascii=False)
