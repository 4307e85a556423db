"""The cloud's scheduler: one engine, many requests, pass after pass.

A *seat* is a request with its sequence in the engine. Each round gathers what every seat has to
feed (prompts in chunks, corrections, queued drafts), runs it all as one pass on the engine's
thread, and lets each session judge its part. The order rotates, so no seat waits for good.

Fill is decided here, since only here the time is known: a seat with no drafts waiting is decoded
plainly if none are expected soon enough to be worth a wait. When to expect them is learnt from the
request itself: how long after a verdict its next window came.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from e2sci.decoding.distribution import Distribution
from e2sci.engines.base import Engine, Step
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.worker import Worker, now
from e2sci.session.cloud import CloudSession, Pass
from e2sci.session.messages import Error, Message, Open, ProtocolError, Verdict, Window

log = logging.getLogger("e2sci.cloud")

PREFILL = 512
"""Prompt tokens in one pass at most."""
SHARED_PASS_MS = 400.0
"""A pass that several requests share takes about this long at most."""
_GRACE = 0.5  # of what waiting is worth: how long an overdue window is waited for
_RUN = 4  # drafts in a row that must stand for a wait to have paid


@dataclass
class Arrivals:
    """When to expect a request's next window: seconds after a verdict, by what the verdict was."""

    idle_since: float
    cut: bool = False
    _usual: dict[bool, float] = field(default_factory=dict)

    def sent(self, now: float, verdict: Verdict) -> None:
        """A verdict has gone out."""
        if verdict.accepted or verdict.rejected:
            self.idle_since, self.cut = now, verdict.rejected

    def came(self, now: float) -> None:
        """A window has come while none was waiting."""
        took, usual = now - self.idle_since, self._usual.get(self.cut)
        self._usual[self.cut] = took if usual is None else usual + 0.3 * (took - usual)

    def fill_from(self, now: float, pass_s: float, acceptance: float) -> float:
        """The time from which a fill pass is in place.

        Waiting for a window saves a pass if its drafts stand, and is lost if they don't; filling
        loses little either way. So it is waited for less the less is accepted, and hardly at all
        where nothing is: then this is the cloud alone.
        """
        worth = pass_s * acceptance**_RUN
        expected = self.idle_since + self._usual.get(self.cut, 0.0)
        return now if expected - now >= worth else expected + _GRACE * worth


@dataclass(eq=False)
class Seat:
    """A request at work: its session, its sequence in the engine, and where its messages go.

    `acceptance`: recent share of draft tokens accepted, in [0, 1]; what its passes are sized by.
    """

    session: CloudSession
    sequence: int
    send: Callable[[Sequence[Message]], None]
    fills: bool
    drafting: bool
    lookahead: bool
    arrivals: Arrivals
    acceptance: float = 0.95
    closed: bool = False

    def sent(self, now: float, verdict: Verdict) -> None:
        """A verdict has gone out: learn from it."""
        self.arrivals.sent(now, verdict)
        for accepted in [1.0] * verdict.accepted + [0.0] * verdict.rejected:
            self.acceptance += 0.05 * (accepted - self.acceptance)


