"""Keys and TLS at the edge: who gets the key, what is trusted, and that nobody else hears of it."""

from __future__ import annotations

import http
import json
import logging
import ssl
from contextlib import contextmanager

import pytest
import trustme
import websockets.asyncio.server
from click.testing import CliRunner
from websockets.http11 import Response

from e2sci.cli import main
from e2sci.runtime.connection import CloudUnreachable, Refused
from e2sci.runtime.transport import MAX_KEY, Dial, is_loopback
from e2sci.server import keys as store
from e2sci.server.cloud_app import tls_context
from e2sci.server.keys import Keys
from live import HOST, BlockingEdge, Edge, LiveCloud, Watched, draft, free_port

DRAFT = "synthetic:seed=11,divergence=0.5"
KEY = "e2sci_sesame_" + "0123456789abcdef" * 4


def run(*args, env=None):
    return CliRunner().invoke(main, ["run", "hello", "--draft", DRAFT, *args], env=env)


def refused(result, *words):
    [line] = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, "")
    for word in words:
        assert word in line
    return line


@pytest.fixture
def key(tmp_path):
    """The key of a cloud's file of keys."""
    return store.add(tmp_path / "keys.json", "alice")[1]


@pytest.fixture
def guarded(tmp_path, key):
    """A cloud that lets in who has it."""
    with LiveCloud(keys=Keys.load(tmp_path / "keys.json")) as cloud:
        yield cloud
        cloud.idle()


@contextmanager
def secured(tmp_path, name=HOST):
    """A cloud behind TLS with a private authority: its URL, and the file that trusts it."""
    authority, ca = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    cert = authority.issue_cert(name)
    cert.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    cert.private_key_pem.write_to_path(tmp_path / "key.pem")
    with LiveCloud(tls=tls_context(tmp_path / "cert.pem", tmp_path / "key.pem")) as cloud:
        yield f"wss://{HOST}:{cloud.port}", ca
        cloud.idle()


# ---- keys -------------------------------------------------------------------------------------


def test_a_key_opens_the_door(guarded, key, tmp_path):
    with BlockingEdge(guarded.url, draft(), api_key=key) as edge:
        assert edge.generate("hello", max_tokens=5).token_ids
    file = tmp_path / "key"
    file.write_text(f"{key}\n")
    short = ("--cloud", guarded.url, "--max-tokens", "5")
    assert run(*short, env={"E2SCI_API_KEY": f" {key}\n"}).exit_code == 0
    wrong = {"E2SCI_API_KEY": KEY}
    assert run(*short, "--key-file", str(file), env=wrong).exit_code == 0  # the file goes first
    doctor = ["doctor", "--cloud", guarded.url, "--draft", DRAFT, "--key-file", str(file)]
    assert CliRunner().invoke(main, doctor).exit_code == 0


def test_a_key_that_opens_nothing(guarded, key):
    short = ("--cloud", guarded.url)
    refused(run(*short), guarded.url, "wants an API key", "E2SCI_API_KEY", "--key-file")
    line = refused(run(*short, env={"E2SCI_API_KEY": KEY}), "does not accept this API key", "401")
    assert "sesame" not in line
    tries = 0

    class Counted(Dial):
        async def __call__(self):
            nonlocal tries
            tries += 1
            return await super().__call__()

    with BlockingEdge(Counted(guarded.url, KEY), draft(), patience=10) as edge:
        with pytest.raises(Refused, match="does not accept") as error:
            edge.generate("hello")
        assert error.value.code == "unauthorized"
        assert tries == 1  # asking again would not help


def test_a_key_revoked_in_mid_answer_ends_it(guarded, key, tmp_path, monkeypatch):
    """Not waited for; the text so far is there."""
    [known] = store.read(tmp_path / "keys.json")
    monkeypatch.setattr("e2sci.server.door.REVOKED_SECONDS", 0.05)
    with BlockingEdge(guarded.url, draft(), api_key=key, patience=30) as edge:
        pieces = edge.stream("hello", max_tokens=3000, logit_bias={256: 0.0})
        next(pieces)
        store.revoke(tmp_path / "keys.json", known.id)
        for channel in list(guarded._channels):
            guarded._loop.call_soon_threadsafe(channel._socket.transport.abort)
        with pytest.raises(Exception, match=r"the cloud is gone: .*does not accept this API key"):
            list(pieces)


