"""The page at an edge's root: its files and nothing else, who may use it, what it is told."""

from __future__ import annotations

import http.client
import socket
import time
from pathlib import Path

import pytest

from e2sci import __version__
from e2sci.runtime.options import Options
from e2sci.server import edge_page
from e2sci.server import keys as store
from e2sci.server.keys import Keys
from live import HOST, LiveCloud, free_port
from serving import HELLO, LiveEdge

ONE = {"messages": HELLO, "max_tokens": 1}
OWN = [path.name for path in Path(edge_page.__file__).with_name("page").iterdir()]
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


@pytest.fixture(scope="module")
def edge(one_cloud):
    with LiveEdge(one_cloud) as edge:
        yield edge


def asked(edge, path, method="GET", **headers):
    """The path as it is, which httpx would tidy up: (response, body)."""
    connection = http.client.HTTPConnection(edge.at, timeout=20)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


# ---- files ------------------------------------------------------------------------------------


def test_the_page(edge):
    response, body = asked(edge, "/")
    assert response.status == 200
    assert body.startswith(b"<!doctype html>")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in [*OWN, "plotly.min.js"])])
def test_every_file(edge, path):
    response, body = asked(edge, path, **{"Accept-Encoding": "gzip"})
    assert response.status == 200
    assert int(response.headers["content-length"]) == len(body) > 0
    assert response.headers["content-encoding"] is None
    assert response.headers["content-security-policy"] == POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    kept = "max-age=604800" if "plotly" in path else "no-cache"
    assert response.headers["cache-control"] == kept
    head, nothing = asked(edge, path, "HEAD")
    assert (head.status, nothing) == (200, b"")
    assert head.headers["content-length"] == response.headers["content-length"]
    tag = response.headers["etag"]
    again, nothing = asked(edge, path, **{"If-None-Match": f'W/"x", {tag}'})
    assert (again.status, nothing, again.headers["etag"]) == (304, b"", tag)
    assert asked(edge, path, **{"If-None-Match": '"other"'})[0].status == 200


def test_a_file_that_changes_has_another_tag(tmp_path):
    path = tmp_path / "page.css"
    tags = []
    for text in ("a", "b"):
        path.write_text(text)
        tags.append(edge_page.Asset.of(path).tag)
    assert tags[0] != tags[1]


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/",
        "/page/nothing.js",
        "/page/../edge_page.py",
        "/page/%2e%2e/edge_page.py",
        "/page/..%2fedge_page.py",
        "/page/..%5cedge_page.py",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/index.html%00",
        "/page/widgetbundle.js",
        "/edge_page.py",
        "//",
    ],
)
def test_nothing_else_is_served(edge, path):
    response, body = asked(edge, path)
    assert (response.status, b'"error"' in body) == (404, True)


def test_it_takes_no_other_method(edge):
    for path in ("/", "/page/index.html", "/e2sci/info"):
        response, _ = asked(edge, path, "POST")
        assert response.status == 405


def test_a_reader_that_never_reads_is_left(edge, monkeypatch):
    monkeypatch.setattr(edge_page, "SEND_SECONDS", 0.2)
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect((HOST, int(edge.at.rpartition(":")[2])))
        s.sendall(b"GET /page/plotly.min.js HTTP/1.1\r\nHost: x\r\n\r\n")
        s.recv(1)
        assert edge.port.busy
        for _ in range(1000):
            if not edge.port.busy:
                return
            time.sleep(0.01)
        raise AssertionError("it is still waited for")


# ---- who is let in ----------------------------------------------------------------------------


def origin(edge, host, origin):
    """The status that a page of `origin` gets which asks for the model at `host`."""
    return asked(edge, "/v1/models", Host=host, Origin=origin)[0].status


def test_its_own_page_is_let_in_and_no_other(edge):
    port = edge.at.rpartition(":")[2]
    for name in (HOST, "localhost", "[::1]", "192.0.2.7"):
        assert origin(edge, f"{name}:{port}", f"http://{name}:{port}") == 200, name
        assert origin(edge, f"{name}:{port}", f"https://{name}:{port}") == 403, name
        assert origin(edge, f"{name}:{port}", f"http://{name}:1") == 403, name
        assert origin(edge, f"{name}:{port}", f"http://{name}") == 403, name
    assert origin(edge, HOST, f"http://{HOST}") == 200  # port 80
    assert origin(edge, f"localhost:{port}", f"http://{HOST}:{port}") == 403
    for foreign in ("http://page.example", "null", "", "*"):
        assert origin(edge, edge.at, foreign) == 403, foreign


