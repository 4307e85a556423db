"""What other implementations of speculative decoding got wrong, one test a mistake.

Where windows matter, each runs at windows of 1, 3, 8 and 16 tokens, synchronous and pipelined.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from click.testing import CliRunner

from e2sci.cli import main
from e2sci.decoding.distribution import Dense, pack_ids, unpack_ids
from e2sci.engines.base import Step, text_of
from e2sci.engines.synthetic import EOS, REAL_VOCAB, Synthetic, SyntheticConfig
from e2sci.runtime.caches import Cache
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.drafter import Drafter
from e2sci.runtime.text import prompt_ids
from e2sci.session.edge import EdgeSession, Origin
from e2sci.session.lookahead import Lookahead
from e2sci.session.messages import Finished, Verdict, Window
from live import (
    TIMES,
    LiveCloud,
    Named,
    Watched,
    draft,
    pair,
    raw_client,
    target,
)
from ways import RULES, WAYS, every_way, text_alone
from world import opening

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
