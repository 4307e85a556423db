"""An edge with several clouds, or none for a while: where it turns to, what its user is told."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from e2sci.decoding.distribution import pack_ids
from e2sci.decoding.sampling import History, SamplingParams, pick
from e2sci.engines.base import Step
from e2sci.engines.synthetic import EOS, REAL_VOCAB, SyntheticConfig
from e2sci.runtime import clouds as clouds_module
from e2sci.runtime import connection as connection_module
from e2sci.runtime import recovery as recovery_module
from e2sci.runtime.connection import CloudUnreachable, EdgeError, Refused
from e2sci.runtime.edge import Edge
from e2sci.runtime.request import CloudLost
from e2sci.runtime.text import prompt_ids
from e2sci.session.edge import Origin
from e2sci.session.messages import Error, Open, Opened, ProtocolError, Verdict
from live import LiveCloud, LivePeer, Named, RawClient, Watched, cached, draft, pair, target, until
from replicas import Script, Site, sites, welcome
from test_docs import PROTOCOL, bare, section, table

ENDLESS = {"logit_bias": {EOS: -100.0}, "max_tokens": 60}


def slow():
    return Watched(SyntheticConfig(seed=11), seconds=0.002)


def busy(retry_after_s=0.0, code="busy"):
    return ProtocolError(code, f"{code}: not now", retryable=True, retry_after_s=retry_after_s)


async def alone(**options):
    async with pair() as edge:
        return (await edge.generate("hello", mode="cloud", **options)).token_ids


async def midway(edge, then, at=10, **options):
    """Generate; `then()` once `at` tokens are there. The pieces' notices, and the result."""
    notices, done = [], 0
    async for piece in edge.stream("hello", **options):
        done += len(piece.commits)
        if then is not None and done >= at:
            then, do = None, then
            do()
        if piece.notice:
            assert (piece.text, piece.commits) == ("", [])
            notices.append(piece.notice)
    assert piece.result.notices == notices
    return notices, piece.result


# ---- which cloud ------------------------------------------------------------------------------


async def test_the_next_cloud_goes_on_at_once():
    expected = await alone(**ENDLESS)
    a, b = Site("a", slow), Site("b", slow)
    async with sites(a, b), Edge([a, b], draft(), patience=0) as edge:
        notices, result = await midway(edge, a.die, request_id="ab" * 16, **ENDLESS)
        assert result.token_ids == expected
        assert result.stats.reconnects == 1
        assert notices == [
            "cloud lost (closed by the other end): trying another",
            "cloud is back: b",
        ]
        [first], [second] = a.openings, b.openings
        assert first.id == second.id == result.request_id == "ab" * 16
        assert len(second.committed) > 0
        # The one that failed comes last for a while, so it is not even called.
        dials = a.dials
        assert (await edge.generate("hello", **ENDLESS)).token_ids == expected
        assert a.dials == dials


async def test_without_an_id_none_is_sent():
    async with sites(Site("a")) as (a,), Edge(a, draft()) as edge:
        result = await edge.generate("hello", max_tokens=5)
        assert (a.openings[0].id, result.request_id) == ("", "")
        with pytest.raises(ValueError, match="hex digits"):
            await edge.generate("hello", request_id="Zz")


async def test_the_nearest_cloud_comes_first_once_it_is_known(monkeypatch):
    """Untried ones stand behind, in the order given; a failure is forgotten after a while."""
    monkeypatch.setattr(connection_module, "SHUN_SECONDS", 0.2)
    monkeypatch.setattr(clouds_module, "SHUN_SECONDS", 0.2)
    far, near, other = Site("far", delay_s=0.1), Site("near", delay_s=0.005), Site("other")
    async with sites(far, near, other), Edge([far, near, other], draft()) as edge:

        async def asked():
            before = [len(s.openings) for s in (far, near, other)]
            await edge.generate("hello", max_tokens=3)
            return [len(s.openings) - n for s, n in zip((far, near, other), before, strict=True)]

        assert await asked() == [1, 0, 0]
        far.die()
        assert await asked() == [0, 1, 0]
        far.down = False
        await until(lambda: not edge._known.connections[0].shunned)
        assert await asked() == [0, 1, 0]  # nearer
        near.die()
        assert await asked() == [1, 0, 0]  # and known, while the other is not
        assert other.dials == 0


async def test_an_idle_connection_that_ends_says_nothing_against_its_cloud():
    async with sites(Site("a"), Site("b")) as (a, b), Edge([a, b], draft()) as edge:
        await edge.generate("hello", max_tokens=3)
        a.cut()
        await until(lambda: edge._known.connections[0]._channel is None)
        await edge.generate("hello", max_tokens=3)
        assert (len(a.openings), b.dials) == (2, 0)


