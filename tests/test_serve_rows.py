"""What others got wrong (test_mistakes), asked through HTTP: whole answers and streams, at windows
of 1, 3, 8 and 16 tokens. And what an edge promises its users: the same ids everywhere, one's own
text in any company, no turn read twice."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import pytest
from click.testing import CliRunner

from e2sci.cli import main
from e2sci.engines.synthetic import EOS, REAL_VOCAB, SyntheticConfig, SyntheticTokenizer
from e2sci.runtime.edge import BlockingEdge
from live import LiveCloud, Scripted, Watched, draft, target
from serving import NAME, LiveEdge, chat, streamed, text_of
from ways import WAYS

IDS = {SyntheticTokenizer().name(token): token for token in range(REAL_VOCAB)}
ENDLESS = {str(EOS): -100}
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way['mode']}-{way['window']}")


@pytest.fixture(scope="module")
def edge(one_cloud):
    with LiveEdge(one_cloud) as edge:
        yield edge
        edge.idle()


@pytest.fixture(scope="module")
def alone(one_cloud):
    """The target's own texts."""
    with BlockingEdge(one_cloud.url, draft()) as edge:
        yield lambda prompt="hello", **options: edge.generate(prompt, mode="cloud", **options)


@dataclass
class Told:
    """One text as a client has it; `ids` by the bytes of its log-probabilities."""

    text: str
    reason: str
    ids: list[int]
    parts: list[str]
    usage: object


def told(edge, stream, content="hello", e2sci=None, logit_bias=None, **options):
    extra = {"e2sci": e2sci or {}, "logit_bias": logit_bias or {}}
    options = {"temperature": 0, **options, "logprobs": True, "extra_body": extra}
    if stream:
        chunks = streamed(edge, content, **options, stream_options={"include_usage": True})
        choices = [choice for chunk in chunks for choice in chunk.choices]
        text, usage = text_of(chunks), chunks[-1].usage
        parts = [choice.delta.content or "" for choice in choices]
    else:
        answer = chat(edge, content, **options)
        choices, usage = answer.choices, answer.usage
        text = choices[0].message.content
        parts = [text]
    [reason] = {choice.finish_reason for choice in choices} - {None}
    entries = [e for c in choices if c.logprobs for e in c.logprobs.content]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return Told(text, reason, [IDS[bytes(e.bytes)] for e in entries], parts, usage)


def both(edge, content="hello", **options):
    """Whole and streamed."""
    return [told(edge, stream, content, **options) for stream in (False, True)]


# ---- what others got wrong --------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("most", [1, 2, 3])
def test_small_budgets(edge, alone, way, most):
    own = alone(max_tokens=most, logit_bias={EOS: -100.0})
    for each in both(edge, e2sci=way, max_tokens=most, logit_bias=ENDLESS):
        assert each.usage.completion_tokens == most
        assert (each.text, each.ids, each.reason) == (own.text, own.token_ids, "length")


@every_way
def test_the_end_of_a_text_in_mid_window(way):
    with (
        LiveCloud(target(eos_bias=1.0)) as cloud,
        LiveEdge(cloud, draft(eos_bias=1.0)) as edge,
        BlockingEdge(cloud.url, draft()) as plain,
    ):
        for content in ("one", "two", "four"):
            own = plain.generate(content, mode="cloud", max_tokens=200)
            assert own.finish_reason == "stop"
            for each in both(edge, content, e2sci=way, max_tokens=200):
                assert (each.text, each.reason) == (own.text, "stop")
                assert each.usage.completion_tokens == len(own.token_ids)
                assert each.usage.prompt_tokens == own.prompt_tokens
                assert [i for i in each.ids if i != EOS] == own.token_ids


SCRIPT = "Grüße, 日本 🙂🙃: é — ₿𝄞."
TEMPLATED = len("user: text\nassistant: ")


@every_way
def test_characters_and_stop_strings_over_tokens_and_windows(way):
    """One byte a token, so nearly every character is split: by tokens, windows, corrections."""
    near = Scripted(SCRIPT, TEMPLATED, lambda at: at % 3 == 0)
    with LiveCloud(Scripted(SCRIPT, TEMPLATED)) as cloud, LiveEdge(cloud, near) as edge:
        for each in both(edge, "text", e2sci=way):
            assert each.text == SCRIPT
            assert not any("\ufffd" in part for part in each.parts)
            assert bytes(i for i in each.ids if i != EOS) == SCRIPT.encode()
            assert each.usage.completion_tokens == len(SCRIPT.encode())
        for stop in ("🙃", "ße, 日", "é — ₿", "G"):
            before, _, _ = SCRIPT.partition(stop)
            for each in both(edge, "text", e2sci=way, stop=[stop, "\x00"]):
                assert (each.text, each.reason) == (before, "stop")
                assert bytes(each.ids) == before.encode()
                assert each.usage.completion_tokens == len((before + stop).encode())


