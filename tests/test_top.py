"""`e2sci top`: the figures are what went on between two looks, and every failure is one line."""

from __future__ import annotations

import json
import math
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import trustme
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from e2sci.cli import main, scrape
from e2sci.cli import top as top_module
from e2sci.cli.common import BadInput
from e2sci.cli.scrape import Figures, Look, figures, quantile
from e2sci.cli.top import BARS, sparkline, view
from e2sci.runtime.edge import BlockingEdge
from e2sci.runtime.metrics import Metrics
from e2sci.server import keys as store
from e2sci.server.cloud_app import tls_context
from e2sci.server.keys import Keys
from live import HOST, LiveCloud, draft, free_port

top = CliRunner()


def e2sci(*args, key=None):
    return top.invoke(main, ["top", *args, "--once"], env={"E2SCI_API_KEY": key})


def refused(done, *words):
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
    for word in words:
        assert word in done.stderr


# ---- figures ----------------------------------------------------------------------------------


def look(at, metrics):
    from prometheus_client import generate_latest

    return Look(at, scrape._parsed(generate_latest(metrics.registry)))


def test_the_figures_are_those_between_two_looks():
    m = Metrics()
    m.passed(900, 9, 2.0)
    m.judged.labels("rejected").inc(100)
    before = look(10.0, m)
    m.connections.set(3)
    m.sessions.set(2)
    m.waiting.set(1)
    m.drafts_queued.set(7)
    m.cached_tokens.set(1000)
    m.draining.set(1)
    for _ in range(9):
        m.passed(4, 2, 0.04)
    m.passed(14, 2, 0.2)
    m.judged.labels("accepted").inc(30)
    m.judged.labels("rejected").inc(10)
    m.tokens.labels("drafted").inc(30)
    m.tokens.labels("corrected").inc(10)
    m.tokens.labels("filled").inc(20)
    m.credit.observe(0.5)
    m.credit.observe(0.7)
    m.threshold.observe(0.2)
    m.evictions.inc(2)
    m.received.inc(500)
    m.sent.inc(250)
    m.requests.labels("stop").inc(4)
    m.errors.labels("busy").inc(1)
    f = figures(before, look(15.0, m))
    assert (f.connections, f.sessions, f.waiting, f.drafts_queued) == (3, 2, 1, 7)
    assert (f.cached_tokens, f.draining) == (1000, True)
    assert (f.tokens_per_s, f.drafted_per_s, f.corrected_per_s, f.filled_per_s) == (12, 6, 2, 4)
    assert (f.fed_per_s, f.passes_per_s, f.pass_tokens, f.pass_requests) == (10, 2, 5, 2)
    assert f.pass_ms_p50 == pytest.approx(30 + 20 * 5 / 9)
    assert f.pass_ms_p95 == pytest.approx(150 + 100 * 0.5)
    assert f.acceptance == 0.75
    assert (f.credit, f.threshold) == (pytest.approx(0.6), pytest.approx(0.2))
    assert (f.evictions_per_s, f.received_bytes_per_s, f.sent_bytes_per_s) == (0.4, 100, 50)
    assert (f.requests, f.errors) == ({"stop": 4}, {"busy": 1})


def test_where_nothing_happened_there_are_no_shares():
    m = Metrics()
    m.passed(5, 1, 0.1)
    f = figures(look(0.0, m), look(1.0, m))
    assert f.tokens_per_s == f.passes_per_s == 0
    for name in ("pass_ms_p50", "pass_tokens", "acceptance", "credit", "threshold"):
        assert getattr(f, name) is None


def test_a_cloud_that_was_restarted():
    m, fresh = Metrics(), Metrics()
    m.tokens.labels("filled").inc(1000)
    fresh.tokens.labels("filled").inc(10)
    assert figures(look(0.0, m), look(1.0, fresh)).tokens_per_s == 10


def test_quantiles_by_hand():
    buckets = [(1.0, 0.0), (2.0, 4.0), (4.0, 4.0), (math.inf, 8.0)]
    assert [quantile(q, buckets) for q in (0.0, 0.25, 0.5, 0.75, 1.0)] == [1.0, 1.5, 2.0, 4.0, 4.0]
    assert quantile(0.5, []) is None
    assert quantile(0.5, [(1.0, 0.0), (math.inf, 0.0)]) is None


@given(st.lists(st.floats(0, 99), min_size=1), st.floats(0.01, 1))
def test_quantiles_lie_in_the_right_bucket(values, share):
    ends = [1.0, 5.0, 20.0, 100.0, math.inf]
    found = quantile(share, [(end, float(sum(v <= end for v in values))) for end in ends])
    exact = sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]
    bucket = next(i for i, end in enumerate(ends) if exact <= end)
    assert ([0.0, *ends][bucket]) <= found <= ends[bucket]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([5.0], ""),
        ([0.0, 1.0], BARS[0] + BARS[-1]),
        ([0.0, 0.0], BARS[0] * 2),
        ([1.0, None, 2.0], BARS[4] + " " + BARS[-1]),
    ],
)
def test_sparklines(values, line):
    assert sparkline(values) == line


def shown(*args):
    console = Console(width=120)
    with console.capture() as capture:
        console.print(view(*args))
    return capture.get()


