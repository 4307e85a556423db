"""What a traced answer tells: each token's origin, each window's fate, times and figures."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from e2sci.engines.synthetic import EOS, SyntheticTokenizer
from e2sci.runtime.edge import BlockingEdge
from e2sci.runtime.options import Piece
from e2sci.runtime.tale import Figures, Tale
from e2sci.server.openai_shapes import Choice, Shapes
from e2sci.server.openai_tale import told
from live import draft
from serving import HELLO, LiveEdge, chat, streamed, text_of

TRACE = {"trace": True}
LISTS = ("tokens", "judged", "windows", "verdicts")
PLAIN = {"messages": HELLO, "seed": 7, "max_tokens": 60, "logit_bias": {str(EOS): -100}}
SYNC = {"mode": "sync", "window": 3}
JUDGING = [
    {"mode": "pipelined"},
    SYNC,
    {"mode": "auto"},
    {"mode": "sync", "accept": "elastic", "threshold": 0.4},
    {"mode": "sync", "accept": "rejection"},
]
ALONE = [{"mode": "cloud"}, {"mode": "draft"}]


@pytest.fixture(scope="module")
def edge(one_cloud):
    with LiveEdge(one_cloud) as edge:
        yield edge
        edge.idle()


class Traced:
    """A streamed answer: its chunks, its tale, and both put together."""

    def __init__(self, edge, own, **body) -> None:
        body = {**PLAIN, "stream": True, "e2sci": {**TRACE, **own}, **body}
        said = edge.post(body=body)
        assert said.status_code == 200, said.text
        lines = [line[6:] for line in said.text.splitlines() if line.startswith("data: {")]
        self.chunks = [json.loads(line) for line in lines]
        assert "error" not in self.chunks[-1], self.chunks[-1]
        self.ending = self.chunks[-1]["e2sci"]
        self.tale = [chunk["e2sci"] for chunk in self.chunks[:-1] if "e2sci" in chunk]
        [self.stats, *_] = self.ending["stats"]
        for name in LISTS:
            setattr(self, name, joined(self.tale, name))

    def text(self, index=0):
        choices = [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]
        return "".join(c["delta"].get("content") or "" for c in choices)


def joined(tale, name, choice=0):
    return [each for part in tale if part["choice"] == choice for each in part[name]]


def whole(edge, own, **body):
    answer = edge.post(body={**PLAIN, "e2sci": {**TRACE, **own}, **body}).json()
    assert "error" not in answer, answer
    return answer


# ---- tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("own", JUDGING + ALONE, ids=str)
def test_the_tokens_are_the_answers(edge, own):
    answer = Traced(edge, own)
    tokens = answer.tokens
    assert len(tokens) == 60 == answer.tale[-1]["figures"]["tokens"]
    assert [t["position"] - tokens[0]["position"] for t in tokens] == list(range(60))
    data = b"".join(bytes(t["bytes"]) for t in tokens)
    text = data.decode(errors="replace")
    assert text == answer.text()
    for i, token in enumerate(tokens):
        assert bytes(token["bytes"]) == SyntheticTokenizer().piece(token["id"])
        before = b"".join(bytes(t["bytes"]) for t in tokens[:i]).decode(errors="ignore")
        assert token["offset"] >= len(before)
        if not token["text"].startswith("\\x"):  # what was broken off before it comes first
            assert text[token["offset"] :].lstrip("\ufffd").startswith(token["text"])


def test_they_are_those_that_python_gives(edge, one_cloud):
    with BlockingEdge(one_cloud.url, draft()) as python:
        wanted = python.generate(
            "hello", max_tokens=60, temperature=1.0, seed=7, logit_bias={EOS: -100.0}
        )
    answer = Traced(edge, {})
    assert [t["id"] for t in answer.tokens] == wanted.token_ids
    assert answer.tokens[0]["position"] == wanted.prompt_tokens


@pytest.mark.parametrize("own", JUDGING + ALONE, ids=str)
def test_origins_add_up(edge, own):
    answer = Traced(edge, own)
    count = dict.fromkeys(("agreed", "tolerated", "corrected", "filled", "drafted"), 0)
    for token in answer.tokens:
        count[token["origin"]] += 1
    stats = answer.stats
    assert count["agreed"] + count["tolerated"] == stats["accepted"]
    assert (count["corrected"], count["filled"]) == (stats["corrections"], stats["filled"])
    if own in ALONE:
        assert count["filled" if own["mode"] == "cloud" else "drafted"] == 60
    assert (count["tolerated"] > 0) == (own.get("accept") == "elastic")


# ---- windows and verdicts ---------------------------------------------------------------------


@pytest.mark.parametrize("own", JUDGING, ids=str)
def test_every_windows_fate_is_told(edge, own):
    answer = Traced(edge, own)
    windows, verdicts = answer.windows, answer.verdicts
    assert len(windows) == answer.stats["windows"]
    assert windows or own == {"mode": "auto"}  # which may think that drafting does not pay
    assert sum(v["accepted"] + v["own"] for v in verdicts) == 60
    assert verdicts[-1]["passes"] == answer.stats["cloud_passes"]
    judging = [v for v in verdicts if v["accepted"] or v["rejected"]]
    for verdict in judging:  # begins in a window of its branch that went before it came
        assert [
            w
            for w in windows
            if w["branch"] == verdict["branch"] and w["ms"] <= verdict["ms"]
            and w["start"] <= verdict["start"] < w["start"] + w["tokens"]
        ], verdict  # fmt: skip
    dead = [v for v in verdicts if v["rejected"]]
    assert dead or own != SYNC
    for verdict in dead:  # nothing of its branch is heard of any more
        assert verdict["own"] >= 1
        later = verdicts[verdicts.index(verdict) + 1 :]
        assert all(v["branch"] > verdict["branch"] for v in later if v in judging)
        assert all(w["branch"] > verdict["branch"] for w in windows if w["ms"] > verdict["ms"])


@pytest.mark.parametrize("own", JUDGING, ids=str)
def test_why_is_told_of_every_judged_token(edge, own):
    answer = Traced(edge, own)
    accepted = sum(v["accepted"] for v in answer.verdicts)
    assert sum(j["accepted"] for j in answer.judged) == accepted
    assert len(answer.judged) == accepted + sum(v["rejected"] for v in answer.verdicts)
    origins = {t["position"]: t for t in answer.tokens}
    sketched = own.get("accept") == "elastic"
    for judged in answer.judged:
        token = origins[judged["position"]]
        assert token["id"] == judged["draft" if judged["accepted"] else "pick"] or (
            own.get("accept") == "rejection"
        )
        assert judged["draft_text"] == name(judged["draft"])
        assert judged["pick_text"] == name(judged["pick"])
        assert (judged["js"] is not None) == (judged["tv"] is not None) == sketched
        assert 0 <= judged["p"] <= 1
        assert 1 <= judged["pass"] <= answer.stats["cloud_passes"]
    figures = answer.tale[-1]["figures"]
    assert (figures["threshold"] is not None) == (figures["credit"] is not None) == sketched


def name(token):
    return shapes().token(token)


@pytest.mark.parametrize("own", ALONE, ids=str)
def test_alone_nothing_is_judged(edge, own):
    answer = Traced(edge, own)
    assert answer.judged == answer.windows == []
    figures = answer.tale[-1]["figures"]
    assert (figures["mode"], figures["drafting"]) == (own["mode"], own["mode"] == "draft")
    assert (figures["cloud_ms"] is None) == (own["mode"] == "draft")
    assert len(answer.verdicts) == (0 if own["mode"] == "draft" else 60)


def test_windows_are_told_while_they_travel(edge):
    answer = Traced(edge, SYNC)
    assert any(part["windows"] and not part["verdicts"] for part in answer.tale)


# ---- times and figures ------------------------------------------------------------------------


@pytest.mark.parametrize("own", JUDGING + ALONE, ids=str)
def test_times_ascend(edge, own):
    answer = Traced(edge, own)
    for times in (
        [part["ms"] for part in answer.tale],
        *([each["ms"] for each in getattr(answer, name)] for name in LISTS[1:]),
    ):
        assert all(0 <= a <= b for a, b in pairwise([0.0, *times]))
    for part in answer.tale:
        assert all(each["ms"] <= part["ms"] for name in LISTS[1:] for each in part[name])
    assert answer.tale[-1]["ms"] >= 1000 * answer.stats["seconds"] - 0.001


@pytest.mark.parametrize("own", JUDGING + ALONE, ids=str)
def test_the_last_figures_are_the_statistics(edge, own):
    answer = Traced(edge, own)
    counts = ("uplink_bytes", "downlink_bytes", "drafted", "accepted", "windows", "tokens")
    figures, stats = answer.tale[-1]["figures"], answer.stats
    stats = {**stats, "tokens": 60, "passes": stats["cloud_passes"]}
    for count in (*counts, "passes"):
        assert figures[count] == stats[count], count
        told = [part["figures"][count] for part in answer.tale]
        assert told == sorted(told)
    assert (figures["credit"], figures["threshold"]) == (stats["credit"], stats["threshold"])
    if own != {"mode": "draft"}:
        assert figures["cloud_ms"] == 1.0
        assert figures["rtt_ms"] > 0
    if stats["drafted"]:  # auto may rest from the first token on
        assert figures["draft_ms"] > 0


def test_watching_sends_nothing_more_up(edge):
    plain = edge.post(body={**PLAIN, "e2sci": SYNC}).json()["e2sci"]["stats"][0]
    watched = Traced(edge, SYNC).stats
    assert watched["uplink_bytes"] == plain["uplink_bytes"]
    assert watched["downlink_bytes"] > plain["downlink_bytes"]


def test_notices_are_told_where_they_belong():
    tale = Tale(5.0, Figures("auto", True, 0))
    choice = Choice(2, 0, 0, SyntheticTokenizer(), scored=False, traced=True)
    piece = Piece("", [], notice="cloud is back", tale=tale)
    part = told(shapes(), choice, piece, [])
    assert (part["choice"], part["ms"], part["notice"]) == (2, 5.0, "cloud is back")
    assert "notice" not in told(shapes(), choice, Piece("", [], tale=tale), [])


def shapes():
    return Shapes("id", "model", True, SyntheticTokenizer(), 0, [])


# ---- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [*ALONE, SYNC], ids=str)
def test_a_whole_answer_tells_the_same(edge, own):
    stream, answer = Traced(edge, own), whole(edge, own)
    trace = answer["e2sci"]["trace"]
    assert answer["choices"][0]["message"]["content"] == stream.text()
    assert trace[-1]["figures"]["tokens"] == answer["usage"]["completion_tokens"] == 60
    for part in trace:
        assert part.keys() == stream.tale[0].keys()
    for name in LISTS:
        here, there = joined(trace, name), getattr(stream, name)
        if own in ALONE:  # else it depends on who was faster
            here, there = ([{**each, "ms": 0} for each in parts] for parts in (here, there))
            assert here == there
        else:
            assert here[0].keys() == there[0].keys()


@pytest.mark.parametrize("stream", [False, True])
def test_several_texts_each_tell_their_own(edge, stream):
    body = {"prompt": ["a", "b"], "n": 2, "seed": 3, "max_tokens": 12, "stream": stream}
    said = edge.post("/completions", body={**body, "e2sci": TRACE})
    plain = edge.post("/completions", body={**body, "stream": False}).json()
    if stream:
        lines = [line[6:] for line in said.text.splitlines() if line.startswith("data: {")]
        trace = [json.loads(line)["e2sci"] for line in lines if "e2sci" in json.loads(line)][:-1]
    else:
        trace = said.json()["e2sci"]["trace"]
    assert {part["choice"] for part in trace} == {0, 1, 2, 3}
    for i, choice in enumerate(plain["choices"]):
        data = b"".join(bytes(t["bytes"]) for t in joined(trace, "tokens", i))
        assert data.decode(errors="replace") == choice["text"]


@pytest.mark.parametrize("window", [1, 8])
def test_a_stop_string_cuts_the_text_and_not_the_tokens(edge, window):
    full = Traced(edge, {})
    stop = full.text()[20:24]
    answer = Traced(edge, {"window": window}, stop=stop, stream_options={"include_usage": True})
    text = answer.text()
    assert text == full.text()[: full.text().index(stop)]
    tokens = answer.tokens
    said = b"".join(bytes(t["bytes"]) for t in tokens).decode(errors="replace")
    assert text + stop in said
    assert stop not in b"".join(bytes(t["bytes"]) for t in tokens[:-1]).decode(errors="replace")
    assert len(tokens) == answer.chunks[-1]["usage"]["completion_tokens"]
    assert answer.tale[-1]["figures"]["tokens"] == len(tokens)


def test_scores_come_as_ever(edge):
    plain = whole(edge, {"trace": False}, logprobs=True, top_logprobs=3)
    traced = Traced(edge, {}, logprobs=True, top_logprobs=3)
    scored = [
        each
        for chunk in traced.chunks
        for choice in chunk["choices"]
        for each in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert scored == plain["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in scored] == [token["text"] for token in traced.tokens]


@pytest.mark.parametrize("own", [{}, {"trace": False}, {"trace": None}], ids=str)
def test_nothing_appears_unless_it_is_asked_for(edge, own):
    lines = edge.post(body={**PLAIN, "stream": True, "e2sci": own}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert all(chunk["choices"] for chunk in chunks)
    assert not any("e2sci" in chunk for chunk in chunks[:-1])
    ours = {"request_id", "seed", "notices", "stats"}
    assert chunks[-1]["e2sci"].keys() == ours == Traced(edge, {}).ending.keys()
    assert whole(edge, {"trace": False})["e2sci"].keys() == ours


def test_python_is_told_no_more_than_it_asks_for(one_cloud):
    with BlockingEdge(one_cloud.url, draft()) as python:
        for piece in python.stream("hello", max_tokens=20):
            assert piece.tale is None
            assert piece.text or piece.commits or piece.result or piece.notice
        result = python.generate("hello", max_tokens=20, tale=True)
        assert result.token_ids == python.generate("hello", max_tokens=20).token_ids


def test_openais_client_reads_a_traced_stream(edge):
    options = {"seed": 7, "max_tokens": 60}
    chunks = streamed(edge, extra_body={"e2sci": TRACE}, **options)
    assert text_of(chunks) == chat(edge, **options).choices[0].message.content
    parts = [chunk.e2sci for chunk in chunks[:-1] if hasattr(chunk, "e2sci")]
    assert joined(parts, "tokens")[0]["origin"] in ("agreed", "corrected", "filled")
