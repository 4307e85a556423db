"""How far the edge runs ahead, and when it sends."""

from __future__ import annotations

from e2sci.decoding.acceptance import Proposal
from e2sci.engines.synthetic import EOS
from e2sci.session.edge import EdgeSession
from e2sci.session.lookahead import Lookahead
from world import REAL_VOCAB, opening


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


def edge(window: int, **flags: bool) -> EdgeSession:
    return EdgeSession(
        opening(**flags),
        window=window,
        eos=frozenset({EOS}),
        vocab=REAL_VOCAB,
        lookahead=Lookahead(window, most=8),
    )


def sizes(session: EdgeSession, tokens: int) -> list[int]:
    """Tokens in each window sent while `tokens` are drafted."""
    sent = []
    for token in range(97, 97 + tokens):
        if session.wants_draft:
            windows = session.drafted(Proposal(token), len(session.line), session.branch)
            sent += [len(w.ids) for w in windows]
    return sent


def test_the_first_token_goes_at_once_and_then_windows():
    assert sizes(edge(3), 8) == [1, 3, 3, 1]  # the limit of 8 sends the last


def test_without_lookahead_windows_are_whole():
    session = edge(3, lookahead=False)
    assert sizes(session, 8) == [3]
    assert not session.wants_draft
