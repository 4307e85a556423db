"""A model's name to a running engine.

synthetic[:key=value,…]        the synthetic model (SyntheticConfig)
qwen2.5-coder[:draft|:target]  the catalogue, fetched when needed
path/to/file.gguf              a file
owner/repo[:file.gguf]         the Hugging Face hub
hf:path/to/folder              safetensors in Hugging Face's format, run by transformers
hf:owner/repo                  the same from the hub
hf:…                           any GGUF named as above, run by transformers

Without `hf:`, GGUF files are run by llama.cpp.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from e2sci.engines import catalog, fetch
from e2sci.engines.base import Engine, EngineError, ModelNotFound
from e2sci.engines.catalog import Role
from e2sci.engines.fetch import Progress
from e2sci.engines.synthetic import Synthetic, SyntheticConfig

DEFAULT = "qwen2.5-coder"
HF = "hf:"


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
    cores this process may use); `gpu_layers`: layers on the GPU, -1 for all (transformers takes
    no other number).
    """
    if name == "synthetic" or name.startswith("synthetic:"):
        config = SyntheticConfig.parse(name.partition(":")[2])
        return Synthetic(config, slots)
    if name.startswith(HF):
        try:
            from e2sci.engines.transformers import Transformers  # heavy, and an extra
        except ImportError as error:
            raise EngineError(
                f'transformers is missing ({error}); run: pip install "e2sci[transformers]"'
            ) from error
        return Transformers(
            _hf_path(name.removeprefix(HF), role, progress),
            name=name,
            context=context,
            slots=slots,
            threads=threads,
            gpu_layers=gpu_layers,
        )
    from e2sci.engines.llama_cpp import LlamaCpp  # heavy, and an extra

    path = catalog.local_path(name, role, progress=progress)
    pair = catalog.matching(name) and ":" not in name
    called = f"{name}:{role}" if pair else name
    return LlamaCpp(
        path, name=called, context=context, slots=slots, threads=threads, gpu_layers=gpu_layers
    )


def _hf_path(name: str, role: Role, progress: Progress | None) -> Path:
    """The folder or GGUF file that `hf:name` stands for, downloaded if it must be."""
    if catalog.matching(name) or name.endswith(".gguf"):
        return catalog.local_path(name, role, progress=progress)
    with suppress(OSError, ValueError, RuntimeError):  # too long, a null byte, ~ of nobody
        path = Path(name).expanduser()
        if name and path.is_dir():
            return path
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        return fetch.hub_folder(name, progress)
    raise ModelNotFound(
        f"no model folder {name!r}; name a folder with safetensors, a .gguf file, or owner/repo "
        "on the hub"
    )
