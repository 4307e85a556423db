"""Models in GGUF files, run by llama.cpp: CPU or GPU, several sequences in one context.

Written against the low-level interface of llama-cpp-python, as the high-level one knows a single
sequence and no outputs by position. One `forward` is one `llama_decode` for every `batch` tokens;
logits are computed only where asked for and copied out, since the next call reuses their memory.

llama.cpp is not batch-invariant: from a few tokens a call on, logits differ a little from those of
single-token calls, enough to swap two tokens that nearly tie.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from e2sci.decoding.distribution import Dense, Distribution
from e2sci.engines.base import ContextFull, EngineError, ModelInfo, Step

lib: Any = None
with suppress(ImportError):  # an extra; asked for in the constructor
    lib = import_module("llama_cpp.llama_cpp")

_PADDING = re.compile(rb"\[PAD\d*\]|<\|?(pad|unused|dummy|extra_id)[_-]?\d*\|?>", re.IGNORECASE)
_ALL_LAYERS = 1 << 20
_PIECE_BYTES = 1024


class LlamaTokenizer:
    """The vocabulary of a GGUF file."""

    def __init__(self, model: Any) -> None:
        self._vocab = lib.llama_model_get_vocab(model)
        self.size: int = lib.llama_vocab_n_tokens(self._vocab)
        self._cached_piece = lru_cache(maxsize=1 << 16)(self._piece)

    def encode(self, text: str, *, special: bool) -> list[int]:
        data = text.encode()
        ids = (lib.llama_token * (len(data) + 8))()
        n = lib.llama_tokenize(self._vocab, data, len(data), ids, len(ids), False, special)
        if n < 0:
            raise EngineError(f"the tokenizer failed on a text of {len(data)} bytes")
        return list(ids[:n])

    def piece(self, token: int) -> bytes:
        if not 0 <= token < self.size:
            raise IndexError(f"token id {token} is out of range; ids lie below {self.size}")
        return self._cached_piece(token)

    def name(self, token: int) -> bytes:
        text: bytes = lib.llama_vocab_get_text(self._vocab, token) or b""
        return text + b"\0" if lib.llama_vocab_is_control(self._vocab, token) else text

    def ends_text(self, token: int) -> bool:
        """Whether the token ends a generation (EOS, end of turn)."""
        return bool(lib.llama_vocab_is_eog(self._vocab, token))

    def special(self, token: int) -> str:
        """The name of a special token, or nothing for -1."""
        return self.name(token).rstrip(b"\0").decode(errors="replace") if token >= 0 else ""

    def without_padding(self) -> int:
        """Number of ids that stand for a token."""
        real = self.size
        while real and _PADDING.fullmatch(self.name(real - 1).rstrip(b"\0")):
            real -= 1
        return real

    @property
    def bos(self) -> str:
        """The BOS to put before a text; empty if the model wants none."""
        wanted = lib.llama_vocab_get_add_bos(self._vocab)
        return self.special(lib.llama_vocab_bos(self._vocab)) if wanted else ""

    @property
    def eos(self) -> str:
        return self.special(lib.llama_vocab_eos(self._vocab))

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        n = lib.llama_token_to_piece(self._vocab, token, buffer, _PIECE_BYTES, 0, False)
        return buffer.raw[: max(0, n)]


class LlamaCpp:
    """The engine; see `Engine` for the contract. Raises EngineError when the file can't be loaded.

    `context`: tokens each of `slots` sequences can hold; `threads`: None for all cores;
    `gpu_layers`: -1 for all; `batch`: tokens in one `llama_decode`.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str | None = None,
        context: int = 4096,
        slots: int = 1,
        threads: int | None = None,
        gpu_layers: int = 0,
        batch: int = 512,
    ) -> None:
        if lib is None:
            raise EngineError('llama.cpp is not installed: pip install "e2sci[llama]"')
        _check_file(path)
        lib.llama_log_set(_silent, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.slots = slots
        self._model = _load_model(path, gpu_layers)
        self._context = _make_context(self._model, context, slots, threads, batch)
        if not self._context:
            lib.llama_model_free(self._model)
            raise EngineError(
                f"no memory for {slots} sequences of {context} tokens; lower --context or --slots"
            )
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(batch, 0, 1)
        self._size = batch
        self._lengths = [0] * slots
        self.tokenizer = LlamaTokenizer(self._model)
        self.info = self._describe(name or path.stem, context)

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        self._check(steps)
        rows = [
            (i, step.sequence, self._lengths[step.sequence] + j, token, j >= first)
            for i, step in enumerate(steps)
            for first in [len(step.tokens) - step.outputs]
            for j, token in enumerate(step.tokens)
        ]
        outputs: list[list[Distribution]] = [[] for _ in steps]
        for at in range(0, len(rows), self._size):
            part = rows[at : at + self._size]
            if self._decode(part) != 0:
                for step in steps:
                    self.truncate(step.sequence, self._lengths[step.sequence])
                raise ContextFull("the cache has no room for these tokens; raise --context")
            for j, (i, *_, wanted) in enumerate(part):
                if wanted:
                    outputs[i].append(self._logits(j))
        for step in steps:
            self._lengths[step.sequence] += len(step.tokens)
        return outputs

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        lib.llama_memory_seq_rm(self._memory, sequence, length, -1)
        self._lengths[sequence] = min(length, self._lengths[sequence])

    def close(self) -> None:
        if self._model is not None:
            lib.llama_batch_free(self._batch)
            lib.llama_free(self._context)
            lib.llama_model_free(self._model)
            self._model = self._context = None

    def _decode(self, part: list[tuple[int, int, int, int, bool]]) -> int:
        batch = self._batch
        batch.n_tokens = len(part)
        for j, (_, sequence, position, token, wanted) in enumerate(part):
            batch.token[j] = token
            batch.pos[j] = position
            batch.n_seq_id[j] = 1
            batch.seq_id[j][0] = sequence
            batch.logits[j] = wanted
        return int(lib.llama_decode(self._context, batch))

    def _logits(self, row: int) -> Dense:
        pointer = lib.llama_get_logits_ith(self._context, row)
        return Dense(np.ctypeslib.as_array(pointer, (self.info.vocab_size,)).copy())

    def _check(self, steps: Sequence[Step]) -> None:
        """Refuse what llama.cpp would crash on, before anything is touched."""
        if len({step.sequence for step in steps}) < len(steps):
            raise ValueError("a sequence occurs twice in one pass")
        for step in steps:
            if not 0 <= step.sequence < self.slots:
                raise ValueError(f"sequence {step.sequence} is out of range; slots: {self.slots}")
            if not 0 <= step.outputs <= len(step.tokens):
                raise ValueError(f"{step.outputs} outputs of {len(step.tokens)} tokens")
            for token in step.tokens:
                if not 0 <= token < self.tokenizer.size:
                    raise ValueError(
                        f"token id {token} is out of range; ids lie below {self.tokenizer.size}"
                    )
            if self._lengths[step.sequence] + len(step.tokens) > self.info.context:
                raise ContextFull(f"the context holds {self.info.context} tokens")

    def _describe(self, name: str, context: int) -> ModelInfo:
        tokenizer, template = self.tokenizer, lib.llama_model_chat_template(self._model, None)
        uncuttable = lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(
            self._model
        )
        return ModelInfo(
            name=name,
            vocab_size=tokenizer.size,
            real_vocab=tokenizer.without_padding(),
            context=context,
            eos_ids=frozenset(t for t in range(tokenizer.size) if tokenizer.ends_text(t)),
            template=template.decode() if template else None,
            bos=tokenizer.bos,
            eos=tokenizer.eos,
            can_truncate=not uncuttable,
        )


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise EngineError(f"can't read {path}: {error.strerror}") from None
    if magic != b"GGUF":
        raise EngineError(f"{path} is not a GGUF file; convert the model, or name another")


def _load_model(path: Path, gpu_layers: int) -> Any:
    params = lib.llama_model_default_params()
    params.n_gpu_layers = _ALL_LAYERS if gpu_layers < 0 else gpu_layers
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise EngineError(
            f"llama.cpp can't load {path}: the file is damaged, too large for the memory, or of a "
            "kind that this version does not know"
        )
    return model


def _make_context(model: Any, context: int, slots: int, threads: int | None, batch: int) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = context * slots
    params.n_seq_max = slots
    params.n_batch = params.n_ubatch = batch
    params.n_threads = params.n_threads_batch = threads or os.cpu_count() or 1
    # One cache for all sequences: a pass over several of unequal length stays one graph
    # (312 against 459 ms for 5 + 3 + 1 + 7 tokens of the 0.5B on one core).
    params.kv_unified = True
    # A full cache for sliding-window layers too, as a trimmed one can't be cut back.
    params.swa_full = True
    return lib.llama_init_from_model(model, params)


if lib is not None:

    @lib.llama_log_callback  # type: ignore[untyped-decorator]
    def _silent(level: int, text: bytes, data: Any) -> None:
        """llama.cpp's own log, which would interleave with ours."""
