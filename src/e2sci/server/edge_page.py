"""The page at an edge's root: files of this package, and the chart library's own bundle.

    GET /              the page
    GET /page/FILE     what it is made of

The files are named here when the server starts, and nothing else is ever served. They hold nothing
of anybody's, so they need no key; what the page then asks for does. Browsers keep them, but ask
each time whether they still hold; the bundle, which is large, is kept for a week unasked.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import plotly
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

SEND_SECONDS = 60.0
"""How long a file may take to go."""
BUNDLE = "plotly.min.js"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_WEEK = 7 * 24 * 3600
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_routes() -> list[Route]:
    """The page at the root, and its files."""
    served = {path.name: Asset.of(path) for path in _paths()}

    async def page(request: Request) -> Response:
        name = request.path_params.get("file", "index.html")
        if name not in served:
            raise HTTPException(404)
        return served[name].response(request)

    return [Route("/", page), Route("/page/{file}", page)]


def _paths() -> list[Path]:
    own = Path(__file__).with_name("page")
    bundle = Path(plotly.__file__).with_name("package_data") / BUNDLE
    return [*sorted(path for path in own.iterdir() if path.suffix in _KINDS), bundle]


@dataclass(frozen=True)
class Asset:
    """A file that is served; `tag` changes when it does."""

    path: Path
    tag: str

    @classmethod
    def of(cls, path: Path) -> Asset:
        return cls(path, f'"{sha256(path.read_bytes()).hexdigest()[:24]}"')

    def response(self, request: Request) -> Response:
        """The file, or that what the browser has is still right."""
        keep = f"max-age={_WEEK}" if self.path.name == BUNDLE else "no-cache"
        headers = {**_SAFE, "ETag": self.tag, "Cache-Control": keep}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Timed(self.path, headers=headers, media_type=_KINDS[self.path.suffix])


class Timed(FileResponse):
    """A file whose reader is not waited for without end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SEND_SECONDS):
                await super().__call__(scope, receive, send)
