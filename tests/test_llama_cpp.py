"""The llama.cpp engine: on a tiny random model written here, and on the real pair."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from e2sci.decoding.distribution import Dense, Distribution
from e2sci.engines import catalog, llama_library
from e2sci.engines.base import ContextFull, EngineError, Step, fingerprint, text_of
from e2sci.engines.llama_cpp import LlamaCpp
from tiny_gguf import CONTEXT, END, PADDED, REAL, TEMPLATE, gguf

PROMPT = [ord(c) for c in "tell me: "]

Make = Callable[..., LlamaCpp]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Builds engines on the tiny model and closes them."""
    pytest.importorskip("llama_cpp")
    path = gguf(tmp_path / "tiny.gguf")
    made: list[LlamaCpp] = []

    def build(**options: Any) -> LlamaCpp:
        made.append(LlamaCpp(path, threads=1, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def alike(got: Sequence[Distribution], wanted: Sequence[Distribution]) -> bool:
    return len(got) == len(wanted) and all(
        isinstance(a, Dense) and isinstance(b, Dense) and np.allclose(a.logits, b.logits, atol=0.02)
        for a, b in zip(got, wanted, strict=True)
    )


def alone(make: Make, tokens: Sequence[int]) -> list[Distribution]:
    """The distributions behind each of `tokens`, fed one at a time to a fresh engine."""
    engine = make()
    return [engine.forward([Step(0, [t])])[0][0] for t in tokens]


# --- passes -------------------------------------------------------------------------------------


def test_tokens_fed_at_once_give_what_they_give_one_by_one(make: Make) -> None:
    wanted = alone(make, PROMPT)
    assert alike(make().forward([Step(0, PROMPT, len(PROMPT))])[0], wanted)
    assert alike(make().forward([Step(0, PROMPT, 3)])[0], wanted[-3:])
    assert make().forward([Step(0, PROMPT, 0)]) == [[]]
    assert not alike(wanted[:1], wanted[1:2])


@pytest.mark.parametrize("batch", [1, 4, 7])
def test_outputs_span_the_library_s_batches(make: Make, batch: int) -> None:
    steps = [Step(0, PROMPT, 6), Step(1, PROMPT[3:], 5)]
    whole = make(slots=2).forward(steps)
    assert alike(list(chain(*make(slots=2, batch=batch).forward(steps))), list(chain(*whole)))


def test_sequences_in_one_pass_do_not_see_each_other(make: Make) -> None:
    texts = [PROMPT, PROMPT[::-1], PROMPT[2:5]]
    engine = make(slots=3)
    engine.forward([Step(i, text[:2], 0) for i, text in enumerate(texts)])
    got = engine.forward([Step(i, texts[i][2:], len(texts[i]) - 2) for i in (2, 0, 1)])
    for i, distributions in zip((2, 0, 1), got, strict=True):
        assert alike(distributions, alone(make, texts[i])[2:])
    assert [engine.length(i) for i in range(3)] == [len(text) for text in texts]


def test_a_cut_cache_continues_like_a_fresh_one(make: Make) -> None:
    engine = make(slots=2)
    engine.forward([Step(0, [*PROMPT, 7, 8, 9]), Step(1, PROMPT)])
    engine.truncate(0, len(PROMPT))
    assert (engine.length(0), engine.length(1)) == (len(PROMPT), len(PROMPT))
    assert alike(engine.forward([Step(0, [1, 2], 2)])[0], alone(make, [*PROMPT, 1, 2])[-2:])
    engine.truncate(0, 0)
    assert alike(engine.forward([Step(0, [5])])[0], alone(make, [5]))
    assert alike(engine.forward([Step(1, [5])])[0], alone(make, [*PROMPT, 5])[-1:])


def test_results_outlive_the_next_pass(make: Make) -> None:
    engine = make()
    first = engine.forward([Step(0, PROMPT)])[0][0]
    assert isinstance(first, Dense)
    kept = first.logits.copy()
    engine.forward([Step(0, [1])])
    assert np.array_equal(first.logits, kept)


def test_every_slot_holds_the_whole_context(make: Make) -> None:
    engine = make(slots=4, context=90)
    for step in range(90):
        engine.forward([Step(i, [step + i]) for i in range(4)])
    assert [engine.length(i) for i in range(4)] == [90] * 4


# --- what can go wrong --------------------------------------------------------------------------


def test_a_full_context_is_refused_before_anything_is_fed(make: Make) -> None:
    engine = make(slots=2, context=20)
    engine.forward([Step(0, PROMPT), Step(1, PROMPT)])
    with pytest.raises(ContextFull, match="9 \\+ 12 tokens are more than the context of 20"):
        engine.forward([Step(0, [1]), Step(1, [2] * 12)])
    assert (engine.length(0), engine.length(1)) == (9, 9)
    assert alike(engine.forward([Step(0, [1])])[0], alone(make, [*PROMPT, 1])[-1:])


@pytest.mark.parametrize(
    ("code", "error"), [(1, ContextFull), (-2, EngineError)], ids=["no room", "failed"]
)
def test_a_failed_pass_leaves_every_cache_as_it_was(
    make: Make, code: int, error: type[Exception]
) -> None:
    engine = make(slots=2, batch=8)
    engine.forward([Step(0, PROMPT), Step(1, PROMPT)])
    library = engine._lib
    engine._lib = Failing(library, after=1, code=code)
    with pytest.raises(error):
        engine.forward([Step(0, [3] * 6), Step(1, [4] * 6)])
    engine._lib = library
    assert (engine.length(0), engine.length(1)) == (9, 9)
    got = engine.forward([Step(0, [1]), Step(1, [2])])
    assert alike(got[0], alone(make, [*PROMPT, 1])[-1:])
    assert alike(got[1], alone(make, [*PROMPT, 2])[-1:])


class Failing:
    """The library, but that decoding fails with `code` from the call `after` on."""

    def __init__(self, library: Any, after: int, code: int) -> None:
        self._library, self._left, self._code = library, after, code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def llama_decode(self, *arguments: Any) -> int:
        self._left -= 1
        return self._library.llama_decode(*arguments) if self._left >= 0 else self._code


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Step(0, [1]), Step(0, [2])], "twice"),
        ([Step(2, [1])], "sequence 2 is out of range; slots: 2"),
        ([Step(0, [1]), Step(1, [1, PADDED])], "token id 260 is out of range"),
        ([Step(0, [-1])], "token id -1 is out of range"),
        ([Step(0, [1, 2], 3)], "3 outputs asked of 2 tokens"),
    ],
)
def test_steps_that_make_no_sense(make: Make, steps: list[Step], message: str) -> None:
    engine = make(slots=2)
    with pytest.raises(ValueError, match=message):
        engine.forward(steps)
    assert engine.length(0) == 0


