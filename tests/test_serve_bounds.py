"""What `e2sci serve` bounds: bodies, heads, connections, requests and clients that never read."""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing

import httpx
import pytest

from e2sci.engines.synthetic import EOS, SyntheticConfig
from live import HOST, LiveCloud, Watched, draft
from serving import HELLO, NAME, LiveEdge, chat, failed

ENDLESS = {"logit_bias": {str(EOS): -100}}
LONG = {"messages": HELLO, "max_tokens": 3000, "seed": 1}


@pytest.fixture(scope="module")
def edge(one_cloud):
    with LiveEdge(one_cloud) as edge:
        yield edge
        edge.idle()
        assert chat(edge, max_tokens=5, extra_body=ENDLESS).usage.completion_tokens == 5


def test_a_body_that_is_too_large(edge):
    content = "x" * (4 << 20)
    failed(edge.post(body={"messages": [{"role": "user", "content": content}]}), 413, "shorten it")

    def endless():
        for _ in range(200):
            yield b" " * 65536

    with httpx.Client(trust_env=False, timeout=60) as http:
        failed(http.post(f"{edge.url}/completions", content=endless()), 413, code="too_large")


def place_of(edge):
    return HOST, int(edge.at.rpartition(":")[2])


def raw(edge, data):
    """All that a raw connection is answered until it is closed. `data`: what it sends; None: behind
    an answer."""
    with closing(socket.create_connection(place_of(edge), timeout=20)) as s:
        said = b""
        for part in data:
            said += s.recv(65536) if part is None else b""
            s.sendall(part or b"")
        try:
            while part := s.recv(65536):
                said += part
        except ConnectionResetError:
            pass
        return said


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def test_a_body_that_is_slow(edge, monkeypatch):
    monkeypatch.setattr("e2sci.server.edge_front.BODY_SECONDS", 0.2)
    monkeypatch.setattr("e2sci.server.edge_port.HEAD_SECONDS", 0.5)
    said = raw(edge, [POST + b"Content-Length: 100\r\n\r\n{"])
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"has not come within 0.2 s" in said


HEALTHZ = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("begun", [[b""], [b"POST /v1/comp"], [POST], [HEALTHZ, None, b"GET /"]])
def test_a_head_that_is_slow(edge, monkeypatch, begun):
    monkeypatch.setattr("e2sci.server.edge_port.HEAD_SECONDS", 0.3)
    said = raw(edge, begun)
    assert said.startswith(b"HTTP/1.1 200") if HEALTHZ in begun else said == b""


def test_a_head_that_is_too_large(edge):
    failed(edge.get("/v1/models", headers={"X": "x" * 17_000}), 431, "16384 bytes")
    many = {f"X-{i}": "x" * 100 for i in range(200)}
    failed(edge.post(body={}, headers=many), 431, code="too_large")


def test_what_is_no_http(edge):
    assert raw(edge, [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"]).startswith(
        b"HTTP/1.1 400 "
    )


def test_connections_are_bounded(edge, monkeypatch):
    monkeypatch.setattr("e2sci.server.edge_port.CONNECTIONS", 4)
    monkeypatch.setattr("e2sci.server.edge_port.HEAD_SECONDS", 60)  # else that would end it too
    held = [socket.create_connection(place_of(edge), timeout=20) for _ in range(4)]
    try:
        assert raw(edge, []) == b""
    finally:
        for s in held:
            s.close()
    for _ in range(500):
        if len(edge.port.server_state.connections) < 2:
            break
        time.sleep(0.01)
    assert edge.get("/healthz").status_code == 200


@pytest.fixture(scope="module")
def slow():
    """An edge whose texts take a minute, with one place for requests."""
    engine = Watched(SyntheticConfig(seed=11, eos_bias=-20.0), slots=4, seconds=0.02)
    with LiveCloud(engine) as cloud, LiveEdge(cloud, requests=1) as edge:
        yield edge


def test_requests_are_bounded(slow):
    with slow.openai() as client:
        with client.chat.completions.create(model=NAME, stream=True, **LONG) as stream:
            next(stream)
            answer = slow.post(body=LONG)
            failed(answer, 429, "1 requests are under way", code="busy")
            assert answer.headers["retry-after"] == "1"
            assert slow.get("/healthz").status_code == 200
            assert slow.get("/v1/models").status_code == 200
        slow.idle()
        for _ in range(500):  # the place is given back behind the texts
            if slow.post(body={**LONG, "max_tokens": 1}).status_code == 200:
                return
            time.sleep(0.01)
        raise AssertionError("the place is not given back")


def test_a_client_that_never_reads_is_left(monkeypatch):
    """Its place is given back once it has left too much unread for too long."""
    monkeypatch.setattr("e2sci.server.openai_answers.SEND_SECONDS", 0.3)
    config = SyntheticConfig(seed=11, eos_bias=-40.0, context=1 << 18)
    with LiveCloud(Watched(config)) as cloud, LiveEdge(cloud, draft(context=1 << 18)) as edge:
        body = {**LONG, "max_tokens": 1 << 18, "stream": True, "n": 8}
        body |= {"logprobs": True, "top_logprobs": 20}
        data = json.dumps(body).encode()
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            s.connect(place_of(edge))
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
            s.sendall(head + str(len(data)).encode() + b"\r\n\r\n" + data)
            s.recv(1)
            for _ in range(6000):
                if edge.free:
                    break
                time.sleep(0.01)
            assert edge.free
            edge.idle()
