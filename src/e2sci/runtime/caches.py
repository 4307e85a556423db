"""What the sequences of an engine hold, in use and between uses.

The next prompt of a conversation begins with what was just read and written. A sequence that is
given back may therefore keep its tokens until somebody needs it, and a text that begins like them
is read from where it differs. There is one entry a sequence, so an engine's own bounds hold. What
is kept serves its owner alone: others could tell from the time that a text is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from e2sci.decoding.distribution import Distribution
from e2sci.engines.base import Engine, Step


@dataclass(eq=False)
class Cache:
    """A sequence in use; `tokens` are sure to be in the engine's cache, which may hold more."""

    sequence: int
    tokens: list[int] = field(default_factory=list)

    def behind(self, engine: Engine, line: Sequence[int], keep: int) -> Distribution:
        """The distribution behind `line`, whose first `keep` tokens are cached; the rest is fed."""
        held = engine.length(self.sequence)
        keep = min(keep, held)
        if held > keep:
            engine.truncate(self.sequence, keep)
        self.tokens = []  # should the model fail
        [[p]] = engine.forward([Step(self.sequence, line[keep:])])
        self.tokens = list(line)
        return p

    def settle(self, engine: Engine) -> None:
        """Cut off what is not sure."""
        if engine.length(self.sequence) > len(self.tokens):
            engine.truncate(self.sequence, len(self.tokens))


@dataclass(frozen=True)
class _Kept:
    tokens: Sequence[int] = ()
    owner: str = ""

    def shared(self, tokens: Sequence[int], owner: str) -> int:
        """Tokens that both begin with; one is left over, since something must be fed."""
        if owner != self.owner:
            return 0
        most = max(0, min(len(self.tokens), len(tokens) - 1))
        return next((i for i in range(most) if self.tokens[i] != tokens[i]), most)


class Caches:
    """The free ones of `slots` sequences, least recently used first; empty at the beginning."""

    def __init__(self, slots: int) -> None:
        self._kept = {sequence: _Kept() for sequence in range(slots)}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def tokens(self) -> int:
        """Tokens kept in all."""
        return sum(len(kept.tokens) for kept in self._kept.values())

    def take(self, tokens: Sequence[int], owner: str = "") -> Cache:
        """A free sequence: the one that holds most of `tokens`, if it would lose no more than that
        (ours), else the least recently used."""
        shared = {s: kept.shared(tokens, owner) for s, kept in self._kept.items()}
        best = max(shared, key=lambda s: shared[s])
        if 2 * shared[best] < len(self._kept[best].tokens):
            best = next(iter(self._kept))
        kept = self._kept.pop(best)
        return Cache(best, list(kept.tokens[: shared[best]]))

    def give(self, sequence: int, tokens: Sequence[int] = (), owner: str = "") -> None:
        """Take a sequence back, with what it holds for its owner."""
        self._kept[sequence] = _Kept(tokens, owner)

    def forget(self, sequence: int) -> None:
        """What a sequence holds is not known, if it is free."""
        if sequence in self._kept:
            self._kept[sequence] = _Kept()
