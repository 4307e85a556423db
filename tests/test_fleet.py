"""Fleets: one user is one request, many are the same in any number of processes, and capacity is
what it says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from e2sci.cli import main
from e2sci.emulation.device import DeviceProfile
from e2sci.emulation.profile import PROFILES
from e2sci.evaluation.crowd import EngineRun, Load, Sample, Use, engine_run
from e2sci.evaluation.fleet import PRECISION, capacity, fleet, search, summary
from e2sci.evaluation.methods import SD_WINDOWS
from e2sci.evaluation.replay import Script, replay_pair
from e2sci.evaluation.traces import Trace
from e2sci.evaluation.world import write
from test_replay import FULL, made_trace

PAPER = PROFILES["paper"]
TRACE = made_trace(25, 12, 29, 18, 7, 22)


def one(load: Load, name: str, users: int = 1, index: int = 0) -> EngineRun:
    return engine_run(load, Script(load.trace), name, users, index)


# ---- one user -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cloud", "strict", "elastic@0.1", "sd"])
def test_one_user_alone_gets_what_one_request_gets(name):
    load = Load(made_trace(29), PAPER, seconds=20, think_s=3)
    draft, target = replay_pair(load.trace)
    alone = write(load.method(name), PAPER, draft, target, "#0", 29).result
    samples = one(load, name).samples
    assert len(samples) > 2
    for sample in samples:
        assert sample.tokens == len(alone.token_ids) == 28
        # Behind its first request the cloud knows a client's acceptance, and sizes passes by it.
        assert 0.9 * alone.stats.seconds <= sample.seconds <= alone.stats.seconds + 1e-6
    if name in ("cloud", "sd"):
        assert samples[0].seconds == pytest.approx(alone.stats.seconds, abs=1e-6)
        assert sample.ttft_s == pytest.approx(alone.stats.ttft_s, abs=1e-6)


def test_one_text_in_lock_step_takes_its_cycles():
    load = Load(made_trace(FULL, agree=1.0), PAPER, seconds=20, think_s=2)
    samples = one(load, "colocated").samples
    window = max(SD_WINDOWS)  # all agree
    first = PAPER.target.ms(5) + PAPER.colocated.ms(5)
    cycle = window * PAPER.colocated.ms(1) + PAPER.target.ms(window + 1)
    cycles = math.ceil((FULL - 1) / (window + 1))
    assert samples
    for sample in samples:
        assert sample.tokens == FULL
        assert 1000 * sample.ttft_s == pytest.approx(first + PAPER.link.rtt_ms)
        assert 1000 * sample.seconds == pytest.approx(first + cycles * cycle + PAPER.link.rtt_ms)


def test_in_lock_step_a_wrong_draft_costs_its_window():
    right, wrong = (
        one(Load(made_trace(FULL, agree=agree), PAPER), "colocated").samples for agree in (1.0, 0.0)
    )
    # Nothing agrees: a token a cycle, of two draft calls and a pass.
    cycle = min(SD_WINDOWS) * PAPER.colocated.ms(1) + PAPER.target.ms(3)
    assert 1000 * wrong[0].seconds == pytest.approx(55 + (FULL - 1) * cycle + 40)
    assert wrong[0].seconds > 5 * right[0].seconds


def test_in_lock_step_all_wait_for_all_drafts():
    dear = DeviceProfile(((1, 2.0), (11, 102.0)), per_token=10.0)
    load = Load(made_trace(FULL, agree=1.0), replace(PAPER, colocated=dear), seconds=2)
    use = one(load, "colocated", 12).use
    # Two calls for nearly all of 12 texts, and a pass; and what is used is used within 2 s.
    assert use.busy_s / use.passes > 0.2
    assert use.busy_s < 2.5


def test_credit_is_centred_as_calibration_centres_it():
    trace = made_trace(FULL, FULL, FULL)
    credit = Load(trace, PAPER).method("elastic").options["constants"]
    near = np.concatenate([r.agreed | (np.array(r.js) <= 0.1) for r in trace.requests]).mean()
    assert credit.tau == pytest.approx(near, abs=0.025)
    assert credit.tau == pytest.approx(20 * credit.tau // 1 / 20)  # in steps of .05
    assert abs(trace.acceptance() - near) > 0.1  # agreement lies below it
    with pytest.raises(ValueError, match="the trace holds no requests"):
        Load(Trace(trace.header), PAPER).method("elastic")


# ---- many ---------------------------------------------------------------------------------

NAMES = ["cloud", "colocated", "strict", "elastic"]


def test_the_same_in_any_number_of_processes():
    load = Load(TRACE, PROFILES["mobile"], seconds=4, think_s=0.5, seed=3)  # with jitter
    steps: list[None] = []
    here = fleet(load, NAMES, users=7, engines=2, advance=lambda: steps.append(None))
    assert len(steps) == 2 * len(NAMES)
    assert [f.method for f in here] == NAMES
    assert fleet(load, NAMES, users=7, engines=2, jobs=2) == here
    other = fleet(replace(load, seed=4), NAMES, users=7, engines=2)
    assert all(a != b for a, b in zip(here, other, strict=True))


def test_users_are_spread_evenly_and_differ_by_engine(monkeypatch):
    asked = []

    def run(load, script, name, users, index):
        asked.append((users, index))
        return EngineRun([Sample(1.0, 0.1, 10)], Use(10, 20, 2, 0.5))

    monkeypatch.setattr("e2sci.evaluation.fleet.engine_run", run)
    [figures] = fleet(Load(TRACE, PAPER, seconds=5), ["strict"], users=11, engines=3)
    assert sorted(asked) == [(3, 2), (4, 0), (4, 1)]
    assert (figures.users, figures.engines, figures.requests) == (11, 3, 3)
    assert figures.engine_tokens_per_s == 2.0  # of each
    assert figures.busy == pytest.approx(0.1)
    assert (figures.tokens_per_pass, figures.fed_per_pass) == (5.0, 10.0)
    monkeypatch.undo()
    asks = [[next(iter(Load(TRACE, PAPER).asks(k, user))) for user in range(5)] for k in range(2)]
    assert asks[0] != asks[1]


@pytest.mark.parametrize("name", NAMES)
def test_more_users_are_no_faster(name, monkeypatch):
    monkeypatch.setattr("e2sci.evaluation.crowd.WARM_UP_S", 2.0)
    load = Load(TRACE, PAPER, seconds=3)
    counts = (4, 16, 64)
    points = [summary(name, n, [one(load, name, n)], load.seconds) for n in counts]
    for few, many in pairwise(points):
        assert many.speed_95 <= 1.1 * few.speed_95
        assert many.engine_tokens_per_s >= 0.9 * few.engine_tokens_per_s
        assert many.busy >= 0.95 * few.busy
    assert points[-1].speed_95 < 0.8 * points[0].speed_95


def test_requests_are_measured_to_their_end_and_others_left_out():
    load = Load(made_trace(29), PAPER, seconds=0.5)
    run = one(load, "cloud", 8)
    # 29 tokens take 1.5 s: each user begins about a third of a request in .5 s.
    assert 1 <= len(run.samples) <= 8
    assert min(sample.seconds for sample in run.samples) > 1.4
    # Passes, tokens and time are those of half a second.
    assert run.use.busy_s <= 0.5 + PAPER.target.ms(32) / 1000
    assert 9 <= run.use.passes <= 11
    assert run.use.tokens <= 8 * 11


def test_think_time_leaves_the_engine_idle():
    busy, idle = (
        summary("cloud", 4, [one(Load(TRACE, PAPER, 20, think), "cloud", 4)], 20)
        for think in (0.0, 20.0)
    )
    assert busy.busy > 0.95
    assert idle.busy < 0.6
    assert idle.requests < busy.requests / 2


def test_the_figures_are_what_they_are_said_to_be():
    samples = [Sample(1.0, k / 1000, k) for k in range(1, 201)]
    figures = summary("strict", 9, [EngineRun(samples, Use(1, 1, 1, 1))], 10)
    for share, speed in ((0.95, figures.speed_95), (0.99, figures.speed_99)):
        assert sum(s.tokens >= speed for s in samples) / 200 >= share
        assert sum(s.tokens > speed + 1 for s in samples) / 200 < share
    assert sum(s.ttft_s <= figures.ttft_p99 for s in samples) / 200 >= 0.99
    assert figures.speed_p50 == pytest.approx(100)


# ---- capacity -----------------------------------------------------------------------------


@given(true=st.integers(0, 5000), most=st.integers(1, 4096))
def test_the_search_finds_the_last_number_that_does(true, most):
    tried = []
    asking = search(10.0, most)
    users = next(asking)
    try:
        while True:
            tried.append(users)
            users = asking.send(20.0 if users <= true else 5.0)
    except StopIteration as stop:
        found = stop.value
    within = min(true, most)
    assert found <= within <= found + max(1, PRECISION * found)
    if within < 50:
        assert found == within
    assert found == 0 or found in tried
    assert max(tried) <= most
    assert len(tried) < 24


def test_capacity_is_the_most_that_reach_the_target():
    load = Load(TRACE, PAPER, seconds=4, think_s=9.0)
    seen = []
    [cloud, colocated] = capacity(
        load, ["cloud", "colocated"], target=17.0, most=64, advance=seen.append
    )
    assert len(seen) == len(cloud.points) + len(colocated.points)
    for found in (cloud, colocated):
        assert found.point.users == found.users
        assert found.point.speed_95 >= 17.0
        above = [point for point in found.points if point.users > found.users]
        assert all(point.speed_95 < 17.0 for point in above)
        assert found.users == 64 or above
        assert [p.users for p in found.points] == sorted(p.users for p in found.points)
        # Busy users, whatever the load's think time.
        assert found.point.busy > 0.9


def test_a_target_out_of_reach_is_for_nobody():
    [found] = capacity(Load(TRACE, PAPER, seconds=4), ["cloud"], target=100.0)
    assert found.users == 0
    assert found.point is None


# ---- bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"seconds": 0}, "seconds is 0"), ({"think_s": -1}, "think time is -1")],
)
def test_loads_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        Load(TRACE, PAPER, **changes)


def test_what_cannot_be_simulated_is_said_before_it_starts():
    load = Load(TRACE, PAPER)
    with pytest.raises(ValueError, match="did you mean strict"):
        fleet(load, ["cloud", "strickt"], users=4)
    with pytest.raises(ValueError, match="draft uses no engine"):
        capacity(load, ["draft"])
    with pytest.raises(ValueError, match="2 edges on 3 engines"):
        fleet(load, ["cloud"], users=2, engines=3)
    with pytest.raises(ValueError, match="target is 0"):
        capacity(load, ["cloud"], target=0.0)


def test_nothing_measured_is_an_error():
    load = Load(made_trace(29), PAPER, seconds=0.01, think_s=1000.0)
    with pytest.raises(ValueError, match=r"no request was begun within 0.01 s"):
        fleet(load, ["cloud"], users=1)


def test_an_error_of_the_runtime_ends_the_run(monkeypatch):
    damaged = made_trace(9)
    damaged.requests[0].tokens[4] = 5  # in no sketch
    with pytest.raises(Exception, match="lacks the token 5"):
        one(Load(damaged, PAPER, seconds=3), "cloud", 2)


# ---- the command --------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "made-up.jsonl"
    TRACE.save(path)
    return path


def invoke(*arguments):
    return CliRunner().invoke(main, ["fleet", *map(str, arguments)])


def test_the_table_and_the_json_tell_the_same(file):
    common = ("--trace", file, "--edges", 6, "--engines", 2, "--seconds", 3, "--method", "strict")
    told = invoke(*common, "--json")
    assert told.exit_code == 0, told.output
    data = json.loads(told.stdout)
    assert (data["profile"], data["task"], data["seed"]) == ("paper", "made-up", 0)
    [figures] = data["methods"]
    assert (figures["method"], figures["users"], figures["engines"]) == ("strict", 6, 2)
    table = invoke(*common)
    assert f"{figures['speed_95']:.1f}" in table.stdout
    assert "raise --seconds" in table.stdout
    assert max(map(len, table.stdout.splitlines())) <= 100


def test_capacity_is_told_and_drawn(file, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "c.svg"
    arguments = ("--capacity", "--target", 19.9, "--seconds", 2, "--plot", picture)
    told = invoke("--trace", file, *arguments, "--method", "cloud", "--method", "colocated")
    assert told.exit_code == 0, told.output
    assert "the most of one engine with 19.9 tok/s" in told.stdout
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "--edges", "3"], "drop --edges"),
        (["--target", "5"], "go with --capacity"),
        (["--plot", "a.svg"], "go with --capacity"),
        (["--method", "elastik"], "did you mean elastic"),
        (["--edges", "2", "--engines", "3"], "2 edges on 3 engines"),
        (["--profile", "papre"], "there are paper"),
    ],
)
def test_mistakes_are_one_line(file, arguments, message):
    told = invoke("--trace", file, *arguments)
    assert told.exit_code == 2
    assert message in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1


def test_no_trace_is_one_line(tmp_path):
    told = invoke("--trace", tmp_path / "none.jsonl")
    assert told.exit_code == 2
    assert "can't read the trace" in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1
