"""Calibrating a tiny pair: what is safe, harmful thresholds, and a predictor that must gain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from calibrated import (
    PAPER,
    row,
    weights,
)
from e2sci.evaluation import calibrate as calibrating
from e2sci.evaluation import sweep
from e2sci.evaluation.calibrate import calibrate
from e2sci.evaluation.calibration import Calibration
from e2sci.evaluation.order import Asked, Order
from e2sci.evaluation.pair import PairSpec
from e2sci.evaluation.recorder import Recorder, Recording
from e2sci.evaluation.records import Record
from e2sci.evaluation.sweep import WINDOWS
from e2sci.evaluation.tasks import TASKS, Problem

TARGET, DRAFT = "synthetic:seed=2", "synthetic:seed=2,divergence=1"


def records(right: int, wrong: int) -> list[Record]:
    zeros = dict.fromkeys(Record.__struct_fields__, 0)
    given = {**zeros, "id": "", "finish": "stop", "digest": "", "tokens": 9, "seconds": 1.0}
    marks = [True] * right + [False] * wrong
    return [Record(**{**given, "row": row, "correct": mark}) for row, mark in enumerate(marks)]


@pytest.mark.parametrize(
    ("lost", "delta", "keeps"),
    [(0, 0.0, True), (1, 0.0, True), (8, 0.01, False), (8, 0.4, True), (8, 0.39, False)],
)
def test_a_threshold_may_lose_delta_or_what_could_be_chance(lost, delta, keeps):
    found = calibrating.measure("m", 0.1, records(20 - lost, lost), records(20, 0), delta)
    assert found.keeps == keeps
    assert (found.lost, found.difference) == (lost, -lost / 20)


def test_the_loosest_that_is_safe_is_taken():
    rows = [row(threshold=t, keeps=k) for t, k in ((0.1, True), (0.2, True), (0.3, False))]
    assert calibrating._safe(rows) == 0.2
    assert calibrating._safe(rows[2:]) == 0.0


# ---- the whole ----------------------------------------------------------------------------


def order(folder: Path, *, harmful: bool = False, rows: int = 8, **changed) -> Order:
    """A tiny pair. `harmful`: only the target's own text is right; else every text is."""
    task = replace(TASKS["jsonl"], _score=lambda own, text: not harmful or text == own)
    spec = PairSpec(DRAFT, TARGET)
    problems = [Problem(row, str(row), f"say {row}") for row in range(rows)]
    if harmful:
        texts: list[str] = []
        keep = replace(task, _score=lambda _, text: bool(texts.append(text)))
        made = Recorder(Recording(spec, keep, 40))
        for problem in problems:
            made.record(problem)
        problems = [replace(p, reference=t) for p, t in zip(problems, texts, strict=True)]
    given = {
        "pair": spec,
        "draft": DRAFT,
        "target": TARGET,
        "asked": [Asked(task, None, problems)],
        "first": 0,
        "last": rows - 1,
        "profile": PAPER,
        "folder": folder,
        "rules": ["elastic"],
        "max_tokens": 40,
        "jobs": 0,
        **changed,
    }
    return Order(**given)


def quietly(items, total, label):
    yield from items


GRID = (0.05, 0.3)