@pytest.mark.parametrize(
    "url",
    ["ws://cloud.example:7071", "ws://192.0.2.1:7071", "ws://[2001:db8::1]:7071",
     "ws://localhost.example:7071", "ws://127.0.0.1.example:7071"],
)  # fmt: skip
def test_a_key_does_not_travel_in_the_open(url):
    with pytest.raises(ValueError, match="does not get the API key"):
        Edge(url, draft(), api_key=KEY)
    with pytest.raises(ValueError, match="does not get the API key"):
        Edge(["wss://cloud.example", url], draft(), api_key=KEY)
    Edge(url, draft())
    Edge(url, draft(), api_key=KEY, allow_insecure=True)
    env = {"E2SCI_API_KEY": KEY}
    line = refused(run("--cloud", url, env=env), url, "does not get the API key", "wss://")
    assert "--allow-insecure" in line
    assert "sesame" not in line


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_this_machine_may_have_it_in_the_open(host):
    assert is_loopback(host)
    Dial(f"ws://[{host}]:1" if ":" in host else f"ws://{host}:1", KEY)


@pytest.mark.parametrize("key", ["", "a\nb", "a\r\nX: y", "schlüssel", "x" * (MAX_KEY + 1)])
def test_what_can_not_be_a_key(key):
    with pytest.raises(ValueError, match="printable ASCII") as error:
        Dial("wss://cloud.example", key)
    assert key not in str(error.value) or not key


@pytest.mark.parametrize("url", ["ws://me:sesame@127.0.0.1:1", "wss://sesame@cloud.example"])
def test_no_password_in_a_url(url):
    with pytest.raises(ValueError, match="no user name or password") as error:
        Edge(url, draft())
    assert "sesame" not in str(error.value)


def test_a_key_file_that_can_not_be_read(tmp_path):
    refused(run("--key-file", str(tmp_path / "none")), "none", "No such file")
    (tmp_path / "odd").write_bytes(b"\xff\xfe")
    refused(run("--key-file", str(tmp_path / "odd")), "holds no API key")
    (tmp_path / "empty").write_text("\n")
    refused(run("--key-file", str(tmp_path / "empty")), "printable ASCII")


async def test_the_key_is_sent_and_told_to_nobody(caplog):
    """Not followed anywhere else, in no log at any level, in no repr and no error."""
    heard = []

    def away(connection, request):
        heard.append(request.headers.get("Authorization"))
        status = http.HTTPStatus.FOUND
        headers = websockets.datastructures.Headers({"Location": f"ws://{HOST}:{trap}/there"})
        return Response(status, "Found", headers, b"")

    def trapped(connection, request):
        heard.append("trapped")

    async def nothing(socket):
        await socket.wait_closed()

    caplog.set_level(logging.DEBUG)
    serve = websockets.asyncio.server.serve
    quiet = logging.getLogger("test.server")
    quiet.setLevel(logging.ERROR)
    async with serve(nothing, HOST, 0, process_request=trapped, logger=quiet) as other:
        trap = other.sockets[0].getsockname()[1]
        async with serve(nothing, HOST, 0, process_request=away, logger=quiet) as server:
            dial = Dial(f"ws://{HOST}:{server.sockets[0].getsockname()[1]}", KEY)
            edge = Edge(dial, draft(), patience=0)
            async with edge:
                with pytest.raises(CloudUnreachable, match="HTTP 302") as error:
                    await edge.generate("hello")
    assert heard == [f"Bearer {KEY}"]
    said = [caplog.text, str(error.value), repr(error.value), repr(dial), repr(vars(edge))]
    assert not any("sesame" in text for text in said)


# ---- TLS --------------------------------------------------------------------------------------


