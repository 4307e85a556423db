"""The bench as its user has it: side by side, resumable, the same bytes every time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from e2sci.cli import main
from e2sci.emulation.profile import PROFILES
from e2sci.evaluation.bench import Answer, Plan, bench
from e2sci.evaluation.methods import Setting
from e2sci.evaluation.pair import PairSpec
from e2sci.evaluation.records import Header, Results
from e2sci.evaluation.tasks import task

DRAFT, TARGET = "synthetic:divergence=0.3,eos_bias=-9", "synthetic:eos_bias=-9"
PAIR = f"{DRAFT},{TARGET}"
PROMPTS = ["the cat and the dog", "def f(x):", "1 + 1 =", "é🙂", "and then"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


def e2sci(*args: Any) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, args)])


def run(prompts: Path, out: Path, *more: Any, rows: str = "0:3", methods: str = "cloud,sd") -> Any:
    common = ("--pair", PAIR, "--max-tokens", 30, "--out", out)
    asked = ("--task", f"jsonl:{prompts}", "--rows", rows, "--methods", methods)
    done = e2sci(*asked, *common, "--json", *more)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".jsonl"}


def test_a_row_a_method_with_its_figures(prompts: Path, tmp_path: Path) -> None:
    shown = run(prompts, tmp_path / "out", methods="cloud,sd,strict,elastic@0.1,draft")
    assert shown["task"] == "jsonl"
    assert shown["profile"] == "paper"
    assert shown["rows"] == "0:3"
    methods = {row["method"]: row for row in shown["methods"]}
    assert set(methods) == {"cloud", "sd", "strict", "elastic@0.1", "draft"}
    assert methods["cloud"]["tokens_per_s"] == pytest.approx(19, rel=0.05)
    assert methods["strict"]["equal_text"] == 1
    assert methods["strict"]["speedup"] > methods["sd"]["speedup"] > 1
    assert methods["draft"]["uplink_per_token"] == 0
    assert methods["cloud"]["accuracy"] is None


def test_it_goes_on_where_it_stopped_and_the_bytes_are_the_same(
    prompts: Path, tmp_path: Path
) -> None:
    run(prompts, tmp_path / "whole", rows="0:4", methods="cloud,strict,sd-best")
    run(prompts, tmp_path / "parts", rows="0:1", methods="cloud")
    run(prompts, tmp_path / "parts", rows="0:4", methods="strict")
    torn = tmp_path / "parts" / "strict.jsonl"
    torn.write_bytes(torn.read_bytes()[:-9])
    run(prompts, tmp_path / "parts", "--jobs", 2, rows="0:4", methods="cloud,strict,sd-best")
    whole, parts = files(tmp_path / "whole"), files(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name in whole:  # in any order, each once
        assert sorted(whole[name].splitlines()) == sorted(set(parts[name].splitlines())), name


def test_nothing_is_run_twice(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(prompts, tmp_path / "out")

    def never(*_: object) -> None:
        raise AssertionError("ran again")

    monkeypatch.setattr("e2sci.evaluation.bench.write", never)
    assert run(prompts, tmp_path / "out")["methods"] == before["methods"]
    shown = e2sci("--out", tmp_path / "out", "--show", "--json")
    assert json.loads(shown.stdout)["methods"] == before["methods"]
    table = e2sci("--out", tmp_path / "out", "--show")
    assert "cloud" in table.stdout
    assert "tok/s" in table.stdout


def test_closing_the_bench_keeps_what_is_done(prompts: Path, tmp_path: Path) -> None:
    chosen, file = task(f"jsonl:{prompts}")
    problems = chosen.load(file, (0, 5))
    plan = Plan(PairSpec(DRAFT, TARGET), chosen, Setting(PROFILES["paper"]), ["cloud", "sd"], 20)
    header = Header(
        profile=PROFILES["paper"].to_dict(),
        task="jsonl",
        file=None,
        first=0,
        last=4,
        draft=DRAFT,
        target=TARGET,
        max_tokens=20,
        clock="virtual",
        command="",
    )
    results = Results.create_or_resume(tmp_path / "out", header)
    going = bench(plan, results, problems, jobs=0)
    first: Sequence[Answer] = [next(going), next(going), next(going)]
    going.close()
    assert [(a.method, a.record.row) for a in first] == [("cloud", 0), ("sd", 0), ("cloud", 1)]
    rest = list(bench(plan, Results.load(tmp_path / "out"), problems, jobs=0))
    assert len(rest) == 10 - 3
    assert Results.load(tmp_path / "out").done("sd") == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--task", "gsm9k", "--rows", "0:3"), "gsm8k"),
        (("--task", "jsonl:{prompts}", "--rows", "0:9"), "<= 5"),
        (("--task", "jsonl:{prompts}", "--rows", "3"), "A:B"),
        (("--task", "jsonl:{prompts}", "--rows", "0:2", "--methods", "stict"), "strict"),
        (("--task", "jsonl:{prompts}", "--rows", "0:2", "--profile", "papr"), "paper"),
        (("--task", "jsonl:{prompts}", "--rows", "0:2", "--max-tokens", "31"), "max_tokens"),
        (("--task", "jsonl:{prompts}", "--rows", "0:2", "--profile", "wan"), "profile"),
        (("--task", "jsonl:{prompts}", "--rows", "0:2", "--pair", "synthetic"), "another draft"),
        (("--rows", "0:2"), "--task"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    prompts: Path, tmp_path: Path, args: tuple[str, ...], said: str
) -> None:
    run(prompts, tmp_path / "out", rows="0:2", methods="cloud")
    before = files(tmp_path / "out")
    given = [arg.format(prompts=prompts) for arg in args]
    rest = [] if "--max-tokens" in given else ["--max-tokens", "30"]
    rest += [] if "--pair" in given else ["--pair", PAIR]
    done = e2sci(*given, *rest, "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert files(tmp_path / "out") == before


def test_the_command_is_kept_without_the_paths_of_this_machine(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["bench", "--task", f"jsonl:{prompts}", "--rows", "0:1", "--out", str(tmp_path / "o")]
    monkeypatch.setattr("sys.argv", ["e2sci", *asked])
    run(prompts, tmp_path / "o", methods="cloud")
    said = Results.load(tmp_path / "o").header.command
    assert said == "e2sci bench --task jsonl:prompts.jsonl --rows 0:1 --out o"


def test_results_of_another_version_and_calibrations_of_another_pair(
    prompts: Path, tmp_path: Path
) -> None:
    run(prompts, tmp_path / "out", methods="cloud")
    header = tmp_path / "out" / "bench.json"
    header.write_text(header.read_text().replace('"version": 1', '"version": 7'))
    done = e2sci("--out", tmp_path / "out", "--show")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "format 7" in done.stderr


def test_the_wall_clock_runs_the_same_methods(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = run(prompts, out, "--wall", 2, "--profile", "lan", rows="0:1", methods="cloud,strict")
    rows = {row["method"]: row for row in shown["methods"]}
    assert set(rows) == {"cloud", "strict"}
    assert rows["cloud"]["median"] > 0
    assert rows["cloud"]["least"] <= rows["cloud"]["median"] <= rows["cloud"]["most"]
    texts = [Results.load(out / run).records("strict")[0].digest for run in ("wall-1", "virtual")]
    assert texts[0] == texts[1]
    assert (out / "profile.toml").exists()
    done = e2sci(
        *("--task", f"jsonl:{prompts}", "--rows", "0:1", "--methods", "colocated", "--wall", 1),
        *("--pair", PAIR, "--out", tmp_path / "other", "--profile", "lan"),
    )
    assert done.exit_code == 2
    assert "wall clock" in done.stderr


@pytest.mark.parametrize("jobs", [1, 2])
def test_requests_abreast_change_no_byte(prompts: Path, tmp_path: Path, jobs: int) -> None:
    methods = "cloud,sd,strict,elastic@0.1"
    run(prompts, tmp_path / "one", rows="0:5", methods=methods)
    run(prompts, tmp_path / "many", "--abreast", 3, "--jobs", jobs, rows="0:5", methods=methods)
    one, many = (
        {name: sorted(data.splitlines()) for name, data in files(tmp_path / out).items()}
        for out in ("one", "many")
    )
    assert one == many
    common = ("--task", f"jsonl:{prompts}", "--rows", "0:5", "--pair", PAIR, "--max-tokens", 30)
    other = e2sci(*common, "--methods", "pearl", "--out", tmp_path / "many")
    assert other.exit_code == 2
    assert "holds results of another abreast (3, not 1)" in other.output
