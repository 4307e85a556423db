"""What operators are told and given is so: tables, dashboard, examples, unit, balancer."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
import shutil
import socket
import subprocess
from contextlib import asynccontextmanager
from functools import partial

import click
import httpx
import pytest
import trustme
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import InvalidStatus

from doorway import client, finished, front, opening, trusting
from e2sci.cli import main
from e2sci.runtime.metrics import Metrics
from e2sci.server import keys as store
from e2sci.server.keys import Keys
from live import HOST, free_port
from test_docs import ROOT, bare, fences, in_code, section, table

OPERATIONS, DEPLOYMENT = ROOT / "docs/operations.md", ROOT / "docs/deployment.md"
UNIT, PROXY = ROOT / "deploy/e2sci-cloud.service", ROOT / "deploy/haproxy.cfg"
CONTAINER, DASHBOARD = ROOT / "deploy/Containerfile", ROOT / "deploy/grafana-dashboard.json"


def families():
    """The metrics of a cloud: {name as scraped: (kind, labels, text)}."""
    metrics = Metrics()
    found = {}
    for value in vars(metrics).values():
        if labels := getattr(value, "_labelnames", ()):
            value.labels(*["x"] * len(labels))
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        labels = {name for s in family.samples for name in s.labels} - {"le"}
        if not family.name.endswith("_created"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = (family.type, labels, family.documentation)
    return found


# ---- tables -----------------------------------------------------------------------------------


def test_the_metrics_are_the_codes():
    rows = table(section(OPERATIONS, "Metrics"))
    written = {bare(n): (kind, set(filter(None, [bare(label)])), m) for n, kind, label, m in rows}
    assert written == families()


def test_the_limits_are_the_codes():
    rows = table(section(OPERATIONS, "Limits"))
    options = {name: p for p in main.get_command(None, "cloud").params for name in p.opts}
    for _, default, option, where, _ in rows:
        assert ast.literal_eval(bare(default)) == in_code(bare(where)), where
        if option:
            assert options[bare(option)].default == ast.literal_eval(bare(default)), option


def test_the_events_are_logged_somewhere():
    source = " ".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    logged = " ".join(re.findall(r'log\.\w+\(\s*"([^"]*)', source))
    for event, _, _ in table(section(OPERATIONS, "Logs")):
        assert event in logged, event


# ---- the dashboard ----------------------------------------------------------------------------


def test_the_dashboard_shows_every_metric_and_no_other():
    board = json.loads(DASHBOARD.read_text())
    known = {}
    for name, (kind, labels, _) in families().items():
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        known |= {
            name + end: (name, labels | {"le"} if "bucket" in end else labels) for end in ends
        }
    used = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"e2sci_\w+", target["expr"])
            assert names
            used |= {known[name][0] for name in names}
            labels = set.union(*(known[name][1] for name in names))
            for grouped in re.findall(r"by \((\w+)\)", target["expr"]):
                assert grouped in labels
            for shown in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert shown in labels
            assert target["expr"].count("(") == target["expr"].count(")")
    assert used == set(families())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [tuple(panel["gridPos"][k] for k in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places)


# ---- examples ---------------------------------------------------------------------------------


def examples():
    """Every `e2sci …` that operators are shown, as words."""
    texts = [block for path in (OPERATIONS, DEPLOYMENT) for block in fences(path, "")]
    image = re.sub(r'[",]', "", CONTAINER.read_text().partition("\nCMD [")[2])
    texts += [UNIT.read_text(), f"e2sci {image}"]
    for text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            if found := re.search(r"\be2sci\]? +((?:cloud|keys|run|top|plan|fleet)\b.*)", line):
                yield found[1].split("  #")[0].rstrip("] ")


def test_the_options_of_every_example_exist():
    seen = list(examples())
    assert len(seen) >= 11
    for line in seen:
        words = shlex.split(line)
        command = main.get_command(None, words.pop(0))
        if isinstance(command, click.Group):
            command = command.get_command(None, words.pop(0))
        known = {name for p in command.params for name in p.opts}
        for word in words:
            assert not word.startswith("--") or word in known, line


def test_what_the_image_is_made_of_is_there():
    for line in CONTAINER.read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
    extras = re.search(r"/src\[([\w,]+)\]", CONTAINER.read_text())[1].split(",")
    project = (ROOT / "pyproject.toml").read_text()
    for extra in extras:
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not there")
def test_the_unit_is_one(tmp_path):
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/e2sci/bin/e2sci", "/bin/sh"))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    drain = int(re.search(r"--drain (\d+)", UNIT.read_text())[1])
    assert int(re.search(r"TimeoutStopSec=(\d+)", UNIT.read_text())[1]) > drain


# ---- the balancer -----------------------------------------------------------------------------


@asynccontextmanager
async def balanced(tmp_path, authority, *ports):
    """deploy/haproxy.cfg in front of clouds on `ports`; yields its place."""
    at = free_port()
    pem = tmp_path / "cloud.pem"
    authority.issue_cert(HOST).private_key_and_cert_chain_pem.write_to_path(pem)
    text = PROXY.read_text()
    for old, new in (
        ("bind :443", f"bind {HOST}:{at}"),
        ("/etc/haproxy/cloud.pem", str(pem)),
        ("inter 2s", "inter 50ms"),
        *((f"10.0.0.{11 + i}:7071", f"{HOST}:{port}") for i, port in enumerate(ports)),
    ):
        assert old in text
        text = text.replace(old, new)
    config = tmp_path / "haproxy.cfg"
    config.write_text(text)
    process = await asyncio.create_subprocess_exec("haproxy", "-db", "-q", "-f", str(config))
    try:
        for _ in range(500):
            with socket.socket() as probe:
                if probe.connect_ex((HOST, at)) == 0:
                    break
            await asyncio.sleep(0.02)
        yield type("Place", (), {"at": f"{HOST}:{at}"})
    finally:
        process.kill()
        await process.wait()


@pytest.mark.skipif(not shutil.which("haproxy"), reason="HAProxy is not there")
async def test_clouds_behind_the_balancer(tmp_path):
    """Keys reach the clouds; a full cloud's edge goes to the other; a drained one gets none."""
    authority = trustme.CA()
    trust = trusting(authority)
    path = tmp_path / "keys.json"
    _, key = store.add(path, "alice")
    options = {"keys": Keys.load(path), "connections": 1}
    async with (
        front(**options) as a,
        front(**options) as b,
        balanced(tmp_path, authority, a.port, b.port) as place,
        httpx.AsyncClient(trust_env=False, verify=trust) as http,
    ):

        async def page(name):
            return (await http.get(f"https://{place.at}{name}")).status_code

        async def said(raw):
            await raw.send(opening(tokens=20))
            return await finished(raw)

        async def comes_in():
            async with edge() as raw:
                return await said(raw) == (20, "length")

        edge = partial(client, place, key, scheme="wss", ssl=trust)
        assert await page("/metrics") == 403
        with pytest.raises(InvalidStatus, match="401"):
            async with client(place, scheme="wss", ssl=trust):
                pass
        async with edge() as one, edge() as two:
            assert [await said(one), await said(two)] == [(20, "length")] * 2
            assert [len(each.cloud.scheduler._known) for each in (a, b)] == [1, 1]
        await a.cloud.drain(0)
        row = 0
        for _ in range(1000):  # until the balancer has noticed, some are told to go elsewhere
            row = row + 1 if await comes_in() else 0
            if row == 6:
                break
        assert row == 6
        await b.cloud.drain(0)
        for _ in range(1000):
            if await page("/readyz") == 503:
                return
        raise AssertionError("with both drained the balancer still finds one")
