"""The protocol's frames: there and back, their size, and what is refused."""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2sci.decoding.acceptance import RuleParams
from e2sci.decoding.credit import CreditParams, CreditState
from e2sci.decoding.distribution import Dense, pack_ids, sketch
from e2sci.decoding.sampling import SamplingParams
from e2sci.session.messages import (
    MAX_FRAME,
    Cancel,
    CreditView,
    Error,
    Finished,
    Hello,
    Judged,
    Open,
    Opened,
    ProtocolError,
    Verdict,
    Welcome,
    Window,
    decode_message,
    encode_message,
    ids_of,
)

pytestmark = pytest.mark.filterwarnings("error")

VOCAB = 151_936
WEBSOCKET = 6  # bytes of a client frame's header and mask below 126 bytes; 8 up to 64 KiB

quick = settings(max_examples=60, deadline=None)
counts = st.integers(0, 2**40)
words = st.text(max_size=20)
reals = st.floats(allow_nan=False)
ids = st.lists(st.integers(0, VOCAB - 1), max_size=8).map(pack_ids)
states = st.builds(
    CreditState,
    windows=st.lists(st.floats(0, 1), max_size=5),
    judged=st.integers(5, 9),
    passed=st.integers(0, 5),
    since=counts,
    threshold=st.floats(0, 1),
    spent=st.floats(0, 1e9),
    kept=counts,
)
messages = st.one_of(
    st.builds(Hello, model=words, real_vocab=counts, fingerprint=words, template=words),
    st.builds(
        Welcome,
        model=words,
        vocab_size=counts,
        shared_vocab=counts,
        fingerprint=words,
        template=words,
        context=counts,
        eos=st.lists(counts, max_size=3).map(tuple),
        pass_ms=st.lists(st.tuples(counts, reals), max_size=3).map(tuple),
    ),
    st.builds(
        Open,
        request=counts,
        prompt=ids,
        committed=ids,
        branch=counts,
        max_tokens=counts,
        sampling=st.builds(
            SamplingParams,
            temperature=st.floats(0, 2),
            top_k=st.integers(0, 100),
            seed=st.integers(0, 2**63 - 1),
            logit_bias=st.dictionaries(counts, st.floats(-100, 100), max_size=3),
        ),
        rule=st.builds(
            RuleParams,
            name=st.sampled_from(["strict", "rejection", "elastic", "typical"]),
            measure=st.sampled_from(["js", "kl", "tv", "js_fsd", "regret"]),
            agreement=st.none() | st.booleans(),
            p_min=st.floats(0, 1),
        ),
        credit=st.builds(
            CreditParams,
            window=st.integers(1, 64),
            elastic=st.booleans(),
            budget=st.none() | st.floats(0, 9),
        ),
        state=st.none() | states,
        drafting=st.booleans(),
        lookahead=st.booleans(),
        fill=st.booleans(),
        trace=st.booleans(),
    ),
    st.builds(Opened, request=counts, limit=counts),
    st.builds(
        Window,
        request=counts,
        branch=counts,
        start=counts,
        ids=ids,
        sketches=st.lists(st.binary(max_size=60), max_size=8).map(tuple),
    ),
    st.builds(
        Verdict,
        request=counts,
        branch=counts,
        start=counts,
        accepted=counts,
        ids=ids,
        rejected=st.booleans(),
        tolerated=ids,
        passes=counts,
        fed=counts,
        credit=st.none()
        | st.builds(
            CreditView,
            credit=reals,
            threshold=reals,
            window=st.none() | counts,
            state=states,
        ),
        trace=st.lists(
            st.builds(
                Judged,
                position=counts,
                draft=counts,
                pick=counts,
                js=st.none() | reals,
                tv=st.none() | reals,
                p=reals,
                agreed=st.booleans(),
                accepted=st.booleans(),
                threshold=reals,
                credit=reals,
                window=counts,
                ms=reals,
            ),
            max_size=2,
        ).map(tuple),
    ),
    st.builds(Finished, request=counts, reason=st.sampled_from(["stop", "length", "cancelled"])),
    st.builds(Cancel, request=counts),
    st.builds(Error, request=counts, code=words, message=words, retryable=st.booleans()),
)

WINDOW = encode_message(Window(request=1, branch=0, start=20, ids=pack_ids([5, 6])))
OPEN = encode_message(Open(request=1, prompt=pack_ids([1, 2, 3]), max_tokens=9))


def refused(frame: bytes) -> str:
    with pytest.raises(ProtocolError) as error:
        decode_message(frame)
    assert error.value.code == "malformed"
    assert not error.value.retryable
    assert "\n" not in str(error.value)
    return str(error.value)


def message_or_refused(frame: bytes) -> None:
    """Anything but a message or a ProtocolError fails."""
    with suppress(ProtocolError):
        encode_message(decode_message(frame))


# ---- there and back ---------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(messages)
def test_round_trip(message):
    frame = encode_message(message)
    found = decode_message(frame)
    assert type(found) is type(message)
    assert found == message
    assert encode_message(found) == frame


def test_tags_are_fixed():
    kinds = [Hello, Welcome, Open, Opened, Window, Verdict, Finished, Cancel, Error]
    assert [kind.__struct_config__.tag for kind in kinds] == list(range(1, 10))


def test_defaults_cost_nothing():
    assert len(OPEN) <= 25


# ---- size on the wire -------------------------------------------------------------------------


