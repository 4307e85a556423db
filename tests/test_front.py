"""The front door: keys, pages and bounds, on real loopback sockets."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import AsyncExitStack

import pytest
import trustme
from websockets.asyncio.client import connect

from doorway import (
    answered,
    client,
    finished,
    front,
    get,
    opening,
    served,
    to_the_end,
    turned_away,
)
from e2sci.engines.synthetic import SyntheticConfig
from e2sci.server import cloud_app, door
from e2sci.server import keys as store
from e2sci.server.keys import Keys
from e2sci.session.messages import MAX_FRAME, Cancel, Opened
from live import HOST, RawClient, Watched, until


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.json"


@pytest.fixture
def alice(path):
    return store.add(path, "alice")


# ---- keys -------------------------------------------------------------------------------------


async def test_who_has_no_key_in_force_is_told_so_in_the_same_words(path, alice):
    _, text = alice
    revoked, old = store.add(path, "bob")
    store.revoke(path, revoked.id)
    wrong = text[:-4] + "beef" if not text.endswith("beef") else text[:-4] + "cafe"
    async with front(keys=Keys.load(path)) as place:
        bodies = set()
        for headers in (
            {},
            {"Authorization": ""},
            {"Authorization": text},
            {"Authorization": f"Basic {text}"},
            {"Authorization": "Bearer"},
            {"Authorization": f"Bearer {wrong}"},
            {"Authorization": f"Bearer {old}"},
            {"Authorization": f"Bearer {text} {text}"},
            [("Authorization", f"Bearer {text}"), ("Authorization", f"Bearer {text}")],
        ):
            response = await turned_away(place, headers)
            assert response.status_code == 401
            assert response.headers["WWW-Authenticate"].startswith("Bearer")
            assert response.headers["Content-Type"] == "application/json"
            bodies.add(bytes(response.body))
        [body] = bodies
        assert json.loads(body)["error"] == "unauthorized"
        assert body.count(b"\n") == 1
        errors = place.cloud.metrics.registry.get_sample_value
        assert errors("e2sci_errors_total", {"code": "unauthorized"}) == 9
        for scheme in ("Bearer", "bearer"):
            async with connect(
                f"ws://{place.at}", additional_headers={"Authorization": f"{scheme} {text}"}
            ) as socket:
                await RawClient(socket).hello()


@pytest.mark.parametrize("allowed", [1, 2])
async def test_sessions_below_at_and_above_the_keys(path, allowed):
    """On one connection or on several: the key counts."""
    _, text = store.add(path, "alice", sessions=allowed)
    engine = Watched(SyntheticConfig(seed=11), seconds=0.002)
    async with (
        front(engine, keys=Keys.load(path)) as place,
        client(place, text) as one,
        client(place, text) as two,
        client(place, text) as three,
    ):
        for number, raw in zip(range(1, allowed + 1), (one, two), strict=False):
            assert isinstance(await answered(raw, opening(number, tokens=3000)), Opened)
        error = await answered(three, opening())
        assert (error.code, error.request, error.retryable) == ("limited", 1, True)
        assert error.retry_after_s > 0
        await one.send(Cancel(request=1))
        assert (await finished(one))[1] == "cancelled"
        assert isinstance(await answered(three, opening(2)), Opened)


async def test_tokens_a_minute_are_paid_behind(path):
    _, text = store.add(path, "alice", tokens_per_minute=60)
    async with front(keys=Keys.load(path)) as place, client(place, text) as raw:
        await raw.send(opening(1, tokens=20))
        assert await finished(raw) == (20, "length")
        await raw.send(opening(2, tokens=60))  # beyond the minute, but it began within it
        assert await finished(raw) == (60, "length")
        error = await answered(raw, opening(3, tokens=1))
        assert (error.code, error.retryable) == ("limited", True)
        assert 0 < error.retry_after_s < 60


@pytest.mark.parametrize(("prompt", "code"), [(8, None), (9, None), (10, "too_long")])
async def test_the_keys_context(path, prompt, code):
    _, text = store.add(path, "alice", context=10)
    async with front(keys=Keys.load(path)) as place, client(place, text) as raw:
        said = await answered(raw, opening(prompt=(104,) * prompt))
        if code:
            assert said.code == code
        else:
            assert said.limit == 10 - prompt


async def test_no_key_reaches_another_ones_requests(path):
    """Request numbers are a connection's own: what is said of 1 here is not about 1 there."""
    _, a = store.add(path, "alice")
    _, b = store.add(path, "bob")
    engine = Watched(SyntheticConfig(seed=11), seconds=0.002)
    async with (
        front(engine, keys=Keys.load(path)) as place,
        client(place, a) as alice,
        client(place, b) as bob,
    ):
        assert isinstance(await answered(alice, opening(1, tokens=60)), Opened)
        await bob.send(Cancel(request=1))
        assert isinstance(await answered(bob, opening(1, tokens=5)), Opened)
        assert await finished(bob) == (5, "length")
        await bob.send(Cancel(request=1))
        assert await finished(alice) == (60, "length")


