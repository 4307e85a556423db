"""The command line on synthetic models: what is printed, in which shape, with which exit code."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from click.testing import CliRunner

from e2sci.cli import COMMANDS, main
from e2sci.cli.printer import LEGEND, Printer, split_off
from e2sci.engines.base import text_of
from e2sci.evaluation.calibration import Calibration, Check
from e2sci.runtime.options import Piece
from e2sci.session.edge import Commit, Origin
from live import LiveCloud, Watched, draft, free_port, pair, target

DRAFT = "synthetic:seed=11,divergence=0.5"
FIGURES = {
    "mode", "accept", "seconds", "ttft_s", "tokens_per_s", "decode_tokens_per_s", "drafted",
    "accepted", "acceptance_rate", "windows", "cloud_passes", "cloud_tokens", "uplink_bytes",
    "downlink_bytes", "wasted_drafts", "corrections", "filled", "credit", "threshold",
    "reconnects", "drafted_alone",
}  # fmt: skip
RECORD = {
    "position", "draft", "pick", "js", "tv", "p", "agreed", "accepted", "threshold", "credit",
    "window", "ms",
}  # fmt: skip


def e2sci(*args, **options):
    result = CliRunner().invoke(main, list(args), **options)
    assert result.exit_code == 0, result.output
    return result


def run(cloud, *args, model=DRAFT, **options):
    return e2sci("run", *args, "--cloud", cloud.url, "--draft", model, **options)


def as_json(cloud, *args, **options):
    return json.loads(run(cloud, *args, "--json", **options).stdout)


# ---- run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "pipelined"])
@pytest.mark.parametrize("accept", ["strict", "rejection", "fuzzy", "elastic", "typical"])
def test_every_rule_in_every_mode(cloud, accept, mode):
    said = as_json(cloud, "hello", "--accept", accept, "--mode", mode, "--max-tokens", "30",
                   "--temperature", "0.8", "--seed", "4")  # fmt: skip
    assert (said["stats"]["mode"], said["stats"]["accept"]) == (mode, accept)
    assert 0 < said["usage"]["completion_tokens"] == len(said["token_ids"]) <= 30


@pytest.mark.parametrize("mode", ["cloud", "draft", "sync", "pipelined"])
def test_the_shape_of_json(cloud, mode):
    said = as_json(cloud, "hello", "--mode", mode, "--max-tokens", "20")
    assert list(said) == [
        "text", "token_ids", "finish_reason", "usage", "stats", "request_id", "notices",
    ]  # fmt: skip
    assert len(bytes.fromhex(said["request_id"])) == 16
    assert said["notices"] == []
    assert set(said["usage"]) == {"prompt_tokens", "completion_tokens"}
    assert set(said["stats"]) == FIGURES
    assert said["finish_reason"] == "length"
    assert said["text"] == text_of(draft().tokenizer, said["token_ids"])
    stats = said["stats"]
    assert 0 < stats["ttft_s"] <= stats["seconds"]
    assert stats["tokens_per_s"] == pytest.approx(20 / stats["seconds"])
    if mode in ("cloud", "draft"):
        assert stats["acceptance_rate"] is None
        assert stats["windows"] == stats["accepted"] == 0
    if mode == "draft":
        assert stats["uplink_bytes"] == stats["cloud_passes"] == 0
    else:
        assert stats["cloud_passes"] > 0
        assert stats["uplink_bytes"] > 20


def calibrated(tmp_path, draft, t):
    """A calibration file of `draft` with T_base = t."""
    path = tmp_path / f"{t}.json"
    Calibration(
        draft=draft, target="any", tasks=[], first=0, last=0, max_tokens=9, profile="paper",
        delta=0.01, tau=0.9, thresholds={"elastic": t}, window=None, matched=None, recorded=[],
        measured={}, check=Check(passed=False, verdict=""), predictor=None, command="",
    ).save(path)  # fmt: skip
    return str(path)


def test_elastic_takes_its_thresholds_from_a_calibration(cloud, tmp_path):
    ask = ("hello", "--max-tokens", "60", "--mode=pipelined", "--no-fill", "--json", "--accept")
    strict = json.loads(run(cloud, *ask, "strict").stdout)
    none, loose = (
        run(cloud, *ask, "elastic", "--calibration", calibrated(tmp_path, DRAFT, t))
        for t in (0.0, 0.6)
    )
    assert json.loads(none.stdout)["token_ids"] == strict["token_ids"]
    assert json.loads(loose.stdout)["token_ids"] != strict["token_ids"]
    assert "T_base = 0.6" in loose.stderr


@pytest.mark.parametrize(
    ("draft", "options", "said"),
    [
        ("other", ["--accept", "elastic"], "another pair"),
        (DRAFT, ["--accept", "strict"], "--accept elastic"),
        (DRAFT, ["--accept", "elastic", "--threshold", "0.1"], "without threshold"),
    ],
)
def test_a_calibration_that_does_not_fit(cloud, tmp_path, draft, options, said):
    file = calibrated(tmp_path, draft, 0.1)
    args = ["run", "hi", "--cloud", cloud.url, "--draft", DRAFT, "--calibration", file, *options]
    done = CliRunner().invoke(main, args)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


def test_lossy_rules_say_their_credit(cloud):
    stats = as_json(
        cloud, "hello", "--accept", "elastic", "--mode=pipelined", "--no-fill", "--max-tokens", "40"
    )["stats"]
    assert 0 <= stats["credit"] <= 1
    assert 0.05 <= stats["threshold"] <= 0.35
    short = ["hello", "--mode=pipelined", "--no-fill", "--max-tokens", "20"]
    stats = as_json(cloud, *short, "--accept", "fuzzy", "--threshold", "0.1")["stats"]
    assert stats["threshold"] == 0.1
    stats = as_json(cloud, *short)["stats"]
    assert (stats["credit"], stats["threshold"]) == (None, None)


def test_text_on_stdout_figures_on_stderr(cloud):
    options = ("--max-tokens", "20", "--mode", "pipelined")  # auto may have something to say
    result = run(cloud, "hello", *options)
    said = as_json(cloud, "hello", *options)
    assert result.stdout == said["text"] + "\n"
    [line] = result.stderr.splitlines()
    assert line.startswith("20 tokens in ")
    assert "tok/s" in line


def test_the_prompt_from_standard_input(cloud):
    short = ["--max-tokens", "20"]
    assert run(cloud, "-", *short, input="hello").stdout == run(cloud, "hello", *short).stdout


def test_sampling_options_reach_the_models(cloud):
    greedy = as_json(cloud, "hello", "--max-tokens", "20")["token_ids"]
    first = greedy[0]
    for flags in (
        f"--logit-bias {first}=-100",
        f"--logit-bias {first}=-100 --logit-bias 97=-100",
        "--temperature 1 --seed 1",
        "--repetition-penalty 2",
        "--frequency-penalty 2",
        "--presence-penalty 2",
        "--system brief",
        "--raw",
    ):
        assert as_json(cloud, "hello", "--max-tokens", "20", *flags.split())["token_ids"] != greedy
    for flags in ("--temperature 1 --top-k 1", "--temperature 1 --min-p .999", "--top-p .5"):
        assert as_json(cloud, "hello", "--max-tokens", "20", *flags.split())["token_ids"] == greedy


def test_stop_strings(cloud):
    whole = as_json(cloud, "hello", "--max-tokens", "40")["text"]
    said = as_json(cloud, "hello", "--stop", whole[9:12], "--stop", "never")
    assert said["text"] == whole[: whole.index(whole[9:12])]
    assert said["finish_reason"] == "stop"


@pytest.mark.parametrize("accept", ["strict", "fuzzy", "elastic", "typical", "rejection"])
def test_trace(cloud, tmp_path, accept):
    path = tmp_path / "trace.jsonl"
    said = as_json(cloud, "hello", "--accept", accept, "--mode=pipelined", "--no-fill",
                   "--trace", str(path), "--temperature", "0.7", "--max-tokens", "40")  # fmt: skip
    records = [json.loads(line) for line in path.read_text().splitlines()]
    stats, first = said["stats"], said["usage"]["prompt_tokens"]
    assert stats["accepted"] > 0
    assert records
    if accept != "strict":  # where a pick that is known need not be judged
        assert sum(r["accepted"] for r in records) == stats["accepted"]
    positions = [r["position"] for r in records]
    assert positions == sorted(set(positions))
    assert first <= positions[0]
    assert positions[-1] <= first + len(said["token_ids"])
    for r in records:
        assert set(r) == RECORD
        assert r["js"] is None or 0 <= r["js"] <= math.log(2) + 1e-9
        assert r["tv"] is None or 0 <= r["tv"] <= 1 + 1e-9
        assert (r["js"] is None) == (accept == "rejection")
        assert 0 <= r["p"] <= 1
        assert r["ms"] > 0
        token = r["draft"] if r["accepted"] else r["pick"]
        if accept != "rejection":  # there the pick is not what replaces a rejected token
            assert r["agreed"] == (r["draft"] == r["pick"])
            here = r["position"] - first
            assert here == len(said["token_ids"]) or said["token_ids"][here] == token
    if accept == "strict":
        assert all(r["accepted"] == r["agreed"] for r in records)
    if accept == "fuzzy":
        assert all(r["accepted"] == (r["js"] <= r["threshold"] == 0.2) for r in records)


def test_show_origin(cloud):
    plain = run(cloud, "hello", "--max-tokens", "40", "--mode=pipelined", "--no-fill")
    result = run(
        cloud, "hello", "--max-tokens", "40", "--mode=pipelined", "--no-fill", "--show-origin"
    )
    assert result.stdout == plain.stdout
    legend = result.stderr.splitlines()[0]
    assert LEGEND[Origin.AGREED] in legend
    assert LEGEND[Origin.CORRECTED] in legend
    assert LEGEND[Origin.DRAFTED] not in legend


def test_show_origin_in_colour(cloud):
    """Escape sequences on a terminal, around whole characters."""
    result = run(cloud, "hello", "--max-tokens", "40", "--show-origin", env={"FORCE_COLOR": "1"})
    assert "\x1b[" in result.stdout


# ---- the other commands -----------------------------------------------------------------------


def test_doctor(cloud):
    text = e2sci("doctor", "--cloud", cloud.url, "--draft", DRAFT).stdout
    for part in ("draft synthetic", "pass times", "vocabularies fit", "accepted", "→ use --mode "):
        assert part in text


def test_doctor_as_json(cloud):
    report = json.loads(e2sci("doctor", "--cloud", cloud.url, "--draft", DRAFT, "--json").stdout)
    assert set(report) == {
        "draft", "cloud", "notices", "draft_ms", "rtt_ms", "pass_ms", "acceptance",
        "cloud_alone", "synchronous", "pipelined", "verdict",
    }  # fmt: skip
    assert report["draft"] == report["cloud"] == "synthetic"
    assert report["pass_ms"] == {"1": 1.0, "32": 1.0}
    assert report["cloud_alone"] == 1000
    assert 0 < report["acceptance"] < 1
    assert report["draft_ms"] > 0
    assert report["rtt_ms"] > 0


def test_doctor_says_when_speculation_does_not_pay():
    """A draft that is never right, and not a slow target."""
    with LiveCloud() as cloud:
        report = json.loads(
            e2sci("doctor", "--cloud", cloud.url, "--draft", "synthetic:seed=11,random=1", "--json")
            .stdout
        )  # fmt: skip
        assert report["verdict"].startswith("use --mode cloud: speculation does not pay here")
        cloud.idle()


def test_doctor_on_models_with_nothing_to_say():
    mute = "synthetic:seed=11,eos_bias=60"
    with LiveCloud(target(eos_bias=60.0)) as cloud:
        report = json.loads(e2sci("doctor", "--cloud", cloud.url, "--draft", mute, "--json").stdout)
        assert report["verdict"].startswith("use --mode ")


def test_doctor_mentions_notices():
    with LiveCloud(Watched()) as cloud:
        padded = f"{DRAFT},padding=9"
        text = e2sci("doctor", "--cloud", cloud.url, "--draft", padded).stdout
        assert "! vocabularies are padded differently" in text


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_demo(json_flag):
    args = ["demo", "--model", "synthetic:seed=11", "--draft", DRAFT, "--rtt", "1"]
    result = e2sci(*args, "--max-tokens", "16", *json_flag)
    names = ["cloud alone", "sync SD", "FSD", "pipelined strict", "pipelined elastic"]
    if json_flag:
        methods = json.loads(result.stdout)["methods"]
        assert [m["method"] for m in methods] == names
        for method in methods:
            assert method["tokens_per_s"] > 0
            assert method["passes_per_token"] > 0
        assert methods[0]["speedup"] == 1.0
        assert methods[0]["acceptance"] is None
        assert methods[3]["same_text"] is True
    else:
        table = result.stdout[result.stdout.index("tok/s") :]  # in 80 columns
        heads = ["tok/s", "vs cloud", "accepted", "passes/tok", "up B/tok", "target's text"]
        for name in [*names, *heads, "What bounds it here"]:
            assert name in table


def test_models_as_json(monkeypatch, tmp_path):
    monkeypatch.setenv("E2SCI_CACHE", str(tmp_path))
    rows = json.loads(e2sci("models", "list", "--json").stdout)
    assert len(rows) >= 2
    for row in rows:
        assert set(row) == {
            "name", "parameters", "bytes", "sha256", "licence", "repo", "cached", "path",
        }  # fmt: skip
        assert row["cached"] is False
        assert row["path"].startswith(str(tmp_path))


def paths(group, *names):
    yield [*names]
    for name in getattr(group, "list_commands", lambda _: [])(None):
        yield from paths(group.get_command(None, name), *names, name)


@pytest.mark.parametrize("path", list(paths(main)), ids=" ".join)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(path, flag):
    text = e2sci(*path, flag).stdout
    assert text.startswith("Usage: main " + " ".join(path))
    assert "Options:" in text


def test_help_lists_every_command():
    text = e2sci("--help").stdout
    for name in COMMANDS:
        line = next(x for x in text.splitlines() if x.startswith(f"  {name} "))
        assert len(line.split()) > 3
    assert "0." in e2sci("--version").stdout


def test_as_a_module():
    """Help is quick: no engine is imported for it."""
    code = "import sys; sys.argv[1:] = ['--version']; import runpy\n"
    code += "try: runpy.run_module('e2sci', run_name='__main__')\n"
    code += (
        "except SystemExit: print(sorted(m for m in sys.modules if m in ('numpy', 'websockets')))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("e2sci, version ")
    assert said.stdout.endswith("[]\n")


async def test_the_command_line_and_the_api_say_the_same():
    async with pair() as edge:
        result = await edge.generate("hello", max_tokens=20)
        assert set(result.to_dict()["stats"]) == FIGURES


def test_a_failed_run_leaves_an_old_trace(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("old\n")
    nowhere = ["--cloud", f"ws://127.0.0.1:{free_port()}", "--trace", str(trace)]
    result = CliRunner().invoke(main, ["run", "hello", "--draft", "synthetic:seed=11", *nowhere])
    assert result.exit_code == 2
    assert trace.read_text() == "old\n"


def test_a_character_split_over_pieces_is_shown_whole(capsys):
    engine = draft()
    commits = [Commit(i, b, Origin.AGREED) for i, b in enumerate("a🙂".encode())]
    shown, rest = split_off(engine, commits[:3])
    assert (shown, rest) == (commits[:1], commits[1:3])
    assert split_off(engine, commits) == (commits, [])
    printer = Printer(engine, coloured=True)
    printer.show(Piece("a", commits[:2]))
    printer.show(Piece("🙂", commits[2:]))
    assert capsys.readouterr().out == "a🙂"
