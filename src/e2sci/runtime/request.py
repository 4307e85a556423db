"""One generation at the edge: the draft model, the session and the connection at work together.

A single loop: take what has come from the cloud, take the draft token if one is ready, send the
windows that result, start the next draft step, sleep until something happens. The draft computes on
its own thread meanwhile, so drafting, verifying and travelling overlap. What is done about a cloud
that is lost, or has no place, is `recovery`'s to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace

from e2sci.decoding.acceptance import Proposal
from e2sci.decoding.distribution import pack_ids
from e2sci.engines.base import EngineError
from e2sci.runtime.auto import PING_SECONDS, Auto, Learnt
from e2sci.runtime.clouds import Clouds
from e2sci.runtime.connection import (
    CloudUnreachable,
    Connection,
    ConnectionLost,
    EdgeError,
    Inbox,
)
from e2sci.runtime.drafter import Drafter, DraftJob
from e2sci.runtime.meter import Meter
from e2sci.runtime.options import Options, Piece, Result
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.record import Record
from e2sci.runtime.recovery import GivenUp, Recovery
from e2sci.runtime.worker import Worker, now
from e2sci.session.edge import Commit, EdgeSession
from e2sci.session.lookahead import Lookahead
from e2sci.session.messages import (
    Cancel,
    Error,
    Finished,
    Message,
    Open,
    Opened,
    ProtocolError,
    Verdict,
    Welcome,
)

log = logging.getLogger("e2sci.edge")

_STEP = 4  # tokens fed in an ordinary draft step at most; more is reading


class CloudLost(EdgeError):
    """The cloud went away for good in the middle of an answer; `result` is the text so far."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


