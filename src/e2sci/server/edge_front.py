"""In front of an edge's routes: who is let in, how large a body may be, and each request's id."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from e2sci.runtime.admission import ANYONE, Client
from e2sci.server.keys import Keys
from e2sci.server.openai_errors import Failure

log = logging.getLogger("e2sci.serve")

HEAD_BYTES = 16 << 10
"""Bytes of a request's headers, and of the whole head while it is not complete."""
MAX_BODY = 4 << 20
"""Bytes of a request's body."""
BODY_SECONDS = 30.0
"""How long a body may take to come."""


class Front:
    """Around every route. Leaves `id` and `client` in the request's state.

    `keys`: None lets everyone in; `origins`: web pages that may call, "*" for all; `page`: whether
    one is served here, which may call too.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys | None, origins: Collection[str], page: bool
    ) -> None:
        self._app = app
        self._keys = keys
        self._origins = origins
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = secrets.token_hex(16)

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        try:
            headers = Headers(scope=scope)
            if sum(len(name) + len(value) for name, value in headers.raw) > HEAD_BYTES:
                raise Failure(431, f"the headers are over {HEAD_BYTES} bytes", code="too_large")
            self._require_guest(headers, scope["scheme"])
            client = ANYONE if _is_open(scope["path"]) else self._client(headers)
        except Failure as failure:
            await failure.response()(scope, receive, tagged)
            return
        scope["state"] = {"id": id, "client": client}
        await self._app(scope, receive, tagged)

    def _require_guest(self, headers: Headers, scheme: str) -> None:
        """Raises Failure on a web page that was not invited."""
        origin = headers.get("origin")
        if origin is None or {origin, "*"} & {*self._origins}:
            return
        if not (self._page and _is_own(origin, scheme, headers.get("host", ""))):
            log.info("refused: a web page that was not invited")
            raise Failure(
                403,
                "web pages of this origin are not let in; `e2sci serve --cors ORIGIN` invites "
                "them, and this server's own page works by its IP address or as localhost",
                code="origin_not_allowed",
            )

    def _client(self, headers: Headers) -> Client:
        """Who asks. Raises Failure."""
        if self._keys is None:
            return ANYONE
        given = headers.getlist("authorization")
        scheme, _, presented = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        client = self._keys.find(presented.strip()) if scheme.lower() == "bearer" else None
        if client is None:
            log.info("refused: no key in force")
            raise Failure(
                401,
                "this server needs a key that is in force, as Authorization: Bearer e2sci_…",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Bearer realm="e2sci"'},
            )
        return client


def _is_open(path: str) -> bool:
    """Whether no key is needed: health, and the page's files."""
    return path in ("/healthz", "/") or path.startswith("/page/")


def _is_own(origin: str, scheme: str, host: str) -> bool:
    """Whether `origin` is this server's page: the place that was asked, by its address or as
    localhost. By another name it may be a foreign page that has that name lead here."""
    if origin != f"{scheme}://{host}":
        return False
    with suppress(ValueError):
        name = urlsplit(origin).hostname or ""
        return name == "localhost" or bool(ip_address(name))
    return False


async def body_of(request: Request) -> bytes:
    """A request's body. Raises Failure beyond its bounds, and ClientDisconnect."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    words = f"the body is over {MAX_BODY} bytes; shorten it"
                    raise Failure(413, words, code="too_large")
    except TimeoutError:
        words = f"the body has not come within {BODY_SECONDS:g} s"
        raise Failure(408, words, code="slow", headers={"Connection": "close"}) from None
    return bytes(body)
