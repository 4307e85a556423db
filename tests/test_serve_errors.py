"""What `e2sci serve` refuses, and what it says when something goes wrong: OpenAI's shapes, one line
that tells how to mend it, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time

import httpx
import openai
import pytest

from e2sci.engines.base import EngineError
from e2sci.engines.synthetic import EOS, SyntheticConfig
from e2sci.runtime.admission import Limits
from e2sci.runtime.edge import Edge
from e2sci.server import keys as store
from e2sci.server.edge_app import edge_app
from e2sci.server.edge_port import listening
from e2sci.server.keys import Keys
from e2sci.server.openai_requests import HARMLESS, ChatRequest, TextRequest
from live import HOST, LiveCloud, Named, Watched, draft, free_port, until
from serving import HELLO, NAME, LiveEdge, bound, chat, failed, refused

ENDLESS = {"logit_bias": {str(EOS): -100}}
LONG = {"messages": HELLO, "max_tokens": 3000, "seed": 1}


@pytest.fixture(scope="module")
def edge(one_cloud):
    with LiveEdge(one_cloud) as edge:
        yield edge
        edge.idle()
        assert chat(edge, max_tokens=5, extra_body=ENDLESS).usage.completion_tokens == 5


# ---- bad input --------------------------------------------------------------------------------

BAD = [
    ({"temperature": -1}, "temperature is -1", "temperature"),
    ({"temperature": "hot"}, "temperature: expected `float | null`, got `str`", "temperature"),
    ({"top_p": 0}, "top_p is 0", "top_p"),
    ({"min_p": 1}, "min_p is 1", "min_p"),
    ({"top_k": -2}, "top_k is -2", "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0", "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty is 3", "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty is -3", "frequency_penalty"),
    ({"seed": -1}, "seed is -1", "seed"),
    ({"seed": 2**63}, "seed", "seed"),
    ({"max_tokens": 0}, "max_tokens is 0", "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens: expected `int | null`, got `float`", "max_tokens"),
    ({"n": 0}, "n is 0; expected 1 to 8", "n"),
    ({"n": 9}, "n is 9; expected 1 to 8", "n"),
    ({"stop": ["x"] * 17}, "stop takes up to 16", "stop"),
    ({"stop": ""}, "stop takes up to 16 texts of 1 to 256", "stop"),
    ({"stop": "x" * 257}, "stop takes up to 16 texts of 1 to 256", "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5] is 101", "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias names token 99999; ids lie below", None),
    ({"stream_options": {"include_usage": True}}, "stream = true", "stream_options"),
    ({"response_format": {"type": "json_object"}}, "only text is written", "response_format"),
    ({"e2sci": {"mood": "good"}}, "e2sci: object contains unknown field `mood`", "e2sci"),
    ({"e2sci": {"mode": "fast"}}, "e2sci.mode: invalid enum value 'fast'", "e2sci"),
    ({"e2sci": {"threshold": 1}}, "strict has no threshold", None),
    ({"e2sci": {"mode": "cloud", "window": 4}}, "drop window", None),
    ({"e2sci": {"window": 65}}, "window is 65", None),
    ({"model": 5}, "model: expected `str | null`, got `int`", "model"),
]
CHATS = [
    ({"messages": []}, "messages: there is none", "messages"),
    ({"messages": "hello"}, "messages: expected `array`, got `str`", "messages"),
    ({"messages": [{"content": "x"}]}, "missing required field `role`", "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "the role is 'tool'", "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "drop the 'image_url'",
        "messages",
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[1]: functions are not supported",
        "messages",
    ),
    ({"top_logprobs": 2}, "logprobs = true", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs is 21; expected 0 to 20", "logprobs"),
    ({"logprobs": 1}, "logprobs: expected `bool | null`", "logprobs"),
    ({"tools": [{"type": "function"}]}, "functions are not supported", "tools"),
    ({"tool_choice": "required"}, "leave it out", "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions are not supported", "functions"),
    ({"modalities": ["text", "audio"]}, "only text is written", "modalities"),
    ({"audio": {"voice": "x"}}, "only text is written", "audio"),
    (
        {"logprobs": True, "e2sci": {"on_cloud_loss": "draft"}},
        "drop one of logprobs and on_cloud_loss",
        "logprobs",
    ),
    ({"logprobs": True, "e2sci": {"mode": "draft"}}, "drop logprobs", "logprobs"),
]
TEXTS = [
    ({"prompt": ""}, "the prompt is empty", None),
    ({"prompt": []}, "prompt: expected a text", "prompt"),
    ({"prompt": ["a", 5]}, "prompt: expected a text", "prompt"),
    ({"prompt": [["a"]]}, "expected `int`, got `str`", "prompt"),
    ({"prompt": [5, EOS + 1]}, f"token id {EOS + 1} is out of range", None),
    ({"prompt": [-1]}, "token id -1 is out of range", None),
    ({"prompt": ["a"] * 33}, "33 texts; 32 at most", "prompt"),
    ({"prompt": ["a"] * 17, "n": 2}, "34 texts; 32 at most", "prompt"),
    ({"prompt": "a" * 4096}, "the context holds 4096", None),
    ({"logprobs": True}, "logprobs: expected `int | null`", "logprobs"),
    ({"echo": True}, "the prompt is not repeated", "echo"),
    ({"suffix": "x"}, "fill-in-the-middle", "suffix"),
    ({"best_of": 2}, "ask for `n` texts", "best_of"),
]


@pytest.mark.parametrize(("change", "words", "param"), BAD + CHATS, ids=str)
def test_bad_chats(edge, change, words, param):
    answer = edge.post(body={"messages": HELLO, "max_tokens": 2, **change})
    error = failed(answer, 400, words, code=None)
    assert error["param"] == param or (param is None and error["param"] in error["message"])


@pytest.mark.parametrize(("change", "words", "param"), BAD + TEXTS, ids=lambda x: str(x)[:40])
def test_bad_completions(edge, change, words, param):
    answer = edge.post("/completions", body={"prompt": "hi", "max_tokens": 2, **change})
    error = failed(answer, 400, words, code=None)
    assert error["param"] == param or (param is None and error["param"] in error["message"])


def test_what_must_be_there(edge):
    failed(edge.post(body={}), 400, "missing required field `messages`")
    failed(edge.post("/completions", body={}), 400, "missing required field `prompt`")


def test_what_changes_nothing_is_let_pass(edge):
    none = dict.fromkeys([*ChatRequest.__struct_fields__, *TextRequest.__struct_fields__])
    plain = {"max_tokens": 3, "temperature": 0}
    wanted = edge.post(body={"messages": HELLO, **plain}).json()["choices"]
    harmless = {name: values[0] for name, (values, _) in HARMLESS.items() if values}
    others = {"user": "me", "metadata": {"a": "b"}, "store": False, "no_such_field": [1]}
    for more in (none, harmless, others, {"top_k": -1, "stop": []}, {"tool_choice": "auto"}):
        answer = edge.post(body={**more, "messages": HELLO, **plain})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == wanted


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is no JSON"),
        (b"{", "the body is no JSON"),
        (b"{'messages': []}", "the body is no JSON"),
        (b'{"model": "\xff"}', "the body is no JSON"),
        (b'{"model": "\\ud800"}', "the body is no JSON"),
        (b'{"temperature": NaN}', "the body is no JSON"),
        (b'{"temperature": 1e999}', "temperature"),
        (b"[]", "expected `object`, got `array`"),
        (b'{"x": ' + b"[" * 200_000, "the body is nested too deeply"),
        (b'{"tools": ' + b'{"a":' * 200_000, "the body is nested too deeply"),
        (b"\x1f\x8b\x08\x00", "the body is no JSON"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_bodies_that_are_none(edge, body, words):
    failed(edge.post(body=body), 400, words)


def test_pages_that_are_not_there(edge):
    failed(edge.get("/v1/chat"), 404, "/v1/chat/completions")
    failed(edge.get("/v1"), 404, "no such page")
    answer = edge.get("/v1/chat/completions")
    failed(answer, 405, "takes POST only")
    assert answer.headers["allow"] == "POST"
    assert edge.get("/healthz").text == "ok\n"


# ---- who is let in ----------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.json"


def test_keys(one_cloud, path):
    key, secret = store.add(path, "alice")
    with LiveEdge(one_cloud, keys=Keys.load(path)) as edge:
        for wrong in ({}, {"Authorization": "Bearer sk-1"}, {"Authorization": f"Basic {secret}"}):
            for answer in (edge.get("/v1/models", headers=wrong), edge.post(headers=wrong)):
                failed(answer, 401, "needs a key", code="invalid_api_key")
                assert answer.headers["www-authenticate"].startswith("Bearer")
        assert edge.get("/healthz").status_code == 200
        with edge.openai() as client, refused(openai.AuthenticationError, code="invalid_api_key"):
            client.models.list()
        with edge.openai(api_key=secret) as client:
            assert [m.id for m in client.models.list()] == [NAME]
            assert client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=1)
        store.revoke(path, key.id)
        failed(edge.get("/v1/models", headers={"Authorization": f"Bearer {secret}"}), 401)


def test_a_keys_limits(path):
    limits = {"sessions": 1, "tokens_per_minute": 100, "context": 60}
    _, secret = store.add(path, "alice", **limits)
    _, other = store.add(path, "bob")
    engine = Watched(SyntheticConfig(seed=11, eos_bias=-20.0), seconds=0.01)
    with LiveCloud(engine) as cloud, LiveEdge(cloud, keys=Keys.load(path)) as edge:
        mine = {"Authorization": f"Bearer {secret}"}
        long = {"messages": [{"role": "user", "content": "x" * 60}]}
        failed(edge.post(body=long, headers=mine), 400, "may have 60")
        with edge.openai(api_key=secret) as client:
            with client.chat.completions.create(model=NAME, stream=True, **LONG) as stream:
                next(stream)
                answer = edge.post(body=LONG, headers=mine)
                failed(answer, 429, "its key allows 1", code="limited")
                assert answer.headers["retry-after"] == "1"
                theirs = {"Authorization": f"Bearer {other}"}
                assert edge.post(body={**LONG, "max_tokens": 1}, headers=theirs).is_success
            edge.idle()
            used = 0
            while used < 3 and (answer := edge.post(body=LONG, headers=mine)).is_success:
                assert answer.json()["usage"]["total_tokens"] == 60
                used += 1
        assert 1 <= used <= 2
        failed(answer, 429, "100 tokens a minute", code="limited")
        assert 1 <= int(answer.headers["retry-after"]) <= 60


def test_web_pages_are_kept_out(one_cloud):
    page = {"Origin": "http://page.example"}
    with LiveEdge(one_cloud) as edge:
        for origin in (page, {"Origin": "null"}):
            failed(edge.post(body=LONG, headers=origin), 403, "--cors", code="origin_not_allowed")
            failed(edge.get("/v1/models", headers=origin), 403)
        assert "access-control-allow-origin" not in edge.get("/v1/models").headers
    with LiveEdge(one_cloud, origins=["http://page.example"]) as edge:
        answer = edge.post(body={**LONG, "max_tokens": 1}, headers=page)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        bad = edge.post(body={}, headers=page)
        assert bad.headers["access-control-allow-origin"] == "http://page.example"
        failed(bad, 400)
        failed(edge.post(body=LONG, headers={"Origin": "http://other.example"}), 403)
        asked = {"Access-Control-Request-Method": "POST"}
        asked |= {"Access-Control-Request-Headers": "authorization, x-stainless-lang"}
        with httpx.Client(trust_env=False) as http:
            answer = http.options(f"{edge.url}/chat/completions", headers={**page, **asked})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
    with LiveEdge(one_cloud, origins=["*"]) as edge:
        assert edge.post(body={**LONG, "max_tokens": 1}, headers=page).status_code == 200


# ---- the cloud --------------------------------------------------------------------------------


def test_no_cloud():
    with LiveEdge(f"ws://{HOST}:{free_port()}", patience=0) as edge:
        for answer in (edge.post(body=LONG), edge.get("/v1/models")):
            failed(answer, 503, "nothing listens there", code="cloud_unreachable")
        assert edge.get("/healthz").status_code == 200
        edge.idle()
    with LiveEdge(f"ws://{HOST}:{free_port()}", patience=0, name="mine") as edge:
        failed(edge.post(body={**LONG, "stream": True}), 503, code="cloud_unreachable")
        assert edge.get("/v1/models").json()["data"][0]["id"] == "mine"


def test_a_cloud_that_comes_later():
    with LiveCloud() as cloud:
        cloud.kill()
        with LiveEdge(cloud, patience=0) as edge:
            failed(edge.post(body=LONG), 503)
            cloud.start()
            assert chat(edge, max_tokens=3, extra_body=ENDLESS).model == NAME


def test_a_pair_that_does_not_fit():
    with LiveCloud(Named("other", other=104)) as cloud, LiveEdge(cloud) as edge:
        failed(edge.post(body=LONG), 503, "different vocabularies", code="tokenizer")


def test_a_cloud_that_has_no_place():
    engine = Watched(SyntheticConfig(seed=11, eos_bias=-20.0), slots=1, seconds=0.02)
    with (
        LiveCloud(engine, limits=Limits(waiting=0)) as cloud,
        LiveEdge(cloud, patience=0) as edge,
        edge.openai() as client,
    ):
        with client.chat.completions.create(model=NAME, stream=True, **LONG) as stream:
            next(stream)
            answer = edge.post(body=LONG)
            failed(answer, 429, code="busy")
            assert int(answer.headers["retry-after"]) >= 1
        edge.idle()


@pytest.mark.parametrize("n", [1, 3])
def test_a_cloud_that_is_lost(n):
    engine = Watched(SyntheticConfig(seed=11, eos_bias=-20.0), slots=4, seconds=0.02)
    with LiveCloud(engine) as cloud, LiveEdge(cloud, patience=0) as edge:
        with edge.openai() as client:
            stream = client.chat.completions.create(model=NAME, stream=True, n=n, **LONG)
            for _ in range(5):
                next(stream)
            cloud.kill()
            with pytest.raises(openai.APIError) as caught:
                list(stream)
        assert caught.value.code == "cloud_lost"
        assert "the cloud is gone" in caught.value.message
        for _ in range(2500):
            if edge.free:
                break
            time.sleep(0.004)
        assert edge.free
        cloud.start()
        assert chat(edge, max_tokens=2).usage.completion_tokens <= 2


def test_an_error_behind_the_first_event_is_the_last_one():
    engine = Watched(SyntheticConfig(seed=11, eos_bias=-20.0), slots=4, seconds=0.02)
    with LiveCloud(engine) as cloud, LiveEdge(cloud, patience=0) as edge:
        engine.hook = lambda n: cloud.kill() if n == 20 else None
        events = edge.post(body={**LONG, "stream": True}).text.split("\n\n")
    assert events[-1] == ""
    last = json.loads(events[-2].removeprefix("data: "))
    assert last["error"]["type"] == "server_error"
    assert last["error"]["code"] == "cloud_lost"
    assert "[DONE]" not in "".join(events)


def test_an_answer_lost_in_the_middle_is_an_error():
    engine = Watched(SyntheticConfig(seed=11, eos_bias=-20.0), slots=4, seconds=0.02)
    with LiveCloud(engine) as cloud, LiveEdge(cloud, patience=0) as edge:
        engine.hook = lambda n: cloud.kill() if n == 20 else None
        failed(edge.post(body=LONG), 503, "the cloud is gone", code="cloud_lost")


def test_engines_that_fail(one_cloud, caplog):
    class Broken(Watched):
        def forward(self, steps):
            if self.broken:
                raise self.broken
            return super().forward(steps)

    engine = Broken(SyntheticConfig(seed=11), slots=2)
    secret = "a secret prompt"
    body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 5}
    with LiveEdge(one_cloud, engine) as edge, caplog.at_level(logging.ERROR):
        engine.broken = EngineError("out of memory")
        [notice] = edge.post(body=body).json()["e2sci"]["notices"]
        assert notice.endswith("the cloud goes on alone: out of memory")
        alone = {**body, "e2sci": {"mode": "draft"}}
        failed(edge.post(body=alone), 500, "out of memory", code="edge_error")
        engine.broken = ZeroDivisionError(secret)
        error = failed(edge.post(body=body), 500, code="internal_error")
        assert secret not in error["message"]
        engine.broken = None
        assert edge.post(body=body).status_code == 200


# ---- the end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_who_is_cut_off_in_the_end_is_told(stream):
    engine = Watched(SyntheticConfig(seed=11, eos_bias=-20.0), slots=4, seconds=0.02)
    answers = []
    with LiveCloud(engine) as cloud:
        with LiveEdge(cloud) as edge:
            body = {**LONG, "stream": stream}
            asking = threading.Thread(target=lambda: answers.append(edge.post(body=body)))
            asking.start()
            for _ in range(2500):
                if cloud.busy:
                    break
                time.sleep(0.004)
            time.sleep(0.3)
        asking.join(20)
        cloud.idle()
    [answer] = answers
    if stream and answer.status_code == 200:
        last = json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["code"] == "stopping"
    else:
        failed(answer, 503, "stopping", code="stopping")


async def test_draining_lets_what_is_under_way_end():
    engine = Watched(SyntheticConfig(seed=11), seconds=0.01)
    with LiveCloud(engine) as cloud:
        place = bound()
        url = f"http://{HOST}:{place.getsockname()[1]}/v1/chat/completions"
        body = {"messages": HELLO, "max_tokens": 60, **ENDLESS}
        async with (
            Edge(cloud.url, draft()) as edge,
            listening(edge_app(edge), place) as port,
            httpx.AsyncClient(trust_env=False, timeout=60) as http,
        ):
            asking = asyncio.create_task(http.post(url, json=body))
            await until(lambda: port.busy, 20)
            await port.drain(60, asyncio.Event())
            answer = await asking
            assert answer.json()["usage"]["completion_tokens"] == 60
            with pytest.raises(httpx.TransportError):
                await http.post(url, json=body)
