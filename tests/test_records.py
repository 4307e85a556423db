"""Results directories: what is written is read back, through kills, resumes and mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2sci.evaluation.records import VERSION, Header, Record, Results, digest


def header(**changes) -> Header:
    plain = {
        "profile": {"name": "paper", "draft_ms": 10.0, "link": {"rtt_ms": 40.0, "up_mbps": 10.0}},
        "task": "gsm8k",
        "file": "made-up.jsonl",
        "first": 0,
        "last": 10,
        "draft": "small@1",
        "target": "large@1",
        "max_tokens": 400,
        "clock": "virtual",
        "command": "bench --task gsm8k",
    }
    return Header(**{**plain, **changes})


def record(row: int, **changes) -> Record:
    """100 tokens in 5 s: 20 tokens/s."""
    plain = {
        "row": row,
        "id": f"made-up/{row}",
        "finish": "stop",
        "tokens": 100,
        "digest": f"text {row}",
        "correct": True,
        "seconds": 5.0,
        "ttft_s": 0.05,
        "accepted": 80,
        "judged": 100,
        "tolerated": 4,
        "corrections": 20,
        "filled": 0,
        "drafted": 125,
        "wasted": 25,
        "passes": 30,
        "fed": 130,
        "windows": 25,
        "uplink": 300,
        "downlink": 200,
        "cloud_busy_s": 1.5,
        "edge_busy_s": 1.25,
        "cloud_joules": 600.0,
        "edge_joules": 25.0,
        "regret": None,
    }
    return Record(**{**plain, **changes})


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# ---- reading and writing -------------------------------------------------------------------


def test_what_is_appended_is_read_back(tmp_path):
    results = Results.create_or_resume(tmp_path / "out", header())
    results.append("elastic@0.2", record(1, correct=None, regret=-0.5), "zwei\u2028\n", [7, 8])
    results.append("elastic@0.2", record(0, ttft_s=None), "eins", [])
    results.append("sd-w10", record(0), "eins", [1])
    results.append("sd-w2", record(0), "eins", [1])

    again = Results.load(tmp_path / "out")
    assert again.header == header()
    assert again.methods() == ["elastic@0.2", "sd-w2", "sd-w10"]
    assert again.records("elastic@0.2") == [
        record(0, ttft_s=None),
        record(1, correct=None, regret=-0.5),
    ]
    assert again.done("elastic@0.2") == results.done("elastic@0.2") == {0, 1}
    assert again.done("cloud") == set()
    text = again.texts("elastic@0.2")[1]
    assert (text.row, text.text, text.token_ids) == (1, "zwei\u2028\n", [7, 8])


def test_figures_go_without_texts(tmp_path):
    results = Results.create_or_resume(tmp_path, header())
    results.append("cloud", record(0), "a secret", [77777])
    (tmp_path / "cloud.texts.jsonl").unlink()
    assert "secret" not in (tmp_path / "cloud.jsonl").read_text()
    assert "77777" not in (tmp_path / "cloud.jsonl").read_text()
    assert Results.load(tmp_path).records("cloud") == [record(0)]
    assert Results.load(tmp_path).texts("cloud") == {}


@pytest.mark.parametrize("name", ["", "../cloud", ".cloud", "a/b", "cloud.texts", "a b"])
def test_a_method_that_can_not_name_a_file_is_refused(tmp_path, name):
    results = Results.create_or_resume(tmp_path, header())
    with pytest.raises(ValueError, match="name a method") as error:
        results.append(name, record(0), "", [])
    one_line(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json"]


def test_a_row_is_kept_once(tmp_path):
    results = Results.create_or_resume(tmp_path, header())
    results.append("cloud", record(3), "", [])
    for again in (results, Results.load(tmp_path)):
        with pytest.raises(ValueError, match="row 3 already"):
            again.append("cloud", record(3), "", [])
    path = tmp_path / "cloud.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ValueError, match="row 3 is there twice"):
        results.records("cloud")


def test_an_unknown_method_names_the_nearest(tmp_path):
    results = Results.create_or_resume(tmp_path, header())
    results.append("elastic", record(0), "", [])
    with pytest.raises(ValueError, match="mean 'elastic'") as error:
        results.records("elasic")
    one_line(error)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_record_holds_finite_amounts(value):
    with pytest.raises(ValueError, match="seconds of row 2"):
        record(2, seconds=value)


@given(st.lists(st.integers(0, 1 << 18)), st.lists(st.integers(0, 1 << 18)))
def test_digests_tell_texts_apart(one, other):
    assert (digest(one) == digest(other)) == (one == other)


def test_a_digest_is_the_same_on_every_machine():
    assert digest([1, 2, 3]) == "e2e2033ae7e19d68"


# ---- torn and damaged ----------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_last_line_is_dropped_and_written_anew(tmp_path, cut):
    results = Results.create_or_resume(tmp_path, header())
    for row in range(3):
        results.append("cloud", record(row), f"text {row}", [row])
    for name in ("cloud.jsonl", "cloud.texts.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[: -min(cut, 30 if "texts" in name else cut)])

    again = Results.create_or_resume(tmp_path, header())
    assert again.done("cloud") == {0, 1}
    assert [r.row for r in again.records("cloud")] == [0, 1]
    again.append("cloud", record(2, tokens=7), "anew", [9])
    assert again.records("cloud") == [record(0), record(1), record(2, tokens=7)]
    assert again.texts("cloud")[2].text == "anew"
    assert all(json.loads(line) for line in (tmp_path / "cloud.jsonl").read_text().splitlines())


def test_a_method_with_only_a_torn_line_has_not_begun(tmp_path):
    results = Results.create_or_resume(tmp_path, header())
    (tmp_path / "cloud.jsonl").write_bytes(b'{"row": 1, "id"')
    assert results.methods() == []
    assert results.done("cloud") == set()


@pytest.mark.parametrize("line", [b"{}\n", b"\n", b"[1]\n", b'{"row": "\xff"}\n'])
def test_a_damaged_line_is_named(tmp_path, line):
    results = Results.create_or_resume(tmp_path, header())
    results.append("cloud", record(0), "", [])
    with (tmp_path / "cloud.jsonl").open("ab") as file:
        file.write(line)
    with pytest.raises(ValueError, match=r"cloud\.jsonl, line 2") as error:
        results.records("cloud")
    one_line(error)


# ---- resuming ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"profile": {"name": "wan"}}, "another profile (name: 'paper', not 'wan')"),
        (
            {"profile": {**header().profile, "link": {"rtt_ms": 41.0, "up_mbps": 10.0}}},
            "another profile (link: rtt_ms: 40.0, not 41.0)",
        ),
        ({"task": "csqa"}, "another task"),
        ({"file": None}, "another file ('made-up.jsonl', not None)"),
        ({"draft": "small@2"}, "another draft"),
        ({"target": "large@2"}, "another target ('large@1', not 'large@2')"),
        ({"max_tokens": 200}, "another max_tokens"),
        ({"clock": "wall"}, "another clock"),
        ({"first": 20, "last": 30}, "rows 0…10, which 20…30 don't touch"),
    ],
)
def test_another_run_is_refused(tmp_path, changes, said):
    Results.create_or_resume(tmp_path, header())
    before = (tmp_path / "bench.json").read_bytes()
    with pytest.raises(ValueError, match="choose another --out") as error:
        Results.create_or_resume(tmp_path, header(**changes))
    assert said in one_line(error)
    assert (tmp_path / "bench.json").read_bytes() == before


@pytest.mark.parametrize(
    ("rows", "all_rows"), [((0, 20), (0, 20)), ((10, 15), (0, 15)), ((3, 5), (0, 10))]
)
def test_rows_may_grow(tmp_path, rows, all_rows):
    Results.create_or_resume(tmp_path, header()).append("cloud", record(4), "", [])
    changes = {"first": rows[0], "last": rows[1], "command": "bench --rows"}
    again = Results.create_or_resume(tmp_path, header(**changes))
    assert (again.header.first, again.header.last) == all_rows
    assert again.done("cloud") == {4}
    assert Results.load(tmp_path).header == again.header
    assert again.header.command == "bench --rows"


def test_what_json_can_not_say_does_not_keep_a_run_from_resuming(tmp_path):
    odd = header(profile={"name": "mine", "up_mbps": math.inf, "points": ((1, 2.0),)})
    Results.create_or_resume(tmp_path, odd)
    assert Results.create_or_resume(tmp_path, odd).header == Results.load(tmp_path).header


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (json.dumps({"version": VERSION + 1, "new": 1}), f"format {VERSION + 1}"),
        (json.dumps({"version": VERSION}), "damaged"),
        ("{", "damaged"),
        (None, "has no bench.json"),
    ],
)
def test_other_headers_are_refused(tmp_path: Path, written, said):
    if written is not None:
        (tmp_path / "bench.json").write_text(written)
    with pytest.raises(ValueError, match=said) as error:
        Results.load(tmp_path)
    one_line(error)
    if written is not None:
        with pytest.raises(ValueError, match=said):
            Results.create_or_resume(tmp_path, header())


def test_records_without_a_header_are_not_taken_over(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(msgspec.json.encode(record(0)) + b"\n")
    with pytest.raises(ValueError, match=r"no bench\.json"):
        Results.create_or_resume(tmp_path, header())
