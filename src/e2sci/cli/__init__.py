"""`e2sci`: the command line, one file a command group."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import IO, Any

import click

from e2sci import __version__
from e2sci.cli.settings import VARIABLE, configurable, origins, section_of, use

COMMANDS = (
    *("cloud", "run", "chat", "serve", "demo", "models", "link", "doctor", "keys", "top"),
    *("plan", "bench", "trace", "inertia", "calibrate", "fleet"),
    *("config", "completion"),
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
            set_by = origins(error.ctx, error.format_message()) if error.ctx else ""
            raise Misused(error.format_message().rstrip(".") + set_by + where) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"e2sci.cli.{name}"), name)
        assert isinstance(command, click.Command)
        section = section_of(name)
        return configurable(command, section) if section else command


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    envvar=VARIABLE,
    metavar="FILE",
    help=f"Defaults of your own.  [default: the variable {VARIABLE}, or what `e2sci config path` "
    "says]",
)
@click.version_option(__version__)
@click.pass_context
def main(ctx: click.Context, config_file: Path | None) -> None:
    """Edge-cloud speculative decoding: a small model here and a large one elsewhere write one text.

    Start with `e2sci demo`. For real use: `e2sci cloud` on the large machine, `e2sci run` on the
    small one.
    """
    ctx.obj = config_file
    if section_of(ctx.invoked_subcommand):
        use(ctx, config_file)
