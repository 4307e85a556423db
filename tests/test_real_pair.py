"""The default pair for real: strict text, acceptance, every rule, over a socket. Some minutes."""

from __future__ import annotations

import asyncio
from typing import cast

import numpy as np
import pytest

from e2sci.decoding.distribution import Dense, decode, sketch
from e2sci.decoding.divergence import divergence
from e2sci.engines.base import Engine, Step, fingerprint
from e2sci.engines.load import load_engine
from e2sci.engines.memory import KEPT, Remembering
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.text import prompt_ids
from e2sci.server.cloud_app import listening
from live import Edge

pytestmark = pytest.mark.models

TIMES = PassTimes(((1, 50.0), (8, 330.0), (16, 480.0), (32, 950.0)))
NEAR_TIE = 1.0
"""Nats by which logits were seen to move with the size of a pass (llama.cpp on a CPU)."""
PROMPTS = (
    "Write a Python function that merges two sorted lists. Only the code.",
    "A train travels 60 km in 45 minutes. How far does it go in 2 hours? Think step by step.",
    "Translate to French: The library is closed on Mondays.",
    "Répète: « déjà vu » 🙂",
)


@pytest.fixture(scope="module")
def target():
    engine = load_engine("qwen2.5-coder", "target")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def draft():
    engine = load_engine("qwen2.5-coder", "draft")
    yield engine
    engine.close()


def run(target, draft, prompts, *settings):
    """Results by prompt, then by setting, of an edge on a real socket."""

    async def main():
        async with (
            Cloud(target, times=TIMES) as cloud,
            listening(cloud, "127.0.0.1", 0) as port,
            Edge(f"ws://127.0.0.1:{port}", draft) as edge,
        ):
            assert await edge.connect() == []
            return [[await edge.generate(p, **s) for s in settings] for p in prompts]

    return asyncio.run(main())


def assert_near_tie(target: Engine, prompt: list[int], alone: list[int], both: list[int]) -> None:
    """Equal, or the target's two choices at the first difference nearly tie."""
    eos = min(target.info.eos_ids)
    at = next((i for i, (a, b) in enumerate(zip(alone, both, strict=False)) if a != b), None)
    if at is None and len(alone) == len(both):
        return
    at = min(len(alone), len(both)) if at is None else at
    a, b = (text[at] if at < len(text) else eos for text in (alone, both))
    target.truncate(0, 0)
    [[p]] = target.forward([Step(0, prompt + alone[:at])])
    target.truncate(0, 0)
    gap = float(np.subtract(*p.log_prob(np.array([a, b]))))
    assert abs(gap) <= NEAR_TIE, f"texts differ at token {at} by {gap:.2f} nats"


def test_the_pair_shares_its_vocabulary(target, draft):
    assert target.info.real_vocab == draft.info.real_vocab == 151_665
    assert fingerprint(target).at(151_665) == fingerprint(draft).at(151_665)


def test_strict_text_is_the_clouds(target, draft):
    modes = [{"mode": "cloud"}, {"mode": "sync"}, {"fill": False}, {}]
    settings = [{"max_tokens": 40, **mode} for mode in modes]
    for prompt, (alone, *others) in zip(
        PROMPTS, run(target, draft, PROMPTS, *settings), strict=True
    ):
        ids = prompt_ids(draft, prompt, system=None, raw=False)
        for other in others:
            assert_near_tie(target, ids, alone.token_ids, other.token_ids)


def test_an_identical_draft_is_accepted_but_for_near_ties(draft):
    twin = load_engine("qwen2.5-coder", "draft")
    [[result]] = run(twin, draft, PROMPTS[:1], {"max_tokens": 60, "fill": False})
    twin.close()
    assert result.stats.acceptance_rate >= 0.95


def test_sampling_with_shared_noise_agrees_often(target, draft):
    [[alone, both]] = run(
        target,
        draft,
        PROMPTS[:1],
        {"mode": "cloud", "temperature": 0.7, "seed": 5, "max_tokens": 40},
        {"temperature": 0.7, "seed": 5, "max_tokens": 40, "fill": False},
    )
    assert both.stats.acceptance_rate > 0.6
    assert alone.token_ids[:5] == both.token_ids[:5]


@pytest.mark.parametrize("accept", ["rejection", "fuzzy", "elastic", "typical"])
def test_every_rule(target, draft, accept):
    [[result]] = run(target, draft, PROMPTS[:1], {"accept": accept, "max_tokens": 24})
    assert len(result.token_ids) == 24
    assert result.text.startswith("```python")


