"""Thousands of frames that nobody should send: the cloud neither falls nor forgets a place.

Frames are those of a real conversation, mutated: bytes flipped, cut, doubled or drawn anew, fields
replaced by values of other types and sizes, valid messages in the wrong order. They come over many
connections, since a frame that can't be read ends its connection. E2SCI_FRAMES=100000 makes it a
longer run.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from random import Random

import msgspec
import pytest

from e2sci.decoding.acceptance import RuleParams
from e2sci.decoding.distribution import pack_ids
from e2sci.engines.synthetic import EOS
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.transport import ChannelClosed, memory_pair
from e2sci.session.messages import Cancel, Open, Window, decode_message, encode_message
from live import TIMES, Watched, idle, pair
from test_many import hello_of
from world import PROMPT, opening

FRAMES = int(os.environ.get("E2SCI_FRAMES", "20000"))
_ODD = (None, True, -1, 0, 1, 63, 64, 65, 127, 2**31, 2**63 - 1, -(2**63), 0.5, float("inf"))
_ODDER = (float("nan"), "", "x" * 300, b"", b"\xff" * 40, [], [[]] * 9, {}, {"name": "fuzzy"})


def conversation(engine):
    """Frames of an ordinary connection, as nested values."""
    ids = pack_ids([100, 101, 102, 103])
    rule = RuleParams(name="elastic", measure="regret")
    messages = [
        hello_of(engine),
        opening(max_tokens=20),
        msgspec.structs.replace(opening(max_tokens=9, rule=rule, trace=True), request=2),
        Window(request=1, branch=0, start=len(PROMPT), ids=ids),
        Window(request=2, branch=0, start=len(PROMPT), ids=ids, sketches=(b"\x01\x02\x05\x00",)),
        Cancel(request=1),
    ]
    return [encode_message(m) for m in messages]


def mutated(random: Random, frames: list[bytes]) -> bytes | str:
    """One frame, made worse; sometimes left alone."""
    frame = random.choice(frames)
    kind = random.randrange(8)
    if kind == 0:
        return frame
    if kind == 1:
        return "text"
    if kind == 2:
        return random.randbytes(random.randrange(60))
    if kind == 3:
        return frame[: random.randrange(len(frame) + 1)]
    if kind == 4:
        flipped = bytearray(frame)
        for _ in range(random.randrange(1, 4)):
            flipped[random.randrange(len(flipped))] = random.randrange(256)
        return bytes(flipped)
    if kind == 5:
        return frame + random.choice(frames)
    fields = msgspec.msgpack.decode(frame)
    for _ in range(random.randrange(1, 3)):
        fields[random.randrange(len(fields))] = random.choice(_ODD + _ODDER)
    return msgspec.msgpack.encode(fields)


async def connection(cloud: Cloud, random: Random, frames: list[bytes], most: int) -> int:
    """One hostile connection; how many frames it got to send."""
    here, there = memory_pair()
    serving = asyncio.create_task(cloud.serve(there))
    sent = 0
    with suppress(ChannelClosed):
        await here.send(frames[0])
        while sent < most and not serving.done():
            await here.send(mutated(random, frames))
            sent += 1
            if random.random() < 0.3:
                await asyncio.sleep(0)
    if random.random() < 0.5:
        await here.close()
        await serving
    else:  # gone without a word
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return sent


async def test_mutated_frames(caplog: pytest.LogCaptureFixture):
    random = Random(7)
    far = Watched(slots=4)
    caplog.set_level("ERROR")
    async with Cloud(far, times=TIMES) as cloud:
        frames = conversation(far)
        sent = 0
        while sent < FRAMES:
            some = [connection(cloud, random, frames, 1 + random.randrange(30)) for _ in range(20)]
            sent += sum(await asyncio.gather(*some))
        await idle(cloud)
        assert not cloud.scheduler._seats
        assert not cloud.scheduler._places.line
        assert not caplog.records
    async with pair(target_engine=far) as edge:
        answer = await edge.generate("hello", max_tokens=10, logit_bias={EOS: -100.0})
        assert len(answer.token_ids) == 10


def test_the_mutants_are_of_all_kinds():
    """Most can't be read; some can, and mean something else."""
    random, frames = Random(1), conversation(Watched())
    read = []
    for _ in range(2000):
        with suppress(Exception):
            read.append(type(decode_message(mutated(random, frames))))
    assert 200 < len(read) < 1800
    assert {Open, Window, Cancel} <= set(read)
