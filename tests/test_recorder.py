"""Recording traces: the target's own text, what a cloud would judge, resuming, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from e2sci.cli import main
from e2sci.cli.common import BadInput
from e2sci.cli.measuring import models, rows_of
from e2sci.decoding.distribution import decode
from e2sci.emulation.profile import profile
from e2sci.engines.memory import Remembering
from e2sci.engines.synthetic import EOS, REAL_VOCAB, Synthetic, SyntheticConfig, SyntheticTokenizer
from e2sci.evaluation.methods import Method, Setting, method
from e2sci.evaluation.pair import PairSpec
from e2sci.evaluation.recorder import Recorder, Recording, record, shared_vocab
from e2sci.evaluation.tasks import TASKS, Problem
from e2sci.evaluation.traces import RequestTrace, Trace, TraceHeader, TraceWriter
from e2sci.evaluation.world import write

TARGET, DRAFT = "synthetic:seed=3,eos_bias=-0.5", "synthetic:seed=3,eos_bias=-0.5,divergence=1.5"
TASK = replace(TASKS["jsonl"], _score=lambda reference, text: reference == text)
MOST = 40
PROBLEMS = [Problem(row, str(row), f"tell me about {row}") for row in range(6)]
HEADER = TraceHeader(draft=DRAFT, target=TARGET, task="jsonl", first=0, last=5, max_tokens=MOST)


def recorder(draft: str = DRAFT, target: str = TARGET, most: int = MOST) -> Recorder:
    return Recorder(Recording(PairSpec(draft, target), TASK, most))


@pytest.fixture(scope="module")
def recorded() -> list[RequestTrace]:
    made = recorder()
    return [made.record(problem) for problem in PROBLEMS]


def test_the_text_is_the_targets_own(recorded):
    draft, target = recorder().pair.models
    alone = method("cloud", Setting(profile("lan")))
    finishes = set()
    for problem, request in zip(PROBLEMS, recorded, strict=True):
        result = write(alone, profile("lan"), draft, target, problem.prompt, MOST).result
        finishes.add(result.finish_reason)
        ending = [EOS] if result.finish_reason == "stop" else []
        assert request.tokens == result.token_ids + ending
        assert request.prompt_tokens == result.prompt_tokens
    assert finishes == {"stop", "length"}


def test_positions_are_what_a_cloud_judges(recorded):
    draft, target = recorder().pair.models
    strict = Method("strict", {"mode": "pipelined", "fill": False, "trace": True})
    compared = 0
    for problem, request in zip(PROBLEMS, recorded, strict=True):
        result = write(strict, profile("lan"), draft, target, problem.prompt, MOST).result
        for judged in result.trace:
            at = judged.position - request.prompt_tokens
            assert (judged.pick, judged.draft) == (request.tokens[at], request.drafts[at])
            assert judged.js == pytest.approx(request.js[at], abs=1e-9)
            x = decode(request.p[at], REAL_VOCAB).log_prob(np.array([judged.draft]))
            assert x[0] == pytest.approx(np.log(judged.p), abs=0.05)
            compared += 1
    assert compared > 60


def test_sketches_hold_both_picks(recorded):
    for request in recorded:
        for y, x, p, q in zip(request.tokens, request.drafts, request.p, request.q, strict=True):
            p_, q_ = decode(p, REAL_VOCAB), decode(q, REAL_VOCAB)
            assert {y, x} <= set(p_.ids.tolist())
            assert x in q_.ids
        assert min(r for r, same in zip(request.regret, request.agreed, strict=True) if same) == 0


def test_a_text_is_scored_as_it_is_delivered():
    made = recorder()
    text = write(
        method("cloud", Setting(profile("lan"))),
        profile("lan"),
        *made.pair.models,
        PROBLEMS[0].prompt,
        MOST,
    ).result.text
    assert made.record(replace(PROBLEMS[0], reference=text)).correct is True
    assert made.record(replace(PROBLEMS[0], reference=text + "!")).correct is False


def test_padding_changes_nothing(recorded):
    made = recorder(target=TARGET + ",padding=5", draft=DRAFT + ",padding=9")
    assert made.record(PROBLEMS[1]) == recorded[1]


def test_a_memory_is_used_and_changes_nothing(recorded, tmp_path, monkeypatch):
    made = recorder()
    made.pair._memories = [tmp_path / "draft", tmp_path / "target"]
    engines = []
    monkeypatch.setattr(
        "e2sci.evaluation.pair.Remembering",
        lambda *of: engines.append(Remembering(*of)) or engines[-1],
    )
    first = made.record(PROBLEMS[2])
    computed = [engine.computed for engine in engines]
    assert first.tokens == recorded[2].tokens
    assert first.js == pytest.approx(recorded[2].js, abs=1e-5)
    assert computed == [len(first.tokens)] * 2
    assert made.record(PROBLEMS[2]) == first
    assert [engine.computed for engine in engines] == [*computed, 0, 0]


def test_other_vocabularies_are_refused():
    class Other(SyntheticTokenizer):
        def name(self, token: int) -> bytes:
            return b"?" if token == 65 else super().name(token)

    one, other = Synthetic(SyntheticConfig()), Synthetic(SyntheticConfig())
    other.tokenizer = Other()
    assert shared_vocab(SimpleNamespace(models=(one, one))) == REAL_VOCAB
    with pytest.raises(ValueError, match="different vocabularies"):
        shared_vocab(SimpleNamespace(models=(one, other)))


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(ValueError, match="leaves no room"):
        recorder(target=TARGET + ",context=20").record(PROBLEMS[0])


# ---- files and processes ------------------------------------------------------------------


def written(path, problems, jobs: int = 0) -> list[int]:
    recording = Recording(PairSpec(DRAFT, TARGET), TASKS["jsonl"], MOST)
    with TraceWriter(path, HEADER) as writer:
        return [request.row for request in record(recording, writer, problems, jobs=jobs)]


def test_rows_that_are_there_are_left_alone(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert written(whole, PROBLEMS) == [0, 1, 2, 3, 4, 5]
    assert written(parts, PROBLEMS[:2]) == [0, 1]
    with parts.open("ab") as file:
        file.write(b'{"row": 2, "id"')
    assert written(parts, PROBLEMS) == [2, 3, 4, 5]
    assert parts.read_bytes() == whole.read_bytes()
    assert written(parts, PROBLEMS) == []


def test_processes_write_the_same(tmp_path):
    written(tmp_path / "a", PROBLEMS)
    written(tmp_path / "b", PROBLEMS, jobs=2)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# ---- the command --------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """`e2sci trace` on a made-up file, in this process."""
    import e2sci.cli.trace as module

    monkeypatch.setattr(module, "record", lambda *a, jobs: record(*a, jobs=0))
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode({"prompt": f"p{n}"}) + b"\n" for n in range(4)))

    def run(*options: str, rows: str = "0:3", task: str = f"jsonl:{file}"):
        arguments = ["--task", task, "--rows", rows, "--out", str(tmp_path / "out.jsonl")]
        arguments += ["--pair", f"{DRAFT},{TARGET}", "--max-tokens", "12"]
        return CliRunner().invoke(main, ["trace", *arguments, *options])

    return run


def test_the_command_writes_a_trace(asked, tmp_path):
    result = asked("--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    found = Trace.load(tmp_path / "out.jsonl")
    assert found.header == TraceHeader(
        draft=DRAFT, target=TARGET, task="jsonl:rows.jsonl", first=0, last=2, max_tokens=12
    )
    assert (figures["requests"], figures["agreement"]) == (3, found.acceptance())
    assert asked(rows="0:4").exit_code == 0
    assert Trace.load(tmp_path / "out.jsonl").rows == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rows": "3:3"}, "expected A:B with A < B"),
        ({"rows": "0-3"}, "expected A:B"),
        ({"rows": "0:9"}, "rows 0:9 are not in"),
        ({"task": "jsonk:x"}, "no task 'jsonk'"),
    ],
)
def test_mistakes_are_one_line(asked, changes, complaint):
    result = asked(**changes)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


def test_another_trace_is_not_written_to(asked):
    asked()
    result = asked("--max-tokens", "13")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "choose another file" in result.stderr


def test_pairs_and_rows():
    assert models("qwen2.5-coder") == ("qwen2.5-coder", "qwen2.5-coder")
    assert models("a.gguf,b/c:d.gguf") == ("a.gguf", "b/c:d.gguf")
    assert models(f"{DRAFT},{TARGET}") == (DRAFT, TARGET)
    for wrong in ("a,b,c", "a,", ""):
        with pytest.raises(BadInput, match="expected DRAFT,TARGET"):
            models(wrong)
    assert rows_of("3:10") == (3, 10)
