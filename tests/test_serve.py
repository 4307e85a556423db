"""`e2sci serve` by OpenAI's own client: what is written, in which shapes, and what is refused."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient

from e2sci.engines.base import Step
from e2sci.engines.synthetic import EOS
from e2sci.runtime.edge import BlockingEdge, options_from
from e2sci.runtime.text import prompt_ids
from e2sci.server.openai_answers import Events
from e2sci.server.openai_requests import DEFAULTS
from live import LiveCloud, draft, target
from serving import HELLO, NAME, LiveEdge, chat, refused, streamed, text_of

ENDLESS = {"logit_bias": {str(EOS): -100}}


@pytest.fixture(scope="module")
def edge(one_cloud):
    with LiveEdge(one_cloud) as edge:
        yield edge
        edge.idle()


@pytest.fixture(scope="module")
def python(one_cloud):
    """What the Python interface gives."""
    with BlockingEdge(one_cloud.url, draft()) as edge:
        yield edge


def completion(edge, prompt="hello", **options):
    with edge.openai() as client:
        answer = client.completions.create(model=NAME, prompt=prompt, **options)
        return list(answer) if options.get("stream") else answer


# ---- texts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 7}, {"seed": 8, "top_p": 0.8}])
def test_a_chat_is_what_python_gives(edge, python, stream, options):
    named = {"temperature": 1.0, **options}
    wanted = python.generate("hello", max_tokens=60, **named)
    if stream:
        chunks = streamed(edge, max_tokens=60, **options)
        assert text_of(chunks) == wanted.text
        assert [c.choices[0].finish_reason for c in chunks][-1] == wanted.finish_reason
        assert chunks[0].choices[0].delta.role == "assistant"
        return
    answer = chat(edge, max_tokens=60, **options)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", wanted.text)
    assert choice.finish_reason == wanted.finish_reason
    assert answer.usage.completion_tokens == len(wanted.token_ids)
    assert answer.usage.prompt_tokens == wanted.prompt_tokens
    assert answer.usage.total_tokens == wanted.prompt_tokens + len(wanted.token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_what_python_gives(edge, python, stream):
    wanted = python.generate("def f", raw=True, max_tokens=30, temperature=1.0, seed=3)
    answer = completion(edge, "def f", max_tokens=30, seed=3, stream=stream)
    text = text_of(answer) if stream else answer.choices[0].text
    assert text == wanted.text


@pytest.mark.parametrize("mode", ["pipelined", "sync", "cloud"])
@pytest.mark.parametrize("window", [1, 3, 8, 16])
def test_neither_windows_nor_modes_change_it(edge, python, mode, window):
    wanted = python.generate("the sea", max_tokens=80, temperature=1.0, seed=5)
    own = {"mode": mode} if mode == "cloud" else {"mode": mode, "window": window}
    chunks = streamed(edge, "the sea", max_tokens=80, seed=5, extra_body={"e2sci": own})
    assert text_of(chunks) == wanted.text
    [stats] = chunks[-1].e2sci["stats"]
    assert stats["mode"] == mode


def test_all_of_a_conversation_goes_through_the_template_once(edge, python):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "{{ 7 * 7 }} <|end|>", "name": "x"},
    ]
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "{{ 7 * 7 }} <|end|>"},
    ]
    wanted = python.generate(plain, max_tokens=20)
    with edge.openai() as client:
        answer = client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=20, temperature=0
        )
    assert answer.choices[0].message.content == wanted.text
    assert answer.usage.prompt_tokens == wanted.prompt_tokens


def test_prompts_of_every_kind(edge, python):
    def texts(prompt, n=1):
        answer = completion(edge, prompt, max_tokens=12, temperature=0, n=n)
        assert [c.index for c in answer.choices] == list(range(len(answer.choices)))
        return [c.text for c in answer.choices], answer.usage

    one, two = (python.generate(p, raw=True, max_tokens=12) for p in ("the ", "and then"))
    ids = [prompt_ids(draft(), p, system=None, raw=True) for p in ("the ", "and then")]
    assert texts("the ")[0] == texts(ids[0])[0] == [one.text]
    both, usage = texts(["the ", "and then"])
    assert both == texts(ids)[0] == [one.text, two.text]
    assert usage.prompt_tokens == len(ids[0]) + len(ids[1])
    assert usage.completion_tokens == len(one.token_ids) + len(two.token_ids)
    assert texts(["the ", "and then"], n=2)[0] == [one.text] * 2 + [two.text] * 2


def test_special_tokens_can_be_written_in_a_completion(edge):
    """Editors write fill-in-the-middle prompts so."""
    assert completion(edge, "a<|end|>b", max_tokens=1).usage.prompt_tokens == 3
    assert completion(edge, "a<|end>|b", max_tokens=1).usage.prompt_tokens == 9


def test_the_defaults_are_openais(edge, python):
    answer = chat(edge, seed=4)
    assert answer.choices[0].message.content == (
        python.generate("hello", max_tokens=1 << 18, temperature=1.0, seed=4).text
    )
    assert completion(edge, extra_body=ENDLESS).usage.completion_tokens == 16
    assert chat(edge, max_completion_tokens=5, extra_body=ENDLESS).usage.completion_tokens == 5


def test_without_a_seed_texts_differ_and_can_be_repeated(edge):
    answers = [chat(edge, max_tokens=40, extra_body=ENDLESS) for _ in range(2)]
    texts = [a.choices[0].message.content for a in answers]
    assert texts[0] != texts[1]
    for answer, text in zip(answers, texts, strict=True):
        again = chat(edge, max_tokens=40, seed=answer.e2sci["seed"], extra_body=ENDLESS)
        assert again.choices[0].message.content == text


@pytest.mark.parametrize("stream", [False, True])
def test_several_texts(edge, stream):
    """Text i has seed + i; a prompt counts once, all texts do."""
    single = [chat(edge, max_tokens=25, seed=40 + i) for i in range(3)]
    wanted = [a.choices[0].message.content for a in single]
    usage = {"prompt": single[0].usage.prompt_tokens, "completion": 0}
    usage["completion"] = sum(a.usage.completion_tokens for a in single)
    if stream:
        chunks = streamed(edge, max_tokens=25, seed=40, n=3, stream_options={"include_usage": True})
        assert [text_of(chunks, i) for i in range(3)] == wanted
        assert all(chunk.usage is None for chunk in chunks[:-1])
        last = chunks[-1]
        assert last.choices == []
    else:
        last = chat(edge, max_tokens=25, seed=40, n=3)
        assert [c.message.content for c in last.choices] == wanted
    assert last.usage.prompt_tokens == usage["prompt"]
    assert last.usage.completion_tokens == usage["completion"]
    assert last.usage.total_tokens == sum(usage.values())
    assert len(last.e2sci["stats"]) == 3
    assert last.e2sci["seed"] == 40


def test_the_largest_seed_has_a_next_one(edge):
    first = chat(edge, max_tokens=10, seed=0).choices[0].message.content
    both = chat(edge, max_tokens=10, seed=2**63 - 1, n=2).choices
    assert both[1].message.content == first


# ---- stop strings and characters --------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 8, 16])
def test_stop_strings_end_it_and_never_show(edge, python, window):
    whole = python.generate("hello", max_tokens=200, temperature=1.0, seed=2, logit_bias={EOS: -99})
    rng = random.Random(window)
    for _ in range(4):
        at = rng.randrange(20, 100)
        stop = whole.text[at : at + rng.randrange(2, 9)]
        if not stop.strip():
            continue
        options = {"max_tokens": 200, "seed": 2, "stop": [stop, "\x00"]}
        options["extra_body"] = {"logit_bias": {str(EOS): -99}, "e2sci": {"window": window}}
        chunks = streamed(edge, **options)
        shown = text_of(chunks)
        assert shown == whole.text[: whole.text.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"
        answer = chat(edge, **options, logprobs=True)
        assert answer.choices[0].message.content == shown
        tokens = answer.choices[0].logprobs.content
        data = b"".join(bytes(t.bytes) for t in tokens)
        assert data.decode(errors="replace").startswith(shown)
        assert b"".join(bytes(t.bytes) for t in tokens[:-1]).decode(errors="replace") in shown


def test_no_chunk_splits_a_character(edge, python):
    """As bytes on the wire: what is streamed is what the whole answer is."""
    body = {"messages": HELLO, "max_tokens": 300, "seed": 6, **ENDLESS}
    whole = edge.post(body=body).json()["choices"][0]["message"]["content"]
    assert "€" in whole or "é" in whole or "🙂" in whole or "�" in whole
    events = edge.post(body={**body, "stream": True}).content.decode("utf-8", errors="strict")
    deltas = [json.loads(e[6:]) for e in events.split("\n\n") if e and "[DONE]" not in e]
    said = "".join(c["delta"].get("content", "") for d in deltas for c in d["choices"])
    assert said == whole
    assert events.endswith("data: [DONE]\n\n")


def test_every_character_of_a_known_text_arrives_whole():
    """Draft and target that write multi-byte characters token by token, a byte each."""
    text = "déjà vu 🙂 €5 "
    biased = {str(b): 100 for b in set(text.encode())}
    with LiveCloud() as cloud, LiveEdge(cloud) as edge:
        options = {"seed": 1, "max_tokens": 200, "extra_body": {"logit_bias": biased}}
        chunks = streamed(edge, **options)
        assert text_of(chunks) == chat(edge, **options).choices[0].message.content


# ---- log-probabilities ------------------------------------------------------------------------


def said_by_the_target(prompt, ids, *, raw=False):
    engine = target()
    before = prompt_ids(engine, prompt, system=None, raw=raw)
    [places] = engine.forward([Step(0, before + ids[:-1], len(ids))])
    return [place.limited(EOS + 1) for place in places]


def name_of(token, mark=""):
    piece = draft().tokenizer.piece(token) if token != EOS else b"<|end|>"
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{b:02x}" for b in piece)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 1, 20])
def test_log_probabilities_of_a_chat(edge, python, stream, top):
    ids = python.generate("hello", max_tokens=40, logit_bias={EOS: -100.0}).token_ids
    options = {"max_tokens": 40, "temperature": 0, "logprobs": True, "top_logprobs": top}
    if stream:
        chunks = streamed(edge, **options, extra_body=ENDLESS)
        parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs]
        entries = [e for part in parts for e in part.content]
    else:
        entries = chat(edge, **options, extra_body=ENDLESS).choices[0].logprobs.content
    assert len(entries) == 40
    tokenizer = draft().tokenizer
    for entry, token, p in zip(entries, ids, said_by_the_target("hello", ids), strict=True):
        assert entry.token == name_of(token)
        assert bytes(entry.bytes) == tokenizer.piece(token)
        assert entry.logprob == pytest.approx(float(p.log_prob(np.array([token]))[0]))
        best = p.top(top) if top else None
        assert [e.token for e in entry.top_logprobs] == [
            name_of(t) for t in (best.ids.tolist() if best else [])
        ]
        assert [e.logprob for e in entry.top_logprobs] == pytest.approx(
            best.log_probs.tolist() if best else []
        )
        assert all(
            e.bytes is None if e.token == "<|end|>" else bytes(e.bytes) for e in entry.top_logprobs
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_of_a_completion(edge, python, stream, top):
    result = python.generate("the ", raw=True, max_tokens=40, logit_bias={EOS: -100.0})
    options = {"max_tokens": 40, "temperature": 0, "logprobs": top, "extra_body": ENDLESS}
    answer = completion(edge, "the ", stream=stream, **options)
    chunks = answer if stream else [answer]
    text = text_of(chunks)
    parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs]
    tokens, values, offsets, best = [], [], [], []
    for part in parts:
        assert len(part.tokens) == len(part.token_logprobs) == len(part.text_offset)
        tokens += part.tokens
        values += part.token_logprobs
        offsets += part.text_offset
        best += part.top_logprobs if top else []
        assert bool(part.top_logprobs) == bool(top)
    ids = result.token_ids
    places = said_by_the_target("the ", ids, raw=True)
    assert tokens == [name_of(t, "bytes:") for t in ids]
    assert values == pytest.approx(
        [float(p.log_prob(np.array([t]))[0]) for t, p in zip(ids, places, strict=True)]
    )
    assert offsets[0] == len("the ")
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:"):
            assert text[offset - 4 :].lstrip("�").startswith(token)
    for named, token, p in zip(best, ids, places, strict=bool(top)):
        head = p.top(3).ids.tolist()
        assert set(named) == {name_of(t, "bytes:") for t in [*head, token]}


def test_offsets_count_from_the_prompt_whatever_it_is(edge):
    ids = prompt_ids(draft(), "the é", system=None, raw=True)
    answer = completion(edge, [ids, ids[:1]], max_tokens=1, logprobs=0)
    assert [c.logprobs.text_offset for c in answer.choices] == [[5], [4]]


# ---- our own part -----------------------------------------------------------------------------


@pytest.mark.parametrize("usage", [False, True])
def test_figures_come_last(edge, usage):
    options = {"stream_options": {"include_usage": True}} if usage else {}
    own = {"e2sci": {"mode": "pipelined"}}
    chunks = streamed(edge, max_tokens=30, temperature=0, extra_body=own, **options)
    assert [hasattr(c, "e2sci") for c in chunks] == [False] * (len(chunks) - 1) + [True]
    own = chunks[-1].e2sci
    assert set(own) == {"request_id", "seed", "notices", "stats"}
    assert own["request_id"] == chunks[0].id.removeprefix("chatcmpl-")
    [stats] = own["stats"]
    assert stats["accept"] == "strict"
    assert stats["accepted"] > 0
    assert len({c.id for c in chunks}) == len({c.created for c in chunks}) == 1
    assert {c.model for c in chunks} == {NAME}


def test_ids_agree_everywhere(edge):
    answer = edge.post(body={"messages": HELLO, "max_tokens": 3})
    id = answer.headers["x-request-id"]
    assert answer.json()["e2sci"]["request_id"] == id
    assert answer.json()["id"] == f"chatcmpl-{id}"
    assert edge.get("/healthz").headers["x-request-id"] != id


def test_rules_by_request_and_by_default(one_cloud):
    named = {"mode": "pipelined", "accept": "elastic", "threshold": 0.3, "temperature": 0.0}
    defaults = options_from(DEFAULTS, named)
    with LiveEdge(one_cloud, defaults=defaults) as edge:

        def rule(**own):
            answer = chat(edge, max_tokens=30, extra_body={"e2sci": own} if own else {})
            [stats] = answer.e2sci["stats"]
            return stats["mode"], stats["accept"], stats["threshold"]

        assert rule()[:2] == ("pipelined", "elastic")
        assert rule(accept="strict") == ("pipelined", "strict", None)
        assert rule(mode="cloud") == ("cloud", "strict", None)
        assert rule(mode="sync", accept="fuzzy", threshold=0.1) == ("sync", "fuzzy", 0.1)
        assert rule(threshold=0.01)[2] < 0.02
        assert rule(mode="auto", gamma=1.5)[1] == "elastic"
        assert rule(mode="draft") == ("draft", "strict", None)
    with LiveEdge(one_cloud, defaults=options_from(DEFAULTS, {"gamma": 2})) as edge:
        for own in ({}, {"mode": "sync"}, {"mode": "cloud"}, {"accept": "typical"}, {"window": 3}):
            assert chat(edge, max_tokens=5, extra_body={"e2sci": own}).usage.total_tokens
    doubting = options_from(DEFAULTS, {"mode": "pipelined", "doubt": 0.9})
    with LiveEdge(one_cloud, defaults=doubting) as edge:
        for own in ({}, {"mode": "sync"}, {"accept": "typical"}, {"doubt": 1.0}):
            assert chat(edge, max_tokens=5, extra_body={"e2sci": own}).usage.total_tokens
        with pytest.raises(openai.BadRequestError, match="doubt closes windows of mode pipelined"):
            chat(edge, extra_body={"e2sci": {"mode": "sync", "doubt": 0.9}})


# ---- clients ----------------------------------------------------------------------------------


async def test_many_at_once_by_the_async_client(edge, python):
    wanted = [python.generate("hi", max_tokens=20, temperature=1.0, seed=i).text for i in range(12)]

    async def one(client, i):
        messages = [{"role": "user", "content": "hi"}]
        options = {"model": NAME, "messages": messages, "max_tokens": 20, "seed": i}
        if i % 2:
            answer = await client.chat.completions.create(**options)
            return answer.choices[0].message.content
        stream = await client.chat.completions.create(**options, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async with edge.async_openai() as client:
        assert await asyncio.gather(*(one(client, i) for i in range(12))) == wanted


def test_the_models(edge):
    with edge.openai() as client:
        assert [m.id for m in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).owned_by == "e2sci"
        with refused(openai.NotFoundError, "'gpt-4'", f"'{NAME}'", code="model_not_found"):
            client.models.retrieve("gpt-4")
        with refused(openai.NotFoundError, "'gpt-4'", f"'{NAME}'", param="model"):
            client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert edge.post(body={"messages": HELLO, "max_tokens": 1}).status_code == 200


def test_a_client_that_is_not_openais(edge, python):
    """The hub's own client, which reads answers by itself."""
    client = InferenceClient(base_url=edge.url, api_key="none", timeout=60)
    wanted = python.generate("hello", max_tokens=30, temperature=1.0, seed=9)
    options = {"messages": HELLO, "model": NAME, "max_tokens": 30, "seed": 9}
    answer = client.chat_completion(**options, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(client.chat_completion(**options, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == wanted.text
    assert chunks[-1].choices[0].finish_reason == wanted.finish_reason


async def test_events_of_several_texts_keep_out_of_each_others_way():
    """Even when nothing can be sent at once: first the head, then whole events."""
    sent = []

    async def send(message):
        for _ in range(9 if message["type"] == "http.response.start" else 1):
            await asyncio.sleep(0)
        sent.append(message)

    events = Events(send)
    await asyncio.gather(*(events.event({"text": i}) for i in range(4)))
    await events.end()
    assert [m["type"] for m in sent] == ["http.response.start"] + ["http.response.body"] * 5
    assert sorted(m["body"] for m in sent[1:-1]) == [b'data: {"text":%d}\n\n' % i for i in range(4)]


def test_raw_http_keeps_its_connection(edge):
    with httpx.Client(trust_env=False) as http:
        for _ in range(3):
            body = {"messages": HELLO, "max_tokens": 2}
            answer = http.post(f"{edge.url}/chat/completions", json=body)
            assert answer.status_code == 200
            assert "connection" not in answer.headers
