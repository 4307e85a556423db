"""The planner: known values, break-evens that are ones, advice, and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from e2sci.cli import main
from e2sci.decoding import yardsticks
from e2sci.emulation.device import DeviceProfile
from e2sci.emulation.link import LinkProfile
from e2sci.emulation.profile import PROFILES, Profile
from e2sci.evaluation import plan as planning
from e2sci.evaluation.plan import Plan, Speeds, plan
from e2sci.evaluation.plots import plot_plan
from test_inertia import trace_of

CPU = ((1, 47.0), (2, 93.0), (4, 172.0), (8, 329.0), (16, 471.0), (32, 936.0))


def profile(draft: float = 10, target: float = 50, rtt: float = 40, points: tuple = ()) -> Profile:
    return Profile(
        "made-up",
        DeviceProfile(((1, draft),)),
        DeviceProfile(points or ((1, target), (64, target))),
        LinkProfile(rtt),
        DeviceProfile(((1, 5.0),)),
    )


@pytest.fixture
def quick(monkeypatch):
    """Without the bound that takes a second: as if fill added nothing."""
    monkeypatch.setattr(
        planning,
        "best_schedule",
        lambda a, d, t, r: max(1000 / t(1), yardsticks.pipelined(a, d, t, r)),
    )


def test_known_speeds():
    made = plan(profile(), 0.9)
    assert made.speeds.cloud == 20
    assert made.speeds.sync == pytest.approx(1000 * (1 - 0.9**6) / 0.1 / 140)
    assert made.speeds.pipelined == pytest.approx(1000 / 19)
    assert made.speeds.pipelined_fill >= made.speeds.pipelined
    w = made.colocated_window
    assert made.speeds.colocated == pytest.approx(1000 * (1 - 0.9 ** (w + 1)) / 0.1 / (5 * w + 50))
    assert made.passes_per_token.cloud == 1
    assert made.passes_per_token.sync == pytest.approx(0.1 / (1 - 0.9**6))
    assert made.passes_per_token.pipelined == pytest.approx(1 / 5 + 0.1)


def test_the_best_window_is_the_best(quick):
    made = plan(profile(), 0.9)
    rates = [plan(profile(), 0.9, window=w).speeds.sync for w in range(1, 33)]
    assert made.speeds.sync_best == max(rates) == rates[made.best_window - 1]


def test_break_even_of_passes_that_take_the_same_at_any_size(quick):
    made = plan(profile(), 0.8)
    assert made.break_even.rtt_ms == pytest.approx(yardsticks.break_even_rtt(0.8, 10, 50), abs=0.1)
    # t_d + (1-α)(RTT + c) = c
    assert made.break_even.draft_ms == pytest.approx(50 - 0.2 * 90, abs=0.1)
    assert made.break_even.acceptance == pytest.approx(1 - 40 / 90, abs=0.001)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 0.99), st.floats(1, 80), st.floats(0, 200), st.sampled_from([(), CPU]))
def test_a_break_even_is_one(alpha, draft, rtt, points):
    made = planning._break_even(planning._world(profile(draft, 50, rtt, points), alpha, None, None))
    target = profile(points=points).target.ms

    def pays(a: float = alpha, d: float = draft, r: float = rtt) -> bool:
        return yardsticks.pipelined(a, d, target, r) > (1 + 1e-9) * 1000 / target(1)

    if made.rtt_ms is None:
        assert not pays(r=0)
    else:
        assert pays(r=made.rtt_ms - 0.2) or made.rtt_ms < 0.2
        assert not pays(r=made.rtt_ms + 0.1)
    if made.draft_ms is not None:
        assert not pays(d=made.draft_ms + 0.1)
        assert pays(d=max(0, made.draft_ms - 0.2))
    if made.acceptance is None:
        assert not pays(a=1)
    else:
        assert pays(a=min(1, made.acceptance + 0.001))
        assert not pays(a=made.acceptance - 0.002) or made.acceptance < 0.002


def test_a_perfect_draft_breaks_even_at_any_round_trip(quick):
    assert plan(profile(), 1.0).break_even.rtt_ms == planning.MOST_MS


def test_speculation_that_pays_is_recommended(quick):
    advice = plan(profile(), 0.9).advice
    assert (advice.mode, advice.window) == ("pipelined", 5)  # 5 drafts take a pass
    assert advice.lookahead == 5 + 9  # and 9 more fill round trip and pass
    assert advice.verdict.startswith("use --mode pipelined: about 2.6x the cloud alone")
    assert "with the draft in the cloud too, SD reaches 3.4x" in advice.verdict


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0, 0.999),
    st.floats(0.01, 1.1),
    st.floats(0, 100),
    st.lists(st.floats(1, 2), max_size=5),
)
def test_where_sync_pays_pipelined_is_faster(alpha, share, rtt, growth):
    ms = np.cumprod([50.0, *growth])
    points = tuple((2**i, float(t)) for i, t in enumerate(ms))
    world = planning._world(profile(50 * share, rtt=rtt, points=points), alpha, None, None)
    sync = world.sync(world.best_window)
    assert sync <= 1.0001 * max(world.pipelined, world.alone)


@pytest.mark.parametrize(
    ("changed", "alpha", "reason"),
    [
        ({"rtt": 180}, 0.8, "RTT 180 ms is beyond the break-even of 150 ms"),
        ({"draft": 60}, 0.9, "a draft token takes 60 ms, beyond the break-even of 41 ms"),
        ({"draft": 48, "target": 50, "rtt": 0}, 1.0, "speculation gains 4%, too little"),
        ({}, 0.0, "acceptance 0 is too low, 0.556 breaks even"),
    ],
)
def test_where_it_does_not_pay_it_says_so(quick, changed, alpha, reason):
    advice = plan(profile(**changed), alpha).advice
    assert advice.mode == "cloud"
    assert advice.window is advice.lookahead is None
    assert advice.verdict.startswith(f"{reason}: stream from the cloud alone")


def test_what_fill_adds_beyond_the_break_even_is_told():
    advice = plan(profile(rtt=180), 0.8).advice
    assert advice.mode == "cloud"
    assert "--mode pipelined with fill reaches at most 1." in advice.verdict


def test_a_cloud_whose_passes_grow():
    made = plan(profile(draft=33, points=CPU), 0.97)
    assert made.advice.window == 13  # the first whose pass, 418 ms, takes no longer than its drafts
    assert made.speeds.pipelined == made.speeds.pipelined_fill  # the tighter bound counts
    assert made.cloud_ms == 47


def test_own_values_replace_the_profiles(quick):
    one, other = plan(profile(), 0.9, rtt_ms=100, draft_ms=20), plan(profile(20, rtt=100), 0.9)
    assert one == other


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"acceptance": 1.1}, "acceptance is 1.1; expected 0 to 1"),
        ({"acceptance": float("nan")}, "acceptance is nan"),
        ({"rtt_ms": -1}, "round trip -1 ms"),
        ({"draft_ms": 0}, "draft 0 ms"),
        ({"window": 0}, "window is 0; expected 1 to 64"),
    ],
)
def test_values_out_of_range(given_, words):
    with pytest.raises(ValueError, match=words):
        plan(profile(), **{"acceptance": 0.9, **given_})


# ---- the command --------------------------------------------------------------------------


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["plan", *arguments])


@pytest.mark.parametrize("name", PROFILES)
def test_every_named_profile_has_a_plan(quick, name):
    out = invoke("--profile", name, "--json")
    assert out.exit_code == 0, out.output
    made = json.loads(out.output)
    assert set(made) == set(Plan.__struct_fields__)
    assert set(made["speeds"]) == set(Speeds.__struct_fields__)
    assert (made["profile"], made["rtt_ms"]) == (name, PROFILES[name].link.rtt_ms)


def test_text_gives_the_advice(quick):
    out = invoke("--profile", "lan", "--acceptance", "0.8")
    assert out.exit_code == 0, out.output
    assert "→ use --mode pipelined" in out.output
    assert "Recommended: --window 5 --lookahead 11" in out.output
    assert "RTT below 150 ms" in out.output
    assert "Recommended" not in invoke("--profile", "lan", "--acceptance", "0.1").output


def test_acceptance_comes_from_a_trace(quick, tmp_path):
    path = tmp_path / "a.jsonl"
    agreed, js = np.array([True, True, False, False]), np.array([0.5, 0.1, 0.1, 0.3])
    trace_of([agreed], js=[js]).save(path)
    for threshold, expected in ((None, 0.5), ("0", 0.5), ("0.2", 0.75)):
        extra = ["--threshold", threshold] if threshold else []
        out = invoke("--profile", "lan", "--trace", str(path), "--json", *extra)
        assert json.loads(out.output)["acceptance"] == expected


def test_the_figure_spans_four_round_trips(quick, tmp_path):
    made = plan(PROFILES["wan"], 0.9, draft_ms=20)
    curve = planning.over_rtt(made, PROFILES["wan"])
    assert (curve[0][0], curve[-1][0]) == (0, 400)
    assert (made.rtt_ms, made.speeds) in curve
    assert [speeds.cloud for _, speeds in curve] == [20] * len(curve)
    speeds = [s.pipelined for _, s in curve]
    assert speeds == sorted(speeds, reverse=True)
    for name in ("a.svg", "b.svg"):
        plot_plan(made, curve, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    out = invoke("--profile", "lan", "--plot", str(tmp_path / "c.png"), "--rtt", "0")
    assert out.exit_code == 0, out.output
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--profile", "lam"], "no profile 'lam'"),
        (["--profile", "lan", "--threshold", "0.2"], "add --trace"),
        (["--profile", "lan", "--trace", "a", "--acceptance", "0.2"], "either"),
        (["--profile", "lan", "--trace", "nowhere"], "can't read the trace nowhere"),
        (["--profile", "lan", "--rtt", "-3"], "round trip -3 ms"),
        (["--profile", "lan", "--plot", "x.pdf"], "should end in .png or .svg"),
        (["--profile", "lan", "--plot", "nowhere/x.svg"], "can't write nowhere/x.svg"),
    ],
)
def test_mistakes_are_one_line(quick, arguments, words):
    out = invoke(*arguments)
    assert out.exit_code == 2
    assert words in out.output
    assert out.output.count("\n") == 1
