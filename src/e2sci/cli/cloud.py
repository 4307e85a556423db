"""`e2sci cloud`: the target model on a port."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from e2sci.cli.common import (
    Address,
    BadInput,
    cannot_listen,
    drain_option,
    friendly,
    listen_option,
    log_option,
    refuse_remote,
)
from e2sci.cli.keys import keys_option
from e2sci.cli.target import NATIVE, NATIVE_SLOTS, servers, target, target_options
from e2sci.decoding.credit import Credit
from e2sci.decoding.predictor import NetworkPredictor
from e2sci.runtime.admission import Limits
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.service import Service
from e2sci.server import logs
from e2sci.server.cloud_app import listening, tls_context, until_signalled
from e2sci.server.door import CONNECTIONS
from e2sci.server.keys import Keys
from e2sci.server.tracing import tracing
from e2sci.session.cloud import CloudSession

log = logging.getLogger("e2sci.cloud")

_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@target_options
@listen_option("127.0.0.1:7071")
@keys_option
@click.option("--tls-cert", type=_file, help="Serve wss:// with this certificate (PEM, chain).")
@click.option("--tls-key", type=_file, help="Its private key (PEM, without a password).")
@click.option(
    "--insecure",
    is_flag=True,
    help="Let --listen take other than loopback without keys or TLS.",
)
@click.option(
    "--waiting",
    type=click.IntRange(0, 1 << 16),
    default=Limits.waiting,
    show_default=True,
    help="Requests that may stand in line for a place.",
)
@click.option(
    "--connections",
    type=click.IntRange(1, 1 << 16),
    default=CONNECTIONS,
    show_default=True,
    help="Edges connected at once.",
)
@drain_option
@click.option(
    "--keep-caches/--no-keep-caches",
    default=True,
    show_default=True,
    help="Keep what a request has read until its place is needed: the same client's next turn of a "
    "conversation reads only what is new.",
)
@click.option(
    "--calibration",
    type=_file,
    help="Take the predictor for elastic thresholds from a file of `e2sci calibrate`.",
)
@click.option("--predictor", type=_file, help="The same from an .npz file.")
@log_option
@click.option(
    "--otel",
    is_flag=True,
    help="Trace requests with OpenTelemetry, to where OTEL_EXPORTER_OTLP_ENDPOINT says.",
)
@click.option("--verbose", is_flag=True, help="Log connections, requests and refusals.")
def cloud(
    listen: Address,
    keys_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    insecure: bool,
    waiting: int,
    connections: int,
    drain: float,
    keep_caches: bool,
    calibration: Path | None,
    predictor: Path | None,
    log_format: logs.Format,
    otel: bool,
    verbose: bool,
    **model: Any,
) -> None:
    """Serve the target model to edges.

    It measures its own pass times at start, says where it listens, and runs until Ctrl-C or
    SIGTERM. Then it takes no new request and lets those under way end; a second signal ends it at
    once. Other machines are let in only with keys and TLS, unless you say --insecure.

    \b
    e2sci cloud
    e2sci cloud --model my-model.gguf --gpu-layers -1 --slots 16
    e2sci cloud --listen 0.0.0.0:7071 --keys --tls-cert cert.pem --tls-key key.pem --log json
    e2sci cloud --engine vllm --url http://127.0.0.1:8000 --tokenizer Qwen/Qwen2.5-7B --slots 32
    e2sci cloud --engine vllm-native --url http://127.0.0.1:8000 --tokenizer Qwen/Qwen2.5-7B
    """
    wanted = {"--keys": keys_file, "--tls-cert": tls_cert}
    if missing := [name for name, given in wanted.items() if given is None]:
        refuse_remote(listen, "--insecure", insecure, missing)
    with friendly():
        keys = Keys.load(keys_file) if keys_file else None
        tls = _tls(tls_cert, tls_key)
        credit = partial(Credit, predictor=_predictor(calibration, predictor))
    _require_free(listen)
    as_json = log_format == "json"
    logs.set_up(log_format, logging.INFO if verbose or as_json else logging.WARNING)
    if missing and not listen.loopback:
        log.warning("open to other machines without %s", " and ".join(missing))
    with ExitStack() as stack, suppress(KeyboardInterrupt):
        make: Callable[..., Service]
        if model["engine"] == NATIVE:
            name, make = _native(model, calibration or predictor)
        else:
            engine = target(**model)
            stack.callback(engine.close)
            session = partial(CloudSession, credit=credit)
            name = engine.info.name
            make = partial(Cloud, engine, session=session, keep_caches=keep_caches)
        with friendly():
            traces = stack.enter_context(tracing(name)) if otel else None
            served = make(limits=Limits(waiting=waiting), on_end=traces)
        announce = _log_start if as_json else _echo_start
        where = partial(listening, keys=keys, tls=tls, connections=connections)
        scheme = "wss" if tls else "ws"
        asyncio.run(
            _run(served, listen, where, drain, lambda at: announce(served, f"{scheme}://{at}"))
        )


def _native(model: dict[str, Any], file: Path | None) -> tuple[str, Callable[..., Service]]:
    """The name of the model behind a gateway, and what makes the gateway. Raises BadInput."""
    if file is not None:
        raise BadInput(f"vLLM tolerates nothing by itself, so {file} has no use: drop it")
    slots = model.pop("slots") or NATIVE_SLOTS
    found = servers(**model)
    from e2sci.runtime.gateway import Gateway  # only here: an extra

    return found.info.name, partial(Gateway, found, slots=slots)


def _tls(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if (cert is None) != (key is None):
        raise BadInput("--tls-cert and --tls-key go together")
    return tls_context(cert, key) if cert and key else None


def _predictor(calibration: Path | None, file: Path | None) -> NetworkPredictor | None:
    """The predictor of whichever is given. Raises ValueError."""
    if calibration is None:
        return NetworkPredictor.load(file) if file else None
    if file is not None:
        raise BadInput("--calibration has a predictor of its own; drop --predictor")
    from e2sci.evaluation.calibration import Calibration  # only here: not light

    network = Calibration.load(calibration).network()
    if network is None:
        raise BadInput(
            f"{calibration} has no predictor, since none proved better than going without; "
            "drop --calibration"
        )
    return network


def _require_free(listen: Address) -> None:
    """Tell of a taken port now and not after the model is loaded. Raises BadInput."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        socket.create_server(listen, family=family).close()
    except OSError as error:
        raise cannot_listen(listen, error) from None


async def _run(
    cloud: Service,
    listen: Address,
    serve: Callable[[Service, str, int], AbstractAsyncContextManager[int]],
    drain: float,
    announce: Callable[[Address], None],
) -> None:
    async with AsyncExitStack() as stack:
        with friendly():
            await stack.enter_async_context(cloud)
        try:
            port = await stack.enter_async_context(serve(cloud, *listen))
        except OSError as error:
            raise cannot_listen(listen, error) from None
        announce(Address(listen.host, port))
        await until_signalled(cloud, drain)


def _echo_start(cloud: Service, url: str) -> None:
    assert cloud.times is not None
    times = ", ".join(f"{n}: {ms:.0f}" for n, ms in cloud.times.points)
    click.echo(f"pass times in ms by tokens — {times}", err=True)
    click.echo(f"{cloud.info.name} listens on {url}; Ctrl-C ends it", err=True)


def _log_start(cloud: Service, url: str) -> None:
    assert cloud.times is not None
    model, times = cloud.info.name, cloud.times.points
    log.info("listening", extra={"url": url, "model": model, "pass_ms": times})
