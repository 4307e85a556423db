"""A model's name to a running engine.

synthetic[:key=value,…]        the synthetic model (SyntheticConfig)
qwen2.5-coder[:draft|:target]  the catalogue, fetched when needed
path/to/file.gguf              a file
owner/repo[:file.gguf]         the Hugging Face hub
"""

from __future__ import annotations

from e2sci.engines import catalog
from e2sci.engines.base import Engine
from e2sci.engines.catalog import Role
from e2sci.engines.fetch import Progress
from e2sci.engines.synthetic import Synthetic, SyntheticConfig

DEFAULT = "qwen2.5-coder"


def load_engine(
    name: str,
    role: Role,
    *,
    context: int = 4096,
    slots: int = 1,
    threads: int | None = None,
    gpu_layers: int = 0,
    progress: Progress | None = None,
) -> Engine:
    """Load the model called `name`; `role` says which of a pair. Raises EngineError.

    `context`: tokens a sequence; `slots`: sequences at once; `threads`: CPU threads (None: all
    cores this process may use); `gpu_layers`: layers on the GPU, -1 for all.
    """
    if name == "synthetic" or name.startswith("synthetic:"):
        config = SyntheticConfig.parse(name.partition(":")[2])
        return Synthetic(config, slots)
    from e2sci.engines.llama_cpp import LlamaCpp  # heavy, and an extra

    path = catalog.local_path(name, role, progress=progress)
    pair = catalog.matching(name) and ":" not in name
    called = f"{name}:{role}" if pair else name
    return LlamaCpp(
        path, name=called, context=context, slots=slots, threads=threads, gpu_layers=gpu_layers
    )
