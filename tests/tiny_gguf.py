"""A tiny random model in a GGUF file, over the 256 bytes and an end token."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT, END, REAL, PADDED = 96, 256, 257, 260
TEMPLATE = "{{ messages[0].content }}"


def gguf(path: Path, *, add_bos: bool = False, unused: str = "<a>") -> Path:
    """Two random layers over the 256 bytes, an end token, and padding."""
    tokens = [byte_name(b) for b in range(256)] + ["<|end|>", unused, "<b>", "[PAD259]"]
    kinds = [1] * 256 + [3, 5, 5, 1]  # normal, control, unused, padding by its name
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.context_length": CONTEXT,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": END,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.chat_template": TEMPLATE,
    }
    square, wide, tall, one = (64, 64), (64, 128), (128, 64), (64,)
    layer = {"attn_norm": one, "attn_q": square, "attn_k": square, "attn_v": square}
    layer |= {"attn_output": square, "ffn_norm": one}
    layer |= {"ffn_gate": wide, "ffn_up": wide, "ffn_down": tall}
    shapes = {"token_embd": (64, PADDED), "output_norm": one, "output": (64, PADDED)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}

    rng, infos, data = np.random.default_rng(5), b"", b""
    for name, shape in shapes.items():
        infos += string(f"{name}.weight") + struct.pack("<I", len(shape))
        infos += struct.pack(f"<{len(shape)}QIQ", *shape, 0, len(data))
        norm = np.ones(shape) if "norm" in name else rng.normal(0, 0.3, shape)
        data += norm.astype(np.float32).tobytes()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(values))
    head += b"".join(string(k) + value(v) for k, v in values.items()) + infos
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(v: Any) -> bytes:
    if isinstance(v, bool):
        return struct.pack("<I?", 7, v)
    if isinstance(v, int):
        return struct.pack("<Ii", 4, v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, str):
        return struct.pack("<I", 8) + string(v)
    kind, items = (
        (8, map(string, v)) if isinstance(v[0], str) else (5, (x.to_bytes(4, "little") for x in v))
    )
    return struct.pack("<IIQ", 9, kind, len(v)) + b"".join(items)


def byte_name(byte: int) -> str:
    """GPT-2's printable stand-in for a byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return (
        chr(byte)
        if byte in plain
        else chr(256 + [b for b in range(256) if b not in plain].index(byte))
    )
