"""What other implementations of speculative decoding got wrong, one test a mistake.

Where windows matter, each runs at windows of 1, 3, 8 and 16 tokens, synchronous and pipelined.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from e2sci.cli import main
from e2sci.decoding.distribution import Dense, pack_ids, unpack_ids
from e2sci.engines.base import Step, text_of
from e2sci.engines.synthetic import EOS, REAL_VOCAB, Synthetic, SyntheticConfig
from e2sci.runtime.caches import Cache
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.drafter import Drafter
from e2sci.runtime.edge import Edge
from e2sci.runtime.text import prompt_ids
from e2sci.session.edge import EdgeSession, Origin
from e2sci.session.lookahead import Lookahead
from e2sci.session.messages import Finished, Verdict, Window
from live import (
    TIMES,
    LiveCloud,
    Named,
    Watched,
    cached,
    draft,
    pair,
    raw_client,
    target,
)
from world import opening

WAYS = [{"mode": mode, "window": w} for mode in ("sync", "pipelined") for w in (1, 3, 8, 16)]
RULES = ["strict", "rejection", "fuzzy", "elastic", "typical"]


async def every_way(edge, prompt="hello", **options):
    """(way, result) for every mode and window."""
    return [(way, await edge.generate(prompt, **way, **options)) for way in WAYS]


async def text_alone(prompt="hello", target_engine=None, **options):
    """The target's own text, from an edge and a cloud that have nothing else in common."""
    async with pair(target_engine=target_engine) as edge:
        return await edge.generate(prompt, mode="cloud", **options)


# ---- 1, 2: vocabularies -----------------------------------------------------------------------

UNEVEN = {
    "padded target": (draft(), target(padding=64)),
    "padded draft": (draft(padding=64), target()),
    "target with a tail": (draft(), Named("tailed", tail=9)),
    "draft with a tail": (Named("tailed", tail=9, divergence=0.5), target()),
}


@pytest.mark.parametrize("engines", UNEVEN.values(), ids=UNEVEN)
async def test_1_padded_vocabularies(engines):
    """The ids behind the shared ones have the highest logits of all, and are never seen."""
    alone = await text_alone(max_tokens=20)
    async with pair(*engines) as edge:
        [notice] = await edge.connect()
        assert "only the 267 shared ones are used" in notice
        got = [("cloud", await edge.generate("hello", mode="cloud", max_tokens=20))]
        for way, result in got + await every_way(edge, max_tokens=20):
            assert result.token_ids == alone.token_ids, way
        for accept in RULES:
            result = await edge.generate(
                "hello", accept=accept, temperature=1.0, max_tokens=20, trace=True, fill=False
            )
            assert all(t < EOS for t in result.token_ids)
            assert all(0 <= r.js <= math.log(2) + 1e-9 for r in result.trace if r.js is not None)
            assert all(r.js is None or accept != "rejection" for r in result.trace)
            assert result.stats.accepted > 0


def test_1_padding_is_mentioned_and_accepted():
    with LiveCloud(target(padding=64)) as cloud:
        args = ["run", "hello", "--cloud", cloud.url, "--draft", "synthetic:seed=11"]
        result = CliRunner().invoke(main, args)
        assert result.exit_code == 0
        assert "note: vocabularies are padded differently (267 and 331 ids)" in result.stderr
        cloud.check()


async def test_2_ids_beyond_the_vocabulary():
    """Also those that the engine would take: padding is no token."""
    with LiveCloud(target(padding=64)) as cloud:
        async with raw_client(cloud.url) as client:
            await client.send(opening(prompt=[65, REAL_VOCAB + 3]))
            error = await client.receive()
            assert (error.code, error.request) == ("bad_token", 1)
        cloud.check()


# ---- 3-8: the end of a text, and counting ------------------------------------------------------


@pytest.mark.parametrize("draft_config", [{}, {"divergence": 0.0}])
async def test_3_eos_in_mid_window(draft_config):
    async with pair(draft(eos_bias=1.0, **draft_config), target(eos_bias=1.0)) as edge:
        for prompt in ("hello", "one", "two", "four", "tell me: "):
            alone = await edge.generate(prompt, mode="cloud", raw=True, max_tokens=200)
            assert alone.finish_reason == "stop"
            assert 0 < len(alone.token_ids) < 50
            for way, result in await every_way(edge, prompt, raw=True, max_tokens=200):
                assert (result.token_ids, result.text) == (alone.token_ids, alone.text), way
                assert result.finish_reason == "stop"
                assert EOS not in result.token_ids


