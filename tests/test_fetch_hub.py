"""The model cache and the hub: what it gives, and what gives way to the packages."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest

from e2sci.engines import fetch
from e2sci.engines.base import ModelNotFound
from e2sci.engines.sources import DiskFull, ModelFile, Unreachable
from wheels import (
    DATA,
    NOWHERE,
    WHOLE,
    calls,
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
