"""Caches that outlive a request: the next turn reads what is new, the text is the same, and nobody
profits from what another has read."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from e2sci.engines.base import EngineError
from e2sci.engines.synthetic import EOS, SyntheticConfig
from e2sci.runtime.admission import Client
from e2sci.runtime.caches import Caches
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.connection import EdgeError
from e2sci.runtime.text import prompt_ids
from e2sci.runtime.transport import memory_pair
from live import TIMES, Edge, Watched, cached, draft, idle, pair, until

ENDLESS = {EOS: -100.0}
DIVERGES = SyntheticConfig(seed=11, divergence=0.5)


# ---- which one is taken -----------------------------------------------------------------------


def test_the_longest_beginning_is_taken():
    room = Caches(3)
    for _ in range(3):
        room.take([9])
    room.give(0, [1, 2, 3])
    room.give(1, [1, 2, 3, 4, 5])
    room.give(2, [1, 2, 7])
    cache = room.take([1, 2, 3, 4, 6])
    assert (cache.sequence, cache.tokens) == (1, [1, 2, 3, 4])
    assert len(room) == 2
    assert room.tokens == 6


def test_one_token_is_always_left_to_feed():
    room = Caches(1)
    room.give(0, [1, 2, 3])
    assert room.take([1, 2, 3]).tokens == [1, 2]
    room.give(0, [1, 2, 3])
    assert room.take([1]).tokens == []


def test_little_in_common_is_not_worth_a_long_text():
    room = Caches(2)
    room.take([9])
    room.give(0, list(range(100)))
    assert room.take([0, 1, 2, 500, 501]).sequence == 1
    assert room.take([*range(60), 500]).tokens == list(range(60))


def test_without_anything_in_common_the_oldest_goes():
    room = Caches(2)
    room.give(0, [5, 6])
    room.give(1, [7, 8])
    cache = room.take([1, 2, 3])
    assert (cache.sequence, cache.tokens) == (0, [])


def test_another_owners_is_never_used():
    room = Caches(1)
    room.give(0, [1, 2, 3], "alice")
    assert room.take([1, 2, 3, 4], "bob").tokens == []
    room.give(0, [1, 2, 3], "alice")
    assert room.take([1, 2, 3, 4], "alice").tokens == [1, 2, 3]


texts = st.lists(st.integers(0, 1), min_size=1, max_size=6)


@given(st.lists(st.tuples(texts, st.sampled_from("ab"), st.booleans()), max_size=30))
def test_what_is_taken_is_held_and_no_sequence_is_lost(steps):
    room, held, used = Caches(3), {}, []
    for text, owner, leaves in steps:
        if leaves and used:
            sequence, tokens, who = used.pop(0)
            room.give(sequence, tokens, who)
            held[sequence] = (tokens, who)
        if len(room):
            cache = room.take(text, owner)
            tokens, who = held.get(cache.sequence, ([], owner))
            assert cache.tokens == text[: len(cache.tokens)] == tokens[: len(cache.tokens)]
            assert len(cache.tokens) < len(text)
            assert not cache.tokens or who == owner
            used.append((cache.sequence, text, owner))
        assert sorted([*room._kept, *(s for s, _, _ in used)]) == [0, 1, 2]


# ---- a conversation ---------------------------------------------------------------------------


def turns(answer, more="and then?"):
    return [
        {"role": "user", "content": "tell me a long story"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": more},
    ]


WAYS = [
    {"mode": mode, "accept": accept, "temperature": temperature}
    for mode, accept in (
        ("draft", "strict"), ("cloud", "strict"), ("sync", "strict"), ("pipelined", "strict"),
        ("auto", "strict"), ("pipelined", "elastic"), ("sync", "rejection"),
    )
    for temperature in (0.0, 1.0)
]  # fmt: skip


async def three_turns(edge, **way):
    """The token ids of each turn, where the second and third build on what was said."""
    way = {"max_tokens": 40, "seed": 3, **way}
    first = await edge.generate(turns("")[:1], **way)
    second = await edge.generate(turns(first.text), **way)
    other = await edge.generate(turns(first.text, "no, stop"), **way)
    return [r.token_ids for r in (first, second, other)]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
async def test_the_text_is_the_same_as_without(way):
    if way["accept"] != "strict":
        way = {**way, "fill": False}
        if way["mode"] == "pipelined":  # there the text of a tolerant rule hangs on timing
            way["mode"] = "sync"
    async with pair(keep_caches=True) as edge:
        kept = await three_turns(edge, **way)
    async with pair() as edge:
        assert await three_turns(edge, **way) == kept


@pytest.mark.parametrize("mode", ["draft", "cloud", "sync", "pipelined"])
async def test_a_next_turn_reads_what_is_new(mode):
    near, far = Watched(DIVERGES), Watched()
    readers = {"draft": [near], "cloud": [far]}.get(mode, [near, far])
    async with pair(near, far, keep_caches=True) as edge:
        ids = prompt_ids(near, turns("x" * 200), system=None, raw=False)
        first = await edge.generate(ids, mode=mode, max_tokens=60, logit_bias=ENDLESS)
        assert all(most_at_once(engine) >= len(ids) for engine in readers)
        await until(lambda: len(edge._free) == near.slots)
        near.passes.clear()
        far.passes.clear()
        await edge.generate([*ids, *first.token_ids, *b"more"], mode=mode, max_tokens=20)
        assert all(most_at_once(engine) < 40 for engine in readers)
        assert len({sequence for p in far.passes for sequence in p}) <= 1


def most_at_once(engine):
    """Tokens of the longest feed."""
    return max(max(p.values()) for p in engine.passes)


async def test_an_answer_that_was_stopped_leaves_what_is_sure():
    """In mid-draft and in mid-pass, many times over; what follows is right."""
    near, far = Watched(DIVERGES, slots=1, seconds=0.001), Watched(slots=1, seconds=0.001)
    async with pair() as plain:
        expected = await plain.generate(turns("x"), max_tokens=30, logit_bias=ENDLESS)
    async with pair(near, far, keep_caches=True) as edge:
        for n in range(8):
            async with aclosing(edge.stream(turns("x"), max_tokens=500)) as pieces:
                async for piece in pieces:
                    if piece.commits and piece.commits[-1].position > 40 + 5 * n:
                        break
            result = await edge.generate(turns("x"), max_tokens=30, logit_bias=ENDLESS)
            assert result.token_ids == expected.token_ids


async def test_many_conversations_on_few_sequences():
    near, far = Watched(DIVERGES, slots=2), Watched(slots=3)
    async with pair() as plain:
        expected = [await plain.generate(f"story {n}", max_tokens=20) for n in range(6)]
    async with pair(near, far, keep_caches=True) as edge:
        for _ in range(3):
            results = await asyncio.gather(
                *(edge.generate(f"story {n}", max_tokens=20) for n in range(6))
            )
            assert [r.token_ids for r in results] == [r.token_ids for r in expected]


async def test_an_edge_leaves_its_engine_empty():
    engine = draft()
    async with Edge(None, engine, keep_caches=True) as edge:
        await edge.generate("hello", mode="draft", max_tokens=10)
        await until(lambda: len(edge._free) == engine.slots)
        assert cached(engine) > 10
    assert cached(engine) == 0


# ---- the cloud, between clients ---------------------------------------------------------------


@asynccontextmanager
async def callers(far, *names, **options):
    """One edge for each client's name, all at one cloud that keeps caches."""
    tasks = set()
    async with Cloud(far, times=TIMES, keep_caches=True, **options) as cloud:

        def dial(name):
            async def connect():
                here, there = memory_pair()
                client = Client(name) if name else None
                tasks.add(asyncio.create_task(cloud.serve(there, client)))
                return here

            return connect

        edges = [Edge(dial(name), draft()) for name in names]
        for edge in edges:
            await edge.__aenter__()
        yield cloud, edges
        for edge in edges:
            await edge.__aexit__()
        await asyncio.gather(*tasks)
        await idle(cloud)


