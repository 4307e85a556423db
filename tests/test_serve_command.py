"""`e2sci serve` as it is run: what it says, signals, what it refuses to start with, its logs."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from click.testing import CliRunner

from e2sci.cli import main
from e2sci.engines.synthetic import SyntheticConfig
from e2sci.runtime.edge import BlockingEdge
from e2sci.server import keys as store
from live import HOST, LiveCloud, Named, Watched, draft, ended, free_port, listens, process
from serving import HELLO
from test_cli import calibrated

DRAFT = "synthetic:seed=11,divergence=0.5"


@contextmanager
def serving(*args):
    """`e2sci serve` as a process of its own: (URL, child)."""
    with process("serve", "--draft", DRAFT, "--listen", f"{HOST}:0", *args) as child:
        yield listens(child), child


def ask(url, key=None, **body):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(trust_env=False, timeout=60) as http:
        body = {"messages": HELLO, "max_tokens": 20, **body}
        return http.post(f"{url}/chat/completions", json=body, headers=headers)


def serve(*args):
    return CliRunner().invoke(main, ["serve", "--draft", DRAFT, *args])


def refused(result, *words):
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    for word in words:
        assert word in line
    assert result.stdout == ""


@pytest.fixture
def slow():
    engine = Watched(SyntheticConfig(seed=11, eos_bias=-20.0), slots=4, seconds=0.02)
    with LiveCloud(engine) as cloud:
        yield cloud


# ---- running ----------------------------------------------------------------------------------


def test_it_says_the_same_as_the_other_two(cloud):
    """The command line, Python and HTTP: one text for one seed."""
    settings = {"max_tokens": 40, "temperature": 0.8, "seed": 5}
    with BlockingEdge(cloud.url, draft()) as edge:
        wanted = edge.generate("hello", **settings).text
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    said = CliRunner().invoke(
        main, ["run", "hello", "--draft", DRAFT, "--cloud", cloud.url, *flags, "--json"]
    )
    assert json.loads(said.stdout)["text"] == wanted
    with serving("--cloud", cloud.url) as (url, child):
        assert url.endswith("/v1")
        child.stderr.readline()  # where the page is
        line = child.stderr.readline()
        assert line.startswith(f"try: curl {url}/chat/completions -H 'Content-Type: application/js")
        json.loads(line.partition(" -d '")[2].rstrip("'\n"))
        answer = ask(url, **settings).json()
        assert answer["choices"][0]["message"]["content"] == wanted
        child.send_signal(signal.SIGTERM)
        assert ended(child) == (0, "", [])


def test_defaults_from_the_command_line(cloud):
    flags = ("--mode", "sync", "--accept", "elastic", "--measure", "regret", "--threshold", "0.1")
    with serving("--cloud", cloud.url, *flags, "--temperature", "0", "--name", "mine") as (url, _):
        answers = [ask(url, model="mine").json() for _ in range(2)]
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        assert texts[0] == texts[1]
        [stats] = answers[0]["e2sci"]["stats"]
        assert (stats["mode"], stats["accept"]) == ("sync", "elastic")
        assert ask(url, model="synthetic").status_code == 404


def test_elastic_takes_its_thresholds_from_a_calibration(cloud, tmp_path):
    file = calibrated(tmp_path, DRAFT, 5.0)  # nats; without, 0.35 at most
    with serving("--cloud", cloud.url, "--calibration", file, "--name", "mine") as (url, _):

        def threshold(**own):
            [stats] = ask(url, e2sci=own).json()["e2sci"]["stats"]
            return stats["threshold"]

        assert threshold(accept="elastic") > 1
        assert threshold(accept="elastic", threshold=0.0) == 0.0
        assert threshold() is None
    other = calibrated(tmp_path, "synthetic:seed=99", 0.1)
    refused(serve("--calibration", other), "synthetic:seed=99")


def test_the_draft_alone_needs_no_cloud():
    with serving("--mode", "draft") as (url, child):
        answer = ask(url).json()
        assert answer["model"] == "synthetic"
        assert answer["e2sci"]["stats"][0]["mode"] == "draft"
        wrong = ask(url, e2sci={"mode": "cloud"})
        assert wrong.status_code == 400
        child.send_signal(signal.SIGINT)
        assert ended(child)[0] == 0


def test_the_page_is_named_and_can_be_left_away():
    with serving("--mode", "draft") as (url, child):
        page = child.stderr.readline().removeprefix("its page: ").strip()
        assert page == url.removesuffix("v1")
        assert "<!doctype html>" in httpx.get(page, trust_env=False).text
    with serving("--mode", "draft", "--no-page") as (url, child):
        assert child.stderr.readline().startswith("try: curl")
        assert httpx.get(url.removesuffix("v1"), trust_env=False).status_code == 404


def test_a_cloud_may_come_later():
    with LiveCloud() as cloud:
        cloud.kill()
        with serving("--cloud", cloud.url, "--wait", "0") as (url, child):
            assert ask(url).status_code == 503
            cloud.start()
            assert ask(url).status_code == 200
            child.send_signal(signal.SIGTERM)
            assert ended(child)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(slow, number):
    with serving("--cloud", slow.url) as (url, child):
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ask(url, max_tokens=80)))
        asking.start()
        _busy(slow)
        child.send_signal(number)
        code, _, lines = ended(child)
        asking.join(20)
    assert code == 0
    assert answers[0].json()["usage"]["completion_tokens"] == 80
    assert "draining, for 30 s at most" in " ".join(lines)
    slow.idle()


def test_a_second_signal_ends_it_at_once(slow):
    with serving("--cloud", slow.url, "--drain", "600") as (url, child):
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ask(url, max_tokens=4000)))
        asking.start()
        _busy(slow)
        child.send_signal(signal.SIGTERM)
        for line in child.stderr:
            if "draining" in line:
                break
        child.send_signal(signal.SIGTERM)
        assert ended(child)[0] == 0
        asking.join(20)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "stopping"
    slow.idle()


def _busy(cloud):
    for _ in range(2500):
        if cloud.busy:
            return
        time.sleep(0.004)
    raise AssertionError("nobody has asked")


def test_logs_tell_no_texts_and_no_keys(cloud, tmp_path):
    path = tmp_path / "keys.json"
    _, secret = store.add(path, "alice")
    hidden = "xylophone"
    port = free_port()
    flags = ("--cloud", cloud.url, "--log", "json", "--keys", str(path))
    with process("serve", "--draft", DRAFT, "--listen", f"{HOST}:{port}", *flags) as child:
        first = json.loads(child.stderr.readline())
        assert first["event"] == "listening"
        assert first["url"] == f"http://{HOST}:{port}/v1"
        messages = [{"role": "user", "content": hidden}]
        answer = ask(first["url"], secret, messages=messages, n=2).json()
        ask(first["url"], secret, messages=messages, temperature=-1)
        ask(first["url"], messages=messages)
        child.send_signal(signal.SIGTERM)
        code, _, lines = ended(child)
    assert code == 0
    events = [json.loads(line) for line in lines]
    [done] = [e for e in events if e["event"] == "request ended"]
    assert done["request"] == answer["e2sci"]["request_id"]
    assert done["client"].startswith("alice/")
    assert {k: done[k] for k in answer["usage"]} == answer["usage"]
    assert [e for e in events if e["event"] == "refused: no key in force"]
    everything = "\n".join(lines)
    assert hidden not in everything
    assert secret not in everything
    assert secret.rpartition("_")[2] not in everything
    for choice in answer["choices"]:
        assert json.dumps(choice["message"]["content"])[1:-1] not in everything


# ---- not starting -----------------------------------------------------------------------------


def test_a_pair_that_does_not_fit():
    with LiveCloud(Named("other", other=104)) as cloud:
        result = serve("--cloud", cloud.url, "--listen", f"{HOST}:0")
    refused(result, "different vocabularies")


def test_other_machines(tmp_path):
    path = tmp_path / "keys.json"
    store.add(path, "alice")
    anywhere = ("--listen", "0.0.0.0:0")
    refused(serve(*anywhere), "open to other machines", "--keys", "--insecure")
    refused(serve(*anywhere, "--insecure"), "--keys")
    refused(serve(*anywhere, "--keys", str(path)), "without TLS", "--insecure")
    refused(serve("--keys", str(tmp_path / "none.json")), "e2sci keys add")


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        at = f"{HOST}:{other.getsockname()[1]}"
        refused(serve("--listen", at), f"can't listen on {at}: the port is in use")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--mode", "cloud", "--window", "4"), "drop window"),
        (("--threshold", "1"), "no threshold"),
        (("--temperature", "-1"), "temperature is -1"),
        (("--cors", "localhost:3000"), "no origin"),
        (("--cors", "http://a.example/"), "no origin"),
        (("--listen", "8080"), "no address"),
        (("--cloud", "http://x"), "no WebSocket URL"),
    ],
    ids=str,
)
def test_what_is_no_setting(args, words):
    refused(serve(*args), words)


@pytest.mark.parametrize("name", ["starlette", "uvicorn", "plotly"])
def test_without_the_extra(name):
    """Help is there all the same."""
    code = f"import sys; sys.modules[{name!r}] = None; from e2sci.cli import main; main()"
    said = [
        subprocess.run([sys.executable, "-c", code, "serve", *more], capture_output=True, text=True)
        for more in ((), ("--help",))
    ]
    assert [each.returncode for each in said] == [2, 0]
    assert said[0].stderr == f'Error: {name} is missing; run: pip install "e2sci[serve]"\n'
