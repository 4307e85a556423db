"""Hugging Face's tokenizers as ours: exact bytes, special tokens on request, what files say."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2sci.engines import catalog, hf_tokenizer
from e2sci.engines.base import EngineError, Fingerprint, ModelNotFound
from e2sci.engines.hf_tokenizer import HfTokenizer, describe

tokenizers = pytest.importorskip("tokenizers", reason='needs pip install "e2sci[gateway]"')
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers  # noqa: E402

HOLE, END, FIM, TOOL, LAST = 256, 257, 258, 259, 260


def byte_level() -> Tokenizer:
    """The 256 bytes, a hole, a special token, two added ones, and a word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)} | {"the": LAST}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    inner.add_tokens([AddedToken(text, normalized=False) for text in ("<|fim|>", "<tool>")])
    return inner


def sentencepiece() -> Tokenizer:
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": 1 + b for b in range(256)}
    vocab |= {c: 257 + i for i, c in enumerate("▁abc")} | {"▁a": 261}
    inner = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    inner.add_special_tokens(["<unk>"])
    return inner


@given(st.text())
def test_text_survives_the_tokens(text: str) -> None:
    for tokenizer in (BYTES, PIECES):
        ids = tokenizer.encode(text, special=False)
        assert b"".join(tokenizer.piece(t) for t in ids) == text.encode()


BYTES, PIECES = HfTokenizer(byte_level()), HfTokenizer(sentencepiece())


def test_lone_surrogates() -> None:
    ids = BYTES.encode("\ud800", special=False)
    assert b"".join(BYTES.piece(t) for t in ids) == b"?"


def test_special_tokens_are_read_only_on_request_and_have_no_text() -> None:
    text = "<|end|><|fim|><tool>"
    assert BYTES.encode(text, special=True) == [END, FIM, TOOL]
    plain = BYTES.encode(text, special=False)
    assert END not in plain
    assert FIM not in plain  # control by its looks, as converters to GGUF see it
    assert plain[-1] == TOOL
    assert [BYTES.piece(t) for t in (END, FIM, TOOL)] == [b"", b"", b"<tool>"]
    assert [BYTES.name(t) for t in (END, FIM, TOOL)] == [b"<|end|>", b"<|fim|>", b"<tool>"]


def test_control_tokens_can_be_named() -> None:
    tokenizer = HfTokenizer(byte_level(), control={TOOL})
    assert tokenizer.piece(TOOL) == b""
    assert TOOL not in tokenizer.encode("<tool>", special=False)
    assert tokenizer.encode("<tool>", special=True) == [TOOL]


def test_pieces_and_names() -> None:
    space = BYTES.encode(" ", special=False)[0]
    assert (BYTES.piece(space), BYTES.name(space)) == (b" ", "Ġ".encode())
    assert (PIECES.piece(261), PIECES.name(261)) == (b" a", "▁a".encode())
    assert (PIECES.piece(1 + 0xF0), PIECES.name(1 + 0xF0)) == (b"\xf0", b"<0xF0>")
    assert (BYTES.size, BYTES.name(HOLE)) == (LAST + 1, b"[PAD256]")


@pytest.mark.parametrize("token", [-1, LAST + 1])
def test_an_id_beyond_the_vocabulary(token: int) -> None:
    for ask in (BYTES.piece, BYTES.name):
        with pytest.raises(IndexError, match="ids lie below 261"):
            ask(token)


# --- the files beside a model -------------------------------------------------------------------


def save(folder: Path, inner: Tokenizer | None = None, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text((inner or byte_level()).to_str())
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("_dot_", ".")).write_text(text)
    return folder


def test_all_files(tmp_path: Path) -> None:
    folder = save(
        tmp_path / "model",
        tokenizer_config_dot_json={"eos_token": {"content": "<|end|>"}, "chat_template": "old"},
        chat_template_dot_jinja="new",
        config_dot_json={"vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": TOOL},
        generation_config_dot_json={"eos_token_id": [TOOL, FIM]},
    )
    found = describe(folder)
    assert (found.name, found.real_vocab, found.vocab_size) == ("model", LAST + 1, 300)
    assert (found.context, found.eos_ids) == (64, {END, FIM, TOOL})
    assert (found.template, found.bos, found.eos) == ("new", "", "<|end|>")


