"""The acceptance rules: what each decides, and that rejection is exact in distribution."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from e2sci.decoding.acceptance import Judgement, Place, RuleParams, _residual, make_rule
from e2sci.decoding.distribution import Dense, Processed, TopK, decode, sketch
from e2sci.decoding.divergence import divergence
from e2sci.decoding.sampling import History, SamplingParams, Support, pick, support

pytestmark = pytest.mark.filterwarnings("error")

quick = settings(max_examples=40, deadline=None)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1, seed=3)
NAMES = ["strict", "rejection", "fuzzy", "elastic", "typical"]
ALPHA = 1e-4  # of the chi-square tests; their noise is keyed, so they give the same every time


def dense(probs) -> Dense:
    with np.errstate(divide="ignore"):
        return Dense(np.log(np.array(probs)).astype(np.float32))


P, Q = dense([0.5, 0.3, 0.15, 0.05]), dense([0.2, 0.6, 0.1, 0.1])
Q_SENT = decode(sketch(Q), 4)
JS = divergence("js", P, Q_SENT)


def judge(
    x: int, threshold: float = 0.0, *, p=P, q=Q_SENT, params=GREEDY, at=1, **rule
) -> Judgement:
    place = Place(p, params, History([0] * at))
    return make_rule(RuleParams(**rule)).judge(place, x, q, threshold)


# ---- parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"p_min": -0.1},
        {"p_min": 1.1},
        {"p_min": np.nan},
        {"epsilon": 0},
        {"delta": 1.5},
        {"name": "fuzzy", "measure": "regret"},
    ],
)
def test_parameters_are_checked(bad):
    with pytest.raises(ValueError, match=r"p_min|epsilon|regret"):
        RuleParams(**bad)


@pytest.mark.parametrize(
    ("rule", "needs_sketch", "lossless", "eager"),
    [
        ({"name": "strict"}, False, True, True),
        ({"name": "rejection"}, True, True, False),
        ({"name": "fuzzy"}, True, False, False),
        ({"name": "elastic"}, True, False, False),
        ({"name": "elastic", "measure": "regret"}, False, False, False),
        ({"name": "typical"}, False, False, False),
    ],
)
def test_what_each_rule_needs_and_promises(rule, needs_sketch, lossless, eager):
    made = make_rule(RuleParams(**rule))
    assert (made.needs_sketch, made.lossless, made.eager) == (needs_sketch, lossless, eager)


# ---- decisions --------------------------------------------------------------------------------

NEAR, FAR = JS + 1e-6, JS - 1e-6  # thresholds: just above, just below the distance


@pytest.mark.parametrize(
    ("rule", "x", "threshold", "accepted", "token"),
    [
        # The target's pick is 0.
        ({"name": "strict"}, 0, 0.0, True, 0),
        ({"name": "strict"}, 1, 9.9, False, 0),
        ({"name": "fuzzy"}, 0, NEAR, True, 0),
        ({"name": "fuzzy"}, 0, FAR, False, 0),
        ({"name": "fuzzy"}, 1, NEAR, True, 1),
        ({"name": "fuzzy"}, 1, FAR, False, 0),
        ({"name": "fuzzy", "agreement": True}, 0, FAR, True, 0),
        ({"name": "fuzzy", "agreement": True}, 1, FAR, False, 0),
        ({"name": "elastic"}, 0, FAR, True, 0),
        ({"name": "elastic"}, 1, NEAR, True, 1),
        ({"name": "elastic"}, 1, JS, True, 1),
        ({"name": "elastic"}, 1, FAR, False, 0),
        ({"name": "elastic", "agreement": False}, 0, FAR, False, 0),
        # log(.5/.3) = .5108
        ({"name": "elastic", "measure": "regret"}, 0, 0.0, True, 0),
        ({"name": "elastic", "measure": "regret"}, 1, 0.510, False, 0),
        ({"name": "elastic", "measure": "regret"}, 1, 0.511, True, 1),
        # e^-H = .319: the bound is ε = .09, or δ·.319
        ({"name": "typical"}, 0, 0.0, True, 0),
        ({"name": "typical"}, 2, 0.0, True, 2),
        ({"name": "typical"}, 3, 9.9, False, 0),
        ({"name": "typical", "delta": 0.1}, 3, 0.0, True, 3),
        ({"name": "typical", "epsilon": 0.2, "delta": 1.0}, 2, 0.0, False, 0),
        ({"name": "typical", "epsilon": 0.9, "delta": 1.0}, 2, 0.0, False, 0),
        ({"name": "typical", "epsilon": 0.9, "delta": 1.0}, 1, 0.0, False, 0),
        # A floor at .2 spares the target's pick and the token at .3 alone.
        ({"name": "elastic", "p_min": 0.2}, 1, 9.9, True, 1),
        ({"name": "elastic", "p_min": 0.2}, 2, 9.9, False, 0),
        ({"name": "elastic", "p_min": 0.9}, 0, 9.9, True, 0),
        ({"name": "elastic", "measure": "regret", "p_min": 0.2}, 2, 9.9, False, 0),
        ({"name": "fuzzy", "p_min": 0.2}, 1, 9.9, True, 1),
        ({"name": "fuzzy", "p_min": 0.2}, 2, 9.9, False, 0),
        ({"name": "fuzzy", "p_min": 0.9}, 0, NEAR, True, 0),
        ({"name": "fuzzy", "p_min": 0.9}, 0, FAR, False, 0),
        ({"name": "typical", "p_min": 0.2}, 2, 0.0, False, 0),
        # Greedy rejection: p' and q' are certain.
        ({"name": "rejection"}, 0, 0.0, True, 0),
    ],
)
def test_decisions(rule, x, threshold, accepted, token):
    q = decode(sketch(dense([1, 0, 0, 0])), 4) if rule["name"] == "rejection" else Q_SENT
    found = judge(x, threshold, q=q, **rule)
    assert (found.accepted, found.token, found.agreed) == (accepted, token, x == 0)


def test_greedy_rejection_corrects_to_the_targets_pick():
    q = decode(sketch(dense([0, 1, 0, 0])), 4)
    for at in range(1, 20):
        assert judge(1, q=q, name="rejection", at=at) == Judgement(False, 0, False)


@pytest.mark.parametrize("measure", ["js", "kl", "tv", "js_fsd"])
def test_the_measure_is_the_one_named(measure):
    found = judge(1, 9.9, name="elastic", measure=measure)
    assert found.distance == divergence(measure, P, Q_SENT)
    assert judge(0, name="strict").distance is None
    assert judge(0, name="elastic", measure="regret").distance == 0


@pytest.mark.parametrize("name", ["strict", "elastic", "fuzzy", "typical"])
def test_under_sampling_the_targets_pick_is_the_sampled_one(name):
    for at in range(1, 40):
        y = pick(P, SAMPLED, History([0] * at))
        for x in range(4):
            found = judge(x, -1.0, params=SAMPLED, at=at, name=name, p_min=1.0)
            assert found.agreed == (x == y)
            assert found.token == y
            if name != "fuzzy":
                assert found.accepted == (x == y)


def test_typical_looks_at_the_tempered_distribution_when_sampling():
    cooler = SamplingParams(temperature=0.5, seed=1)  # p' = .685, .247, .062, .007
    at = next(at for at in range(1, 99) if pick(P, cooler, History([0] * at)) == 0)
    rule = {"name": "typical", "params": cooler, "at": at}
    assert judge(1, **rule).accepted
    assert not judge(2, **rule).accepted
    assert judge(2, **rule, epsilon=0.05).accepted
    narrow = msgspec.structs.replace(cooler, top_p=0.9)
    assert not judge(2, name="typical", params=narrow, at=at, epsilon=1e-9).accepted


def test_typical_may_refuse_even_the_targets_pick():
    at = next(at for at in range(1, 999) if pick(P, SAMPLED, History([0] * at)) == 3)
    rule = {"name": "typical", "params": SAMPLED, "at": at}
    assert judge(3, **rule) == Judgement(True, 3, True)
    assert judge(3, **rule, agreement=False) == Judgement(False, 3, True)


def test_typical_bound_with_impossible_tokens():
    """An entropy over -inf is no NaN: δ·e^-H = .3·½ beats ε = .2 for two even tokens."""
    p = dense([0.45, 0.45, 0.1, 0, 0])
    entropy = -(0.9 * np.log(0.45) + 0.1 * np.log(0.1))
    assert 0.1 < 0.3 * np.exp(-entropy) < 0.2
    at = next(at for at in range(1, 99) if pick(p, SAMPLED, History([0] * at)) == 0)
    rule = {"p": p, "name": "typical", "epsilon": 0.2, "at": at}
    for params in (GREEDY, SAMPLED):
        assert not judge(2, **rule, params=params, delta=0.3).accepted
        assert judge(2, **rule, params=params, delta=0.2).accepted
        assert not judge(3, **rule, params=params).accepted


def test_regret():
    place = Place(P, GREEDY, History([0]))
    assert place.regret(1) == pytest.approx(np.log(0.5 / 0.3), abs=1e-6)
    assert all(place.regret(x) >= 0 for x in range(4))
    # Sampling may pick y below x: then nothing is lost by x.
    at = next(at for at in range(1, 99) if pick(P, SAMPLED, History([0] * at)) == 1)
    assert Place(P, SAMPLED, History([0] * at)).regret(0) == pytest.approx(np.log(0.3 / 0.5), 1e-5)
    known = TopK(np.array([2, 0]), np.log([0.6, 0.3]), 4)
    assert Place(known, GREEDY, History([0])).regret(1) == np.inf


# ---- proposals --------------------------------------------------------------------------------


@quick
@given(
    st.integers(0, 2**32),
    st.sampled_from(NAMES),
    st.sampled_from([0.0, 0.7, 1.5]),
    st.sampled_from([1.0, 0.8]),
    st.integers(2, 40),
    st.booleans(),
)
def test_a_proposal_is_judged_by_its_own_sketch(seed, name, temperature, top_p, size, wanted):
    rng = np.random.default_rng(seed)
    p, q = (Dense(rng.normal(0, 2, size).astype(np.float32)) for _ in range(2))
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    rule, history = make_rule(RuleParams(name=name)), History([0] * (seed % 50))
    proposal = rule.propose(q, params, history, with_sketch=wanted or rule.needs_sketch)
    if proposal.sketch is None:
        assert not rule.needs_sketch
        sent = None
    else:
        sent = decode(proposal.sketch, size)
        assert proposal.token in sent.ids
    if name != "rejection":
        assert proposal.token == pick(q, params, history)
        assert (proposal.sketch is not None) == (wanted or rule.needs_sketch)
    place = Place(p, params, history)
    found = rule.judge(place, proposal.token, sent, 0.1)
    assert found.token in place.support.ids or found.accepted
    if found.accepted:
        assert found.token == proposal.token
    same = rule.judge(Place(q, params, history), proposal.token, sent, 0.1)
    if name != "rejection":
        assert same == Judgement(True, proposal.token, True, same.distance)


@pytest.mark.parametrize("name", ["strict", "rejection", "fuzzy", "elastic", "typical"])
def test_what_others_have_processed_is_judged_as_what_we_process(name):
    rule, plain = make_rule(RuleParams(name=name)), SamplingParams(temperature=1, seed=3)
    ours = SamplingParams(temperature=0.7, top_k=4, repetition_penalty=1.5, seed=3)
    outcomes = Counter()
    for position in range(40):
        history = History([1, 2] * (position + 1))
        noise = np.random.default_rng(position).normal(0, 2, (2, 12)).astype(np.float32)
        p, q = Dense(noise[0]), Dense(noise[0] + noise[1] / 3)
        made = rule.propose(q, ours, history, with_sketch=rule.needs_sketch)
        wanted = rule.judge(Place(p, ours, history), *seen(made, 12), 0.02)
        theirs = [foreign(dist, ours, history) for dist in (p, q)]
        assert theirs[0].limited(8).after.size == 8
        made = rule.propose(theirs[1], plain, history, with_sketch=rule.needs_sketch)
        assert rule.judge(Place(theirs[0], plain, history), *seen(made, 12), 0.02) == wanted
        outcomes[wanted.accepted] += 1
    assert len(outcomes) == 2


def seen(made, size: int) -> tuple[int, TopK | None]:
    return made.token, decode(made.sketch, size) if made.sketch else None


def foreign(dist: Dense, params: SamplingParams, history: History) -> Processed:
    """`dist`, processed elsewhere to what `params` make of it."""
    kept = support(dist, params, history)
    logits = np.full(dist.size, -np.inf, dtype=np.float32)
    logits[kept.ids] = kept.log_probs
    return Processed(dist.logits, Dense(logits))


def test_a_token_outside_its_own_sketch_is_refused():
    one = decode(sketch(dense([0, 1, 0, 0])), 4)
    with pytest.raises(ValueError, match="3 is not in its own sketch"):
        judge(3, q=one, name="rejection", params=SAMPLED)


# ---- rejection, end to end --------------------------------------------------------------------

REJECTION = make_rule(RuleParams(name="rejection"))
LINES = [History([0] * n) for n in range(101)]


def emit(p: Dense, q: Dense, params: SamplingParams, history: History) -> Judgement:
    """One position, as it goes between edge and cloud."""
    proposal = REJECTION.propose(q, params, history, with_sketch=True)
    assert proposal.sketch is not None
    sent = decode(proposal.sketch, q.size)
    return REJECTION.judge(Place(p, params, history), proposal.token, sent, 0.0)


def processed(probs: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    tempered = np.asarray(probs) ** (1 / temperature)
    tempered /= tempered.sum()
    order = np.argsort(-tempered, kind="stable")
    before = np.cumsum(tempered[order]) - tempered[order]
    tempered[order[before >= top_p]] = 0
    return tempered / tempered.sum()


def fits(counts: np.ndarray, probs: np.ndarray) -> bool:
    """Whether `counts` are a sample of `probs`, by Pearson's chi-square."""
    assert counts[probs == 0].sum() == 0
    used = probs > 0
    expected = counts.sum() * probs[used]
    assert expected.min() >= 5
    return bool(chisquare(counts[used], expected * (counts.sum() / expected.sum())).pvalue > ALPHA)


