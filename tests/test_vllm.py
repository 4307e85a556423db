"""The verifying gateway in front of a real vLLM server, on this machine's CPU.

The environment is made on first use (tests/vllm_env.py; several minutes, 3 GB in the cache folder),
and only where `make test-engines` asks for it.
"""

from __future__ import annotations

import os
from dataclasses import replace

import httpx
import numpy as np
import pytest

import vllm_env
from e2sci.decoding.distribution import Dense
from e2sci.engines.base import EngineError, Step
from e2sci.engines.hf_tokenizer import describe
from e2sci.engines.synthetic import Synthetic, SyntheticConfig
from e2sci.engines.vllm import Vllm
from e2sci.runtime.connection import Refused
from live import free_port, pair

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif("E2SCI_ENGINES" not in os.environ, reason="3 GB more: make test-engines"),
]

PROMPTS = ["hello", "def add(a, b):", "Zürich 🙂", "x" * 300]
LENGTH = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    try:
        return vllm_env.tiny_model(tmp_path_factory.mktemp("vllm") / "tiny")
    except vllm_env.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def url(folder):
    with vllm_env.serving(folder, free_port()) as url:
        yield url


@pytest.fixture
def engine(url, folder):
    engine = Vllm(url, tokenizer=folder)
    yield engine
    engine.close()


class Guessing(Synthetic):
    """A draft that knows a text by heart, but for one position in four."""

    def __init__(self, folder, text: list[int]) -> None:
        described = describe(folder)
        super().__init__(SyntheticConfig(seed=3), slots=4)
        size = described.real_vocab
        self.info = replace(
            self.info, vocab_size=size, real_vocab=size, eos_ids=described.eos_ids, template=None
        )
        self.tokenizer = described.tokenizer
        self.text = text
        self._ids = self._ids[:size]
        self._bias = np.zeros(size)

    def _feed(self, step: Step):
        rows = super()._feed(step)
        end = self.length(step.sequence)
        return [self._hint(row, end - len(rows) + 1 + i) for i, row in enumerate(rows)]

    def _hint(self, row: Dense, position: int) -> Dense:
        logits = row.logits.copy()
        if position < len(self.text) and position % 4:
            logits[self.text[position]] += 50
        return Dense(logits)


def plain(url, ids: list[int]) -> list[int]:
    """What vLLM itself writes behind `ids`, greedily."""
    body = {"model": "tiny", "prompt": ids, "max_tokens": LENGTH, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
    return answer.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_strict_text_is_vllms_own(url, folder, engine, prompt):
    ids = engine.tokenizer.encode(prompt, special=False)
    expected = plain(url, ids)
    async with pair(Guessing(folder, [*ids, *expected]), engine) as edge:
        for options in ({"window": 1}, {"window": 4}, {"window": 8}, {"mode": "sync", "window": 5}):
            got = await edge.generate(prompt, max_tokens=LENGTH, **options)
            assert got.token_ids == expected, options
            assert 0 < got.stats.acceptance_rate < 1 or len(expected) < 4
        got = await edge.generate(prompt, max_tokens=LENGTH, mode="cloud")
        assert got.token_ids == expected


async def test_a_sampled_text_does_not_depend_on_the_draft(folder, engine):
    asked = {"max_tokens": LENGTH, "temperature": 1.0, "top_k": 20, "seed": 5}
    async with pair(Guessing(folder, []), engine) as edge:
        alone = await edge.generate("hello", mode="cloud", **asked)
        text = [*engine.tokenizer.encode("hello", special=False), *alone.token_ids]
    async with pair(Guessing(folder, text), engine) as edge:
        got = await edge.generate("hello", window=4, **asked)
        assert got.token_ids == alone.token_ids
        assert got.stats.acceptance_rate > 0
        with pytest.raises(Refused, match="top_k is 1 to 20"):
            await edge.generate("hello", temperature=1.0, max_tokens=5)


def test_positions_of_one_pass_are_those_of_single_ones(engine):
    ids = list(range(60))
    [together] = engine.forward([Step(0, ids, 8)])
    for i, p in enumerate(together):
        [[alone]] = engine.forward([Step(1, ids[: 53 + i])])
        engine.truncate(1, 0)
        assert p.argmax == alone.argmax
        known = np.intersect1d(p.ids, alone.ids)
        assert len(known) >= 18  # the last of the best may change places
        np.testing.assert_allclose(p.log_prob(known), alone.log_prob(known), atol=1e-3)


def test_a_pass_computes_only_what_is_new(url, engine):
    """vLLM counts the tokens looked up in its prefix cache, and those found."""

    def counters() -> np.ndarray:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
        return np.array(
            [float(x.rsplit(" ", 1)[1]) for n in names for x in lines if x.startswith(n)]
        )

    ids = [i * 7 % 256 for i in range(1000)]
    engine.forward([Step(0, ids)])
    before = counters()
    engine.forward([Step(0, [1, 2, 3, 4, 5], 5)])
    asked, found = counters() - before
    assert asked == 1001 + 1002 + 1003 + 1004 + 1005
    assert asked - found <= 5 * (32 + 5)  # five prompts, less than a block and the window each


def test_the_servers_own_complaints(url, folder):
    with pytest.raises(EngineError, match="doesn't serve large; it serves tiny"):
        Vllm(url, tokenizer=folder, model="large")
    with pytest.raises(EngineError, match="answered 400: Requested sample logprobs of 50"):
        Vllm(url, tokenizer=folder, top=50).forward([Step(0, [1])])