def test_the_tokenizer_alone(tmp_path: Path) -> None:
    found = describe(save(tmp_path))
    assert (found.vocab_size, found.context, found.template) == (None, None, None)
    assert (found.eos_ids, found.bos, found.eos) == (set(), "", "")


def test_settings_in_their_other_forms(tmp_path: Path) -> None:
    inner = byte_level()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", END)]
    )
    templates = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    found = describe(
        save(
            tmp_path,
            inner,
            tokenizer_config_dot_json={"chat_template": templates},
            config_dot_json={"vocab_size": 7, "text_config": {"vocab_size": 300}},
        )
    )
    assert (found.template, found.bos, found.vocab_size) == ("yes", "<|end|>", 300)
    assert found.tokenizer.encode("a", special=True) == BYTES.encode("a", special=True)


def test_unusable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match="owner/repo"):
        describe(tmp_path / "none")
    with pytest.raises(EngineError, match=r"no tokenizer\.json in .*save_pretrained"):
        describe(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match="can't be read as a tokenizer"):
        describe(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(EngineError, match="not UTF-8"):
        describe(tmp_path)
    with pytest.raises(EngineError, match="not a JSON object"):
        describe(save(tmp_path, config_dot_json="[1]"))
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(EngineError, match="no exact bytes"):
        describe(save(tmp_path, words))
    monkeypatch.setattr(hf_tokenizer, "MAX_FILE", 10)
    with pytest.raises(EngineError, match="larger than"):
        describe(tmp_path)


# --- the real vocabulary ------------------------------------------------------------------------


@pytest.mark.models
def test_the_same_vocabulary_as_llama_cpp(tmp_path: Path) -> None:
    """Qwen's tokenizer.json, put together from the GGUF file, against llama.cpp's own reading."""
    from e2sci.engines.llama_cpp import LlamaCpp

    path = catalog.local_path("qwen2.5-coder", "draft")
    llama = LlamaCpp(path, context=64)
    described = describe(save(tmp_path, qwen(path, llama.info.real_vocab)))
    ours, theirs = described.tokenizer, llama.tokenizer
    assert described.real_vocab == llama.info.real_vocab
    prints = [Fingerprint([t.name(i) for i in range(described.real_vocab)]) for t in (ours, theirs)]
    assert prints[0].at(described.real_vocab) == prints[1].at(described.real_vocab)
    # llama.cpp takes Qwen's ordinary token "</s>" for a control token, by its name
    other = [i for i in range(described.real_vocab) if ours.piece(i) != theirs.piece(i)]
    assert [ours.piece(i) for i in other] == [b"</s>"]
    for text in ("def f(x):\n    return x ** 2", "1234 Zürich, 日本 🙂", "<|im_end|><tool_call>"):
        for special in (False, True):
            assert ours.encode(text, special=special) == theirs.encode(text, special=special)
    llama.close()


def qwen(path: Path, real: int) -> Tokenizer:
    values = metadata(path)
    names, kinds = (values[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    merges = [tuple(m.split(" ")) for m in values["tokenizer.ggml.merges"]]
    plain = {names[i]: i for i in range(real) if kinds[i] == 1}
    inner = Tokenizer(models.BPE(plain, merges))
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    for i in range(real):
        if kinds[i] != 1:
            # as in Qwen's files: the fill-in-the-middle tokens aren't marked as special
            special = kinds[i] == 3 and i < 151657
            inner.add_tokens([AddedToken(names[i], special=special, normalized=False)])
    return inner


def metadata(path: Path) -> dict[str, Any]:
    """The key-value pairs of a GGUF file."""
    sizes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}

    def read(stream: BinaryIO, kind: int) -> Any:
        if kind == 8:
            return stream.read(read(stream, 10)).decode()
        if kind == 9:
            item = read(stream, 4)
            return [read(stream, item) for _ in range(read(stream, 10))]
        layout = "<" + sizes[kind]
        return struct.unpack(layout, stream.read(struct.calcsize(layout)))[0]

    with path.open("rb") as stream:
        stream.seek(16)
        return {read(stream, 8): read(stream, read(stream, 4)) for _ in range(read(stream, 10))}