def test_a_private_authority(tmp_path):
    with secured(tmp_path) as (url, ca):
        tls = ssl.create_default_context(cafile=str(ca))
        with BlockingEdge(url, draft(), tls=tls, api_key=KEY) as edge:
            assert edge.generate("hello", max_tokens=5).token_ids
        said = run("--cloud", url, "--ca", str(ca), "--max-tokens", "5", "--json")
        assert len(json.loads(said.stdout)["token_ids"]) == 5


@pytest.mark.parametrize("why", ["unknown authority", "another name"])
def test_a_certificate_that_is_not_trusted(tmp_path, why):
    known = why == "another name"
    with secured(tmp_path, "cloud.example" if known else HOST) as (url, ca):
        line = refused(run("--cloud", url, *(["--ca", str(ca)] if known else [])), url, "--ca")
        assert "is not trusted" in line
        with BlockingEdge(url, draft(), patience=10) as edge:  # not waited for
            with pytest.raises(Refused, match="not trusted") as error:
                edge.generate("hello")
            assert error.value.code == "certificate"


def test_no_certificates_in_the_file(tmp_path):
    (tmp_path / "ca.pem").write_text("no")
    refused(run("--ca", str(tmp_path / "ca.pem")), "ca.pem", "no certificates in PEM form")
    refused(run("--ca", str(tmp_path / "none.pem")), "none.pem", "No such file")


def test_tls_where_there_is_none_and_the_reverse(tmp_path):
    with LiveCloud() as cloud:
        refused(run("--cloud", f"wss://{HOST}:{cloud.port}"), "can't reach wss://")
    with secured(tmp_path) as (url, _):
        refused(run("--cloud", url.replace("wss", "ws")), "not as an e2sci cloud")


# ---- the heartbeat ----------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "seconds"), [({}, 5.0), ({"heartbeat_s": 0.7}, 0.7)])
async def test_the_heartbeat_is_as_told(options, seconds):
    with LiveCloud() as cloud:
        async with Edge(cloud.url, draft(), **options) as edge:
            await edge.connect()
            socket = edge._known.connections[0]._channel._socket
            assert (socket.ping_interval, socket.ping_timeout) == (seconds, 2 * seconds)
    with pytest.raises(ValueError, match="heartbeat_s is 0"):
        Edge(cloud.url, draft(), heartbeat_s=0)


# ---- several clouds, at the command line ------------------------------------------------------


def test_clouds_are_listed_or_repeated():
    nobody = f"ws://{HOST}:{free_port()}"
    with LiveCloud() as cloud:
        short = ("--max-tokens", "5", "--json")
        for way in (
            ("--cloud", nobody, "--cloud", cloud.url),
            ("--cloud", f"{nobody}, {cloud.url}"),
        ):
            assert len(json.loads(run(*way, *short).stdout)["token_ids"]) == 5
        refused(run("--cloud", f"{cloud.url},nonsense"), "'nonsense' is no WebSocket URL")
        refused(run("--cloud", f"{cloud.url},"), "'' is no WebSocket URL")
        cloud.idle()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_draft_that_goes_on_alone(as_json):
    engine = Watched()
    engine.hook = lambda n: n == 8 and cloud.kill()
    with LiveCloud(engine) as cloud:
        result = run(
            "--cloud", cloud.url, "--on-cloud-loss", "draft", "--wait", "0.1",
            *(["--json"] if as_json else []),
        )  # fmt: skip
        assert result.exit_code == 0
        assert "note: cloud lost (" in result.stderr
        assert "note: drafting alone: what follows is not checked by the target" in result.stderr
        if as_json:
            said = json.loads(result.stdout)
            assert said["stats"]["drafted_alone"] > 0
            assert f"note: {said['notices'][0]}" in result.stderr
            assert len(said["request_id"]) == 32
        else:
            assert "tokens by the draft alone, unchecked" in result.stderr.splitlines()[-1]


def test_losing_the_cloud_for_good_is_told():
    engine = Watched()
    engine.hook = lambda n: n == 8 and cloud.kill()
    with LiveCloud(engine) as cloud:
        result = run("--cloud", cloud.url, "--on-cloud-loss", "fail", "--json")
        assert result.exit_code == 3
        assert json.loads(result.stdout)["finish_reason"] == "lost"
        assert "Error: the cloud is gone: " in result.stderr.splitlines()[-1]