async def test_a_revoked_key_ends_what_is_open_and_nothing_else(path, monkeypatch):
    monkeypatch.setattr(door, "REVOKED_SECONDS", 0.05)
    key, a = store.add(path, "alice")
    _, b = store.add(path, "bob")
    engine = Watched(SyntheticConfig(seed=11), seconds=0.002)
    async with (
        front(engine, keys=Keys.load(path)) as place,
        client(place, a) as alice,
        client(place, b) as bob,
    ):
        await answered(alice, opening())
        await answered(bob, opening(tokens=300))
        store.revoke(path, key.id)
        assert await alice.closed() == 1008
        assert alice.socket.close_reason == "its key is revoked"
        await until(lambda: place.cloud.scheduler.busy == 1, 10)
        assert (await turned_away(place, {"Authorization": f"Bearer {a}"})).status_code == 401
        assert await finished(bob) == (300, "length")


async def test_a_new_key_works_without_a_restart(path, alice):
    async with front(keys=Keys.load(path)) as place, client(place, alice[1]) as before:
        _, text = store.add(path, "bob")
        async with client(place, text) as raw:
            await raw.send(opening(tokens=3))
            assert await finished(raw) == (3, "length")
        path.write_text("damaged")
        async with client(place, text):
            pass
        await before.send(opening(tokens=3))
        assert await finished(before) == (3, "length")


async def test_without_keys_everyone_comes_in():
    async with front() as place, client(place, "anything"), client(place):
        assert (await get(place, "/metrics")).status_code == 200


# ---- pages ------------------------------------------------------------------------------------


async def curl(*args):
    """A page as curl sees it: (status, body)."""
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "-m", "20", "--noproxy", "*", "-w", "\n%{http_code}", *args,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    body, _, status = out.decode().rpartition("\n")
    return int(status), body


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not there")
@pytest.mark.parametrize("secure", [False, True])
async def test_health_checks_work_with_keys_on(path, alice, tmp_path, secure):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    options = {"tls": served(authority, tmp_path)} if secure else {}
    scheme = "https" if secure else "http"
    ca = ("--cacert", str(tmp_path / "ca.pem"))
    async with front(keys=Keys.load(path), **options) as place:
        root = f"{scheme}://{place.at}"
        assert await curl(*ca, f"{root}/healthz") == (200, "ok\n")
        assert await curl(*ca, f"{root}/readyz?x=1") == (200, "ready\n")
        assert (await curl(*ca, f"{root}/metrics"))[0] == 401
        with_key = ("-H", f"Authorization: Bearer {alice[1]}")
        status, body = await curl(*ca, *with_key, f"{root}/metrics")
        assert status == 200
        assert "e2sci_connections 0.0\n" in body


