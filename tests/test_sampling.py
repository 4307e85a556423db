"""Sampling: the processed distribution against a plain one, and picks by keyed noise."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from e2sci.decoding.distribution import Dense, TopK
from e2sci.decoding.noise import Stream, pick_among, pick_of_all, uniform
from e2sci.decoding.sampling import (
    History,
    SamplingParams,
    Support,
    adjusted,
    pick,
    pick_from,
    support,
)

pytestmark = pytest.mark.filterwarnings("error")

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
EMPTY = History([])
VOCAB = 151_936
ALPHA = 1e-4  # of the chi-square tests; their noise is keyed, so they give the same every time


def random_dense(seed: int, size: int, spread: float = 2.0) -> Dense:
    noise = np.random.default_rng(seed).normal(0, spread, size)
    return Dense(noise.astype(np.float32))


def histories(prompt: list[int], output: list[int]) -> History:
    history = History(prompt)
    for token in output:
        history.append(token)
    return history


def same(found: Support, expected: dict[int, float]) -> None:
    """`found` gives exactly the expected ids, each its probability."""
    assert sorted(found.ids.tolist()) == sorted(expected)
    for token, log_prob in zip(found.ids.tolist(), found.log_probs.tolist(), strict=True):
        assert np.exp(log_prob) == pytest.approx(expected[token], rel=1e-4)


# ---- parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("temperature", [-0.1, 101, np.nan], [0, 1e-9, 100]),
        ("top_k", [-1], [0, 1, 10**9]),
        ("top_p", [0, -1, 1.01, np.nan], [1e-6, 1]),
        ("min_p", [-0.1, 1, np.nan], [0, 0.99]),
        ("repetition_penalty", [0, -1, 10.1, np.nan], [0.1, 10]),
        ("frequency_penalty", [-2.1, 2.1, np.nan], [-2, 2]),
        ("presence_penalty", [-2.1, 2.1, np.nan], [-2, 2]),
        ("seed", [-1, 2**63], [0, 2**63 - 1]),
        ("logit_bias", [{3: 101}, {3: np.nan}], [{3: -100}, {0: 100}, {}]),
    ],
)
def test_parameters_are_checked(name, bad, good):
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(ValueError, match=rf"^{name}.* is .*; expected .+$") as error:
            SamplingParams(**{name: value})
        assert "\n" not in str(error.value)


def test_a_bias_on_a_negative_id_names_the_id():
    with pytest.raises(ValueError, match="id of logit_bias is -7; expected 0 or more"):
        SamplingParams(logit_bias={-7: 1.0})


# ---- the processed distribution ---------------------------------------------------------------


def reference(logits: np.ndarray, params: SamplingParams, history: History) -> dict[int, float]:
    """p' by the textbook, one step after the other, over the whole vocabulary."""
    values = [float(v) for v in logits]
    output = Counter(history.tokens[history._prompt :])
    for token in set(history.tokens):
        if token < len(values):
            v, r = values[token], params.repetition_penalty
            values[token] = v / r if v > 0 else v * r
    for token, count in output.items():
        if token < len(values):
            values[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        if token < len(values):
            values[token] += bias
    ranked = sorted(range(len(values)), key=lambda t: (-values[t], t))
    weights = {t: np.exp((values[t] - values[ranked[0]]) / params.temperature) for t in ranked}
    kept = ranked[: params.top_k or len(ranked)]
    total, mass, nucleus = sum(weights[t] for t in kept), 0.0, []
    for token in kept:
        if params.top_p < 1 and mass / total >= params.top_p:
            break
        nucleus.append(token)
        mass += weights[token]
    nucleus = [t for t in nucleus if weights[t] >= params.min_p * weights[nucleus[0]]]
    total = sum(weights[t] for t in nucleus)
    return {t: weights[t] / total for t in nucleus}


all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    presence_penalty=st.sampled_from([0.0, 1.0, -1.0]),
    logit_bias=st.sampled_from([{}, {0: 5.0, 2: -100.0, 10_000: 1.0}]),
)
tokens = st.lists(st.integers(0, 40), max_size=12)


