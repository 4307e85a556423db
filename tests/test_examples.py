"""The examples run as they are, on the synthetic pair, and show what they say they show."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from e2sci.runtime.edge import BlockingEdge
from live import LiveCloud, draft, free_port

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
DRAFT = "synthetic:seed=11,divergence=0.5"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example with its arguments; what it prints."""

    def run(name: str, *arguments: str) -> str:
        [path] = [path for path in EXAMPLES if path.stem == name]
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


def text_of(cloud: LiveCloud, prompt: str, **options: object) -> str:
    """What the target alone says."""
    with BlockingEdge(cloud.url, draft()) as edge:
        return edge.generate(prompt, mode="cloud", **options).text


def test_stream(run, cloud):
    said = run("stream", cloud.url, DRAFT)
    text = text_of(cloud, "Why is the sky blue?", max_tokens=100)
    assert said.startswith(text)
    assert re.search(r"\n\n[\d.]+ tokens/s, \d+ passes\n$", said)


def test_clouds_go_on_at_the_one_that_is_there(run, cloud):
    said = run("clouds", f"ws://127.0.0.1:{free_port()},{cloud.url}", DRAFT)
    text = text_of(cloud, "Tell me a story.", max_tokens=200)
    assert said == f"{text}\n0 tokens were not checked\n"


def test_clouds_says_in_one_line_when_there_is_none(run):
    nobody = f"ws://127.0.0.1:{free_port()}"
    with pytest.raises(SystemExit, match=f"can't reach {nobody}"):
        run("clouds", nobody, DRAFT)


def test_elastic_tolerates_what_strict_does_not(run, cloud):
    strict, elastic = run("elastic", cloud.url, DRAFT).split("elastic:")
    assert "tolerated" not in strict
    assert re.search(r"credit [\d.]+, threshold [\d.]+ nats", elastic)
    counted = int(re.search(r"'tolerated': (\d+)", elastic)[1])
    assert counted == len(re.findall("position .*: tolerated", elastic)) > 0


def test_logprobs_are_probabilities_with_the_best_beside(run, cloud):
    lines = run("logprobs", cloud.url, DRAFT).splitlines()
    assert lines
    for line in lines:
        own, *best = [float(p) for p in re.findall(r" ([01]\.\d\d)\b", line)]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert own <= best[0]
        assert sum(best) <= 1.02


def test_an_engine_of_ones_own_writes_the_targets_text(run, cloud):
    said = run("own_engine", cloud.url, DRAFT)
    code = "def area(width, height):\n    return width * height\n"
    text = text_of(cloud, f"Rename width to w. Only the code.\n\n{code}", max_tokens=80)
    assert said.startswith(f"{text}\n\n")
    assert re.search(r"\d+% of its guesses were right\n$", said)


@pytest.mark.engines
def test_huggingface_generate_under_both_rules(run, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason='needs pip install "e2sci[transformers]"')
    pytest.importorskip("torch", reason='needs pip install "e2sci[transformers]"')
    import tiny_hf

    for name, noise in (("target", 0.0), ("draft", 0.02)):
        tiny_hf.save(tmp_path / name, tiny_hf.qwen2(), noise=noise)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = run("huggingface_generate", str(tmp_path / "target"), str(tmp_path / "draft"))
    figures = r"(\d+) tokens in (\d+) passes of the target, (\d+)% accepted, (\d+) not"
    strict, elastic = (re.search(f"{rule}: {figures}", said) for rule in ("strict", "elastic"))
    assert strict[4] == "0" < elastic[4]
    for found in (strict, elastic):
        assert 0 < int(found[2]) < int(found[1])


def test_each_example_has_a_test():
    named = Path(__file__).read_text()
    assert all(f'run("{path.stem}"' in named for path in EXAMPLES)