FEW_P = np.array([0.25, 0.05, 0.2, 0.02, 0.1, 0.13, 0.05, 0.2])
FEW_Q = np.array([0.03, 0.4, 0.05, 0.2, 0.1, 0.12, 0.05, 0.05])
MANY_P = np.array([4.0] * 6 + [1.0] * 18 + [5.0] * 6) / 78
MANY_Q = np.array([1.0] * 12 + [3.0] * 18) / 66  # flat: its sketch knows 16 of 30
# Here residual samples with any noise but their own show most.
THREE_P, THREE_Q = np.array([0.48, 0.24, 0.28]), np.array([0.29, 0.67, 0.04])
SURE_Q = np.array([0, 0, 0, 1.0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("p", "q", "temperature", "top_p", "n"),
    [
        (FEW_P, FEW_Q, 1.0, 1.0, 1000),
        (THREE_P, THREE_Q, 1.0, 1.0, 4000),
        (FEW_P, FEW_P, 1.0, 1.0, 1000),
        (FEW_P, SURE_Q, 1.0, 1.0, 1000),
        (MANY_P, MANY_Q, 1.0, 1.0, 1000),
        (FEW_P, FEW_Q, 1.6, 0.9, 1000),
        (MANY_P, MANY_Q, 0.7, 0.8, 1000),
    ],
    ids=["apart", "three", "equal", "certain", "sketched", "tempered", "sketched-tempered"],
)
def test_rejection_emits_the_targets_distribution(p, q, temperature, top_p, n):
    target, draft = dense(p), dense(q)
    expected = processed(p, temperature, top_p)
    counts, accepted = np.zeros(len(p)), 0
    for i in range(n):
        params = SamplingParams(temperature=temperature, top_p=top_p, seed=i // 100)
        found = emit(target, draft, params, LINES[1 + i % 100])
        counts[found.token] += 1
        accepted += found.accepted
    assert fits(counts, expected)
    # It is speculative, too: it accepts 1-TV of what the sketch proposes.
    params = SamplingParams(temperature=temperature, top_p=top_p)
    sent = decode(REJECTION.propose(draft, params, LINES[1], with_sketch=True).sketch, len(q))
    drawn = np.zeros(len(q))
    drawn[sent.ids] = np.exp(sent.without_tail().log_probs)
    rate = np.minimum(expected, drawn).sum()
    assert accepted / n == pytest.approx(rate, abs=4 * np.sqrt(0.25 / n))


def test_two_positions_jointly_are_the_targets():
    """Acceptance, first and second token against the exact joint distribution.

    Each second position is drafted anew, or filled by the target alone, with the noise of that
    position: were any of it shared with the first, or among the streams, this would show.
    """
    rng = np.random.default_rng(2)
    size, n = 4, 2400
    firsts = np.array([[0.4, 0.1, 0.2, 0.3], [0.1, 0.5, 0.3, 0.1]])
    p_next, q_next = (0.02 + 0.92 * rng.dirichlet(np.ones(size), (size,)) for _ in range(2))
    p1, q1 = (dense(f) for f in firsts)
    p2, q2 = [dense(row) for row in p_next], [dense(row) for row in q_next]
    counts = np.zeros((2, size, size))
    after = {(at, t): History([0] * at + [t]) for at in range(1, 51) for t in range(size)}
    for i in range(n):
        params, at = SamplingParams(temperature=1, seed=i // 50), 1 + i % 50
        one = emit(p1, q1, params, LINES[at])
        line = after[at, one.token]
        if i % 2 == 0:
            second = pick(p2[one.token], params, line)
        else:
            second = emit(p2[one.token], q2[one.token], params, line).token
        counts[int(one.accepted), one.token, second] += 1
    sent = decode(REJECTION.propose(q1, SAMPLED, LINES[1], with_sketch=True).sketch, size)
    drawn = np.exp(sent.without_tail().log_probs)
    kept = np.minimum(firsts[0], drawn)
    first = np.stack([firsts[0] - kept, kept])
    nexts = p_next / p_next.sum(1, keepdims=True)
    joint = first[:, :, None] * nexts[None]
    joint[np.abs(joint) < 1e-12] = 0
    assert fits(counts.ravel(), joint.ravel())


def test_the_residual_is_the_targets_excess():
    p = Support(np.array([4, 1, 7]), np.log([0.5, 0.3, 0.2]))
    q = Support(np.array([1, 2, 4]), np.log([0.6, 0.2, 0.2]))
    left = _residual(p, q)
    np.testing.assert_array_equal(left.ids, [4, 7])
    np.testing.assert_allclose(np.exp(left.log_probs), [0.6, 0.4])
    assert _residual(p, p) is p


def test_rejection_never_emits_what_sampling_forbids():
    params = SamplingParams(temperature=1, top_k=2, seed=9)
    allowed = set(support(P, params, LINES[1]).ids.tolist())
    counts = Counter(emit(P, Q, params, line).token for line in LINES[1:])
    assert set(counts) == allowed == {0, 1}
