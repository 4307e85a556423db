"""An edge that has lost its only cloud: it waits, fails, or lets the draft go on alone."""

from __future__ import annotations

import asyncio

import pytest

from e2sci.decoding.sampling import History, SamplingParams, pick
from e2sci.engines.base import Step
from e2sci.engines.synthetic import REAL_VOCAB
from e2sci.runtime import recovery as recovery_module
from e2sci.runtime.request import CloudLost
from e2sci.runtime.text import prompt_ids
from e2sci.session.edge import Origin
from e2sci.session.messages import Error, ProtocolError
from live import Edge, Named, Watched, cached, draft, target, until
from replicas import ENDLESS, Site, alone, busy, midway, sites, slow


async def test_fail_does_not_wait():
    async with sites(Site("a", slow)) as (a,), Edge(a, draft(), patience=30) as edge:
        with pytest.raises(CloudLost, match="gone: closed by the other end") as lost:
            await midway(edge, a.cut, on_cloud_loss="fail", **ENDLESS)
        assert len(lost.value.result.token_ids) >= 10
        assert a.dials == 1


async def test_fail_tries_each_other_cloud_once():
    expected = await alone(**ENDLESS)
    a, b, c = Site("a", slow), Site("b", slow), Site("c", slow)
    async with sites(a, b, c), Edge([a, b, c], draft(), patience=30) as edge:
        b.refusals = [busy()]
        notices, result = await midway(edge, a.cut, on_cloud_loss="fail", **ENDLESS)
        assert result.token_ids == expected
        assert (a.dials, len(b.openings), len(c.openings)) == (1, 1, 1)
        assert notices[-1] == "cloud is back: c"
        a.down = True
        b.die()
        with pytest.raises(CloudLost):
            await midway(edge, c.die, on_cloud_loss="fail", **ENDLESS)


def picks(engine, prompt, tokens, sampling):
    """The engine's own choice at each position of a text."""
    history, out = History(prompt), []
    for token in tokens:
        engine.truncate(0, 0)
        [[p]] = engine.forward([Step(0, history.tokens)])
        out.append(pick(p.limited(REAL_VOCAB), sampling, history))
        history.append(token)
    return out


SAMPLED = {"temperature": 0.9, "seed": 4}


@pytest.mark.parametrize("mode", ["pipelined", "sync"])
@pytest.mark.parametrize("sampled", [{}, SAMPLED])
async def test_the_draft_goes_on_alone_until_the_cloud_is_back(mode, sampled):
    a = Site("a", slow)
    options = {**ENDLESS, **sampled, "mode": mode, "max_tokens": 90}
    near = Watched(draft().config, seconds=0.002)
    async with sites(a), Edge(a, near, patience=0.05) as edge:
        notices, origins = [], []
        async for piece in edge.stream("hello", on_cloud_loss="draft", **options):
            origins += [commit.origin for commit in piece.commits]
            if len(origins) >= 20 and not notices and not a.down:
                a.die()
            if a.down and origins.count(Origin.DRAFTED) >= 15:
                a.down = False
                await until(lambda: edge._known.connections[0]._channel)
            if piece.notice:
                notices.append(piece.notice)
        result = piece.result
    assert len(result.token_ids) == 90
    assert result.finish_reason == "length"
    assert origins == [c.origin for c in result.commits]
    assert result.stats.drafted_alone == origins.count(Origin.DRAFTED) >= 15
    assert result.stats.wasted_drafts >= 0
    first = origins.index(Origin.DRAFTED)
    assert first >= 20
    assert origins[-1] is not Origin.DRAFTED
    assert notices[0].startswith("cloud lost (closed by the other end): waiting 0.05 s")
    assert notices[1:] == [
        "drafting alone: what follows is not checked by the target",
        "cloud is back",
    ]
    # Strict wherever the cloud judged; the draft's own where it did not.
    sampling = SamplingParams(**sampled, logit_bias=ENDLESS["logit_bias"])
    prompt = prompt_ids(draft(), "hello", system=None, raw=False)
    his = picks(target(), prompt, result.token_ids, sampling)
    mine = picks(draft(), prompt, result.token_ids, sampling)
    for position, (token, origin) in enumerate(zip(result.token_ids, origins, strict=True)):
        assert token == (mine if origin is Origin.DRAFTED else his)[position], position


