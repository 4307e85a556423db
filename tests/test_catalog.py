"""Model names, and the `models` commands on a tiny catalogue."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from e2sci.cli import main
from e2sci.engines import catalog, fetch, sources
from e2sci.engines.base import ModelNotFound
from e2sci.engines.catalog import HubName
from e2sci.engines.sources import ModelFile, Report, Unreachable


def test_a_pair_s_name_means_the_model_of_the_role_that_asks() -> None:
    assert catalog.resolve("qwen2.5-coder", "draft") is catalog.CATALOG[0]
    assert catalog.resolve("qwen2.5-coder", "target") is catalog.CATALOG[1]
    assert catalog.resolve("qwen2.5-coder:draft", "target") is catalog.CATALOG[0]


def test_the_catalogue_is_well_formed() -> None:
    for entry in catalog.CATALOG:
        assert len(bytes.fromhex(entry.file.sha256)) == 32
        assert all(len(r.split("==")) == 2 for r in entry.file.packages)
    assert [len(entry.file.packages) for entry in catalog.CATALOG] == [6, 22]
    assert len({entry.name for entry in catalog.CATALOG}) == len(catalog.CATALOG)


@pytest.mark.parametrize(
    ("name", "repo", "file"),
    [
        ("owner/repo", "owner/repo", None),
        ("owner/repo:a.gguf", "owner/repo", "a.gguf"),
        ("Own.er/re-po_2.5:sub/a.Q4.gguf", "Own.er/re-po_2.5", "sub/a.Q4.gguf"),
    ],
)
def test_hub_names(name: str, repo: str, file: str | None) -> None:
    assert catalog.resolve(name, "draft") == HubName(repo, file)


def test_a_path_names_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dir" / "a.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF and more")
    assert catalog.local_path(str(path), "draft") == path
    monkeypatch.chdir(tmp_path)  # now dir/a.gguf reads like owner/repo too
    assert catalog.local_path("dir/a.gguf", "draft") == Path("dir/a.gguf")
    path.write_bytes(b"PK")
    with pytest.raises(ModelNotFound, match="is not a GGUF file"):
        catalog.resolve(str(path), "draft")
    with pytest.raises(ModelNotFound, match="is a folder"):
        catalog.resolve(str(tmp_path), "draft")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("qwen2.5-codr", "did you mean qwen2.5-coder or "),
        ("qwen2.5-coder:drft", "did you mean qwen2.5-coder:draft"),
        ("gpt", "known are qwen2.5-coder, "),
        ("", "no model ''"),
        ("dir/missing.gguf", "no file dir/missing.gguf"),
        ("./repo", "no model './repo'"),
        ("owner/repo:model.bin", "no model"),
        ("owner/../x", "no model"),
        ("~nobody-of-that-name/a.gguf", "no file"),
        ("a\0b", "no model"),
        ("x" * 5000, "no model"),
    ],
)
def test_unknown_names(name: str, says: str) -> None:
    with pytest.raises(ModelNotFound) as error:
        catalog.resolve(name, "draft")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


# --- commands ------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue of two four-byte models, which their source makes up."""
    contents = {"draft": b"GGUFd", "target": b"GGUFt"}

    def source(file: ModelFile, folder: Path, report: Report) -> tuple[Path, str]:
        path = folder / file.name
        path.write_bytes(contents[file.repo])
        return path, sources.digest_of(path)

    def entry(role: catalog.Role) -> catalog.Entry:
        digest = hashlib.sha256(contents[role]).hexdigest()
        return catalog.Entry("tiny", role, "0B", "MIT", ModelFile(f"{role}.gguf", 5, digest, role))

    monkeypatch.setenv("E2SCI_CACHE", str(tmp_path))
    monkeypatch.setattr(sources, "from_hub", source)
    monkeypatch.setattr(catalog, "CATALOG", (entry("draft"), entry("target")))


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["models", *args])


def listed() -> list[bool]:
    return [row["cached"] for row in json.loads(run("list", "--json").output)]


@pytest.mark.usefixtures("tiny")
def test_fetch_list_path_and_rm(tmp_path: Path) -> None:
    draft, target = (str(tmp_path / "models" / f"{role}.gguf") for role in ("draft", "target"))
    assert listed() == [False, False]
    fetched = run("fetch", "tiny:draft")
    assert (fetched.exit_code, fetched.stdout) == (0, f"{draft}\n")
    assert listed() == [True, False]
    missing = run("path", "tiny")
    assert missing.exit_code == 2
    assert "tiny:target has not been fetched" in missing.stderr
    assert run("fetch", "tiny").stdout.split() == [draft, target]
    assert run("path", "tiny").stdout.split() == [draft, target]
    assert "tiny:target" in run("list").stdout
    assert run("rm", "tiny").stdout == "Freed 10 bytes.\n"
    assert listed() == [False, False]


@pytest.mark.usefixtures("tiny")
def test_verify_looks_at_all_and_fails_if_one_is_wrong(tmp_path: Path) -> None:
    assert run("verify").stdout == "Nothing is in the cache.\n"
    run("fetch", "tiny")
    assert run("verify", "tiny").stdout == "tiny:draft: right\ntiny:target: right\n"
    (tmp_path / "models" / "draft.gguf").write_bytes(b"GGUFx")
    wrong = run("verify")
    assert wrong.exit_code == 2
    assert wrong.stdout == "tiny:target: right\n"
    assert "has SHA-256" in wrong.stderr


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "args", [("fetch", "tny"), ("path", "x.gguf"), ("rm", "owner/repo"), ("verify", "tiny:x")]
)
def test_unknown_names_end_in_one_line(args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: no ")
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("tiny")
def test_a_failed_download_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def source(file: ModelFile, folder: Path, report: Report) -> tuple[Path, str]:
        raise Unreachable("the hub can't be reached")

    monkeypatch.setattr(sources, "from_hub", source)
    result = run("fetch", "tiny")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: draft.gguf can't be downloaded: the hub can't be")
    assert result.stderr.count("\n") == 1


@pytest.mark.models
def test_the_real_models_are_what_the_catalogue_says() -> None:
    for entry in catalog.CATALOG:
        assert catalog.local_path(entry.pair, entry.role) == fetch.path_of(entry.file)
        fetch.verify(entry.file)
