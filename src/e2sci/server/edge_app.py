"""The edge for OpenAI's clients: an ASGI application around `runtime.edge`.

    POST /v1/chat/completions    a chat, whole or streamed
    POST /v1/completions         a text to go on with, likewise
    GET  /v1/models              the one model there is
    GET  /                       the page (`edge_page`), and its files under /page
    GET  /e2sci/info             what it shows and offers (`edge_info`)
    GET  /healthz                200 while the process lives; always open

A request comes through `edge_front`, is turned into options (`openai_requests`), generated here,
and told (`openai_answers`) in OpenAI's shapes (`openai_shapes`, `openai_errors`). When a client
goes away, its generation is ended at both ends at once. `edge_port` puts it all on a port.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from e2sci.runtime.admission import Client, Ledger
from e2sci.runtime.connection import EdgeError
from e2sci.runtime.edge import Edge, options_from
from e2sci.runtime.options import Options
from e2sci.runtime.text import Prompt, prompt_ids
from e2sci.runtime.worker import now
from e2sci.server.edge_front import Front, body_of
from e2sci.server.edge_info import info
from e2sci.server.edge_page import page_routes
from e2sci.server.keys import Keys
from e2sci.server.openai_answers import (
    Answer,
    ClientGone,
    Events,
    Streamed,
    Whole,
    Writer,
    while_there,
)
from e2sci.server.openai_errors import Failure, failure_of
from e2sci.server.openai_requests import (
    DEFAULTS,
    REQUESTS,
    Ask,
    ChatRequest,
    TextRequest,
    read,
)
from e2sci.server.openai_shapes import Choice, Shapes, encode

log = logging.getLogger("e2sci.serve")

Tune = Callable[[Options, str], Options]


def edge_app(
    edge: Edge,
    *,
    name: str | None = None,
    defaults: Options = DEFAULTS,
    tune: Tune | None = None,
    keys: Keys | None = None,
    origins: Sequence[str] = (),
    requests: int = REQUESTS,
    page: bool = True,
) -> ASGIApp:
    """`edge` (entered by whoever runs this) for OpenAI's clients.

    `name`: of the model, that of the cloud's by default; `defaults`: what requests don't name;
    `tune`: what to make of elastic options, with the cloud's model, before they are used; `keys`:
    who is let in, None: everyone; `origins`: web pages that may call, "*" for all; `requests`: how
    many at once; `page`: whether there is one at the root.
    """
    service = Service(edge, name, defaults, tune, requests)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=["x-request-id", "retry-after"],
    )
    front = Middleware(Front, keys=keys, origins=origins, page=page)
    return Starlette(
        routes=[
            Route("/healthz", _healthz),
            *(page_routes() if page else ()),
            Route("/e2sci/info", service.info),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/v1/chat/completions", Completions(service, ChatRequest), methods=["POST"]),
            Route("/v1/completions", Completions(service, TextRequest), methods=["POST"]),
        ],
        middleware=[cors, front] if origins else [front],
        exception_handlers={HTTPException: _no_page, Failure: _told, EdgeError: _told},
    )


class Service:
    """What the routes share: the edge, the model's name, and who has what under way."""

    def __init__(
        self, edge: Edge, name: str | None, defaults: Options, tune: Tune | None, requests: int
    ) -> None:
        self.edge = edge
        self.defaults = defaults
        self.open = 0
        self._name = name
        self._tune = tune
        self._requests = requests
        self._since = int(time.time())
        self._ledger = Ledger(now)

    async def name(self) -> str:
        """The model's. Raises EdgeError while only an absent cloud knows it."""
        return self._name or await self._cloud_model()

    async def require(self, wanted: str | None) -> str:
        """The model's name, if that or none is wanted. Raises Failure, EdgeError."""
        name = await self.name()
        if wanted not in (None, name):
            words = f"there is no model {wanted[:100]!r} here; there is {name!r}"
            raise Failure(404, words, code="model_not_found", param="model")
        return name

    async def tuned(self, options: Options) -> Options:
        """Raises ValueError, EdgeError."""
        if self._tune is None or options.accept != "elastic":
            return options
        return self._tune(options, await self._cloud_model())

    async def _cloud_model(self) -> str:
        try:
            return self.edge.cloud_model
        except ValueError:  # not connected yet
            await self.edge.connect()
            return self.edge.cloud_model

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model(await self.name())]})

    async def model(self, request: Request) -> Response:
        return _json(self._model(await self.require(request.path_params["name"])))

    async def info(self, request: Request) -> Response:
        return _json(await info(self.edge, self._name, self.defaults))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._since, "owned_by": "e2sci"}

    @contextmanager
    def place(self, client: Client, answer: Answer) -> Iterator[None]:
        """A place for one request; its tokens are charged to the client. Raises Failure, or
        ProtocolError("limited")."""
        if self.open >= self._requests:
            raise Failure(429, f"{self._requests} requests are under way; try again", code="busy")
        self._ledger.enter(client)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1
            self._ledger.leave(client)
            self._ledger.charge(client, answer.usage["total_tokens"])


