"""One generation at the edge: the draft model, the session and the connection at work together.

A single loop: take what has come from the cloud, take the draft token if one is ready, send the
windows that result, start the next draft step, sleep until something happens. The draft computes on
its own thread meanwhile, so drafting, verifying and travelling overlap.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from e2sci.decoding.acceptance import Proposal
from e2sci.decoding.distribution import pack_ids, unpack_ids
from e2sci.engines.base import EngineError
from e2sci.runtime.connection import (
    CloudUnreachable,
    Connection,
    ConnectionLost,
    EdgeError,
    ForRequest,
    Inbox,
    Refused,
)
from e2sci.runtime.drafter import Drafter, DraftJob
from e2sci.runtime.options import Options, Piece, Result, Stats
from e2sci.runtime.text import TextStream
from e2sci.runtime.worker import Worker, now
from e2sci.session.edge import Commit, EdgeSession
from e2sci.session.lookahead import Lookahead
from e2sci.session.messages import (
    MAX_WINDOW,
    Cancel,
    Error,
    Finished,
    Judged,
    Message,
    Open,
    Opened,
    ProtocolError,
    Verdict,
    Welcome,
    Window,
)

_LOSSES = 5  # in a row, with no token committed between them, before giving up
_BUSY_PAUSE_S = 0.2  # between attempts to get a place again


class _Sent(NamedTuple):
    """A window on its way: its branch, the position behind it, when it went."""

    branch: int
    end: int
    sent: float


class CloudLost(EdgeError):
    """The cloud went away for good in the middle of an answer; `result` is the text so far."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


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


