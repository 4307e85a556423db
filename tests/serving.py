"""An edge on a real port for OpenAI's clients, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import openai
import pytest

from e2sci.runtime.edge import Edge
from e2sci.server.edge_app import edge_app
from e2sci.server.edge_port import listening
from live import HOST, cached, draft

NAME = "synthetic"
HELLO = [{"role": "user", "content": "hello"}]


def bound():
    """A socket on any free port, as the command makes one."""
    made = socket.socket()
    made.bind((HOST, 0))
    return made


class LiveEdge:
    """with LiveEdge(cloud) as edge: … edge.openai().chat.completions.create(…)

    `cloud`: a LiveCloud, a URL or None; `patience`, `keep_caches`: of the edge; `app`: what else
    `edge_app` takes.
    """

    def __init__(self, cloud, engine=None, *, patience=15.0, keep_caches=False, **app) -> None:
        self.cloud, self.engine, self.app = cloud, engine or draft(), app
        self.options = {"patience": patience, "keep_caches": keep_caches}

    def __enter__(self) -> LiveEdge:
        up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(up.set)), daemon=True)
        self._thread.start()
        assert up.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    async def _main(self, ready) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        url = getattr(self.cloud, "url", self.cloud)
        bound_to = bound()
        self.at = f"{HOST}:{bound_to.getsockname()[1]}"
        async with (
            Edge(url, self.engine, **self.options) as self.edge,
            listening(edge_app(self.edge, **self.app), bound_to) as self.port,
        ):
            ready()
            await self._stop.wait()

    @property
    def url(self) -> str:
        return f"http://{self.at}/v1"

    @property
    def free(self) -> bool:
        """Whether no generation holds anything here, but for caches that are kept."""
        free = self.edge._free
        return len(free) == self.engine.slots and cached(self.engine) == free.tokens

    def idle(self) -> None:
        """Wait until nothing is held here, and at the cloud if it is a LiveCloud."""
        for _ in range(2500):
            if self.free:
                break
            time.sleep(0.004)
        assert self.free
        if hasattr(self.cloud, "idle"):
            self.cloud.idle()

    def openai(self, **more) -> openai.OpenAI:
        http = httpx.Client(trust_env=False)
        return openai.OpenAI(**self._client(http, more))

    def async_openai(self, **more) -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(trust_env=False)
        return openai.AsyncOpenAI(**self._client(http, more))

    def _client(self, http, more):
        usual = {"base_url": self.url, "api_key": "none", "max_retries": 0, "timeout": 60}
        return {**usual, "http_client": http, **more}

    def post(self, path="/chat/completions", body=None, **options) -> httpx.Response:
        """A raw POST. `body`: bytes, or what becomes JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with httpx.Client(trust_env=False, timeout=60) as http:
            return http.post(self.url + path, content=data, **options)

    def get(self, path, **options) -> httpx.Response:
        with httpx.Client(trust_env=False, timeout=60) as http:
            return http.get(f"http://{self.at}{path}", **options)


def chat(edge, content="hello", **options):
    """One chat by OpenAI's client; `options` of its own."""
    with edge.openai() as client:
        messages = [{"role": "user", "content": content}]
        return client.chat.completions.create(model=NAME, messages=messages, **options)


def streamed(edge, content="hello", **options):
    """The chunks of one chat."""
    with edge.openai() as client:
        messages = [{"role": "user", "content": content}]
        stream = client.chat.completions.create(
            model=NAME, messages=messages, stream=True, **options
        )
        return list(stream)


def text_of(chunks, index=0):
    """The text of one choice of a stream."""
    choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
    if chunks[0].object == "text_completion":
        return "".join(c.text for c in choices)
    return "".join(c.delta.content or "" for c in choices)


@contextmanager
def refused(kind, *words, **fields):
    """The OpenAI client raises `kind`, its message has these words and its body these fields."""
    with pytest.raises(openai.APIStatusError) as caught:
        yield
    error = caught.value
    assert type(error) is kind, error
    assert set(error.body) == {"message", "type", "param", "code"}
    for word in words:
        assert word in error.body["message"], error.body
    assert {name: error.body[name] for name in fields} == fields


def failed(response, status, *words, **fields):
    """OpenAI's shape, with these words and fields."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.headers["x-request-id"]) == 32
    [(name, error)] = response.json().items()
    assert name == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    for word in words:
        assert word in error["message"], error
    assert {name: error[name] for name in fields} == fields
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    assert error["type"] == ("server_error" if status >= 500 else kind)
    return error