async def test_3_nothing_is_drafted_behind_an_eos():
    short = target(eos_bias=1.0)
    async with pair(short, target(eos_bias=1.0)) as edge:
        for way, result in await every_way(edge, "tell me: ", raw=True, fill=False):
            assert result.finish_reason == "stop"
            assert result.stats.drafted <= len(result.token_ids) + 1, way


async def test_3_no_bonus_token_behind_an_eos():
    """A window that goes on behind the EOS, all of it right up to there."""
    short = target(eos_bias=2.0)
    prompt = opening().prompt
    text = [*(await text_alone("tell me: ", short, raw=True, max_tokens=200)).token_ids, EOS]
    with LiveCloud(short) as cloud:
        async with raw_client(cloud.url) as client:
            await client.send(opening(fill=False, max_tokens=200, lookahead=False))
            ids = pack_ids([*text, 65, 66])
            await client.send(Window(request=1, branch=0, start=len(prompt), ids=ids))
            committed, ahead = [], text.copy()
            while not isinstance(message := await client.receive(), Finished):
                if isinstance(message, Verdict):
                    committed += ahead[len(committed) :][: message.accepted]
                    committed += unpack_ids(message.ids, 64)
            assert committed == text
            assert message.reason == "stop"
        cloud.check()


@pytest.mark.parametrize("length", [1, 4])
async def test_4_stop_strings_across_windows(length):
    """The same cut for every window; the stop string begins and ends inside tokens."""
    whole = await text_alone(max_tokens=32)
    async with pair() as edge:
        for at in (7, 18):
            stop = whole.text[at : at + length]
            cut = whole.text[: whole.text.index(stop)]
            alone = await edge.generate("hello", mode="cloud", stop=(stop,), max_tokens=32)
            for way, result in await every_way(edge, stop=(stop,), max_tokens=32):
                assert result.text == cut, way
                assert result.token_ids == alone.token_ids, way
                assert result.finish_reason == "stop"


async def test_4_the_first_of_several_stop_strings():
    whole = await text_alone(max_tokens=32)
    early, late = whole.text[10:14], whole.text[24:28]
    async with pair() as edge:
        for way, result in await every_way(edge, stop=(late, early, "never"), max_tokens=32):
            assert result.text == whole.text[: whole.text.index(early)], way


async def test_5_everything_agrees_after_a_cut():
    whole = await text_alone(max_tokens=32)
    stop = whole.text[21:25]
    async with pair() as edge:
        tokenizer = edge.engine.tokenizer
        for way, result in await every_way(edge, stop=(stop,), max_tokens=32):
            text = text_of(tokenizer, result.token_ids)
            assert text[: text.index(stop)] == result.text, way
            assert stop not in text_of(tokenizer, result.token_ids[:-1])
            assert [c.token for c in result.commits] == result.token_ids
            first = result.prompt_tokens
            assert [c.position for c in result.commits] == list(
                range(first, first + len(result.token_ids))
            )
            said = result.to_dict()
            assert said["usage"]["completion_tokens"] == len(said["token_ids"])


async def test_6_small_budgets_with_large_windows():
    alone = await text_alone(max_tokens=3)
    async with pair() as edge:
        for budget in (1, 2, 3):
            for fill in (False, True):
                for way, result in await every_way(edge, max_tokens=budget, fill=fill):
                    assert result.token_ids == alone.token_ids[:budget], (way, budget)
                    assert result.finish_reason == "length"


@pytest.mark.parametrize("accept", ["strict", "elastic"])
async def test_7_usage_counts_what_was_delivered(accept):
    async with pair() as edge:
        asked = len(prompt_ids(edge.engine, "hello", system=None, raw=False))
        for way in WAYS:
            seen: list[int] = []
            stream = edge.stream("hello", **way, accept=accept, temperature=0.9, max_tokens=19)
            async for piece in stream:
                seen += [c.token for c in piece.commits]
            said = piece.result.to_dict()
            assert said["usage"] == {"prompt_tokens": asked, "completion_tokens": len(seen)}
            assert said["token_ids"] == seen
            assert len(seen) <= 19


@pytest.mark.parametrize("accept", ["strict", "elastic"])
async def test_8_figures_come_from_committed_tokens(accept):
    endless = SyntheticConfig(seed=11, eos_bias=-30)
    async with pair(Synthetic(replace(endless, divergence=0.5)), Synthetic(endless)) as edge:
        for way, result in await every_way(edge, accept=accept, temperature=0.9, max_tokens=25):
            stats, origins = result.stats, Counter(c.origin for c in result.commits)
            assert len(result.token_ids) == 25
            assert stats.tokens_per_s == pytest.approx(25 / stats.seconds)
            assert stats.accepted == origins[Origin.AGREED] + origins[Origin.TOLERATED], way
            assert stats.corrections == origins[Origin.CORRECTED]
            assert stats.filled == origins[Origin.FILLED]
            assert stats.wasted_drafts == stats.drafted - stats.accepted
            judged = stats.accepted + stats.corrections
            rate = stats.accepted / judged if judged else None
            assert stats.acceptance_rate == rate
            assert 0 < stats.ttft_s <= stats.seconds


