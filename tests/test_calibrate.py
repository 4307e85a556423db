"""Calibration: known optima, harmful thresholds, the network, the file, all on a tiny pair."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from e2sci.cli import calibrate as cli
from e2sci.cli import main
from e2sci.decoding.credit import CreditParams
from e2sci.decoding.distribution import TopK, decode, encode
from e2sci.decoding.divergence import divergence
from e2sci.decoding.predictor import NetworkPredictor
from e2sci.emulation.profile import profile
from e2sci.evaluation import calibrate as calibrating
from e2sci.evaluation import calibration as files
from e2sci.evaluation import follow, sweep, training
from e2sci.evaluation.calibrate import Asked, Order, calibrate
from e2sci.evaluation.calibration import Calibration, Check, Measured, shipped
from e2sci.evaluation.methods import elastic_credit
from e2sci.evaluation.pair import PairSpec
from e2sci.evaluation.recorder import Recorder, Recording
from e2sci.evaluation.records import Record
from e2sci.evaluation.sweep import MULTIPLES, SEGMENT, WINDOWS, Labels, Swept
from e2sci.evaluation.tasks import TASKS, Problem
from e2sci.evaluation.traces import RequestTrace, Trace, TraceHeader

PAPER = profile("paper")
HEADER = TraceHeader(draft="s", target="l", task="made up", first=0, last=9, max_tokens=400)
TARGET, DRAFT = "synthetic:seed=2", "synthetic:seed=2,divergence=1"


def sketched(*weights: float) -> bytes:
    return encode(TopK(np.array([1, 2]), np.log(weights), 10))


SURE = sketched(0.98, 0.015)
P_TORN, Q_TORN = sketched(0.6, 0.39), sketched(0.2, 0.79)
TORN = divergence("js", decode(P_TORN, 10), decode(Q_TORN, 10))  # JS where the draft differs


def request(agreed: list[bool], js: list[float] | None = None, row: int = 0) -> RequestTrace:
    """A request whose draft agrees where told. With `js` of its own it can't be replayed."""
    n = len(agreed)
    zeros = {name: [0.0] * n for name in ("js_fsd", "tv", "regret", "entropy", "target_entropy")}
    return RequestTrace(
        row=row,
        id=str(row),
        prompt_tokens=4,
        tokens=[1] * n,
        drafts=[1 if same else 2 for same in agreed],
        js=js or [0.0 if same else TORN for same in agreed],
        p=[SURE if same else P_TORN for same in agreed],
        q=[SURE if same else Q_TORN for same in agreed],
        correct=True,
        **zeros,
    )


def mixed(seed: int = 0, n: int = 120) -> RequestTrace:
    random = np.random.default_rng(seed)
    js = random.uniform(0, 0.4, n)
    return request((random.random(n) < 0.8).tolist(), js.tolist(), row=seed)


# ---- credit along a trace -----------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.sampled_from([0.0, 0.1, 0.3]))
def test_a_constant_threshold_accepts_what_the_trace_says(seed, t):
    made = mixed(seed)
    followed = follow.follow(made, CreditParams.constant(t))
    assert (followed.accepted == made.accepted(t)).all()
    assert (followed.thresholds == t).all()
    assert followed.ends.tolist() == list(range(5, 121, 5))
    shares = made.accepted(t).reshape(-1, 5).mean(1)
    r = 0.6  # τ of the defaults
    first = r + 0.3 * (shares[0] - r)
    assert followed.states[0] == pytest.approx([first, first - r])


def test_thresholds_follow_credit():
    good, bad = request([True] * 60), request([False] * 60, [0.5] * 60)
    params = elastic_credit(0.2, 0.5)
    assert follow.follow(good, params).thresholds[-1] == pytest.approx(0.35, abs=0.1)
    assert follow.follow(good, params).thresholds[-1] > 0.2
    assert follow.follow(bad, params).thresholds[-1] < 0.2


def test_the_matched_threshold_accepts_as_much_as_elastic():
    traces = [Trace(HEADER, [mixed(seed) for seed in range(4)])]
    params = elastic_credit(0.2, 0.8)
    constant, recorded = follow.used(traces, params)
    accepted = [follow.follow(r, params).accepted for r in traces[0].requests]
    assert traces[0].acceptance(constant) == pytest.approx(np.concatenate(accepted).mean())
    assert traces[0].acceptance(constant - 1e-6) < np.concatenate(accepted).mean()
    assert len(recorded) == 4 * 24
    assert params.t_min <= min(recorded) < max(recorded) <= params.t_max
    long = [Trace(HEADER, [mixed(seed, 700) for seed in range(5)])]
    assert len(follow.used(long, params)[1]) == files.MOST_RECORDED
    assert follow.matched([Trace(HEADER, [request([True] * 9)])], 9) == 0


# ---- the sweep ----------------------------------------------------------------------------


