"""What went wrong, as OpenAI's clients read it: a status, a message, its type, param and code.

`failure_of` finds both for any exception. Messages are the one-line ones that the command line
shows; of what nobody foresaw, only that it happened is told, and the log has the rest.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from e2sci.runtime.connection import CloudUnreachable, EdgeError, Refused
from e2sci.runtime.request import CloudLost
from e2sci.server.openai_requests import field_of
from e2sci.server.openai_shapes import encode
from e2sci.session.messages import ProtocolError

log = logging.getLogger("e2sci.serve")

_BY_CODE = {
    **dict.fromkeys(("busy", "limited"), 429),
    **dict.fromkeys(("empty_prompt", "too_long", "unsupported", "bad_token"), 400),
    **dict.fromkeys(("draining", "unreachable", "unauthorized", "certificate"), 503),
    **dict.fromkeys(("version", "tokenizer", "model"), 503),
}
"""The cloud's refusals by their code (docs/protocol.md). Others are faults: 500."""


class Failure(Exception):
    """An answer other than 200. `retry_after`: seconds, 0 for none; `headers`: further ones."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float = 0.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if status == 429:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    @property
    def body(self) -> dict[str, Any]:
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return Response(encode(self.body), self.status, self.headers, "application/json")


def failure_of(error: Exception) -> Failure:
    """What a client is told of `error`."""
    match error:
        case Failure():
            return error
        case HTTPException():
            return Failure(error.status_code, error.detail, headers=dict(error.headers or {}))
        case Refused() | ProtocolError():
            status = _BY_CODE.get(error.code, 500)
            return Failure(status, str(error), code=error.code, retry_after=error.retry_after_s)
        case CloudUnreachable():
            return Failure(503, str(error), code="cloud_unreachable")
        case CloudLost():
            return Failure(503, str(error), code="cloud_lost")
        case EdgeError():
            return Failure(500, str(error), code="edge_error")
        case ValueError():
            return Failure(400, str(error), param=field_of(str(error)))
    log.error("a request failed", exc_info=error)
    return Failure(500, "an error that nobody foresaw; the log has it", code="internal_error")
