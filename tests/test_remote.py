"""Engines in front of a server: the strict oracle, errors, refusals, and what top-k may hide."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2sci.decoding.acceptance import Place, RuleParams, make_rule
from e2sci.decoding.distribution import Dense, pack_ids
from e2sci.decoding.divergence import js, js_bounds
from e2sci.decoding.sampling import History, SamplingParams
from e2sci.engines import remote
from e2sci.engines.base import ContextFull, EngineError, Step
from e2sci.engines.sglang import SGLang
from e2sci.engines.vllm import Vllm
from e2sci.runtime.connection import Refused
from e2sci.runtime.edge import EdgeError
from e2sci.runtime.exactness import require_exact
from e2sci.session.messages import Open, ProtocolError
from live import draft, free_port, pair, target
from remote_servers import DESCRIPTION, MODEL, SGLangServer, VllmServer

KINDS = {"vllm": (VllmServer, Vllm), "sglang": (SGLangServer, SGLang)}
PROMPT = [104, 101, 108, 108, 111]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def server(kind):
    with KINDS[kind][0]() as server:
        yield server


def engine_of(kind, server, **options):
    return KINDS[kind][1](server.url, **{"tokenizer": DESCRIPTION, **options})


@pytest.fixture
def engine(kind, server):
    engine = engine_of(kind, server)
    yield engine
    engine.close()


def told(engine, *steps):
    """The best token at each output, and the log-probabilities of all that are named."""
    outputs = engine.forward(steps)
    return [[(d.argmax, d.top(20).log_probs.tolist()) for d in row] for row in outputs]


# --- the text is the target's -------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "cloud"},
        {"mode": "sync", "window": 1},
        {"mode": "sync", "window": 8},
        {"window": 1, "lookahead": 1},
        {"window": 4},
        {"window": 8, "fill": False},
    ],
)
async def test_strict_text_is_the_targets(engine, options):
    async with pair(draft(), target()) as edge:
        plain = await edge.generate("hello", mode="cloud", max_tokens=40)
        sampled = await edge.generate(
            "hello", mode="cloud", max_tokens=40, temperature=0.8, top_k=9, seed=3
        )
    async with pair(draft(), engine) as edge:
        got = await edge.generate("hello", max_tokens=40, **options)
        assert got.token_ids == plain.token_ids
        got = await edge.generate(
            "hello", max_tokens=40, temperature=0.8, top_k=9, seed=3, **options
        )
        assert got.token_ids == sampled.token_ids


@pytest.mark.parametrize("accept", ["strict", "elastic", "typical", "rejection"])
async def test_a_draft_that_is_the_target_is_accepted_throughout(engine, accept):
    async with pair(target(), engine) as edge:
        result = await edge.generate("hello", accept=accept, max_tokens=40)
        assert len(result.token_ids) == 40
        assert result.stats.corrections == 0


@pytest.mark.parametrize("accept", ["rejection", "elastic"])
async def test_other_rules_give_what_they_give_on_all_of_p(engine, accept):
    asked = {"accept": accept, "max_tokens": 40, "temperature": 0.8, "top_k": 9, "fill": False}
    asked |= {"measure": "regret"} if accept == "elastic" else {}
    async with pair(draft(), target()) as edge:
        expected = await edge.generate("hello", **asked)
    async with pair(draft(), engine) as edge:
        assert (await edge.generate("hello", **asked)).token_ids == expected.token_ids


async def test_requests_side_by_side_don_t_disturb_each_other(engine):
    prompts = ["hello", "what", "why is", "and then"]
    async with pair(draft(), target()) as edge:
        alone = [await edge.generate(p, mode="cloud", max_tokens=25) for p in prompts]
    async with pair(draft(), engine) as edge:
        both = await asyncio.gather(*(edge.generate(p, max_tokens=25) for p in prompts))
    assert [r.token_ids for r in both] == [r.token_ids for r in alone]


# --- the engine's contract ----------------------------------------------------------------------


def test_what_is_known_of_the_model(kind, server, engine):
    info = engine.info
    assert (info.name, info.context, info.top, info.can_truncate) == (MODEL, 4096, 20, True)
    assert (info.eos_ids, info.template) == (DESCRIPTION.eos_ids, DESCRIPTION.template)
    assert engine_of(kind, server, context=100, top=5).info.context == 100
    assert (
        KINDS[kind][1](f"{server.url}/v1/", tokenizer=DESCRIPTION, model=MODEL).info.name == MODEL
    )


def test_cut_and_feed_again(engine):
    whole = told(engine, Step(0, PROMPT, 5))
    engine.truncate(0, 2)
    assert engine.length(0) == 2
    assert told(engine, Step(0, PROMPT[2:], 3))[0] == whole[0][2:]
    engine.truncate(0, 0)
    assert told(engine, Step(0, PROMPT, 0), Step(3, PROMPT, 5)) == [[], *whole]
    assert (engine.length(0), engine.length(3)) == (5, 5)


def test_one_pass_is_one_request(engine, server):
    told(engine, Step(0, PROMPT, 3), Step(1, PROMPT[:2], 2), Step(2, PROMPT, 0))
    assert len(server.requests) == 1
    engine.forward([Step(2, PROMPT, 0)])
    assert len(server.requests) == 1  # nothing is asked for


def test_the_drafts_own_token_is_known_beyond_the_best(server, kind, engine):
    """SGLang says its log-prob, whatever its rank; vLLM doesn't."""
    p = target().forward([Step(0, PROMPT)])[0][0]
    last = int(np.argmin(p.logits))
    found = engine.forward([Step(0, [*PROMPT, last], 2)])[0][0].log_prob(np.array([last]))[0]
    assert found == (
        pytest.approx(p.log_prob(np.array([last]))[0]) if kind == "sglang" else -np.inf
    )


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ([Step(16, [1])], "slots: 16"),
        ([Step(0, [-1])], "token id -1 is out of range"),
        ([Step(0, [267])], "ids lie below 267"),
        ([Step(0, [1], 2)], "2 outputs asked of 1 tokens"),
        ([Step(0, [1]), Step(0, [2])], "twice"),
    ],
)
def test_passes_that_make_no_sense(engine, server, steps, complaint):
    with pytest.raises(ValueError, match=complaint):
        engine.forward(steps)
    with pytest.raises(ValueError, match="can't cut"):
        engine.truncate(0, 1)
    assert not server.requests
    assert engine.length(0) == 0