@pytest.mark.parametrize("length", [-1, 10])
def test_a_cut_to_a_length_there_never_was(make: Make, length: int) -> None:
    engine = make()
    engine.forward([Step(0, PROMPT)])
    with pytest.raises(ValueError, match="can't cut a cache of 9 tokens"):
        engine.truncate(0, length)


def test_a_closed_engine_says_so(make: Make) -> None:
    engine = make()
    engine.close()
    engine.close()
    for use in (
        lambda: engine.forward([Step(0, [1])]),
        lambda: engine.truncate(0, 0),
        lambda: engine.tokenizer.name(1),
        lambda: engine.tokenizer.encode("a", special=False),
    ):
        with pytest.raises(EngineError, match="closed"):
            use()


# --- loading ------------------------------------------------------------------------------------


def test_files_that_hold_no_model(make: Make, tmp_path: Path) -> None:
    whole = gguf(tmp_path / "whole.gguf").read_bytes()
    contents = {
        b"no": "is not a GGUF file",
        b"GGUF" + bytes(100): "can't load",
        whole[:300]: "cut off or damaged; download it again",
        whole[:-100]: "cut off or damaged; download it again",
        whole.replace(b"llama", b"lamma"): "unknown model architecture: 'lamma'; a newer",
    }
    bad = tmp_path / "bad.gguf"
    for content, message in contents.items():
        bad.write_bytes(content)
        with pytest.raises(EngineError, match=message) as caught:
            LlamaCpp(bad)
        assert str(bad) in str(caught.value)
        assert "\n" not in str(caught.value)
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(EngineError, match="can't read"):
            LlamaCpp(path)


def test_slots_beyond_the_library_s_limit(make: Make) -> None:
    for slots in (0, 10_000):
        with pytest.raises(EngineError, match="1 to 256 slots"):
            make(slots=slots)


