"""`e2sci completion`: the script by which a shell completes commands, options and choices."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    eval "$(e2sci completion bash)"                                  # in ~/.bashrc
    eval "$(e2sci completion zsh)"                                   # in ~/.zshrc
    e2sci completion fish > ~/.config/fish/completions/e2sci.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "e2sci", "_E2SCI_COMPLETE").source())
