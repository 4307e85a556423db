"""Log-probabilities of what is written: the target's own, in every mode, one a committed token."""

from __future__ import annotations

import numpy as np
import pytest

from e2sci.decoding.distribution import pack_ids
from e2sci.engines.base import Step
from e2sci.engines.synthetic import EOS
from e2sci.runtime.text import prompt_ids
from e2sci.session.messages import MAX_TOP, ProtocolError, Score, Verdict
from live import draft, pair, target

ENDLESS = {"logit_bias": {EOS: -100.0}}


def said_by_the_target(prompt, output):
    engine = target()
    ids = prompt_ids(engine, prompt, system=None, raw=False)
    [places] = engine.forward([Step(0, ids + output[:-1], len(output))])
    return places


@pytest.mark.parametrize("top", [0, 1, 5, MAX_TOP])
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "cloud"},
        {"mode": "sync"},
        {"window": 1},
        {"window": 8},
        {"accept": "elastic"},
        {"accept": "rejection", "temperature": 1.0, "seed": 3},
    ],
    ids=str,
)
async def test_they_are_the_targets(options, top):
    async with pair() as edge:
        result = await edge.generate("hi", max_tokens=30, logprobs=top, **ENDLESS, **options)
    assert len(result.commits) == 30
    places = said_by_the_target("hi", result.token_ids)
    for commit, p in zip(result.commits, places, strict=True):
        best = p.limited(EOS + 1).top(top) if top else None
        assert commit.score.log_prob == pytest.approx(p.log_prob(np.array([commit.token]))[0])
        assert commit.score.ids == pack_ids(best.ids.tolist() if best else [])
        assert commit.score.log_probs == pytest.approx(best.log_probs.tolist() if best else ())


async def test_asking_changes_nothing_else():
    async with pair() as edge:
        plain = await edge.generate("hi", max_tokens=40)
        scored = await edge.generate("hi", max_tokens=40, logprobs=2)
    assert plain.token_ids == scored.token_ids
    assert all(commit.score is None for commit in plain.commits)
    assert plain.stats.downlink_bytes < scored.stats.downlink_bytes


@pytest.mark.parametrize(("logprobs", "fine"), [(-1, False), (0, True), (20, True), (21, False)])
async def test_how_many(logprobs, fine):
    async with pair() as edge:
        if fine:
            await edge.generate("hi", max_tokens=2, logprobs=logprobs)
        else:
            with pytest.raises(ValueError, match=f"logprobs is {logprobs}; expected 0 to 20"):
                await edge.generate("hi", max_tokens=2, logprobs=logprobs)


async def test_the_draft_alone_has_none():
    async with pair() as edge:
        with pytest.raises(ValueError, match="drop logprobs"):
            await edge.generate("hi", mode="draft", logprobs=0)


def test_as_many_as_tokens_or_none():
    """A cloud that leaves one out is found out."""
    from random import Random

    from world import World, opening

    world = World(opening(max_tokens=5), Random(1), draft=draft())
    world._start()
    verdict = Verdict(
        request=1,
        branch=0,
        start=len(world.edge.committed),
        ids=pack_ids([100, 101]),
        scores=(Score(log_prob=-1.0),),
    )
    with pytest.raises(ProtocolError, match="fits nothing"):
        world.edge.verdict(verdict)