@every_way
def test_the_end_of_the_context(way):
    with LiveCloud(target(context=64)) as cloud, LiveEdge(cloud, draft(context=64)) as edge:
        content = "x" * (60 - len("user: \nassistant: "))
        for each in both(edge, content, e2sci=way, logit_bias=ENDLESS):
            assert each.usage.prompt_tokens == 60
            assert each.usage.completion_tokens == len(each.ids) == 4
            assert each.reason == "length"


# ---- one text for one seed --------------------------------------------------------------------

SETTINGS = [
    {"max_tokens": 50, "temperature": 0.0, "seed": 0},
    {"max_tokens": 50, "temperature": 1.0, "seed": 7},
    {"max_tokens": 50, "temperature": 0.7, "seed": 8, "top_p": 0.9, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_same_ids_by_http_on_the_command_line_and_in_python(edge, cloud, settings):
    with BlockingEdge(cloud.url, draft()) as python:
        wanted = python.generate("hello", **settings)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = ["run", "hello", "--draft", "synthetic:seed=11,divergence=0.5", "--json", *flags]
    said = json.loads(CliRunner().invoke(main, [*command, "--cloud", cloud.url]).stdout)
    assert said["token_ids"] == wanted.token_ids
    for each in both(edge, **settings):
        assert [i for i in each.ids if i != EOS] == wanted.token_ids
        assert each.usage.completion_tokens == said["usage"]["completion_tokens"]


# ---- in company -------------------------------------------------------------------------------


async def test_twenty_users_get_what_they_get_alone():
    """Of every kind at once, on an edge that drafts four texts at a time."""

    async def ask(client, i):
        way = {"mode": "cloud"} if i % 5 == 4 else WAYS[i % len(WAYS)]
        options = {"model": NAME, "max_tokens": 20 + i, "seed": i, "n": 1 + i % 2}
        options |= {"temperature": 0.9 * (i % 3), "extra_body": {"e2sci": way}}
        if i % 4 == 3:
            answer = await client.completions.create(prompt=f"question {i}", **options)
            return [choice.text for choice in answer.choices]
        options["messages"] = [{"role": "user", "content": f"question {i}"}]
        if i % 4:
            answer = await client.chat.completions.create(**options)
            return [choice.message.content for choice in answer.choices]
        chunks = [c async for c in await client.chat.completions.create(**options, stream=True)]
        return [text_of(chunks, index) for index in range(options["n"])]

    far = Watched(seconds=0.001)
    near = Watched(SyntheticConfig(seed=11, divergence=0.5), slots=4, seconds=0.001)
    with LiveCloud(far, keep_caches=True) as cloud, LiveEdge(cloud, near, keep_caches=True) as edge:
        clients = [edge.async_openai() for _ in range(20)]
        solo = [await ask(client, i) for i, client in enumerate(clients)]
        assert max(len(step) for step in near.passes) == 1
        far.passes.clear()
        together = await asyncio.gather(*(ask(client, i) for i, client in enumerate(clients)))
        for client in clients:
            await client.close()
        assert together == solo
        assert max(map(len, far.passes)) > 4  # they did share passes
        edge.idle()


# ---- the next turn ----------------------------------------------------------------------------


def fed(engine):
    """Tokens that an engine has read since last asked."""
    tokens = sum(sum(each.values()) for each in engine.passes)
    engine.passes.clear()
    return tokens


@pytest.mark.parametrize("mode", ["cloud", "sync", "pipelined", "auto"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_next_turn_is_not_read_again(mode, kept):
    """Counted at both ends, by a client that sends the whole conversation each time."""
    near, far = Watched(SyntheticConfig(seed=11, divergence=0.5)), Watched()
    plain = {str(token): -100 for token in range(128, EOS + 1)}  # a text that reads as it was said
    messages, known = [], 0
    with LiveCloud(far, keep_caches=kept) as cloud, LiveEdge(cloud, near, keep_caches=kept) as edge:
        for question in ("x" * 400, "and then?", "why?"):
            messages.append({"role": "user", "content": question})
            with edge.openai() as client:
                answer = client.chat.completions.create(
                    model=NAME,
                    messages=messages,
                    max_tokens=12,
                    temperature=0,
                    extra_body={"e2sci": {"mode": mode}, "logit_bias": plain},
                )
            edge.idle()
            new = answer.usage.prompt_tokens - known
            assert new <= fed(far) < new + 80
            assert fed(near) < (1 if mode == "cloud" else new + 80)
            if kept:
                known = answer.usage.prompt_tokens
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
