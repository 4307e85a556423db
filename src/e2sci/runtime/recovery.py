"""How one request finds a cloud again: between losing its place and having another.

Theory of operation
-------------------
    seated     ──► connection lost: `lost()`      ──► searching
    asked      ──► lost, or a retryable refusal: `refused()` ──► searching, if need be after a pause
    searching  ──► `found()` gives a connection   ──► asked (the request sends its Open there)
    asked      ──► `opened()`                     ──► seated

The search is a task of its own, so drafting goes on meanwhile. Its time is the edge's patience,
counted from the loss or the first refusal until a place is had again. Under `on_cloud_loss="draft"`
a lost request need not wait for it: behind a short pause `alone` is true, the draft's tokens are
committed as they come, and the search goes on for as long as the text does.
"""

from __future__ import annotations

import asyncio
import math
import random

from e2sci.runtime.clouds import Clouds, Tell
from e2sci.runtime.connection import (
    SHUN_SECONDS,
    CloudUnreachable,
    Connection,
    Refused,
)
from e2sci.runtime.options import OnCloudLoss
from e2sci.runtime.worker import now
from e2sci.session.messages import Error, Welcome

ALONE_AFTER_SECONDS = 2.0
"""How long a lost cloud is waited for before the draft goes on alone."""
_LOSSES = 5  # of each cloud in a row, with no token committed between them, before giving up
_PAUSES = (0.2, 2.0)  # s between askings for a place where the cloud names none: first, longest


class GivenUp(Exception):
    """No cloud will go on with this request; the message says why."""


