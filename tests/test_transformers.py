"""The transformers engine, on tiny random models: passes, what goes wrong, and loading."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

EXTRA = 'needs pip install "e2sci[transformers]"'
torch = pytest.importorskip("torch", reason=EXTRA)
transformers = pytest.importorskip("transformers", reason=EXTRA)

import tiny_hf  # noqa: E402
from e2sci.engines import packed_attention  # noqa: E402
from e2sci.engines.base import ContextFull, EngineError, ModelNotFound, Step, fingerprint  # noqa: E402
from e2sci.engines.load import load_engine  # noqa: E402
from e2sci.engines.transformers import Transformers  # noqa: E402
from tiny_gguf import gguf  # noqa: E402
from tiny_hf import END, KINDS, LONGEST, PADDED, REAL, TEMPLATE, Build  # noqa: E402

pytestmark = pytest.mark.engines

CLOSE = 1e-5  # distributions are float32, whatever the model computes in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return partial(tiny_hf.kept, tmp_path_factory.mktemp("models"))


@pytest.fixture
def make(folder: Callable[[str], Path]) -> Iterator[Build]:
    with tiny_hf.building(folder) as build:
        yield build


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def logits(outputs: list[Any]) -> np.ndarray:
    return np.stack([p.logits for p in outputs])


def same(outputs: list[Any], wanted: np.ndarray) -> bool:
    """Equal but for rounding, the most probable token included."""
    found = logits(outputs)
    near = np.allclose(found, wanted, atol=CLOSE * np.abs(wanted).max())
    return near and np.array_equal(found.argmax(-1), wanted.argmax(-1))


def fresh(engine: Transformers, line: list[int]) -> np.ndarray:
    """The logits behind each of `line`, by a pass of their own in an empty sequence."""
    engine.truncate(0, 0)
    [outputs] = engine.forward([Step(0, line, len(line))])
    engine.truncate(0, 0)
    return logits(outputs)


# --- passes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_librarys_own(kind: str, make: Build, folder: Callable[[str], Path]) -> None:
    """At once, one by one, in parts, and several sequences together, beyond any sliding window."""
    own = transformers.AutoModelForCausalLM.from_pretrained(folder(kind), dtype=torch.float64)
    lines = [tokens(40, 1), tokens(3, 2), tokens(23, 3)]
    with torch.no_grad():
        wanted = [own(torch.tensor([line])).logits[0].float().numpy() for line in lines]
    engine = make(kind, slots=3)
    assert same(engine.forward([Step(0, lines[0], 40)])[0], wanted[0])
    engine.truncate(0, 0)
    assert same([engine.forward([Step(0, [t])])[0][0] for t in lines[0]], wanted[0])
    engine.truncate(0, 0)
    parts = (1, 7, 2, 30)
    at, found = [0, 0, 0], [[], [], []]
    for turn in range(12):
        steps = []
        for i, line in enumerate(lines):
            part = line[at[i] : at[i] + parts[(turn + i) % 4]]
            if part:
                steps.append(Step(i, part, len(part)))
                at[i] += len(part)
        for step, outputs in zip(steps, engine.forward(steps), strict=True):
            found[step.sequence] += outputs
    for outputs, expected in zip(found, wanted, strict=True):
        assert same(outputs, expected)


def test_sixteen_sequences_are_one_call_and_only_what_is_asked_for_is_computed(make: Build) -> None:
    engine = make(slots=16)
    calls: list[int] = []
    rows: list[int] = []
    engine._model.register_forward_hook(lambda *_: calls.append(1))
    engine._model.lm_head.register_forward_hook(lambda m, ins, out: rows.append(out.shape[1]))
    outputs = engine.forward([Step(i, tokens(1 + 3 * i, i), min(i, 2)) for i in range(16)])
    assert (len(calls), rows) == (1, [1 + 2 * 14])
    assert [len(found) for found in outputs] == [min(i, 2) for i in range(16)]
    for i in (1, 15):
        alone = make().forward([Step(0, tokens(1 + 3 * i, i), min(i, 2))])[0]
        assert same(outputs[i], logits(alone))
    assert engine.forward([]) == []
    assert engine.forward([Step(3, [], 0)]) == [[]]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 12)), max_size=8))
def test_any_feeding_and_cutting_gives_what_a_fresh_sequence_gives(
    moves: list[tuple[int, int, int]],
) -> None:
    """On a model with a sliding and a full layer."""
    engine = _shared()
    lines: list[list[int]] = [[], [], []]
    for seed, (i, n, cut) in enumerate(moves):
        part = tokens(n, seed)
        lines[i] += part
        [outputs] = engine.forward([Step(i, part, n)])
        found = logits(outputs)
        wanted = fresh(_alone(), lines[i])[-n:]
        np.testing.assert_allclose(found, wanted, atol=CLOSE * np.abs(wanted).max())
        keep = max(0, len(lines[i]) - cut)
        engine.truncate(i, keep)
        del lines[i][keep:]
        assert [engine.length(j) for j in range(3)] == [len(line) for line in lines]
    for i in range(3):
        engine.truncate(i, 0)


_engines: list[Transformers] = []


@pytest.fixture(autouse=True, scope="module")
def _two_engines(folder: Callable[[str], Path]) -> Iterator[None]:
    """For the test above, which can't take a fixture that is new for each example."""
    for slots in (3, 1):
        _engines.append(Transformers(folder("gemma3"), slots=slots, context=99, dtype="float64"))
    yield
    _engines.clear()


