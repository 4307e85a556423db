"""Peers that break the protocol: errors stay as small as they are, and nothing stays behind."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from e2sci.decoding.acceptance import RuleParams
from e2sci.decoding.distribution import pack_ids, sketch
from e2sci.engines.base import ContextFull, Step, fingerprint
from e2sci.engines.synthetic import REAL_VOCAB, SyntheticConfig
from e2sci.runtime.admission import Limits
from e2sci.runtime.connection import EdgeError, Refused
from e2sci.runtime.request import CloudLost
from e2sci.session.messages import (
    MAX_FRAME,
    VERSION,
    Cancel,
    Error,
    Finished,
    Hello,
    Open,
    Opened,
    Verdict,
    Welcome,
    Window,
    encode_message,
)
from live import (
    Edge,
    LiveCloud,
    LivePeer,
    RawClient,
    Watched,
    cached,
    draft,
    pair,
    raw_client,
    target,
)
from world import opening


def window(ids, *, request=1, branch=0, start=None, sketches=()):
    at = len(opening().prompt) if start is None else start
    return Window(request=request, branch=branch, start=at, ids=pack_ids(ids), sketches=sketches)


async def opened(client, **fields):
    """Open request 1, without fill: the cloud waits for windows."""
    ask = msgspec.structs.replace(opening(fill=False), **fields)
    await client.send(ask)
    answer = await client.receive()
    assert isinstance(answer, Opened), answer


async def the_error(client, request=1):
    """Whatever comes first, an error for the request must come."""
    while not isinstance(message := await client.receive(), Error):
        pass
    assert message.request == request
    assert len(message.message.splitlines()) == 1
    return message


async def still_serves(client):
    """The connection has survived: the next request on it is answered to its end."""
    await client.send(msgspec.structs.replace(opening(max_tokens=3, drafting=False), request=99))
    while not isinstance(message := await client.receive(), Finished):
        assert message.request == 99
    assert message.reason == "length"


# ---- the connection ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", "malformed"),
        (b"\xff\xff", "malformed"),
        (b"\x91" * 5000, "malformed"),
        (b"\x92\x05", "malformed"),
        (b"\x92\xcc\xc8\x01", "malformed"),
        ("hello", "malformed"),
        (Window(request=1, branch=0, start=0, ids=b""), "malformed"),
        (Error(code="x", message="x"), "malformed"),
    ],
)
@pytest.mark.parametrize("greet", [False, True])
async def test_a_frame_that_is_none_of_ours_ends_the_connection(cloud, frame, code, greet):
    async with raw_client(cloud.url, greet=greet) as client:
        if greet and isinstance(frame, Window):
            frame = Opened(request=1, limit=1)
        await client.send(frame)
        error = await the_error(client, request=0)
        assert error.code == code
        assert await client.closed() == 1000


async def test_an_oversized_frame_ends_the_connection(cloud):
    async with raw_client(cloud.url) as client:
        await client.send(bytes(MAX_FRAME + 1))
        assert await client.closed() == 1009


@pytest.mark.parametrize("version", [0, VERSION + 1])
async def test_an_edge_of_another_version(cloud, version):
    async with raw_client(cloud.url, greet=False) as client:
        error = await client.hello(version=version)
        assert error.code == "version"
        assert f"version {version}" in error.message
        assert str(VERSION) in error.message
        assert "same e2sci release" in error.message
        await client.closed()


@pytest.mark.parametrize("size", [-1, 0])
async def test_an_edge_without_a_vocabulary(cloud, size):
    async with raw_client(cloud.url, greet=False) as client:
        error = await client.hello(real_vocab=size, fingerprint=fingerprint(target()).at(size))
        assert error.code == "tokenizer"
        await client.closed()


async def test_an_edge_that_says_nothing(cloud, monkeypatch):
    monkeypatch.setattr(cloud.cloud, "limits", Limits(hello_s=0.05))
    async with raw_client(cloud.url, greet=False) as client:
        assert (await the_error(client, request=0)).code == "slow"


# ---- the request ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"prompt": b""}, "empty_prompt", "empty"),
        ({"prompt": pack_ids([65] * 4096)}, "too_long", "4096"),
        ({"prompt": pack_ids([65, REAL_VOCAB])}, "bad_token", f"{REAL_VOCAB} is out of range"),
        ({"prompt": pack_ids([65, 2**31])}, "bad_token", f"{2**31} is out of range"),
        ({"prompt": b"\xff"}, "malformed", "prompt"),
        ({"committed": pack_ids([REAL_VOCAB + 5])}, "bad_token", "committed"),
        ({"committed": pack_ids([65] * 40)}, "bad_request", "max_tokens"),
        ({"max_tokens": 0}, "bad_request", "max_tokens"),
        ({"max_tokens": -3}, "bad_request", "max_tokens"),
        ({"request": 0}, "bad_request", "ascend"),
    ],
)
async def test_an_opening_that_can_not_be_served(cloud, fields, code, words):
    async with raw_client(cloud.url) as client:
        await client.send(msgspec.structs.replace(opening(), **fields))
        error = await the_error(client, fields.get("request", 1))
        assert (error.code, error.retryable) == (code, False)
        assert words in error.message
        await still_serves(client)


async def test_values_are_checked_on_arrival(cloud):
    """What our own classes would refuse to build; only this request ends."""
    async with raw_client(cloud.url) as client:
        fields = msgspec.msgpack.decode(encode_message(opening()))
        at = Open.__struct_fields__.index("sampling") + 1
        fields[at] = {"temperature": -1.0}
        await client.send(msgspec.msgpack.encode(fields))
        error = await the_error(client)
        assert error.code == "malformed"
        assert "temperature is -1.0" in error.message
        await still_serves(client)


async def test_the_context_is_the_clouds_limit():
    with LiveCloud(target(context=64)) as cloud:
        async with raw_client(cloud.url) as client:
            await client.send(opening(max_tokens=500, drafting=False))
            limit = (await client.receive()).limit
            assert limit == 64 - len(opening().prompt)
        cloud.check()


async def test_request_numbers_ascend(cloud):
    async with raw_client(cloud.url) as client:
        await opened(client)
        await client.send(opening())
        assert (await the_error(client)).code == "bad_request"
        await still_serves(client)


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        (window([65], start=4000), "bad_window", "4000"),
        (window([65], start=len(opening().prompt) + 3), "bad_window", "expected"),
        (window([65, REAL_VOCAB]), "bad_token", "window"),
        (window([65] * 65), "malformed", "64"),
        (window([65, 66], sketches=(b"\x01\x00\x41\x00",)), "bad_window", "2 tokens with 1"),
        (window([65], sketches=(b"\x05",)), "bad_window", "sketch"),
        (window([65], sketches=(b"\x01\x00\xff\xff\x7f\x00",)), "bad_window", "ids in a sketch"),
    ],
)
async def test_a_window_that_can_not_be_ours(cloud, wrong, code, words):
    async with raw_client(cloud.url) as client:
        await opened(client)
        await client.send(wrong)
        error = await the_error(client)
        assert error.code == code
        assert words in error.message
        await client.send(window([65]))  # the request is gone; this is on its way still
        await still_serves(client)


async def test_a_window_of_a_request_that_is_not_open(cloud):
    async with raw_client(cloud.url) as client:
        await opened(client)
        await client.send(window([65], request=7))
        assert (await the_error(client, 7)).code == "unknown_request"
        await client.send(Cancel(request=1))
        while not isinstance(message := await client.receive(), Finished):
            assert isinstance(message, Verdict)
        assert message.reason == "cancelled"
        await client.send(Cancel(request=1))  # twice does no harm
        await client.send(Cancel(request=8))
        await still_serves(client)


async def test_a_branch_of_the_future():
    """The edge can't have cut what the cloud has not judged."""
    with LiveCloud(Watched(SyntheticConfig(seed=11), seconds=0.02)) as slow:
        async with raw_client(slow.url) as client:
            await opened(client)
            await client.send(window([65, 66]))
            await client.send(window([67], branch=5, start=len(opening().prompt)))
            assert (await the_error(client)).code == "bad_window"
        slow.check()


