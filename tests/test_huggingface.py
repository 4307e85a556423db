"""Speculative decoding within `generate`: what each rule writes, against `generate` alone and
against edge and cloud.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXTRA = 'needs pip install "e2sci[transformers]"'
torch = pytest.importorskip("torch", reason=EXTRA)
transformers = pytest.importorskip("transformers", reason=EXTRA)

import generating  # noqa: E402
import tiny_hf  # noqa: E402
from e2sci.decoding.credit import CreditParams  # noqa: E402
from e2sci.decoding.distribution import Dense  # noqa: E402
from e2sci.decoding.predictor import Forecast  # noqa: E402
from e2sci.decoding.sampling import History, SamplingParams, pick  # noqa: E402
from e2sci.engines.transformers import Transformers  # noqa: E402
from e2sci.integrations.huggingface import Speculative  # noqa: E402
from generating import PROMPT, WINDOWS, built, plain, written  # noqa: E402
from live import pair  # noqa: E402
from tiny_hf import END, REAL  # noqa: E402

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def target() -> Any:
    return generating.target_model()


@pytest.fixture(scope="module")
def near() -> Any:
    return generating.near_model()


@pytest.fixture(scope="module")
def drafts() -> dict[str, Any]:
    return generating.draft_models()


# --- strict --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("draft", ["same", "near", "other", "more", "fewer"])
def test_greedy_strict_is_plain_generate(
    target: Any, drafts: dict[str, Any], draft: str, window: int
) -> None:
    way = Speculative(drafts[draft], window=window)
    text = written(target, way)
    assert text == plain(target)
    assert way.figures.tokens == len(text)
    assert way.figures.tolerated == 0
    assert way.figures.accepted <= way.figures.judged <= way.figures.drafted


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "gpt2"])
def test_other_models_sliding_windows_among_them(kind: str) -> None:
    config = getattr(tiny_hf, kind)(tie_word_embeddings=False)
    model = built(config)
    for draft in (model, built(config, noise=0.05)):
        way = Speculative(draft, window=5)
        assert written(model, way) == plain(model)
    assert (way.figures.acceptance_rate or 0) < 1


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_model_that_drafts_for_itself_is_always_right(
    target: Any, window: int, sampled: bool
) -> None:
    way = Speculative(target, window=window)
    text = written(target, way, do_sample=sampled, seed=3)
    assert way.figures.acceptance_rate == 1
    assert way.figures.passes == -(-len(text) // (window + 1))


def keyed(model: Any, seed: int, n: int, process: Callable[..., Any] | None = None) -> list[int]:
    """The target alone, with the keyed noise: one full forward call a token."""
    ids = PROMPT
    for _ in range(n):
        with torch.no_grad():
            logits = model(ids).logits[:, -1].float()
        scores = process(ids, logits) if process else logits
        history = History(ids[0].tolist())
        params = SamplingParams(temperature=1, seed=seed)
        token = pick(Dense(scores[0].numpy()), params, history)
        ids = torch.cat([ids, torch.tensor([[token]])], dim=-1)
    return ids[0, PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize("draft", ["same", "near", "other"])
def test_sampled_strict_is_the_target_alone_with_the_same_seed(
    target: Any, drafts: dict[str, Any], draft: str
) -> None:
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 30}
    alone = keyed(target, 11, 30)
    for window in WINDOWS:
        assert (
            written(target, Speculative(drafts[draft], window=window), seed=11, **settings) == alone
        )
    assert written(target, Speculative(drafts[draft]), seed=12, **settings) != alone


def test_temperature_and_filters_are_those_of_the_settings(target: Any, near: Any) -> None:
    logits = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1.3),
            transformers.TemperatureLogitsWarper(0.7),
            transformers.TopKLogitsWarper(20),
            transformers.TopPLogitsWarper(0.9),
        ]
    )
    text = written(
        target,
        Speculative(near, window=5),
        seed=4,
        do_sample=True,
        repetition_penalty=1.3,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        max_new_tokens=30,
    )
    assert text == keyed(target, 4, 30, logits)


def test_without_a_seed_torchs_own_decides(target: Any, near: Any) -> None:
    way = Speculative(near)
    texts = []
    for number in (5, 5, 6):
        transformers.set_seed(number)
        texts.append(written(target, way, do_sample=True))
    assert texts[0] == texts[1] != texts[2]
    transformers.set_seed(5)
    assert written(target, way, do_sample=True, seed=way.figures.seed) == texts[2]
    written(target, way)
    assert way.figures.seed is None


# --- the other rules -----------------------------------------------------------------------------


def test_elastic_with_no_tolerance_is_strict(target: Any, near: Any) -> None:
    for measure in ("js", "regret"):
        way = Speculative(near, accept="elastic", measure=measure, threshold=0.0)
        assert written(target, way) == plain(target)
        assert way.figures.tolerated == 0


def test_elastic_tolerates_and_says_what(target: Any, near: Any) -> None:
    way = Speculative(near, accept="elastic", measure="regret", threshold=1.0, trace=True)
    text = written(target, way)
    assert text != plain(target)
    assert way.figures.tolerated > 0
    assert way.figures.credit is not None
    assert 0.25 <= (way.figures.threshold or 0) <= 1.75
    trace = way.figures.trace
    assert len(trace) == way.figures.judged
    assert sum(j.accepted and not j.agreed for j in trace) == way.figures.tolerated
    for judged in trace:
        if judged.accepted:
            assert judged.draft == text[judged.position - PROMPT.shape[1]]


def test_elastic_of_constant_threshold_is_fuzzy_with_agreement(target: Any, near: Any) -> None:
    fuzzy = Speculative(near, accept="fuzzy", threshold=0.2, agreement=True)
    elastic = Speculative(near, accept="elastic", constants=CreditParams.constant(0.2))
    for settings in ({}, {"do_sample": True, "seed": 8}):
        assert written(target, elastic, **settings) == written(target, fuzzy, **settings)
        assert elastic.figures.tolerated == fuzzy.figures.tolerated > 0


def test_a_spent_budget_makes_it_stricter(target: Any, near: Any) -> None:
    settings = {"accept": "elastic", "measure": "regret", "threshold": 2.0}
    free, bound = Speculative(near, **settings), Speculative(near, budget=0.0, **settings)
    written(target, free)
    written(target, bound)
    assert bound.figures.threshold == 0.5 < (free.figures.threshold or 0)


def test_typical_accepts_what_is_probable(target: Any, near: Any) -> None:
    way = Speculative(near, accept="typical", trace=True)
    written(target, way)
    assert way.figures.tolerated > 0
    assert all(j.accepted == (j.agreed or j.p > 0.09) or j.p <= 0.09 for j in way.figures.trace)


def test_rejection_accepts_what_is_as_likely_at_the_target(target: Any, near: Any) -> None:
    """Sampled, the text is compared with edge and cloud's below."""
    assert written(target, Speculative(near, accept="rejection")) == plain(target)
    own = Speculative(target, accept="rejection")
    text = written(target, own, do_sample=True, top_k=16, seed=1)
    assert (own.figures.acceptance_rate or 0) > 0.95  # but for the sketch's rounding
    assert text != plain(target)


