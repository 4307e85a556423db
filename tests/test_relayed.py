"""The session of a gateway: it compares, and the text is the server's in any order of events."""

from __future__ import annotations

import random

import pytest

from e2sci.decoding.acceptance import Proposal, RuleParams
from e2sci.decoding.distribution import pack_ids, unpack_ids
from e2sci.decoding.sampling import SamplingParams
from e2sci.session.edge import EdgeSession, Origin
from e2sci.session.line import CloudModel
from e2sci.session.lookahead import Lookahead
from e2sci.session.messages import (
    MAX_WINDOW,
    Finished,
    Open,
    Opened,
    ProtocolError,
    Score,
    Verdict,
    Window,
)
from e2sci.session.relayed import RelayedSession
from e2sci.vllm_plugin.store import prefix_key

EOS, VOCAB, PROMPT = 2, 1000, [5, 300, 7]
MODEL = CloudModel(VOCAB, 4096, frozenset({EOS}))


def opening(**fields) -> Open:
    return Open(**{"request": 1, "prompt": pack_ids(PROMPT), "max_tokens": 100, **fields})


def window(start: int, ids, branch: int = 0) -> Window:
    return Window(request=1, branch=branch, start=start, ids=pack_ids(ids))


@pytest.fixture
def session():
    return RelayedSession(opening(), MODEL)


def said(messages) -> list:
    """(start, accepted, own ids, rejected, branch) of verdicts, the reason of an end."""
    return [
        (m.start, m.accepted, unpack_ids(m.ids, 64), m.rejected, m.branch)
        if isinstance(m, Verdict)
        else m.reason
        for m in messages
    ]


def test_agreed_corrected_filled(session):
    session.window(window(3, [10, 11, 12]))
    assert said(session.delivered([10])) == [(3, 1, [], False, 0)]
    assert said(session.delivered([11, 99, 98])) == [(4, 1, [99, 98], True, 0)]
    assert said(session.delivered([97])) == [(7, 0, [97], False, 1)]
    session.window(window(8, [96], branch=1))
    assert said(session.delivered([96, 95, EOS])) == [(8, 1, [95, EOS], False, 1), "stop"]
    assert (session.passes, session.fed, session.accepted) == (4, 8, 3)


def test_the_proposer_is_told_what_is_new(session):
    told = session.window(window(3, [10, 11]))
    assert (told.key, told.start, told.ids) == (prefix_key(PROMPT), 3, [10, 11])
    told = session.window(window(5, [12, 13]))
    assert (told.key, told.start, told.ids) == (prefix_key([*PROMPT, 10, 11]), 5, [12, 13])
    session.delivered([10, 11, 12, 13, 14])
    told = session.window(window(7, [14, 15]))  # 14 is known by now
    assert (told.key, told.start) == (prefix_key([*PROMPT, 10, 11, 12, 13, 14]), 8)
    assert told.ids == [15]
    assert session.window(window(9, [])) is None
    session.delivered([20])
    assert session.window(window(9, [16, 17])) is None  # of a branch that is dead


def test_many_tokens_at_once_are_several_verdicts():
    session = RelayedSession(opening(max_tokens=500), MODEL)
    first, second = session.delivered([10 + i for i in range(MAX_WINDOW + 5)])
    assert len(unpack_ids(first.ids, 64)) == MAX_WINDOW
    assert second.start == 3 + MAX_WINDOW


def test_nothing_comes_behind_the_end():
    session = RelayedSession(opening(max_tokens=2), MODEL)
    assert said(session.delivered([10, 11, 12])) == [(3, 0, [10, 11], False, 0), "length"]
    session = RelayedSession(opening(), MODEL)
    session.window(window(3, [EOS]))
    verdict, _ = session.delivered([EOS, 11], [Score(log_prob=-1.0)] * 2)
    assert (verdict.accepted, verdict.ids, len(verdict.scores)) == (1, b"", 1)
    session = RelayedSession(opening(), MODEL)
    assert said(session.stopped()) == ["stop"]
    assert session.cancel() == []


def test_a_foreign_id_is_an_error(session):
    with pytest.raises(ProtocolError, match="token id 1000"):
        session.delivered([10, VOCAB])
    assert session.written == 0


def test_greedy_rejection_and_the_target_alone_are_served():
    warm = SamplingParams(temperature=1.0)
    RelayedSession(opening(rule=RuleParams(name="rejection"), sampling=warm), MODEL)
    RelayedSession(opening(rule=RuleParams(name="rejection")), MODEL)
    RelayedSession(opening(drafting=False, sampling=warm), MODEL)
    with pytest.raises(ProtocolError, match="use --accept rejection"):
        RelayedSession(opening(sampling=warm), MODEL)


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_any_order_of_events_gives_the_servers_text(right):
    """Windows and verdicts travel for random times, the server writes 1 to 7 tokens a step."""
    for seed in range(150):
        rng = random.Random(seed)
        text = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 90))] + [EOS]
        ask = opening(max_tokens=rng.choice([5, 200]))
        cloud = RelayedSession(ask, MODEL)
        size = rng.choice([1, 3, 8])
        edge = EdgeSession(
            ask, window=size, eos=frozenset({EOS}), vocab=VOCAB, lookahead=Lookahead(size)
        )
        edge.opened(Opened(request=1, limit=cloud.limit))
        up, down, commits = [], [], []
        while not edge.finished:
            event = rng.choice(["draft", "draft", "draft", "up", "down", "step"])
            if event == "draft" and edge.wants_draft:
                at = len(edge.line) - len(PROMPT)
                good = at < len(text) and rng.random() < right
                token = text[at] if good else rng.randrange(3, VOCAB)
                up += edge.drafted(Proposal(token), len(edge.line), edge.branch)
            elif event == "up" and up:
                cloud.window(up.pop(0))
            elif event == "step" and not cloud.finished:
                down += cloud.delivered(text[cloud.written :][: rng.randrange(1, 8)])
            elif event == "down" and down:
                message = down.pop(0)
                if isinstance(message, Finished):
                    edge.finish(message)
                else:
                    commits += edge.verdict(message)
                    up += edge.flush()
        assert edge.output == text[: cloud.limit] == cloud.tokens.tokens[len(PROMPT) :]
        if right == 1:
            assert all(c.origin is not Origin.CORRECTED for c in commits)
