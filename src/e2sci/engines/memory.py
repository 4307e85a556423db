"""An engine that remembers: every distribution it ever gave, by its prefix, on disk.

Methods that are measured side by side write mostly the same texts, so most of what one needs from a
model another has computed before. `Remembering` wraps an engine for one request at a time:

    with remembering.request(prompt):       # opens what is known behind this prompt
        ...                                 # forward, truncate: as with any engine

Two properties make measurements exact rather than only cheap:

- *A distribution depends on its prefix alone.* Real engines round differently for different batch
  sizes. Here the prompt is always fed in one call and whatever follows token by token, so it makes
  no difference which method asked first, or for how many positions at once.
- *Nothing is computed before it is looked at.* An output is a promise; what a pass would compute
  behind a rejection is never computed. (How long a pass takes is the emulated device's business.)
  Only where it costs nothing is there something computed ahead (`lockstep.Ahead`).

Kept are all tokens within KEPT nats of certainty, at least LEAST and at most MOST, with their exact
logits: enough for every decision to be what it is on the whole distribution. A file a prompt:

    key · 16 bytes | count · 2 | log Z · 8 | ids · 4 each | logits · 4 each         (little-endian)

A key is a BLAKE2 hash, chained token by token. A record cut off by a crash is overwritten.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from filelock import FileLock

from e2sci.decoding.distribution import Dense, Distribution, Floats, Ids, TopK, top_ids
from e2sci.engines.base import ContextFull, Engine, Step, Wrapper

KEPT = 14.0
LEAST = 24
MOST = 384
AHEAD = 16
"""Tokens that are computed beyond what was asked for, where it costs nothing."""

_HEAD = struct.Struct("<16sHd")
_MAX_FILE = 1 << 30


class Remembering(Wrapper):
    """`engine`, with a memory in `directory` (which must belong to this model alone)."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        super().__init__(engine)
        self._directory = directory
        self._store: _Store | None = None
        self._prompt: list[int] = []
        self._held: list[int] = []  # tokens in the engine's own cache
        self._held_keys: list[bytes] = []  # of each prefix of them from the prompt on
        self._tokens: list[int] = []  # tokens in the sequence, as the caller sees it
        self._keys: list[bytes] = []  # of each prefix from the prompt on
        self._sure = 0  # tokens that stay; drafts behind them are still to be judged
        self.computed = 0

    @property
    def slots(self) -> int:
        return 1

    @contextmanager
    def request(self, prompt: Sequence[int]) -> Iterator[None]:
        """Open the memory behind `prompt`. Other processes wait for it meanwhile."""
        key = hashlib.blake2b(np.array(prompt, "<i4").tobytes(), digest_size=16).digest()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{key.hex()}.mem"
        with FileLock(path.with_suffix(".lock")), _Store(path, self.info.vocab_size) as store:
            if [*prompt] != self._prompt:
                self._cut(0)
            self._store, self._prompt, self._keys = store, [*prompt], [key]
            try:
                yield
            finally:
                self._store, self._tokens = None, []

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        """As Engine.forward, for the one sequence 0. Raises ValueError on any other prompt."""
        [step] = steps
        tokens = self._tokens + list(step.tokens)
        if len(tokens) > self.info.context:
            raise ContextFull(f"{len(tokens)} tokens are more than the context holds")
        shared = min(len(tokens), len(self._prompt))
        if self._store is None or tokens[:shared] != self._prompt[:shared]:
            raise ValueError("open the request with its prompt first: request(prompt)")
        self._tokens = tokens
        self._sure = len(tokens) - max(step.outputs - 1, 0)
        for token in tokens[len(self._prompt) + len(self._keys) - 1 :]:
            self._keys.append(_chained(self._keys[-1], token))
        first = len(tokens) - step.outputs + 1
        if step.outputs and first < len(self._prompt):
            raise ValueError("distributions within the prompt are not remembered")
        return [[self._at(n) for n in range(first, len(tokens) + 1)]]

    def length(self, sequence: int) -> int:
        return len(self._tokens)

    def truncate(self, sequence: int, length: int) -> None:
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"can't cut a cache of {len(self._tokens)} tokens to {length}")
        del self._tokens[length:]
        self._sure = min(self._sure, length)
        del self._keys[max(1, length - len(self._prompt) + 1) :]

    def _at(self, n: int) -> Distribution:
        """The distribution behind the first n tokens, or a promise of it."""
        assert self._store is not None
        known = self._store.get(self._keys[n - len(self._prompt)])
        return known or _Promise(self, self._tokens[:n], self._keys[: n - len(self._prompt) + 1])

    def compute(self, prefix: list[int], keys: list[bytes]) -> TopK:
        """Keep a promise: run the model on `prefix`, the prompt at once and then token by token."""
        store = self._store
        assert store is not None
        if (known := store.get(keys[-1])) is not None:
            return known
        start = len(self._prompt)
        held = min(_shared(self._held, prefix), len(prefix) - 1)
        if held < start:
            self._cut(0)
            self._feed(prefix[:start], keys[0])
            held = start
        self._cut(held)
        for n in range(held, len(prefix)):
            self._feed(prefix[n : n + 1], keys[n + 1 - start])
        found = store.get(keys[-1])
        assert found is not None
        return found

    # ---- ahead of what is asked, see `lockstep.Ahead` -------------------------------------

    def guess(self) -> int | None:
        """What it takes to catch up with what is sure, then what the model itself would say: where
        drafts say something else they will most often be rejected."""
        if self._store is None or not self._held_keys:
            return None
        shared = _shared(self._held, self._tokens)
        if shared < min(len(self._held), self._sure):
            self._cut(max(shared, len(self._prompt)))
        held = len(self._held)
        if held < self._sure:
            return self._tokens[held]
        known = self._store.get(self._held_keys[-1])
        if known is None or held >= min(len(self._tokens) + AHEAD, self.info.context):
            return None
        return None if known.argmax in self.info.eos_ids else known.argmax

    def guessed(self, token: int, p: Distribution) -> None:
        self._took([token], _chained(self._held_keys[-1], token), p)

    # ---- the engine's own cache -----------------------------------------------------------

    def _feed(self, tokens: list[int], key: bytes) -> None:
        [[p]] = self._engine.forward([Step(0, tokens)])
        self.computed += 1
        self._took(tokens, key, p)

    def _took(self, tokens: list[int], key: bytes, p: Distribution) -> None:
        assert self._store is not None
        assert isinstance(p, Dense)
        self._held += tokens
        self._held_keys.append(key)
        self._store.put(key, p)

    def _cut(self, length: int) -> None:
        self._engine.truncate(0, length)
        del self._held[length:]
        del self._held_keys[max(0, length - len(self._prompt) + 1) :]