def test_the_view_has_every_figure_and_its_course():
    m = Metrics()
    before = look(0.0, m)
    m.passed(4, 2, 0.04)
    m.draining.set(1)
    m.errors.labels("busy").inc(3)
    history = [figures(before, look(float(t), m)) for t in (1, 2, 4)]
    text = shown("http://h:1/metrics", history, "nothing listens there")
    for word in (
        *("http://h:1 ", "draining", "nothing listens there", "edges", "seated", "waiting"),
        *("tokens/s", "passes/s", "p95", "acceptance", "threshold", "evictions", "3 busy"),
        "█▅▃",
    ):
        assert word in text
    assert shown("http://h:1/metrics", [], "gone").strip() == "http://h:1  gone"


def test_an_outage_is_waited_for(monkeypatch):
    """It is said, and the figures go on behind it."""
    m = Metrics()
    looks = [look(1.0, m), BadInput("nothing listens there"), look(3.0, m), KeyboardInterrupt()]
    seen = []

    class Fake:
        url = "http://h:1/metrics"

        def look(self):
            found = looks.pop(0)
            if isinstance(found, BaseException):
                raise found
            return found

    monkeypatch.setattr(top_module.time, "sleep", lambda _: None)
    monkeypatch.setattr(top_module, "view", lambda *args: seen.append(args) or "")
    with pytest.raises(KeyboardInterrupt):
        top_module._watch(Fake(), look(0.0, m), 1.0)
    assert [(len(history), problem) for _, history, problem in seen] == [
        (1, ""),
        (1, "nothing listens there"),
        (2, ""),
    ]


# ---- a real cloud -----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_a_busy_cloud(scheme):
    with LiveCloud() as cloud:
        with BlockingEdge(cloud.url, draft()) as edge:
            edge.generate("hello", max_tokens=20)
        done = e2sci(f"{scheme}://{HOST}:{cloud.port}", "--interval", "0.1", "--json")
        said = json.loads(done.stdout)
        assert set(said) == set(Figures.__dataclass_fields__)
        assert sum(said["requests"].values()) == 1
        text = e2sci(f"{scheme}://{HOST}:{cloud.port}/", "--interval", "0.1").stdout
        assert "0 seated, 0 waiting" in text


def test_keys_and_tls(tmp_path):
    authority = trustme.CA()
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    issued = authority.issue_cert(HOST)
    authority.cert_pem.write_to_path(ca)
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    path = tmp_path / "keys.json"
    _, text = store.add(path, "alice")
    with LiveCloud(keys=Keys.load(path), tls=tls_context(cert, key)) as cloud:
        url = f"wss://{HOST}:{cloud.port}"
        short = ("--interval", "0.1", "--json", "--ca")
        assert "connections" in json.loads(e2sci(url, *short, str(ca), key=text).stdout)
        refused(e2sci(url, *short, str(ca)), "needs an API key; set E2SCI_API_KEY")
        bad = e2sci(url, *short, str(ca), key=f"{text[:-8]}deadbeef")
        refused(bad, "does not accept this API key")
        assert "deadbeef" not in bad.stderr
        refused(e2sci(url, key=text), "not trusted", "--ca")
        refused(e2sci(url, *short, str(key), key=text), "no certificates in PEM form")
        refused(e2sci(url, *short, "nowhere"), "can't read nowhere: No such file")
        refused(e2sci(f"ws://{HOST}:{cloud.port}"), "can't read")


# ---- mistakes ---------------------------------------------------------------------------------


def test_no_cloud_there():
    refused(e2sci(f"http://{HOST}:{free_port()}"), "nothing listens there")


@pytest.mark.parametrize(
    "url",
    ["", "foo", "h:1", "ftp://h", "http://", "http://h:x", "http://h:70000", "http://u:p@h", "é"],
)
def test_no_url(url):
    refused(e2sci(url), "URL")


def test_a_key_goes_nowhere_in_the_clear():
    for url in ("http://192.0.2.1:7071", "ws://cloud.example.org"):
        done = e2sci(url, key="e2sci_secret")
        refused(done, "not encrypted", "--allow-insecure")
        assert "e2sci_secret" not in done.output
    refused(e2sci(f"ws://localhost:{free_port()}", key="e2sci_secret"), "nothing listens there")


def test_a_key_that_can_not_travel():
    done = e2sci(f"ws://{HOST}:{free_port()}", key="e2sci_\nsecret")
    refused(done, "printable ASCII")
    assert "secret" not in done.output


@contextmanager
def web(answer):
    """Something else that speaks HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.headers["Authorization"])
            answer(self)

        def log_message(self, *_):
            pass

    seen = []
    server = HTTPServer((HOST, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{HOST}:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def saying(status, body=b"", **headers):
    def answer(handler):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (saying(500), "HTTP 500"),
        (saying(200), "not as an e2sci cloud"),
        (saying(200, b"<html>"), "not as an e2sci cloud"),
        (saying(200, b"\xff\xfe"), "not as an e2sci cloud"),
        (saying(200, b'up{job="x"} 1\n'), "not as an e2sci cloud"),
        (saying(200, b"e2sci_connections 1\n" * (scrape.MAX_BYTES // 20 + 1)), "not as an e2sci"),
        (lambda handler: handler.wfile.write(b"junk\r\n\r\n"), "can't read"),
        (lambda handler: None, "can't read"),
    ],
)
def test_something_else_listens_there(answer, words):
    with web(answer) as (url, _):
        refused(e2sci(url), words)


def test_a_key_is_not_taken_elsewhere():
    with web(saying(200)) as (there, seen), web(saying(302, Location=there)) as (here, _):
        refused(e2sci(here, key="e2sci_secret"), "HTTP 302")
        assert seen == []


@pytest.mark.parametrize("flags", ["--interval 0", "--interval 0.09", "--interval nan"])
def test_intervals(flags):
    refused(e2sci(*flags.split()), "--interval")
