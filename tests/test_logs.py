"""Logs: one JSON object an event, and never a key, a prompt or a text in any of them."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import httpx
import pytest
from websockets.asyncio.client import connect

from e2sci.decoding.distribution import pack_ids
from e2sci.engines.synthetic import EOS
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.transport import Dial
from e2sci.server import keys as store
from e2sci.server import logs
from e2sci.server.cloud_app import listening
from e2sci.server.keys import Keys
from e2sci.session.messages import Cancel, Open, Window
from live import HOST, TIMES, Edge, RawClient, Watched, draft

SECRET = "plum tart for the ambassador"
ENDLESS = {"logit_bias": {EOS: -100.0}}


def made(form, monkeypatch, terminal=False):
    """The handler that `set_up` installs."""
    found = {}
    monkeypatch.setattr(logs.logging, "basicConfig", lambda **options: found.update(options))
    monkeypatch.setattr(logs.Console, "is_terminal", terminal)
    before = logging.getLogger("e2sci").level
    logs.set_up(form, logging.WARNING)
    logging.getLogger("e2sci").setLevel(before)
    assert found["level"] == logging.ERROR
    [handler] = found["handlers"]
    return handler


def record(message, *args, level=logging.INFO, failed=None, **extra):
    made = logging.LogRecord("e2sci.cloud", level, __file__, 1, message, args, failed)
    vars(made).update(extra)
    return made


def failure():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        return sys.exc_info()


def test_an_event_is_one_json_object_on_one_line(monkeypatch):
    handler = made("json", monkeypatch)
    ended = {"id": "ab" * 16, "tokens": 5, "acceptance": 0.5}
    line = handler.format(record("request ended: %s", "stop", request=ended, client="alice/1"))
    said = json.loads(line)
    assert said.pop("time").endswith("+00:00")
    assert said == {
        "level": "INFO",
        "logger": "e2sci.cloud",
        "event": "request ended: stop",
        "request": ended,
        "client": "alice/1",
    }
    line = handler.format(record("it broke\nhere", level=logging.ERROR, failed=failure()))
    assert "\n" not in line
    assert json.loads(line)["exc_info"][0].startswith("Traceback")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_for_people_says_what_belongs_to_it(monkeypatch, terminal):
    handler = made("text", monkeypatch, terminal)
    line = handler.format(
        record("ended: %s", "stop", request={"id": "ab", "s": 0.12345}, client="a")
    )
    assert line.endswith("ended: stop  id=ab  s=0.123  client=a")
    line = handler.format(record("it broke", failed=failure(), client="a"))
    assert "it broke  client=a\nTraceback" in line


async def busy(place, text, path):
    """Everything that a cloud logs something about."""
    engine = draft()
    dial = Dial(f"ws://{place}", text)
    async with Edge(dial, engine) as edge:
        jobs = [
            edge.generate(SECRET, max_tokens=40, accept=accept, temperature=0.7, seed=i, **ENDLESS)
            for i, accept in enumerate(("strict", "elastic", "rejection", "fuzzy", "typical"))
        ]
        results = await asyncio.gather(*jobs)
    wrong = text[:-4] + ("beef" if text[-4:] != "beef" else "cafe")
    async with httpx.AsyncClient(trust_env=False) as http:
        for key in (text, wrong):
            await http.get(f"http://{place}/metrics", headers={"Authorization": f"Bearer {key}"})
    with pytest.raises(Exception, match="401"):
        await connect(f"ws://{place}", additional_headers={"Authorization": f"Bearer {wrong}"})
    headers = {"Authorization": f"Bearer {text}"}
    prompt = pack_ids(SECRET.encode())
    for sending in (
        Open(request=1, prompt=prompt, max_tokens=0),
        Open(request=1, prompt=prompt, max_tokens=9000, sampling=ENDLESS),
        Cancel(request=1),
        Window(request=9, branch=0, start=0, ids=prompt),
        SECRET.encode(),
        SECRET,
    ):
        async with connect(f"ws://{place}", additional_headers=headers, close_timeout=1) as socket:
            client = RawClient(socket)
            await client.hello()
            await client.send(sending)
            await asyncio.sleep(0.05)
    path.write_text(f"damaged {text}")
    async with connect(f"ws://{place}", additional_headers=headers, close_timeout=1):
        pass
    return [wrong, *(result.text for result in results)]


async def test_no_key_no_prompt_and_no_text_in_any_log(tmp_path, caplog, monkeypatch):
    """At level DEBUG, of every library that cloud and edge use, in either form."""
    caplog.set_level(logging.DEBUG)
    for name in list(logging.root.manager.loggerDict):
        if not name.startswith(("e2sci.wire", "e2sci.edge.websocket")):  # held back in the code
            monkeypatch.setattr(logging.getLogger(name), "level", logging.DEBUG)
    path = tmp_path / "keys.json"
    key, text = store.add(path, "alice")

    broken = []

    def fail(_):
        if broken:
            raise RuntimeError("out of memory")

    async with (
        Cloud(Watched(hook=fail), times=TIMES) as cloud,
        listening(cloud, HOST, 0, keys=Keys.load(path)) as port,
    ):
        secrets = [SECRET, text, text[15:], *(await busy(f"{HOST}:{port}", text, path))]
        broken.append(True)
        async with connect(
            f"ws://{HOST}:{port}", additional_headers={"Authorization": f"Bearer {text}"}
        ) as socket:
            client = RawClient(socket)
            await client.hello()
            await client.send(Open(request=1, prompt=pack_ids(SECRET.encode()), max_tokens=9))
            await client.receive()
            await client.receive()
    events = [r for r in caplog.records if r.name.startswith("e2sci")]
    said = " ".join(r.getMessage() for r in events)
    for word in ("edge connected", "request ended", "refused", "damaged", "engine failed"):
        assert word in said, word
    assert f"alice/{key.id}" in {vars(r).get("client") for r in events}
    for form in ("text", "json"):
        handler = made(form, monkeypatch)
        for each in caplog.records:
            if each.name.startswith(("websockets.client", "httpcore", "httpx")):
                continue  # the test's own, which is no edge
            line = handler.format(each)
            for secret in secrets:
                for spelled in (
                    secret,
                    str(list(secret.encode())).strip("[]"),
                    secret.encode().hex(),
                    secret.encode().hex(" "),
                ):
                    assert spelled not in line, each.name