async def test_pages_and_what_is_none(path, alice):
    async with front(keys=Keys.load(path)) as place:
        for page, status in {
            "/healthz": 200, "/readyz": 200, "/metrics": 401, "/": 426, "/favicon.ico": 404,
            "/healthz/": 404, "//healthz": 404, "/metrics%00": 404,
        }.items():  # fmt: skip
            response = await get(place, page)
            assert response.status_code == status, page
            assert response.text.count("\n") == 1
            head = await get(place, page, method="HEAD")
            assert head.status_code == status
            assert head.headers["Content-Length"] == response.headers["Content-Length"]
            assert response.headers["Connection"] == "close"
            assert "Server" not in response.headers
        assert (await get(place, "/")).headers["Upgrade"] == "websocket"
        metrics = await get(place, "/metrics", alice[1])
        assert metrics.headers["Content-Type"].startswith("text/plain")
        reader, writer = await asyncio.open_connection(HOST, place.port)
        writer.write(b"HEAD /healthz HTTP/1.1\r\n\r\n")
        assert (await to_the_end(reader)).endswith(b"\r\n\r\n")
        writer.close()
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            response = await get(place, "/healthz", method=method)
            assert (response.status_code, response.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("at", ["/", "/v1/cloud?x", "/healthz"])
async def test_a_websocket_comes_in_at_any_path(at):
    async with front() as place, client(place, path=at) as raw:
        await raw.send(opening(tokens=3))
        assert await finished(raw) == (3, "length")


async def test_it_is_not_ready_while_the_engine_fails():
    broken = []

    def fail(_):
        if broken:
            raise RuntimeError("out of memory")

    async with front(Watched(hook=fail)) as place, client(place) as raw:
        broken.append(True)
        await raw.send(opening())
        assert (await finished(raw))[1] == "engine"
        response = await get(place, "/readyz")
        assert (response.status_code, response.text) == (503, "the engine fails\n")
        assert (await get(place, "/healthz")).status_code == 200
        broken.clear()
        await raw.send(opening(2, tokens=3))
        assert await finished(raw) == (3, "length")
        assert (await get(place, "/readyz")).status_code == 200


async def test_a_failure_is_not_held_against_it_for_ever(monkeypatch):
    def fail(_):
        raise RuntimeError("out of memory")

    async with front(Watched(hook=fail)) as place, client(place) as raw:
        await raw.send(opening())
        await finished(raw)
        assert (await get(place, "/readyz")).status_code == 503
        monkeypatch.setattr("e2sci.runtime.cloud.FAILED_SECONDS", 0.0)
        assert (await get(place, "/readyz")).status_code == 200


# ---- bounds -----------------------------------------------------------------------------------


async def test_connections_at_and_above_their_bound():
    async with front(connections=2) as place, AsyncExitStack() as stack:
        await stack.enter_async_context(client(place))
        leaving = AsyncExitStack()
        await leaving.enter_async_context(client(place))
        response = await turned_away(place, {})
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        assert json.loads(response.body)["error"] == "service_unavailable"
        assert (await get(place, "/healthz")).status_code == 200
        await leaving.aclose()
        await stack.enter_async_context(client(place))


async def test_tcp_connections_at_and_above_their_bound(monkeypatch):
    monkeypatch.setattr(door, "PASSERS_BY", 1)
    async with front(connections=1) as place, AsyncExitStack() as stack:
        await stack.enter_async_context(client(place))
        reader, writer = await asyncio.open_connection(HOST, place.port)
        beyond, other = await asyncio.open_connection(HOST, place.port)
        assert await to_the_end(beyond) == b""
        writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert (await to_the_end(reader)).endswith(b"ok\n")
        writer.close()
        other.close()


async def test_who_is_slow_at_the_door_is_sent_away(monkeypatch):
    """A byte now and then does not buy more time, and holds nobody else up."""
    monkeypatch.setattr(cloud_app, "OPEN_SECONDS", 0.5)
    async with front() as place:
        reader, writer = await asyncio.open_connection(HOST, place.port)
        writer.write(b"GET / HTTP/1.1\r\n")
        ended = asyncio.create_task(to_the_end(reader))
        sent = 0
        while not ended.done() and sent < 500:
            writer.write(b"X")
            sent += 1
            await asyncio.sleep(0.01)
            if sent == 10:
                async with client(place) as raw:
                    await raw.send(opening(tokens=3))
                    assert await finished(raw) == (3, "length")
        assert sent < 500
        assert await ended == b""
        writer.close()


async def test_who_says_nothing_at_the_door_does_not_delay_the_end(monkeypatch):
    monkeypatch.setattr(cloud_app, "OPEN_SECONDS", 600)
    async with asyncio.timeout(60):
        async with front() as place:
            reader, writer = await asyncio.open_connection(HOST, place.port)
            writer.write(b"GET / HTTP/1.1\r\n")
            async with client(place):
                pass
        assert await to_the_end(reader) == b""
        writer.close()


async def test_headers_at_and_above_their_bounds():
    async with front() as place:
        for lines, status in (
            (["X: " + "x" * 8187], 200),
            (["X: " + "x" * 8190], 431),
            (["X: x"] * 128, 200),
            (["X: x"] * 129, 431),
        ):
            reader, writer = await asyncio.open_connection(HOST, place.port)
            writer.write("\r\n".join(["GET /healthz HTTP/1.1", *lines, "", ""]).encode())
            answer = await to_the_end(reader)
            assert answer.startswith(b"HTTP/1.1 %d" % status), (status, answer)
            writer.close()


@pytest.mark.parametrize(("size", "ended"), [(MAX_FRAME, 1000), (MAX_FRAME + 1, 1009)])
async def test_frames_at_and_above_their_bound(size, ended):
    async with front() as place, client(place) as raw:
        await raw.send(b"\xc1" * size)
        if ended == 1000:
            assert (await raw.receive()).code == "malformed"
        assert await raw.closed() == ended


@pytest.mark.parametrize("id", ["x", "ab\n", "a" * 33, "AB"])
async def test_what_is_no_request_id_gets_into_no_log(id):
    async with front() as place, client(place) as raw:
        assert (await answered(raw, opening(id=id))).code == "malformed"
        assert isinstance(await answered(raw, opening(2, tokens=1, id="a" * 32)), Opened)
        assert await finished(raw) == (1, "length")
