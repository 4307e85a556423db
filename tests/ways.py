"""Every mode and window that a text is written in, where windows matter."""

from __future__ import annotations

from live import (
    pair,
)

WAYS = [{"mode": mode, "window": w} for mode in ("sync", "pipelined") for w in (1, 3, 8, 16)]
RULES = ["strict", "rejection", "fuzzy", "elastic", "typical"]


async def every_way(edge, prompt="hello", **options):
    """(way, result) for every mode and window."""
    return [(way, await edge.generate(prompt, **way, **options)) for way in WAYS]


async def text_alone(prompt="hello", target_engine=None, **options):
    """The target's own text, from an edge and a cloud that have nothing else in common."""
    async with pair(target_engine=target_engine) as edge:
        return await edge.generate(prompt, mode="cloud", **options)
