"""Speculative decoding keeps what `generate` promises: where a text ends, streamers, processors,
caches; and what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

EXTRA = 'needs pip install "e2sci[transformers]"'
torch = pytest.importorskip("torch", reason=EXTRA)
transformers = pytest.importorskip("transformers", reason=EXTRA)

import generating  # noqa: E402
import tiny_hf  # noqa: E402
from e2sci.integrations.huggingface import Speculative  # noqa: E402
from generating import PROMPT, WINDOWS, built, plain, written  # noqa: E402
from tiny_hf import END, PADDED  # noqa: E402

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


# --- where a text ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_last_token_asked_for_is_the_last(target: Any, near: Any, n: int) -> None:
    for draft in (target, near):
        way = Speculative(draft, window=8)
        assert written(target, way, max_new_tokens=n) == plain(target, max_new_tokens=n)
        assert way.figures.judged < n


@pytest.mark.parametrize("window", WINDOWS)
def test_an_end_token_within_a_window_ends_the_text(target: Any, window: int) -> None:
    text = plain(target)
    end = text[9]
    expected = text[: text.index(end) + 1]
    for ends in (end, [END, end]):
        way = Speculative(target, window=window)
        assert written(target, way, eos_token_id=ends) == expected
        assert way.figures.tokens == len(expected)


def test_stopping_criteria_are_asked_at_every_token(target: Any, near: Any) -> None:
    seen: list[int] = []

    class Eleven(transformers.StoppingCriteria):
        def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
            seen.append(ids.shape[1])
            return torch.tensor([ids.shape[1] == PROMPT.shape[1] + 11])

    way = Speculative(near, window=5)
    text = written(target, way, stopping_criteria=[Eleven()])
    assert text == plain(target)[:11]
    assert seen == [PROMPT.shape[1] + i for i in range(1, 12)]


def tokenizer(tmp_path: Path) -> Any:
    tiny_hf.save(tmp_path, tiny_hf.qwen2())
    return transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)


def test_a_stop_string_cuts_alike_at_every_window(target: Any, tmp_path: Path) -> None:
    words = tokenizer(tmp_path)
    text = plain(target)
    stop = next(t for t in text[5:] if words.decode(t).isascii())
    criteria = transformers.StopStringCriteria(words, [words.decode(stop)])
    expected = text[: text.index(stop) + 1]
    assert plain(target, stopping_criteria=[criteria]) == expected
    for window in WINDOWS:
        way = Speculative(target, window=window)
        found = written(target, way, stopping_criteria=[criteria])
        assert found == expected


# --- what generate hands over and gives back -----------------------------------------------------


class Heard(transformers.generation.BaseStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Any) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_hears_what_it_always_does(target: Any, near: Any) -> None:
    usual, heard = Heard(), Heard()
    plain(target, streamer=usual)
    written(target, Speculative(near), stream_to=heard)
    assert (heard.parts, heard.ended) == (usual.parts, usual.ended)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 30, "eos_token_id": 92},
        {"suppress_tokens": [28, 18, 120]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [len(ids), 40, 41]},
    ],
)
def test_logits_processors_are_honoured(
    target: Any, drafts: dict[str, Any], settings: dict[str, Any]
) -> None:
    expected = plain(target, **settings)
    assert expected != plain(target, eos_token_id=settings.get("eos_token_id"))
    for name, draft in drafts.items():
        way = Speculative(draft, window=5)
        assert written(target, way, **settings) == expected, name
        assert name != "same" or way.figures.acceptance_rate == 1


class Counting(transformers.LogitsProcessor):
    """One of a user's own, with a state: it forbids the token that was best three calls ago."""

    def __init__(self) -> None:
        self.best: list[int] = []
        self.lengths: list[int] = []

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.lengths.append(ids.shape[1])
        self.best.append(int(scores.argmax()))
        scores[:, self.best[-3:][0]] = -torch.inf
        return scores


def test_a_processor_with_a_state_is_asked_once_a_position(target: Any, near: Any) -> None:
    usual, ours = Counting(), Counting()
    expected = plain(target, logits_processor=[usual])
    found = written(target, Speculative(near, window=5), logits_processor=[ours])
    assert found == expected
    assert ours.lengths == usual.lengths == sorted(set(ours.lengths))


def test_guidance_too(target: Any, near: Any) -> None:
    settings = {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 6, 7]])}
    expected = plain(target, **settings)
    assert expected != plain(target)
    assert written(target, Speculative(near), **settings) == expected


