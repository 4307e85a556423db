"""The draft model of an edge: one that is loaded here, or one that a server runs already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import click

from e2sci.cli.common import load
from e2sci.cli.target import engine_key
from e2sci.engines.base import Engine
from e2sci.engines.load import DEFAULT

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--draft",
        default=DEFAULT,
        show_default=True,
        help="The draft model; llama-server:URL, vllm:URL or sglang:URL for one that a server "
        "runs.",
    ),
    click.option(
        "--draft-tokenizer",
        metavar="PATH",
        help="Of a server: the model's tokenizer, a folder, owner/repo or a GGUF file.  "
        "[llama-server's default: the file it runs]",
    ),
    click.option(
        "--draft-key-env",
        "draft_key_variable",
        metavar="NAME",
        help="Of a server: the environment variable with the key that it wants.",
    ),
)


@dataclass(frozen=True)
class Draft:
    """Which draft model a command was asked for."""

    name: str
    tokenizer: str | None = None
    key_variable: str | None = None

    def load(self, *, context: int, threads: int | None, gpu_layers: int, slots: int = 1) -> Engine:
        """Load it, or reach its server. Raises BadInput."""
        return load(
            self.name,
            "draft",
            context=context,
            threads=threads,
            gpu_layers=gpu_layers,
            slots=slots,
            tokenizer=self.tokenizer,
            key=engine_key(self.key_variable, "--draft-key-env"),
        )


def draft_options(command: F) -> F:
    """The options that make a Draft, which the command gets as `draft`."""

    @wraps(command)
    def wrapped(
        *args: Any,
        draft: str,
        draft_tokenizer: str | None,
        draft_key_variable: str | None,
        **rest: Any,
    ) -> Any:
        return command(*args, draft=Draft(draft, draft_tokenizer, draft_key_variable), **rest)

    made: Any = wrapped
    for option in reversed(_OPTIONS):
        made = option(made)
    return made  # type: ignore[no-any-return]