def _shared() -> Transformers:
    return _engines[0]


def _alone() -> Transformers:
    return _engines[1]


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Step(0, [PADDED])], "token id 260 is out of range; ids lie below 260"),
        ([Step(0, [-1])], "token id -1 is out of range"),
        ([Step(2, [1])], "sequence 2 is out of range; slots: 2"),
        ([Step(-1, [1])], "sequence -1 is out of range"),
        ([Step(0, [1], 2)], "2 outputs asked of 1 tokens"),
        ([Step(0, [1], -1)], "-1 outputs asked of 1 tokens"),
        ([Step(1, [1]), Step(1, [2])], "a sequence occurs twice"),
    ],
)
def test_steps_that_make_no_sense(make: Build, steps: list[Step], message: str) -> None:
    engine = make(slots=2)
    engine.forward([Step(0, [5, 6])])
    with pytest.raises(ValueError, match=message):
        engine.forward([Step(1, [1]), *steps] if len(steps) == 1 else steps)
    assert [engine.length(0), engine.length(1)] == [2, 0]


def test_a_full_context_leaves_every_cache_as_it_was(make: Build) -> None:
    engine = make(slots=2, context=12)
    line = tokens(13)
    engine.forward([Step(0, line[:10])])
    engine.forward([Step(1, line[:4])])
    with pytest.raises(ContextFull, match=r"10 \+ 3 tokens are more than the context of 12 holds"):
        engine.forward([Step(1, line[4:6]), Step(0, line[10:13])])
    assert [engine.length(0), engine.length(1)] == [10, 4]
    [first, second] = engine.forward([Step(0, line[10:12], 2), Step(1, line[4:6], 2)])
    wanted = fresh(make(), line[:12])
    assert same(first, wanted[10:])
    assert same(second, wanted[4:6])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried …"), "not enough memory; use a smaller"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you …"), "not enough memory"),
        (
            RuntimeError("device-side assert\ntriggered. More text."),
            "device-side assert triggered$",
        ),
    ],
)
def test_a_failing_pass_leaves_every_cache_as_it_was(
    make: Build, error: Exception, message: str
) -> None:
    engine = make()
    line = tokens(9)
    engine.forward([Step(0, line[:5])])

    def fail(*_: object) -> None:
        raise error

    hook = engine._model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(EngineError, match=message):
        engine.forward([Step(0, line[5:], 4)])
    hook.remove()
    assert engine.length(0) == 5
    [outputs] = engine.forward([Step(0, line[5:], 4)])
    assert same(outputs, fresh(make(), line)[5:])


