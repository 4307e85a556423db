"""`e2sci models`: what is in the catalogue and in the cache; fetch, check and remove it."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from e2sci.cli.common import BadInput, download_bar, friendly
from e2sci.engines import catalog, fetch
from e2sci.engines.base import EngineError


@click.group()
def models() -> None:
    """Models: list, fetch, check and remove them.

    NAME is a model of the catalogue (`qwen2.5-coder` for both of a pair, `qwen2.5-coder:draft` for
    one); `fetch` and `path` also take a hub file, `owner/repo:file.gguf`.
    """


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(as_json: bool) -> None:
    """List the catalogue, and what of it is in the cache."""
    if as_json:
        click.echo(json.dumps([_row(*pair) for pair in catalog.entries()], indent=2))
        return
    table = Table("model", "parameters", "size", "licence", "cached", box=None)
    for entry, cached in catalog.entries():
        size = decimal(entry.file.size)
        table.add_row(entry.name, entry.parameters, size, entry.licence, "yes" if cached else "no")
    Console().print(table)
    click.echo(f"Cache: {fetch.models_dir()}")


@models.command("fetch")
@click.argument("name")
def fetch_model(name: str) -> None:
    """Download NAME and print its path; an interrupted download goes on where it stopped."""
    with friendly():
        for one in [entry.name for entry in catalog.matching(name)] or [name]:
            with download_bar(one) as progress:
                path = catalog.local_path(one, "target", progress=progress)
            click.echo(path)


@models.command("verify")
@click.argument("name", required=False)
def verify(name: str | None) -> None:
    """Compare files in the cache with their published SHA-256; all of them without NAME."""
    chosen = _entries(name) if name else [entry for entry, cached in catalog.entries() if cached]
    if not chosen:
        click.echo("Nothing is in the cache.")
    wrong = []
    for entry in chosen:
        try:
            fetch.verify(entry.file)
            click.echo(f"{entry.name}: right")
        except EngineError as error:
            wrong.append(str(error))
    if wrong:
        raise BadInput("\n".join(wrong))


@models.command("path")
@click.argument("name")
def path(name: str) -> None:
    """Print where NAME lies; fails if it has not been fetched."""
    with friendly():
        for one in [entry.name for entry in catalog.matching(name)] or [name]:
            found = catalog.cached_path(one, "target")
            if found is None:
                raise BadInput(f"{one} has not been fetched; `e2sci models fetch {one}` does it")
            click.echo(found)


@models.command("rm")
@click.argument("name")
def rm(name: str) -> None:
    """Remove NAME from the cache, with what an interrupted download left."""
    with friendly():
        freed = sum(fetch.remove(entry.file) for entry in _entries(name))
    click.echo(f"Freed {decimal(freed)}.")


def _entries(name: str) -> list[catalog.Entry]:
    found = catalog.matching(name)
    if not found:
        known = ", ".join(entry.name for entry in catalog.CATALOG)
        raise BadInput(f"no model {name!r} in the catalogue; it has {known}")
    return found


def _row(entry: catalog.Entry, cached: bool) -> dict[str, object]:
    return {
        "name": entry.name,
        "parameters": entry.parameters,
        "bytes": entry.file.size,
        "sha256": entry.file.sha256,
        "licence": entry.licence,
        "repo": entry.file.repo,
        "cached": cached,
        "path": str(fetch.path_of(entry.file)),
    }
