"""What must hold whatever the network, the speeds and the windows are."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2sci.decoding.acceptance import RuleParams
from e2sci.decoding.credit import CreditParams
from e2sci.decoding.sampling import SamplingParams, pick
from e2sci.engines.base import Step
from e2sci.engines.synthetic import Synthetic
from e2sci.session.edge import Origin
from world import DRAFT, RANDOM, REAL_VOCAB, SAME, World, alone, opening

GREEDY = SamplingParams()
seeds = st.integers(0, 2**32)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**60),
)
shapes = st.fixed_dictionaries(
    {
        "window": st.integers(1, 16),
        "most": st.sampled_from([1, 4, 16, 64]),
        "budget": st.sampled_from([1, 2, 5, 64]),
        "fill_chance": st.sampled_from([0.0, 0.2, 0.9]),
        "doubt": st.sampled_from([0.0, 0.5, 1.0]),
    }
)


@settings(max_examples=60, deadline=None)
@given(seeds, samplings, shapes, st.booleans(), st.booleans())
def test_strict_text_is_the_targets(seed, sampling, shape, lookahead, fill):
    ask = opening(sampling=sampling, lookahead=lookahead, fill=fill)
    outcome = World(ask, Random(seed), draft=DRAFT, **shape).run()
    assert outcome.output == alone(ask)


@settings(max_examples=30, deadline=None)
@given(seeds, samplings, shapes, st.booleans(), st.booleans())
def test_identical_draft_is_accepted_throughout(seed, sampling, shape, lookahead, fill):
    ask = opening(sampling=sampling, lookahead=lookahead, fill=fill)
    outcome = World(ask, Random(seed), draft=SAME, **shape).run()
    assert outcome.output == alone(ask)
    assert outcome.edge.stats.corrections == 0
    assert all(c.origin in (Origin.AGREED, Origin.FILLED) for c in outcome.commits)


@settings(max_examples=30, deadline=None)
@given(seeds, samplings, shapes, st.booleans(), st.booleans())
def test_adversarial_draft_changes_nothing(seed, sampling, shape, lookahead, uniform):
    ask = opening(sampling=sampling, lookahead=lookahead, fill=False)
    noise = Random(seed + 1)
    mangle = (lambda position: noise.randrange(REAL_VOCAB)) if uniform else None
    outcome = World(ask, Random(seed), draft=RANDOM, mangle=mangle, **shape).run()
    assert outcome.output == alone(ask)


@settings(max_examples=60, deadline=None)
@given(
    seeds,
    shapes,
    st.booleans(),
    st.sampled_from(["strict", "rejection", "fuzzy", "elastic", "typical"]),
)
def test_commits_are_contiguous_and_final(seed, shape, fill, rule):
    sampling = SamplingParams(temperature=0.8, seed=seed)
    ask = opening(rule=RuleParams(name=rule), sampling=sampling, fill=fill)
    outcome = World(ask, Random(seed), draft=DRAFT, **shape).run()
    start = len(outcome.edge.committed) - len(outcome.edge.output)
    assert [c.position for c in outcome.commits] == list(
        range(start, start + len(outcome.edge.output))
    )
    assert [c.token for c in outcome.commits] == outcome.edge.output
    assert outcome.cloud.tokens.tokens == outcome.edge.committed


@pytest.mark.parametrize("rule", ["strict", "elastic", "fuzzy", "rejection", "typical"])
def test_a_connection_killed_at_any_message_gives_the_same_text(rule):
    sampling = SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.1)
    ask = opening(rule=RuleParams(name=rule), sampling=sampling, fill=False)
    whole = World(ask, Random(1), draft=DRAFT).run()
    for kill_at in range(1, 60):
        killed = World(ask, Random(kill_at), draft=DRAFT, kill_at=kill_at).run()
        assert killed.output == whole.output, kill_at


@settings(max_examples=30, deadline=None)
@given(seeds, shapes, st.integers(1, 50))
def test_strict_survives_a_kill_while_filling(seed, shape, kill_at):
    ask = opening(sampling=SamplingParams(temperature=1.0, seed=3), fill=True)
    outcome = World(ask, Random(seed), draft=DRAFT, kill_at=kill_at, **shape).run()
    assert outcome.output == alone(ask)


@settings(max_examples=30, deadline=None)
@given(seeds, shapes, st.sampled_from([0.02, 0.1, 0.3]), st.sampled_from([0.0, 0.8]))
def test_constant_elastic_is_fuzzy_with_agreement(seed, shape, threshold, temperature):
    credit = CreditParams.constant(threshold)
    sampling = SamplingParams(temperature=temperature, seed=seed)

    def run(name: str, agreement: bool | None):
        rule = RuleParams(name=name, agreement=agreement)
        ask = opening(rule=rule, sampling=sampling, credit=credit, fill=False)
        return World(ask, Random(seed), draft=DRAFT, **shape).run()

    elastic, fuzzy, published = run("elastic", None), run("fuzzy", True), run("fuzzy", None)
    assert elastic.output == fuzzy.output == published.output
    assert elastic.edge.stats.corrections <= published.edge.stats.corrections


@settings(max_examples=25, deadline=None)
@given(seeds, shapes)
def test_elastic_text_does_not_depend_on_timing(seed, shape):
    """Without fill, credit follows positions and so does T, hence the text."""
    rule = RuleParams(name="elastic", measure="regret")
    ask = opening(rule=rule, fill=False, max_tokens=60)
    first = World(ask, Random(1), draft=DRAFT).run()
    assert World(ask, Random(seed), draft=DRAFT, **shape).run().output == first.output


@settings(max_examples=25, deadline=None)
@given(seeds, shapes, st.booleans(), st.sampled_from([None, 7, 23]))
def test_the_drafts_cache_always_holds_the_line(seed, shape, fill, kill_at):
    """After any cut, fill or resume the draft proposes what it would on a cache made anew: nothing
    else would show a cache that is wrong, as it only costs acceptance."""

    class Checked(World):
        def _end_draft(self) -> None:
            job = self.job
            assert job is not None
            fresh = Synthetic(DRAFT.config)
            [[q]] = fresh.forward([Step(0, job.history.tokens)])
            expected = pick(q.limited(REAL_VOCAB), self.opening.sampling, job.history)
            before = len(self.edge.tail)
            super()._end_draft()
            if len(self.edge.tail) > before:
                assert self.edge.tail[-1].token == expected

    ask = opening(sampling=SamplingParams(temperature=0.8, seed=3), fill=fill)
    outcome = Checked(ask, Random(seed), draft=DRAFT, kill_at=kill_at, **shape).run()
    assert outcome.output == alone(ask)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("lookahead", [True, False])
def test_small_budgets_with_large_windows(max_tokens, lookahead):
    for seed in range(20):
        ask = opening(max_tokens=max_tokens, lookahead=lookahead, fill=bool(seed % 2))
        outcome = World(ask, Random(seed), draft=DRAFT, window=8).run()
        assert outcome.output == alone(ask)
        assert len(outcome.output) <= max_tokens
        assert outcome.reason == "length" or len(outcome.output) < max_tokens


def test_synchronous_mode_takes_the_bonus_token():
    """With an identical draft every window of W costs one pass and yields W + 1 tokens."""
    ask = opening(lookahead=False, fill=False, max_tokens=31)
    outcome = World(ask, Random(0), draft=SAME, window=5, fill_chance=0).run()
    windows = outcome.edge.stats.windows
    assert windows <= 7
    assert sum(c.origin is Origin.FILLED for c in outcome.commits) >= windows - 2