async def test_a_flood():
    with LiveCloud(Watched(SyntheticConfig(seed=11), seconds=0.02)) as slow:
        async with raw_client(slow.url) as client:
            await opened(client, max_tokens=500)
            for i in range(3):
                await client.send(window([65] * 64, start=len(opening().prompt) + 64 * i))
            assert (await the_error(client)).code == "flooded"
            await still_serves(client)
        slow.check()


@pytest.mark.parametrize("accept", ["fuzzy", "rejection"])
async def test_sketches_that_are_missing_or_lie(cloud, accept):
    async with raw_client(cloud.url) as client:
        await opened(client, rule=RuleParams(name=accept))
        await client.send(window([65]))
        assert "sketches" in (await the_error(client)).message
    if accept == "rejection":
        [[q]] = target().forward([Step(0, [65])])
        without = sketch(q)
        absent = next(i for i in range(REAL_VOCAB) if i not in q.top(16).ids)
        async with raw_client(cloud.url) as client:
            await opened(client, rule=RuleParams(name=accept))
            await client.send(window([absent], sketches=(without,)))
            assert "not in its own sketch" in (await the_error(client)).message


async def test_an_engine_that_fails():
    class Failing(Watched):
        def forward(self, steps):
            if any(self.length(s.sequence) + len(s.tokens) > 40 for s in steps):
                raise ContextFull("out of cache")
            return super().forward(steps)

    async with pair(draft(), Failing(SyntheticConfig(seed=11))) as edge:
        with pytest.raises(Refused, match="engine failed: out of cache"):
            await edge.generate("hello", max_tokens=100)
        assert (await edge.generate("hello", max_tokens=5)).token_ids
    async with pair(Failing(SyntheticConfig(seed=11, divergence=0.5)), target()) as edge:
        alone = await edge.generate("hello", mode="cloud", max_tokens=100)
        answer = await edge.generate("hello", fill=False, max_tokens=100)
        assert answer.token_ids == alone.token_ids
        assert any("draft model failed" in n and "out of cache" in n for n in answer.notices)


