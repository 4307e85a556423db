"""Drafts, each under the hash of all tokens before it.

    key(t₁ … tₙ) = Σ (tᵢ + 1)·Mⁿ⁻ⁱ mod 2⁶⁴        so key(t₁ … tₙ x) = key·M + x + 1

From a prefix to the next draft token is one look-up, from there to the one behind it another: a
window is a chain, and windows that follow each other are one chain. What is put last under a key
stays: the newest branch. A collision would propose a wrong token, which costs a rejection.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

MOST = 1 << 16
"""Draft tokens kept at once: 512 requests with full windows. About 15 MB."""
STALE_SECONDS = 30.0
"""How long a draft is kept. vLLM passes its position in less, or has the request in its queue."""

_M = 0x9E3779B97F4A7C15  # odd; the golden ratio's digits
_MASK = (1 << 64) - 1


def prefix_key(ids: Sequence[int] | NDArray[np.integer]) -> int:
    """The key of all of `ids`."""
    terms = np.asarray(ids).astype(np.uint64) + np.uint64(1)
    return int(terms @ _powers(len(terms)))


def next_key(key: int, token: int) -> int:
    """The key of the same prefix with `token` behind it."""
    return (key * _M + token + 1) & _MASK


class Store:
    """Draft tokens below `vocab`, the `most` newest, each for `seconds`."""

    def __init__(
        self,
        vocab: int,
        *,
        most: int = MOST,
        seconds: float = STALE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vocab, self._most, self._seconds, self._clock = vocab, most, seconds, clock
        self._drafts: dict[int, tuple[int, int, float]] = {}  # oldest first
        self._at: Counter[int] = Counter()  # drafts by position

    def __len__(self) -> int:
        return len(self._drafts)

    def put(self, key: int, start: int, ids: Sequence[int]) -> None:
        """Drafts `ids` behind the `start` tokens of `key`; no further than the first bad id."""
        until = self._clock() + self._seconds
        for position, token in enumerate(ids, start):
            if not 0 <= token < self._vocab:
                break
            self._drop(key)
            self._drafts[key] = (token, position, until)
            self._at[position] += 1
            key = next_key(key, token)
        self.expire()

    def behind(self, ids: NDArray[np.integer], most: int) -> list[int]:
        """Up to `most` draft tokens behind `ids`."""
        found: list[int] = []
        if len(ids) not in self._at:  # most requests at most times: not worth a hash
            return found
        key = prefix_key(ids)
        while len(found) < most and key in self._drafts:
            token = self._drafts[key][0]
            found.append(token)
            key = next_key(key, token)
        return found

    def expire(self) -> None:
        """Forget what is stale, and the oldest of what is too much."""
        now = self._clock()
        while self._drafts:
            key, (_, _, until) = next(iter(self._drafts.items()))
            if until > now and len(self._drafts) <= self._most:
                break
            self._drop(key)

    def _drop(self, key: int) -> None:
        old = self._drafts.pop(key, None)
        if old is not None:
            position = old[1]
            self._at[position] -= 1
            if not self._at[position]:
                del self._at[position]


_known = np.ones(1, dtype=np.uint64)  # M⁰ M¹ …


def _powers(n: int) -> NDArray[np.uint64]:
    """Mⁿ⁻¹ … M⁰."""
    global _known
    if n > len(_known):
        steps = np.full(max(n, 2 * len(_known)), _M, dtype=np.uint64)
        steps[0] = 1
        _known = np.multiply.accumulate(steps)
    return _known[:n][::-1]
