"""Mode auto: what is chosen, that it pays, and that the user hears of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import click
import pytest
from click.testing import CliRunner

from e2sci.cli import main
from e2sci.emulation.device import Device, DeviceProfile
from e2sci.emulation.profile import PROFILES, from_dict
from e2sci.evaluation.methods import Setting, method
from e2sci.runtime.edge import options_from
from e2sci.runtime.options import Options
from e2sci.server.openai_requests import DEFAULTS
from e2sci.session.edge import Origin
from live import LiveCloud
from stage import (
    AGAIN,
    BAD,
    FAR,
    GOOD,
    LAN,
    MIDDLING,
    PAPER,
    WAN,
    WRONG,
    Stage,
    Story,
    drifted,
    play,
    with_draft,
)
from world import DRAFT, World, opening

# ---- an edge and a cloud on the virtual clock ---------------------------------------------

CONDITIONS = {
    "good, lan": (LAN, GOOD),
    "good, wan": (WAN, GOOD),
    "middling, paper": (PAPER, MIDDLING),
    "middling, mobile": (PROFILES["mobile"], MIDDLING),
    "middling, slow edge": (PROFILES["slow-edge"], MIDDLING),
    "middling, fast cloud": (PROFILES["fast-cloud"], MIDDLING),
    "bad, paper": (PAPER, BAD),
    "bad, wan": (WAN, BAD),
    "always wrong": (PAPER, WRONG),
    "slower than the target": (with_draft(70), GOOD),
    "half a second away": (FAR, MIDDLING),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_as_fast_as_the_best_fixed_mode(name: str) -> None:
    profile, draft = CONDITIONS[name]
    auto = play(profile, draft, mode="auto")
    fixed = {mode: play(profile, draft, mode=mode) for mode in ("cloud", "sync", "pipelined")}
    assert auto.results[0].token_ids == fixed["cloud"].results[0].token_ids
    best = max(story.rate(since=AGAIN) for story in fixed.values())
    assert auto.rate(since=AGAIN) >= 0.97 * best
    assert auto.rate() >= 0.95 * fixed["cloud"].rate()


SAVED = {"lan": (LAN, GOOD), "wan": (WAN, GOOD), "paper": (PAPER, MIDDLING)}


@pytest.mark.parametrize("name", SAVED)
def test_the_more_the_cloud_is_worth_the_fewer_its_passes(name: str) -> None:
    """Once the edge knows its draft: in its second request."""
    profile, draft = SAVED[name]
    passes = []
    for gamma in (0, 1, 4):
        result = play(profile, draft, requests=2, most=150, mode="auto", gamma=gamma).results[1]
        passes.append(result.stats.cloud_passes)
    assert passes[0] >= passes[1] >= passes[2]
    assert passes[0] > 1.5 * passes[2]


@cache
def wrong() -> Story:
    return play(PAPER, WRONG, requests=3, mode="auto")


def test_a_draft_that_is_always_wrong_rests_ever_longer() -> None:
    """Two trials of 32 tokens behind rests of 32 and 64 in the first 300, then fewer."""
    first, *_, last = (result.stats for result in wrong().results)
    plain = play(PAPER, WRONG, mode="pipelined").results[0].stats
    assert first.drafted < 0.5 * plain.drafted
    assert last.drafted < 0.35 * first.drafted
    assert last.uplink_bytes < 0.5 * plain.uplink_bytes
    assert [result.stats.mode for result in wrong().results] == ["cloud"] * 3


def test_the_user_hears_of_it_once() -> None:
    notices = [result.notices for result in wrong().results]
    assert len(notices[0]) == 1
    assert "does not pay here, at" in notices[0][0]
    assert notices[0][0].endswith("the cloud goes on alone")
    assert notices[1:] == [[], []]
    [slow] = play(with_draft(70), GOOD, most=60, mode="auto").results[0].notices
    assert "a draft token takes 70 ms, a token of the cloud 50" in slow
    good = play(PAPER, GOOD, most=100, mode="auto").results[0]
    assert good.notices == []
    assert good.stats.mode == "pipelined"


def test_what_is_learnt_outlives_a_request() -> None:
    """The second one is opened without fill, since by then saving passes is known to pay."""
    bad = play(PAPER, BAD, requests=2, most=100, mode="auto", gamma=0.5)
    assert {commit.origin for commit in bad.results[1].commits} & {Origin.FILLED}
    good = play(PAPER, GOOD, requests=2, most=100, mode="auto", gamma=1.0)
    assert Origin.FILLED not in {c.origin for c in good.results[1].commits if c.position > 30}


@pytest.mark.parametrize("gamma", [1.0, 4.0])
def test_without_fill_too_the_cloud_can_go_on_alone(gamma: float) -> None:
    """The trial costs time there; then it is plain streaming, with the target's own text."""
    story = play(PAPER, WRONG, most=200, mode="auto", gamma=gamma)
    cloud = play(PAPER, WRONG, most=200, mode="cloud")
    assert story.results[0].token_ids == cloud.results[0].token_ids
    assert story.results[0].stats.mode == "cloud"
    fastest = max(story.rate(since=n, until=n + 16) for n in range(20, 180))
    assert fastest >= 0.99 * cloud.rate()
    assert story.rate() < cloud.rate()