class Completions:
    """One of the two routes that write; `kind` says which."""

    def __init__(self, service: Service, kind: type[ChatRequest] | type[TextRequest]) -> None:
        self._service = service
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, events = Request(scope, receive), Events(send)
        try:
            ask = read(await body_of(request), self._kind, self._service.defaults)
            await while_there(receive, self._serve(ask, request, events))
        except (ClientGone, ClientDisconnect):
            log.info("client gone", extra={"request": request.state.id})
        except asyncio.CancelledError:  # only the port's end cancels, and it waits for us
            await events.fail(Failure(503, "this server is stopping", code="stopping"), scope)
        except Exception as error:
            await events.fail(failure_of(error), scope)

    async def _serve(self, ask: Ask, request: Request, events: Events) -> None:
        client: Client = request.state.client
        name = await self._service.require(ask.model)
        answer = self._answer(ask, request.state.id, name)
        writer = Streamed(events, answer) if ask.stream else Whole(events, answer)
        limit = _limit(client, ask.options.max_tokens, max(map(len, answer.prompts)))
        own = {"request_id": request.state.id, "max_tokens": limit}
        options = options_from(await self._service.tuned(ask.options), own)
        began = now()
        with self._service.place(client, answer):
            await self._write(answer, options, writer)
            await writer.end()
        figures = {"client": client.name, "seconds": round(now() - began, 3), **answer.usage}
        log.info("request ended", extra={"request": request.state.id, **figures})

    def _answer(self, ask: Ask, id: str, name: str) -> Answer:
        """Raises ValueError on a prompt that is none."""
        engine, top = self._service.edge.engine, ask.options.logprobs
        prompts = [
            prompt_ids(engine, prompt, system=None, raw=not ask.chat, special=True)
            for prompt in ask.prompts
        ]
        starts = [] if ask.chat else [self._characters(prompt) for prompt in ask.prompts]
        shapes = Shapes(id, name, ask.chat, engine.tokenizer, top or 0, starts)
        wanted = {"scored": top is not None, "traced": ask.options.tale}
        choices = [
            Choice(i, i // ask.n, ask.seed(i % ask.n), engine.tokenizer, **wanted)
            for i in range(len(prompts) * ask.n)
        ]
        return Answer(ask, shapes, prompts, choices)

    def _characters(self, prompt: Prompt) -> int:
        """How long a prompt is, as a text."""
        if isinstance(prompt, str):
            return len(prompt)
        piece = self._service.edge.engine.tokenizer.piece
        pieces = [piece(token) for token in prompt if isinstance(token, int)]
        return len(b"".join(pieces).decode(errors="replace"))

    async def _write(self, answer: Answer, options: Options, writer: Writer) -> None:
        """All texts side by side, as far as the draft model has room for them."""

        async def write(choice: Choice) -> None:
            own = options_from(options, {"seed": choice.seed})
            stream = self._service.edge.stream(answer.prompts[choice.prompt], **vars(own))
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    await writer.hear(choice, piece)

        try:
            async with asyncio.TaskGroup() as group:
                for choice in answer.choices:
                    group.create_task(write(choice))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


def _limit(client: Client, wanted: int, prompt: int) -> int:
    """Tokens a text may get behind `prompt` ones, by the client's key. Raises ValueError."""
    if client.context is None:
        return wanted
    if prompt >= client.context:
        raise ValueError(
            f"the prompt has {prompt} tokens; a text of {client.name} may have {client.context}, "
            "its answer included: shorten it"
        )
    return min(wanted, client.context - prompt)


def _json(data: dict[str, Any]) -> Response:
    return Response(encode(data), media_type="application/json")


async def _healthz(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _told(request: Request, error: Exception) -> Response:
    return failure_of(error).response()


async def _no_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    message = {
        404: "no such page; there are /v1/chat/completions, /v1/completions, /v1/models, "
        "/e2sci/info, /healthz",
        405: f"this page takes {headers.get('Allow')} only",
    }.get(error.status_code, error.detail)
    return Failure(error.status_code, message, headers=headers).response()
