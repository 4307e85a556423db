"""`e2sci cloud`: the target model on a port."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import click
from rich.logging import RichHandler

from e2sci.cli.common import (
    Address,
    BadInput,
    friendly,
    listen_options,
    load,
    model_options,
    refuse_remote,
    stderr,
)
from e2sci.decoding.credit import Credit
from e2sci.decoding.predictor import NetworkPredictor
from e2sci.engines.base import Engine
from e2sci.engines.load import DEFAULT
from e2sci.runtime.cloud import Cloud
from e2sci.server.cloud_app import listening, until_signalled
from e2sci.session.cloud import CloudSession


@click.command()
@click.option("--model", default=DEFAULT, show_default=True, help="The target model.")
@listen_options("127.0.0.1:7071")
@click.option(
    "--slots",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    help="Requests at once; each has a context of its own.",
)
@click.option(
    "--predictor",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A calibrated predictor (.npz) for elastic thresholds.",
)
@click.option("--verbose", is_flag=True, help="Log connections and refusals.")
@model_options(4096)
def cloud(
    model: str,
    listen: Address,
    slots: int,
    predictor: Path | None,
    allow_remote: bool,
    verbose: bool,
    context: int,
    threads: int | None,
    gpu_layers: int,
) -> None:
    """Serve the target model to edges.

    It measures its own pass times at start, says where it listens, and runs until Ctrl-C or
    SIGTERM. There is no authentication yet: keep it on loopback, or behind a tunnel.

    \b
    e2sci cloud
    e2sci cloud --model my-model.gguf --gpu-layers -1 --slots 16
    """
    refuse_remote(listen, allow_remote)
    _require_free(listen)
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[RichHandler(console=stderr)])
    logging.getLogger("websockets").setLevel(logging.ERROR)
    engine = load(
        model, "target", context=context, threads=threads, gpu_layers=gpu_layers, slots=slots
    )
    try:
        with friendly():
            network = NetworkPredictor.load(predictor) if predictor else None
            credit = partial(Credit, predictor=network)
            served = Cloud(engine, session=partial(CloudSession, credit=credit))
        asyncio.run(_run(served, engine, listen))
    except KeyboardInterrupt:
        pass
    finally:
        engine.close()


def _require_free(listen: Address) -> None:
    """Tell of a taken port now and not after the model is loaded. Raises BadInput."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        socket.create_server(listen, family=family).close()
    except OSError as error:
        raise _cannot_listen(listen, error) from None


def _cannot_listen(listen: Address, error: OSError) -> BadInput:
    taken = error.errno == errno.EADDRINUSE
    reason = "the port is in use; 0 takes any free one" if taken else error.strerror
    return BadInput(f"can't listen on {listen}: {reason}")


async def _run(cloud: Cloud, engine: Engine, listen: Address) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(cloud)
        try:
            port = await stack.enter_async_context(listening(cloud, *listen))
        except OSError as error:
            raise _cannot_listen(listen, error) from None
        assert cloud.times is not None
        times = ", ".join(f"{n}: {ms:.0f}" for n, ms in cloud.times.points)
        click.echo(f"pass times in ms by tokens — {times}", err=True)
        where = Address(listen.host, port)
        click.echo(f"{engine.info.name} listens on ws://{where}; Ctrl-C ends it", err=True)
        await until_signalled()
