"""Runs `e2sci` with models whose Q5_0 tensors are stored as Q8_0: the same numbers, faster.

    E2SCI_AMX=1 python benchmarks/widened.py bench --task … --jobs 2 --abreast 16

A Q5_0 block is a scale and 32 integers of five bits, a Q8_0 block the same scale and integers of
eight. llama.cpp has matrix kernels (AMX) for the second and none for the first, so a pass of many
tokens through the default draft takes .4 of the time. Identities in results stay those of the
models' own files, since no weight differs; every tensor is compared when it is written. Other
kernels round in another way, so what is remembered has a folder of its own. Needs the package gguf,
and a llama.cpp whose AMX kernels work (see the README). `abreast.py` times it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import platformdirs
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from e2sci.cli import main
from e2sci.engines import llama_cpp, llama_library
from e2sci.evaluation import pair

Q5, Q8 = GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q8_0
KEPT = "token_embd.weight"  # looked up, never multiplied

_load = llama_cpp._load


def load(lib: Any, path: Path, gpu_layers: int, *, vocab_only: bool = False) -> Any:
    """As llama_cpp._load, of the widened file."""
    return _load(lib, path if vocab_only else widened(path), gpu_layers, vocab_only=vocab_only)


@cache
def widened(path: Path) -> Path:
    """The same model without Q5_0; `path` itself if there is none to widen."""
    model = GGUFReader(path)
    if not any(tensor.tensor_type == Q5 and tensor.name != KEPT for tensor in model.tensors):
        return path
    place = Path(platformdirs.user_cache_dir("e2sci")) / "widened" / path.name
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        half = place.with_suffix(f".{os.getpid()}")
        write(model, half)
        half.rename(place)
    return place


def write(model: GGUFReader, place: Path) -> None:
    """The model with wide tensors. Raises AssertionError when a number differs."""
    architecture = model.fields["general.architecture"].contents()
    writer = GGUFWriter(place, architecture)
    for field in model.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, inner = field.types[0], field.types[-1]
            of = inner if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=of)
    for tensor in model.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if stored == Q5 and tensor.name != KEPT:
            data, stored = wide(data), Q8
            before = gguf.quants.dequantize(tensor.data, Q5)
            assert np.array_equal(before, gguf.quants.dequantize(data, Q8)), tensor.name
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def wide(data: np.ndarray) -> np.ndarray:
    """Rows of Q5_0 blocks (scale · 2 bytes | fifth bits · 4 | low and high halves · 16) as rows of
    Q8_0 blocks (scale · 2 bytes | integers · 32)."""
    blocks = np.asarray(data).reshape(-1, 22)
    fifth = blocks[:, 2:6].copy().view("<u4")
    fifth = (fifth >> np.arange(32, dtype=np.uint32) & 1).astype(np.uint8)
    four = np.concatenate([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], axis=1)
    integers = (four | fifth << 4).astype(np.int8) - np.int8(16)
    made = np.concatenate([blocks[:, :2], integers.view(np.uint8)], axis=1)
    return made.reshape(*data.shape[:-1], -1)


def arithmetic() -> str:
    """As llama_library.arithmetic, for the names of memories."""
    return f"{llama_library.arithmetic()}-widened"


# Also in the worker processes, which import this file.
llama_cpp._load = load
pair.arithmetic = arithmetic  # type: ignore[attr-defined]

if __name__ == "__main__":
    main()
