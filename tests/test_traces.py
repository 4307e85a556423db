"""Traces: what is written is read, interruptions are gone on from, damage is one clear line."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2sci.evaluation import traces
from e2sci.evaluation.traces import MOST, RequestTrace, Trace, TraceHeader, TraceWriter

HEADER = TraceHeader(draft="small", target="large", task="sums", first=0, last=4, max_tokens=8)


def request(row: int = 0, tokens: tuple[int, ...] = (5, 6, 7), **changed: object) -> RequestTrace:
    n = len(tokens)
    given = {
        "row": row,
        "id": f"sums/{row}",
        "prompt_tokens": 9,
        "tokens": list(tokens),
        "drafts": list(tokens),
        **{name: [0.125] * n for name in traces._BOUNDS},
        "p": [b"\x01\xff"] * n,
        "q": [b""] * n,
        "correct": True,
        **changed,
    }
    return RequestTrace(**given)  # type: ignore[arg-type]


def written(path: Path, *rows: int) -> Path:
    Trace(HEADER, [request(row) for row in rows]).save(path)
    return path


lists = st.integers(1, 6)


@given(data=st.data(), n=lists)
def test_what_is_saved_is_loaded(tmp_path_factory, data, n):
    path = tmp_path_factory.mktemp("t") / "a.jsonl"
    ids = st.lists(st.integers(0, 200_000), min_size=n, max_size=n)
    rates = st.lists(st.floats(0, 0.69), min_size=n, max_size=n)
    sketches = st.lists(st.binary(max_size=20), min_size=n, max_size=n)
    one = request(
        3,
        tuple(data.draw(ids)),
        drafts=data.draw(ids),
        p=data.draw(sketches),
        q=data.draw(sketches),
        correct=data.draw(st.none() | st.booleans()),
        **{name: data.draw(rates) for name in traces._BOUNDS},
    )
    Trace(HEADER, [one]).save(path)
    back = Trace.load(path)
    assert (back.header, back.requests, back.rows) == (HEADER, [one], {3})


def test_the_first_line_says_what_it_is(tmp_path):
    first = written(tmp_path / "a.jsonl").read_text().splitlines()[0]
    assert msgspec.json.decode(first) == {
        "kind": "e2sci-trace",
        "version": 1,
        "draft": "small",
        "target": "large",
        "task": "sums",
        "first": 0,
        "last": 4,
        "max_tokens": 8,
    }


def test_infinity_becomes_a_number(tmp_path):
    path = tmp_path / "a.jsonl"
    Trace(HEADER, [request(regret=[0.0, math.inf, 1.0])]).save(path)
    assert Trace.load(path).requests[0].regret == [0.0, MOST, 1.0]


def test_acceptance_is_agreement_or_a_small_divergence():
    one = request(tokens=(1, 2, 3, 4), drafts=[1, 0, 3, 0], js=[0.5, 0.1, 0.0, 0.3])
    assert one.agreed.tolist() == [True, False, True, False]
    assert one.accepted().tolist() == one.accepted(0).tolist() == [True, False, True, False]
    assert one.accepted(0.1).tolist() == [True, True, True, False]
    trace = Trace(HEADER, [one, request(1, (1, 2))])
    assert trace.acceptance() == pytest.approx(4 / 6)  # positions, not requests, weigh the same
    assert trace.acceptance(0.3) == 1


def test_a_trace_of_another_pair_is_refused():
    Trace(HEADER).require_pair("small", "large")
    with pytest.raises(ValueError, match=r"trace of another pair: it has small and large, not s"):
        Trace(HEADER).require_pair("small", "larger")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"drafts": [1]}, "3 tokens but 1 of drafts"),
        ({"p": [b""] * 4}, "3 tokens but 4 of p"),
        ({"tv": [0.1, 0.2, 1.5]}, "tv must lie in 0 to 1"),
        ({"js": [0.1, 0.2, 0.8]}, "js must lie in 0 to 0.693"),
        ({"regret": [0.1, math.nan, 1.0]}, "regret must lie in 0 to inf"),
        ({"entropy": [0.1, -1.0, 1.0]}, "entropy must lie in 0"),
    ],
)
def test_a_request_must_hold_together(changed, words):
    with pytest.raises(ValueError, match=words):
        request(7, **changed)


def test_a_request_has_positions():
    with pytest.raises(ValueError, match="no positions"):
        request(tokens=())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: [], "no trace"),
        (lambda lines: [b'{"kind": "other"}\n'], "no trace"),
        (lambda lines: [b"\xff\xfe\n"], "no trace"),
        (lambda lines: [lines[0].replace(b'"version":1', b'"version":9')], "version 9; expected 1"),
        (lambda lines: [b'{"kind":"e2sci-trace","version":1}\n'], "line 1 is damaged"),
        (lambda lines: [*lines[:2], lines[2][:40] + b"\n"], "line 3 is damaged"),
        (lambda lines: [lines[0], lines[1].replace(b"[5,6,7]", b"[5,6]", 1)], "line 2 is damaged"),
        (lambda lines: [lines[0], lines[1], lines[1]], "line 3 is row 0 a second time"),
    ],
)
def test_damage_is_one_clear_line(tmp_path, damage, words):
    path = written(tmp_path / "a.jsonl", 0, 1)
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=words) as caught:
        Trace.load(path)
    assert "a.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_is_one_clear_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"can't read the trace .*No such file"):
        Trace.load(tmp_path / "none.jsonl")
    path = written(tmp_path / "a.jsonl", 0, 1)
    monkeypatch.setattr(traces, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="not a trace, or split it"):
        Trace.load(path)


def test_an_interrupted_trace_is_gone_on_with(tmp_path):
    path = tmp_path / "a.jsonl"
    with TraceWriter(path, HEADER) as writer:
        writer.append(request(0))
        assert Trace.load(path).rows == {0}  # written through, not at the end
        writer.append(request(1))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"row":2,"id":"su')
    assert Trace.load(path).rows == {0, 1}
    with TraceWriter(path, HEADER) as writer:
        assert writer.rows == {0, 1}
        writer.append(request(2))
        with pytest.raises(ValueError, match="row 2 is in the trace already"):
            writer.append(request(2))
    assert path.read_bytes().startswith(whole)
    assert [r.row for r in Trace.load(path).requests] == [0, 1, 2]


def test_resuming_may_widen_the_rows_and_nothing_else(tmp_path):
    path = written(tmp_path / "a.jsonl", 0, 1)
    TraceWriter(path, msgspec.structs.replace(HEADER, first=2, last=9)).close()
    widened = Trace.load(path)
    assert (widened.header.first, widened.header.last, widened.rows) == (0, 9, {0, 1})
    for change in ({"task": "poems"}, {"max_tokens": 9}):
        with pytest.raises(ValueError, match="choose another file"):
            TraceWriter(path, msgspec.structs.replace(HEADER, **change))
    with pytest.raises(ValueError, match="another pair"):
        TraceWriter(path, msgspec.structs.replace(HEADER, draft="tiny"))
    assert Trace.load(path).requests == widened.requests


def test_a_foreign_file_is_not_overwritten(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(ValueError, match="no trace"):
        TraceWriter(path, HEADER)
    assert path.read_text() == "mine\n"
    with pytest.raises(ValueError, match="can't write the trace"):
        TraceWriter(tmp_path / "none" / "a.jsonl", HEADER)
