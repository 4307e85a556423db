"""The cloud's scheduler: one engine, many requests, pass after pass.

A *seat* is a request with, mostly, a place in the engine (`places`). Each round gathers what every
seat has to feed (corrections and queued drafts first, then prompts in chunks) under a token budget
sized by measured pass times, in an order that is fair (`turns`); runs it all as one pass on the
engine's worker; and lets each session judge its part.

Fill is decided here, since only here the time is known: a seat with no drafts waiting is decoded
plainly if none are expected soon enough to be worth a wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from e2sci.decoding.distribution import Distribution
from e2sci.engines.base import Engine, Step
from e2sci.runtime.admission import ANYONE, Client, Ledger, Limits
from e2sci.runtime.metrics import Metrics
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.places import Places
from e2sci.runtime.seat import ACCEPTANCE, Ended, Seat
from e2sci.runtime.service import error_message
from e2sci.runtime.turns import in_turn
from e2sci.runtime.worker import Worker, now
from e2sci.session.cloud import CloudSession, Pass
from e2sci.session.messages import Message, Open, Opened, ProtocolError, Verdict, Window

log = logging.getLogger("e2sci.cloud")

PREFILL = 512
"""Prompt tokens in one pass at most."""
SHARED_PASS_MS = 400.0
"""A pass that several requests share takes about this long at most."""
_READING = 8  # tokens to feed, drafts left out, beyond which a seat reads rather than writes
_READERS = 0.25  # of a pass, kept for those who read
_KNOWN = 4096  # clients whose acceptance is remembered


class Scheduler:
    """Runs passes for the seats taken. `run()` is a task of its own until cancelled.

    `on_end` hears what became of each request. `keep_caches`: see `places`.
    """

    def __init__(
        self,
        engine: Engine,
        worker: Worker,
        times: PassTimes,
        *,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
        on_end: Callable[[Ended], None] | None = None,
        keep_caches: bool = False,
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._times = times
        self._limits = limits or Limits()
        self._metrics = metrics or Metrics()
        self._on_end = on_end
        self._places = Places(engine.slots, self._cut, keep=keep_caches)
        self._ledger = Ledger(now)
        self._seats: list[Seat] = []
        self._known: OrderedDict[str, float] = OrderedDict()
        self._usual_s = 1.0
        self.failed_at: float | None = None
        """When the engine failed; None as soon as a pass has worked again."""
        self._wake = asyncio.Event()
        self.empty = asyncio.Event()
        self.empty.set()
        self._watch()

    @property
    def busy(self) -> int:
        """Sequences in use."""
        return len(self._places.taken)

    @property
    def kept(self) -> int:
        """Tokens kept in sequences that are free."""
        return self._places.kept

    def take(
        self,
        session: CloudSession,
        send: Callable[[Sequence[Message]], None],
        opening: Open,
        client: Client = ANYONE,
    ) -> Seat:
        """Seat a session, or put it in line. Raises ProtocolError: "busy" when the line is full,
        "limited" when the client may not have another."""
        moment = now()
        acceptance = self._known.get(client.name, ACCEPTANCE)
        seat = Seat(session, opening, send, moment, client, acceptance)
        crowded = self.busy >= self._engine.slots and not any(map(self._quiet, self._places.taken))
        if crowded and len(self._places.line) >= self._limits.waiting:
            wait = self._usual_s * (len(self._places.line) + 1) / self._engine.slots
            raise ProtocolError(
                "busy",
                f"all {self._engine.slots} places are taken and {len(self._places.line)} requests "
                "wait; try again",
                retryable=True,
                retry_after_s=min(60.0, max(0.2, wait)),
            )
        self._ledger.enter(client)
        self._seats.append(seat)
        self.empty.clear()
        self._places.join(seat)
        self._settle(lambda _: False)
        self._wake.set()
        return seat

    def leave(self, seat: Seat, reason: str = "gone") -> None:
        """Free a seat and its place at once; a pass under way is let go by."""
        if seat.closed:
            return
        seat.closed = True
        self._seats.remove(seat)
        self._places.leave(seat, sound=reason != "engine")
        self._ledger.leave(seat.client)
        self._learn(seat)
        ended = seat.ended(now(), reason)
        log.info("request ended: %s", reason, extra={"request": vars(ended)})
        self._metrics.requests.labels(reason).inc()
        if self._on_end is not None:
            self._on_end(ended)
        if not self._seats:
            self.empty.set()
        self._wake.set()

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
            try:
                batch = self._gather()
                if batch:
                    await self._pass(batch)
                    continue
            except Exception as error:  # a bug of ours: nobody may wait for an answer in vain
                log.exception("the scheduler failed")
                for seat in list(self._seats):
                    self._fail(seat, ProtocolError("engine", f"the cloud failed: {error!r}"))
            with suppress(TimeoutError):  # not wait_for, which may swallow a cancellation
                async with asyncio.timeout(self._until_due()):
                    await self._wake.wait()

    # ---- places ---------------------------------------------------------------------------

    def _settle(self, quiet: Callable[[Seat], bool]) -> None:
        """Give places to who is in line."""
        before = self._places.evictions
        for seat in self._places.give(quiet):
            if not seat.opened:
                seat.opened = True
                request = seat.session.request
                seat.send([Opened(request=request, limit=seat.session.limit)])
        self._metrics.evictions.inc(self._places.evictions - before)

    def _quiet(self, seat: Seat) -> bool:
        """Whether a seat has had nothing to do for a while."""
        return now() - seat.active >= self._limits.quiet_s and not self._wants(seat)

    def _wants(self, seat: Seat) -> bool:
        """Whether a seat has something to feed, now or whenever the cloud likes."""
        return seat.session.plan(1, fill=seat.fills) is not None

    def _cut(self, sequence: int, length: int) -> None:
        """Its next user's passes queue up behind the truncation."""

        def cut() -> None:
            if not length or self._engine.length(sequence) > length:
                self._engine.truncate(sequence, length)

        with suppress(RuntimeError):  # the worker is closed when the whole cloud is
            self._worker.submit(cut)

    def _learn(self, seat: Seat) -> None:
        self._usual_s += 0.1 * (now() - seat.began - self._usual_s)
        self._known[seat.client.name] = seat.acceptance
        self._known.move_to_end(seat.client.name)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)

    # ---- one round ------------------------------------------------------------------------

    def _gather(self) -> list[tuple[Seat, Pass]]:
        """What the next pass feeds, under its token budget."""
        for seat in self._seats:
            if seat.sequence is None and self._wants(seat):
                self._places.join(seat)
        self._settle(self._quiet)
        fill: dict[Seat, bool] = {}
        for seat in list(self._places.taken):
            fills = self._fills(seat)
            if not seat.closed and seat.session.plan(1, fill=fills):
                fill[seat] = fills
        budget = self._budget()
        readers = [seat for seat in fill if seat.missing > _READING]
        writers = [seat for seat in fill if seat.missing <= _READING]
        kept = int(_READERS * budget) if readers else 0
        batch = self._fitting(writers, fill, budget - kept)
        left = budget - sum(len(todo.tokens) for _, todo in batch)
        return batch + self._fitting(readers, fill, left)

    def _fills(self, seat: Seat) -> bool:
        """Whether the cloud is to decode for this seat now; what it knows already is delivered."""
        at = seat.fill_at(now(), self._times.ms(1) / 1000)
        if at is None or at > now():
            return False
        self._guarded(seat, seat.session.fill)
        return True

    def _fitting(
        self, seats: Sequence[Seat], fill: dict[Seat, bool], left: int
    ) -> list[tuple[Seat, Pass]]:
        """Passes of `seats` in their turn, `left` tokens at most; the rest is passed over."""
        batch = []
        for seat in in_turn(seats):
            if left <= 0:
                seat.passed_over += 1
                continue
            share = seat.share(self._times, len(self._places.taken))
            todo = seat.session.plan(min(left, share), fill=fill[seat])
            assert todo is not None
            batch.append((seat, todo))
            left -= len(todo.tokens)
        return batch

    def _budget(self) -> int:
        if len(self._places.taken) <= 1:
            return PREFILL
        sizes = [n for n in (16, 32, 64, 128, 256, PREFILL) if self._times.ms(n) <= SHARED_PASS_MS]
        return max(sizes, default=16)

    def _until_due(self) -> float | None:
        """Seconds until some seat may be filled, or may lose its place to one in line; None if
        only a message can change anything."""
        moment, pass_s = now(), self._times.ms(1) / 1000
        due = [seat.fill_at(moment, pass_s) for seat in self._places.taken]
        if self._places.line:
            quiet = [seat.active + self._limits.quiet_s for seat in self._places.taken]
            due += [at for at in quiet if at > moment]
        times = [at - moment for at in due if at is not None]
        return max(0.0, min(times)) if times else None

    # ---- the pass -------------------------------------------------------------------------

    async def _pass(self, batch: list[tuple[Seat, Pass]]) -> None:
        began = now()
        work = [(seat.sequence, todo) for seat, todo in batch]
        try:
            results = await self._worker.submit(lambda: self._forward(work))
        except Exception as error:
            for (seat, _), (sequence, _) in zip(batch, work, strict=True):
                if seat.closed and sequence is not None:
                    self._places.spoiled(sequence)
            await self._one_by_one(batch, error)
            return
        self.failed_at = None
        self._count(batch, now() - began)
        for (seat, todo), outputs in zip(batch, results, strict=True):
            seat.passed_over, seat.active = 0, now()
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
        self.failed_at = now()
        log.error("request %s: the engine failed: %s", seat.opening.id, error)
        self._fail(seat, ProtocolError("engine", f"the cloud's engine failed: {error}"))

    def _forward(self, work: Sequence[tuple[int | None, Pass]]) -> list[list[Distribution]]:
        steps = []
        for sequence, todo in work:
            assert sequence is not None
            if self._engine.length(sequence) > todo.keep:
                self._engine.truncate(sequence, todo.keep)
            steps.append(Step(sequence, todo.tokens, todo.outputs))
        return self._engine.forward(steps)

    def _guarded(self, seat: Seat, step: Callable[[], list[Message]]) -> None:
        """Deliver what a step of the session says; if it fails, only this request does."""
        try:
            self._deliver(seat, step())
        except ProtocolError as error:
            self._fail(seat, error)
        except Exception as error:  # what an engine returns is foreign: the others go on
            log.exception("request %s: judging failed", seat.opening.id)
            self._fail(seat, ProtocolError("engine", f"the cloud's engine failed: {error}"))

    def _deliver(self, seat: Seat, messages: Sequence[Message]) -> None:
        if not messages:
            return
        for message in messages:
            if isinstance(message, Verdict):
                seat.sent(now(), message)
                self._metrics.verdict(message)
        seat.send(messages)
        if seat.session.finished:
            self.leave(seat, seat.session.finished)

    def _fail(self, seat: Seat, error: ProtocolError) -> None:
        if seat.closed:
            return
        seat.send([error_message(error, seat.session.request)])
        self.leave(seat, error.code)

    # ---- figures --------------------------------------------------------------------------

    def _count(self, batch: list[tuple[Seat, Pass]], seconds: float) -> None:
        tokens = [len(todo.tokens) for _, todo in batch]
        self._metrics.passed(sum(tokens), len(batch), seconds)
        for (seat, _), fed in zip(batch, tokens, strict=True):
            self._ledger.charge(seat.client, fed)

    def _watch(self) -> None:
        places, seats = self._places, self._seats
        self._metrics.sessions.set_function(lambda: len(places.taken))
        self._metrics.waiting.set_function(lambda: len(places.line))
        self._metrics.drafts_queued.set_function(lambda: sum(len(s.session.queue) for s in seats))
        self._metrics.cached_tokens.set_function(
            lambda: places.kept + sum(s.session.cached for s in seats)
        )