def test_a_full_context_leaves_every_sequence_as_it_was(kind, server):
    engine = engine_of(kind, server, context=8)
    engine.forward([Step(0, PROMPT)])
    with pytest.raises(ContextFull, match=r"5 \+ 4 tokens are more than the context of 8"):
        engine.forward([Step(1, PROMPT), Step(0, [1, 2, 3, 4])])
    assert (engine.length(0), engine.length(1)) == (5, 0)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fail", "complaint"),
    [
        (500, "answered 500: it is broken"),
        (403, "answered 403: it wants an API key"),
        (b"<html>", "gave an unexpected answer"),
        (b"[]", "unexpected answer|didn't give|0 answers"),
        (b'{"choices": []}', "unexpected answer|didn't give|0 answers"),
        (b"[" * 100_000, "unexpected answer"),
    ],
)
def test_a_pass_that_fails_leaves_everything_as_it_was(engine, server, fail, complaint):
    engine.forward([Step(0, PROMPT)])
    server.fail = [fail]
    with pytest.raises(EngineError, match=complaint) as error:
        engine.forward([Step(0, [1, 2], 1), Step(1, [3])])
    assert "\n" not in str(error.value)
    assert (engine.length(0), engine.length(1)) == (5, 0)
    engine.truncate(0, 0)
    assert told(engine, Step(0, PROMPT)) == told(engine, Step(1, PROMPT))