class _Promise:
    """A distribution that is computed once it is looked at."""

    def __init__(self, engine: Remembering, prefix: list[int], keys: list[bytes]) -> None:
        self._engine, self._prefix, self._keys = engine, prefix, keys
        self._found: TopK | None = None

    @property
    def _kept(self) -> TopK:
        # No cached_property: before Python 3.12 it locks all promises, of other threads too.
        if self._found is None:
            self._found = self._engine.compute(self._prefix, self._keys)
        return self._found

    @property
    def size(self) -> int:
        return self._engine.info.vocab_size

    @property
    def argmax(self) -> int:
        return self._kept.argmax

    @property
    def entropy(self) -> float:
        return self._kept.entropy

    def log_prob(self, ids: Ids) -> Floats:
        return self._kept.log_prob(ids)

    def top(self, k: int) -> TopK:
        return self._kept.top(k)

    def limited(self, size: int) -> TopK:
        return self._kept.limited(size)


class _Store:
    """One file: what is known behind one prompt. `size`: ids in the vocabulary."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._records: dict[bytes, bytes] = {}
        self._known: dict[bytes, TopK] = {}

    def __enter__(self) -> _Store:
        data = self._path.read_bytes() if self._path.exists() else b""
        if len(data) > _MAX_FILE:
            raise ValueError(f"{self._path} is over {_MAX_FILE} bytes: not a memory of ours")
        at = 0
        while at + _HEAD.size <= len(data):
            key, count, _ = _HEAD.unpack_from(data, at)
            end = at + _HEAD.size + 8 * count
            if end > len(data):
                break
            self._records[key] = data[at:end]
            at = end
        self._file: IO[bytes] = self._path.open("r+b" if self._path.exists() else "w+b")
        self._file.truncate(at)
        self._file.seek(at)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def get(self, key: bytes) -> TopK | None:
        if key not in self._known and key in self._records:
            self._known[key] = self._parsed(self._records[key])
        return self._known.get(key)

    def put(self, key: bytes, p: Dense) -> None:
        if key in self._records:
            return
        ids = kept_ids(p)
        head = _HEAD.pack(key, len(ids), p.log_z)
        record = head + ids.astype("<i4").tobytes() + p.logits[ids].astype("<f4").tobytes()
        self._records[key] = record
        self._file.write(record)

    def _parsed(self, record: bytes) -> TopK:
        _, count, log_z = _HEAD.unpack_from(record)
        ids = np.frombuffer(record, "<i4", count, _HEAD.size).astype(np.int64)
        logits = np.frombuffer(record, "<f4", count, _HEAD.size + 4 * count)
        return TopK(ids, logits.astype(np.float64) - log_z, self._size)


def kept_ids(p: Dense) -> Ids:
    """The ids of `p` that are remembered, most probable first."""
    near = int(np.count_nonzero(p.logits > p.log_z - KEPT))
    return top_ids(p.logits, min(MOST, max(LEAST, near)))


def _chained(key: bytes, token: int) -> bytes:
    return hashlib.blake2b(key + token.to_bytes(4, "little"), digest_size=16).digest()


def _shared(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