@quick
@given(seeds, st.integers(1, 60), all_params, tokens, tokens)
def test_processing_agrees_with_the_textbook(seed, size, params, prompt, output):
    p, history = random_dense(seed, size), histories(prompt, output)
    before = p.logits.copy()
    same(support(p, params, history), reference(p.logits, params, history))
    np.testing.assert_array_equal(p.logits, before)


@pytest.mark.parametrize("spread", [0.05, 2.0, 6.0])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.999])
def test_nucleus_of_a_large_vocabulary(spread, temperature, top_p):
    """Both ways: the nucleus inside the first 512 candidates, and far beyond them."""
    p = random_dense(3, 3000, spread)
    params = SamplingParams(temperature=temperature, top_p=top_p)
    same(support(p, params, EMPTY), reference(p.logits, params, EMPTY))


def test_nucleus_keeps_the_token_that_crosses_the_limit():
    p = Dense(np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32)))
    for top_p, count in [(0.4, 1), (0.51, 2), (0.79, 2), (0.81, 3)]:
        found = support(p, SamplingParams(temperature=1, top_p=top_p), EMPTY)
        assert found.ids.tolist() == list(range(count))


def test_equals_are_cut_by_id():
    p = Dense(np.zeros(1000, dtype=np.float32))
    same(support(p, SamplingParams(temperature=1, top_k=3), EMPTY), dict.fromkeys(range(3), 1 / 3))
    found = support(p, SamplingParams(temperature=1, top_p=0.6995), EMPTY)
    assert sorted(found.ids.tolist()) == list(range(700))


def test_penalties_in_closed_form():
    p = Dense(np.array([2, -2, 1, 0.5, 3], dtype=np.float32))
    history = histories([0, 1, 2], [2, 3, 3])
    params = SamplingParams(repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25)
    found = adjusted(p, params, history)
    assert isinstance(found, Dense)
    # id 0, 1: prompt only; 2: both; 3: twice in the output; 4: never
    assert found.logits.tolist() == [1, -4, 0.5 - 0.75, 0.25 - 1.25, 3]


def test_a_bias_moves_a_logit():
    p = Dense(np.zeros(4, dtype=np.float32))
    assert pick(p, SamplingParams(logit_bias={2: 0.5, 99: 100}), EMPTY) == 2
    found = support(p, SamplingParams(temperature=1, logit_bias={1: np.log(3)}), EMPTY)
    same(found, {0: 1 / 6, 1: 3 / 6, 2: 1 / 6, 3: 1 / 6})


def test_a_top_k_distribution_is_processed_as_far_as_it_is_known():
    p = TopK(np.array([9, 4, 7]), np.log([0.4, 0.2, 0.2]), 20)
    same(support(p, SamplingParams(temperature=1), EMPTY), {9: 0.5, 4: 0.25, 7: 0.25})
    same(support(p, SamplingParams(temperature=1, top_k=2), EMPTY), {9: 2 / 3, 4: 1 / 3})
    same(support(p, SamplingParams(temperature=1, top_p=0.6), EMPTY), {9: 2 / 3, 4: 1 / 3})
    assert pick(p, SamplingParams(), EMPTY) == 9
    changed = SamplingParams(temperature=1, logit_bias={9: np.log(0.5), 3: 100.0})
    same(support(p, changed, EMPTY), {9: 1 / 3, 4: 1 / 3, 7: 1 / 3})
    history = History([1])
    history.append(9)
    changed = SamplingParams(temperature=1, presence_penalty=np.log(2))
    same(support(p, changed, history), {9: 1 / 3, 4: 1 / 3, 7: 1 / 3})


def test_impossible_tokens_are_never_picked():
    p = Dense(np.array([0, -np.inf, 0, -np.inf], dtype=np.float32))
    params = SamplingParams(temperature=2, repetition_penalty=1.5)
    picks = {pick(p, params, History([1] * n)) for n in range(200)}
    assert picks == {0, 2}


