"""Replayed traces: the engines say what was recorded, and the runtime writes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2sci.decoding.credit import CreditParams
from e2sci.decoding.distribution import TopK, decode, encode
from e2sci.decoding.divergence import divergence
from e2sci.emulation.profile import PROFILES
from e2sci.engines.base import Step, fingerprint
from e2sci.evaluation.methods import Method, Setting, method
from e2sci.evaluation.replay import replay_pair
from e2sci.evaluation.traces import RequestTrace, Trace, TraceHeader
from e2sci.evaluation.world import write
from e2sci.session.edge import Origin

EOS = 900
FULL = 30
PAPER = Setting(PROFILES["paper"])


def sketch_of(weights: dict[int, float], size: int = 1000) -> bytes:
    ids = np.array(sorted(weights))
    return encode(TopK(ids, np.log([weights[i] for i in ids]), size))


def made_request(row: int, n: int, *, agree: float, seed: int = 0, stops: bool = True):
    """A text of n tokens in which the draft agrees this often; where not, half of its picks lie
    near (JS .03) and half far (JS .4)."""
    rng = np.random.default_rng([seed, row])
    kinds = rng.choice(3, n, p=[agree, (1 - agree) / 2, (1 - agree) / 2])
    tokens = rng.integers(20, 800, n).tolist()
    if stops:
        tokens[-1] = EOS
    places = [_place(token, kind) for token, kind in zip(tokens, kinds, strict=True)]
    drafts, p, q = map(list, zip(*places, strict=True))
    js = [divergence("js", decode(a, 1000), decode(b, 1000)) for a, b in zip(p, q, strict=True)]
    others = ("js_fsd", "tv", "regret", "entropy", "target_entropy")
    return RequestTrace(
        row=row,
        id=f"made-up/{row}",
        prompt_tokens=5 + row,
        tokens=tokens,
        drafts=drafts,
        js=js,
        p=p,
        q=q,
        **{name: [0.1] * n for name in others},
    )


def _place(y: int, kind: int) -> tuple[int, bytes, bytes]:
    """Draft's pick, p, q: agreed, disagreed nearly tied, disagreed clearly."""
    x = y if kind == 0 else y + 1
    certain = {0: 0.9, 1: 0.52, 2: 0.95}[kind]
    at_x = {0: 0.8, 1: 0.6, 2: 0.9}[kind]
    return (
        x,
        sketch_of({y: certain, y + 1: 0.98 - certain}),
        (sketch_of({y: 0.8, y + 1: 0.15}) if kind == 0 else sketch_of({y: 0.98 - at_x, x: at_x})),
    )


def made_trace(*lengths: int, agree: float = 0.7, seed: int = 0) -> Trace:
    header = TraceHeader(
        draft="small", target="large", task="made-up", first=0, last=99, max_tokens=FULL
    )
    return Trace(
        header,
        [
            made_request(row, n, agree=agree, seed=seed, stops=n < FULL)
            for row, n in enumerate(lengths)
        ],
    )


def constant(threshold: float, window: int = 4) -> Method:
    """Elastic at one threshold throughout."""
    constants = CreditParams.constant(threshold)
    return Method(
        "elastic",
        {"mode": "pipelined", "accept": "elastic", "window": window, "constants": constants},
    )


def answer(trace: Trace, n: int, how: Method):
    draft, target = replay_pair(trace)
    most = len(trace.requests[n].tokens)
    return write(how, PAPER.profile, draft, target, f"#{n}", most).result


# ---- the engines --------------------------------------------------------------------------


@pytest.mark.parametrize("side", [0, 1])
def test_the_recorded_picks_come_out(side):
    trace = made_trace(25, 12)
    engine = replay_pair(trace)[side]
    for n, request in enumerate(trace.requests):
        prompt = engine.tokenizer.encode(f"#{n}", special=False)
        assert len(prompt) == request.prompt_tokens
        [outputs] = engine.forward([Step(0, prompt + [1] * 8, 9)])
        picks = (request.drafts, request.tokens)[side]
        assert [p.argmax for p in outputs] == picks[:9]
        engine.truncate(0, 0)


def test_a_tie_goes_to_the_recorded_pick():
    request = made_request(0, 3, agree=1.0)
    tied = [sketch_of({y - 1: 0.5, y: 0.5}) for y in request.tokens]
    trace = made_trace(3)
    trace.requests = [RequestTrace(**{**_fields(request), "p": tied, "q": tied})]
    for engine in replay_pair(trace):
        prompt = engine.tokenizer.encode("#0", special=False)
        [outputs] = engine.forward([Step(0, [*prompt, 1, 1], 3)])
        assert [p.argmax for p in outputs] == request.tokens
        # By no more than a hair.
        assert np.exp(outputs[0].log_probs) == pytest.approx([0.5, 0.5], abs=1e-6)


