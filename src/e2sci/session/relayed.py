"""One request whose text another server decides, as a state machine: no I/O, no clock, no model.

Theory of operation
-------------------
The server (vLLM with our proposer) decodes on and on, judges by itself whatever drafts it finds,
and says only which tokens it has made final. So this is fill by construction, and comparing is all
that is left to do:

    window arrives    ──► queued as at any cloud; `drafts()` is what the server should be told
    tokens delivered  ──► equal to the queue's head: accepted; different: a correction, the branch
                          is dead; nothing queued: the cloud's own

The text is the server's in any case. Where a window came too late for the server to use, its tokens
still count as accepted if they agree: for the edge nothing else matters.
"""

from __future__ import annotations

from collections.abc import Sequence

from e2sci.decoding.distribution import pack_ids
from e2sci.session.judge import Draft
from e2sci.session.line import CloudModel, Line
from e2sci.session.messages import (
    MAX_WINDOW,
    Message,
    Open,
    ProtocolError,
    Score,
    Verdict,
    Window,
    ids_of,
)
from e2sci.vllm_plugin.store import next_key, prefix_key
from e2sci.vllm_plugin.wire import Drafts


class RelayedSession(Line):
    """One request at a gateway. Raises ProtocolError when the opening can't be served as promised
    (`require_servable`)."""

    def __init__(self, opening: Open, model: CloudModel) -> None:
        require_servable(opening)
        super().__init__(opening, model)
        self._key = prefix_key(self.tokens.tokens)

    @property
    def left(self) -> int:
        """Output tokens that may still come."""
        return self._end - len(self.tokens)

    def window(self, message: Window) -> Drafts | None:
        """Draft tokens have come; what is new in them. Raises ProtocolError on a window that can't
        be ours."""
        known = len(self.queue)
        self._receive(message)
        fresh = [draft.token for draft in self.queue[known:]]
        if not fresh:
            return None
        key = self._key
        for draft in self.queue[:known]:
            key = next_key(key, draft.token)
        return Drafts(key, len(self.tokens) + known, fresh)

    def delivered(self, ids: Sequence[int], scores: Sequence[Score] = ()) -> list[Message]:
        """The server has made `ids` final, in one step; `scores`: one a token, if the opening asks.
        Raises ProtocolError on an id that means nothing to the edge, and commits none then."""
        if foreign := [token for token in ids if not 0 <= token < self._model.vocab]:
            raise ProtocolError(
                "engine",
                f"vLLM wrote token id {foreign[0]}, and the models share those below "
                f"{self._model.vocab} only",
            )
        self.passes += 1
        said: list[Message] = []
        for begin in range(0, len(ids), MAX_WINDOW):
            if self.finished:
                break
            part = slice(begin, begin + MAX_WINDOW)
            said.append(self._verdict(ids[part], scores[part]))
        return said + self._ending()

    def stopped(self) -> list[Message]:
        """The server has ended the text."""
        self.finished = self.finished or "stop"
        return self._ending()

    # ---- comparing ------------------------------------------------------------------------

    def _verdict(self, ids: Sequence[int], scores: Sequence[Score]) -> Verdict:
        start, accepted, rejected = len(self.tokens), 0, False
        own: list[int] = []
        for token in ids:
            draft = self.queue.pop(0) if self.queue else None
            if draft is not None and draft.token == token:
                accepted += 1
            else:
                rejected = rejected or draft is not None
                self.queue.clear()
                own.append(token)
            self._commit(token)
            if self.finished:
                break
        self.accepted += accepted
        self.fed += accepted + len(own)
        self.branch += rejected
        return Verdict(
            request=self.request,
            branch=self.branch - rejected,
            start=start,
            accepted=accepted,
            ids=pack_ids(own),
            rejected=rejected,
            passes=self.passes,
            fed=self.fed,
            scores=tuple(scores[: accepted + len(own)]),
        )

    def _commit(self, token: int) -> None:
        super()._commit(token)
        self._key = next_key(self._key, token)

    def _read(self, message: Window) -> list[Draft]:
        """Sketches, which the rejection rule sends, are left unread: vLLM draws without them."""
        ids = ids_of(message.ids, self._model.vocab, MAX_WINDOW, "window")
        return [Draft(token, None) for token in ids]


def require_servable(opening: Open) -> None:
    """Raises ProtocolError("unsupported") on what vLLM's own verification can't do as promised.

    It is lossless: greedy by agreement, sampling by rejection with the draft as a certainty, which
    leaves the distribution the target's but not the text that a seed would give without drafts.
    """
    rule, sampling = opening.rule.name, opening.sampling
    if rule not in ("strict", "rejection"):
        raise _unsupported(
            f"vLLM verifies by itself and tolerates nothing, so {rule} can't be had here; use "
            "strict, or a cloud with --engine vllm"
        )
    if rule == "strict" and opening.drafting and not sampling.greedy:
        raise _unsupported(
            "under strict a seed gives one text, and what vLLM draws depends on which drafts came "
            "in time; use --accept rejection, whose text is distributed as the target's, or "
            "temperature 0"
        )
    if sampling.min_p or sampling.logit_bias:
        raise _unsupported("vLLM has no min_p and no logit_bias beside drafts; leave them out")
    if sampling.frequency_penalty or sampling.presence_penalty:
        raise _unsupported(
            "vLLM counts these penalties from where it was asked to go on, so a resumed text would "
            "change; leave frequency_penalty and presence_penalty out"
        )


def _unsupported(reason: str) -> ProtocolError:
    return ProtocolError("unsupported", reason)
