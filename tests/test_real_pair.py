"""The default pair for real: strict text, acceptance, every rule, over a socket. Some minutes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from e2sci.engines.base import Engine, Step, fingerprint
from e2sci.engines.load import load_engine
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.edge import Edge
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.text import prompt_ids
from e2sci.server.cloud_app import listening

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