@pytest.mark.parametrize("moment", ["after hello", "after open", "in a pass", "in a flood"])
async def test_a_client_that_vanishes_leaves_nothing(moment):
    engine = Watched(SyntheticConfig(seed=11), seconds=0.02)
    with LiveCloud(engine) as cloud:
        async with raw_client(cloud.url) as client:
            if moment != "after hello":
                await opened(client, fill=moment == "in a pass", max_tokens=1000)
            if moment == "in a flood":
                await client.send(window([65] * 64))
            if moment in ("in a pass", "in a flood"):
                await asyncio.sleep(0.03)
            client.vanish()
        cloud.check()
        assert cached(engine) == 0


# ---- clouds that lie --------------------------------------------------------------------------


def welcome(**fields):
    engine = target()
    known = {
        "model": "liar",
        "vocab_size": REAL_VOCAB,
        "shared_vocab": REAL_VOCAB,
        "fingerprint": fingerprint(engine).at(REAL_VOCAB),
        "template": "",
        "context": 4096,
        "eos": (REAL_VOCAB - 1,),
    }
    return Welcome(**{**known, **fields})


def lying(*lies, greeting=None, limit=None):
    """A cloud that answers every window of a request with `lies`; the last may be to hang up."""

    async def handler(socket):
        client = RawClient(socket)
        assert isinstance(await client.receive(), Hello)
        await client.send(greeting or welcome())
        while True:
            message = await client.receive()
            if isinstance(message, Open):
                number, at = message.request, len(message.prompt)
                await client.send(Opened(request=number, limit=limit or message.max_tokens))
            if isinstance(message, Window):
                for lie in lies:
                    if lie is None:
                        return
                    await client.send(lie(number, at) if callable(lie) else lie)

    return LivePeer(handler)