def _fields(request: RequestTrace) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


def test_what_stands_before_changes_nothing_and_behind_the_end_is_eos():
    trace = made_trace(6)
    _, target = replay_pair(trace)
    prompt = target.tokenizer.encode("#0", special=False)
    [recorded] = target.forward([Step(0, prompt + trace.requests[0].tokens + [3], 8)])
    target.truncate(0, 0)
    [other] = target.forward([Step(0, prompt + [7] * 7, 8)])
    assert [p.argmax for p in other] == [p.argmax for p in recorded]
    for beyond in recorded[6:]:
        assert beyond.argmax in target.info.eos_ids
        assert np.exp(beyond.log_probs).max() == 1.0


def test_only_what_ends_texts_is_eos():
    _, target = replay_pair(made_trace(6, FULL, 8))
    assert target.info.eos_ids == {EOS, target.info.vocab_size - 1}
    cut = made_trace(6, 9)
    cut.requests[0].tokens[-1] = cut.requests[1].tokens[3] = 777  # cut short, and no EOS
    assert 777 not in replay_pair(cut)[1].info.eos_ids


def test_sequences_are_apart():
    trace = made_trace(9, 9, 9)
    _, target = replay_pair(trace, slots=3)
    prompts = [target.tokenizer.encode(f"#{n}", special=False) for n in range(3)]
    outputs = target.forward([Step(n, prompts[n]) for n in range(3)])
    assert [o[0].argmax for o in outputs] == [r.tokens[0] for r in trace.requests]
    target.truncate(1, 0)
    assert [target.length(n) for n in range(3)] == [len(prompts[0]), 0, len(prompts[2])]


def test_both_models_share_a_vocabulary():
    draft, target = replay_pair(made_trace(4, 5))
    assert fingerprint(draft) is fingerprint(target)
    assert fingerprint(draft).at(3) != fingerprint(draft).at(4)


# ---- in the runtime -----------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    window=st.integers(1, 12),
    agree=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    seed=st.integers(0, 50),
    length=st.integers(1, FULL),
)
def test_strict_writes_the_trace(window, agree, seed, length):
    trace = made_trace(4, length, agree=agree, seed=seed)
    request = trace.requests[1]
    how = Method("strict", {"mode": "pipelined", "window": window})
    result = answer(trace, 1, how)
    assert result.token_ids == [t for t in request.tokens if t != EOS]
    assert result.prompt_tokens == request.prompt_tokens


def _accepted(result) -> tuple[dict[int, bool], Sequence[int]]:
    """By output position: whether the draft's token was taken, where one was judged."""
    taken = {Origin.AGREED: True, Origin.TOLERATED: True, Origin.CORRECTED: False}
    return {
        c.position - result.prompt_tokens: taken[c.origin]
        for c in result.commits
        if c.origin in taken
    }, result.token_ids


def test_strict_accepts_where_the_models_agree():
    trace = made_trace(FULL, agree=0.6)
    judged, _ = _accepted(answer(trace, 0, method("strict-no-fill", PAPER)))
    agreed = trace.requests[0].agreed
    assert len(judged) > 20
    assert all(taken == agreed[i] for i, taken in judged.items())


@pytest.mark.parametrize("threshold", [0.01, 0.2])
def test_elastic_accepts_by_the_trace(threshold):
    trace = made_trace(FULL, agree=0.6)
    request = trace.requests[0]
    assert 0 < sum(request.accepted(0.2)) - sum(request.agreed) < FULL  # there is some difference
    judged, tokens = _accepted(answer(trace, 0, constant(threshold)))
    expected = request.accepted(threshold)
    assert len(judged) > 15
    assert all(taken == expected[i] for i, taken in judged.items())
    assert tokens == [
        request.drafts[i] if judged.get(i) else request.tokens[i] for i in range(len(tokens))
    ]


# ---- bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["#3", "12", "hello", "#-1"])
def test_other_prompts_are_refused(prompt):
    draft, _ = replay_pair(made_trace(4, 5, 6))
    with pytest.raises(ValueError, match="expected #0 to #2"):
        draft.tokenizer.encode(prompt, special=False)


def test_a_trace_that_cannot_be_replayed_is_refused():
    with pytest.raises(ValueError, match="no requests"):
        replay_pair(made_trace())
    bare = made_trace(4)
    bare.requests[0].q[2] = b""
    with pytest.raises(ValueError, match="lacks sketches"):
        replay_pair(bare)
    foreign = made_trace(4)
    foreign.requests[0].tokens[1] = 5
    _, target = replay_pair(foreign)
    prompt = target.tokenizer.encode("#0", special=False)
    with pytest.raises(ValueError, match="lacks the token 5"):
        target.forward([Step(0, [*prompt, 1], 2)])