def made(folder: Path, **changed) -> Calibration:
    """On coarser grids, which is faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "WINDOWS", (2, 4, 16))
        patch.setattr(sweep, "MULTIPLES", (0.25, 1.0, 1.75))
        patch.setattr(calibrating, "JS_GRID", GRID)
        patch.setitem(calibrating.GRIDS, "elastic", GRID)
        return calibrate(order(folder, **changed), quietly)


@pytest.fixture(scope="module")
def harmless(tmp_path_factory) -> Calibration:
    return made(tmp_path_factory.mktemp("harmless"), rows=3)


def test_what_harms_nothing_is_tolerated(harmless):
    assert harmless.thresholds == {"elastic": GRID[-1]}
    assert all(row.keeps and row.difference == 0 for row in harmless.measured["elastic"])
    assert 0.3 < harmless.tau < 0.95
    assert harmless.check.gain is not None
    assert harmless.check.passed == (harmless.check.gain > 1) == (harmless.predictor is not None)
    assert harmless.check.conservative.threshold == pytest.approx(GRID[-1] / 4)
    assert harmless.window in WINDOWS
    setting = harmless.setting(PAPER)
    assert (setting.tau, setting.threshold("elastic")) == (harmless.tau, GRID[-1])
    assert (setting.matched, setting.recorded) == (harmless.matched, harmless.recorded)
    assert (setting.predictor is None) == (harmless.predictor is None)


def test_a_harmful_threshold_is_rejected(tmp_path):
    found = made(tmp_path, harmful=True)
    assert found.thresholds == {"elastic": 0.0}
    assert not any(row.keeps for row in found.measured["elastic"])
    assert found.measured["elastic"][0].lost >= 6
    assert (found.predictor, found.matched, found.recorded) == (None, None, [])
    assert "no threshold of elastic is safe" in found.check.verdict


def test_the_same_again_and_gone_on_with(tmp_path, harmless):
    again = made(tmp_path, rows=3)
    assert again == harmless
    (again_file := tmp_path / "a.json").write_bytes(b"")
    again.save(again_file)
    before = again_file.read_bytes()
    texts = list(tmp_path.rglob("elastic@0.05.jsonl"))
    assert len(texts) == 1
    texts[0].write_bytes(texts[0].read_bytes()[:-20])
    made(tmp_path, rows=3).save(again_file)
    assert again_file.read_bytes() == before


def test_texts_too_short_to_learn_from(tmp_path):
    found = made(tmp_path, rows=2, max_tokens=12)
    assert found.thresholds == {"elastic": GRID[-1]}
    assert (found.predictor, found.window) == (None, None)
    assert "too short" in found.check.verdict


def test_several_tasks_are_one(tmp_path):
    one = order(tmp_path, rows=2).asked[0]
    failed = replace(one.task, _score=lambda own, text: False)
    found = made(tmp_path, asked=[one, replace(one, task=failed, file="b.jsonl")], rows=2)
    assert found.tasks == ["jsonl", "jsonl:b.jsonl"]
    [tried, _] = found.measured["elastic"]
    assert (tried.accuracy, tried.gained, tried.lost) == (0.5, 0, 0)


def verdict(monkeypatch, tmp_path, *, keeps: bool, gain: float):
    measured = row(keeps=keeps)
    monkeypatch.setattr(
        calibrating, "benched", lambda *a: {"elastic": [], "elastic-no-history": []}
    )
    monkeypatch.setattr(calibrating, "measure", lambda *a: measured)
    monkeypatch.setattr(calibrating, "speedup", lambda *a: (gain, gain, gain))
    records = {"cloud": [], "elastic@0.2": []}
    return calibrating.checked(order(tmp_path), records, 0.9, 0.2, weights(), quietly)


@pytest.mark.parametrize(
    ("keeps", "gain", "said"),
    [(True, 1.1, "is kept"), (True, 0.99, "gains nothing"), (False, 2.0, "costs accuracy")],
)
def test_a_predictor_must_be_safe_and_gain(monkeypatch, tmp_path, keeps, gain, said):
    predictor, check = verdict(monkeypatch, tmp_path, keeps=keeps, gain=gain)
    assert (predictor is not None) == check.passed == (said == "is kept")
    assert said in check.verdict


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"rules": ["elastik"]}, "no rule elastik; calibrated are elastic"),
        ({"rules": []}, "no rule given"),
        ({"delta": 1.5}, "delta is 1.5"),
        ({"asked": []}, "at least one"),
        ({"asked": [Asked(TASKS["jsonl"], None, [])]}, "jsonl isn't scored"),
        ({"asked": [Asked(TASKS["gsm8k"], None, [])] * 2}, "each task once"),
    ],
)
def test_orders_that_make_no_sense(tmp_path, changed, complaint):
    with pytest.raises(ValueError, match=complaint):
        order(tmp_path, **changed)