@pytest.mark.parametrize("odd", ["model", "vocabulary"])
@pytest.mark.parametrize("first", [True, False])
async def test_a_cloud_with_another_model_is_left_out(odd, first):
    """Told once, and not fatal while others work."""
    wrong = Site("odd", lambda: Named("other", other=97 if odd == "vocabulary" else None))
    good, spare = Site("good", slow), Site("spare", slow)
    expected = await alone(**ENDLESS)
    order = [wrong, good, spare] if first and odd == "vocabulary" else [good, wrong, spare]
    async with sites(wrong, good, spare), Edge(order, draft()) as edge:
        told = await edge.connect()
        notices, result = await midway(edge, good.die, **ENDLESS)
        assert result.token_ids == expected
        [left_out] = [n for n in told + notices if "left out" in n]
        assert left_out.startswith("odd is left out: ")
        assert ("different vocabularies" if odd == "vocabulary" else "other, not synth") in left_out
        assert not wrong.openings
        spare.die()
        edge._patience = 0
        with pytest.raises(EdgeError, match="can't reach"):
            await edge.generate("hello")


async def test_clouds_that_are_all_wrong():
    wrong = [Site(name, partial(Named, name, other=97)) for name in ("x", "y")]
    async with sites(*wrong), Edge(wrong, draft(), patience=5) as edge:
        with pytest.raises(Refused, match="different vocabularies"):
            await edge.generate("hello")


async def test_nobody_there_names_them_all():
    a, b = Site("a"), Site("b")
    a.down = b.down = True
    async with Edge([a, b], draft(), patience=0) as edge:
        with pytest.raises(CloudUnreachable, match="can't reach a; can't reach b"):
            await edge.generate("hello")


@pytest.mark.parametrize("code", [1001, 1012, 1013])
async def test_a_cloud_that_closes_the_door_on_a_socket(code):
    expected = await alone(**ENDLESS)

    async def handler(socket):
        client = RawClient(socket)
        await client.receive()
        await client.send(welcome())
        ask = await client.receive()
        await client.send(Opened(request=ask.request, limit=ask.max_tokens))
        await client.receive()
        await socket.close(code, "so long")

    with LivePeer(handler) as leaving, LiveCloud() as cloud:
        async with Edge([leaving.url, cloud.url], draft(), patience=0) as edge:
            notices, result = await midway(edge, None, **ENDLESS)
            assert result.token_ids == expected
            assert notices == [
                "cloud lost (so long): trying another",
                f"cloud is back: {cloud.url}",
            ]
        cloud.idle()


# ---- no place ---------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["busy", "limited", "draining"])
async def test_no_place_here_but_elsewhere(code):
    async with sites(Site("a"), Site("b")) as (a, b), Edge([a, b], draft(), patience=5) as edge:
        a.refusals = [busy(30, code)]
        notices, result = await midway(edge, None, **ENDLESS)
        assert (len(a.openings), len(b.openings)) == (1, 1)
        assert notices == [f"{code}: not now: trying another cloud"]
        assert result.stats.reconnects == 0
        await edge.generate("hello", max_tokens=3)  # not there again so soon
        assert (len(a.openings), len(b.openings)) == (1, 2)


async def test_without_patience_each_cloud_is_asked_once():
    async with sites(Site("a"), Site("b")) as (a, b), Edge([a, b], draft(), patience=0) as edge:
        a.refusals = [busy()]
        await edge.generate("hello", max_tokens=3)
        assert (len(a.openings), len(b.openings)) == (1, 1)
    async with sites(Site("a"), Site("b")) as (a, b), Edge([a, b], draft(), patience=0) as edge:
        a.refusals, b.refusals = [busy()] * 9, [busy()] * 9
        with pytest.raises(Refused, match="busy: not now"):
            await edge.generate("hello")
        assert (len(a.openings), len(b.openings)) == (1, 1)


async def test_draining_moves_new_requests_only():
    """What runs there may end there."""
    a, b = Site("a", slow), Site("b")
    async with sites(a, b), Edge([a, b], draft()) as edge:
        running = asyncio.create_task(edge.generate("hello", **ENDLESS))
        await until(lambda: a.openings)
        a.refusals = [busy(code="draining")]
        await edge.generate("hello", max_tokens=3)
        assert (await running).stats.reconnects == 0
        assert (len(a.openings), len(b.openings)) == (2, 1)


@pytest.mark.parametrize("code", ["busy", "limited", "draining"])
async def test_no_place_anywhere_is_waited_for(code):
    expected = await alone(**ENDLESS)
    async with sites(Site("a")) as (a,), Edge(a, draft(), patience=30) as edge:
        a.refusals = [busy(0.3, code), busy(0, code), busy(0.1, code)]
        began = asyncio.get_running_loop().time()
        notices, result = await midway(edge, None, **ENDLESS)
        assert asyncio.get_running_loop().time() - began > 0.3 + 0.2 + 0.4
        assert result.token_ids == expected
        assert len(notices) == 3
        assert all(n.startswith(f"{code}: not now: trying again in ") for n in notices)
        assert a.dials == 1


