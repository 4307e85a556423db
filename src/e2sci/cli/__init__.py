"""`e2sci`: the command line, one file a command group."""

from __future__ import annotations

import importlib
from typing import IO, Any

import click

from e2sci import __version__

COMMANDS = (
    *("cloud", "run", "serve", "demo", "models", "link", "doctor", "keys", "top"),
    *("plan", "bench", "trace", "inertia", "calibrate", "fleet"),
)


class Interrupted(click.ClickException):
    """Ctrl-C."""

    exit_code = 130  # 128 + SIGINT, as shells have it

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, err=True)


class Misused(click.ClickException):
    """A command line that can't be read: one line, where click would print four."""

    exit_code = 2


class Lazy(click.Group):
    """Imports a command's file when it is used, so that `e2sci --help` is instant."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("Interrupted") from None
        except click.UsageError as error:
            where = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
            raise Misused(error.format_message().rstrip(".") + where) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"e2sci.cli.{name}"), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Edge-cloud speculative decoding: a small model here and a large one elsewhere write one text.

    Start with `e2sci demo`. For real use: `e2sci cloud` on the large machine, `e2sci run` on the
    small one.
    """
