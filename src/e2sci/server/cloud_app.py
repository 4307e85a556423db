"""The cloud on a port: a WebSocket server around `runtime.service`, with `door` in front.

`listening` serves; `until_signalled` says for how long: a first signal drains the cloud, a second
one ends it. Leaving `listening` closes what is open with code 1001, which sends edges elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from websockets.asyncio.server import Server, serve

from e2sci.runtime.service import Service
from e2sci.runtime.transport import OPEN_SECONDS
from e2sci.server.door import CONNECTIONS, Door
from e2sci.server.keys import Keys
from e2sci.server.signals import signals
from e2sci.session.messages import MAX_FRAME

log = logging.getLogger("e2sci.cloud")

# The library's own log of each connection: below this level it tells headers, keys among them.
_wire = logging.getLogger("e2sci.wire")
_wire.setLevel(logging.ERROR)


@asynccontextmanager
async def listening(
    cloud: Service,
    host: str,
    port: int,
    *,
    keys: Keys | None = None,
    tls: ssl.SSLContext | None = None,
    connections: int = CONNECTIONS,
) -> AsyncIterator[int]:
    """Serve `cloud` (entered already) on host:port; yields the port. Raises OSError.

    `keys`: who is let in, None: everyone; `tls`: from `tls_context`; `connections`: WebSockets at
    once. A handshake, that of TLS as well, may take OPEN_SECONDS.
    """
    door = Door(cloud, keys, connections)
    server: Server = await serve(
        door.serve,
        host,
        port,
        ssl=tls,
        process_request=door.answer,
        create_connection=door.socket,  # type: ignore[arg-type]  # "a wrapper or a subclass"
        compression=None,
        max_size=MAX_FRAME,
        open_timeout=OPEN_SECONDS,
        close_timeout=1,
        server_header=None,
        logger=_wire,
    )
    async with server, door.watched():
        yield server.sockets[0].getsockname()[1]


def tls_context(cert: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 or newer with a certificate (its chain behind it) and its key, both PEM. Raises
    ValueError."""

    def no_password() -> str:
        raise ValueError(f"the key {key} is encrypted; give one without a password")

    for path in (cert, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ValueError(f"can't read {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"the key {key} is not that of the certificate {cert}") from None
        raise ValueError(f"{cert} and {key} are no certificate and key in PEM form") from None
    return context


async def until_signalled(cloud: Service, drain_s: float) -> None:
    """Return behind SIGINT or SIGTERM: once the requests under way have ended, `drain_s` seconds
    are over, or a second signal comes."""
    first, second = signals()
    await first.wait()
    if drain_s and not cloud.desk.empty.is_set():
        log.warning("draining, for %g s at most; a second signal ends it at once", drain_s)
    drained = asyncio.create_task(cloud.drain(drain_s))
    ended = asyncio.create_task(second.wait())
    await asyncio.wait((drained, ended), return_when=asyncio.FIRST_COMPLETED)
    for task in (drained, ended):
        task.cancel()