def swept(made: RequestTrace, t: float = 0.2) -> Swept:
    [found] = sweep.sweep([Trace(HEADER, [made])], PAPER, t, 0.9, jobs=0)
    return found


def test_a_perfect_draft_in_the_virtual_world():
    found = swept(request([True] * 80))
    assert len(found.states) == (80 - SEGMENT) // 5
    assert (found.lengths <= SEGMENT).all()
    assert found.lengths[:, :, 1:].mean() > 9
    assert (found.times == found.times[:, :1]).all()  # no threshold makes a difference
    rate = found.times[5:].mean() / SEGMENT
    assert 0.9 * PAPER.draft.ms(1) < rate < 15 < PAPER.target.ms(1)


def test_rejections_cost_time_unless_tolerated():
    found = swept(request([i % 10 != 7 for i in range(80)]), t=0.9 * TORN)
    tolerating = np.array(MULTIPLES) * 0.9 >= 1
    assert found.lengths[:, tolerating].mean() > found.lengths[:, ~tolerating].mean() + 0.5
    slow, fast = found.times[:, ~tolerating].mean(), found.times[:, tolerating].mean()
    assert slow > 1.3 * fast


def test_a_tolerated_end_leaves_the_rest_out():
    made = request([i != 40 for i in range(80)])
    ends = encode(TopK(np.array([1, 7]), np.log([0.2, 0.79]), 10))
    torn = encode(TopK(np.array([1, 7]), np.log([0.6, 0.39]), 10))
    made = msgspec.structs.replace(
        made,
        drafts=[7 if x == 2 else x for x in made.drafts[:-1]] + [7],
        tokens=[*made.tokens[:-1], 7],
        p=[*made.p[:40], torn, *made.p[41:-1], ends],
        q=[*made.q[:40], ends, *made.q[41:-1], ends],
    )
    found = swept(made, t=2 * TORN)
    assert len(found.states) == 6  # up to the end that is tolerated at 40, a segment in between
    assert np.isfinite(found.times).all()


# ---- labels -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_dinkelbach_finds_the_best_ratio(data):
    shape = (3, 4)
    lengths = data.draw(arrays.arrays(float, shape, elements=st.floats(0.5, 10)))
    times = data.draw(arrays.arrays(float, shape, elements=st.floats(1, 50)))
    allowed = data.draw(arrays.arrays(bool, shape))
    allowed[:, 0] = True
    chosen, ratio = sweep.dinkelbach(lengths, times, allowed)
    rows = range(3)
    choices = product(*([j for j in range(4) if allowed[i, j]] for i in rows))
    sums = ([sum(a[i, c[i]] for i in rows) for a in (lengths, times)] for c in choices)
    assert ratio == pytest.approx(max(length / time for length, time in sums))
    assert allowed[list(rows), chosen].all()


PARAMS = elastic_credit(0.2, 0.9)


@given(st.floats(0, 1), st.floats(0.06, 7.9))
def test_omega_gives_the_threshold_back(r, omega):
    t = PARAMS.t_base + PARAMS.a * omega * (r - PARAMS.tau)
    [found] = sweep.omega_of(np.array([t]), np.array([r]), PARAMS)
    assert found == pytest.approx(omega if abs(r - PARAMS.tau) >= 0.02 else 1.0)


def test_omega_stays_in_range():
    r = np.array([0.5, 0.5, 0.99, 0.99, 0.9])
    t = np.array([0.05, 0.35, 0.05, 9.0, 0.35])
    low, high = sweep.OMEGA
    found = sweep.omega_of(t, r, PARAMS)
    assert found == pytest.approx([0.15 / (0.3 * 0.4), low, low, high, 1.0])


def every(r: np.ndarray, t: np.ndarray) -> np.ndarray:
    return np.ones(np.broadcast_shapes(r.shape, t.shape))


def made_up(states: int = 400) -> Swept:
    """High credit: T pays and so does a large window. Low credit: a small window is best."""
    r = np.linspace(0.5, 1.0, states)
    shape = (states, len(MULTIPLES), len(WINDOWS))
    lengths = np.full(shape, 8.0) + np.array(MULTIPLES)[None, :, None]
    wide = np.arange(len(WINDOWS)) * np.where(r > 0.8, -6.0, 6.0)[:, None]
    times = np.broadcast_to(150.0 + wide[:, None], shape)
    return Swept(np.stack([r, np.zeros(states)], 1), lengths, times.copy())


def test_labels_have_the_known_optimum():
    found = sweep.labels([made_up()], every, 0.5, PARAMS)
    low, high = found.states[:, 0] < 0.6, found.states[:, 0] > 0.97
    assert (found.windows[low] == 2).all()
    assert (found.windows[high] == 16).all()
    t = PARAMS.t_base + PARAMS.a * found.omega * (found.states[:, 0] - PARAMS.tau)
    assert t[high] == pytest.approx(PARAMS.t_max)
    assert (found.omega[low] == sweep.OMEGA[0]).all()  # it would loosen there, which ω > 0 can't
    assert (found.accuracy == 1).all()


