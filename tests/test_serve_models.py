"""OpenAI's client and the default pair for real. A minute or two."""

from __future__ import annotations

import openai
import pytest

from e2sci.engines.load import load_engine
from live import LiveCloud
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