# ---- what changes on the way --------------------------------------------------------------


def test_a_link_that_gets_far_and_near_again() -> None:
    def scene(stage: Stage, token: int) -> None:
        if token == 100:
            stage.far(1000)
        if token == 250:  # in a rest of 128 tokens, which the pings cut short
            stage.far(2)

    both = {
        mode: play(LAN, BAD, most=450, scene=scene, mode=mode)
        for mode in ("auto", "cloud", "pipelined")
    }
    assert both["auto"].results[0].stats.drafted < both["pipelined"].results[0].stats.drafted
    for since, until in ((0, 100), (150, 250), (320, 450)):
        rates = {mode: story.rate(since=since, until=until) for mode, story in both.items()}
        assert rates["auto"] >= 0.95 * max(rates.values()), (since, until)
    first, second = both["auto"].results[0].notices
    assert first.endswith("the cloud goes on alone")
    assert second == "speculation pays again: drafting goes on"


def test_a_draft_that_becomes_slow() -> None:
    def scene(stage: Stage, token: int) -> None:
        if token == 100:
            stage.at_edge.profile = with_draft(80).draft

    story = play(PAPER, GOOD, scene=scene, mode="auto")
    [notice] = story.results[0].notices
    assert "a draft token takes" in notice
    assert story.rate(since=150) == pytest.approx(20, rel=0.02)


def test_a_cloud_that_is_busier_than_it_says() -> None:
    """A draft token of 70 ms doesn't pay by what the cloud says of itself, and does in truth."""
    busy = from_dict({**with_draft(70).to_dict(), "target": {"ms": 200}})
    story = play(busy, GOOD, told=with_draft(70), mode="auto")
    plain = play(busy, GOOD, told=with_draft(70), mode="pipelined")
    assert story.rate(since=100) >= 0.97 * plain.rate(since=100) > 1.3 * 5
    assert story.results[0].notices[-1] == "speculation pays again: drafting goes on"


@dataclass
class Shared:
    """The cloud's device on the edge's own machine: slower while the edge drafts."""

    alone: DeviceProfile
    edge: Device

    def ms(self, tokens: int) -> float:
        return self.alone.ms(tokens) * (1.0 if self.edge._running is None else 1.7)


def test_two_models_that_slow_each_other_down() -> None:
    """Which no estimate knows: only the clock tells that drafting doesn't pay."""
    points = [[1, 50], [2, 80], [4, 300], [8, 600], [32, 2000]]
    named = {"name": "both here", "draft": {"ms": 30}, "target": {"points": points}}
    here = from_dict({**LAN.to_dict(), **named})

    def scene(stage: Stage, token: int) -> None:
        if token == 1:
            stage.at_cloud.profile = Shared(here.target, stage.at_edge)  # type: ignore[assignment]

    both = {mode: play(here, drifted(0.1), scene=scene, mode=mode) for mode in ("auto", "cloud")}
    plain = play(here, drifted(0.1), scene=scene, mode="pipelined")
    assert plain.rate() < 0.8 * both["cloud"].rate()
    assert both["auto"].rate(since=AGAIN) >= 0.95 * both["cloud"].rate()
    assert both["auto"].rate() >= 0.9 * both["cloud"].rate()
    assert "a token takes" in both["auto"].results[0].notices[0]