# ---- 9-11: caches and contexts ----------------------------------------------------------------


async def test_9_an_identical_draft_is_accepted_throughout():
    """Whose cache misses a bonus or corrected token differs behind it."""
    async with pair(target()) as edge:
        for accept in RULES:
            for way, result in await every_way(edge, accept=accept, fill=False, max_tokens=24):
                assert result.stats.acceptance_rate == 1.0, (accept, way)
                assert result.stats.corrections == 0


class Slips(Watched):
    """The target itself, except that it errs at every seventh position."""

    def _compute(self, state, position, text):
        true = super()._compute(state, position, text)
        if (position + 1) % 7:
            return true
        wrong = true.logits.copy()
        wrong[true.argmax] = -30.0
        return Dense(wrong)


async def test_9_a_correction_reaches_the_drafts_cache():
    async with pair(Slips()) as edge:
        for way, result in await every_way(edge, fill=False, max_tokens=40):
            corrected = [c.position for c in result.commits if c.origin is Origin.CORRECTED]
            assert corrected, way
            assert all(position % 7 == 0 for position in corrected), way


def test_9_so_do_several_tokens_that_come_before_the_next_draft():
    ask, first = opening(), len(opening().prompt)
    eos = frozenset({EOS})
    edge = EdgeSession(ask, window=1, eos=eos, vocab=REAL_VOCAB, lookahead=Lookahead(4))
    drafter = Drafter(target(), Cache(0), rule=ask.rule, sampling=ask.sampling, vocab=REAL_VOCAB)

    def proposed():
        job = drafter.begin(edge)
        proposal = drafter.compute(job)
        edge.drafted(proposal, job.position, job.branch)
        return proposal.token

    for _ in range(4):
        proposed()
    edge.verdict(Verdict(request=1, branch=0, start=first, accepted=1, ids=b"A", rejected=True))
    edge.verdict(Verdict(request=1, branch=0, start=first + 2, ids=b"B"))
    edge.verdict(Verdict(request=1, branch=0, start=first + 3, ids=b"C"))
    [[expected]] = target().forward([Step(0, edge.line.tokens)])
    assert proposed() == expected.argmax


def uncut(engine):
    engine.info = replace(engine.info, name="mamba", can_truncate=False)
    return engine


async def test_10_caches_that_can_not_be_cut():
    """Refused with the reason, except where nothing is ever cut."""
    with pytest.raises(ValueError, match="mamba: its cache can't be cut back"):
        Cloud(uncut(target()), times=TIMES)
    async with pair(uncut(draft())) as edge:
        for way in WAYS:
            with pytest.raises(ValueError, match="mamba: its cache can't be cut back"):
                await edge.generate("hello", **way)
        assert (await edge.generate("hello", mode="cloud", max_tokens=9)).token_ids
        assert (await edge.generate("hello", mode="draft", max_tokens=9)).token_ids


@pytest.mark.parametrize("near", [64, 4096])
@pytest.mark.parametrize("far", [64, 4096])
async def test_11_the_end_of_the_context(near, far):
    if near == far == 4096:
        return
    prompt = "x" * 60
    long = await text_alone(prompt, raw=True, max_tokens=20)
    async with pair(draft(context=near), target(context=far)) as edge:
        for way, result in await every_way(edge, prompt, raw=True, max_tokens=20):
            assert result.token_ids == long.token_ids[:4], way
            assert result.finish_reason == "length"
        if near == 64:
            alone = await edge.generate(prompt, raw=True, mode="draft", max_tokens=20)
            assert (len(alone.token_ids), alone.finish_reason) == (4, "length")
        with pytest.raises(ValueError, match="the context holds 64"):
            await edge.generate("x" * 64, raw=True)


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


class Scripted(Watched):
    """Writes `script` after a prompt of `prompt` bytes; errs at positions that `errs` says."""

    def __init__(self, script: str, prompt: int, errs=lambda at: False) -> None:
        self._script, self._prompt, self._errs = script.encode(), prompt, errs
        super().__init__()

    def _compute(self, state, position, text):
        at = position + 1 - self._prompt
        token = self._script[at] if at < len(self._script) else EOS
        logits = np.zeros(self.info.vocab_size, dtype=np.float32)
        logits[ord("#") if self._errs(at) else token] = 30.0
        return Dense(logits)


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
