"""What any cloud keeps of one request: the text so far, and the drafts queued behind it.

    tokens   prompt + output, all of it final
    queue    draft tokens of the current branch, in order, not yet judged
    branch   counts the cuts; windows of a branch that is dead are dropped unread

How drafts are judged is the business of what builds on this: `cloud` judges with distributions of
an engine, `relayed` is told the text by a server that has judged already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from e2sci.decoding.sampling import History
from e2sci.session.judge import Draft
from e2sci.session.messages import (
    MAX_QUEUE,
    MAX_TOKENS,
    Finished,
    FinishReason,
    Message,
    Open,
    ProtocolError,
    Window,
    ids_of,
)


@dataclass(frozen=True)
class CloudModel:
    """What a session must know of the target: ids below `vocab` may occur; `context` in tokens."""

    vocab: int
    context: int
    eos: frozenset[int]


class Line(ABC):
    """One request at a cloud. Raises ProtocolError when the opening can't be served.

    `prompt`: its tokens; `limit`: output tokens it can have; `by_itself`: no drafts will come for
    now; `passes`, `fed`: target passes and tokens so far; `accepted`: drafts that stand.
    """

    def __init__(self, opening: Open, model: CloudModel) -> None:
        prompt = ids_of(opening.prompt, model.vocab, MAX_TOKENS, "prompt")
        committed = ids_of(opening.committed, model.vocab, MAX_TOKENS, "committed tokens")
        _check_opening(opening, len(prompt), len(committed), model)
        self.request = opening.request
        self.prompt = len(prompt)
        self.limit = min(opening.max_tokens, model.context - len(prompt))
        self.tokens = History(prompt)
        for token in committed:
            self.tokens.append(token)
        self.queue: list[Draft] = []
        self.branch = opening.branch
        self.by_itself = False
        self.finished: FinishReason | None = None
        self.passes = self.fed = self.accepted = 0
        self._opening = opening
        self._model = model
        self._end = len(prompt) + self.limit

    @property
    def written(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt

    def cancel(self) -> list[Message]:
        """The edge wants no more."""
        if self.finished:
            return []
        self.finished = "cancelled"
        return self._ending()

    @abstractmethod
    def _read(self, message: Window) -> list[Draft]:
        """The draft tokens of a window. Raises ProtocolError."""

    def _receive(self, message: Window) -> None:
        """Queue what a window holds beyond the text. Tokens already committed are compared: the
        first difference kills the branch. Raises ProtocolError on a window that can't be ours."""
        self.by_itself = not message.ids
        if self.by_itself or self.finished or message.branch < self.branch:
            return
        if not self.prompt <= message.start <= self._end:
            raise ProtocolError("bad_window", f"window at {message.start}, outside of the output")
        drafts = self._read(message)
        if message.branch > self.branch:
            if self.queue:
                raise ProtocolError("bad_window", "a new branch while the old one is still alive")
            self.branch = message.branch
        done = max(0, len(self.tokens) - message.start)
        for offset, draft in enumerate(drafts[:done]):
            if draft.token != self.tokens.tokens[message.start + offset]:
                self.branch += 1
                return
        fresh = drafts[done:]
        expected = len(self.tokens) + len(self.queue)
        if fresh and message.start + done != expected:
            raise ProtocolError(
                "bad_window", f"window starts at {message.start}; expected {expected}"
            )
        if len(self.queue) + len(fresh) > MAX_QUEUE:
            raise ProtocolError("flooded", f"more than {MAX_QUEUE} draft tokens are waiting")
        self.queue += fresh

    def _commit(self, token: int) -> None:
        self.tokens.append(token)
        if token in self._model.eos:
            self.finished = "stop"
        elif len(self.tokens) >= self._end:
            self.finished = "length"

    def _ending(self) -> list[Message]:
        if self.finished is None:
            return []
        self.queue.clear()
        return [Finished(request=self.request, reason=self.finished)]


def _check_opening(opening: Open, prompt: int, committed: int, model: CloudModel) -> None:
    if prompt == 0:
        raise ProtocolError("empty_prompt", "the prompt is empty; expected at least one token")
    if prompt >= model.context:
        raise ProtocolError(
            "too_long",
            f"the prompt has {prompt} tokens; the cloud's context holds {model.context} and "
            "needs room for at least one more: shorten it",
        )
    if opening.max_tokens < 1:
        raise ProtocolError(
            "bad_request", f"max_tokens is {opening.max_tokens}; expected 1 or more"
        )
    if committed >= min(opening.max_tokens, model.context - prompt):
        raise ProtocolError("bad_request", "nothing is left to generate within max_tokens")
