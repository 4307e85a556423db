"""What the commands share: one-line errors, addresses, download bars, loading a model."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from e2sci.engines import fetch
from e2sci.engines.base import Engine, EngineError
from e2sci.engines.catalog import Role
from e2sci.engines.load import load_engine
from e2sci.runtime.connection import EdgeError
from e2sci.runtime.transport import is_loopback

F = TypeVar("F", bound=Callable[..., Any])

stderr = Console(stderr=True)


class BadInput(click.ClickException):
    """A mistake of the caller's, or of the world around: one line on stderr, exit code 2."""

    exit_code = 2


@contextmanager
def friendly() -> Iterator[None]:
    """Turn the errors that a user can mend into their line."""
    try:
        yield
    except (EngineError, EdgeError, ValueError, RuntimeError) as error:
        raise BadInput(str(error)) from error


class Seconds(click.FloatRange):
    """A range of numbers that NaN does not lie in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return number


drain_option = click.option(
    "--drain",
    type=Seconds(0, 86400),
    default=30.0,
    show_default=True,
    help="Seconds that requests under way are given at Ctrl-C or SIGTERM.",
)
log_option = click.option(
    "--log",
    "log_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Lines for people, or a JSON object an event.",
)


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


def address(value: str) -> Address:
    """HOST:PORT, an IPv6 host in brackets; raises BadInput."""
    host, _, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    named = host and (bracketed or ":" not in host)
    if not (named and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise BadInput(f"{value!r} is no address; expected HOST:PORT, as in 127.0.0.1:7070")
    return Address(host, int(port))


def listen_option(default: str, who: str = "edges") -> Callable[[F], F]:
    """Where a command listens, and for whom; see `refuse_remote`."""
    return click.option(
        "--listen",
        type=address,
        metavar="HOST:PORT",
        default=default,
        show_default=True,
        help=f"Where {who} connect; port 0 takes any free one.",
    )


def refuse_remote(listen: Address, flag: str, meant: bool, missing: Sequence[str] = ()) -> None:
    """Only loopback unless `flag` is given, which is what `meant` says. Raises BadInput, naming
    what is `missing` for a safe one."""
    if listen.loopback or meant:
        return
    without = f" without {' and '.join(missing)}" if missing else ""
    raise BadInput(f"--listen {listen} is open to other machines{without}; add {flag} to mean it")


def cannot_listen(listen: Address, error: OSError) -> BadInput:
    """What to say of an address that can't be had."""
    taken = error.errno == errno.EADDRINUSE
    reason = "the port is in use; 0 takes any free one" if taken else error.strerror
    return BadInput(f"can't listen on {listen}: {reason}")


@contextmanager
def download_bar(label: str) -> Iterator[fetch.Progress]:
    """A progress bar on stderr, shown from the first report on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(label, total=None)

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def model_options(context: int) -> Callable[[F], F]:
    """The options of every command that loads a model."""

    def add(command: F) -> F:
        for option in (
            click.option(
                "--gpu-layers", type=int, default=0, show_default=True, help="On the GPU; -1: all."
            ),
            click.option("--threads", type=click.IntRange(1), help="CPU threads; default: all."),
            click.option(
                "--context",
                type=click.IntRange(16),
                default=context,
                show_default=True,
                help="Tokens a text can have, prompt included.",
            ),
        ):
            command = option(command)
        return command

    return add


def load(
    name: str,
    role: Role,
    *,
    context: int,
    threads: int | None,
    gpu_layers: int,
    slots: int = 1,
    tokenizer: str | None = None,
    key: str | None = None,
) -> Engine:
    """Load a model with progress on stderr, see `load_engine`. Raises BadInput."""
    with friendly(), download_bar(name) as progress:
        return load_engine(
            name,
            role,
            context=context,
            slots=slots,
            threads=threads,
            gpu_layers=gpu_layers,
            tokenizer=tokenizer,
            key=key,
            progress=progress,
        )