# ---- rest, in any order of events ---------------------------------------------------------


class Restless(World):
    """An edge that rests and goes on whenever chance has it."""

    def _possible(self) -> list[Callable[[], None]]:
        events = super()._possible()
        if self.cloud.by_itself and self.passing is None and not self.cloud.finished:
            events.append(self._fill)
        if events and not self.edge.finished and self.random.random() < 0.1:
            events.append(self._turn)
        return events

    def _kill(self) -> None:
        super()._kill()
        if self.edge.resting:
            self._send_up(self.edge.rest())

    def _turn(self) -> None:
        if self.edge.resting:
            self.edge.resting = False
        else:
            self._send_up(self.edge.rest())


@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("fill", [True, False])
def test_rests_change_nothing_in_the_text(fill: bool, lookahead: bool) -> None:
    plain = World(opening(drafting=False, fill=True), Random(1)).run().output
    for seed in range(60):
        asked = opening(fill=fill, lookahead=lookahead)
        kill_at = 6 if seed % 2 else None
        played = Restless(asked, Random(seed), draft=DRAFT, kill_at=kill_at).run()
        assert played.output == plain


def test_a_rest_survives_the_loss_of_the_cloud() -> None:
    """The new cloud isn't told by the opening, and would wait for drafts for ever."""
    session = Restless(opening(fill=False), Random(1), draft=DRAFT)
    session._start()
    [word] = session.edge.rest()
    assert word.ids == b""
    session.edge.lost()
    assert session.edge.rest() == []  # nobody to tell
    assert session.edge.wants_draft  # alone, it may draft
    session.edge.reopen(2)
    assert not session.edge.wants_draft
    assert session.edge.rest()[-1].request == 2


# ---- the command line ---------------------------------------------------------------------


def test_it_is_what_one_gets_who_asks_for_nothing() -> None:
    assert Options().mode == DEFAULTS.mode == "auto"
    with click.Context(main) as ctx:
        for name in ("run", "chat", "serve"):
            [mode] = [p for p in main.get_command(ctx, name).params if p.name == "mode"]
            assert mode.default == "auto"


def test_the_command_line(cloud: LiveCloud) -> None:
    asked = ["run", "hello", "--cloud", cloud.url, "--draft", "synthetic:seed=11", "--json"]
    done = CliRunner().invoke(main, [*asked, "--gamma", "1"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["stats"]["mode"] in ("cloud", "sync", "pipelined")
    alone = CliRunner().invoke(main, [*asked, "--mode", "cloud"])
    assert said["token_ids"] == json.loads(alone.stdout)["token_ids"]


def test_gamma_without_auto_is_refused() -> None:
    done = CliRunner().invoke(main, ["run", "hello", "--mode", "sync", "--gamma", "1"])
    assert done.exit_code == 2
    assert "drop gamma, or use mode auto" in done.output


# ---- bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "pipelined", "gamma": 1}, "use mode auto"),
        ({"mode": "auto", "gamma": -1}, "0 or more"),
        ({"mode": "auto", "gamma": float("inf")}, "0 or more"),
        ({"mode": "auto", "gamma": float("nan")}, "0 or more"),
    ],
)
def test_options_that_can_not_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options_from(Options(), changes)


def test_the_names_of_the_method() -> None:
    assert dict(method("auto", Setting(PAPER)).options) == {"mode": "auto", "gamma": 0.0}
    assert method("auto@0.5", Setting(PAPER)).options["gamma"] == 0.5
    with pytest.raises(ValueError, match="γ"):
        method("auto@1.2.3", Setting(PAPER))
