"""Which of several servers a request goes to: the one that has its beginning in its prefix cache.

Each server has a rank for each beginning, by a hash of both (rendezvous hashing, Thaler and
Ravishankar 1998): the same beginning goes to the same server whichever gateway it comes through,
and one that comes or goes moves none but its own. A server with clearly more than its share of
requests is passed over (bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

BEGINNING = 256
"""Tokens that count as a prompt's beginning: enough to tell conversations apart behind a system
prompt that they share, and few enough that the next turn of one begins the same."""
_SPREAD = 1.25  # of its share of requests, what a server takes at most


def ranked(prompt: Sequence[int], names: Sequence[str]) -> list[int]:
    """Indices of the servers called `names`, the one for `prompt` first."""
    start = np.array(prompt[:BEGINNING], dtype=np.int64).tobytes()

    def weight(index: int) -> bytes:
        return hashlib.blake2b(start, digest_size=8, key=names[index].encode()[:64]).digest()

    return sorted(range(len(names)), key=weight, reverse=True)


def crowded(load: int, loads: Sequence[int]) -> bool:
    """Whether a server with `load` requests should take no more, by all servers' `loads`."""
    return load >= math.ceil(_SPREAD * (sum(loads) + 1) / len(loads))
