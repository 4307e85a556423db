"""Attention for several sequences laid end to end in one row, each with a cache of its own.

    sequence   0 0 0 0 │ 1 │ 2 2 2        one row of tokens through every layer
    position   7 8 9 10│ 3 │ 0 1 2        queries of a sequence see its own cache, and nothing else

Nothing is padded, so a pass costs what its tokens cost: a prompt of 512 may share it with fifteen
windows of 4. Only attention must know where a sequence ends, and transformers lets attention be
replaced (`AttentionInterface`). The library's own caches aren't used at all: `Caches` keeps keys
and values in one block a layer, and cutting a sequence back is forgetting its last positions.

Layers with a sliding window keep all keys too and mask the old ones, so they can be cut as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from e2sci.engines.base import Step

NAME = "e2sci_packed"


class Caches:
    """Keys and values of every layer: (slots, heads, context, head size), made at first use.

    `windows`: the sliding window of each layer that was used, None for full attention.
    """

    def __init__(self, slots: int, context: int) -> None:
        self._slots, self._context = slots, context
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.windows: dict[int, int | None] = {}

    def layer(
        self, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's whole cache, shaped after `keys` and `values`: (1, heads, n, head size)."""
        if index not in self._layers:
            self._layers[index] = self._block(keys), self._block(values)
        return self._layers[index]

    def _block(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((self._slots, like.shape[1], self._context, like.shape[3]))


@dataclass(frozen=True)
class Span:
    """One step's tokens: `start` … `end` in the row, behind `held` tokens of its sequence."""

    sequence: int
    held: int
    start: int
    end: int

    @property
    def length(self) -> int:
        """Tokens in the sequence once these are fed."""
        return self.held + self.end - self.start


class Packed:
    """The row of one pass over `steps`, where `held[sequence]` tokens are cached already.

    `ids`, `positions`: shape (1, tokens); `outputs`: places whose logits are wanted, in order.
    """

    def __init__(
        self, steps: Sequence[Step], held: Sequence[int], caches: Caches, device: torch.device
    ) -> None:
        self._caches, self._device = caches, device
        self.spans: list[Span] = []
        outputs: list[int] = []
        end = 0
        for step in steps:
            start, end = end, end + len(step.tokens)
            if step.tokens:
                self.spans.append(Span(step.sequence, held[step.sequence], start, end))
            outputs += range(end - step.outputs, end)
        self.ids = self._indices([t for step in steps for t in step.tokens])[None]
        self.outputs = self._indices(outputs)
        self._masks: dict[tuple[Span, int | None], torch.Tensor | None] = {}

    @cached_property
    def positions(self) -> torch.Tensor:
        return self._indices([p for s in self.spans for p in range(s.held, s.length)])[None]

    @cached_property
    def _sequences(self) -> torch.Tensor:
        return self._indices([s.sequence for s in self.spans for _ in range(s.held, s.length)])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scale: float | None,
    ) -> torch.Tensor:
        """Keep `key` and `value`; what the queries see, (1, tokens, heads, head size)."""
        keys, values = self._caches.layer(layer, key, value)
        self._caches.windows[layer] = window
        keys[self._sequences, :, self.positions[0]] = key[0].transpose(0, 1)
        values[self._sequences, :, self.positions[0]] = value[0].transpose(0, 1)
        seen = [
            _attended(
                query[0, :, span.start : span.end],
                keys[span.sequence, :, : span.length],
                values[span.sequence, :, : span.length],
                self._mask(span, window),
                scale,
            )
            for span in self.spans
        ]
        return torch.cat(seen, dim=1).transpose(0, 1)[None].contiguous()

    def _mask(self, span: Span, window: int | None) -> torch.Tensor | None:
        """Which keys each query sees, (n, length); None where that is all up to itself."""
        if window is not None and window >= span.length:
            window = None
        if window is None and (span.held == 0 or span.end - span.start == 1):
            return None
        if (span, window) not in self._masks:
            keys = torch.arange(span.length, device=self._device)
            behind = keys[span.held :, None] - keys
            mask = behind >= 0
            self._masks[span, window] = mask if window is None else mask & (behind < window)
        return self._masks[span, window]

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """One sequence's attention: (heads, n, size) on (key heads, length, size).

    Query heads that share a key head become a dimension of their own, over which keys and values
    are expanded: no copy of the cache, and kernels that don't know grouped heads will do.
    """
    heads, n, _ = query.shape
    groups = heads // keys.shape[0]
    attended = scaled_dot_product_attention(
        query.unflatten(0, (-1, groups)),
        keys[:, None].expand(-1, groups, -1, -1),
        values[:, None].expand(-1, groups, -1, -1),
        attn_mask=mask,
        is_causal=mask is None and n > 1,
        scale=scale,
    )
    return attended.flatten(0, 1)


def _forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _: object,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: Packed | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **ignored: object,
) -> tuple[torch.Tensor, None]:
    """What a model's attention layers call. Raises NotImplementedError, with the reason."""
    if packed is None:
        raise NotImplementedError("its layers don't hand on what attention needs to know")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError("its attention looks ahead")
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("its attention caps scores or has sinks")
    return packed.attend(module.layer_idx, query, key, value, sliding_window, scaling), None


AttentionInterface.register(NAME, _forward)
