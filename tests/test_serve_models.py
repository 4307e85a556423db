"""OpenAI's client and the default pair for real. A minute or two."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from click.testing import CliRunner

from e2sci.cli import main
from e2sci.engines.load import load_engine
from live import LiveCloud, until
from serving import LiveEdge, text_of

pytestmark = pytest.mark.models

NAME = "qwen2.5-coder:target"
POEM = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Répète exactement: « déjà vu 🙂 »"},
]
MERGE = [{"role": "user", "content": "Write a Python function that adds two numbers."}]


@pytest.fixture(scope="module")
def edge():
    target, draft = (load_engine("qwen2.5-coder", role, slots=2) for role in ("target", "draft"))
    close, target.close = target.close, lambda: None  # a LiveCloud begins by emptying its engine
    with LiveCloud(target) as cloud, LiveEdge(cloud, draft) as edge:
        yield edge
        edge.idle()
    close()
    draft.close()


@pytest.fixture
def client(edge):
    with edge.openai(timeout=300) as client:
        yield client


def test_the_model(client):
    assert [model.id for model in client.models.list()] == [NAME]
    with pytest.raises(openai.NotFoundError, match=NAME):
        client.chat.completions.create(model="gpt-4", messages=MERGE)


def test_a_chat_and_its_stream(client):
    options = {"model": NAME, "messages": MERGE, "max_tokens": 48, "temperature": 0}
    answer = client.chat.completions.create(**options)
    text = answer.choices[0].message.content
    assert "def " in text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 48
    [stats] = answer.e2sci["stats"]
    assert stats["acceptance_rate"] > 0.5
    chunks = list(client.chat.completions.create(**options, stream=True))
    # Passes of other sizes may part two tokens that nearly tie; the beginning is the same.
    assert text_of(chunks)[:20] == text[:20]
    assert len(chunks) > 5


def test_stop_strings_and_characters(client):
    options = {"model": NAME, "messages": POEM, "max_tokens": 40, "temperature": 0}
    whole = text_of(list(client.chat.completions.create(**options, stream=True)))
    assert "éjà vu 🙂" in whole
    assert "�" not in whole
    cut = text_of(list(client.chat.completions.create(**options, stream=True, stop=["jà"])))
    assert cut == whole[: whole.index("jà")]


def test_seeds_and_several_texts(client):
    options = {"model": NAME, "messages": POEM, "max_tokens": 24, "temperature": 0.7}
    both = client.chat.completions.create(**options, seed=5, n=2)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.usage.completion_tokens <= 48
    again = client.chat.completions.create(**options, seed=5)
    assert both.choices[0].message.content[:8] == again.choices[0].message.content[:8]


def test_log_probabilities(client):
    answer = client.chat.completions.create(
        model=NAME, messages=MERGE, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    [choice] = answer.choices
    entries = choice.logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == choice.message.content
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-6


def test_an_editors_completion(client):
    """Fill in the middle, by the model's own tokens."""
    before, behind = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
    prompt = f"<|fim_prefix|>{before}<|fim_suffix|>{behind}<|fim_middle|>"
    answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=8, temperature=0)
    assert answer.choices[0].text.startswith("a + b")
    assert answer.choices[0].finish_reason == "stop"


def test_a_completion_and_its_stream(client):
    options = {"model": NAME, "prompt": "def add(a, b):\n", "max_tokens": 16, "temperature": 0}
    answer = client.completions.create(**options, logprobs=1)
    [choice] = answer.choices
    assert "return" in choice.text
    assert answer.usage.completion_tokens == len(choice.logprobs.tokens)
    chunks = list(client.completions.create(**options, stream=True))
    assert text_of(chunks)[:10] == choice.text[:10]


async def test_the_asynchronous_client(edge):
    """A chat, a stream, a completion and a refusal, all at once."""
    chat = {"model": NAME, "messages": MERGE, "max_tokens": 24, "temperature": 0}
    text = {"model": NAME, "prompt": "def add(a, b):\n", "max_tokens": 16, "temperature": 0}
    async with edge.async_openai(timeout=300) as client:

        async def read(stream):
            return text_of([chunk async for chunk in await stream])

        answer, streamed, completed, wrong = await asyncio.gather(
            client.chat.completions.create(**chat, seed=1, n=2, logprobs=True),
            read(client.chat.completions.create(**chat, stream=True)),
            read(client.completions.create(**text, stream=True)),
            client.chat.completions.create(**{**chat, "temperature": -1}),
            return_exceptions=True,
        )
    texts = [choice.message.content for choice in answer.choices]
    assert len(texts) == 2
    assert all(len(choice.logprobs.content) == 24 for choice in answer.choices)
    assert [each[:10] for each in texts] == [streamed[:10]] * 2
    assert "return" in completed
    assert isinstance(wrong, openai.BadRequestError)
    assert wrong.param == "temperature"


LONG = {"model": NAME, "messages": MERGE, "max_tokens": 3000, "logit_bias": {"151645": -100}}


def test_a_stream_that_is_left_ends_at_both_ends(client, edge):
    with client.chat.completions.create(**LONG, stream=True) as stream:
        for _ in range(4):
            next(stream)
        assert not edge.free
    edge.idle()


async def test_an_answer_that_is_cancelled_ends_at_both_ends(edge):
    async with edge.async_openai(timeout=300) as client:
        asking = asyncio.create_task(client.chat.completions.create(**LONG, n=2))
        await until(lambda: edge.cloud.busy == 2, 60)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    edge.idle()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"messages": []}, "messages: there is none"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "the context holds"),
        ({"tools": [{"type": "function"}]}, "functions are not supported"),
        ({"response_format": {"type": "json_object"}}, "ask for JSON in the prompt"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(client, edge, change, words, stream):
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(
            **{"model": NAME, "messages": MERGE, **change}, stream=stream
        )
    edge.idle()


def test_the_same_ids_by_http_on_the_command_line_and_in_python(client, edge):
    """In mode sync, where the sizes of passes hang on the text alone, as llama.cpp needs it."""
    prompt, most = MERGE[0]["content"], 32
    said = client.chat.completions.create(
        model=NAME,
        messages=MERGE,
        max_tokens=most,
        temperature=0,
        logprobs=True,
        extra_body={"e2sci": {"mode": "sync"}},
    )
    pieces = [bytes(entry.bytes) for entry in said.choices[0].logprobs.content]
    command = ["run", prompt, "--cloud", edge.cloud.url, "--mode", "sync", "--json"]
    printed = CliRunner().invoke(main, [*command, "--max-tokens", str(most)])
    ids = json.loads(printed.stdout)["token_ids"]
    python = edge.edge.generate(prompt, mode="sync", max_tokens=most)
    result = asyncio.run_coroutine_threadsafe(python, edge.loop).result(300)
    assert ids == result.token_ids
    assert pieces == [edge.engine.tokenizer.piece(token) for token in ids]
