"""What other implementations of speculative decoding got wrong, one test a mistake: sampling, text,
cost and neighbours. The others are in test_mistakes."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace

import pytest
from click.testing import CliRunner

from e2sci.cli import main
from e2sci.decoding.distribution import pack_ids
from e2sci.engines.base import Step
from e2sci.engines.synthetic import EOS
from e2sci.runtime.text import prompt_ids
from live import Edge, LiveCloud, Scripted, Watched, cached, draft, pair, raw_client, target
from ways import RULES, WAYS, every_way, text_alone
from world import opening

# ---- 12-14: sampling --------------------------------------------------------------------------


def penalised(prompt, length, repetition, frequency, presence):
    """Greedy decoding with penalties, the plain way: one token after the other."""
    engine, output = target(), []
    for i in range(length):
        feed = prompt if i == 0 else output[-1:]
        [[p]] = engine.forward([Step(0, feed)])
        logits = p.logits.astype(float)
        for token in {*prompt, *output}:
            logits[token] *= 1 / repetition if logits[token] > 0 else repetition
        for token, count in Counter(output).items():
            logits[token] -= frequency * count + presence
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize(
    "penalties", [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, 1.5), (1.2, 0.3, -0.4)]
)
async def test_12_penalties_see_committed_tokens_only(penalties):
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    options = dict(zip(names, penalties, strict=True))
    async with pair() as edge:
        expected = penalised(
            prompt_ids(edge.engine, "hello", system=None, raw=False), 30, *penalties
        )
        assert expected != (await text_alone(max_tokens=30)).token_ids
        for way, result in await every_way(edge, max_tokens=30, **options):
            assert result.token_ids == expected, way
            assert result.stats.accepted > 0 or way["mode"] == "pipelined"


async def test_13_seeds_do_not_depend_on_neighbours():
    """Alone, in a crowd, and in a crowd that comes and goes."""
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 24}
    alone = await text_alone(**options)
    async with pair() as edge:

        async def neighbour(i):
            await asyncio.sleep(0.001 * i)
            return await edge.generate(f"n{i}", temperature=1.1, seed=i, max_tokens=5 + 2 * i)

        for way in WAYS:
            crowd = asyncio.gather(*(neighbour(i) for i in range(8)))
            result = await edge.generate("hello", **way, **options)
            assert result.token_ids == alone.token_ids, way
            await crowd
        other = await edge.generate("hello", **{**options, "seed": 6})
        assert other.token_ids != alone.token_ids


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-5, 1e-4, 1.0])
async def test_14_identical_models_and_temperatures_near_zero(temperature):
    """No NaN, no division by zero, and a temperature of nearly nothing is greedy."""
    greedy = await text_alone(max_tokens=16)
    async with pair(target()) as edge:
        for accept in RULES:
            result = await edge.generate(
                "hello",
                accept=accept,
                temperature=temperature,
                fill=False,
                trace=True,
                max_tokens=16,
            )
            exact = accept != "rejection" or temperature < 1  # its sketch leaves out q's tail
            assert result.stats.acceptance_rate >= (1.0 if exact else 0.9)
            figures = [v for v in vars(result.stats).values() if isinstance(v, float)]
            assert all(math.isfinite(v) for v in figures), accept
            assert all(r.js < 0.01 for r in result.trace if r.js is not None)
            assert result.token_ids == greedy.token_ids or temperature == 1.0


# ---- 15-17: text ------------------------------------------------------------------------------


async def test_15_characters_split_across_tokens_and_windows():
    """One byte a token, so nearly every character is split: by tokens, windows, corrections."""
    script = "Grüße, 日本 🙂🙃: é — ₿𝄞."
    for errs in (lambda at: at % 3 == 0, lambda at: at % 11 == 5):
        async with pair(Scripted(script, 4, errs), Scripted(script, 4)) as edge:
            for way in WAYS:
                pieces = [p async for p in edge.stream("text", raw=True, **way)]
                assert pieces[-1].result.text == script, way
                assert "".join(p.text for p in pieces) == script
                assert not any("\ufffd" in p.text for p in pieces)
            for way, result in await every_way(edge, "text", raw=True, stop=("🙃",)):
                assert result.text == script[: script.index("🙃")], way


async def test_15_a_character_cut_off_by_the_budget():
    async with pair(Scripted("né", 4), Scripted("né", 4)) as edge:
        for way, result in await every_way(edge, "text", raw=True, max_tokens=2):
            assert result.text == "n\ufffd", way


class Opens(Watched):
    """A model with a BOS, which its template writes by itself."""

    def __init__(
        self, template="{{ bos_token }}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    ):
        super().__init__()
        self.info = replace(self.info, bos="<|end|>", template=template)


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, [EOS, *b"<hi>"]),
        ({"system": "be"}, [EOS, *b"<be><hi>"]),
        ({"raw": True}, [EOS, *b"hi"]),
    ],
)
async def test_16_one_bos_and_one_template_pass(options, prompt):
    """What the cloud gets is what was written here, once."""
    async with pair(Opens(), Opens()) as edge:
        seen = []
        session = edge.cloud.session
        edge.cloud.session = lambda o, *rest: seen.append(o.prompt) or session(o, *rest)
        for mode in ("cloud", "sync", "pipelined"):
            result = await edge.generate("hi", mode=mode, max_tokens=5, **options)
            assert result.prompt_tokens == len(prompt)
        assert seen == [pack_ids(prompt)] * 3


async def test_17_different_templates_are_mentioned():
    async with pair(draft(), Opens()) as edge:
        [notice] = await edge.connect()
        assert "different chat templates" in notice


def test_17_the_user_hears_of_different_templates():
    with LiveCloud(Opens()) as cloud:
        args = ["run", "hello", "--cloud", cloud.url, "--draft", "synthetic:seed=11"]
        result = CliRunner().invoke(main, args)
        assert result.exit_code == 0
        assert "note: synthetic and synthetic have different chat templates" in result.stderr


# ---- 18-20: cost and neighbours ---------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 8, 16])
async def test_18_a_draft_that_is_always_wrong_costs_no_passes(window):
    """With fill, a useless draft leaves the cloud at its own speed: a pass a token at most."""
    far = Watched(seconds=0.001)
    async with pair(draft(random=True), far) as edge:
        alone = await edge.generate("hello", mode="cloud", max_tokens=40)
        far.passes.clear()
        result = await edge.generate("hello", window=window, fill=True, max_tokens=40)
        assert result.token_ids == alone.token_ids
        assert len(far.passes) <= len(result.token_ids) + 4
        assert result.stats.cloud_passes <= len(result.token_ids) + 4


async def test_19_sixteen_clients_get_what_they_get_alone():
    prompts = [f"question {i}" for i in range(16)]
    options = [
        {"temperature": 0.9 * (i % 2), "seed": i, "max_tokens": 10 + i, **WAYS[i % 8]}
        for i in range(16)
    ]
    async with pair() as edge:
        expected = [
            (await edge.generate(p, **o)).token_ids for p, o in zip(prompts, options, strict=True)
        ]
    with LiveCloud(Watched(seconds=0.001)) as cloud:

        async def client(prompt, option):
            async with Edge(cloud.url, draft()) as edge:
                return (await edge.generate(prompt, **option)).token_ids

        together = await asyncio.gather(*map(client, prompts, options))
        assert together == expected
        assert max(map(len, cloud.engine.passes)) > 1  # they did share passes


async def test_20_a_client_that_vanishes_frees_its_place_and_cache():
    engine = Watched(slots=1, seconds=0.005)
    with LiveCloud(engine) as cloud:
        for fill in (True, False):
            async with raw_client(cloud.url) as client:
                await client.send(opening(fill=fill, drafting=not fill, max_tokens=2000))
                await client.receive()
                await asyncio.sleep(0.02)
                assert cloud.busy == 1
                client.vanish()
            cloud.check()
            assert engine.length(0) == cached(engine) == 0
