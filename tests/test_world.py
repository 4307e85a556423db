"""One runtime on two clocks: virtual runs are exact, repeatable, and every method is itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from e2sci.emulation.link import LinkProfile
from e2sci.emulation.profile import PROFILES, Profile
from e2sci.engines.synthetic import Synthetic, SyntheticConfig
from e2sci.evaluation.methods import NAMES, Setting, expanded, method
from e2sci.evaluation.world import Outcome, write

PAPER = PROFILES["paper"]
PROMPT = "the cat and the dog"


def run(
    name: str,
    profile: Profile = PAPER,
    *,
    draft: SyntheticConfig | None = None,
    most: int = 80,
    options: dict[str, Any] | None = None,
) -> Outcome:
    target = Synthetic(SyntheticConfig(eos_bias=-9), 1)
    helper = Synthetic(draft or SyntheticConfig(divergence=1.0, eos_bias=-9), 1)
    chosen = method(name, Setting(profile))
    chosen = replace(chosen, options={**chosen.options, **(options or {})})
    return write(chosen, profile, helper, target, PROMPT, most)


def test_the_cloud_alone_takes_its_passes_and_one_round_trip() -> None:
    stats = run("cloud").result.stats
    assert stats.decode_tokens_per_s == pytest.approx(20, rel=0.01)
    assert stats.ttft_s == pytest.approx(0.04 + 0.05, abs=0.002)


def test_the_draft_alone_needs_no_cloud() -> None:
    outcome = run("draft")
    assert outcome.result.stats.decode_tokens_per_s == pytest.approx(100, rel=0.01)
    assert outcome.cloud_busy_s == 0
    assert outcome.result.stats.uplink_bytes == 0


def test_synchronous_speculation_is_the_formula() -> None:
    """With a draft that is always right every cycle is W drafts, a round trip, a pass."""
    same = SyntheticConfig(eos_bias=-9)
    stats = run("sd-w7", draft=same, most=81).result.stats
    cycle = 7 * 10 + 40 + 50  # 8 tokens
    assert stats.decode_tokens_per_s == pytest.approx(8000 / cycle, rel=0.03)


def test_colocated_speculation_pays_the_network_once() -> None:
    same = SyntheticConfig(eos_bias=-9)
    outcome = run("colocated", draft=same, most=60)
    stats = outcome.result.stats
    assert stats.decode_tokens_per_s == pytest.approx(6000 / (5 * 5 + 50), rel=0.05)
    assert stats.ttft_s is not None
    assert stats.ttft_s >= 0.04 + 0.05
    assert 50 < stats.uplink_bytes < 200  # only the opening, with the prompt
    assert run("sd").result.stats.uplink_bytes > stats.uplink_bytes + 100
    assert outcome.edge_busy_s == 0


LOSSLESS = ("cloud", "colocated", "sd", "sd-w2", "sd-w16", "pearl", "amusd", "strict")


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_lossless_methods_write_the_targets_text(profile: str) -> None:
    names = (*LOSSLESS, "strict-no-fill", "elastic-no-threshold", "fsd@0")
    texts = {name: run(name, PROFILES[profile]).result.token_ids for name in names}
    assert len(texts["cloud"]) > 50
    for name in names:
        assert texts[name] == texts["cloud"], name


@pytest.mark.parametrize("name", [n for n in NAMES if n != "sd-best"])
def test_two_runs_are_the_same_to_the_last_digit(name: str) -> None:
    once, again = run(name), run(name)
    assert once == again
    assert len(once.result.token_ids) > 20


def test_a_constant_threshold_gives_one_text_at_any_window() -> None:
    """Pipelined and without fill: FSD's rule and elastic's agree, whatever the window."""
    name, given = "elastic-no-history@0.1", {"fill": False}
    wide = run(name, options={**given, "window": 9}).result.token_ids
    assert wide == run(name, options={**given, "window": 2}).result.token_ids
    assert wide != run("cloud").result.token_ids
    fuzzy = run("fsd@0.1", options={**given, "mode": "pipelined"}).result.token_ids
    assert wide == fuzzy


FAR = replace(PAPER, name="far", link=LinkProfile(500, up_mbps=1, down_mbps=1))


@pytest.mark.parametrize("profile", [*PROFILES.values(), FAR], ids=lambda p: p.name)
@pytest.mark.parametrize("name", ["strict", "elastic"])
def test_with_fill_a_draft_that_is_always_wrong_costs_little(profile: Profile, name: str) -> None:
    """Within 3 % of the cloud alone on any link, a round trip of half a second included."""
    wrong = SyntheticConfig(random=True)
    alone = run("cloud", profile, draft=wrong, most=200).result.stats
    ours = run(name, profile, draft=wrong, most=200).result.stats
    assert ours.decode_tokens_per_s >= 0.97 * alone.decode_tokens_per_s


def test_overlap_pays_and_prehit_saves() -> None:
    strict, sd = (run(name).result.stats.tokens_per_s for name in ("strict", "sd"))
    assert strict > 1.2 * sd
    passes = {n: run(n).result.stats.cloud_passes for n in ("elastic", "elastic-no-prehit")}
    assert run("elastic").result.token_ids == run("elastic-no-prehit").result.token_ids
    assert passes["elastic"] <= passes["elastic-no-prehit"]


def test_joules_are_watts_times_seconds() -> None:
    outcome = run("strict")
    seconds = outcome.result.stats.seconds
    idle = seconds - outcome.edge_busy_s
    assert outcome.edge_joules == pytest.approx(15 * outcome.edge_busy_s + 5 * idle, rel=0.01)
    assert outcome.cloud_joules == pytest.approx(300 * outcome.cloud_busy_s)


# ---- names --------------------------------------------------------------------------------


def test_sd_best_runs_every_window() -> None:
    assert expanded(["sd-best", "sd", "cloud"])[:4] == ["sd-w2", "sd-w3", "sd-w4", "sd"]
    assert expanded(["sd", "sd"]) == ["sd"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("elastik", "elastic"),
        ("sd-w65", "no method"),
        ("strict@0.1", "no threshold"),
        ("fsd@1.2.3", "in nats"),
        ("fsd@", "no method"),
        ("elastic-no-credit", "elastic-no"),
        ("", "no method"),
    ],
)
def test_unknown_methods_name_the_nearest(name: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        method(name, Setting(PAPER))


def test_variants_change_what_they_say() -> None:
    def credit(name: str):  # type: ignore[no-untyped-def]
        return method(name, Setting(PAPER, tau=0.8, matched=0.07)).options["constants"]

    assert credit("elastic@0.1").t_base == 0.1
    assert credit("elastic@0.1").t_max == pytest.approx(0.175)
    assert credit("elastic").tau == 0.8
    assert credit("elastic-k10").history == 10
    assert credit("elastic-observed").source == "observed"
    assert not credit("elastic-no-history").elastic
    assert credit("elastic-no-history").t_base == 0.07
    assert credit("elastic-no-threshold").t_max == 0
    assert method("elastic-regret", Setting(PAPER)).options["measure"] == "regret"
    assert method("fsd-released", Setting(PAPER)).options["measure"] == "js_fsd"
