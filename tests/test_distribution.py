"""Next-token distributions, their sketches and the ids on the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax, logsumexp
from scipy.stats import entropy

from e2sci.decoding.distribution import (
    CODE_STEP,
    SKETCH_SIZE,
    SKETCH_TAIL,
    Dense,
    TopK,
    decode,
    encode,
    pack_ids,
    read_varint,
    sketch,
    top_ids,
    unpack_ids,
    varint,
)

pytestmark = pytest.mark.filterwarnings("error")

VOCAB = 151_936
LEAST = -255 / CODE_STEP  # what the wire can't tell from zero

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
# Few values, so that ties are the rule; some out of reach of the others, some impossible.
tied = st.sampled_from([0.0, 1.0, -1.0, 0.5, -13.0, -40.0, 30.0, -np.inf])
logit_arrays = arrays(
    np.float32,
    st.integers(1, 120),
    elements=tied | st.integers(-800, 800).map(lambda eighths: eighths / 8),
).filter(lambda a: np.isfinite(a).any())


def random_dense(seed: int, size: int, spread: float = 2.0) -> Dense:
    noise = np.random.default_rng(seed).normal(0, spread, size)
    return Dense(noise.astype(np.float32))


def sorted_ids(logits: np.ndarray, k: int) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]


def topk(probs: dict[int, float], size: int) -> TopK:
    return TopK(np.array(list(probs)), np.log(np.array(list(probs.values()))), size)


# ---- dense ------------------------------------------------------------------------------------


@quick
@given(logit_arrays, st.integers(0, 130))
def test_top_ids_are_the_head_of_a_full_sort(logits, k):
    assert top_ids(logits, k).tolist() == sorted_ids(logits, k)


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("k", [1, 16, 512, 5000])
def test_top_ids_of_a_large_vocabulary_with_ties(spread, k):
    logits = random_dense(1, 4000, spread).logits.round(1)
    assert top_ids(logits, k).tolist() == sorted_ids(logits, k)


@quick
@given(logit_arrays)
def test_dense_answers_agree_with_a_plain_softmax(logits):
    dense, exact = Dense(logits), log_softmax(logits.astype(np.float64))
    assert dense.size == len(logits)
    assert dense.argmax == sorted_ids(logits, 1)[0]
    assert dense.log_z == pytest.approx(logsumexp(logits.astype(np.float64)), abs=1e-5)
    assert dense.entropy == pytest.approx(entropy(np.exp(exact)), abs=1e-4)
    ids = np.arange(len(logits))[::-1]
    np.testing.assert_allclose(dense.log_prob(ids), exact[::-1], atol=1e-5)
    np.testing.assert_allclose(dense.all_log_probs(), exact, atol=1e-5)


def test_entropy_in_closed_form():
    assert Dense(np.zeros(50, dtype=np.float32)).entropy == pytest.approx(np.log(50))
    assert Dense(np.array([0, -np.inf], dtype=np.float32)).entropy == 0
    # A half, and the rest merged into one outcome of a half.
    assert topk({7: 0.5}, 100).entropy == pytest.approx(np.log(2))
    assert topk({7: 0.5, 8: 0.25}, 100).entropy == pytest.approx(1.5 * np.log(2))


def test_huge_logits_neither_overflow_nor_vanish():
    dense = Dense(np.array([3e4, 3e4, -3e4], dtype=np.float32))
    assert dense.log_prob(np.array([0])) == pytest.approx(-np.log(2))
    assert dense.entropy == pytest.approx(np.log(2), abs=1e-2)


def test_limited_drops_the_padding_and_renormalises():
    dense = Dense(np.array([1, 2, 3, 99], dtype=np.float32))
    cut = dense.limited(3)
    assert (cut.size, cut.argmax) == (3, 2)
    np.testing.assert_allclose(cut.all_log_probs(), log_softmax([1.0, 2.0, 3.0]), atol=1e-6)
    assert dense.limited(4) is dense
    assert dense.limited(1000) is dense


# ---- top-k ------------------------------------------------------------------------------------


@quick
@given(logit_arrays, st.integers(1, 130))
def test_the_top_of_a_dense_one_answers_as_it_does(logits, k):
    dense = Dense(logits)
    head = dense.top(k)
    assert head.ids.tolist() == sorted_ids(logits, k)
    assert (head.argmax, head.size) == (dense.argmax, dense.size)
    np.testing.assert_array_equal(head.log_prob(head.ids), dense.log_prob(head.ids))
    others = np.setdiff1d(np.arange(dense.size), head.ids)
    assert np.all(head.log_prob(others) == -np.inf)
    assert head.tail == pytest.approx(np.exp(dense.log_prob(others)).sum(), abs=1e-5)
    assert head.entropy <= dense.entropy + 1e-4
    assert head.top(3).ids.tolist() == sorted_ids(logits, min(3, k))


def test_top_k_without_tail_is_a_distribution():
    head = topk({5: 0.1, 2: 0.3, 9: 0.1}, 20)
    assert head.tail == pytest.approx(0.5)
    known = head.without_tail()
    np.testing.assert_allclose(np.exp(known.log_probs), [0.2, 0.6, 0.2])
    assert known.tail == pytest.approx(0)


def test_limited_top_k_forgets_ids_beyond_and_shares_their_mass_out():
    head = topk({5: 0.1, 2: 0.3, 9: 0.4}, 20)
    cut = head.limited(9)
    assert (cut.ids.tolist(), cut.size) == ([5, 2], 9)
    np.testing.assert_allclose(cut.log_prob(np.array([2, 9])), [np.log(0.3 / 0.6), -np.inf])
    with pytest.raises(ValueError, match="none of the 3 tokens known lies below 2"):
        head.limited(2)
    assert head.limited(20) is head


def test_equals_are_ordered_by_id():
    head = topk({5: 0.25, 2: 0.25, 9: 0.3, 7: 0.2}, 20)
    assert head.argmax == 9
    assert head.top(3).ids.tolist() == [9, 2, 5]
    assert topk({5: 0.25, 2: 0.25}, 20).argmax == 2


# ---- sketches ---------------------------------------------------------------------------------


@quick
@given(seeds, st.integers(1, 40), st.floats(0.1, 8), st.integers(40, VOCAB))
def test_sketch_round_trip(seed, k, spread, size):
    rng = np.random.default_rng(seed)
    ids = rng.choice(size, k, replace=False)
    logits = rng.normal(0, spread, k)
    before = TopK(ids, log_softmax(np.append(logits, rng.normal()))[:-1], size)
    assume(before.log_probs.max() > LEAST + 1)
    after = decode(encode(before), size)
    assert after.ids.tolist() == sorted(ids.tolist())
    assert after.size == size
    assert np.exp(after.log_probs).sum() + after.tail == pytest.approx(1)
    known, sent = before.log_prob(after.ids), after.log_probs
    told = known > LEAST + 1 / CODE_STEP
    # Half a code by rounding, and as much again by normalising.
    assert np.abs(sent - known)[told].max() <= 1 / CODE_STEP + 1e-9
    assert np.all(sent[~told] <= LEAST + 3 / CODE_STEP)


@quick
@given(seeds, st.integers(1, 16))
def test_a_decoded_sketch_is_the_same_at_both_ends(seed, k):
    first = decode(encode(random_dense(seed, 300).top(k)), 300)
    again = decode(encode(random_dense(seed, 300).top(k)), 300)
    assert first.log_probs.tolist() == again.log_probs.tolist()


def test_sketch_bytes_are_as_documented():
    # count, tail ¼, gaps 3 and 297 (two bytes), then ½ and ¼ in sixteenths of a nat
    data = encode(topk({300: 0.25, 3: 0.5}, 1000))
    assert data == bytes([2, 22, 3, 0x80 | 297 & 127, 297 >> 7, 11, 22])


def test_sketch_stops_once_the_rest_is_negligible():
    sure = np.full(VOCAB, -20, dtype=np.float32)
    sure[[70_000, 9]] = 5, 2
    assert decode(sketch(Dense(sure)), VOCAB).ids.tolist() == [9, 70_000]
    assert len(decode(sketch(random_dense(0, VOCAB)), VOCAB).ids) == SKETCH_SIZE


@pytest.mark.parametrize(("rest", "count"), [(SKETCH_TAIL / 2, 1), (SKETCH_TAIL * 1.5, 2)])
def test_sketch_tail_is_the_limit(rest, count):
    q = topk({1: 1 - rest, 2: rest / 2, 3: rest / 2}, 100)
    assert len(decode(sketch(q), 100).ids) == count


@quick
@given(seeds, st.integers(0, 99), st.floats(0, 20), st.integers(2, 16))
def test_sketch_always_lists_the_draft_token(seed, keep, spread, size):
    q = random_dense(seed, 100, spread)
    head = decode(sketch(q, keep=keep, size=size), 100)
    assert keep in head.ids
    assert len(head.ids) <= size
    assert q.argmax in head.ids


def test_sketch_lists_a_token_the_draft_finds_impossible():
    q = Dense(np.array([0, 1, -np.inf], dtype=np.float32))
    head = decode(sketch(q, keep=2), 3)
    assert head.ids.tolist() == [0, 1, 2]
    assert head.log_prob(np.array([2]))[0] < LEAST + 1


def test_sketch_is_small_at_a_real_vocabulary():
    sizes = []
    for seed in range(40):
        q = random_dense(seed, VOCAB, 2.5)
        keep = q.argmax
        sizes.append(len(sketch(q, keep=keep)) + len(varint(keep)))
        assert len(decode(sketch(q), VOCAB).ids) == SKETCH_SIZE
    assert np.mean(sizes) <= 60


def test_sketch_of_too_many_tokens_is_refused():
    with pytest.raises(ValueError, match="255"):
        encode(random_dense(0, 300).top(256))
    assert len(decode(encode(random_dense(0, 300).top(255)), 300).ids) == 255


def check_any(data: bytes, size: int) -> None:
    """Either a sound distribution or a ValueError."""
    try:
        q = decode(data, size)
    except ValueError:
        return
    assert q.ids[0] >= 0
    assert q.ids[-1] < size
    assert np.all(np.diff(q.ids) > 0)
    assert not np.isnan(q.log_probs).any()
    assert np.isfinite(q.log_probs).any()
    assert np.exp(q.log_probs).sum() <= 1 + 1e-9


@settings(max_examples=120, deadline=None)
@given(st.binary(max_size=60), st.integers(1, VOCAB))
def test_any_bytes_are_a_sketch_or_refused(data, size):
    check_any(data, size)


@settings(max_examples=120, deadline=None)
@given(seeds, st.integers(0, 100), st.integers(0, 255), st.integers(0, 100))
def test_a_damaged_sketch_is_a_sketch_or_refused(seed, at, byte, end):
    data = bytearray(sketch(random_dense(seed, 5000)))
    data[at % len(data)] = byte
    check_any(bytes(data), 5000)
    check_any(bytes(data[:end]), 5000)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"\x00\xff",
        bytes([0, 0, 1]),  # no token
        bytes([1, 255, 5]),  # no probability
        bytes([1, 255, 5, 0, 0]),  # one byte too many
        bytes([2, 255, 5, 0, 0, 0]),  # the same id twice
        bytes([1, 255, 100, 0]),  # the first id out of range
        bytes([2, 255, 5, 95, 0, 0]),  # the last one
        bytes([1, 255, 0x80]),  # cut off within an id
        bytes([1, 255, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1, 0]),  # an endless id
        bytes([2, 0, 5, 1, 255, 255]),  # nothing is possible
    ],
)
def test_malformed_sketches_are_refused(data):
    with pytest.raises(ValueError, match=r"sketch|number"):
        decode(data, 100)


def test_ids_of_a_sketch_lie_below_the_size():
    data = encode(topk({99: 0.5, 3: 0.5}, 100))
    assert decode(data, 100).ids.tolist() == [3, 99]
    with pytest.raises(ValueError, match="below 99"):
        decode(data, 99)


# ---- ids on the wire --------------------------------------------------------------------------


@quick
@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_ids_round_trip(ids):
    assert unpack_ids(pack_ids(ids), 50) == ids


@quick
@given(st.integers(0, 2**32 - 1), st.binary(max_size=4), st.binary(max_size=4))
def test_varint_round_trip_anywhere(value, before, behind):
    data = before + varint(value) + behind
    assert read_varint(data, len(before)) == (value, len(data) - len(behind))


@pytest.mark.parametrize(
    ("value", "size"), [(0, 1), (127, 1), (128, 2), (16_383, 2), (16_384, 3), (VOCAB - 1, 3)]
)
def test_varints_are_short(value, size):
    assert len(varint(value)) == size


def test_varints_beyond_32_bits_are_refused():
    assert read_varint(varint(2**32 - 1), 0)[0] == 2**32 - 1
    for value in (2**32, 2**35, 2**63):
        with pytest.raises(ValueError, match="32 bits"):
            read_varint(varint(value), 0)


def test_more_ids_than_allowed_are_refused():
    assert unpack_ids(pack_ids([1] * 8), 8) == [1] * 8
    with pytest.raises(ValueError, match="more than 8"):
        unpack_ids(pack_ids([1] * 9), 8)
    assert unpack_ids(b"", 0) == []
    with pytest.raises(ValueError, match="cut off"):
        unpack_ids(pack_ids([1, 300])[:-1], 8)


@quick
@given(st.binary(max_size=40))
def test_any_bytes_are_ids_or_refused(data):
    try:
        ids = unpack_ids(data, 20)
    except ValueError:
        return
    assert len(ids) <= 20
    assert unpack_ids(pack_ids(ids), 20) == ids
