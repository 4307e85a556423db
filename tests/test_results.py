"""The results page is what its files say: nothing on it is written by hand but the discussion."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import results  # noqa: E402
from quotes import QUOTE, refilled  # noqa: E402

PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "results")
    monkeypatch.setattr(results, "HERE", tmp_path)
    monkeypatch.setattr(results, "DATA", tmp_path / "results")
    return tmp_path


def test_the_page_is_current(copied: Path) -> None:
    said = "\n".join(results.page())
    assert said == PAGE
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


@pytest.mark.parametrize("path", results.quoting(), ids=lambda path: path.name)
def test_what_other_pages_quote_is_what_the_page_says(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == refilled(text, PAGE), "run: python benchmarks/results.py"
    if path.stem in ("README", "choosing", "limits"):
        assert len(QUOTE.findall(text)) >= 3


TABLES = """
## Made up, profile `lan`

| method | tok/s | × base |
| :--- | ---: | ---: |
| sd (W = 5) | 30.0 | 1.50 |
| sd-best (W = 8) | 40.0 | 2.00 |

### More

| method | tok/s | Δ points |
| :--- | ---: | ---: |
| sd (W = 5) | 31.0 | -1.0 [-2.0, +0.5] |
| new | 50.0 | +0.0 |
"""


@pytest.mark.parametrize(
    ("what", "figure"),
    [
        ("sd: tok/s", "30.0"),
        ("sd-best: × base", "2.00"),
        ("new: tok/s", "50.0"),
        ("sd: Δ points", "-1.0 [-2.0, +0.5]"),
    ],
)
def test_a_quote_is_brought_up_to_date(what: str, figure: str) -> None:
    for old in ("", "9", "+7.0 [+1.0, +9.0]"):
        text = f'| a [b](c.md) | [{old}](results.md#made-up-profile-lan "{what}") [1](results.md) |'
        new = refilled(text, TABLES)
        assert new == text.replace(f"[{old}](results.md#", f"[{figure}](results.md#")
        assert refilled(new, TABLES) == new


@pytest.mark.parametrize("what", ["sd: speed", "cloud: tok/s", "sd tok/s", ""])
def test_a_quote_of_nothing_is_one_line(what: str) -> None:
    for section in ("made-up-profile-lan", "elsewhere"):
        with pytest.raises(ValueError, match=f'results.md#{section} has no "') as error:
            refilled(f'[1](docs/results.md#{section} "{what}")', TABLES)
        assert "\n" not in str(error.value)


def test_histories_write_the_same_texts() -> None:
    """As the discussion and the limits say of the default pair."""
    found = results.Results.load(results.DATA / "bench" / "humaneval-paper-ablations")
    wanted = {record.row: record.digest for record in found.records("elastic@0.2")}
    for k in (1, 3, 10):
        records = found.records(f"elastic-k{k}@0.2")
        assert len(records) >= 30
        assert all(record.digest == wanted[record.row] for record in records)
