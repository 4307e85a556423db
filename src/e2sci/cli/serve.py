"""`e2sci serve`: an edge that OpenAI's clients can talk to."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from e2sci.cli.common import (
    Address,
    BadInput,
    Seconds,
    cannot_listen,
    drain_option,
    friendly,
    listen_option,
    log_option,
    model_options,
    refuse_remote,
)
from e2sci.cli.draft import Draft, draft_options
from e2sci.cli.generation import (
    calibrated,
    cloud_loss_option,
    tuning_options,
    window_options,
)
from e2sci.cli.keys import keys_option
from e2sci.cli.reach import dials, reach_options
from e2sci.runtime.connection import CloudUnreachable
from e2sci.runtime.edge import Edge, options_from
from e2sci.runtime.options import Mode
from e2sci.server import logs
from e2sci.server.keys import Keys
from e2sci.server.openai_requests import DEFAULTS, REQUESTS
from e2sci.server.signals import signals

if TYPE_CHECKING:
    from e2sci.server.edge_port import Port

log = logging.getLogger("e2sci.serve")


def origin(value: str) -> str:
    """What browsers send as the origin of a page; raises BadInput."""
    scheme, _, place = value.partition("://")
    if value in ("*", "null") or (scheme and place and "/" not in place):
        return value
    raise BadInput(f"{value!r} is no origin; expected SCHEME://HOST[:PORT], or * for all pages")


@click.command()
@reach_options
@draft_options
@listen_option("127.0.0.1:8080", "clients")
@keys_option
@click.option(
    "--insecure",
    is_flag=True,
    help="Let --listen take other than loopback: keys and texts travel unencrypted.",
)
@click.option(
    "--cors",
    "origins",
    type=origin,
    multiple=True,
    metavar="ORIGIN",
    help="Let web pages of this origin call, as in http://localhost:3000; may be repeated.",
)
@click.option("--no-page", is_flag=True, help="Serve the API only, without the page at the root.")
@click.option("--name", help="What clients call the model.  [default: the cloud's name for it]")
@click.option(
    "--mode",
    type=click.Choice(get_args(Mode)),
    default=DEFAULTS.mode,
    show_default=True,
    help="How requests are written that don't say; as in `e2sci run`, like the next nine.",
)
@tuning_options
@window_options
@cloud_loss_option
@click.option(
    "--temperature",
    type=float,
    default=DEFAULTS.sampling.temperature,
    show_default=True,
    help="Of requests that name none; 0: greedy.",
)
@click.option(
    "--max-requests",
    "requests",
    type=click.IntRange(1, 1 << 16),
    default=REQUESTS,
    show_default=True,
    help="Requests at once, those that wait for the draft model included.",
)
@click.option(
    "--slots",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    help="Texts that the draft model works on at once; each has a context of its own.",
)
@click.option(
    "--wait",
    type=Seconds(0),
    default=15.0,
    show_default=True,
    help="Seconds to wait for a cloud that is away, lost in mid-answer, or has no place.",
)
@drain_option
@log_option
@click.option("--verbose", is_flag=True, help="Log requests and refusals.")
@model_options(4096)
def serve(
    cloud: tuple[str, ...],
    key_file: Path | None,
    ca: Path | None,
    allow_insecure: bool,
    draft: Draft,
    listen: Address,
    keys_file: Path | None,
    insecure: bool,
    origins: tuple[str, ...],
    no_page: bool,
    name: str | None,
    calibration: Path | None,
    requests: int,
    slots: int,
    wait: float,
    drain: float,
    log_format: logs.Format,
    verbose: bool,
    context: int,
    threads: int | None,
    gpu_layers: int,
    **settings: Any,
) -> None:
    """Serve OpenAI's API on this machine, written by a draft model here and the target at --cloud.

    It runs until Ctrl-C or SIGTERM. Then it takes no new request and lets those under way end; a
    second signal ends it at once. Other machines are let in only with keys.

    \b
    e2sci serve
    e2sci serve --cloud wss://cloud.example.org:7071 --temperature 0
    e2sci serve --listen 0.0.0.0:8080 --keys --insecure --cors http://chat.example.org
    """
    with friendly():
        options = options_from(DEFAULTS, settings)
    alone = options.mode == "draft"
    reached = None if alone else dials(cloud, key_file, ca, allow_insecure)
    with friendly():
        keys = Keys.load(keys_file) if keys_file else None
        if calibration is not None:  # is it there, and this draft's?
            calibrated(replace(DEFAULTS, accept="elastic"), "", draft.name, calibration)
    if keys is None and not listen.loopback:
        raise BadInput(f"--listen {listen} is open to other machines; add --keys, and --insecure")
    refuse_remote(listen, "--insecure", insecure, ["TLS"])
    edge_app, listening = _parts()
    with ExitStack() as stack, suppress(KeyboardInterrupt):
        bound = stack.enter_context(_bound(listen))
        verbose = verbose or log_format == "json"
        logs.set_up(log_format, logging.INFO if verbose else logging.WARNING)
        engine = draft.load(context=context, threads=threads, gpu_layers=gpu_layers, slots=slots)
        stack.callback(engine.close)
        with friendly():
            edge = Edge(reached, engine, patience=wait, keep_caches=keys is None)
            app = edge_app(
                edge,
                name=name or (engine.info.name if alone else None),
                defaults=options,
                tune=partial(calibrated, draft=draft.name, file=calibration),
                keys=keys,
                origins=origins,
                requests=requests,
                page=not no_page,
            )
            at = Address(listen.host, bound.getsockname()[1])
            start = _log_start if log_format == "json" else _echo_start
            announce = partial(start, at, not no_page)
            asyncio.run(_run(edge, alone, partial(listening, app, bound), drain, announce))


def _parts() -> tuple[Any, Any]:
    """What needs the extra. Raises BadInput without it."""
    try:
        from e2sci.server.edge_app import edge_app
        from e2sci.server.edge_port import listening
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        raise BadInput(f'{name} is missing; run: pip install "e2sci[serve]"') from None
    return edge_app, listening


def _bound(listen: Address) -> socket.socket:
    """The port, taken before a model is loaded; nobody can connect yet. Raises BadInput."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(listen)
    except OSError as error:
        made.close()
        raise cannot_listen(listen, error) from None
    return made


async def _run(
    edge: Edge,
    alone: bool,
    listening: Callable[[], AbstractAsyncContextManager[Port]],
    drain: float,
    announce: Callable[[Edge], None],
) -> None:
    async with edge:
        if not alone:
            await _meet(edge)
        async with listening() as port:
            first, second = signals()
            announce(edge)
            await first.wait()
            if drain and port.busy:
                log.warning("draining, for %g s at most; a second signal ends it at once", drain)
            await port.drain(drain, second)


async def _meet(edge: Edge) -> None:
    """Connect, so that a pair that can't work is told of now. A cloud may come later."""
    try:
        for notice in await edge.connect():
            log.warning("%s", notice)
    except CloudUnreachable as error:
        log.warning("%s; requests wait for it", error)


def _echo_start(at: Address, page: bool, edge: Edge) -> None:
    url = f"http://{at}/v1"
    body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    click.echo(f"{edge.engine.info.name} listens on {url}; Ctrl-C ends it", err=True)
    if page:
        click.echo(f"its page: http://{at}/", err=True)
    click.echo(
        f"try: curl {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        err=True,
    )


def _log_start(at: Address, page: bool, edge: Edge) -> None:
    places = {"url": f"http://{at}/v1", **({"page": f"http://{at}/"} if page else {})}
    log.info("listening", extra={**places, "draft": edge.engine.info.name})