def test_labels_keep_the_accuracy():
    def harmful(r, t):
        return np.where(t > np.where(r > 0.8, 0.31, 0.11), 0.6, 0.98) + 0 * r

    found = sweep.labels([made_up()], harmful, 0.9, PARAMS)
    r = found.states[:, 0]
    t = PARAMS.t_base + PARAMS.a * found.omega * (r - PARAMS.tau)
    assert t[r > 0.96] == pytest.approx(0.3)
    assert t[r < 0.8] == pytest.approx(0.1)
    assert (found.accuracy == 0.98).all()
    nothing = sweep.labels([made_up()], lambda r, t: 0 * r + 0 * t, 0.9, PARAMS)
    assert nothing.omega[0] == pytest.approx(0.15 / (0.3 * 0.4))  # T_min: the tightest


def test_kept_share_follows_the_records():
    n = 90
    credit = np.linspace(0.6, 1.0, n)
    thresholds = np.tile([0.05, 0.1, 0.3], (n, 1))
    kept = np.ones((n, 3), bool)
    kept[:30, 2] = False  # loose hurts where credit is low
    share = follow.kept_share(credit, thresholds, kept)
    at = np.array([0.0, 0.05, 0.1, 0.2, 0.3, 0.5])
    low, high = (share(np.full(6, r), at) for r in (0.62, 0.98))
    assert low[0] == high[0] == 1
    assert (np.diff(low) <= 0).all()
    assert (np.diff(high) <= 0).all()
    assert low[4] == low[5] < 0.35
    assert high[4] > 0.85
    assert low[2] > low[3] > low[4]
    assert share(np.array([[0.62], [0.98]]), at[None]).shape == (2, 6)


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


# ---- the network --------------------------------------------------------------------------


def some_labels() -> Labels:
    random = np.random.default_rng(0)
    r = random.uniform(0.5, 1, 300)
    return Labels(
        states=np.stack([r, random.normal(0, 0.05, 300)], 1),
        omega=np.where(r > 0.8, 2.0, 0.5),
        windows=np.where(r > 0.8, 16.0, 3.0),
        accuracy=np.clip(r, 0, 0.97),
        goodput=0.06,
        window=4,
    )


@lru_cache
def fitted():
    return training.fit(some_labels())


@lru_cache
def weights() -> bytes:
    return training.exported(fitted())


def test_the_exported_network_is_the_trained_one():
    network = NetworkPredictor.parse(weights())
    for state in some_labels().states[:50]:
        omega, width, accuracy = fitted().predict(state[None])[0]
        found = network(*state)
        assert found.omega == pytest.approx(np.log1p(np.exp(omega)), rel=1e-3)
        assert abs(found.window - (2 + 14 / (1 + np.exp(-width)))) <= 0.5 + 1e-3
        assert found.accuracy == pytest.approx(1 / (1 + np.exp(-accuracy)), abs=1e-4)


def test_the_network_learns_its_labels_the_same_every_time():
    network = NetworkPredictor.parse(weights())
    good, poor = network(0.95, 0.0), network(0.6, 0.0)
    assert (good.window, poor.window) == (16, 3)
    assert (good.omega, poor.omega) == pytest.approx((2.0, 0.5), rel=0.1)
    assert (good.accuracy, poor.accuracy) == pytest.approx((0.95, 0.6), abs=0.03)
    assert weights() == training.exported(training.fit(some_labels()))


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


# ---- the file -----------------------------------------------------------------------------


def row(**changed) -> Measured:
    given = {
        "method": "elastic@0.1",
        "threshold": 0.1,
        "accuracy": 0.5,
        "difference": -0.1,
        "low": -0.3,
        "high": 0.1,
        "lost": 2,
        "gained": 1,
        "tokens_per_s": 50.0,
        "speedup": 2.5,
        "acceptance": 0.9,
        "mean_tokens": 100.0,
        "keeps": True,
        **changed,
    }
    return Measured(**given)


def calibration(**changed) -> Calibration:
    given = {
        "draft": "s@1",
        "target": "l@2",
        "tasks": ["gsm8k"],
        "first": 0,
        "last": 9,
        "max_tokens": 400,
        "profile": "paper",
        "delta": 0.01,
        "tau": 0.92,
        "thresholds": {"elastic": 0.1},
        "window": 4,
        "matched": 0.11,
        "recorded": [0.1, 0.12],
        "measured": {"elastic": [row()]},
        "check": Check(passed=True, verdict="fine"),
        "predictor": weights(),
        "command": "e2sci calibrate",
        **changed,
    }
    return Calibration(**given)


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