def test_a_strict_window_is_a_few_bytes_a_token():
    rng = np.random.default_rng(0)
    drafted = rng.integers(0, VOCAB, 8).tolist()
    window = Window(request=999, branch=300, start=100_000, ids=pack_ids(drafted))
    assert (len(encode_message(window)) + WEBSOCKET) / 8 <= 12


def test_a_window_with_sketches_is_small():
    drafts = [
        Dense(np.random.default_rng(seed).normal(0, 2.5, VOCAB).astype(np.float32))
        for seed in range(8)
    ]
    window = Window(
        request=999,
        branch=300,
        start=100_000,
        ids=pack_ids([q.argmax for q in drafts]),
        sketches=tuple(sketch(q, keep=q.argmax) for q in drafts),
    )
    assert (len(encode_message(window)) + WEBSOCKET + 2) / 8 <= 64


# ---- what is refused --------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_a_message_or_refused(data):
    message_or_refused(data)


@quick
@given(messages, st.data())
def test_a_damaged_frame_is_a_message_or_refused(message, data):
    frame = bytearray(encode_message(message))
    at = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(ProtocolError):
        decode_message(bytes(frame[:at]))
    frame[at] ^= data.draw(st.integers(1, 255))
    message_or_refused(bytes(frame))


@quick
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-5, 9)
        | st.floats()
        | st.binary(max_size=4)
        | words,
        lambda inner: st.lists(inner, max_size=6) | st.dictionaries(words, inner, max_size=3),
        max_leaves=20,
    ),
    st.integers(0, 10),
)
def test_any_messagepack_is_a_message_or_refused(value, tag):
    fields = value if isinstance(value, list) else [value]
    for frame in (value, [tag, *fields]):
        message_or_refused(msgspec.msgpack.encode(frame))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x90",
        b"\x91\x00",
        b"\x91\x0a",  # no such tag
        b"\x93\x08\x01",  # cut off
        b"\xdd\xff\xff\xff\xff\x05",  # four thousand million fields, it says
        b"\xc6\xff\xff\xff\xff",
        WINDOW + b"\x00",  # something behind
        b"\x91" * 200_000,  # nested
        b"\x93\x08\x01" + b"\x91" * 200_000,  # in a field of a later version
    ],
    ids=["empty", "array", "tag-0", "tag-10", "short", "vast", "bin", "behind", "nested", "deep"],
)
def test_malformed_frames_are_refused(frame):
    assert "not a message of this protocol" in refused(frame)


@pytest.mark.parametrize(
    ("index", "value", "complaint"),
    [
        (6, {"temperature": -1.0}, "temperature is -1.0; expected 0 to 100"),
        (6, {"temperature": float("nan")}, "temperature"),
        (6, {"seed": -1}, "seed is -1"),
        (7, {"name": "lenient"}, "lenient"),
        (7, {"p_min": 2.0}, "p_min is 2.0"),
        (8, {"t_min": 0.9}, "t_min <= t_base"),
        (8, {"budget": float("nan")}, "budget"),
        (9, [[7.0]], "windows"),
        (9, [[], 0, 0, 0, float("nan")], "threshold"),
        (2, "text", "bytes"),
        (5, 2**70 / 1.0, "int"),
    ],
)
def test_parameters_out_of_range_are_refused(index, value, complaint):
    fields = msgspec.msgpack.decode(OPEN)
    fields[index] = value
    assert re.search(complaint, refused(msgspec.msgpack.encode(fields)))


def test_text_frames_are_refused():
    assert "binary" in refused("[5,1]")


def test_oversized_frames_are_refused():
    frame = encode_message(Error(code="x", message="y" * (MAX_FRAME - 20)))
    assert len(frame) > MAX_FRAME - 20
    with pytest.raises(ProtocolError, match=f"at most {MAX_FRAME}") as error:
        decode_message(frame + bytes(MAX_FRAME + 1 - len(frame)))
    assert error.value.code == "too_large"
    whole = encode_message(Open(request=1, prompt=bytes(MAX_FRAME - 100), max_tokens=9))
    assert isinstance(decode_message(whole), Open)


# ---- ids --------------------------------------------------------------------------------------


@quick
@given(st.lists(st.integers(0, 99), max_size=20))
def test_ids_are_unpacked(tokens):
    assert ids_of(pack_ids(tokens), 100, 20, "window") == tokens


def test_an_id_out_of_range_is_named():
    with pytest.raises(
        ProtocolError, match=r"window: token id 107 is out of range.*below 100"
    ) as e:
        ids_of(pack_ids([1, 99, 107, 300]), 100, 8, "window")
    assert e.value.code == "bad_token"
    assert ids_of(pack_ids([99]), 100, 8, "window") == [99]
    with pytest.raises(ProtocolError, match="token id 100 is"):
        ids_of(pack_ids([100]), 100, 8, "window")


def test_fields_of_a_later_version_are_skipped():
    assert decode_message(b"\x93\x08\x01\x91\x05") == Cancel(request=1)


@pytest.mark.parametrize("data", [pack_ids([1] * 9), b"\x80", b"\xff" * 9])
def test_malformed_ids_are_refused(data):
    with pytest.raises(ProtocolError, match=r"^prompt: ") as error:
        ids_of(data, 100, 8, "prompt")
    assert error.value.code == "malformed"


@quick
@given(st.binary(max_size=40), st.integers(1, 300), st.integers(0, 20))
def test_any_bytes_are_sound_ids_or_refused(data, vocab, limit):
    try:
        found = ids_of(data, vocab, limit, "window")
    except ProtocolError:
        return
    assert len(found) <= limit
    assert all(0 <= token < vocab for token in found)
