"""Tokenizers and model descriptions in Hugging Face's format, without torch or transformers.

    folder or owner/repo ── describe() ──► Description: tokenizer, template, EOS ids, sizes

`describe` reads the small files beside a model's weights: `tokenizer.json`, which must be there,
and `tokenizer_config.json`, `chat_template.jinja`, `config.json`, `generation_config.json`.
`HfTokenizer` makes the library's tokenizer ours: bytes instead of text, and special tokens read
only on request. Two kinds of vocabulary have exact bytes: byte-level BPE, where each character
stands for a byte, and SentencePiece's, where "▁" is a space and <0x0A> a byte.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import huggingface_hub as hub
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from e2sci.engines.base import EngineError, ModelNotFound, Tokenizer

MAX_FILE = 1 << 26
"""Bytes in one of the files at most; the largest known tokenizer.json has 33 MB."""

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)
_HUB_TIMEOUT = 5.0  # seconds until the hub counts as unreachable; its cache is used then
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_CONTROL = re.compile(r"<\|.+\|>|<｜.+｜>")  # what converters to GGUF take for control tokens


@dataclass(frozen=True)
class Description:
    """What is known of a model without its weights.

    `real_vocab`: ids that stand for a token; `vocab_size`: rows of its output layer, `context`:
    tokens it was trained for, both None where no config.json says so. The rest as in ModelInfo.
    """

    name: str
    tokenizer: Tokenizer
    real_vocab: int
    eos_ids: frozenset[int]
    template: str | None = None
    bos: str = ""
    eos: str = ""
    vocab_size: int | None = None
    context: int | None = None


class HfTokenizer:
    """A `tokenizers.Tokenizer` (taken over, not copied), safe to use from any thread.

    `control`: ids to treat as control tokens beside those that say so themselves. `size`: ids that
    stand for a token. Raises EngineError on a vocabulary without exact bytes.
    """

    def __init__(self, inner: Any, *, control: Collection[int] = ()) -> None:
        self._inner = inner
        self._lock = Lock()  # the switch in `encode` is the tokenizer's, not the call's
        self._byte_level = _is_byte_level(inner)
        self.size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self._added = inner.get_added_tokens_decoder()
        self._control = {i for i, token in self._added.items() if _is_control(token)}
        self._control.update(control)
        library = importlib.import_module("tokenizers")
        inner.add_special_tokens(
            [
                library.AddedToken(self._text(i), special=True, normalized=False)
                for i in sorted(self._control)
            ]
        )

    def encode(self, text: str, *, special: bool) -> list[int]:
        clean = text.encode("utf-8", errors="replace").decode()  # lone surrogates
        with self._lock:
            self._inner.encode_special_tokens = not special
            ids: list[int] = self._inner.encode(clean, add_special_tokens=False).ids
        return ids

    def piece(self, token: int) -> bytes:
        text = self._text(token)
        if token in self._control:
            return b""
        if token in self._added:
            return text.encode()
        if self._byte_level:
            return b"".join(_BYTES.get(c) or c.encode() for c in text)
        if byte := _BYTE.fullmatch(text):
            return bytes.fromhex(byte[1])
        return text.replace("▁", " ").encode()

    def name(self, token: int) -> bytes:
        return self._text(token).encode()

    def first(self) -> str:
        """The token a text begins with (BOS), empty if none."""
        with self._lock:
            ids = self._inner.encode("", add_special_tokens=True).ids
        return self._text(ids[0]) if ids else ""

    def id_of(self, text: str) -> int | None:
        """The id of a vocabulary entry."""
        found: int | None = self._inner.token_to_id(text)
        return found

    def _text(self, token: int) -> str:
        if not 0 <= token < self.size:
            raise IndexError(f"token id {token} is out of range; ids lie below {self.size}")
        text: str | None = self._inner.id_to_token(token)
        return f"[PAD{token}]" if text is None else text  # a hole, named as converters name it


def describe(source: str | Path) -> Description:
    """The model in a folder, or of `owner/repo` on the hub, whose small files are fetched.

    Raises ModelNotFound if there is none, EngineError if its files can't be used.
    """
    folder = _folder(str(source))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    settings = _json(folder / "tokenizer_config.json")
    config = _json(folder / "config.json")
    config = config.get("text_config") or config  # models that also see or hear
    eos = _content(settings.get("eos_token"))
    ends = [_json(folder / "generation_config.json").get("eos_token_id")]
    ends += [config.get("eos_token_id"), tokenizer.id_of(eos)]
    return Description(
        name=str(source) if folder != Path(source).expanduser() else folder.resolve().name,
        tokenizer=tokenizer,
        real_vocab=tokenizer.size,
        eos_ids=_ids(ends),
        template=_template(folder, settings.get("chat_template")),
        bos=tokenizer.first(),
        eos=eos,
        vocab_size=_count(config.get("vocab_size")),
        context=_count(config.get("max_position_embeddings") or config.get("n_positions")),
    )


def load_tokenizer(path: Path) -> HfTokenizer:
    """The tokenizer in a tokenizer.json. Raises EngineError."""
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise EngineError('tokenizers is missing; run: pip install "e2sci[gateway]"') from error
    text = _read(path)
    if text is None:
        raise EngineError(
            f"no {path.name} in {path.parent}; save the model's fast tokenizer there "
            "(`save_pretrained` of transformers writes it)"
        )
    try:
        return HfTokenizer(library.Tokenizer.from_str(text))
    except EngineError as error:
        raise EngineError(f"{path}: {error}") from None
    except Exception as error:  # the library raises plain Exception
        raise EngineError(f"{path} can't be read as a tokenizer: {error}") from error


def _folder(source: str) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        raise ModelNotFound(
            f"no model folder {source}; name a folder with a tokenizer.json, or owner/repo on "
            "the hub"
        )
    try:
        return Path(
            hub.snapshot_download(source, allow_patterns=list(_FILES), etag_timeout=_HUB_TIMEOUT)
        )
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelNotFound(
            f"no folder {source}, and the hub has no open repository of that name; a gated one "
            "needs `hf auth login` first"
        ) from None
    except Exception as error:  # the HTTP client, and so its exceptions, differ between versions
        raise EngineError(
            f"no folder {source}, and the hub can't be reached for it: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error


def _read(path: Path) -> str | None:
    """The file's text, None if there is no file."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise EngineError(f"{path} is larger than {MAX_FILE >> 20} MiB; that is no model's")
        return data.decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EngineError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise EngineError(f"{path} is not UTF-8 text") from None