def test_stop_strings_and_split_characters(target, draft):
    [[result]] = run(target, draft, PROMPTS[3:], {"max_tokens": 40, "stop": ("vu",)})
    assert "vu" not in result.text
    assert "�" not in result.text


def test_the_wire_cost_at_a_window_of_eight(target, draft):
    options = {"window": 8, "max_tokens": 64, "fill": False}
    [[strict, regret, js]] = run(
        target,
        draft,
        PROMPTS[1:2],
        options,
        {"accept": "elastic", "measure": "regret", **options},
        {"accept": "elastic", **options},
    )
    opening = 400  # bytes an Open takes at most here, with its prompt
    assert (strict.stats.uplink_bytes - opening) / strict.stats.drafted <= 12
    assert (regret.stats.uplink_bytes - opening) / regret.stats.drafted <= 12
    assert (js.stats.uplink_bytes - opening) / js.stats.drafted <= 64


# ---- remembered distributions -------------------------------------------------------------

POSITIONS = 24
THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3)
REGRETS = (0.1, 0.3, 0.7, 1.5)


def alone(engine: Engine, prompt: list[int], line: list[int]) -> list[Dense]:
    """The engine's own distributions along `line`, fed as the memory feeds it."""
    engine.truncate(0, 0)
    [[p]] = engine.forward([Step(0, prompt)])
    places = [p]
    for token in line:
        [[p]] = engine.forward([Step(0, [token])])
        places.append(p)
    engine.truncate(0, 0)
    return cast("list[Dense]", places)


def test_every_decision_is_the_same_with_what_is_remembered(target, draft, tmp_path):
    """At each place: both picks, the sketch on the wire, and each rule at each threshold."""
    text = PROMPTS[1]
    prompt = prompt_ids(draft, text, system=None, raw=False)
    memories = [Remembering(e, tmp_path / n) for e, n in ((target, "target"), (draft, "draft"))]
    line: list[int] = []
    with memories[0].request(prompt):
        [[p]] = memories[0].forward([Step(0, prompt)])
        for _ in range(POSITIONS - 1):
            line.append(p.argmax)
            [[p]] = memories[0].forward([Step(0, line[-1:])])
    kept = []
    for memory in memories:  # a second time, now from the file, and cut in between
        with memory.request(prompt):
            [outputs] = memory.forward([Step(0, prompt + line, POSITIONS)])
            kept.append([p.limited(p.size) for p in outputs])
    whole = [alone(engine, prompt, line) for engine in (target, draft)]
    for p, q, kept_p, kept_q in zip(*whole, *kept, strict=True):
        assert (p.argmax, q.argmax) == (kept_p.argmax, kept_q.argmax)
        sent = sketch(q, keep=q.argmax)
        assert sent == sketch(kept_q, keep=kept_q.argmax)
        far = [divergence("js", each, decode(sent, q.size)) for each in (p, kept_p)]
        assert far[0] == pytest.approx(far[1], abs=1e-3)
        lost = [
            float(each.log_prob(np.array([p.argmax]))[0] - each.log_prob(np.array([q.argmax]))[0])
            for each in (p, kept_p)
        ]
        assert lost[0] == pytest.approx(lost[1], abs=1e-9) or lost[0] > KEPT - 1
        for t in THRESHOLDS:
            assert (far[0] <= t) == (far[1] <= t)
        for t in REGRETS:
            assert (lost[0] <= t) == (lost[1] <= t)
    assert memories[0].computed == POSITIONS


def test_a_cut_cache_computes_what_a_fresh_one_does(target, draft, tmp_path):
    """The same bits behind a rollback: what makes a memory independent of who asked first."""
    prompt = prompt_ids(draft, PROMPTS[0], system=None, raw=False)
    memory = Remembering(draft, tmp_path)
    with memory.request(prompt):
        [[p]] = memory.forward([Step(0, prompt)])
        line = [p.argmax]
        for token in (11, 12, 13):  # a branch that dies
            [[p]] = memory.forward([Step(0, [token])])
            assert p.argmax >= 0
        memory.truncate(0, len(prompt))
        found = []
        for _ in range(6):
            [[p]] = memory.forward([Step(0, line[-1:])])
            found.append(p.top(24))
            line.append(p.argmax)
    for mine, theirs in zip(found, alone(draft, prompt, line)[1:], strict=False):
        np.testing.assert_array_equal(mine.log_probs, theirs.log_prob(mine.ids))
