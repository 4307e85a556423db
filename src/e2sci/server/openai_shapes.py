"""Answers as OpenAI's clients read them: whole, or in chunks, with log-probabilities if asked for.

A `Choice` follows one text while it is written: what of it may be shown by now, and the scores that
belong to that. A token's score is shown together with the text that it begins in, so that what a
stop string holds back or cuts off is held back or cut off here too. `Shapes` puts choices into the
objects of the chat or of the completions endpoint.
"""

from __future__ import annotations

import codecs
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from e2sci.decoding.distribution import unpack_ids
from e2sci.engines.base import Tokenizer
from e2sci.runtime.options import Piece, Result
from e2sci.session.edge import Commit
from e2sci.session.messages import MAX_TOP, Score

encode = msgspec.json.Encoder().encode

_UNLIKELY = -9999.0
"""OpenAI's number for a token far from likely; JSON has no minus infinity."""


class Shown(NamedTuple):
    """A committed token and the character of the text that it begins at."""

    offset: int
    commit: Commit


class Choice:
    """Text `index` of an answer. `prompt`: number of its prompt; `seed`: its own; `scored`,
    `traced`: whether its tokens are wanted too, with scores or in the tale."""

    def __init__(
        self,
        index: int,
        prompt: int,
        seed: int,
        tokenizer: Tokenizer,
        *,
        scored: bool,
        traced: bool,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.seed = seed
        self.text = ""
        self.tokens = 0
        self.notices: list[str] = []
        self.result: Result | None = None
        self._tokenizer = tokenizer
        self._scored = scored
        self._traced = traced
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoded = 0
        self._held: deque[Shown] = deque()

    @property
    def finish_reason(self) -> str | None:
        """None while it is being written."""
        if self.result is None:
            return None
        return "length" if self.result.finish_reason == "length" else "stop"

    def take(self, piece: Piece) -> list[Shown]:
        """The next piece; its tokens, each in its place, if they are wanted."""
        self.text += piece.text
        self.tokens += len(piece.commits)
        self.result = piece.result
        if piece.notice is not None:
            self.notices.append(piece.notice)
        wanted = piece.commits if self._scored or self._traced else []
        placed = [self._place(commit) for commit in wanted]
        if self._scored:
            self._held += placed
        if self.result is not None:
            self._decoded += len(self._decoder.decode(b"", final=True))
        return placed

    def shown(self) -> list[Shown]:
        """The tokens whose scores are due: the text they begin in has come."""
        end = len(self.text)
        if self.result is not None:
            end += self._decoded == end  # nothing is cut off, so an empty last token counts too
        return [self._held.popleft() for _ in range(sum(each.offset < end for each in self._held))]

    def _place(self, commit: Commit) -> Shown:
        offset = self._decoded
        self._decoded += len(self._decoder.decode(self._tokenizer.piece(commit.token)))
        return Shown(offset, commit)


@dataclass(frozen=True)
class Shapes:
    """The objects of one answer. `top`: best tokens beside each one; `starts`: characters of each
    prompt, from which a completion's offsets count."""

    id: str
    model: str
    chat: bool
    tokenizer: Tokenizer
    top: int
    starts: Sequence[int]
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(
        self, choices: Sequence[Choice], shown: Sequence[list[Shown]], **more: Any
    ) -> dict[str, Any]:
        """The answer at once. `more`: usage and e2sci."""
        kind = "chat.completion" if self.chat else "text_completion"
        texts = [
            {
                "index": choice.index,
                **self._text(choice.text),
                "logprobs": self._logprobs(choice, tokens),
                "finish_reason": choice.finish_reason,
            }
            for choice, tokens in zip(choices, shown, strict=True)
        ]
        return {**self._head(kind), "choices": texts, **more}

    def first(self, choice: Choice) -> dict[str, Any]:
        """The first chunk of a chat's text: who speaks."""
        return self.chunk(choice, {"delta": {"role": "assistant", "content": ""}})

    def more(self, choice: Choice, text: str, shown: list[Shown]) -> dict[str, Any]:
        """The chunk with `text`."""
        body = {"delta": {"content": text}} if self.chat else {"text": text}
        return self.chunk(choice, {**body, "logprobs": self._logprobs(choice, shown)})

    def last(self, choice: Choice) -> dict[str, Any]:
        """The chunk that says why a text has ended."""
        body: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self.chunk(choice, {**body, "finish_reason": choice.finish_reason})

    def chunk(self, choice: Choice | None, body: dict[str, Any]) -> dict[str, Any]:
        """A chunk of one text, or of none."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        usual = {"logprobs": None, "finish_reason": None}
        texts = [{"index": choice.index, **usual, **body}] if choice else []
        return {**self._head(kind), "choices": texts}

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{self.id}" if self.chat else f"cmpl-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def token(self, token: int) -> str:
        """A token as text: a special one by its name, one that is no whole character by its bytes,
        with a mark in front as each endpoint has it."""
        piece = self.tokenizer.piece(token)
        if not piece:
            return self.tokenizer.name(token).decode(errors="replace")
        try:
            return piece.decode()
        except UnicodeDecodeError:
            mark = "" if self.chat else "bytes:"
            return mark + "".join(f"\\x{byte:02x}" for byte in piece)

    def _text(self, text: str) -> dict[str, Any]:
        if self.chat:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"text": text}

    # ---- log-probabilities ----------------------------------------------------------------

    def _logprobs(self, choice: Choice, shown: list[Shown]) -> dict[str, Any] | None:
        if not shown:
            return None
        if self.chat:
            return {"content": [self._scored(each) for each in shown], "refusal": None}
        start = self.starts[choice.prompt]
        best = [dict(self._named(each)) for each in shown]
        return {
            "tokens": [self.token(each.commit.token) for each in shown],
            "token_logprobs": [_finite(_score(each).log_prob) for each in shown],
            "top_logprobs": best if self.top else None,
            "text_offset": [start + each.offset for each in shown],
        }

    def _scored(self, each: Shown) -> dict[str, Any]:
        score, ids = _score(each), _ids(each)
        entry = self._entry(each.commit.token, score.log_prob)
        return {**entry, "top_logprobs": [*map(self._entry, ids, score.log_probs)]}

    def _entry(self, token: int, log_prob: float) -> dict[str, Any]:
        piece = self.tokenizer.piece(token)
        return {
            "token": self.token(token),
            "logprob": _finite(log_prob),
            "bytes": list(piece) if piece else None,
        }

    def _named(self, each: Shown) -> list[tuple[str, float]]:
        """The best tokens by name, and the one that was taken, best first."""
        score = _score(each)
        scored = dict(zip(_ids(each), score.log_probs, strict=True))
        scored.setdefault(each.commit.token, score.log_prob)
        return [(self.token(token), _finite(value)) for token, value in scored.items()]


def _score(each: Shown) -> Score:
    assert each.commit.score is not None  # they were asked for
    return each.commit.score


def _ids(each: Shown) -> list[int]:
    return unpack_ids(_score(each).ids, MAX_TOP)


def _finite(log_prob: float) -> float:
    return max(log_prob, _UNLIKELY)