def test_scores_logits_and_cache_are_given_back(target: Any, near: Any) -> None:
    settings = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.5,
        "max_new_tokens": 20,
    }
    expected = target.generate(PROMPT, **settings)
    found = target.generate(PROMPT, custom_generate=Speculative(near), **settings)
    assert type(found) is type(expected)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        wanted = getattr(expected, name)
        assert len(getattr(found, name)) == len(wanted)
        for ours, theirs in zip(getattr(found, name), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert found.cache.get_seq_length() == expected.cache.get_seq_length()
    for ours, theirs in zip(found.cache.layers, expected.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)


def test_a_conversation_goes_on_with_its_cache(target: Any, near: Any) -> None:
    way = Speculative(near)
    first = target.generate(
        PROMPT, custom_generate=way, max_new_tokens=10, return_dict_in_generate=True
    )
    longer = torch.cat([first.sequences, torch.tensor([[10, 11, 12]])], dim=-1)
    fed: list[int] = []
    hook = target.model.register_forward_pre_hook(
        lambda m, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    text = written(target, way, longer, cache=first.cache)
    hook.remove()
    assert fed[0] == 3 + 1 + way.options.window_size  # what it had not read, and the drafts
    assert text == plain(target, longer)


def test_static_caches(target: Any, near: Any) -> None:
    way = Speculative(near, window=8)
    assert written(target, way, cache_implementation="static") == plain(target)


def test_a_pipeline_takes_it(target: Any, near: Any, tmp_path: Path) -> None:
    model = target.float()
    try:
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer(tmp_path))
        settings = {"max_new_tokens": 20, "do_sample": False, "return_full_text": False}
        way = Speculative(model)
        assert pipe("Hello", custom_generate=way, **settings) == pipe("Hello", **settings)
        assert way.figures.tokens > 0
    finally:
        target.double()


# --- what is refused -----------------------------------------------------------------------------


def refused(model: Any, way: Speculative, prompt: Any = PROMPT, **settings: Any) -> str:
    heard = Heard()
    with pytest.raises(ValueError, match=r"[a-z]") as caught:
        written(model, way, prompt, stream_to=heard, **settings)
    assert "\n" not in str(caught.value)
    assert all(part == prompt.flatten().tolist() for part in heard.parts)  # no text
    return str(caught.value)


def test_calls_that_cannot_be_served(target: Any, near: Any) -> None:
    way = Speculative(near)
    two = torch.cat([PROMPT, PROMPT])
    assert "2 sequences in one call; call generate once for each" in refused(target, way, two)
    assert "2 sequences" in refused(target, way, do_sample=True, num_return_sequences=2)
    assert "the settings ask for beam_search" in refused(target, way, num_beams=2)
    assert "leave use_cache on" in refused(target, way, use_cache=False)
    assert "output_attentions" in refused(
        target, way, return_dict_in_generate=True, output_hidden_states=True
    )
    assert "leave out prefill_chunk_size" in refused(target, way, prefill_chunk_size=4)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    assert "padding" in refused(target, way, attention_mask=mask)
    embedded = target.get_input_embeddings()(PROMPT)
    assert "wouldn't see inputs_embeds" in refused(target, way, inputs_embeds=embedded)
    cache = target.generate(PROMPT, max_new_tokens=1, return_dict_in_generate=True).cache
    assert "expected a new one at least" in refused(target, way, cache=cache)
    assert "expected the whole text alone" in refused(
        target, way, PROMPT[:, :2], cache=cache, attention_mask=torch.ones((1, 9), dtype=int)
    )
    with pytest.raises(ValueError, match="seed is -1"):
        written(target, way, do_sample=True, seed=-1)


def test_tolerance_does_not_go_with_processors_that_cannot_run_on_the_draft(
    target: Any, near: Any
) -> None:
    way = Speculative(near, accept="elastic")
    said = refused(target, way, logits_processor=[Counting()])
    assert "accept=elastic could let pass what Counting forbids" in said


def test_models_whose_cache_cannot_be_cut_are_refused(target: Any, near: Any) -> None:
    hybrid = built(
        transformers.Qwen3NextConfig(
            **tiny_hf.SIZES
            | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
            | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
            | {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
            | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
            | {"shared_expert_intermediate_size": 16, "mlp_only_layers": [0, 1]}
        )
    )
    assert "the draft's cache can't be cut back (qwen3_next" in refused(target, Speculative(hybrid))
    assert "the model's cache can't be cut back" in refused(hybrid, Speculative(near))


def test_encoders_are_refused(near: Any, target: Any) -> None:
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": PADDED}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(**small, **heads))
    assert "an encoder-decoder model" in refused(bart, Speculative(near))
    assert "an encoder-decoder model" in refused(target, Speculative(bart))


def test_settings_that_make_no_sense(near: Any) -> None:
    for settings, message in (
        ({"threshold": 0.1}, "strict has no threshold"),
        ({"accept": "elastic", "threshold": -1}, "threshold is -1; expected 0 nats or more"),
        ({"window": 0}, "window is 0; expected 1 to 64"),
    ):
        with pytest.raises(ValueError, match=message):
            Speculative(near, **settings)
    with pytest.raises(ValueError, match="the draft is of type str; expected a loaded model"):
        Speculative("a/name")
