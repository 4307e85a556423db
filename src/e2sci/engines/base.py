"""The port between the system and whatever runs a model.

An engine holds one model and the caches of several sequences. It knows token ids, not requests:
a caller numbers its sequences, feeds tokens, reads distributions and cuts a cache back after a
rejection. Engines are blocking and not thread-safe; the runtime calls each from one thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from e2sci.decoding.distribution import Distribution


class EngineError(Exception):
    """A model can't be loaded or run; the message says what to do about it."""


class ModelNotFound(EngineError):
    """No such model in the catalogue, on disk or on the hub."""


class ContextFull(EngineError):
    """A sequence would grow beyond the engine's context or out of its cache."""


@dataclass(frozen=True)
class ModelInfo:
    """What the two ends must know of each other's model.

    `vocab_size`: ids with a logit; `real_vocab`: ids that stand for a token, without the padding
    behind them (≤ vocab_size); `context`: tokens a sequence can hold; `eos_ids`: ids that end a
    text; `can_truncate`: whether a sequence's cache can be cut to any shorter length; `top`: how
    many of the best tokens a distribution of this engine names at least, None for all.
    """

    name: str
    vocab_size: int
    real_vocab: int
    context: int
    eos_ids: frozenset[int]
    template: str | None = None
    bos: str = ""
    eos: str = ""
    can_truncate: bool = True
    top: int | None = None


@dataclass(frozen=True)
class Step:
    """Work for one sequence in one pass: feed `tokens`, return the last `outputs` distributions.

    `outputs` ≤ len(tokens). Output i is the distribution behind tokens[len(tokens) - outputs + i].
    """

    sequence: int
    tokens: Sequence[int]
    outputs: int = 1


class Tokenizer(Protocol):
    """Text to ids and back, byte-exact."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of `text`. `special`: read special tokens' names as those tokens (for templates).

        Adds no BOS: a template or `ModelInfo.bos` says where one belongs.
        """
        ...

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to a text, none for special ones. Raises IndexError."""
        ...

    def name(self, token: int) -> bytes:
        """The token's entry in the vocabulary, special ones included: what is fingerprinted."""
        ...


class Described(Protocol):
    """A model by what is known of it."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class Engine(Described, Protocol):
    """One model with the caches of up to `slots` sequences, numbered 0 … slots-1."""

    @property
    def slots(self) -> int: ...

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        """Run one pass over all steps (distinct sequences); outputs per step, in order.

        Each step's tokens are appended to its sequence's cache. Raises ContextFull, leaving every
        cache as it was.
        """
        ...

    def length(self, sequence: int) -> int:
        """Tokens now in the sequence's cache."""
        ...

    def truncate(self, sequence: int, length: int) -> None:
        """Cut a sequence's cache back to its first `length` tokens; 0 frees it."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


def require_feasible(engine: Engine, steps: Sequence[Step]) -> None:
    """Raises ValueError on steps that make no sense to `engine`, ContextFull on more tokens than a
    sequence of it can hold; nothing has been fed then."""
    if len({step.sequence for step in steps}) < len(steps):
        raise ValueError("a sequence occurs twice in one pass")
    info = engine.info
    for step in steps:
        n, held = len(step.tokens), engine.length(step.sequence)
        if not 0 <= step.outputs <= n:
            raise ValueError(f"{step.outputs} outputs asked of {n} tokens")
        if held + n > info.context:
            full = f"{held} + {n} tokens are more than the context of {info.context} holds"
            raise ContextFull(f"{full}; raise the context or shorten the prompt")
        for token in step.tokens:
            if not 0 <= token < info.vocab_size:
                raise ValueError(
                    f"token id {token} is out of range; ids lie below {info.vocab_size}"
                )


class Wrapper:
    """An engine that hands everything to another: what engines around an engine build on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def slots(self) -> int:
        return self._engine.slots

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        return self._engine.forward(steps)

    def length(self, sequence: int) -> int:
        return self._engine.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        self._engine.truncate(sequence, length)

    def close(self) -> None:
        self._engine.close()


@dataclass
class Fingerprint:
    """SHA-256 over the vocabulary's first n entries, for any n: tells which tails are tolerable."""

    names: Sequence[bytes]
    _cache: dict[int, str] = field(default_factory=dict)

    def at(self, n: int) -> str:
        """Hex digest over entries 0 … n-1."""
        if n not in self._cache:
            digest = hashlib.sha256()
            for name in self.names[:n]:
                digest.update(len(name).to_bytes(4, "little") + name)
            self._cache[n] = digest.hexdigest()[:32]
        return self._cache[n]


_fingerprints: WeakKeyDictionary[Tokenizer, Fingerprint] = WeakKeyDictionary()


def fingerprint(model: Described) -> Fingerprint:
    """The fingerprint of a model's real vocabulary (padding left out), made once a tokenizer."""
    known = _fingerprints.get(model.tokenizer)
    if known is None:
        names = [model.tokenizer.name(i) for i in range(model.info.real_vocab)]
        known = _fingerprints[model.tokenizer] = Fingerprint(names)
    return known


def text_of(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """The text of `tokens`, undecodable bytes replaced."""
    return b"".join(tokenizer.piece(t) for t in tokens).decode("utf-8", errors="replace")
