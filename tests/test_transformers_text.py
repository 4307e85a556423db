"""Edge and cloud on the transformers engine, on tiny random models and on the real pair.

Strict text is compared exactly. That is sound because these models run in float64: there the shape
of a pass moves a logit by some 1e-15 of its size, and no two candidates lie that near. In float32
or half precision, equality holds but for near ties, as with any engine that isn't batch-invariant;
the real pair, in float32, is allowed a loss of .001 nats a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXTRA = 'needs pip install "e2sci[transformers]"'
torch = pytest.importorskip("torch", reason=EXTRA)
transformers = pytest.importorskip("transformers", reason=EXTRA)

import tiny_hf  # noqa: E402
from e2sci.engines.base import Step, fingerprint  # noqa: E402
from e2sci.engines.load import load_engine  # noqa: E402
from e2sci.engines.transformers import Transformers  # noqa: E402
from e2sci.runtime.text import prompt_ids  # noqa: E402
from live import cached, idle, pair  # noqa: E402
from tiny_hf import Build  # noqa: E402

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return partial(tiny_hf.kept, tmp_path_factory.mktemp("models"))


@pytest.fixture
def make(folder: Callable[[str], Path]) -> Iterator[Build]:
    with tiny_hf.building(folder) as build:
        yield build


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_p": 0.9, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
async def test_strict_text_is_the_targets(kind: str, make: Build, sampling: dict[str, Any]) -> None:
    far = make(kind, slots=2)
    async with pair(make("noisy"), far) as edge:
        options = {"max_tokens": 40, **sampling}
        alone = await edge.generate("tell me", mode="cloud", **options)
        assert len(alone.token_ids) > 10
        if not sampling:
            assert alone.token_ids == greedy(make(kind), "tell me", len(alone.token_ids))
        for window in (1, 3, 8):
            for mode in ("sync", "pipelined"):
                for fill in (False, True):
                    both = await edge.generate(
                        "tell me", mode=mode, window=window, fill=fill, **options
                    )
                    assert both.token_ids == alone.token_ids
        assert both.stats.drafted > 0


def greedy(engine: Transformers, prompt: str, n: int) -> list[int]:
    """What the library's own generation gives."""
    ids = engine.tokenizer.encode(prompt, special=True)
    model = engine._model
    model.set_attn_implementation("sdpa")
    made = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=n)
    return made[0, len(ids) :].tolist()


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_an_identical_draft_is_accepted_throughout(
    make: Build, sampling: dict[str, Any]
) -> None:
    async with pair(make(), make()) as edge:
        for window in (1, 5):
            result = await edge.generate(
                "hello", window=window, fill=False, max_tokens=40, **sampling
            )
            assert result.stats.corrections == 0
            assert result.stats.acceptance_rate == 1


async def test_sixteen_requests_at_once_get_what_each_gets_alone(make: Build) -> None:
    draft, far = make("noisy", slots=16), make(slots=16)
    prompts = [f"{'long ' * (i % 5)}prompt {i}" for i in range(16)]
    options = {"max_tokens": 20, "temperature": 0.7, "seed": 9}
    most = 0

    def watch(model: object, args: object, kwargs: dict[str, Any], made: object) -> None:
        nonlocal most
        most = max(most, len(kwargs["packed"].spans))

    far._model.register_forward_hook(watch, with_kwargs=True)
    async with pair(draft, far) as edge:
        alone = [await edge.generate(p, mode="cloud", **options) for p in prompts]
        assert most == 1
        both = await asyncio.gather(*(edge.generate(p, **options) for p in prompts))
        assert most > 4
        assert [r.token_ids for r in both] == [r.token_ids for r in alone]


@pytest.mark.parametrize("mode", ["cloud", "pipelined"])
async def test_leaving_frees_both_ends(make: Build, mode: str) -> None:
    draft, far = make("noisy"), make()
    async with pair(draft, far) as edge:
        async with aclosing(edge.stream("hello", mode=mode, max_tokens=150)) as pieces:
            async for _ in pieces:
                break
        await idle(edge.cloud)
        task = asyncio.create_task(edge.generate("hello", mode=mode, max_tokens=150))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(edge.cloud)
        assert (await edge.generate("hello", mode=mode, max_tokens=5)).token_ids
    assert cached(draft) == cached(far) == 0


# --- the real pair -------------------------------------------------------------------------------


@pytest.mark.models
async def test_a_llama_cpp_edge_and_a_transformers_cloud() -> None:
    """The same two GGUF files as everywhere, the target run by transformers in float32."""
    pytest.importorskip("llama_cpp")
    draft = load_engine("qwen2.5-coder", "draft", context=256)
    target = load_engine("hf:qwen2.5-coder", "target", context=256)
    real = target.info.real_vocab
    assert real == draft.info.real_vocab
    assert fingerprint(target).at(real) == fingerprint(draft).at(real)
    prompt = "Write a Python function that merges two sorted lists. Only the code."
    ids = prompt_ids(draft, prompt, system=None, raw=False)
    assert prompt_ids(target, prompt, system=None, raw=False) == ids
    async with pair(draft, target) as edge:
        result = await edge.generate(prompt, max_tokens=24, fill=False)
        assert result.stats.acceptance_rate > 0.5
    text = result.token_ids
    assert len(text) == 24
    [outputs] = target.forward([Step(0, ids + text[:-1], 24)])
    for p, token in zip(outputs, text, strict=True):  # greedy, were it not for rounding
        lost = p.log_prob(np.array([p.argmax])) - p.log_prob(np.array([token]))
        assert lost[0] <= 1e-3
    draft.close()
    target.close()