@pytest.mark.parametrize(
    "name", ["rebound.example", "localhost.example", "127.0.0.1.example", "a.localhost", "null", ""]
)
def test_a_name_that_leads_here_is_not_ours(edge, name):
    """DNS rebinding: the page's own name is this machine's, too."""
    assert origin(edge, f"{name}:8080", f"http://{name}:8080") == 403
    response, body = asked(edge, "/v1/models", Host=name, Origin=f"http://{name}")
    assert response.status == 403
    assert b"--cors" in body
    assert b"localhost" in body


def test_other_names_can_be_invited(one_cloud):
    name = "http://laptop.example:8080"
    with LiveEdge(one_cloud, origins=[name]) as edge:
        assert origin(edge, "laptop.example:8080", name) == 200
        assert origin(edge, edge.at, f"http://{edge.at}") == 200
        assert origin(edge, edge.at, "http://page.example") == 403


def test_the_page_itself_needs_no_key(one_cloud, tmp_path):
    _, secret = store.add(tmp_path / "keys.json", "alice")
    with LiveEdge(one_cloud, keys=Keys.load(tmp_path / "keys.json")) as edge:
        for path in ("/", "/page/index.html", "/page/plotly.min.js"):
            assert edge.get(path).status_code == 200
        for path in ("/e2sci/info", "/v1/models", "/pages", "/e2sci/info/page/"):
            assert edge.get(path).status_code == 401, path
        page = {"Origin": f"http://{edge.at}", "Authorization": f"Bearer {secret}"}
        assert edge.get("/e2sci/info", headers=page).status_code == 200
        assert edge.post(body=ONE, headers=page).status_code == 200


def test_without_the_page(one_cloud):
    with LiveEdge(one_cloud, page=False) as edge:
        for path in ("/", "/page/index.html", "/page/plotly.min.js"):
            assert edge.get(path).status_code == 404
        assert origin(edge, edge.at, f"http://{edge.at}") == 403
        assert edge.get("/e2sci/info").status_code == 200


# ---- what it is told --------------------------------------------------------------------------


def test_what_there_is(one_cloud):
    defaults = Options(mode="auto", gamma=0.5, window=3)
    with LiveEdge(one_cloud, defaults=defaults) as edge:
        told = edge.get("/e2sci/info").json()
    assert told.pop("rtt_ms") > 0
    assert told == {
        "version": __version__,
        "draft": "synthetic",
        "model": "synthetic",
        "connected": True,
        "pass_ms": [[1, 1.0], [32, 1.0]],
        "modes": ["cloud", "draft", "sync", "pipelined", "auto"],
        "accepts": ["strict", "rejection", "fuzzy", "elastic", "typical"],
        "measures": ["js", "kl", "tv", "js_fsd", "regret"],
        "defaults": {
            "mode": "auto",
            "accept": "strict",
            "measure": "js",
            "threshold": None,
            "budget": None,
            "gamma": 0.5,
            "window": 3,
            "temperature": 0.0,
        },
    }


def test_the_model_has_the_name_it_was_given(one_cloud):
    with LiveEdge(one_cloud, name="mine") as edge:
        assert edge.get("/e2sci/info").json()["model"] == "mine"


def test_a_cloud_that_goes_and_comes():
    with LiveCloud() as cloud, LiveEdge(cloud) as edge:
        cloud.kill()
        told = edge.get("/e2sci/info")
        assert told.status_code == 200
        absent = {"connected": False, "model": None, "rtt_ms": None, "pass_ms": []}
        assert absent.items() <= told.json().items()
        cloud.start()
        assert edge.get("/e2sci/info").json()["connected"] is True
        cloud.kill()
        for _ in range(500):  # until the edge has noticed
            if not edge.get("/e2sci/info").json()["connected"]:
                break
            time.sleep(0.01)
        assert absent.items() <= edge.get("/e2sci/info").json().items()


def test_no_cloud_at_all():
    with LiveEdge(None, name="draft", defaults=Options(mode="draft")) as edge:
        told = edge.get("/e2sci/info").json()
        assert (told["connected"], told["modes"]) == (False, ["draft"])


def test_a_cloud_that_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("e2sci.server.edge_info.REACH_SECONDS", 0.2)
    for where in ("transport", "connection"):  # who else would end the wait
        monkeypatch.setattr(f"e2sci.runtime.{where}.OPEN_SECONDS", 600)
    with socket.create_server((HOST, 0)) as silent:
        url = f"ws://{HOST}:{silent.getsockname()[1]}"
        with LiveEdge(url) as edge:
            assert edge.get("/e2sci/info").json()["connected"] is False
    with LiveEdge(f"ws://{HOST}:{free_port()}") as edge:
        assert edge.get("/e2sci/info").json()["connected"] is False
