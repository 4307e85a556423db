"""The file of a calibration, and the command that makes one."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner

from calibrated import (
    PAPER,
    calibration,
)
from e2sci.cli import calibrate as cli
from e2sci.cli import main
from e2sci.evaluation import calibration as files
from e2sci.evaluation.calibration import Calibration, shipped
from e2sci.evaluation.pair import identity

TARGET, DRAFT = "synthetic:seed=2", "synthetic:seed=2,divergence=1"


# ---- the file -----------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "c.json"
    calibration().save(path)
    found = Calibration.load(path)
    assert found == calibration()
    assert found.setting(PAPER).predictor(0.95, 0.0).window == 16
    assert calibration(predictor=None).network() is None


def test_another_pair_is_refused():
    calibration().require_pair("s@1", "l@2")
    for pair in (("s@1", "l@3"), ("l@2", "s@1")):
        with pytest.raises(ValueError, match="calibration for another pair: s@1 and l@2, not"):
            calibration().require_pair(*pair)


def changed_file(**changed) -> bytes:
    data = json.loads(msgspec.json.encode(calibration()))
    return json.dumps({**data, **changed}).encode()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "is no calibration"),
        (b"\xff\xfe", "is no calibration"),
        (b"[1]", "is no calibration"),
        (changed_file(version=2), "version 2, expected 1"),
        (changed_file(tau=1.5), "damaged: tau"),
        (changed_file(thresholds={"elastic": -1}), "damaged: thresholds"),
        (changed_file(recorded=[0.1] * 513), "512 recorded"),
        (changed_file(predictor="AAAA"), "damaged: .*predictor"),
        (changed_file(predictor="é"), "damaged"),
        (changed_file(check=None), "damaged"),
    ],
)
def test_other_files_are_refused(tmp_path, data, complaint):
    path = tmp_path / "c.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=complaint) as error:
        Calibration.load(path)
    assert "\n" not in str(error.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="can't read the calibration"):
        Calibration.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="can't write the calibration"):
        calibration().save(tmp_path / "none" / "c.json")


def test_the_shipped_one_is_found_by_its_pair(tmp_path, monkeypatch):
    monkeypatch.setattr(files.resources, "files", lambda _: tmp_path)
    assert shipped("s@1", "l@2") is None
    (tmp_path / "data").mkdir()
    calibration(draft="other").save(tmp_path / "data" / "a.json")
    calibration().save(tmp_path / "data" / "b.json")
    assert shipped("s@1", "l@2") == calibration()
    assert shipped("s@1", "other") is None


@pytest.mark.models
def test_the_default_pair_has_one_of_the_calibration_rows():
    found = shipped(identity("qwen2.5-coder", "draft"), identity("qwen2.5-coder:target", "target"))
    assert found is not None
    assert 0 <= found.first <= found.last < 32
    assert found.thresholds.keys() == {"elastic", "elastic-regret", "fsd"}


# ---- the command --------------------------------------------------------------------------


def run(tmp_path, *options: str):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "one and one?", "answer": "#### 2"}\n' * 3)
    arguments = ["--task", f"gsm8k:{file}", "--rows", "0:3", "--profile", "paper"]
    arguments += ["--out", str(tmp_path / "c.json"), "--pair", f"{DRAFT},{TARGET}"]
    return CliRunner().invoke(main, ["calibrate", *arguments, *options])


def test_the_command(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(cli.calibrating, "calibrate", lambda o, t: seen.append(o) or calibration())
    result = run(tmp_path, "--delta", "2", "--rules", "elastic,fsd", "--jobs", "3")
    assert result.exit_code == 0, result.output
    assert "chosen" in result.stdout
    assert "-10.0 [-30.0, +10.0]" in result.stdout
    [given_order] = seen
    assert (given_order.rules, given_order.delta, given_order.jobs) == (["elastic", "fsd"], 0.02, 3)
    assert (given_order.first, given_order.last, len(given_order.asked[0].problems)) == (0, 2, 3)
    assert (given_order.draft, given_order.asked[0].name) == (DRAFT, "gsm8k:rows.jsonl")
    assert Calibration.load(tmp_path / "c.json") == calibration()
    as_json = run(tmp_path, "--json")
    assert msgspec.json.decode(as_json.stdout, type=Calibration) == calibration()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--profile", "papr"], "no profile 'papr'"),
        (["--rules", "elastik"], "no rule elastik"),
        (["--rows", "0:7"], "rows 0:7 are not in"),
        (["--task", "specbench"], "specbench needs a file"),
        (["--pair", "a,b,c"], "expected DRAFT,TARGET"),
        (["--out", "/dev/null/c.json"], "can't make the folder"),
    ],
)
def test_mistakes_are_one_line(tmp_path, options, complaint):
    result = run(tmp_path, *options)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1
