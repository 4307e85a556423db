"""Randomness as a function of (seed, position, token id): counter-based, the same at both ends.

A sample is  argmax_v (score_v + g(seed, position, v)),  g standard Gumbel noise made from a hash
(the Gumbel-max trick). Whoever knows the seed can repeat any pick without the picks before it, and
two nearby distributions sampled with the same noise nearly always give the same token.

Independent uses of randomness at one position draw from different streams.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from e2sci.decoding.distribution import Floats, Ids

Bits = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NEAR = 6.0  # nats


class Stream(IntEnum):
    """Independent noise at one position."""

    PICK = 0  # the shared noise of draft and target
    DRAFT = 1  # the draft's own sample under the rejection rule
    ACCEPT = 2  # the uniform number of the rejection rule
    RESIDUAL = 3  # its sample from the residual


def uniform(seed: int, position: int, stream: Stream) -> float:
    """One keyed number in (0, 1)."""
    return float(_to_unit(_bits(_key(seed, position, stream), np.zeros(1, dtype=np.int64)))[0])


def gumbel(seed: int, position: int, stream: Stream, ids: Ids) -> Floats:
    """Standard Gumbel noise −log(−log u) of those ids, shape like `ids`."""
    return _to_gumbel(_bits(_key(seed, position, stream), ids))


def pick_among(ids: Ids, scores: Floats, seed: int, position: int, stream: Stream) -> int:
    """argmax of score plus noise; of equals the lowest id. Scores are log-probabilities, up to a
    constant; -inf is never picked."""
    if len(ids) == 1:
        return int(ids[0])
    noisy = scores + gumbel(seed, position, stream, ids)
    return int(ids[noisy == noisy.max()].min())


def pick_of_all(
    logits: NDArray[np.float32], temperature: float, seed: int, position: int, stream: Stream
) -> int:
    """`pick_among` all ids with scores logits / temperature, without scoring all of them.

    Exact: ids within 6 nats of the best are scored; one further off could win only with noise above
    the best score less that distance, which the hash itself tells for nearly all of a vocabulary.
    """
    key, top = _key(seed, position, stream), float(logits.max())
    near = np.flatnonzero(logits > np.float32(top - _NEAR * temperature))
    scores = logits[near].astype(np.float64) / temperature
    best = (scores + _to_gumbel(_bits(key, near))).max()
    slack = 1e-6 * (1 + abs(top / temperature))  # single precision of `near`'s bound
    needed = np.exp(-np.exp(-(best - (top / temperature - _NEAR) - slack)))
    ids = np.flatnonzero(_all_bits(key, len(logits)) >= _from_unit(needed))
    ids = np.union1d(near, ids)
    return pick_among(ids, logits[ids].astype(np.float64) / temperature, seed, position, stream)


def _key(seed: int, position: int, stream: Stream) -> np.uint64:
    key = _mix(np.array([seed], dtype=np.uint64) * _GOLDEN + np.uint64(stream))
    key = _mix(key + np.array([position], dtype=np.uint64) * _GOLDEN)
    return np.uint64(key[0])


def _bits(key: np.uint64, ids: Ids) -> Bits:
    return _mix(ids.astype(np.uint64) * _GOLDEN + key)


@lru_cache(maxsize=4)
def _golden_ids(size: int) -> Bits:
    return np.arange(size, dtype=np.uint64) * _GOLDEN


_scratch = threading.local()


def _all_bits(key: np.uint64, size: int) -> Bits:
    """`_bits` of ids 0 … size-1, in memory of this thread that the next call reuses."""
    if getattr(_scratch, "size", None) != size:
        _scratch.size, _scratch.x, _scratch.y = size, np.empty(size, "u8"), np.empty(size, "u8")
    x: Bits = np.add(_golden_ids(size), key, out=_scratch.x)
    return _mix(x, _scratch.y)


def _mix(x: Bits, scratch: Bits | None = None) -> Bits:
    """SplitMix64's finaliser (Steele et al. 2014), in place."""
    y = np.empty_like(x) if scratch is None else scratch
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(x, np.uint64(shift), out=y)
        np.bitwise_xor(x, y, out=x)
        np.multiply(x, np.uint64(factor), out=x)
    np.right_shift(x, np.uint64(31), out=y)
    return np.bitwise_xor(x, y, out=x)


def _to_unit(bits: Bits) -> Floats:
    """Numbers in (0, 1) with 52 random bits each."""
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _from_unit(u: float) -> np.uint64:
    """The least bits whose number is u or more (rounded down)."""
    return np.uint64(min(max(0, int(u * 2.0**52) - 1), 2**52 - 1) << 12)


def _to_gumbel(bits: Bits) -> Floats:
    return np.asarray(-np.log(-np.log(_to_unit(bits))))
