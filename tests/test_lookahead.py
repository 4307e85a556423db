"""How far the edge runs ahead, and when it sends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from e2sci.decoding.acceptance import Proposal, RuleParams
from e2sci.decoding.distribution import Dense
from e2sci.decoding.sampling import SamplingParams
from e2sci.engines.base import Step
from e2sci.engines.synthetic import EOS
from e2sci.runtime.caches import Cache
from e2sci.runtime.drafter import Drafter
from e2sci.session.edge import EdgeSession
from e2sci.session.lookahead import Lookahead
from world import DRAFT, REAL_VOCAB, opening


def test_it_fills_a_round_trip():
    lookahead = Lookahead(4, most=64)
    assert lookahead.limit == 64  # nothing is known yet
    lookahead.measured(10)
    assert lookahead.limit == 4 + 15
    lookahead.rejected()
    assert lookahead.limit == 4 + 15
    lookahead.measured(20)  # an average: 10 + .3 · 10
    assert lookahead.limit == 4 + int(1.5 * 13)
    for _ in range(50):
        lookahead.measured(1000)
    assert lookahead.limit == 64
    for _ in range(50):
        lookahead.measured(0.1)
    assert lookahead.limit == 8  # a window on its way, another behind it


def test_the_papers_growth():
    lookahead = Lookahead(4, eta=0.25, most=64)
    limits = []
    for _ in range(5):
        limits.append(lookahead.limit)
        lookahead.advanced()
    assert limits == [4 + int(4 * 1.25**n) for n in range(5)]
    lookahead.rejected()
    assert lookahead.limit == 8


def edge(window: int, doubt: float = 0.0, early: int = 1, **flags: bool) -> EdgeSession:
    return EdgeSession(
        opening(**flags),
        window=window,
        eos=frozenset({EOS}),
        vocab=REAL_VOCAB,
        lookahead=Lookahead(window, most=8),
        doubt=doubt,
        early=early,
    )


def sizes(session: EdgeSession, tokens: int, confidence: Sequence[float] = ()) -> list[int]:
    """Tokens in each window sent while `tokens` are drafted, with `confidence` or surely."""
    sent = []
    for i in range(tokens):
        if session.wants_draft:
            proposal = Proposal(97 + i, confidence=confidence[i] if confidence else 1.0)
            windows = session.drafted(proposal, len(session.line), session.branch)
            sent += [len(w.ids) for w in windows]
    return sent


def test_the_first_token_goes_at_once_and_then_windows():
    assert sizes(edge(3), 8) == [1, 3, 3, 1]  # the limit of 8 sends the last


def test_without_lookahead_windows_are_whole():
    session = edge(3, lookahead=False)
    assert sizes(session, 8) == [3]
    assert not session.wants_draft


def test_a_doubted_token_goes_at_once_with_those_before_it():
    sure, unsure = 0.9, 0.89
    confidence = [sure, sure, unsure, unsure, sure, sure, sure, sure]
    assert sizes(edge(3, doubt=0.9), 8, confidence) == [1, 2, 1, 3, 1]
    assert sizes(edge(3), 8, confidence) == [1, 3, 3, 1]
    assert sizes(edge(4, doubt=0.9, early=3), 8, confidence) == [1, 3, 4]


def test_doubt_is_nothing_without_lookahead():
    assert sizes(edge(3, doubt=0.9, lookahead=False), 8, [0.5] * 8) == [3]


def test_confidence_is_the_drafts_largest_probability():
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=4)):
        session = edge(3, doubt=0.9)
        settings = {"rule": RuleParams(), "sampling": sampling, "vocab": REAL_VOCAB}
        DRAFT.truncate(0, 0)
        drafter = Drafter(DRAFT, Cache(0), **settings)
        found = drafter.compute(drafter.begin(session)).confidence
        DRAFT.truncate(0, 0)
        [[q]] = DRAFT.forward([Step(0, session.committed)])
        assert isinstance(q, Dense)
        assert found == pytest.approx(np.exp(q.all_log_probs()[:REAL_VOCAB]).max(), rel=0.02)
        DRAFT.truncate(0, 0)
        drafter = Drafter(DRAFT, Cache(0), **settings)
        assert drafter.compute(drafter.begin(edge(3))).confidence == 1
