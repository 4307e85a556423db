"""Text that `generate` writes, alone and with a draft model; models for it.

Tiny random models in float64, so that the shape of a pass moves no pick.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

import tiny_hf
from e2sci.integrations.huggingface import Speculative

PROMPT = torch.tensor([[72, 101, 108, 108, 111, 32, 119]])
WINDOWS = (1, 3, 5, 8)


def built(config: Any, *, seed: int = 1, noise: float = 0.0) -> Any:
    """A model with `seed`'s weights; `noise`: another one near it."""
    torch.set_num_threads(1)  # models this small only wait for a second one
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weights in model.parameters() if noise else ():
            weights += noise * torch.randn_like(weights)
    return model.double()


@cache
def target_model() -> Any:
    return built(tiny_hf.qwen2())


@cache
def near_model() -> Any:
    """A draft that is right now and then."""
    return built(tiny_hf.qwen2(), noise=0.05)


@cache
def draft_models() -> dict[str, Any]:
    """By what they have in common with the target: all, weights nearly, ids, more ids, fewer."""
    return {
        "same": target_model(),
        "near": near_model(),
        "other": built(tiny_hf.llama(), seed=5),
        "more": built(tiny_hf.llama(vocab_size=tiny_hf.PADDED + 40), seed=6),
        "fewer": built(tiny_hf.llama(vocab_size=120, **dict.fromkeys(tiny_hf.ENDS)), seed=7),
    }


def plain(model: Any, prompt: Any = PROMPT, **settings: Any) -> list[int]:
    """What `generate` writes by itself."""
    made = model.generate(prompt, **{"max_new_tokens": 40, "eos_token_id": None} | settings)
    return made[0, prompt.shape[1] :].tolist()


def written(model: Any, way: Speculative, prompt: Any = PROMPT, **settings: Any) -> list[int]:
    return plain(model, prompt, custom_generate=way, **settings)