async def test_the_draft_finishes_alone_where_no_cloud_comes_back():
    a = Site("a", slow)
    async with sites(a), Edge(a, draft(), patience=0) as edge:
        _, result = await midway(edge, a.die, on_cloud_loss="draft", **ENDLESS)
        assert (len(result.token_ids), result.finish_reason) == (60, "length")
        assert result.commits[-1].origin is Origin.DRAFTED
        await until(lambda: cached(edge.engine) == 0)


@pytest.mark.parametrize("why", ["another model", "too long", "lost too often"])
async def test_the_draft_finishes_alone_where_no_cloud_will_have_the_text(why, monkeypatch):
    monkeypatch.setattr(recovery_module, "_LOSSES", 0 if why == "lost too often" else 5)
    a = Site("a", slow)

    def gone():
        if why == "too long":
            a.refusals = [ProtocolError("too_long", "no room for that")]
        if why == "another model":
            a.cloud.info = Named("other").info
        a.cut()

    async with sites(a), Edge(a, draft(), patience=5) as edge:
        notices, result = await midway(edge, gone, on_cloud_loss="draft", **ENDLESS)
        assert len(result.token_ids) == 60
        assert result.commits[-1].origin is Origin.DRAFTED
        assert any(n.startswith("no cloud will go on with the text: ") for n in notices)


async def test_stop_strings_and_eos_end_a_text_drafted_alone():
    a = Site("a", slow)
    async with sites(a), Edge(a, draft(), patience=0) as edge:
        _, whole = await midway(edge, a.die, at=1, on_cloud_loss="draft", **ENDLESS)
        stop = whole.text[-12:-8]
        a.down = False
        _, result = await midway(edge, a.die, at=1, on_cloud_loss="draft", stop=(stop,), **ENDLESS)
        assert result.finish_reason == "stop"
        assert stop not in result.text


async def test_drafting_alone_needs_a_draft():
    async with sites(Site("a")) as (a,), Edge(a, draft()) as edge:
        for mode in ("cloud", "draft"):
            with pytest.raises(ValueError, match="on_cloud_loss"):
                await edge.generate("hello", mode=mode, on_cloud_loss="draft")


async def test_a_user_who_leaves_while_the_cloud_is_searched_for_leaves_nothing():
    a = Site("a", slow)
    engine = draft()
    async with sites(a), Edge(a, engine, patience=30) as edge:
        pieces = edge.stream("hello", **ENDLESS)
        async for piece in pieces:
            if piece.commits and not a.down:
                a.die()
            if piece.notice:
                break
        await pieces.aclose()
        await until(lambda: len(edge._free) == engine.slots and cached(engine) == 0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [t for t in others if "_find" in repr(t)]


async def test_a_connection_that_breaks_before_it_is_used():
    """Between finding a cloud and asking it: the request is told all the same."""
    a = Site("a")
    async with sites(a), Edge(a, draft()) as edge:
        await edge.connect()
        ensure = edge._known.ensure

        async def broken(*args, **kwargs):
            found = await ensure(*args, **kwargs)
            if a.dials == 1:
                a.cut()
                await until(lambda: found._channel is None)
            return found

        edge._known.ensure = broken
        result = await asyncio.wait_for(edge.generate("hello", max_tokens=5), 20)
        assert (len(result.token_ids), a.dials) == (5, 2)


async def test_late_messages_of_an_old_request_are_dropped():
    """The same connection, a new number: what the old one still says is nobody's."""
    a = Site("a", slow)
    expected = await alone(**ENDLESS)
    async with sites(a), Edge(a, draft(), patience=5) as edge:
        inboxes = edge._known.connections[0]._inboxes

        def taken_back():
            [number] = inboxes
            refusal = Error(request=number, code="busy", message="no", retryable=True)
            inboxes[number].put(refusal)  # which the cloud knows nothing of: its seat talks on

        _, result = await midway(edge, taken_back, **ENDLESS)
        assert result.token_ids == expected
        assert [o.request for o in a.openings] == [1, 2]
