"""The target model of a cloud: one that is loaded here, or one that servers run already."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from e2sci.cli.common import BadInput, friendly, load, model_options
from e2sci.engines.base import Engine
from e2sci.engines.load import DEFAULT

if TYPE_CHECKING:
    from e2sci.runtime.gateway import Servers  # else only where it is used: an extra

F = TypeVar("F", bound=Callable[..., Any])

NATIVE = "vllm-native"
SLOTS, NATIVE_SLOTS = 4, 256

drafts_option = click.option(
    "--drafts",
    multiple=True,
    metavar="ADDRESS",
    help="Of vllm-native: where its proposer takes drafts; repeated for several.  [default: the "
    "variable E2SCI_DRAFTS, or a socket in the folder for temporary files]",
)


def target_options(command: F) -> F:
    """The options that `target` takes."""
    for option in (
        model_options(4096),
        click.option(
            "--slots",
            type=click.IntRange(1, 256),
            help=f"Requests at once.  [default: {SLOTS}; with vllm-native: {NATIVE_SLOTS}]",
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
        drafts_option,
        click.option(
            "--url",
            "urls",
            multiple=True,
            help="Of a server: its address, http://HOST:PORT. With vllm-native it can be repeated, "
            "for several of one model.",
        ),
        click.option(
            "--engine",
            type=click.Choice(["auto", "vllm", NATIVE, "sglang"]),
            default="auto",
            show_default=True,
            help="Load --model here, or stand in front of a server of this kind; vllm-native: of a "
            "vLLM that verifies by itself, with the proposer of this package in it.",
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
    urls: tuple[str, ...],
    drafts: tuple[str, ...],
    tokenizer: str | None,
    key_variable: str | None,
    slots: int | None,
    context: int,
    threads: int | None,
    gpu_layers: int,
) -> Engine:
    """Load the model, or reach the server. Raises BadInput."""
    slots = slots or SLOTS
    _refuse(engine, **{"--drafts": drafts or None})
    if engine == "auto":
        _refuse(
            engine,
            **{"--url": urls or None, "--tokenizer": tokenizer, "--engine-key-env": key_variable},
        )
        return load(
            model or DEFAULT,
            "target",
            context=context,
            threads=threads,
            gpu_layers=gpu_layers,
            slots=slots,
        )
    tokenizer = _of_a_server(engine, urls, tokenizer, threads, gpu_layers)
    if len(urls) > 1:
        raise BadInput(f"--engine {engine} stands in front of one server; give one --url")
    key = engine_key(key_variable)
    with friendly():
        return _server(engine)(
            urls[0], model=model, tokenizer=tokenizer, key=key, slots=slots, context=context
        )


def servers(
    *,
    model: str | None,
    engine: str,
    urls: tuple[str, ...],
    drafts: tuple[str, ...],
    tokenizer: str | None,
    key_variable: str | None,
    context: int,
    threads: int | None,
    gpu_layers: int,
) -> Servers:
    """Reach the servers of `--engine vllm-native`. Raises BadInput."""
    tokenizer = _of_a_server(engine, urls, tokenizer, threads, gpu_layers)
    key = engine_key(key_variable)
    with friendly(), draft_addresses(drafts) as chosen:
        from e2sci.engines.hf_tokenizer import describe  # only here: an extra
        from e2sci.runtime.gateway import reach

        about = describe(tokenizer)
        return reach(urls, chosen, about, model=model, key=key, context=context)


@contextmanager
def draft_addresses(drafts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Where drafts are sent to, the default if nothing is given. Raises BadInput, also for an
    address that turns out not to be usable."""
    try:
        from e2sci.vllm_plugin.wire import AddressError, default_address  # only here: an extra
    except ImportError as error:
        raise BadInput(f'pyzmq is missing ({error}); run: pip install "e2sci[gateway]"') from error
    try:
        yield drafts or (default_address(),)
    except AddressError as error:
        raise BadInput(str(error)) from None


def _server(engine: str) -> Callable[..., Engine]:
    if engine == "vllm":
        from e2sci.engines.vllm import Vllm  # only here: an extra

        return Vllm
    from e2sci.engines.sglang import SGLang

    return SGLang


def _of_a_server(
    engine: str,
    urls: tuple[str, ...],
    tokenizer: str | None,
    threads: int | None,
    gpu_layers: int,
) -> str:
    """The tokenizer, if what an engine in front of a server needs is there, and what it has no use
    for is not. Raises BadInput."""
    _refuse(engine, **{"--threads": threads, "--gpu-layers": gpu_layers or None})
    if not urls or tokenizer is None:
        raise BadInput(f"--engine {engine} needs --url and --tokenizer")
    return tokenizer


def _refuse(engine: str, **given: object) -> None:
    """Raises BadInput on an option that says nothing to this kind of engine."""
    for name, value in given.items():
        if value is not None:
            raise BadInput(f"{name} does not go with --engine {engine}")


def engine_key(variable: str | None, option: str = "--engine-key-env") -> str | None:
    """The key in the environment variable of that name. Raises BadInput if it isn't set."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise BadInput(f"{option} names {variable}, which is not set")
    return key
