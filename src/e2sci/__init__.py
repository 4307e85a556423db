"""E²-SCI: edge-cloud speculative decoding. A small model at the edge and a large one in the cloud
write one text together.

    from e2sci import BlockingEdge, load_engine

    with BlockingEdge("ws://127.0.0.1:7071", load_engine("qwen2.5-coder", "draft")) as edge:
        print(edge.generate("Why is the sky blue?").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from e2sci.engines.load import load_engine
    from e2sci.runtime.edge import BlockingEdge, Edge
    from e2sci.runtime.options import Options, Piece, Result, Stats

__version__ = "0.1.0"

_HOMES = {
    "load_engine": "e2sci.engines.load",
    "Edge": "e2sci.runtime.edge",
    "BlockingEdge": "e2sci.runtime.edge",
    "Options": "e2sci.runtime.options",
    "Piece": "e2sci.runtime.options",
    "Result": "e2sci.runtime.options",
    "Stats": "e2sci.runtime.options",
}

__all__ = ["BlockingEdge", "Edge", "Options", "Piece", "Result", "Stats", "load_engine"]


def __getattr__(name: str) -> Any:
    """Import the public names when they are used, so that importing a part stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'e2sci' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
