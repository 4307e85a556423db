"""What a generation has said so far: text, ids and times, as its tokens are committed."""

from __future__ import annotations

from e2sci.runtime.options import Piece
from e2sci.runtime.text import TextStream
from e2sci.runtime.worker import now
from e2sci.session.edge import Commit


class Record:
    """Text, ids and times of a generation, as its tokens are committed."""

    def __init__(self, text: TextStream, eos: frozenset[int]) -> None:
        self.ids: list[int] = []
        self.commits: list[Commit] = []
        self.text = ""
        self.began = now()
        self.first: float | None = None
        self.last = self.began
        self._stream = text
        self._eos = eos

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stream.stopped

    def add(self, commits: list[Commit]) -> Piece:
        """Take committed tokens, up to a stop string or EOS."""
        taken, text = [], ""
        for commit in commits:
            if self.stopped or commit.token in self._eos:
                break
            text += self._stream.push(commit.token)
            self.ids.append(commit.token)
            taken.append(commit)
        if taken:
            self.last = now()
            self.first = self.first or self.last
        self.commits += taken
        self.text += text
        return Piece(text, taken)

    def close(self) -> str:
        """The text held back until now."""
        rest = self._stream.finish()
        self.text += rest
        return rest

    def times(self) -> dict[str, float | None]:
        """The timing fields of Stats."""
        seconds = self.last - self.began
        rest = self.last - (self.first or self.last)
        return {
            "seconds": seconds,
            "ttft_s": self.first - self.began if self.first else None,
            "tokens_per_s": len(self.ids) / seconds if seconds > 0 else 0.0,
            "decode_tokens_per_s": (len(self.ids) - 1) / rest if rest > 0 else 0.0,
        }