class Request:
    """A generation that involves the cloud: `connection`, which is open, or another of `clouds`
    when that is lost. `pieces()` runs it, once."""

    def __init__(
        self,
        clouds: Clouds,
        connection: Connection,
        welcome: Welcome,
        patience: float,
        worker: Worker,
        drafter: Drafter | None,
        record: Record,
        prompt: list[int],
        options: Options,
        limit: int,
        learnt: Learnt,
    ) -> None:
        self._connection = connection
        self._worker = worker
        self._drafter = drafter
        self._record = record
        self._options = options
        self._prompt = len(prompt)
        self._inbox = Inbox()
        self._notices: list[str] = []
        self._recovery = Recovery(
            clouds,
            welcome,
            patience=patience,
            on_loss=options.on_cloud_loss,
            wake=self._inbox.wake,
            tell=self.tell,
        )
        self._auto = self._guide(learnt) if options.mode == "auto" else None
        way = self._auto.way if self._auto else options.way
        self._opening = Open(
            request=connection.request(self._inbox),
            prompt=pack_ids(prompt),
            max_tokens=limit,
            sampling=options.sampling,
            rule=options.rule,
            credit=options.credit,
            drafting=drafter is not None,
            lookahead=way.mode == "pipelined",
            fill=way.fill,
            trace=options.trace or options.tale,
            top=options.logprobs,
            id=options.request_id,
        )
        self._session = EdgeSession(
            self._opening,
            window=way.window,
            eos=frozenset(welcome.eos),
            vocab=welcome.shared_vocab,
            lookahead=Lookahead(way.window, options.eta, options.lookahead),
            doubt=way.doubt,
            early=way.early,
        )
        self._drafting: tuple[DraftJob, asyncio.Future[Proposal], float] | None = None
        self._meter = Meter(record, self._session, self._inbox, tells=options.tale)

    def tell(self, notice: str) -> None:
        """Let the user know, with the next piece."""
        name = self._options.request_id
        log.info("request %s: %s", name or self._opening.request, notice, extra={"id": name})
        self._notices.append(notice)
        self._inbox.wake.set()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The text as it is committed, and notices; the last piece carries the result. Raises
        EdgeError."""
        told = 0
        pinging = asyncio.create_task(self._ping()) if self._auto else None
        try:
            await self._send([self._opening])
            if self._auto and not self._auto.drafting:
                await self._send(self._session.rest())
            while not self._session.finished and not self._record.stopped:
                commits = await self._turn()
                while told < len(self._notices):
                    yield self._with_tale(Piece("", [], notice=self._notices[told]))
                    told += 1
                if commits or self._meter.news:
                    yield self._with_tale(self._record.add(commits))
            reason = "stop" if self._record.stopped else self._session.finished or "stop"
            rest = self._record.close()
            yield self._with_tale(Piece(rest, [], self._result(reason)))
        except GivenUp as error:
            self._record.close()
            raise CloudLost(f"the cloud is gone: {error}", self._result("lost")) from None
        finally:
            if pinging is not None:
                pinging.cancel()
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
            if isinstance(item, ConnectionLost | Error):
                self._without_cloud(item)
                break
            commits += self._handle(item)
        await self._rejoin()
        await self._take_draft()
        if self._recovery.alone():
            commits += self._session.alone()
        await self._send(self._session.flush())
        if self._auto is not None and self._drafter and commits and self._session.connected:
            await self._follow(self._auto, len(commits))
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
            self._drafter = None
            self.tell(f"the draft model failed, so the cloud goes on alone: {error}")
            await self._send(self._session.rest())
            return
        took = now() - began
        if self._auto is not None and job.position - job.keep <= _STEP:
            self._auto.drafted(took)
        self._meter.drafted(took)
        await self._send(self._session.drafted(proposal, job.position, job.branch))

    # ---- mode auto ------------------------------------------------------------------------

    def _guide(self, learnt: Learnt) -> Auto:
        welcome, options = self._connection.welcome, self._options
        return Auto(
            learnt,
            welcome.pass_ms if welcome else (),
            self._connection.rtt_s or 0.0,
            gamma=options.gamma,
            fill=options.fill,
            window=options.window,
            tell=self.tell,
        )

    async def _follow(self, auto: Auto, tokens: int) -> None:
        """Draft or rest, as what was written suggests."""
        auto.wrote(tokens, now())
        self._session.window_size = self._session.lookahead.window = auto.way.window
        self._session.early = auto.way.early
        if auto.drafting:
            self._session.resting = False
        elif not self._session.resting:
            await self._send(self._session.rest())

    async def _ping(self) -> None:
        """Measure the round trip, time and again."""
        while self._auto is not None:
            with suppress(CloudUnreachable):
                self._auto.pinged(await self._connection.ping())
            await asyncio.sleep(PING_SECONDS)

    # ---- the cloud ------------------------------------------------------------------------

    def _handle(self, message: Opened | Verdict | Finished) -> list[Commit]:
        try:
            match message:
                case Opened():
                    self._session.opened(message)
                    self._recovery.opened(self._connection)
                case Verdict():
                    return self._judged(message)
                case Finished():
                    self._session.finish(message)
        except ProtocolError as error:
            raise EdgeError(f"the cloud broke the protocol: {error}") from None
        return []

    def _judged(self, verdict: Verdict) -> list[Commit]:
        counts = self._session.stats
        accepted, corrections = counts.accepted, counts.corrections
        commits = self._session.verdict(verdict)
        self._meter.heard(verdict, commits)
        if self._auto is not None:
            self._auto.judged(counts.accepted - accepted, counts.corrections - corrections)
        return commits

    async def _send(self, messages: Sequence[Message]) -> None:
        try:
            for message in messages:
                self._meter.sent(message, await self._connection.send(message))
        except ConnectionLost:
            self._inbox.wake.set()  # the reader tells us too; then we resume

    def _without_cloud(self, reason: ConnectionLost | Error) -> None:
        """The cloud is gone, or has no place: search. Raises GivenUp or EdgeError."""
        self._connection.forget(self._opening.request)
        self._session.lost()
        self._meter.lost()
        if isinstance(reason, Error):
            self._recovery.refused(self._connection, reason)
        else:
            self._recovery.lost(self._connection, str(reason), len(self._session.committed))

    async def _rejoin(self) -> None:
        """Go on from what is committed, once there is a cloud again."""
        found = self._recovery.found()
        if found is not None:
            self._connection = found
            self._opening = self._session.reopen(found.request(self._inbox))
            await self._send([self._opening])
            if self._auto is not None and found.welcome is not None:
                self._auto.linked(found.welcome.pass_ms, found.rtt_s or 0.0)
            if self._session.resting:
                await self._send(self._session.rest())

    async def _leave(self) -> None:
        """Free what the request holds, here and at the cloud."""
        searching = self._recovery.searching
        self._recovery.close()
        self._connection.forget(self._opening.request)
        if self._drafting is not None:
            self._drafting[1].cancel()
        if self._session.finished is None and not searching:
            with suppress(ConnectionLost):
                await self._connection.send(Cancel(request=self._opening.request))

    # ---- what is told ---------------------------------------------------------------------

    def _with_tale(self, piece: Piece) -> Piece:
        """The piece, with what has happened on the way to it if that is wanted."""
        if not self._options.tale:
            return piece
        auto, connection = self._auto, self._connection
        resting = self._session.resting
        points = connection.welcome.pass_ms if connection.welcome else ()
        tale = self._meter.tale(
            self._options.mode if auto is None else "cloud" if resting else auto.way.mode,
            drafting=self._drafter is not None and not resting,
            rtt_s=connection.rtt_s,
            cloud_ms=PassTimes(points).ms(1) if points else None,
        )
        return replace(piece, tale=tale)

    def _result(self, reason: str) -> Result:
        mode = self._auto.mode if self._auto else self._options.mode
        record = self._record
        return Result(
            record.text,
            record.ids,
            reason,
            self._prompt,
            self._meter.stats(mode, self._options.accept, self._recovery.reconnects),
            record.commits,
            self._meter.trace,
            self._options.request_id,
            self._notices,
        )