class Recovery:
    """The search of one request. `wake` is set whenever there may be news; `tell` takes what the
    user should know. Its methods raise GivenUp, and Refused or CloudUnreachable where the request
    has never had a place."""

    def __init__(
        self,
        clouds: Clouds,
        welcome: Welcome,
        *,
        patience: float,
        on_loss: OnCloudLoss,
        wake: asyncio.Event,
        tell: Tell,
    ) -> None:
        self.reconnects = 0
        self._clouds = clouds
        self._welcome = welcome
        self._patience = patience
        self._on_loss = on_loss
        self._wake = wake
        self._tell = tell
        self._search: asyncio.Task[Connection] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since: float | None = None  # without a place from then on
        self._seated = self._lost = self._broken = False
        self._due = self._alone = self._hopeless = False
        self._tried: set[Connection] = set()  # of no use any more, under "fail"
        self._refusals = 0
        self._losses, self._committed_at_loss = 0, -1

    @property
    def searching(self) -> bool:
        """Whether there is no cloud to talk to."""
        return self._search is not None or self._hopeless

    def alone(self) -> bool:
        """Whether the draft's tokens are final as they come."""
        drafts = self._on_loss == "draft" and self._lost and self.searching
        if drafts and (self._due or self._hopeless) and not self._alone:
            self._alone = True
            self._tell("drafting alone: what follows is not checked by the target")
        return drafts and self._alone

    # ---- what happens ---------------------------------------------------------------------

    def lost(self, connection: Connection, reason: str, committed: int) -> None:
        """The connection broke with `committed` tokens."""
        self._losses = self._losses + 1 if committed == self._committed_at_loss else 1
        self._committed_at_loss = committed
        self._lost = self._broken = True
        self._without_place()
        most = _LOSSES * len(self._clouds.connections)
        if self._losses > most:
            self._give_up(f"lost {most} times without a token between: {reason}")
            return
        self._strike(connection, reason)
        self._tell(f"cloud lost ({reason}): {self._plan()}")
        self._look(0.0)

    def refused(self, connection: Connection, error: Error) -> None:
        """The cloud has no place for the request, or takes back the one it had."""
        if not (error.retryable or self._lost):
            raise Refused(error.code, error.message, error.retry_after_s)
        self._lost = self._lost or self._seated
        self._without_place()
        if not error.retryable:
            self._give_up(error.message)
            return
        self._strike(connection, error.message)
        pause = max(error.retry_after_s, min(_PAUSES[1], _PAUSES[0] * 2**self._refusals))
        self._refusals += 1
        connection.shun(SHUN_SECONDS if error.code == "draining" else pause)
        if self._moves():
            self._tell(f"{error.message}: trying another cloud")
            self._look(0.0)
        elif self._left > 0:  # ask again when it may help
            pause = min(pause * random.uniform(1.0, 1.2), self._left)
            self._tell(f"{error.message}: trying again in {pause:.1f} s")
            self._look(pause)
        elif self._lost:
            self._give_up(error.message)
        else:
            raise Refused(error.code, error.message, error.retry_after_s)

    def found(self) -> Connection | None:
        """Where to ask for a place now, once, when the search has succeeded."""
        if self._search is None or not self._search.done():
            return None
        search, self._search = self._search, None
        try:
            connection = search.result()
        except (CloudUnreachable, Refused) as error:
            if not self._lost:
                raise
            self._give_up(str(error))
            return None
        self.reconnects += self._broken
        self._broken = False
        return connection

    def opened(self, connection: Connection) -> None:
        """The request has a place, for the first time or again."""
        if self._lost:
            name = f": {connection.name}" if self._clouds.several else ""
            self._tell(f"cloud is back{name}")
        self.close()
        self._seated = True
        self._lost = self._due = self._alone = False
        self._since = None
        self._refusals = 0
        self._tried.clear()

    def close(self) -> None:
        """Stop searching."""
        if self._search is not None:
            self._search.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._search = self._timer = None

    # ---- searching ------------------------------------------------------------------------

    @property
    def _left(self) -> float:
        """Seconds left to search for."""
        assert self._since is not None
        if self._lost and self._on_loss != "wait":
            return 0.0 if self._on_loss == "fail" else math.inf
        return max(0.0, self._since + self._patience - now())

    @property
    def _grace(self) -> float:
        return min(self._patience, ALONE_AFTER_SECONDS)

    def _without_place(self) -> None:
        """The time runs from now, if it does not already."""
        if self._since is None:
            self._since = now()
        if self._lost and self._on_loss == "draft" and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._grace, self._grace_is_over)

    def _grace_is_over(self) -> None:
        self._due = True
        self._wake.set()

    def _strike(self, connection: Connection, reason: str) -> None:
        """Under "fail" every other cloud is tried once, and none is waited for. Raises GivenUp."""
        if self._lost and self._on_loss == "fail":
            self._tried.add(connection)
            if len(self._tried) == len(self._clouds.connections):
                raise GivenUp(reason)

    def _plan(self) -> str:
        if self._clouds.at_hand or self._on_loss == "fail":
            return "trying another"
        if self._on_loss == "draft":
            return f"waiting {self._grace:.3g} s before drafting alone"
        return f"waiting up to {self._left:.3g} s"

    def _moves(self) -> bool:
        """Whether another cloud is asked at once; without patience, each a single time."""
        if self._lost and self._on_loss == "fail":
            return True
        fresh = self._refusals < len(self._clouds.connections)
        return self._clouds.at_hand and (fresh or self._left > 0)

    def _look(self, pause: float) -> None:
        self._search = asyncio.get_running_loop().create_task(self._find(pause))
        self._search.add_done_callback(self._ended)

    def _ended(self, search: asyncio.Task[Connection]) -> None:
        if not search.cancelled():
            search.exception()  # seen, though nobody may be left to hear it
        self._wake.set()

    async def _find(self, pause: float) -> Connection:
        if pause:
            await asyncio.sleep(pause)
        return await self._clouds.ensure(
            self._left, like=self._welcome, but=self._tried, tell=self._tell
        )

    def _give_up(self, reason: str) -> None:
        """Raises GivenUp, unless the draft can finish the text by itself."""
        if self._on_loss != "draft":
            raise GivenUp(reason)
        self._hopeless = True
        self._tell(f"no cloud will go on with the text: {reason}")
        self._wake.set()
