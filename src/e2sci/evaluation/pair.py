"""The pair of models that is measured, each with its memory on disk.

A model's *identity* is its name and a hash of its file; results, traces and calibrations carry it,
so that none is ever taken for another pair's. A memory also depends on what computes it (llama.cpp
and its version round in their own way), so its folder is named after both.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import platformdirs

from e2sci.engines import catalog
from e2sci.engines.base import Engine
from e2sci.engines.catalog import Role
from e2sci.engines.fetch import Progress
from e2sci.engines.load import load_engine
from e2sci.engines.memory import Remembering
from e2sci.runtime.text import prompt_ids

_HEAD = 1 << 20  # bytes of a model file that are hashed, with its length


def memory_root() -> Path:
    """Where memories are kept by default."""
    return Path(platformdirs.user_cache_dir("e2sci")) / "memory"


def identity(name: str, role: Role, *, progress: Progress | None = None) -> str:
    """Name and hash of a model, fetched if need be. Raises EngineError."""
    if name.startswith("synthetic"):
        return name
    path = catalog.local_path(name, role, progress=progress)
    with path.open("rb") as stream:
        digest = hashlib.sha256(stream.read(_HEAD))
    digest.update(str(path.stat().st_size).encode())
    return f"{path.stem}@{digest.hexdigest()[:12]}"


@dataclass(frozen=True)
class PairSpec:
    """Which two models: names as `load_engine` takes them; `context`, `threads` of each engine;
    `memory`: root of the memories."""

    draft: str
    target: str
    context: int = 2048
    threads: int = 1
    memory: Path | None = None


class Pair:
    """Both engines, loaded. Close it when done."""

    def __init__(self, spec: PairSpec) -> None:
        self.draft = self._load(spec, spec.draft, "draft")
        self.target = self._load(spec, spec.target, "target")

    @contextmanager
    def request(self, prompt: str) -> Iterator[None]:
        """Open both memories behind a user's prompt."""
        ids = prompt_ids(self.draft, prompt, system=None, raw=False)
        with ExitStack() as stack:
            for engine in (self.draft, self.target):
                if isinstance(engine, Remembering):
                    stack.enter_context(engine.request(ids))
            yield

    def close(self) -> None:
        self.draft.close()
        self.target.close()

    @staticmethod
    def _load(spec: PairSpec, name: str, role: Role) -> Engine:
        engine = load_engine(name, role, context=spec.context, threads=spec.threads)
        if name.startswith("synthetic"):
            return engine
        folder = f"{identity(name, role)}-llama-cpp-{version('llama-cpp-python')}"
        root = spec.memory or memory_root()
        return Remembering(engine, root / re.sub(r"[^\w.@-]+", "_", folder))
