"""The results page is what its files say: nothing on it is written by hand but the discussion."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import results  # noqa: E402


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "results")
    monkeypatch.setattr(results, "HERE", tmp_path)
    monkeypatch.setattr(results, "DATA", tmp_path / "results")
    return tmp_path


def test_the_page_is_current(copied: Path) -> None:
    said = "\n".join(results.page())
    assert said == (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    pictures = {path.name for path in (ROOT / "docs" / "results").glob("*.svg")}
    assert pictures == {path.name for path in (copied / "results").glob("*.svg")}


def test_no_text_of_a_task_is_published() -> None:
    for path in (ROOT / "docs" / "results").rglob("*.jsonl"):
        assert not path.stem.endswith(".texts"), path
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert '"token_ids"' not in first, path


def test_taking_a_bench_leaves_its_texts(tmp_path: Path) -> None:
    source = tmp_path / "bench"
    source.mkdir()
    for name in ("bench.json", "cloud.jsonl", "cloud.texts.jsonl", "profile.toml"):
        (source / name).write_text("{}")
    results.take(source, tmp_path / "taken")
    assert {path.name for path in (tmp_path / "taken").iterdir()} == {"bench.json", "cloud.jsonl"}
