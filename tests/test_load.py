"""Names of models to engines: what `hf:` stands for, and what to say when it stands for nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from e2sci.engines import fetch, load
from e2sci.engines.base import EngineError, ModelNotFound
from e2sci.engines.synthetic import Synthetic


def test_synthetic_models() -> None:
    engine = load.load_engine("synthetic:context=77", "draft", slots=3)
    assert isinstance(engine, Synthetic)
    assert (engine.info.context, engine.slots) == (77, 3)


def test_hf_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "hub_folder", lambda repo, progress: Path("hub") / repo)
    monkeypatch.setattr(fetch, "fetch", lambda file, progress: Path(file.name))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")

    def path(name: str) -> Path:
        return load._hf_path(name, "target", None)

    assert path(str(tmp_path)) == tmp_path
    assert path(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    assert path("owner/some-repo") == Path("hub/owner/some-repo")
    assert path("qwen2.5-coder") == Path("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")
    assert path("qwen2.5-coder:draft") == Path("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "some-repo").mkdir(parents=True)
    assert path("owner/some-repo") == Path("owner/some-repo")  # a folder comes first


@pytest.mark.parametrize("name", ["", "nowhere", "./no/where", "a/b/c", "x\0y", "~nobody/x"])
def test_hf_names_of_nothing(name: str) -> None:
    with pytest.raises(ModelNotFound, match="name a folder with safetensors"):
        load._hf_path(name, "target", None)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.startswith("e2sci.engines.transformers")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EngineError, match=r'run: pip install "e2sci\[transformers\]"'):
        load.load_engine("hf:owner/some-repo", "target")
