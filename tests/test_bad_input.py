"""Bad input: one clear line, exit code 2, and the cloud serves the next one as before.

At the command line here; at the wire in test_wire_errors.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from e2sci.cli import main
from e2sci.engines.synthetic import REAL_VOCAB, SyntheticConfig
from e2sci.runtime.admission import Limits
from e2sci.server import keys as store
from live import (
    HOST,
    BlockingEdge,
    LiveCloud,
    LivePeer,
    Named,
    Watched,
    draft,
    ended,
    free_port,
    listens,
    process,
)

DRAFT = "synthetic:seed=11,divergence=0.5"


def run(*args, cloud=None, model=DRAFT, stdin=None):
    where = ["--cloud", cloud if isinstance(cloud, str) else cloud.url] if cloud else []
    return CliRunner().invoke(main, ["run", *args, "--draft", model, *where], input=stdin)


def refused(result, *words, code=2):
    """Exactly one line of error, with these words in it."""
    assert result.exit_code == code, (words, result.output)
    errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.output
    for word in words:
        assert word in errors[0]
    if code == 2:
        assert result.stdout == ""
        usage = {"Usage", "Try"}  # click's own lines above an error of usage
        others = [
            x
            for x in result.stderr.splitlines()
            if x.strip() and x.split()[0].rstrip(":") not in usage
        ]
        assert others == errors


# ---- what the user says -----------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", " ", "\n\t "])
def test_an_empty_prompt(cloud, prompt):
    refused(run(prompt, cloud=cloud), "the prompt is empty")
    refused(run("-", cloud=cloud, stdin=prompt), "the prompt is empty")


@pytest.mark.parametrize("mode", ["cloud", "draft", "sync", "pipelined"])
def test_a_prompt_longer_than_the_context(cloud, mode):
    """At whichever end it is too long."""
    if mode in ("draft", "sync", "pipelined"):
        short = f"{DRAFT},context=32"
        result = run("x" * 40, "--mode", mode, cloud=cloud, model=short)
        refused(result, "the context holds 32", "shorten")
    if mode != "draft":
        refused(run("x" * 5000, "--mode", mode, cloud=cloud), "the context holds 4096")


CONTRADICTIONS = {
    "--mode cloud --window 3": "window",
    "--mode cloud --no-fill": "fill",
    "--mode cloud --accept fuzzy": "accept=fuzzy",
    "--mode cloud --trace t.jsonl": "no trace",
    "--mode draft --threshold .1": "threshold",
    "--threshold .2": "no threshold",
    "--accept typical --threshold .2": "no threshold",
    "--measure regret": "no measure",
    "--accept fuzzy --measure regret": "regret goes with elastic",
    "--budget .1": "accept=elastic",
    "--accept fuzzy --budget .1": "accept=elastic",
    "--floor .1": "floor",
    "--agreement": "agreement",
    "--json --show-origin": "--show-origin",
    "--raw --system brief": "--raw",
}


def test_flags_that_contradict_each_other(cloud, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags, word in CONTRADICTIONS.items():
        refused(run("hello", *flags.split(), cloud=cloud), word)
    assert not list(tmp_path.iterdir())


OUT_OF_RANGE = [
    "--temperature -1",
    "--temperature nan",
    "--temperature inf",
    "--top-k -1",
    "--top-p 0",
    "--top-p 1.5",
    "--top-p nan",
    "--min-p 1",
    "--repetition-penalty 0",
    "--frequency-penalty 2.5",
    "--presence-penalty -3",
    "--seed -1",
    f"--seed {2**63}",
    "--logit-bias 5",
    "--logit-bias x=1",
    "--logit-bias 5=200",
    "--logit-bias 5=nan",
    "--logit-bias -1=5",
    "--window 0",
    "--window 65",
    "--window many",
    "--mode pipelined --doubt 1.5",
    "--mode pipelined --doubt nan",
    "--mode sync --doubt 0.9",
    "--lookahead 0",
    "--lookahead 65",
    "--max-tokens 0",
    "--accept elastic --threshold -1",
    "--accept fuzzy --threshold nan",
    "--accept elastic --budget -1",
    "--accept elastic --budget nan",
    "--accept elastic --floor 2",
    "--accept yes",
    "--mode fast",
    "--wait -1",
    "--wait nan",
    "--context 1",
    "--threads 0",
    "--no-such-flag",
    "--stop ",
]


def test_values_out_of_range(cloud):
    for flags in OUT_OF_RANGE:
        name, _, value = flags.rpartition(" ")
        refused(run("hello", *name.split(), value, cloud=cloud))


@pytest.mark.parametrize(
    "model", ["no-such-model", "synthetic:colour=blue", "synthetic:seed=x", "x.gguf"]
)
def test_an_unknown_draft_model(cloud, model):
    refused(run("hello", cloud=cloud, model=model), model.partition(":")[0])


def test_a_trace_that_can_not_be_written(cloud, tmp_path):
    path = tmp_path / "nowhere" / "t.jsonl"
    refused(run("hello", "--trace", str(path), cloud=cloud), str(path), "No such file")
    refused(run("hello", "--trace", str(tmp_path), cloud=cloud), "directory")


# ---- what is at the other end -----------------------------------------------------------------


def test_no_cloud_there():
    url = f"ws://{HOST}:{free_port()}"
    refused(run("hello", cloud=url), url, "nothing listens there")
    doctor = CliRunner().invoke(main, ["doctor", "--cloud", url, "--draft", DRAFT])
    refused(doctor, url, "nothing listens there")


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:7071", "http://127.0.0.1:7071", "nonsense", "ws://", "ws://127.0.0.1:x",
     "ws://127.0.0.1:99999", "ws://127.0.0.1/#here", "ws://" + "a" * 70 + ".example"],
)  # fmt: skip
def test_no_websocket_url(url):
    refused(run("hello", cloud=url), url, "ws://host:port")


@contextmanager
def tcp(answer):
    """Something that answers any connection with `answer` and hangs up."""
    with socket.create_server((HOST, 0)) as server:

        def serve():
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    if answer is not None:
                        client.recv(4096)
                        client.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"ws://{HOST}:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "answer",
    [None, b"", b"220 mail.example ESMTP\r\n", b"HTTP/1.1 404 Not Found\r\n\r\n", b"\x00" * 99],
)
def test_something_else_listens_there(answer):
    with tcp(answer) as url:
        refused(run("hello", cloud=url), url, "not as an e2sci cloud")


def test_a_web_server_listens_there():
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "7")
            self.end_headers()
            self.wfile.write(b"Welcome")

        def log_message(self, *args):
            pass

    with HTTPServer((HOST, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"ws://{HOST}:{server.server_port}"
        refused(run("hello", cloud=url), url, "not as an e2sci cloud", "200")
        server.shutdown()


def test_another_websocket_server_listens_there():
    async def echo(socket):
        async for frame in socket:
            await socket.send(frame)

    with LivePeer(echo) as peer:
        refused(run("hello", cloud=peer.url), "answered with Hello")


@pytest.mark.parametrize("other", [0, 97, REAL_VOCAB - 1])
def test_different_tokenizers(other):
    """One token that differs is enough; both models are named."""
    with LiveCloud(Named("other-7b", other=other)) as cloud:
        refused(run("hello", cloud=cloud), "synthetic", "other-7b", "different vocabularies")
        doctor = CliRunner().invoke(main, ["doctor", "--cloud", cloud.url, "--draft", DRAFT])
        refused(doctor, "synthetic", "other-7b", "different vocabularies")
        with BlockingEdge(cloud.url, Named("fits", other=other)) as edge:
            assert edge.generate("hello", max_tokens=5).token_ids
        cloud.idle()


@pytest.mark.parametrize("end", ["edge", "cloud"])
def test_a_difference_behind_the_others_vocabulary_is_found_too(end):
    """The end with more tokens is the one that must look."""
    engines = Named("short", other=200), Named("long", tail=9)
    near, far = engines if end == "cloud" else engines[::-1]
    with LiveCloud(far) as cloud, BlockingEdge(cloud.url, near) as edge:
        with pytest.raises(Exception, match=r"short.*different vocabularies|long.*different"):
            edge.generate("hello")
        cloud.idle()


def test_a_cloud_without_a_place(cloud):
    with (
        LiveCloud(Watched(slots=1, seconds=0.005), limits=Limits(waiting=0)) as full,
        BlockingEdge(full.url, draft()) as edge,
    ):
        pieces = edge.stream("hello", max_tokens=500)
        next(pieces)
        refused(run("hello", "--wait", "0", cloud=full), "all 1 places are taken")
        pieces.close()
        full.check()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_cloud_gone_in_mid_answer(as_json):
    engine = Watched()
    with LiveCloud(engine) as cloud:
        whole = json.loads(run("hello", "--json", cloud=cloud).stdout)
        engine.passes.clear()
        engine.hook = lambda n: n == 8 and cloud.kill()
        result = run("hello", "--wait", "0.1", *(["--json"] if as_json else []), cloud=cloud)
        refused(result, "the cloud is gone", "nothing listens there", code=3)
        if as_json:
            said = json.loads(result.stdout)
            assert said["finish_reason"] == "lost"
            assert 0 < len(said["token_ids"]) == said["usage"]["completion_tokens"]
            assert said["token_ids"] == whole["token_ids"][: len(said["token_ids"])]
        else:
            text = result.stdout.removesuffix("\n")
            assert text
            assert whole["text"].startswith(text)
        engine.hook = None
        cloud._thread.join()
        cloud.start()
        cloud.check()


def test_a_demo_without_an_answer():
    def demo(*args, model="synthetic:seed=11"):
        return CliRunner().invoke(main, ["demo", "--draft", model, "--model", model, *args])

    for args in (["--rtt", "-1"], ["--up", "0"], ["--max-tokens", "1"]):
        refused(demo(*args))
    result = demo("--json", "--rtt", "1", model="synthetic:eos_bias=60")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the answer to this prompt is empty" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


# ---- e2sci cloud ------------------------------------------------------------------------------


def serve(*args):
    return CliRunner().invoke(main, ["cloud", "--model", "synthetic", *args])


def test_the_clouds_port_is_in_use(cloud):
    refused(serve("--listen", f"{HOST}:{cloud.port}"), str(cloud.port), "in use")


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0"])
def test_listening_to_other_machines_must_be_meant(listen, tmp_path):
    keys = str(tmp_path / "keys.json")
    store.add(Path(keys), "alice")
    refused(serve("--listen", listen), listen, "without --keys and --tls-cert;", "--insecure")
    refused(serve("--listen", listen, "--keys", keys), "without --tls-cert;", "--insecure")


@pytest.mark.parametrize(
    "listen", ["", "7071", "127.0.0.1", ":7071", "127.0.0.1:x", "127.0.0.1:70000", "::1:5"]
)
def test_no_address(listen):
    refused(serve("--listen", listen), "HOST:PORT")


def test_an_address_that_is_not_ours():
    refused(serve("--listen", "192.0.2.1:0", "--insecure"), "192.0.2.1", "can't listen")


@pytest.mark.parametrize("flags", ["--slots 0", "--slots 300", "--predictor nowhere.npz"])
def test_the_clouds_values_out_of_range(flags):
    refused(serve(*flags.split()))


def test_a_file_that_is_no_predictor(tmp_path):
    path = tmp_path / "p.npz"
    path.write_bytes(b"no")
    refused(serve("--predictor", str(path)), str(path), "not a predictor")


def test_a_cloud_without_its_model():
    result = CliRunner().invoke(main, ["cloud", "--model", "no-such-model"])
    refused(result, "no-such-model")


# ---- signals ----------------------------------------------------------------------------------


def test_ctrl_c_in_mid_answer():
    with LiveCloud(Watched(SyntheticConfig(seed=11, eos_bias=-20), seconds=0.01)) as cloud:
        args = ["run", "hello", "--draft", DRAFT, "--cloud", cloud.url, "--max-tokens", "2000"]
        with process(*args) as child:
            assert child.stdout.read(1)
            child.send_signal(signal.SIGINT)
            code, out, errors = ended(child)
            assert code == 130
            assert errors == ["Interrupted"]
            assert out.endswith("\n")
        cloud.check()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_cloud(number):
    """Cleanly, also in the middle of an answer."""
    with process(
        *("cloud", "--model", "synthetic:seed=11,eos_bias=-20", "--listen", f"{HOST}:0"),
        *("--drain", "0"),
    ) as child:
        url = listens(child)
        with BlockingEdge(url, draft(), patience=0) as edge:
            pieces = edge.stream("hello", max_tokens=3000)
            next(pieces)
            child.send_signal(number)
            code, out, errors = ended(child)
            assert (code, out, errors) == (0, "", [])
            with pytest.raises(Exception, match="the cloud is gone"):
                list(pieces)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run"], "Missing argument 'PROMPT'; see `main run --help`"),
        (["run", "x", "--mode", "foo"], "'foo' is not one of"),
        (["run", "x", "--windw", "3"], "No such option"),
        (["runn"], "No such command 'runn'"),
        (["models", "fetch"], "Missing argument 'NAME'; see `main models fetch --help`"),
    ],
)
def test_a_command_line_that_cannot_be_read(args, words):
    refused(CliRunner().invoke(main, args), words)
