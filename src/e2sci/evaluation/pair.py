"""The pair of models that is measured, each with its memory on disk.

A model's *identity* is its name and a hash of its file; results, traces and calibrations carry it,
so that none is ever taken for another pair's. A memory also depends on what computes it (llama.cpp
and its version round in their own way, and so do passes of another size), so its folder is named
after all that. Several requests at once go in common passes (`engines.lockstep`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import platformdirs

from e2sci.engines import catalog
from e2sci.engines.base import Engine
from e2sci.engines.catalog import Role
from e2sci.engines.fetch import Progress
from e2sci.engines.llama_library import arithmetic
from e2sci.engines.load import load_engine
from e2sci.engines.lockstep import Lockstep
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
    `memory`: root of the memories; `abreast`: requests at once in one process."""

    draft: str
    target: str
    context: int = 2048
    threads: int = 1
    memory: Path | None = None
    abreast: int = 1


class Models(NamedTuple):
    """Both engines, as one request has them."""

    draft: Engine
    target: Engine


class Pair:
    """Both models, loaded; `models` are the engines that all requests share. Close it when done."""

    def __init__(self, spec: PairSpec) -> None:
        self.models = Models(_load(spec, spec.draft, "draft"), _load(spec, spec.target, "target"))
        self._memories = [_memory(spec, spec.draft, "draft"), _memory(spec, spec.target, "target")]
        self._lockstep = Lockstep(self.models)

    @contextmanager
    def request(self, prompt: str) -> Iterator[Models]:
        """The engines of one request, with what is remembered behind a user's prompt. Up to
        `abreast` threads may be in here at once."""
        ids = prompt_ids(self.models.draft, prompt, system=None, raw=False)
        with ExitStack() as stack:
            seats = stack.enter_context(self._lockstep.reader())
            engines: list[Engine] = list(seats)
            for i, folder in enumerate(self._memories):
                if folder:
                    engines[i] = known = Remembering(seats[i], folder)
                    stack.enter_context(known.request(ids))
                    seats[i].meanwhile(known)
            yield Models(*engines)

    def close(self) -> None:
        self._lockstep.close()


def _load(spec: PairSpec, name: str, role: Role) -> Engine:
    """The model with a place for each request, and one more token in it for the dummies."""
    return load_engine(
        name,
        role,
        context=spec.context + 1,
        slots=spec.abreast,
        threads=spec.threads,
        apart=True,
    )


def _memory(spec: PairSpec, name: str, role: Role) -> Path | None:
    """Where a model's memory is; None if it needs none."""
    if name.startswith("synthetic"):
        return None
    rows = f"-{spec.abreast}-abreast" if spec.abreast > 1 else ""
    folder = f"{identity(name, role)}-{arithmetic()}{rows}"
    return (spec.memory or memory_root()) / re.sub(r"[^\w.@-]+", "_", folder)