@pytest.mark.parametrize(
    "lie",
    [
        lambda n, at: Verdict(request=n, branch=0, start=at + 1, accepted=1),
        lambda n, at: Verdict(request=n, branch=0, start=at, accepted=50),
        lambda n, at: Verdict(request=n, branch=0, start=at, accepted=-1, ids=pack_ids([65])),
        lambda n, at: Verdict(request=n, branch=9, start=at, accepted=1),
        lambda n, at: Verdict(request=n, branch=9, start=at, ids=pack_ids([65]), rejected=True),
        lambda n, at: Verdict(request=n, branch=0, start=at, ids=pack_ids([REAL_VOCAB])),
        lambda n, at: Verdict(request=n, branch=0, start=at, ids=b"\xff"),
        lambda n, at: Verdict(request=n, branch=0, start=at, accepted=1, tolerated=b"\xff"),
        lambda n, at: Verdict(request=n, branch=0, start=at, rejected=True),
    ],
)
async def test_a_verdict_that_fits_nothing(lie):
    with lying(lie, lambda n, at: Finished(request=n, reason="stop")) as peer:
        async with Edge(peer.url, draft()) as edge:
            with pytest.raises(EdgeError, match="the cloud broke the protocol") as error:
                await asyncio.wait_for(edge.generate("hello", window=4), 5)
            assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("garbage", [b"\xff", "text", Opened, Cancel(request=1), welcome()])
async def test_garbage_from_a_cloud_is_not_tried_for_ever(garbage):
    frame = (lambda n, at: b"\x91\x07") if garbage is Opened else garbage
    with lying(frame) as peer:
        async with Edge(peer.url, draft()) as edge:
            with pytest.raises(CloudLost, match="the cloud is gone"):
                await asyncio.wait_for(edge.generate("hello"), 10)


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (welcome(version=VERSION + 1), f"version {VERSION + 1}, this edge {VERSION}; install"),
        (Error(code="version", message="the edge speaks version 1, this cloud 2"), "this cloud 2"),
        (welcome(fingerprint="0" * 32), "different vocabularies"),
        (welcome(shared_vocab=REAL_VOCAB + 9), "different vocabularies"),
        (welcome(shared_vocab=-9, fingerprint=fingerprint(target()).at(-9)), "different voc"),
        (Opened(request=1, limit=5), "answered with Opened"),
        (b"\xc1", "not a message"),
        ("hello", "text frame"),
    ],
)
async def test_a_cloud_that_greets_wrongly(greeting, words):
    with lying(greeting=greeting) as peer:
        async with Edge(peer.url, draft()) as edge:
            with pytest.raises(Refused, match=words):
                await edge.generate("hello")


async def test_a_budget_that_the_cloud_shortens():
    with lying(lambda n, at: Verdict(request=n, branch=0, start=at, ids=b"AB"), limit=2) as peer:
        async with Edge(peer.url, draft()) as edge:
            result = await asyncio.wait_for(edge.generate("hello", max_tokens=9), 5)
            assert (result.text, result.finish_reason) == ("AB", "length")


async def test_text_that_is_held_back_is_not_lost_with_the_cloud():
    """AB might have become the stop string ABC."""

    def said(n, at):
        return Verdict(request=n, branch=0, start=at, ids=b"xAB") if n == 1 else b"garbage"

    with lying(said, None) as peer:
        async with Edge(peer.url, draft()) as edge:
            with pytest.raises(CloudLost) as lost:
                await asyncio.wait_for(edge.generate("hello", stop=("ABC",)), 5)
            assert lost.value.result.text == "xAB"


async def test_the_last_token_is_the_end_whether_or_not_the_cloud_says_so():
    with lying(lambda n, at: Verdict(request=n, branch=0, start=at, ids=b"AB")) as peer:
        async with Edge(peer.url, draft()) as edge:
            result = await asyncio.wait_for(edge.generate("hello", max_tokens=2), 5)
            assert (result.text, result.finish_reason) == ("AB", "length")


async def test_a_cloud_that_goes_away_at_every_opening():
    """It answers the handshake each time, and never gets anywhere."""

    async def handler(socket):
        client = RawClient(socket)
        await client.receive()
        await client.send(welcome())
        await client.receive()

    with LivePeer(handler) as peer:
        async with Edge(peer.url, draft()) as edge:
            with pytest.raises(CloudLost, match="the cloud is gone"):
                await asyncio.wait_for(edge.generate("hello"), 10)
