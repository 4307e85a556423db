"""The target model of a cloud: one that is loaded here, or one that a server runs already."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from e2sci.cli.common import BadInput, friendly, load, model_options
from e2sci.engines.base import Engine
from e2sci.engines.load import DEFAULT

F = TypeVar("F", bound=Callable[..., Any])


def target_options(command: F) -> F:
    """The options that `target` takes."""
    for option in (
        model_options(4096),
        click.option(
            "--slots",
            type=click.IntRange(1, 256),
            default=4,
            show_default=True,
            help="Requests at once; each has a context of its own.",
        ),
        click.option(
            "--engine-key-env",
            "key_variable",
            metavar="NAME",
            help="Of a server: the environment variable with the key that it wants.",
        ),
        click.option(
            "--tokenizer",
            metavar="PATH",
            help="Of a server: the model's tokenizer, a folder or owner/repo.",
        ),
        click.option("--url", help="Of a server: its address, http://HOST:PORT."),
        click.option(
            "--engine",
            type=click.Choice(["auto", "vllm", "sglang"]),
            default="auto",
            show_default=True,
            help="Load --model here, or stand in front of a server of this kind.",
        ),
        click.option(
            "--model",
            help=f"The target model.  [default: {DEFAULT}; of a server: the first it serves]",
        ),
    ):
        command = option(command)
    return command


def target(
    *,
    model: str | None,
    engine: str,
    url: str | None,
    tokenizer: str | None,
    key_variable: str | None,
    slots: int,
    context: int,
    threads: int | None,
    gpu_layers: int,
) -> Engine:
    """Load the model, or reach the server. Raises BadInput."""
    if engine == "auto":
        _refuse(
            engine, **{"--url": url, "--tokenizer": tokenizer, "--engine-key-env": key_variable}
        )
        return load(
            model or DEFAULT,
            "target",
            context=context,
            threads=threads,
            gpu_layers=gpu_layers,
            slots=slots,
        )
    _refuse(engine, **{"--threads": threads, "--gpu-layers": gpu_layers or None})
    if url is None or tokenizer is None:
        raise BadInput(f"--engine {engine} needs --url and --tokenizer")
    key = _key(key_variable) if key_variable else None
    with friendly():
        return _server(engine)(
            url, model=model, tokenizer=tokenizer, key=key, slots=slots, context=context
        )


def _server(engine: str) -> Callable[..., Engine]:
    if engine == "vllm":
        from e2sci.engines.vllm import Vllm  # only here: an extra

        return Vllm
    from e2sci.engines.sglang import SGLang

    return SGLang


def _refuse(engine: str, **given: object) -> None:
    """Raises BadInput on an option that says nothing to this kind of engine."""
    for name, value in given.items():
        if value is not None:
            raise BadInput(f"{name} does not go with --engine {engine}")


def _key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise BadInput(f"--engine-key-env names {variable}, which is not set")
    return key