VLLM_ROW = '{"choices": [{"index": 0, "logprobs": {"top_logprobs": [%s]}}]}'
SGLANG_META = """[{"meta_info": {"input_token_logprobs": %s,
    "input_top_logprobs": [null], "output_top_logprobs": %s}}]"""


@pytest.mark.parametrize(
    ("kind", "answer", "complaint"),
    [
        ("vllm", VLLM_ROW % '{" the": -1.0}', "tokens as text, not as ids"),
        ("vllm", VLLM_ROW % "", "one row of log-probs for each of 1"),
        ("vllm", VLLM_ROW % '{"token_id:1": -1.0}', "gave 1 log-probs a position; expected 2"),
        ("vllm", VLLM_ROW % '{"token_id:1": 0, "token_id:2": 0}', "no distribution"),
        (
            "vllm",
            VLLM_ROW % '{"token_id:1": -1, "token_id:300": -1}',
            "is the tokenizer the model's",
        ),
        ("sglang", SGLANG_META % ("[]", "[[]]"), "a row of log-probs for each of 1"),
        ("sglang", SGLANG_META % ("[[null, 1, null]]", "[]"), "a row of log-probs for each of 1"),
        ("sglang", SGLANG_META % ("[[null, 1, null]]", "[[]]"), "gave 0 log-probs a position"),
    ],
)
def test_an_answer_that_is_none(kind, server, answer, complaint):
    engine = engine_of(kind, server, top=2)
    server.fail = [answer.encode()]
    with pytest.raises(EngineError, match=complaint):
        engine.forward([Step(0, PROMPT)])
    assert engine.length(0) == 0


def test_a_busy_server_is_asked_again(engine, server):
    server.fail = [503, 429]
    assert told(engine, Step(0, PROMPT)) == told(engine, Step(1, PROMPT))
    server.fail = [503] * 3
    with pytest.raises(EngineError, match="answered 503: it is broken"):
        engine.forward([Step(0, PROMPT)])


def test_a_server_that_is_not_there(kind, server, engine):
    server.__exit__()
    with pytest.raises(EngineError, match=r"no server answers at .*is it running"):
        engine.forward([Step(0, PROMPT)])
    server.__enter__()  # on the same port
    assert told(engine, Step(0, PROMPT))
    with pytest.raises(EngineError, match="no server answers"):
        KINDS[kind][1](f"http://127.0.0.1:{free_port()}", tokenizer=DESCRIPTION)


def test_a_model_or_address_that_can_t_be(kind, server):
    with pytest.raises(EngineError, match="doesn't serve small; it serves big"):
        engine_of(kind, server, model="small")
    with pytest.raises(EngineError, match="expected http://HOST:PORT"):
        KINDS[kind][1]("localhost:8000", tokenizer=DESCRIPTION)
    with pytest.raises(EngineError, match="0 slots"):
        engine_of(kind, server, slots=0)
    other = SGLang if kind == "vllm" else Vllm
    with pytest.raises(EngineError, match="answered 404: Not Found"):
        other(server.url, tokenizer=DESCRIPTION).forward([Step(0, PROMPT)])


def test_a_key(kind):
    with KINDS[kind][0](key="secret") as server:
        with pytest.raises(EngineError, match="answered 401: it wants an API key") as error:
            engine_of(kind, server, key="wrong")
        assert "wrong" not in str(error.value)
        assert told(engine_of(kind, server, key="secret"), Step(0, PROMPT))


def test_bounds(kind, server, monkeypatch):
    slow = engine_of(kind, server, timeout=0.05)
    with server._lock, pytest.raises(EngineError, match=r"within 0\.05 s|longer than 0\.05 s"):
        slow.forward([Step(0, PROMPT)])
    engine = engine_of(kind, server)
    monkeypatch.setattr(remote, "MAX_ANSWER", 100)
    with pytest.raises(EngineError, match="more than"):
        engine.forward([Step(0, PROMPT)])


