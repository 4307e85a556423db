"""An edge with several clouds: where it turns to, what its user is told."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from e2sci.decoding.distribution import pack_ids
from e2sci.runtime import clouds as clouds_module
from e2sci.runtime import connection as connection_module
from e2sci.runtime.connection import CloudUnreachable, EdgeError, Refused
from e2sci.runtime.request import CloudLost
from e2sci.session.messages import Error, Open, Opened, ProtocolError, Verdict
from live import Edge, LiveCloud, LivePeer, Named, RawClient, draft, until
from replicas import ENDLESS, Script, Site, alone, busy, midway, sites, slow, welcome
from test_docs import PROTOCOL, bare, section, table

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