def test_cutting(make: Build) -> None:
    engine = make(slots=2)
    engine.forward([Step(0, tokens(5)), Step(1, tokens(3))])
    for length in (-1, 6):
        with pytest.raises(ValueError, match=f"can't cut a cache of 5 tokens to {length}"):
            engine.truncate(0, length)
    engine.truncate(0, 0)
    assert [engine.length(0), engine.length(1)] == [0, 3]
    with pytest.raises(ValueError, match="sequence 2 is out of range"):
        engine.truncate(2, 0)


def test_a_closed_model_says_so(make: Build) -> None:
    engine = make()
    engine.close()
    engine.close()
    for call in (lambda: engine.forward([Step(0, [1])]), lambda: engine.truncate(0, 0)):
        with pytest.raises(EngineError, match="the model is closed"):
            call()


# --- loading -------------------------------------------------------------------------------------


def test_what_is_known_of_a_model(make: Build, folder: Callable[[str], Path]) -> None:
    info = make(context=9999, slots=5).info
    assert (info.vocab_size, info.real_vocab, info.context) == (PADDED, REAL, LONGEST)
    assert (info.name, info.template, info.eos) == ("qwen2", TEMPLATE, "<|end|>")
    assert (info.eos_ids, info.can_truncate, info.bos) == (frozenset({END}), True, "")
    settings = {"eos_token_id": [END, 7]}
    (folder("qwen2") / "generation_config.json").write_text(json.dumps(settings))
    assert make().info.eos_ids == {END, 7}
    assert make(name="other").info.name == "other"


def test_rotations_that_change_with_length_limit_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = tiny_hf.llama(rope_parameters=rope | {"original_max_position_embeddings": 64})
    assert Transformers(tiny_hf.save(tmp_path, config)).info.context == 64


def refused(tmp_path: Path, config: Any) -> str:
    """Why a model of this kind isn't taken."""
    with pytest.raises(EngineError) as caught:
        Transformers(tiny_hf.save(tmp_path, config))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_models_whose_cache_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    few = {"vocab_size": PADDED, "hidden_size": 32, "num_hidden_layers": 2, **tiny_hf.ENDS}
    said = refused(tmp_path / "mamba", transformers.MambaConfig(**few))
    assert "2 of its 2 layers keep a state that can't be cut back" in said
    hybrid = tiny_hf.SIZES | {"layer_types": ["conv", "full_attention"]}
    said = refused(tmp_path / "hybrid", transformers.Lfm2Config(**hybrid))
    assert "1 of its 2 layers keep a state that can't be cut back" in said


def test_models_that_attend_in_their_own_way_are_refused(tmp_path: Path) -> None:
    few = {"vocab_size": PADDED, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4}
    bert = transformers.BertConfig(**few, **heads, intermediate_size=48)
    assert "looks ahead" in refused(tmp_path / "bert", bert)
    capped = transformers.Gemma2Config(**tiny_hf.SIZES | {"head_dim": 8})
    assert "caps scores" in refused(tmp_path / "gemma2", capped)
    chunks = {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48}
    llama4 = transformers.Llama4TextConfig(**tiny_hf.SIZES | chunks)
    assert "chunked_attention" in refused(tmp_path / "llama4", llama4)
    biased = transformers.BloomConfig(vocab_size=PADDED, hidden_size=32, n_layer=2, n_head=4)
    assert "attend in their own way" in refused(tmp_path / "bloom", biased)