async def fed(far, edge):
    """Prompt tokens that the target reads for a question that is long known to it."""
    far.passes.clear()
    await edge.generate(turns("x" * 200), max_tokens=3, mode="cloud")
    return sum(tokens for p in far.passes for tokens in p.values())


@pytest.mark.parametrize("other", ["bob", None])
async def test_a_clients_caches_serve_nobody_else(other):
    far = Watched(slots=1)
    async with callers(far, "alice", other, other, "alice") as (_, (alice, one, two, again)):
        whole = await fed(far, alice)
        assert whole > 200
        assert await fed(far, alice) < 10
        assert await fed(far, again) < 10  # a key's holder on another connection
        assert await fed(far, one) == whole
        if other is None:  # without keys each connection is a client of its own
            assert await fed(far, two) == whole
        assert await fed(far, alice) == whole


async def test_a_kept_cache_holds_no_place():
    far = Watched(slots=1)
    async with callers(far, "alice", "bob") as (cloud, (alice, bob)):
        await alice.generate("hello", max_tokens=10)
        await idle(cloud)
        assert (cloud.scheduler.busy, cloud.scheduler.kept > 10) == (0, True)
        assert (await bob.generate("hello", max_tokens=10)).token_ids


ASKED = {"max_tokens": 20, "mode": "cloud", "logit_bias": ENDLESS}


def breaks(far):
    """The engine fails and leaves rubbish where the text was."""
    far._caches[0] = [1] * 400
    raise EngineError("broken")


async def test_what_a_failed_pass_has_left_is_not_used():
    far = Watched(slots=1)
    async with callers(far, "alice") as (_, [alice]):
        right = await alice.generate("hello", **ASKED)
        far.hook = lambda n: breaks(far)
        with pytest.raises(EdgeError, match="broken"):
            await alice.generate("hello again", **ASKED)
        far.hook = None
        assert (await alice.generate("hello", **ASKED)).token_ids == right.token_ids


async def test_nor_if_the_next_request_has_its_place_already():
    """The pass of a request that was abandoned fails behind its end."""
    far = Watched(slots=1)
    reached, go = threading.Event(), threading.Event()

    def waits_and_breaks(n):
        reached.set()
        go.wait(10)
        far.hook = None
        breaks(far)

    async with callers(far, "alice") as (cloud, [alice]):
        right = await alice.generate("hello", **ASKED)
        await idle(cloud)
        far.hook = waits_and_breaks
        task = asyncio.create_task(alice.generate("hello", **ASKED))
        await until(reached.is_set)
        task.cancel()
        await until(lambda: cloud.scheduler.busy == 0)
        after = asyncio.create_task(alice.generate("hello", **ASKED))
        await until(lambda: cloud.scheduler.busy == 1)
        go.set()
        assert (await after).token_ids == right.token_ids


async def test_kept_tokens_are_counted():
    far = Watched(slots=2)
    async with callers(far, "alice") as (cloud, [alice]):
        await alice.generate("hello", max_tokens=10)
        await idle(cloud)
        assert cloud.scheduler.kept == cached(far) > 10
        page = generate_latest(cloud.metrics.registry).decode()
        assert f"e2sci_cached_tokens {float(cached(far))}\n" in page