async def test_no_place_within_patience():
    """The cloud's wish to be left alone is bounded by it; behind it it is asked once more."""
    async with sites(Site("a")) as (a,), Edge(a, draft(), patience=0.3) as edge:
        a.refusals = [busy(60)] * 3
        with pytest.raises(Refused, match="busy: not now") as error:
            await asyncio.wait_for(edge.generate("hello"), 30)
        assert error.value.code == "busy"
        assert len(a.openings) == 2
    async with sites(Site("a")) as (a,), Edge(a, draft(), patience=0) as edge:
        a.refusals = [busy(60)]
        with pytest.raises(Refused, match="busy: not now"):
            await edge.generate("hello")
        assert len(a.openings) == 1


async def test_no_place_for_a_resume_leaves_the_text_so_far():
    expected = await alone(**ENDLESS)
    async with sites(Site("a", slow)) as (a,), Edge(a, draft(), patience=0.3) as edge:

        def full():
            a.refusals = [busy()] * 50
            a.cut()

        with pytest.raises(CloudLost, match="the cloud is gone: busy: not now") as lost:
            await midway(edge, full, **ENDLESS)
        ids = lost.value.result.token_ids
        assert 10 <= len(ids) < 60
        assert ids == expected[: len(ids)]
        a.refusals.clear()


# ---- every code -------------------------------------------------------------------------------

ROWS = table(section(PROTOCOL, "Errors"))
BY_CLOUD = [(bare(r[0]), r[1], r[3] == "yes") for r in ROWS if r[2] == "cloud"]


def once(code, retryable, request=None):
    """A cloud that refuses the first opening, with this code, and answers the next."""
    seen = []

    async def answer(message, say):
        if isinstance(message, Open):
            seen.append(message)
            number = message.request
            if len(seen) == 1:
                about = number if request is None else request
                await say(Error(request=about, code=code, message="no", retryable=retryable))
            else:
                await say(Opened(request=number, limit=2))
                await say(Verdict(request=number, branch=0, start=len(message.prompt), ids=b"AB"))

    return Script(answer), seen


@pytest.mark.parametrize(("code", "level", "retryable"), BY_CLOUD)
async def test_what_an_edge_makes_of_each_code(code, level, retryable):
    if level in ("request", "both"):
        script, seen = once(code, retryable)
        async with Edge(script, draft(), patience=5) as edge:
            if retryable:
                assert (await edge.generate("hello", fill=False)).text == "AB"
                assert len(seen) == 2
            else:
                with pytest.raises(Refused, match=r"^no$") as error:
                    await edge.generate("hello")
                assert error.value.code == code
                assert len(seen) == 1
            assert script.dials == 1
    if level in ("connection", "both"):
        script, seen = once(code, retryable, request=0)  # behind the handshake: as a lost one
        async with Edge(script, draft(), patience=5) as edge:
            result = await edge.generate("hello", fill=False)
            assert (result.text, result.stats.reconnects, script.dials) == ("AB", 1, 2)
        greeting = Error(code=code, message="no", retryable=retryable)
        script = Script(None, greeting)  # in place of a Welcome
        async with Edge(script, draft(), patience=0) as edge:
            with pytest.raises(CloudUnreachable if retryable else Refused, match=r"^no$"):
                await edge.generate("hello")


async def test_a_final_refusal_of_a_resume_leaves_the_text_so_far():
    async with sites(Site("a", slow)) as (a,), Edge(a, draft(), patience=5) as edge:

        def narrow():
            a.refusals = [ProtocolError("too_long", "no room for that")]
            a.cut()

        with pytest.raises(CloudLost, match="no room for that") as lost:
            await midway(edge, narrow, **ENDLESS)
        assert len(lost.value.result.token_ids) >= 10


async def test_a_place_that_is_taken_back_is_a_lost_one():
    """Retryable in mid-answer: go on elsewhere, from what is committed."""

    async def answer(message, say):
        if isinstance(message, Open):
            number, at = message.request, len(message.prompt)
            await say(Opened(request=number, limit=message.max_tokens))
            await say(Verdict(request=number, branch=0, start=at, ids=pack_ids(expected[:3])))
            await say(Error(request=number, code="draining", message="bye", retryable=True))

    expected = await alone(**ENDLESS)
    async with sites(Site("b")) as (b,), Edge([Script(answer), b], draft()) as edge:
        notices, result = await midway(edge, None, **ENDLESS)
        assert result.token_ids == expected
        assert notices == ["bye: trying another cloud", "cloud is back: b"]


# ---- no cloud at all --------------------------------------------------------------------------


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
            a.cloud.engine.info = Named("other").info
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
