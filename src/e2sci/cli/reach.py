"""How the commands that call a cloud reach it: addresses, key, certificates."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from e2sci.cli.common import BadInput
from e2sci.runtime.transport import MAX_KEY, Dial

F = TypeVar("F", bound=Callable[..., Any])

KEY_VARIABLE = "E2SCI_API_KEY"
_file = click.Path(path_type=Path, dir_okay=False)


def key_options(command: F) -> F:
    """Which key is shown to a cloud, and to whom."""
    for option in (
        click.option(
            "--allow-insecure",
            is_flag=True,
            help="Send the key over ws:// to other machines too, for all to read.",
        ),
        click.option(
            "--ca", type=_file, help="Trust the authorities in this PEM file alone, over wss://."
        ),
        click.option(
            "--key-file",
            type=_file,
            help=f"A file with the cloud's API key.  [default: the variable {KEY_VARIABLE}]",
        ),
    ):
        command = option(command)
    return command


def reach_options(command: F) -> F:
    """The options that `dials` takes."""
    cloud = click.option(
        "--cloud",
        multiple=True,
        default=("ws://127.0.0.1:7071",),
        show_default=True,
        metavar="URL",
        help="Where the cloud is. Repeat it, or put commas between, for replicas of one model: "
        "the nearest answers, the others stand in.",
    )
    return cloud(key_options(command))


def dials(
    cloud: tuple[str, ...], key_file: Path | None, ca: Path | None, allow_insecure: bool
) -> list[Dial]:
    """One for each cloud. Raises BadInput on a URL, a key or certificates that can't be used."""
    urls = [url.strip() for item in cloud for url in item.split(",")]
    key, tls = key_in(key_file), trusting(ca)
    try:
        return [Dial(url, key, tls, allow_insecure) for url in urls]
    except ValueError as error:
        raise BadInput(str(error).replace("allow_insecure", "--allow-insecure")) from None


def key_in(file: Path | None) -> str | None:
    """The key in a file, or else in the environment. Raises BadInput."""
    if file is None:
        return os.environ.get(KEY_VARIABLE, "").strip() or None
    try:
        with file.open(encoding="ascii") as opened:
            return opened.read(2 * MAX_KEY).strip()
    except OSError as error:
        raise BadInput(f"can't read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{file} holds no API key; expected one line of ASCII") from None


def trusting(ca: Path | None) -> ssl.SSLContext | None:
    """Trust in one authority, or None for the system's. Raises BadInput."""
    if ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca))
    except ssl.SSLError:
        raise BadInput(f"{ca} holds no certificates in PEM form") from None
    except OSError as error:
        raise BadInput(f"can't read {ca}: {error.strerror}") from None
