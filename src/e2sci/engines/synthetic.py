"""A tiny model made of a hash: deterministic, exactly batch-invariant, and tunable.

Every logit is a pure function of (seed, all tokens before, token id), so one wrong or missing token
in a cache changes everything behind it: what makes this engine a sharp oracle. Tests and
simulations run on it; a whole text takes milliseconds.

A *draft* is the same target with noise on its logits. How much is `divergence` times the
*difficulty* of the place, and difficulty persists: in each text it is drawn anew for every stretch
of `persistence` positions. Acceptance in neighbouring windows is therefore correlated, the paper's
credit inertia, and with persistence 1 it is not.

The vocabulary is the 256 bytes, so that characters are split over tokens, a few longer pieces, and
an EOS. Which ids occur in practice is a fixed handful, so texts look like words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from e2sci.decoding.distribution import Dense, Distribution
from e2sci.engines.base import EngineError, ModelInfo, Step, require_feasible

_PIECES = [b"the ", b"and ", b"ing", b"def ", b"return ", b"    ", b"12", b"ion", b"\n\n", b"'s "]
EOS = 256 + len(_PIECES)
_NAMES = [bytes([i]) for i in range(256)] + _PIECES + [b"<|end|>"]
REAL_VOCAB = len(_NAMES)
_COMMON = [*b" etaoinshrdlu.,\n10=()", *"é€🙂".encode(), *range(256, EOS)]

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@dataclass(frozen=True)
class SyntheticConfig:
    """What the model is like.

    `seed` makes another target; `sharpness`: standard deviation of common logits in nats;
    `eos_bias` (nats) makes texts shorter when raised; `divergence` ≥ 0: standard deviation of the
    draft's noise in nats (0: the target itself); `persistence` ≥ 1: positions a difficulty lasts;
    `random`: unrelated logits, an adversarial draft; `padding`: meaningless ids behind the
    vocabulary, with the highest logits of all; `context`: tokens a sequence holds.
    """

    seed: int = 1
    sharpness: float = 2.5
    eos_bias: float = -2.0
    divergence: float = 0.0
    persistence: int = 8
    random: bool = False
    padding: int = 0
    context: int = 4096

    @classmethod
    def parse(cls, text: str) -> SyntheticConfig:
        """From `key=value,…` with the names above. Raises EngineError on anything else."""
        kinds = {f.name: str(f.type) for f in fields(cls)}
        values: dict[str, float | int | bool] = {}
        for item in filter(None, text.split(",")):
            key, _, value = item.partition("=")
            if key not in kinds:
                raise EngineError(f"synthetic model has no '{key}'; it has {', '.join(kinds)}")
            try:
                values[key] = float(value) if kinds[key] == "float" else int(value)
            except ValueError:
                raise EngineError(f"synthetic model: {key}={value} is not a number") from None
        return cls(**values)  # type: ignore[arg-type]


class SyntheticTokenizer:
    """Longest piece first, single bytes otherwise; any text round-trips."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            if special and rest.startswith(_NAMES[EOS]):
                ids.append(EOS)
                rest = rest[len(_NAMES[EOS]) :]
                continue
            found = [i for i, piece in enumerate(_PIECES) if rest.startswith(piece)]
            best = max(found, key=lambda i: len(_PIECES[i]), default=None)
            ids.append(rest[0] if best is None else 256 + best)
            rest = rest[1 if best is None else len(_PIECES[best]) :]
        return ids

    def piece(self, token: int) -> bytes:
        if not 0 <= token < REAL_VOCAB:
            raise IndexError(f"token id {token} is out of range; ids lie below {REAL_VOCAB}")
        return b"" if token == EOS else _NAMES[token]

    def name(self, token: int) -> bytes:
        return _NAMES[token]


@dataclass(eq=False)
class Synthetic:
    """The engine. `slots` sequences; each keeps one hash a position as its cache."""

    config: SyntheticConfig = field(default_factory=SyntheticConfig)
    slots: int = 64

    def __post_init__(self) -> None:
        size = REAL_VOCAB + self.config.padding
        self.info = ModelInfo(
            name="synthetic",
            vocab_size=size,
            real_vocab=REAL_VOCAB,
            context=self.config.context,
            eos_ids=frozenset({EOS}),
            template=TEMPLATE,
        )
        self.tokenizer = SyntheticTokenizer()
        self._ids = np.arange(size, dtype=np.uint64)
        self._bias = np.full(size, -12.0)
        self._bias[_COMMON] = 0.0
        self._bias[EOS] = self.config.eos_bias
        self._bias[REAL_VOCAB:] = 50.0
        self._caches: dict[int, list[int]] = {}
        self._remembered = lru_cache(maxsize=8192)(self._compute)

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        """One pass. Also raises ValueError on steps that make no sense, before anything is fed."""
        require_feasible(self, steps)
        return [self._feed(step) for step in steps]

    def length(self, sequence: int) -> int:
        if not 0 <= sequence < self.slots:
            raise ValueError(f"sequence {sequence} is out of range; slots: {self.slots}")
        return len(self._caches.get(sequence, ()))

    def truncate(self, sequence: int, length: int) -> None:
        if length == 0:
            self._caches.pop(sequence, None)
        else:
            del self._caches[sequence][length:]

    def close(self) -> None:
        self._caches.clear()

    def _feed(self, step: Step) -> list[Distribution]:
        cache = self._caches.setdefault(step.sequence, [])
        for token in step.tokens:
            cache.append(_mix(cache[-1] if cache else self.config.seed, token))
        ends = range(len(cache) - step.outputs, len(cache))
        return [self._remembered(cache[end], end, cache[0]) for end in ends]

    def _compute(self, state: int, position: int, text: int) -> Dense:
        config = self.config
        logits = self._bias + config.sharpness * self._normal(state, salt=1)
        if config.random:
            logits = self._bias + config.sharpness * self._normal(state, salt=3)
        elif config.divergence:
            stretch = _mix(text, position // config.persistence)
            difficulty = 2.0 if stretch % 3 == 0 else 0.2
            logits = logits + config.divergence * difficulty * self._normal(state, salt=2)
        return Dense(logits.astype(np.float32))

    def _normal(self, state: int, salt: int) -> NDArray[np.float64]:
        """Nearly normal numbers, one an id: the sum of two uniforms, scaled."""
        x = self._ids * np.uint64(0x9E3779B97F4A7C15) + np.uint64(_mix(state, salt))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        halves = (x >> np.uint64(32)).astype(np.float64) + (x & np.uint64(0xFFFFFFFF)).astype(
            np.float64
        )
        return np.asarray((halves / 2**32 - 1.0) * 2.4495)


def _mix(state: int, token: int) -> int:
    """A 64-bit hash of a chain of tokens."""
    x = (state ^ (token + 0x632BE59BD9B4E019)) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 32)