def test_more_than_a_server_gives():
    with VllmServer() as server:
        with pytest.raises(EngineError, match="answered 400: Requested sample logprobs of 30"):
            Vllm(server.url, tokenizer=DESCRIPTION, top=30).forward([Step(0, PROMPT)])
        engine = Vllm(server.url, tokenizer=DESCRIPTION)
        server.max_len = 3
        with pytest.raises(EngineError, match=r"answered 400: .*maximum context"):
            engine.forward([Step(0, PROMPT)])


async def test_a_request_ends_with_the_servers_error_and_the_next_goes_on(engine, server):
    async with pair(draft(), engine) as edge:
        server.fail = [500]
        with pytest.raises(EdgeError, match=r"engine failed: .*answered 500"):
            await edge.generate("hello", max_tokens=10)
        assert len((await edge.generate("hello", max_tokens=10)).token_ids) == 10


# --- what the k best suffice for ----------------------------------------------------------------

REFUSED = [
    ({"frequency_penalty": 0.5}, "penalties"),
    ({"logit_bias": {3: -100.0}}, "logit_bias"),
    ({"temperature": 0.7}, "top_k is 1 to 20"),
    ({"temperature": 0.7, "top_p": 0.9}, "top_k is 1 to 20"),
    ({"temperature": 0.7, "top_k": 21}, "top_k is 1 to 20"),
    ({"accept": "fuzzy", "measure": "kl"}, "measure js instead"),
    ({"accept": "elastic", "measure": "js_fsd"}, "measure js instead"),
]


async def test_what_can_t_be_exact_is_refused_when_the_request_opens(server, engine):
    async with pair(draft(), engine) as edge:
        for asked, reason in REFUSED:
            with pytest.raises(Refused, match=reason):
                await edge.generate("hello", max_tokens=5, **asked)
    assert not server.requests


def test_full_distributions_refuse_nothing():
    opening = Open(
        request=1,
        prompt=pack_ids(PROMPT),
        max_tokens=5,
        sampling=SamplingParams(temperature=1.0, frequency_penalty=1.0),
        rule=RuleParams(name="fuzzy", measure="kl"),
    )
    require_exact(target().info, opening)


def test_refusals_have_a_code(engine):
    opening = Open(
        request=1, prompt=b"", max_tokens=1, sampling=SamplingParams(logit_bias={1: 1.0})
    )
    with pytest.raises(ProtocolError) as error:
        require_exact(engine.info, opening)
    assert error.value.code == "unsupported"


logits = st.lists(st.floats(-12, 12, width=32), min_size=6, max_size=40)
pairs = st.integers(6, 40).flatmap(
    lambda n: st.tuples(*[st.lists(st.floats(-12, 12, width=32), min_size=n, max_size=n)] * 2)
)


def dense(values) -> Dense:
    return Dense(np.array(values, dtype=np.float32))


@given(pairs, st.integers(1, 20), st.integers(1, 16))
def test_js_lies_within_its_bounds(values, k, size):
    """Both sides known on their best tokens only, as with a server's p and a sketch of q."""
    p, q = map(dense, values)
    low, high = js_bounds(p.top(k), q.top(size))
    true = js(np.exp(p.all_log_probs()), np.exp(q.all_log_probs()))
    assert low - 1e-6 <= true <= high + 1e-6


@settings(max_examples=300)
@given(
    logits,
    st.integers(1, 20),
    st.integers(0, 39),
    st.sampled_from(
        [
            RuleParams(name="typical", epsilon=0.3, delta=0.9),
            RuleParams(name="elastic", measure="regret", p_min=0.05),
        ]
    ),
)
def test_an_unknown_token_is_never_tolerated_by_mistake(values, k, x, rule):
    """Knowing the k best, a rule accepts no token that it wouldn't knowing all."""
    p, x = dense(values), x % len(values)
    place = {"all": p, "best": p.top(k)}
    judged = {
        name: make_rule(rule).judge(Place(d, SamplingParams(), History([1])), x, None, 1.0)
        for name, d in place.items()
    }
    assert judged["best"].accepted <= judged["all"].accepted
    if not judged["best"].accepted:
        assert judged["best"].token == p.argmax
