"""`e2sci keys`: the keys that a cloud lets in."""

from __future__ import annotations

import json
from pathlib import Path

import click
from platformdirs import user_config_path
from rich.console import Console
from rich.table import Table

from e2sci.cli.common import friendly
from e2sci.server import keys as store
from e2sci.server.keys import Key

DEFAULT = user_config_path("e2sci") / "keys.json"
LIMITS = ("sessions", "tokens_per_minute", "context")

_file = click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=DEFAULT,
    help="The key file.  [default: keys.json in the user's configuration folder]",
)
_limit = click.IntRange(1)

keys_option = click.option(
    "--keys",
    "keys_file",
    type=click.Path(dir_okay=False, path_type=Path),
    is_flag=False,
    flag_value=str(DEFAULT),
    metavar="[FILE]",
    help="Let in only who has a key of `e2sci keys`; without FILE, from where these go.",
)
"""Of the commands that let others in."""


@click.group()
def keys() -> None:
    """Keys for a cloud: `e2sci cloud --keys` lets nobody in without one.

    A running cloud sees a change at once; what a revoked key has open ends within seconds.
    """


@keys.command()
@click.argument("name")
@click.option("--sessions", type=_limit, help="Requests at once.  [default: any number]")
@click.option(
    "--tokens-per-minute",
    type=_limit,
    help="Tokens fed to the target, prompts included.  [default: any number]",
)
@click.option("--context", type=_limit, help="Tokens of one text.  [default: the cloud's]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_file
def add(
    name: str,
    sessions: int | None,
    tokens_per_minute: int | None,
    context: int | None,
    as_json: bool,
    path: Path,
) -> None:
    """Make a key for NAME and print it, this once.

    \b
    e2sci keys add alice --sessions 4 --tokens-per-minute 60000
    """
    with friendly():
        key, presented = store.add(
            path, name, sessions=sessions, tokens_per_minute=tokens_per_minute, context=context
        )
    if as_json:
        click.echo(json.dumps({"id": key.id, "name": key.name, "key": presented}))
        return
    click.echo(f"key {key.id} for {key.name} is in {path}; it is shown this once:", err=True)
    click.echo(presented)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
@_file
def list_keys(as_json: bool, path: Path) -> None:
    """Show the keys: ids, holders and limits. Secrets are kept nowhere."""
    with friendly():
        found = store.read(path)
    if as_json:
        click.echo(json.dumps([_row(key) for key in found]))
        return
    table = Table("id", "name", "created", "sessions", "tokens/min", "context", "state", box=None)
    for key in found:
        limits = (str(getattr(key, name) or "–") for name in LIMITS)
        state = f"revoked {key.revoked[:10]}" if key.revoked else "in force"
        table.add_row(key.id, key.name, key.created[:10], *limits, state)
    Console().print(table)


@keys.command()
@click.argument("id")
@_file
def revoke(id: str, path: Path) -> None:
    """Put the key ID out of force, for good."""
    with friendly():
        key = store.revoke(path, id)
    click.echo(f"key {key.id} of {key.name} is revoked", err=True)


def _row(key: Key) -> dict[str, str | int | None]:
    """What may be shown of a key: all but salt and hash."""
    shown = ("id", "name", "created", "revoked", *LIMITS)
    return {name: getattr(key, name) for name in shown}
