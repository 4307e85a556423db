"""The door of a cloud: who comes in, and what plain HTTP is answered.

WebSockets and plain HTTP share the port. A handshake needs a key where keys are on; the client it
belongs to goes to `Service.serve` with the connection, and when the key is revoked the connection
is closed. Beside that there are three pages:

    /healthz   200 while the process lives; always open
    /readyz    200 while requests are taken, 503 while draining or the engine fails; always open
    /metrics   what the cloud counts, for Prometheus; needs a key where keys are on
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from websockets.asyncio.server import ServerConnection
from websockets.frames import CloseCode
from websockets.http11 import Request, Response
from websockets.protocol import CONNECTING, OPEN

from e2sci.runtime.admission import Client
from e2sci.runtime.service import Service
from e2sci.runtime.transport import WebSocketChannel
from e2sci.server.keys import Keys

log = logging.getLogger("e2sci.door")

CONNECTIONS = 512
"""WebSockets at once; the next one is answered 503."""
PASSERS_BY = 128
"""TCP connections beyond these, for handshakes and pages; the next one is dropped."""
REVOKED_SECONDS = 2.0
"""How often open connections are held against the keys."""


class Socket(ServerConnection):
    """A TCP connection, from its beginning to its end. `client`: whose key was presented."""

    def __init__(self, door: Door, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.client: Client | None = None
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._door.sockets.add(self)
        if len(self._door.sockets) > self._door.connections + PASSERS_BY:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._door.sockets.discard(self)
        self._door.inside.discard(self)


class Door:
    """`cloud` behind its port. `keys`: None lets everyone in; `connections`: WebSockets at once."""

    def __init__(self, cloud: Service, keys: Keys | None, connections: int = CONNECTIONS) -> None:
        self.connections = connections
        self.sockets: set[Socket] = set()
        self.inside: set[Socket] = set()
        self._cloud = cloud
        self._keys = keys

    def socket(self, *args: Any, **kwargs: Any) -> Socket:
        """What the server makes of each TCP connection."""
        return Socket(self, *args, **kwargs)

    def answer(self, socket: ServerConnection, request: Request) -> Response | None:
        """The answer to an HTTP request; None lets a WebSocket in."""
        assert isinstance(socket, Socket)
        if request.headers.get_all("Upgrade"):
            return self._let_in(socket, request)
        if request.method not in ("GET", "HEAD"):
            response = _refusal(socket, HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
            response.headers["Allow"] = "GET, HEAD"
            return response
        response = self._page(socket, request)
        if request.method == "HEAD":
            response.body = b""
        return response

    async def serve(self, socket: ServerConnection) -> None:
        """A WebSocket that was let in, until it ends."""
        assert isinstance(socket, Socket)
        await self._cloud.serve(WebSocketChannel(socket), socket.client)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Close the connections of revoked keys meanwhile; at the end, those not let in yet."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            for socket in self.sockets:
                if socket.protocol.state is CONNECTING:
                    socket.transport.abort()

    # ---- WebSockets -----------------------------------------------------------------------

    def _let_in(self, socket: Socket, request: Request) -> Response | None:
        if not self._has_key(socket, request):
            return self._unauthorized(socket)
        if len(self.inside) >= self.connections:
            self._cloud.metrics.errors.labels("full").inc()
            words = f"all {self.connections} connections are taken; try again, or another cloud"
            response = _refusal(socket, HTTPStatus.SERVICE_UNAVAILABLE, words)
            response.headers["Retry-After"] = "1"
            return response
        self.inside.add(socket)
        return None

    def _has_key(self, socket: Socket, request: Request) -> bool:
        if self._keys is None:
            return True
        given = request.headers.get_all("Authorization")
        scheme, _, presented = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() == "bearer":
            socket.client = self._keys.find(presented.strip())
        return socket.client is not None

    def _unauthorized(self, socket: Socket) -> Response:
        log.info("refused: no key in force", extra={"peer": socket.remote_address})
        self._cloud.metrics.errors.labels("unauthorized").inc()
        words = "this cloud needs a key that is in force, as Authorization: Bearer e2sci_…"
        response = _refusal(socket, HTTPStatus.UNAUTHORIZED, words)
        response.headers["WWW-Authenticate"] = 'Bearer realm="e2sci"'
        return response

    async def _watch(self) -> None:
        closing: set[asyncio.Task[None]] = set()
        while self._keys is not None:
            await asyncio.sleep(REVOKED_SECONDS)
            for socket in self.inside:
                client = socket.client
                if client and socket.protocol.state is OPEN and not self._keys.holds(client):
                    log.info("closed: its key is revoked", extra={"client": client.name})
                    close = socket.close(CloseCode.POLICY_VIOLATION, "its key is revoked")
                    closing.add(task := asyncio.create_task(close))
                    task.add_done_callback(closing.discard)

    # ---- pages ----------------------------------------------------------------------------

    def _page(self, socket: Socket, request: Request) -> Response:
        match request.path.partition("?")[0]:
            case "/healthz":
                return socket.respond(HTTPStatus.OK, "ok\n")
            case "/readyz":
                reason = self._not_ready()
                status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
                return socket.respond(status, f"{reason or 'ready'}\n")
            case "/metrics":
                if not self._has_key(socket, request):
                    return self._unauthorized(socket)
                text = generate_latest(self._cloud.metrics.registry).decode()
                return _typed(socket.respond(HTTPStatus.OK, text), CONTENT_TYPE_LATEST)
            case "/":
                words = "a cloud speaks WebSocket; `e2sci run --cloud` connects to it"
                response = _refusal(socket, HTTPStatus.UPGRADE_REQUIRED, words)
                response.headers["Upgrade"] = "websocket"
                return response
            case _:
                words = "no such page; there are /healthz, /readyz and /metrics"
                return _refusal(socket, HTTPStatus.NOT_FOUND, words)

    def _not_ready(self) -> str:
        """Why no request is taken; empty if they are."""
        if self._cloud.draining:
            return "draining"
        return "the engine fails" if self._cloud.failing else ""


def _refusal(socket: Socket, status: HTTPStatus, words: str) -> Response:
    """One JSON line."""
    code = status.phrase.lower().replace(" ", "_")
    line = json.dumps({"error": code, "message": words}, ensure_ascii=False)
    return _typed(socket.respond(status, line + "\n"), "application/json")


def _typed(response: Response, kind: str) -> Response:
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = kind
    return response
