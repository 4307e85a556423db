"""The gateway's desk: requests served by vLLM's own decoding, drafts handed on to its proposer.

    Open     ──► a stream of /v1/completions at one of the servers
    Window   ──► what is new in it to the proposers
    stream   ──► Verdicts: what was agreed, corrected, filled

A request is a task: it waits for a place, reads its stream and says what its session makes of it.
Nothing of a request is the server's alone, so where one fails the task goes on at another with what
is committed, and so does an edge at another gateway.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from e2sci.decoding.distribution import pack_ids
from e2sci.engines.base import EngineError
from e2sci.engines.remote import Busy
from e2sci.engines.vllm_stream import Scored, Streaming
from e2sci.runtime.admission import Client, Ledger, Limits
from e2sci.runtime.metrics import Metrics
from e2sci.runtime.prefixes import crowded, ranked
from e2sci.runtime.seat import Ended
from e2sci.runtime.service import error_message
from e2sci.runtime.shares import Shares
from e2sci.runtime.worker import now
from e2sci.session.messages import Message, Open, Opened, ProtocolError, Score, Verdict, Window
from e2sci.session.relayed import RelayedSession
from e2sci.vllm_plugin.wire import Sender

log = logging.getLogger("e2sci.cloud")

SHUN_SECONDS = 10.0
"""How long a server that has failed comes behind the others."""


@dataclass(eq=False)
class Server:
    """A vLLM server with what is known of it. `load`: requests there; `shunned_until`: seconds."""

    streaming: Streaming
    load: int = 0
    shunned_until: float = -math.inf

    @property
    def failing(self) -> bool:
        return now() < self.shunned_until


@dataclass(eq=False)
class Guest:
    """A request at the gateway."""

    session: RelayedSession
    opening: Open
    send: Callable[[Sequence[Message]], None]
    client: Client
    opened: bool = False
    closed: bool = False
    corrections: int = 0
    began: float = field(default_factory=now)
    task: asyncio.Task[None] | None = None

    def ended(self, reason: str) -> Ended:
        session = self.session
        judged = session.accepted + self.corrections
        return Ended(
            id=self.opening.id,
            client=self.client.name,
            reason=reason,
            seconds=now() - self.began,
            prompt=session.prompt,
            tokens=session.written,
            passes=session.passes,
            fed=session.fed,
            acceptance=session.accepted / judged if judged else 0.0,
        )


class Relay:
    """`servers`: of one model; `sender`: to their proposers; `eos`: ids that end a text; `slots`:
    requests at once; `on_end` hears what became of each."""

    def __init__(
        self,
        servers: Sequence[Streaming],
        sender: Sender,
        *,
        eos: frozenset[int],
        slots: int,
        limits: Limits,
        metrics: Metrics,
        on_end: Callable[[Ended], None] | None = None,
    ) -> None:
        self.servers = [Server(streaming) for streaming in servers]
        self.empty = asyncio.Event()
        self.empty.set()
        self._names = [streaming.url for streaming in servers]
        self._sender = sender
        self._eos = eos
        self._slots = slots
        self._shares = Shares(slots)
        self._limits = limits
        self._metrics = metrics
        self._on_end = on_end
        self._ledger = Ledger(now)
        self._guests: set[Guest] = set()
        metrics.sessions.set_function(lambda: min(len(self._guests), slots))
        metrics.waiting.set_function(lambda: self._waiting)
        metrics.drafts_queued.set_function(
            lambda: sum(len(guest.session.queue) for guest in self._guests)
        )

    def take(
        self,
        session: RelayedSession,
        send: Callable[[Sequence[Message]], None],
        opening: Open,
        client: Client,
    ) -> Guest:
        """Begin a request, or put it in line. Raises ProtocolError: "busy" when the line is full,
        "limited" when the client may not have another."""
        if self._shares.full and self._waiting >= self._limits.waiting:
            raise ProtocolError(
                "busy",
                f"all {self._slots} places are taken and {self._waiting} requests wait; try again",
                retryable=True,
                retry_after_s=1.0,
            )
        self._ledger.enter(client)
        guest = Guest(session, opening, send, client)
        self._guests.add(guest)
        self.empty.clear()
        guest.task = asyncio.create_task(self._serve(guest))
        return guest

    def window(self, guest: Guest, message: Window) -> None:
        """A window has come. Raises ProtocolError."""
        drafts = guest.session.window(message)
        if drafts is not None:
            self._sender.send(drafts)

    def leave(self, guest: Guest, reason: str = "gone") -> None:
        """Free a place at once; its stream is closed, which ends the request at the server."""
        if guest.closed:
            return
        guest.closed = True
        self._guests.discard(guest)
        self._ledger.leave(guest.client)
        if guest.task is not None and guest.task is not asyncio.current_task():
            guest.task.cancel()
        ended = guest.ended(reason)
        log.info("request ended: %s", reason, extra={"request": vars(ended)})
        self._metrics.requests.labels(reason).inc()
        if self._on_end is not None:
            self._on_end(ended)
        if not self._guests:
            self.empty.set()

    async def close(self) -> None:
        """End what is left."""
        tasks = [guest.task for guest in self._guests if guest.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers:
            await server.streaming.close()

    # ---- one request ----------------------------------------------------------------------

    @property
    def _waiting(self) -> int:
        return max(0, len(self._guests) - self._slots)

    async def _serve(self, guest: Guest) -> None:
        try:
            async with self._shares.place(guest.client.name):
                await self._write(guest)
        except ProtocolError as error:
            self._fail(guest, error)
        except EngineError as error:
            log.error("request %s: %s", guest.opening.id, error)
            self._fail(guest, ProtocolError("engine", f"the cloud's engine failed: {error}"))
        except Exception as error:  # a bug of ours: nobody may wait for an answer in vain
            log.exception("request %s: the relay failed", guest.opening.id)
            self._fail(guest, ProtocolError("engine", f"the cloud failed: {error!r}"))

    async def _write(self, guest: Guest) -> None:
        """Server after server, until the text has ended. Raises ProtocolError when all have failed
        with no token between."""
        session, tried = guest.session, set[Server]()
        while not session.finished:
            server = self._choose(session, tried)
            written = session.written
            try:
                await self._read(guest, server)
                if not session.finished:
                    self._deliver(guest, session.stopped())
            except Busy as error:
                server.shunned_until = now() + SHUN_SECONDS
                log.error("request %s: %s", guest.opening.id, error)
                tried = set() if session.written > written else tried | {server}
                if len(tried) == len(self.servers):
                    raise ProtocolError(
                        "unreachable",
                        f"the cloud's engine failed: {error}",
                        retryable=True,
                        retry_after_s=1.0,
                    ) from None

    async def _read(self, guest: Guest, server: Server) -> None:
        """Relay one stream to its end. Raises EngineError."""
        session, opening = guest.session, guest.opening
        tokens, sampling = session.tokens.tokens, opening.sampling
        # The same noise again behind another beginning would not be noise.
        seed = (sampling.seed + session.written) % (1 << 63)
        sampling = msgspec.structs.replace(sampling, seed=seed)
        stream = server.streaming.stream(
            tokens, session.left, sampling, eos=self._eos, top=opening.top
        )
        self._ledger.charge(guest.client, len(tokens))
        self._metrics.fed.inc(len(tokens))
        server.load += 1
        try:
            at = now()
            async with aclosing(stream):
                async for delivered in stream:
                    self._open(guest)
                    if not delivered.ids:
                        continue
                    self._metrics.passed(len(delivered.ids), 1, now() - at)
                    self._ledger.charge(guest.client, len(delivered.ids))
                    scores = [_score(scored) for scored in delivered.scores]
                    self._deliver(guest, session.delivered(delivered.ids, scores))
                    if session.finished:
                        return
                    at = now()
        finally:
            server.load -= 1

    def _open(self, guest: Guest) -> None:
        """A server has taken it: not before, or an edge would count no time as lost."""
        if not guest.opened:
            guest.opened = True
            guest.send([Opened(request=guest.session.request, limit=guest.session.limit)])

    def _choose(self, session: RelayedSession, tried: set[Server]) -> Server:
        """The server that most likely knows the text, of those not tried."""
        order = ranked(session.tokens.tokens[: session.prompt], self._names)
        left = [server for i in order if (server := self.servers[i]) not in tried]
        loads = [server.load for server in self.servers]
        best = [s for s in left if not s.failing and not crowded(s.load, loads)]
        return (best or [s for s in left if not s.failing] or left)[0]

    def _deliver(self, guest: Guest, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Verdict):
                self._metrics.verdict(message)
                guest.corrections += message.rejected
        if messages:
            guest.send(messages)
        if guest.session.finished:
            self.leave(guest, guest.session.finished)

    def _fail(self, guest: Guest, error: ProtocolError) -> None:
        if not guest.closed:
            guest.send([error_message(error, guest.session.request)])
            self.leave(guest, error.code)


def _score(scored: Scored) -> Score:
    return Score(
        log_prob=scored.log_prob,
        ids=pack_ids([token for token, _ in scored.best]),
        log_probs=tuple(p for _, p in scored.best),
    )