class Request:
    """A generation that involves the cloud. `pieces()` runs it, once."""

    def __init__(
        self,
        connection: Connection,
        welcome: Welcome,
        worker: Worker,
        drafter: Drafter | None,
        record: Record,
        prompt: list[int],
        options: Options,
        limit: int,
    ) -> None:
        self._connection = connection
        self._worker = worker
        self._drafter = drafter
        self._record = record
        self._options = options
        self._prompt = len(prompt)
        self._model = welcome.model
        self._inbox = Inbox()
        self._opening = Open(
            request=connection.request(self._inbox),
            prompt=pack_ids(prompt),
            max_tokens=limit,
            sampling=options.sampling,
            rule=options.rule,
            credit=options.credit,
            drafting=drafter is not None,
            lookahead=options.mode == "pipelined",
            fill=options.fills,
            trace=options.trace,
        )
        self._session = EdgeSession(
            self._opening,
            window=options.window_size,
            eos=frozenset(welcome.eos),
            vocab=welcome.shared_vocab,
            lookahead=Lookahead(options.window_size, options.eta, options.lookahead),
        )
        self._drafting: tuple[DraftJob, asyncio.Future[Proposal], float] | None = None
        self._draft_s: float | None = None
        self._on_the_way: deque[_Sent] = deque()
        self._uplink = 0
        self._reconnects = 0
        self._lost = 0.0
        self._losses = self._committed_at_loss = 0
        self._trace: list[Judged] = []

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The text as it is committed; the last piece carries the result. Raises EdgeError."""
        try:
            await self._send([self._opening])
            while not self._session.finished and not self._record.stopped:
                commits = await self._turn()
                if commits:
                    yield self._record.add(commits)
            reason = "stop" if self._record.stopped else self._session.finished or "stop"
            rest = self._record.close()
            yield Piece(rest, [], self._result(reason))
        finally:
            await self._leave()

    async def _turn(self) -> list[Commit]:
        """Sleep until something happens; deal with it."""
        if self._drafting is None and self._drafter is not None and self._session.wants_draft:
            self._begin_draft(self._drafter)
        await self._inbox.wake.wait()
        self._inbox.wake.clear()
        commits: list[Commit] = []
        for item in self._inbox.take():
            if commits and isinstance(item, ConnectionLost | Error):
                self._inbox.put(item)  # hand out first what came before it
                return commits
            if isinstance(item, ConnectionLost):
                await self._resume(item)
                break
            if isinstance(item, Error) and item.retryable and self._reconnects:
                await self._resume_later(item)
                break
            commits += self._handle(item)
        await self._take_draft()
        await self._send(self._session.flush())
        return commits

    # ---- drafting -------------------------------------------------------------------------

    def _begin_draft(self, drafter: Drafter) -> None:
        job = drafter.begin(self._session)
        future = self._worker.submit(lambda: drafter.compute(job))
        future.add_done_callback(lambda _: self._inbox.wake.set())
        self._drafting = job, future, now()

    async def _take_draft(self) -> None:
        if self._drafting is None or not self._drafting[1].done():
            return
        job, future, began = self._drafting
        self._drafting = None
        try:
            proposal = future.result()
        except EngineError as error:
            raise EdgeError(f"the draft model failed: {error}") from error
        took = now() - began
        self._draft_s = (
            took if self._draft_s is None else self._draft_s + 0.2 * (took - self._draft_s)
        )
        await self._send(self._session.drafted(proposal, job.position, job.branch))

    # ---- the cloud ------------------------------------------------------------------------

    def _handle(self, message: ForRequest) -> list[Commit]:
        try:
            match message:
                case Opened():
                    self._session.opened(message)
                case Verdict():
                    self._measure(message)
                    self._trace += self._stamped(message.trace)
                    return self._session.verdict(message)
                case Finished():
                    self._session.finish(message)
                case Error():
                    raise Refused(message.code, message.message)
        except ProtocolError as error:
            raise EdgeError(f"the cloud broke the protocol: {error}") from None
        return []

    def _measure(self, verdict: Verdict) -> None:
        """Learn how many tokens are drafted in the time from a window to its verdict."""
        if not verdict.accepted and not verdict.rejected:
            return
        while self._on_the_way and not self._answers(verdict):
            self._on_the_way.popleft()
        if self._on_the_way and self._draft_s:
            round_trip = now() - self._on_the_way[0].sent
            self._session.lookahead.measured(round_trip / self._draft_s + 1)

    def _answers(self, verdict: Verdict) -> bool:
        """Whether the verdict begins in the oldest window on its way, and not behind it."""
        oldest = self._on_the_way[0]
        return oldest.branch == verdict.branch and oldest.end > verdict.start

    def _stamped(self, records: tuple[Judged, ...]) -> list[Judged]:
        ms = 1000 * (now() - self._record.began)
        return [msgspec.structs.replace(r, ms=round(ms, 3)) for r in records]

    async def _send(self, messages: Sequence[Message]) -> None:
        try:
            for message in messages:
                self._uplink += await self._connection.send(message)
                if isinstance(message, Window):
                    end = message.start + len(unpack_ids(message.ids, MAX_WINDOW))
                    self._on_the_way.append(_Sent(message.branch, end, now()))
        except ConnectionLost:
            self._inbox.wake.set()  # the reader tells us too; then we resume

    async def _resume(self, lost: ConnectionLost) -> None:
        """Reconnect and go on from what is committed. Raises CloudLost when that fails."""
        committed = len(self._session.committed)
        self._losses = self._losses + 1 if committed == self._committed_at_loss else 1
        self._committed_at_loss = committed
        if self._losses > _LOSSES:
            raise self._given_up(f"lost {_LOSSES} times without a token between: {lost}")
        try:
            welcome = await self._connection.ensure()
        except (CloudUnreachable, Refused) as error:
            raise self._given_up(str(error)) from None
        if welcome.model != self._model:
            raise self._given_up(f"it now serves {welcome.model}, not {self._model}")
        self._reconnects += 1
        self._lost = now()
        await self._reopen()

    async def _resume_later(self, error: Error) -> None:
        """The cloud has no place now, perhaps because it still holds the one we have lost."""
        if now() - self._lost > self._connection.patience:
            raise self._given_up(error.message)
        await asyncio.sleep(_BUSY_PAUSE_S)
        lost = [item for item in self._inbox.take() if isinstance(item, ConnectionLost)]
        await (self._resume(lost[0]) if lost else self._reopen())

    def _given_up(self, reason: str) -> CloudLost:
        self._record.close()
        return CloudLost(f"the cloud is gone: {reason}", self._result("lost"))

    async def _reopen(self) -> None:
        self._inbox.take()
        self._connection.forget(self._opening.request)
        self._opening = self._session.reopen(self._connection.request(self._inbox))
        self._on_the_way.clear()
        await self._send([self._opening])

    async def _leave(self) -> None:
        """Free what the request holds, here and at the cloud."""
        self._connection.forget(self._opening.request)
        if self._drafting is not None:
            self._drafting[1].cancel()
        if self._session.finished is None:
            with suppress(ConnectionLost):
                await self._connection.send(Cancel(request=self._opening.request))

    def _result(self, reason: str) -> Result:
        counts, credit = self._session.stats, self._session.credit
        judged = counts.accepted + counts.corrections
        stats = Stats(
            mode=self._options.mode,
            accept=self._options.accept,
            **self._record.times(),  # type: ignore[arg-type]
            drafted=counts.drafted,
            accepted=counts.accepted,
            acceptance_rate=counts.accepted / judged if judged else None,
            windows=counts.windows,
            cloud_passes=counts.passes,
            cloud_tokens=counts.fed,
            uplink_bytes=self._uplink,
            downlink_bytes=self._inbox.bytes,
            wasted_drafts=counts.drafted - counts.accepted,
            corrections=counts.corrections,
            filled=counts.filled,
            credit=credit.credit if credit else None,
            threshold=credit.threshold if credit else None,
            reconnects=self._reconnects,
        )
        record = self._record
        return Result(
            record.text, record.ids, reason, self._prompt, stats, record.commits, self._trace
        )
