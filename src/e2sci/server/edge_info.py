"""What an edge says of itself: its pair and link as they are, and what may be chosen."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, get_args

from e2sci import __version__
from e2sci.decoding.acceptance import Measure, RuleName
from e2sci.runtime.connection import EdgeError
from e2sci.runtime.edge import Edge
from e2sci.runtime.options import Mode, Options

REACH_SECONDS = 2.0
"""How long a cloud is looked for."""
_DEFAULTS = ("mode", "accept", "measure", "threshold", "budget", "gamma", "window")


async def info(edge: Edge, name: str | None, defaults: Options) -> dict[str, Any]:
    """`name`: what clients call the model, if not as the cloud does; `defaults`: of requests."""
    connected = await _reached(edge)
    chosen = {option: getattr(defaults, option) for option in _DEFAULTS}
    return {
        "version": __version__,
        "draft": edge.engine.info.name,
        "connected": connected,
        "model": (name or edge.cloud_model) if connected else None,
        "rtt_ms": 1000 * edge.rtt_s if connected and edge.rtt_s is not None else None,
        "pass_ms": edge.pass_times.points if connected else [],
        "modes": list(get_args(Mode)) if edge.has_cloud else ["draft"],
        "accepts": list(get_args(RuleName)),
        "measures": list(get_args(Measure)),
        "defaults": {**chosen, "temperature": defaults.sampling.temperature},
    }


async def _reached(edge: Edge) -> bool:
    """Whether a cloud is there now. An idle connection may have ended, so it is tried."""
    if not edge.has_cloud:
        return False
    with suppress(EdgeError, TimeoutError):
        async with asyncio.timeout(REACH_SECONDS):
            await edge.connect()
            return True
    return False