@pytest.mark.parametrize("wrong", ["mask", "scale", "nan"])
def test_a_model_that_computes_something_else_here_is_refused(
    make: Build, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    attended = packed_attention._attended

    def other(query, keys, values, mask, scale):
        if wrong == "nan":
            return attended(query, keys, values, mask, scale) * float("nan")
        if wrong == "scale":
            return attended(query, keys, values, mask, 1.5 * scale)
        return attended(query, keys, values, None if mask is None else ~mask, scale)

    monkeypatch.setattr(packed_attention, "_attended", other)
    with pytest.raises(EngineError, match="doesn't compute what transformers itself does"):
        make()


def test_folders_that_hold_no_usable_model(tmp_path: Path) -> None:
    def said(path: Path = tmp_path / "model") -> str:
        with pytest.raises(EngineError) as caught:
            Transformers(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no model" in said(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound):
        Transformers(tmp_path / "nowhere.gguf")
    folder = tiny_hf.save(tmp_path / "model", tiny_hf.qwen2())
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, known = weights.read_bytes(), json.loads(config.read_text())

    weights.write_bytes(whole[: len(whole) // 2])
    assert "can't load" in said()
    tensors = transformers.AutoModelForCausalLM.from_config(tiny_hf.qwen2()).state_dict()
    weights.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert "safetensors" in said()  # a pickle isn't opened
    (folder / "pytorch_model.bin").unlink()
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    from safetensors.torch import save_file

    save_file(tensors, weights, metadata={"format": "pt"})
    assert "lacks 1 of the model's tensors (model.layers.1.mlp.up_proj.weight" in said()

    weights.write_bytes(whole)
    config.write_text(json.dumps(known | {"model_type": "never_heard_of"}))
    assert "doesn't know its architecture" in said()
    config.write_text(json.dumps(known | {"model_type": "vit"}))
    assert "no causal language model" in said()
    remote = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config.write_text(json.dumps(known | {"model_type": "own", "auto_map": remote}))
    (folder / "code.py").write_text("raise SystemExit('run!')")
    assert "code of its own, which isn't run" in said()
    config.unlink()
    assert "can't load" in said()
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in said()


def test_devices_and_threads(
    make: Build, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match="doesn't divide a model; use -1 GPU layers"):
        make(gpu_layers=12)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(EngineError, match="torch finds no GPU here; use 0 GPU layers"):
        make(gpu_layers=-1)
    with pytest.raises(EngineError, match="1 slot at least"):
        make(slots=0)
    before = torch.get_num_threads()
    try:
        engine = load_engine(f"hf:{folder('qwen2')}", "target", threads=1, context=50)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert isinstance(engine, Transformers)
    assert (engine.info.name, engine.info.context) == (f"hf:{folder('qwen2')}", 50)
    assert engine._model.dtype == torch.float32


def test_half_precision_runs(make: Build) -> None:
    found = make(dtype="bfloat16").forward([Step(0, tokens(20), 20)])[0]
    wanted = fresh(make(), tokens(20))
    far = np.linalg.norm(logits(found) - wanted) / np.linalg.norm(wanted)
    assert 1e-5 < far < 0.1


def test_a_gguf_file_is_the_same_model_as_in_llama_cpp(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("e2sci.engines.llama_cpp")
    pytest.importorskip("llama_cpp")
    path = gguf(tmp_path / "tiny.gguf", unused="th")  # the library wants what a merge makes
    here, there = Transformers(path), llama_cpp.LlamaCpp(path, threads=1)
    assert fingerprint(here).at(REAL) == fingerprint(there).at(REAL)
    assert here.info.template == there.info.template
    assert (here.info.vocab_size, here.info.real_vocab) == (PADDED, PADDED - 1)  # [PAD259]
    assert here.info.eos_ids == there.info.eos_ids
    line = tokens(20)
    mine, theirs = (engine.forward([Step(0, line, 20)])[0] for engine in (here, there))
    np.testing.assert_allclose(logits(mine), logits(theirs), atol=0.1)  # its cache is float16
    there.close()
