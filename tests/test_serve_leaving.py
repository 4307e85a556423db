"""A client that goes away from `e2sci serve` leaves nothing behind at either end."""

from __future__ import annotations

import openai
import pytest

from e2sci.engines.synthetic import EOS, SyntheticConfig
from live import LiveCloud, Watched
from serving import HELLO, NAME, LiveEdge, chat

ENDLESS = {"logit_bias": {str(EOS): -100}}


@pytest.fixture
def slow():
    """An edge whose texts take a minute."""
    engine = Watched(SyntheticConfig(seed=11, eos_bias=-20.0), slots=4, seconds=0.02)
    with LiveCloud(engine) as cloud, LiveEdge(cloud) as edge:
        yield edge


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_is_left_ends_at_both_ends(slow, n):
    with slow.openai() as client:
        options = {"model": NAME, "messages": HELLO, "max_tokens": 3000, "n": n}
        with client.chat.completions.create(**options, stream=True) as stream:
            for _ in range(10):
                next(stream)
            assert not slow.free
            assert slow.cloud.busy == n
    slow.idle()


@pytest.mark.parametrize("options", [{}, {"n": 4}, {"extra_body": {"e2sci": {"mode": "cloud"}}}])
def test_an_answer_that_nobody_waits_for_ends_at_both_ends(slow, options):
    with slow.openai(timeout=1.0) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=3000, **options)
    slow.idle()


def test_so_does_the_draft_alone():
    engine = Watched(SyntheticConfig(seed=11, eos_bias=-20.0), slots=1, seconds=0.02)
    with LiveEdge(None, engine, name=NAME) as edge:
        own = {"extra_body": {"e2sci": {"mode": "draft"}}}
        with edge.openai(timeout=1.0) as client, pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=3000, **own)
        edge.idle()


def test_a_client_that_is_not_let_wait_for_its_turn(one_cloud):
    """With one place at the draft, who leaves the line leaves nothing behind."""
    engine = Watched(SyntheticConfig(seed=11, eos_bias=-20.0, divergence=0.5), 1, seconds=0.01)
    with LiveEdge(one_cloud, engine) as edge, edge.openai() as client:
        options = {"model": NAME, "messages": HELLO, "max_tokens": 3000, "extra_body": ENDLESS}
        with client.chat.completions.create(**options, stream=True) as first:
            next(first)
            with edge.openai(timeout=0.5) as other, pytest.raises(openai.APITimeoutError):
                other.chat.completions.create(**options)
            next(first)
        edge.idle()
        assert chat(edge, max_tokens=5, extra_body=ENDLESS).usage.completion_tokens == 5
