"""Mode auto: what is chosen, that it pays, and that the user hears of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from e2sci.cli import main
from e2sci.emulation.clock import run
from e2sci.emulation.device import Device, DeviceProfile, Metered
from e2sci.emulation.link import LinkProfile
from e2sci.emulation.profile import PROFILES, Profile, from_dict
from e2sci.emulation.wire import LinkEnd, link_pair
from e2sci.engines.synthetic import Synthetic, SyntheticConfig
from e2sci.evaluation.methods import Setting, method
from e2sci.runtime.admission import TIMELESS
from e2sci.runtime.choice import MARGIN, Measured, Way, choose, estimate
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.edge import Edge, options_from
from e2sci.runtime.options import Options, Result
from e2sci.runtime.passes import PassTimes
from e2sci.server.openai_requests import DEFAULTS
from e2sci.session.edge import Origin
from live import LiveCloud
from world import DRAFT, World, opening

# ---- the choice, a pure function ----------------------------------------------------------


def flat(ms: float) -> PassTimes:
    return PassTimes(((1, ms), (32, ms)))


GROWING = PassTimes(((1, 47), (2, 93), (4, 172), (8, 329), (16, 471), (32, 936)))
measured = st.builds(
    Measured,
    draft_ms=st.floats(1, 100),
    rtt_ms=st.floats(0, 1000),
    acceptance=st.floats(0, 1),
    passes=st.floats(5, 200).map(flat) | st.just(GROWING),
    load=st.floats(0.5, 4),
)


@given(measured)
@settings(max_examples=60, deadline=None)
def test_the_fastest_is_never_expected_to_be_slower_than_the_cloud_alone(m: Measured) -> None:
    choice = choose(m)
    assert choice.best.ms <= m.pass_ms(1)
    assert choice.pays == (choice.cloud.ms > MARGIN * choice.draft.ms)


@given(measured)
@settings(max_examples=60, deadline=None)
def test_fill_is_never_expected_to_cost_time(m: Measured) -> None:
    filled, waiting = (estimate(m, Way("pipelined", fill, 1)).ms for fill in (True, False))
    assert filled <= min(waiting, m.pass_ms(1)) * (1 + 1e-9)


@given(measured, st.lists(st.floats(0, 20), min_size=2, max_size=4).map(sorted))
@settings(max_examples=60, deadline=None)
def test_the_more_the_cloud_is_worth_the_less_of_it_is_used(
    m: Measured, gammas: list[float]
) -> None:
    """By MARGIN, since below it the cloud alone is preferred."""
    chosen = [choose(m, gamma).best for gamma in gammas]
    for dear, cheap in zip(chosen[1:], chosen, strict=False):
        assert dear.cloud_ms <= MARGIN * cheap.cloud_ms * (1 + 1e-9)
        assert dear.ms * MARGIN >= cheap.ms * (1 - 1e-9)


@given(measured, st.floats(1.01, 3))
@settings(max_examples=60, deadline=None)
def test_better_circumstances_never_make_it_slower(m: Measured, factor: float) -> None:
    ms = choose(m).best.ms
    better = (
        replace(m, draft_ms=m.draft_ms / factor),
        replace(m, rtt_ms=m.rtt_ms / factor),
        replace(m, acceptance=min(1.0, m.acceptance * factor)),
    )
    for other in better:
        assert choose(other).best.ms <= MARGIN * ms * (1 + 1e-9)


def test_known_choices() -> None:
    paper = Measured(10, 40, 0.8, flat(50))
    assert [choose(paper, g).best.way.mode for g in (0, 1, 4)] == ["pipelined", "pipelined", "sync"]
    assert choose(paper).best.way == Way("pipelined", True, 1)
    assert not choose(paper, 1).best.way.fill
    assert not choose(replace(paper, draft_ms=60)).pays
    assert not choose(replace(paper, acceptance=0.1)).pays
    assert not choose(Measured(34, 40, 0.9, GROWING)).pays
    assert choose(paper, window=7).draft.way.window == 7
    assert choose(paper, 9, fill=True).draft.way.fill
    assert choose(replace(paper, draft_ms=2)).draft.way.window == 5  # a frame every 10 ms


# ---- an edge and a cloud on the virtual clock ---------------------------------------------

PAPER, LAN, WAN = PROFILES["paper"], PROFILES["lan"], PROFILES["wan"]
FAR = replace(PAPER, name="far", link=LinkProfile(500, up_mbps=1, down_mbps=1))


def with_draft(ms: float) -> Profile:
    return from_dict({**PAPER.to_dict(), "name": f"draft-{ms}", "draft": {"ms": ms}})


def drifted(divergence: float) -> SyntheticConfig:
    return SyntheticConfig(divergence=divergence, eos_bias=-9)


GOOD, MIDDLING, BAD = drifted(0.3), drifted(1.0), drifted(4.0)
WRONG = SyntheticConfig(random=True, eos_bias=-9)
AGAIN = 64  # tokens of warm-up


@dataclass
class Story:
    """Requests one after the other on one edge; `times`: of each token, in seconds."""

    results: list[Result]
    times: list[list[float]]

    def rate(self, request: int = -1, since: int = 0, until: int | None = None) -> float:
        times = self.times[request][since:until]
        return (len(times) - 1) / (times[-1] - times[0])


@dataclass
class Stage:
    """What a scene may change: the link and the devices."""

    end: LinkEnd
    at_edge: Device
    at_cloud: Device

    def far(self, rtt_ms: float) -> None:
        self.end._out._delay = self.end._back._delay = rtt_ms / 2e3


def play(
    profile: Profile,
    draft: SyntheticConfig,
    requests: int = 1,
    most: int = 300,
    scene: Callable[[Stage, int], None] | None = None,
    told: Profile | None = None,
    **changes: Any,
) -> Story:
    """`scene(stage, n)` is called behind token n; `told`: what the cloud says of itself."""

    async def bounded() -> Story:
        async with asyncio.timeout(3600):  # else pings would keep a deadlock going
            return await story()

    async def story() -> Story:
        engines = [Metered(Synthetic(c, 1)) for c in (draft, SyntheticConfig(eos_bias=-9))]
        devices = [Device(profile.draft, engines[0]), Device(profile.target, engines[1])]
        end, cloud_end = link_pair(profile.link)
        times = (told or profile).pass_times
        cloud = Cloud(engines[1], times=times, worker=devices[1], limits=TIMELESS)

        async def connect() -> LinkEnd:
            return end

        stage, story = Stage(end, *devices), Story([], [])
        async with cloud:
            serving = asyncio.create_task(cloud.serve(cloud_end))
            async with Edge(connect, engines[0], worker=devices[0]) as edge:
                for number in range(requests):
                    moments: list[float] = []
                    prompt = f"the cat {number}"
                    async for piece in edge.stream(prompt, max_tokens=most, **changes):
                        for _ in piece.commits:
                            moments.append(asyncio.get_running_loop().time())
                            if scene:
                                scene(stage, len(moments))
                        if piece.result:
                            story.results.append(piece.result)
                    story.times.append(moments)
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
        return story

    return run(bounded)


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
        if token == 330:  # in a rest of 128 tokens, which the pings cut short
            stage.far(2)

    both = {
        mode: play(LAN, BAD, most=450, scene=scene, mode=mode)
        for mode in ("auto", "cloud", "pipelined")
    }
    assert both["auto"].results[0].stats.drafted < both["pipelined"].results[0].stats.drafted
    for since, until in ((0, 100), (150, 330), (390, 450)):
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
