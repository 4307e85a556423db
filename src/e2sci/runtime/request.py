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

import msgspec

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
from e2sci.runtime.options import Options, Piece, Result, Stats
from e2sci.runtime.record import Record
from e2sci.runtime.recovery import GivenUp, Recovery
from e2sci.runtime.trips import Trips
from e2sci.runtime.worker import Worker, now
from e2sci.session.edge import Commit, EdgeSession
from e2sci.session.lookahead import Lookahead
from e2sci.session.messages import (
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
            trace=options.trace,
            top=options.logprobs,
            id=options.request_id,
        )
        self._session = EdgeSession(
            self._opening,
            window=way.window,
            eos=frozenset(welcome.eos),
            vocab=welcome.shared_vocab,
            lookahead=Lookahead(way.window, options.eta, options.lookahead),
        )
        self._drafting: tuple[DraftJob, asyncio.Future[Proposal], float] | None = None
        self._draft_s: float | None = None
        self._trips = Trips()
        self._uplink = 0
        self._trace: list[Judged] = []

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
                    yield Piece("", [], notice=self._notices[told])
                    told += 1
                if commits:
                    yield self._record.add(commits)
            reason = "stop" if self._record.stopped else self._session.finished or "stop"
            rest = self._record.close()
            yield Piece(rest, [], self._result(reason))
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
        if self._auto is not None and commits and self._session.connected:
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
            raise EdgeError(f"the draft model failed: {error}") from error
        took = now() - began
        if self._auto is not None and job.position - job.keep <= _STEP:
            self._auto.drafted(took)
        self._draft_s = (
            took if self._draft_s is None else self._draft_s + 0.2 * (took - self._draft_s)
        )
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
                    self._measure(message)
                    self._trace += self._stamped(message.trace)
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
        if self._auto is not None:
            self._auto.judged(counts.accepted - accepted, counts.corrections - corrections)
        return commits

    def _measure(self, verdict: Verdict) -> None:
        """Learn how many tokens are drafted in the time from a window to its verdict."""
        took = self._trips.took(verdict, now())
        if took is not None and self._draft_s:
            self._session.lookahead.measured(took / self._draft_s + 1)

    def _stamped(self, records: tuple[Judged, ...]) -> list[Judged]:
        ms = 1000 * (now() - self._record.began)
        return [msgspec.structs.replace(r, ms=round(ms, 3)) for r in records]

    async def _send(self, messages: Sequence[Message]) -> None:
        try:
            for message in messages:
                self._uplink += await self._connection.send(message)
                if isinstance(message, Window):
                    self._trips.sent(message, now())
        except ConnectionLost:
            self._inbox.wake.set()  # the reader tells us too; then we resume

    def _without_cloud(self, reason: ConnectionLost | Error) -> None:
        """The cloud is gone, or has no place: search. Raises GivenUp or EdgeError."""
        self._connection.forget(self._opening.request)
        self._session.lost()
        self._trips.lost()
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

    def _result(self, reason: str) -> Result:
        counts, credit = self._session.stats, self._session.credit
        judged = counts.accepted + counts.corrections
        stats = Stats(
            mode=self._auto.mode if self._auto else self._options.mode,
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
            wasted_drafts=counts.drafted - counts.accepted - counts.alone,
            corrections=counts.corrections,
            filled=counts.filled,
            credit=credit.credit if credit else None,
            threshold=credit.threshold if credit else None,
            reconnects=self._recovery.reconnects,
            drafted_alone=counts.alone,
        )
        record = self._record
        return Result(
            record.text,
            record.ids,
            reason,
            self._prompt,
            stats,
            record.commits,
            self._trace,
            self._options.request_id,
            self._notices,
        )