def test_the_predictor_sets_the_window(target: Any) -> None:
    way = Speculative(
        target,
        accept="elastic",
        predictor=lambda r, delta: Forecast(window=12),
        constants=CreditParams(window=4, refresh=1),
        window=2,
        trace=True,
    )
    written(target, way)
    sizes = np.bincount([judged.window for judged in way.figures.trace])
    assert sizes[1] == 2
    assert 12 in sizes


async def test_the_text_is_that_of_edge_and_cloud(tmp_path: Path) -> None:
    """The same models and settings over the protocol, taking turns."""
    folders = [
        tiny_hf.save(tmp_path / str(i), tiny_hf.qwen2(vocab_size=REAL), noise=noise)
        for i, noise in enumerate((0.0, 0.05))
    ]
    models = [transformers.AutoModelForCausalLM.from_pretrained(f).double() for f in folders]
    engines = [Transformers(f, context=200, dtype="float64") for f in folders]
    prompt = "Hello w"
    ids = torch.tensor([engines[0].tokenizer.encode(prompt, special=False)])
    sampling = SamplingParams(temperature=0.8, top_k=30, seed=9)
    async with pair(engines[1], engines[0]) as edge:
        for rule in ({}, {"accept": "elastic", "threshold": 0.2}, {"accept": "rejection"}):
            over = await edge.generate(
                prompt, mode="sync", raw=True, max_tokens=40, sampling=sampling, **rule
            )
            text = written(
                models[0],
                Speculative(models[1], **rule),
                ids,
                do_sample=True,
                temperature=0.8,
                top_k=30,
                seed=9,
                eos_token_id=END,
            )
            # The last token is drafted there, and the target's own here: it comes with the pass.
            assert [t for t in text if t != END][:39] == over.token_ids[:39]