def test_more_memory_than_there_is(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        llama_library.errors.append("ggml_aligned_malloc: insufficient memory (attempted 1 GB)")

    monkeypatch.setattr(llama_library.library(), "llama_init_from_model", fail)
    with pytest.raises(
        EngineError, match="2 x 50 tokens: not enough memory; use a smaller context"
    ):
        make(context=50, slots=2)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", None)
    llama_library.library.cache_clear()
    with pytest.raises(EngineError, match='pip install "e2sci\\[llama\\]"'):
        LlamaCpp(tmp_path / "any.gguf")


@pytest.mark.parametrize(
    ("built", "wish", "repacks"),
    [
        ("AVX2 = 1 | REPACK = 1", None, True),
        ("AMX_INT8 = 1", None, False),
        ("AMX_INT8 = 1", "1", True),
    ],
)
def test_amx_kernels_stay_off_unless_asked_for(
    built: str, wish: str | None, repacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some compilers break them, and the process dies in the first pass."""
    monkeypatch.delenv("E2SCI_AMX", raising=False)
    if wish:
        monkeypatch.setenv("E2SCI_AMX", wish)
    library = SimpleNamespace(llama_print_system_info=lambda: f"CPU : {built} |".encode())
    assert llama_library.may_repack(library) is repacks


def test_nothing_is_printed(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    make().forward([Step(0, PROMPT)])
    assert capfd.readouterr() == ("", "")


# --- the vocabulary -----------------------------------------------------------------------------


def test_what_a_model_says_of_itself(make: Make, tmp_path: Path) -> None:
    info = make(slots=2, context=50).info
    assert (info.name, info.context, info.can_truncate) == ("tiny", 50, True)
    assert (info.vocab_size, info.real_vocab, info.eos_ids) == (PADDED, REAL, {END})
    assert (info.template, info.bos, info.eos) == (TEMPLATE, "", "<|end|>")
    assert make(context=10_000).info.context == CONTEXT
    with_bos = LlamaCpp(gguf(tmp_path / "bos.gguf", add_bos=True), name="a name")
    assert (with_bos.info.bos, with_bos.info.name) == ("<|end|>", "a name")
    assert with_bos.tokenizer.encode("a", special=True) == [ord("a")]
    with_bos.close()


def test_text_survives_the_tokens(make: Make) -> None:
    tokenizer = make().tokenizer
    for text in ["", "plain", "é🙂 日本語\n\t", "a\0b"]:
        ids = tokenizer.encode(text, special=False)
        assert b"".join(tokenizer.piece(t) for t in ids) == text.encode()
    assert [tokenizer.piece(t) for t in tokenizer.encode("🙂", special=False)] == [
        b"\xf0",
        b"\x9f",
        b"\x99",
        b"\x82",
    ]
    assert tokenizer.encode("\ud800", special=False) == [ord("?")]


def test_special_tokens_are_read_only_on_request_and_have_no_text(make: Make) -> None:
    tokenizer = make().tokenizer
    assert tokenizer.encode("a<|end|>", special=True) == [ord("a"), END]
    assert END not in tokenizer.encode("a<|end|>", special=False)
    assert (tokenizer.piece(END), tokenizer.name(END)) == (b"", b"<|end|>")
    assert tokenizer.name(ord("a")) == b"a"


@pytest.mark.parametrize("token", [-1, PADDED])
def test_an_id_beyond_the_vocabulary(make: Make, token: int) -> None:
    tokenizer = make().tokenizer
    for ask in (tokenizer.piece, tokenizer.name):
        with pytest.raises(IndexError, match="ids lie below 260"):
            ask(token)


# --- the real pair ------------------------------------------------------------------------------

QUESTION = (
    "<|im_start|>user\nWhat is 12 * 7? Answer with the number.<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def real() -> Iterator[LlamaCpp]:
    pytest.importorskip("llama_cpp")
    path = catalog.local_path("qwen2.5-coder", "draft")
    engine = LlamaCpp(path, context=512, slots=2)
    yield engine
    engine.close()


@pytest.mark.models
def test_the_real_model_answers(real: LlamaCpp) -> None:
    fed, answer = real.tokenizer.encode(QUESTION, special=True), list[int]()
    real.truncate(0, 0)
    while len(answer) < 30:
        token = real.forward([Step(0, fed)])[0][0].argmax
        if token in real.info.eos_ids:
            break
        answer.append(token)
        fed = [token]
    assert "84" in text_of(real.tokenizer, answer)
    assert len(answer) < 30


@pytest.mark.models
def test_the_real_model_judges_a_window_as_it_would_have_drafted_it(real: LlamaCpp) -> None:
    """llama.cpp is not batch-invariant: where the picks differ, they are nearly tied."""
    prompt = real.tokenizer.encode("def fibonacci(n):\n", special=False)
    for sequence in (0, 1):
        real.truncate(sequence, 0)
        real.forward([Step(sequence, prompt[:-1], 0)])
    window, single = [prompt[-1]], []
    for _ in range(8):
        single.append(real.forward([Step(0, window[-1:])])[0][0])
        window.append(single[-1].argmax)
    together = real.forward([Step(1, window[:-1], 8)])[0]
    for one, many in zip(single, together, strict=True):
        picks = np.array([one.argmax, many.argmax])
        assert abs(np.diff(one.log_prob(picks))[0]) < 1.0
        assert one.log_prob(picks)[0] == pytest.approx(many.log_prob(picks)[0], abs=0.5)
    real.truncate(1, len(prompt) + 3)
    after = real.forward([Step(1, window[4:8], 4)])[0]
    assert [d.argmax for d in after] == [d.argmax for d in together[4:]]


@pytest.mark.models
def test_the_real_vocabulary(real: LlamaCpp) -> None:
    assert (real.info.vocab_size, real.info.real_vocab) == (151_936, 151_665)
    assert {151_643, 151_645} <= real.info.eos_ids
    assert real.info.bos == ""
    assert "<|im_start|>" in (real.info.template or "")
    text = "🧑‍🚀 naïve 日本語 — def f(x):\n\treturn x ** 2"
    ids = real.tokenizer.encode(text, special=False)
    assert b"".join(real.tokenizer.piece(t) for t in ids) == text.encode()
    assert any(invalid_alone(real.tokenizer.piece(t)) for t in ids)
    assert len(fingerprint(real).at(real.info.real_vocab)) == 32


def invalid_alone(piece: bytes) -> bool:
    return "�" in piece.decode(errors="replace")
