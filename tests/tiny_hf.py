"""Tiny random models in Hugging Face's format, over the 256 bytes and an end token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from e2sci.engines.transformers import Transformers

END, REAL, PADDED, LONGEST = 256, 257, 260, 320
TEMPLATE = "{{ messages[-1].content }}"
ENDS = {"eos_token_id": END, "bos_token_id": END, "pad_token_id": END}
SIZES: dict[str, Any] = {
    "vocab_size": PADDED,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.3,  # or attention would hardly matter
    **ENDS,
}


def qwen2(**changes: Any) -> Any:
    return transformers.Qwen2Config(**SIZES | changes)


def llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**SIZES | changes)


def mistral(**changes: Any) -> Any:
    """Every layer with a window of 6."""
    return transformers.MistralConfig(**SIZES | {"sliding_window": 6} | changes)


def gemma3(**changes: Any) -> Any:
    """One layer with a window of 6, one with full attention."""
    kinds = ["sliding_attention", "full_attention"]
    own = {"head_dim": 8, "sliding_window": 6, "layer_types": kinds}
    return transformers.Gemma3TextConfig(**SIZES | own | changes)


def gpt2(**changes: Any) -> Any:
    """Positions learnt, not rotated; no grouped heads."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
    own = {"vocab_size": PADDED, "initializer_range": 0.3} | sizes
    return transformers.GPT2Config(**own | ENDS | changes)


def save(folder: Path, config: Any, *, seed: int = 1, noise: float = 0.0) -> Path:
    """A model with `seed`'s weights; `noise`: another one near it, of that deviation."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weights in model.parameters() if noise else ():
            weights += noise * torch.randn_like(weights)
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


KINDS = {"qwen2": qwen2, "llama": llama, "mistral": mistral, "gemma3": gemma3, "gpt2": gpt2}
Build = Callable[..., Transformers]


def kept(root: Path, kind: str) -> Path:
    """The folder of a tiny model in `root`, made when it is first asked for; `noisy` is near
    `qwen2`."""
    if not (root / kind).exists():
        save(root / kind, KINDS.get(kind, qwen2)(), noise=0.05 if kind == "noisy" else 0.0)
    return root / kind


@contextmanager
def building(folder: Callable[[str], Path]) -> Iterator[Build]:
    """Builds engines in float64, closed in the end."""
    made: list[Transformers] = []

    def build(kind: str = "qwen2", **options: Any) -> Transformers:
        made.append(Transformers(folder(kind), **{"context": 200, "dtype": "float64"} | options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()
