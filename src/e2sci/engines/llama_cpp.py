"""llama.cpp inside this process: GGUF models on CPUs and GPUs, through llama-cpp-python.

It uses the library's C interface and not its `Llama` class, because a verification pass needs
several sequences in one call, logits at chosen positions, and caches that can be cut back.

`forward` lays all steps' tokens end to end, feeds them in batches, and copies the logits that were
asked for; the library reuses its buffer. All sequences share one cache (`kv_unified`): with a cache
each, the library splits a batch into parts of equal length per sequence, and every part reads all
weights again (windows of 5, 3, 1 and 7 tokens: 459 ms instead of 312).
"""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from e2sci.decoding.distribution import Dense, Distribution
from e2sci.engines.base import ContextFull, EngineError, ModelInfo, Step, require_feasible
from e2sci.engines.hf_tokenizer import Description
from e2sci.engines.llama_library import errors, library, may_repack, reason

_UNUSED = 2  # LLAMA_TOKEN_ATTR_UNUSED
_PADDING = re.compile(rb"\[PAD\d+\]")


class LlamaTokenizer:
    """The model's own vocabulary. Safe to use from any thread while the engine is open."""

    def __init__(self, lib: Any, vocab: Any) -> None:
        self._lib, self._vocab = lib, vocab
        self.size = int(lib.llama_vocab_n_tokens(vocab))
        self._pieces: dict[int, bytes] = {}

    def encode(self, text: str, *, special: bool) -> list[int]:
        data = text.encode("utf-8", errors="replace")  # lone surrogates
        room = len(data) + 16  # a token is a byte at least, but for a prefix
        ids = (ctypes.c_int32 * room)()
        n = self._lib.llama_tokenize(self._open(), data, len(data), ids, room, False, special)
        if n < 0:
            raise EngineError(f"llama.cpp can't tokenize a text of {len(data)} bytes")
        return ids[:n]

    def piece(self, token: int) -> bytes:
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self._piece(token)
        return found

    def name(self, token: int) -> bytes:
        """The raw vocabulary text. What counts as a control token is left out: the library guesses
        it from names, other engines don't."""
        text: bytes = self._lib.llama_vocab_get_text(self._open(token), token)
        return text

    def close(self) -> None:
        self._vocab = None

    def _piece(self, token: int) -> bytes:
        vocab, room = self._open(token), 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = self._lib.llama_token_to_piece(vocab, token, buffer, room, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            room = -n

    def _open(self, token: int = 0) -> Any:
        """The vocabulary; the library itself would crash on a bad id or after closing."""
        if self._vocab is None:
            raise EngineError("the model is closed")
        if not 0 <= token < self.size:
            raise IndexError(f"token id {token} is out of range; ids lie below {self.size}")
        return self._vocab


class LlamaCpp:
    """One GGUF model with the caches of `slots` sequences.

    `context`: tokens a sequence can hold, cut to what the model was trained for; `threads`: None
    for as many as this process may use cores; `gpu_layers`: layers kept on a GPU, -1 for all;
    `batch`: tokens per call into the library; `apart`: a cache for each sequence, so that none
    depends on what lies in another's (see above). Raises EngineError if the model can't be loaded.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        context: int = 4096,
        slots: int = 1,
        threads: int | None = None,
        gpu_layers: int = 0,
        batch: int = 512,
        apart: bool = False,
    ) -> None:
        lib = self._lib = library()
        if not 1 <= slots <= lib.llama_max_parallel_sequences():
            raise EngineError(f"llama.cpp holds 1 to {lib.llama_max_parallel_sequences()} slots")
        self.slots = slots
        self._model = _load(lib, Path(path), gpu_layers)
        self._context: Any = None
        try:
            context = min(context, lib.llama_model_n_ctx_train(self._model))
            cores = threads or _cores()
            unified = slots == 1 or not apart
            self._context = _new_context(
                lib, self._model, context * slots, slots, cores, batch, unified
            )
            self.tokenizer = LlamaTokenizer(lib, lib.llama_model_get_vocab(self._model))
            self.info = _describe(lib, self._model, name or Path(path).stem, context)
        except BaseException:
            self._free()
            raise
        self._memory = lib.llama_get_memory(self._context)
        self._batch = _Batch(lib, lib.llama_n_batch(self._context))
        self._lengths = [0] * slots

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        """One pass. Also raises ValueError on steps that make no sense, before anything is fed."""
        work = self._plan(steps)
        rows: list[NDArray[np.float32]] = []
        try:
            for start in range(0, work.shape[1], self._batch.size):
                rows += self._decode(work[:, start : start + self._batch.size])
        except BaseException:
            for step in steps:
                self._cut(step.sequence, self._lengths[step.sequence])
            raise
        for step in steps:
            self._lengths[step.sequence] += len(step.tokens)
        row = iter(rows)
        return [[Dense(next(row)) for _ in range(step.outputs)] for step in steps]

    def length(self, sequence: int) -> int:
        return self._lengths[self._checked(sequence)]

    def truncate(self, sequence: int, length: int) -> None:
        """Also raises ValueError if `length` is not 0 … the present length."""
        held = self.length(sequence)
        if not 0 <= length <= held:
            raise ValueError(f"can't cut a cache of {held} tokens to {length}")
        self._cut(sequence, length)
        self._lengths[sequence] = length

    def close(self) -> None:
        self.tokenizer.close()
        self._free()

    def _plan(self, steps: Sequence[Step]) -> NDArray[np.int64]:
        """Rows token, position, sequence, output flag; a column for each token of `steps`."""
        require_feasible(self, steps)
        work = np.zeros((4, sum(len(step.tokens) for step in steps)), dtype=np.int64)
        at = 0
        for step in steps:
            end, held = at + len(step.tokens), self._lengths[step.sequence]
            work[0, at:end] = step.tokens
            work[1, at:end] = np.arange(held, held + end - at)
            work[2, at:end] = step.sequence
            work[3, end - step.outputs : end] = 1
            at = end
        return work

    def _decode(self, work: NDArray[np.int64]) -> list[NDArray[np.float32]]:
        """Feed one batch; copies of the logits of its flagged columns, in order."""
        errors.clear()
        code = self._lib.llama_decode(self._context, self._batch.filled(work))
        if code == 1:
            raise ContextFull("the model's cache is full; raise the context or use fewer slots")
        if code:
            why = errors[0] if errors else f"code {code}"
            raise EngineError(f"llama.cpp failed on a pass of {work.shape[1]} tokens: {why}")
        shape = (self.info.vocab_size,)
        logits = self._lib.llama_get_logits_ith
        return [
            np.ctypeslib.as_array(logits(self._context, i), shape).copy()
            for i in np.flatnonzero(work[3]).tolist()
        ]

    def _cut(self, sequence: int, length: int) -> None:
        if not self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise EngineError(f"the cache of {self.info.name} can't be cut, only emptied")

    def _checked(self, sequence: int) -> int:
        if self._context is None:
            raise EngineError("the model is closed")
        if not 0 <= sequence < self.slots:
            raise ValueError(f"sequence {sequence} is out of range; slots: {self.slots}")
        return sequence

    def _free(self) -> None:
        if self._context is not None:
            self._lib.llama_free(self._context)
        if self._model is not None:
            self._lib.llama_model_free(self._model)
        self._context = self._model = None


def describe_gguf(path: str | Path) -> Description:
    """The model in a GGUF file, without its weights. Raises EngineError."""
    lib = library()
    model = _load(lib, Path(path), 0, vocab_only=True)
    tokenizer = LlamaTokenizer(lib, lib.llama_model_get_vocab(model))
    weakref.finalize(tokenizer, lib.llama_model_free, model)
    info = _describe(lib, model, Path(path).stem, 0)
    return Description(
        name=info.name,
        tokenizer=tokenizer,
        real_vocab=info.real_vocab,
        eos_ids=info.eos_ids,
        template=info.template,
        bos=info.bos,
        eos=info.eos,
        vocab_size=info.vocab_size,
    )


class _Batch:
    """A llama_batch over arrays of our own, so that NumPy fills it."""

    def __init__(self, lib: Any, size: int) -> None:
        self.size = size
        self._rows = np.zeros((3, size), dtype=np.int32)  # token, position, sequence
        self._flags = np.zeros(size, dtype=np.int8)
        self._ones = np.ones(size, dtype=np.int32)
        self._pointers = self._rows[2].ctypes.data + 4 * np.arange(size, dtype=np.uintp)
        ints = ctypes.POINTER(ctypes.c_int32)
        self._struct = lib.llama_batch(
            token=self._rows[0].ctypes.data_as(ints),
            pos=self._rows[1].ctypes.data_as(ints),
            n_seq_id=self._ones.ctypes.data_as(ints),
            seq_id=self._pointers.ctypes.data_as(ctypes.POINTER(ints)),
            logits=self._flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def filled(self, work: NDArray[np.int64]) -> Any:
        n = self._struct.n_tokens = work.shape[1]
        self._rows[:, :n] = work[:3]
        self._flags[:n] = work[3]
        return self._struct


def _load(lib: Any, path: Path, gpu_layers: int, *, vocab_only: bool = False) -> Any:
    """The model in `path`. Raises EngineError."""
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise EngineError(f"can't read {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise EngineError(f"{path} is not a GGUF file")
    if gpu_layers and not lib.llama_supports_gpu_offload():
        raise EngineError("this llama.cpp is built for CPUs only; use 0 GPU layers")
    params = lib.llama_model_default_params()  # its defaults map the file and repack weights
    params.n_gpu_layers, params.vocab_only = gpu_layers, vocab_only
    params.use_extra_bufts = may_repack(lib)
    errors.clear()
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise EngineError(f"can't load {path}: {reason()}")
    if lib.llama_model_has_encoder(model) or not lib.llama_model_has_decoder(model):
        lib.llama_model_free(model)
        raise EngineError(f"{path} is not a decoder-only language model")
    return model


def _new_context(
    lib: Any, model: Any, context: int, slots: int, threads: int, batch: int, unified: bool
) -> Any:
    """Caches for `context` tokens in all. Raises EngineError."""
    # Flash attention, cache types and n_ubatch change a pass of 1 to 16 tokens of one sequence by
    # under 3 % on a CPU: left as they are.
    params = lib.llama_context_default_params()
    params.n_ctx = context
    params.n_seq_max = slots
    params.kv_unified = unified
    if not unified:  # 16 sequences of 450 tokens: 129 ms a pass (0.5B, one core), with it 268
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.swa_full = True  # or the caches of sliding-window models could not be cut
    params.n_batch = params.n_ubatch = max(batch, slots)  # below, the library aborts
    params.n_threads = params.n_threads_batch = threads
    errors.clear()
    made = lib.llama_init_from_model(model, params)
    if not made:
        raise EngineError(f"no context of {slots} x {context // slots} tokens: {reason()}")
    return made


def _describe(lib: Any, model: Any, name: str, context: int) -> ModelInfo:
    vocab = lib.llama_model_get_vocab(model)
    size = int(lib.llama_vocab_n_tokens(vocab))

    def text(token: int) -> str:
        return str(lib.llama_vocab_get_text(vocab, token), "utf-8") if token >= 0 else ""

    template = lib.llama_model_chat_template(model, None)
    return ModelInfo(
        name=name,
        vocab_size=size,
        real_vocab=_without_padding(lib, vocab, size),
        context=context,
        eos_ids=frozenset(i for i in range(size) if lib.llama_vocab_is_eog(vocab, i)),
        template=None if template is None else template.decode("utf-8", errors="replace"),
        bos=text(lib.llama_vocab_bos(vocab)) if lib.llama_vocab_get_add_bos(vocab) else "",
        eos=text(lib.llama_vocab_eos(vocab)),
        can_truncate=not (lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)),
    )


def _without_padding(lib: Any, vocab: Any, size: int) -> int:
    """Ids up to the last that stands for a token: converters fill the vocabulary up behind it."""
    while size and (
        lib.llama_vocab_get_attr(vocab, size - 1) & _UNUSED
        or _PADDING.fullmatch(lib.llama_vocab_get_text(vocab, size - 1))
    ):
        size -= 1
    return size


def _cores() -> int:
    """Cores this process may run on: a pinned process must not start a thread for every core."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