@quick
@given(seeds, st.integers(2, 3000), st.sampled_from([0.0, 1e-9, 9e-6]), tokens)
def test_temperatures_near_zero_are_argmax(seed, size, temperature, prompt):
    p, params = random_dense(seed, size, 10), SamplingParams(temperature=temperature, seed=seed)
    assert params.greedy
    assert pick(p, params, History(prompt)) == int(np.argmax(p.logits))
    same(support(p, params, History(prompt)), {int(np.argmax(p.logits)): 1.0})


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_least_temperature_that_samples_is_sound(top_p):
    p = random_dense(1, 3000, 30)
    params = SamplingParams(temperature=1e-5, top_p=top_p, min_p=0.01)
    assert not params.greedy
    assert pick(p, params, EMPTY) == p.argmax


# ---- keyed noise ------------------------------------------------------------------------------


def mixed(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014), in whole numbers."""
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
    return x ^ x >> 31


def noise(seed: int, position: int, stream: int, ids: list[int]) -> np.ndarray:
    """What both ends must draw, on any machine."""
    golden = 0x9E3779B97F4A7C15
    key = mixed((seed * golden + stream) % 2**64)
    key = mixed((key + position * golden) % 2**64)
    return np.array([((mixed((i * golden + key) % 2**64) >> 12) + 0.5) / 2**52 for i in ids])


@quick
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**18), st.sampled_from(Stream))
def test_noise_is_the_documented_hash(seed, position, stream):
    assert uniform(seed, position, stream) == noise(seed, position, stream, [0])[0]


def test_noise_never_changes():
    """A change here would change every sampled text, and part ends of different versions."""
    assert uniform(42, 7, Stream.ACCEPT) == 0.6354079754855307


@quick
@given(
    seeds,
    st.integers(0, 300),
    st.integers(1, 1500),
    st.sampled_from([0.05, 1.0, 4.0, 20.0]),
    st.sampled_from([0.1, 1.0, 3.0]),
)
def test_a_pick_is_the_argmax_of_score(seed, position, size, spread, temperature):
    """By brute force, with and without one that is far ahead of a crowd."""
    p = random_dense(seed, size, spread)
    if seed % 2:
        p.logits[seed % size] = p.logits.max() + 8 * temperature
    draws = noise(seed, position, Stream.PICK, list(range(size)))
    scores = p.logits.astype(np.float64) / temperature - np.log(-np.log(draws))
    best = int(np.argmax(scores))
    params = SamplingParams(temperature=temperature, seed=seed)
    assert pick(p, params, History([0] * position)) == best
    found = support(p, params, EMPTY)
    assert pick_from(found, seed, position, Stream.PICK) == best


@pytest.mark.parametrize(("spread", "lead"), [(0.0, 10), (0.5, 8), (3.0, 0.5)])
def test_picking_from_a_real_vocabulary_leaves_no_contender_out(spread, lead):
    p = random_dense(1, VOCAB, spread)
    p.logits[77] = p.logits.max() + lead
    p.logits[100_000:120_000] = -np.inf
    ids, scores = np.arange(VOCAB), p.logits.astype(np.float64)
    picks = set()
    for position in range(12):
        picks.add(found := pick_of_all(p.logits, 1.0, 5, position, Stream.PICK))
        assert found == pick_among(ids, scores, 5, position, Stream.PICK)
    assert len(picks) > 1


def test_picks_depend_on_seed_position_and_stream_alone():
    p = Dense(np.zeros(1000, dtype=np.float32))
    params = SamplingParams(temperature=1, seed=1)
    first = pick(p, params, History([5] * 9))
    assert pick(p, params, History([7] * 9)) == first
    assert pick(p, params, histories([3], [5] * 8)) == first
    found = support(p, params, EMPTY)
    others = {
        pick_from(found, seed, position, stream)
        for seed in (1, 2)
        for position in (9, 10)
        for stream in Stream
    }
    assert first in others
    assert len(others) == 2 * 2 * len(Stream)


def test_a_pick_does_not_depend_on_the_order_of_candidates():
    p = random_dense(0, 50)
    found = support(p, SamplingParams(temperature=1), EMPTY)
    for position in range(50):
        order = np.random.default_rng(position).permutation(50)
        shuffled = Support(found.ids[order], found.log_probs[order])
        assert pick_from(found, 1, position, Stream.PICK) == pick_from(
            shuffled, 1, position, Stream.PICK
        )


CASES = [
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=6, min_p=0.1, presence_penalty=0.7),
]


@pytest.mark.parametrize("params", CASES)
@pytest.mark.parametrize("by", ["seed", "position"])
def test_picks_are_distributed_as_they_should(params, by):
    p = random_dense(8, 12, 1.0)
    expected = reference(p.logits, params, EMPTY)
    found = support(p, params, EMPTY)
    n = 3000
    keys = [(i, 3) if by == "seed" else (3, i) for i in range(n)]
    counts = Counter(pick_from(found, seed, at, Stream.PICK) for seed, at in keys)
    assert set(counts) <= set(expected)
    ids = sorted(expected)
    assert chisquare([counts[t] for t in ids], [n * expected[t] for t in ids]).pvalue > ALPHA


@pytest.mark.parametrize("step", [(0, 1, Stream.PICK), (1, 0, Stream.PICK), (0, 0, Stream.DRAFT)])
def test_neighbouring_picks_are_independent(step):
    """Of the next position, the next seed and the next stream: as pairs, against the product."""
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    chances = Support(np.arange(4), np.log(probs))
    table = np.zeros((4, 4))
    for i in range(3000):
        seed, position, stream = i % 70, i // 70, Stream.PICK
        one = pick_from(chances, 2 * seed, 2 * position, stream)
        other = pick_from(chances, 2 * seed + step[0], 2 * position + step[1], step[2])
        table[one, other] += 1
    assert chisquare(table.ravel(), 3000 * np.outer(probs, probs).ravel()).pvalue > ALPHA


@pytest.mark.parametrize("difference", [0.1, 0.4, 1.0])
def test_two_models_with_the_same_noise_mostly_agree(difference):
    """Gumbel coupling agrees at least (1-TV)/(1+TV) of the time, and never more than 1-TV."""
    p = random_dense(1, 40)
    q = Dense((p.logits + difference * random_dense(2, 40, 1).logits).astype(np.float32))
    a, b = np.exp(p.all_log_probs()), np.exp(q.all_log_probs())
    apart = np.abs(a - b).sum() / 2
    params, n = SamplingParams(temperature=1, seed=4), 3000
    first, second = support(p, params, EMPTY), support(q, params, EMPTY)
    agreed = np.mean(
        [
            pick_from(first, 4, i, Stream.PICK) == pick_from(second, 4, i, Stream.PICK)
            for i in range(n)
        ]
    )
    margin = 3 / np.sqrt(n)
    assert (1 - apart) / (1 + apart) - margin < agreed < 1 - apart + margin


# ---- history ----------------------------------------------------------------------------------


@quick
@given(tokens, st.lists(st.integers(0, 9) | st.tuples(st.integers(-2, 30)), max_size=30))
def test_history_counts_what_it_holds(prompt, steps):
    """A token is appended; a one-tuple truncates."""
    history, plain = History(prompt), list(prompt)
    for step in steps:
        fork, was = history.copy(), list(plain)
        if isinstance(step, int):
            history.append(step)
            plain.append(step)
        else:
            history.truncate(step[0])
            plain = plain[: max(step[0], len(prompt))]
        for found, expected in [(history, plain), (fork, was)]:
            assert found.tokens == expected
            assert len(found) == len(expected)
            assert +found.seen == Counter(expected)
            assert +found.output == Counter(expected[len(prompt) :])
    fresh = histories(prompt, plain[len(prompt) :])
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    p = random_dense(0, 50)
    np.testing.assert_array_equal(
        adjusted(p, params, history).logits, adjusted(p, params, fresh).logits
    )


def test_history_leaves_its_prompt_alone():
    prompt = [1, 2]
    history = History(prompt)
    history.append(3)
    assert prompt == [1, 2]


def test_logit_bias_has_a_limit():
    SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0))
    with pytest.raises(ValueError, match="logit_bias entries is 1025; expected 1024 at most"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
