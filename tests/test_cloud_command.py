"""`e2sci cloud` as it is run: signals and draining, its options, and what it refuses."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import trustme
from click.testing import CliRunner

from doorway import answered, client, finished, front, get, opening, served, trusting, turned_away
from e2sci.cli import main
from e2sci.cli.cloud import _predictor as predictor_of
from e2sci.cli.target import target as target_of
from e2sci.engines.synthetic import SyntheticConfig
from e2sci.evaluation.calibration import Calibration
from e2sci.server import keys as store
from e2sci.session.messages import Opened
from live import HOST, Watched, ended, listens, process
from test_cli import calibrated


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.json"


@pytest.fixture
def alice(path):
    return store.add(path, "alice")


# ---- draining ---------------------------------------------------------------------------------

NEVER_DONE = {"drafting": True, "fill": False}  # its drafts never come
ENDLESS = ("--model", "synthetic:seed=11,eos_bias=-20", "--listen", f"{HOST}:0")


@asynccontextmanager
async def served_by_a_process(*args):
    """`e2sci cloud` as it is run: (place, child)."""
    with process("cloud", *ENDLESS, *args) as child:
        url = await asyncio.to_thread(listens, child)
        yield SimpleNamespace(at=url.removeprefix("ws://")), child


async def not_ready(place):
    for _ in range(2000):
        if (await get(place, "/readyz")).status_code == 503:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it stays ready")


async def test_a_drained_cloud_lets_what_is_under_way_end():
    engine = Watched(SyntheticConfig(seed=11), seconds=0.01)
    async with front(engine) as place, client(place) as raw, client(place) as other:
        assert isinstance(await answered(raw, opening(tokens=60)), Opened)
        draining = asyncio.create_task(place.cloud.drain(60))
        await asyncio.sleep(0)
        response = await get(place, "/readyz")
        assert (response.status_code, response.text) == (503, "draining\n")
        assert (await get(place, "/healthz")).status_code == 200
        error = await answered(other, opening())
        assert (error.code, error.retryable) == ("draining", True)
        assert await finished(raw) == (60, "length")
        assert await draining


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(number):
    async with served_by_a_process("--drain", "60") as (place, child), client(place) as raw:
        await answered(raw, opening(tokens=3000))
        child.send_signal(number)
        await not_ready(place)
        assert await finished(raw) == (3000, "length")
        assert await raw.closed() == 1001
        code, out, lines = await asyncio.to_thread(ended, child)
        assert (code, out) == (0, "")
        assert "draining, for 60 s at most" in " ".join(lines)


async def test_a_second_signal_ends_it_at_once():
    async with served_by_a_process("--drain", "600") as (place, child), client(place) as raw:
        await answered(raw, opening(**NEVER_DONE))
        child.send_signal(signal.SIGTERM)
        await not_ready(place)
        child.send_signal(signal.SIGTERM)
        assert await raw.closed() == 1001
        assert (await asyncio.to_thread(ended, child))[0] == 0


async def test_draining_ends_with_its_time():
    async with served_by_a_process("--drain", "0.2") as (place, child), client(place) as raw:
        await answered(raw, opening(**NEVER_DONE))
        child.send_signal(signal.SIGTERM)
        assert await raw.closed() == 1001
        assert (await asyncio.to_thread(ended, child))[0] == 0


async def test_an_idle_cloud_ends_at_once():
    async with served_by_a_process("--drain", "600") as (place, child), client(place) as raw:
        child.send_signal(signal.SIGTERM)
        assert await raw.closed() == 1001
        assert await asyncio.to_thread(ended, child) == (0, "", [])


# ---- e2sci cloud ------------------------------------------------------------------------------


async def test_the_commands_keys_and_bounds(path, alice):
    args = ("--keys", str(path), "--slots", "1", "--waiting", "0", "--connections", "2")
    async with (
        served_by_a_process(*args, "--drain", "0") as (place, _),
        client(place, alice[1]) as one,
        client(place, alice[1]) as two,
    ):
        assert (await turned_away(place, {})).status_code == 401
        headers = {"Authorization": f"Bearer {alice[1]}"}
        assert (await turned_away(place, headers)).status_code == 503
        assert isinstance(await answered(one, opening(tokens=4000)), Opened)
        assert (await answered(two, opening())).code == "busy"


async def test_the_commands_tls_and_json(path, alice, tmp_path):
    authority = trustme.CA()
    served(authority, tmp_path)
    args = ("--keys", str(path), "--log", "json", "--drain", "0")
    tls = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with process("cloud", *ENDLESS, *args, *tls) as child:
        said = json.loads(await asyncio.to_thread(child.stderr.readline))
        assert (said["event"], said["model"]) == ("listening", "synthetic")
        place = SimpleNamespace(at=said["url"].removeprefix("wss://"))
        async with client(place, alice[1], scheme="wss", ssl=trusting(authority)) as raw:
            await raw.send(opening(tokens=3, id="ab" * 16))
            assert await finished(raw) == (3, "length")
        child.send_signal(signal.SIGTERM)
        code, _, lines = await asyncio.to_thread(ended, child)
        assert code == 0
        events = [json.loads(line) for line in lines]
        [request] = [e["request"] for e in events if e["event"] == "request ended: length"]
        assert request["id"] == "ab" * 16
        assert request["client"] == f"alice/{alice[0].id}"
        assert alice[1] not in "".join(lines)


def cloud(*args):
    done = CliRunner().invoke(main, ["cloud", "--model", "synthetic", *args])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
    return done.stderr


def test_mistakes_at_the_command_line(path, tmp_path):
    some = tmp_path / "some.pem"
    some.write_text("junk")
    assert "e2sci keys add NAME" in cloud("--keys", str(path))
    assert "go together" in cloud("--tls-cert", str(some))
    assert "go together" in cloud("--tls-key", str(some))
    assert "PEM form" in cloud("--tls-cert", str(some), "--tls-key", str(some))
    assert "no calibration" in cloud("--calibration", str(some))
    assert "drop --predictor" in cloud("--calibration", str(some), "--predictor", str(some))
    for flags in ("--waiting -1", "--connections 0", "--drain -1", "--drain nan", "--log xml"):
        assert flags.split()[0] in cloud(*flags.split())
    store.add(path, "alice")
    path.write_text("{")
    assert "damaged" in cloud("--keys", str(path))


def test_a_calibrations_predictor(tmp_path):
    arrays = {f"w{i}": np.ones((2, 2), np.float32) for i in range(5)}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays, **{f"b{i}": np.zeros(2, np.float32) for i in range(5)})
    plain = Path(calibrated(tmp_path, "any", 0.1))
    assert "drop --calibration" in cloud("--calibration", str(plain))
    whole = msgspec.structs.replace(Calibration.load(plain), predictor=buffer.getvalue())
    whole.save(plain)
    (tmp_path / "p.npz").write_bytes(buffer.getvalue())
    one, other = predictor_of(plain, None), predictor_of(None, tmp_path / "p.npz")
    assert one(0.5, 0.1) == other(0.5, 0.1)
    assert predictor_of(None, None) is None


def test_a_server_as_the_target(monkeypatch):
    asked = {}

    def made(url, **options):
        asked.update(options, url=url)
        return "the engine"

    monkeypatch.setattr("e2sci.engines.vllm.Vllm", made)
    monkeypatch.setenv("ENGINE_KEY", "secret")
    given = {
        "urls": ("http://h:1",),
        "drafts": (),
        "tokenizer": "folder",
        "key_variable": "ENGINE_KEY",
    }
    here = {"threads": None, "gpu_layers": 0}
    found = target_of(model=None, engine="vllm", slots=3, context=99, **given, **here)
    assert found == "the engine"
    names = {"model": None, "url": "http://h:1", "tokenizer": "folder", "key": "secret"}
    assert asked == {**names, "slots": 3, "context": 99}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--engine vllm", "needs --url and --tokenizer"),
        ("--engine sglang --url http://h:1", "needs --url and --tokenizer"),
        ("--url http://h:1", "--url does not go with --engine auto"),
        ("--tokenizer folder", "--tokenizer does not go"),
        ("--engine-key-env X", "--engine-key-env does not go"),
        ("--engine vllm --url u --tokenizer t --threads 2", "--threads does not go"),
        ("--engine vllm --url u --tokenizer t --gpu-layers -1", "--gpu-layers does not go"),
        ("--engine vllm --url u --tokenizer t --engine-key-env NOT_SET", "NOT_SET, which is not"),
        ("--engine sglang --url http://h:1 --tokenizer nowhere/at/all", "nowhere/at/all"),
        ("--engine vllm --url u --url v --tokenizer t", "in front of one server"),
        ("--engine vllm --url u --tokenizer t --drafts ipc:///x", "--drafts does not go"),
        ("--engine vllm-native --url http://h:1", "needs --url and --tokenizer"),
        ("--engine vllm-native --url u --tokenizer t --threads 2", "--threads does not go"),
    ],
)
def test_mistakes_about_a_server(flags, words):
    assert words in cloud("--listen", f"{HOST}:0", *flags.split())
