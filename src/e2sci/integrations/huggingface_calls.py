"""Which calls of Hugging Face `generate` can be served by speculative decoding, and why not."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation import (
    GenerationMode,
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

_STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
_UNDERSTOOD = {"attention_mask", "cache", "logits_to_keep", "position_ids", "use_cache"}


def obstacle(
    model: Any, draft: Any, ids: torch.Tensor, config: Any, others: dict[str, Any]
) -> str | None:
    """Why this call can't be served, if it can't."""
    given = {name for name, value in others.items() if value is not None}
    if model.config.is_encoder_decoder or draft.config.is_encoder_decoder:
        return "an encoder-decoder model; expected two causal language models"
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"the settings ask for {mode.value}; expected greedy search or sampling"
    if ids.shape[0] != 1:
        return f"{ids.shape[0]} sequences in one call; call generate once for each"
    if config.output_attentions or config.output_hidden_states:
        return "attentions and hidden states are not kept; leave out output_attentions and the like"
    if config.prefill_chunk_size is not None:
        return "a prompt is read in one piece; leave out prefill_chunk_size"
    if foreign := given - _UNDERSTOOD:
        return f"the draft wouldn't see {', '.join(sorted(foreign))}; expected ids only"
    if "cache" not in given:
        return "the model keeps no cache that could be cut; leave use_cache on, or use another"
    n, positions = ids.shape[1], others.get("position_ids")
    counted = torch.arange(n, device=ids.device)[None]
    if positions is not None and not torch.equal(positions.to(ids.device), counted):
        return "padding, or ids without those that the cache holds; expected the whole text alone"
    if (held := int(others["cache"].get_seq_length())) >= n:
        return f"the cache holds {held} tokens and the text has {n}; expected a new one at least"
    return None


def bears_drafting(processor: Any) -> bool:
    """Whether it may be asked about drafts, too: about lines that are given up again."""
    return type(processor).__module__.startswith("transformers.") and not isinstance(
        processor, _STATEFUL
    )


def unshared(processors: LogitsProcessorList, accept: str) -> str:
    """Why a tolerant rule doesn't go with the processors that only the target has."""
    names = [type(p).__name__ for p in processors if not bears_drafting(p)]
    return (
        f"accept={accept} could let pass what {', '.join(names)} forbids, as that can't run on the "
        "draft; use strict or rejection, or leave it out"
    )