def _json(path: Path) -> dict[str, Any]:
    text = _read(path)
    try:
        found = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise EngineError(f"{path} is not a JSON object; fetch it again")
    return found


def _is_byte_level(inner: Any) -> bool:
    """Whether characters stand for bytes. Raises EngineError if pieces have no exact bytes."""
    decoder = json.loads(inner.to_str())["decoder"] or {}
    found = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
    if "ByteLevel" in found:
        return True
    if not found & {"ByteFallback", "Metaspace"}:
        raise EngineError(
            "its pieces have no exact bytes; expected byte-level BPE or SentencePiece"
        )
    return False


def _is_control(token: Any) -> bool:
    return bool(token.special or _CONTROL.fullmatch(token.content))


def _template(folder: Path, setting: Any) -> str | None:
    """The chat template: a file of its own, or a setting, which may be a list of named ones."""
    if isinstance(setting, list):
        named = {t.get("name"): t.get("template") for t in setting if isinstance(t, dict)}
        setting = named.get("default")
    return _read(folder / "chat_template.jinja") or (setting if isinstance(setting, str) else None)


def _content(setting: Any) -> str:
    """A special token's text; settings give it plainly or as an AddedToken."""
    if isinstance(setting, dict):
        setting = setting.get("content")
    return setting if isinstance(setting, str) else ""


def _ids(found: list[Any]) -> frozenset[int]:
    flat = [i for entry in found for i in (entry if isinstance(entry, list) else [entry])]
    return frozenset(i for i in flat if isinstance(i, int) and i >= 0)


def _count(setting: Any) -> int | None:
    return setting if isinstance(setting, int) and setting > 0 else None


def _alphabet() -> dict[str, bytes]:
    """Byte-level BPE's characters: printable bytes stand for themselves, others for 256, 257, …"""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): bytes([b]) for b in printable} | {
        chr(256 + i): bytes([b]) for i, b in enumerate(others)
    }


_BYTES = _alphabet()