class Scheduler:
    """Runs passes for the seats taken. `run()` is a task of its own until cancelled."""

    def __init__(self, engine: Engine, worker: Worker, times: PassTimes) -> None:
        self._engine = engine
        self._worker = worker
        self._times = times
        self._seats: list[Seat] = []
        self._free = list(range(engine.slots))
        self._wake = asyncio.Event()

    @property
    def busy(self) -> int:
        """Sequences in use."""
        return self._engine.slots - len(self._free)

    def take(
        self, session: CloudSession, send: Callable[[Sequence[Message]], None], opening: Open
    ) -> Seat:
        """Seat a session. Raises ProtocolError("busy") when every sequence is in use."""
        if not self._free:
            raise ProtocolError(
                "busy", f"all {self._engine.slots} places are taken; try again", retryable=True
            )
        seat = Seat(
            session,
            self._free.pop(),
            send,
            fills=opening.fill,
            drafting=opening.drafting,
            lookahead=opening.lookahead,
            arrivals=Arrivals(now()),
        )
        self._seats.append(seat)
        self._wake.set()
        return seat

    def leave(self, seat: Seat) -> None:
        """Free a seat and its cache at once; a pass under way is let go by."""
        if seat.closed:
            return
        seat.closed = True
        self._seats.remove(seat)
        self._free.append(seat.sequence)  # its next user's passes queue up behind the truncation
        with suppress(RuntimeError):  # the worker is closed when the whole cloud is
            self._worker.submit(lambda: self._engine.truncate(seat.sequence, 0))

    def window(self, seat: Seat, message: Window) -> None:
        """A window has come for a seat. Raises ProtocolError."""
        waiting = bool(seat.session.queue)
        said = seat.session.window(message)
        if not waiting and (said or seat.session.queue):  # and not of a branch that is dead
            seat.arrivals.came(now())
        self._deliver(seat, said)
        self._wake.set()

    async def run(self) -> None:
        """Pass after pass, until cancelled."""
        while True:
            self._wake.clear()
            batch = self._gather()
            if batch:
                await self._pass(batch)
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._until_fill())

    # ---- one round ------------------------------------------------------------------------

    def _gather(self) -> list[tuple[Seat, Pass]]:
        """What every seat has to feed, under the pass's token budget."""
        left = self._budget()
        batch: list[tuple[Seat, Pass]] = []
        for seat in list(self._seats):
            fill = self._may_fill(seat)
            if fill:
                self._guarded(seat, seat.session.fill)
            if seat.closed or left <= 0:
                continue
            todo = seat.session.plan(min(left, self._share(seat)), fill=fill)
            if todo is not None:
                batch.append((seat, todo))
                left -= len(todo.tokens)
        self._rotate(batch[-1][0] if batch and left <= 0 else None)
        return batch

    def _rotate(self, last: Seat | None) -> None:
        """The next round begins behind the last seat served; by one seat if all were."""
        n = self._seats.index(last) + 1 if last in self._seats else 1
        self._seats = self._seats[n:] + self._seats[:n]

    def _budget(self) -> int:
        if len(self._seats) <= 1:
            return PREFILL
        sizes = [n for n in (16, 32, 64, 128, 256, PREFILL) if self._times.ms(n) <= SHARED_PASS_MS]
        return max(sizes, default=16)

    def _share(self, seat: Seat) -> int:
        """Tokens of one seat in a pass: what is missing, and as many drafts as pay."""
        session = seat.session
        missing, waiting = len(session.tokens) - session.cached, len(session.queue)
        if not seat.lookahead:  # the edge waits for the whole window; a second pass costs more
            return missing + max(1, waiting)
        drafts = self._times.best_drafts(seat.acceptance, waiting, len(self._seats))
        return max(1, missing + drafts)

    def _may_fill(self, seat: Seat) -> bool:
        if not seat.fills or seat.session.queue or seat.session.finished:
            return False
        if not seat.drafting:
            return True
        moment = now()
        pass_s = self._times.ms(1) / 1000
        return seat.arrivals.fill_from(moment, pass_s, seat.acceptance) <= moment

    def _until_fill(self) -> float | None:
        """Seconds until some seat may be filled; None if only a message can change anything."""
        moment, pass_s = now(), self._times.ms(1) / 1000
        due = [
            seat.arrivals.fill_from(moment, pass_s, seat.acceptance) - moment
            for seat in self._seats
            if seat.fills and not seat.session.queue and not seat.session.finished
        ]
        return max(0.0, min(due)) if due else None

    async def _pass(self, batch: list[tuple[Seat, Pass]]) -> None:
        try:
            results = await self._worker.submit(lambda: self._forward(batch))
        except Exception as error:
            await self._one_by_one(batch, error)
            return
        for (seat, todo), outputs in zip(batch, results, strict=True):
            if not seat.closed:
                self._guarded(seat, partial(seat.session.passed, todo, outputs))

    async def _one_by_one(self, batch: list[tuple[Seat, Pass]], error: Exception) -> None:
        """A pass has failed: find out for whom, so that no one pays for another's request."""
        if len(batch) > 1:
            for item in batch:
                if not item[0].closed:
                    await self._pass([item])
            return
        seat = batch[0][0]
        log.error("request %s: the engine failed: %s", seat.session.request, error)
        self._fail(seat, ProtocolError("engine", f"the cloud's engine failed: {error}"))

    def _forward(self, batch: list[tuple[Seat, Pass]]) -> list[list[Distribution]]:
        for seat, todo in batch:
            if self._engine.length(seat.sequence) > todo.keep:
                self._engine.truncate(seat.sequence, todo.keep)
        return self._engine.forward(
            [Step(seat.sequence, todo.tokens, todo.outputs) for seat, todo in batch]
        )

    def _guarded(self, seat: Seat, step: Callable[[], list[Message]]) -> None:
        """Deliver what a step of the session says; if it fails, only this request does."""
        try:
            self._deliver(seat, step())
        except ProtocolError as error:
            self._fail(seat, error)
        except Exception as error:  # what an engine returns is foreign: the others go on
            log.exception("request %s: judging failed", seat.session.request)
            self._fail(seat, ProtocolError("engine", f"the cloud's engine failed: {error}"))

    def _deliver(self, seat: Seat, messages: Sequence[Message]) -> None:
        if not messages:
            return
        for message in messages:
            if isinstance(message, Verdict):
                seat.sent(now(), message)
        seat.send(messages)
        if seat.session.finished:
            self.leave(seat)

    def _fail(self, seat: Seat, error: ProtocolError) -> None:
        if seat.closed:
            return
        seat.send([error_message(error, seat.session.request)])
        self.leave(seat)


def error_message(error: ProtocolError, request: int = 0) -> Error:
    """The wire form of an error."""
    return Error(request=request, code=error.code, message=str(error), retryable=error.retryable)
