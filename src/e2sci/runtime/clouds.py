"""The clouds an edge knows: which one a request turns to, and how long it is looked for.

All serve the same model. The nearest one comes first, by its measured round trip; those not
measured yet follow in the order given, and those that have failed or have no place come last for a
while. A request stays where it is until it is lost or refused there, so clouds share the load of
an outage and no request is moved for the sake of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, wait_random_exponential

from e2sci.engines.base import Engine, fingerprint
from e2sci.runtime.connection import (
    SHUN_SECONDS,
    CloudUnreachable,
    Connection,
    Connector,
    Refused,
)
from e2sci.runtime.transport import ChannelClosed
from e2sci.runtime.worker import now
from e2sci.session.messages import Welcome

Tell = Callable[[str], None]


class Clouds:
    """One cloud or several. `connectors` open a channel to one each."""

    def __init__(self, connectors: Sequence[Connector], engine: Engine) -> None:
        prints = fingerprint(engine)
        self.connections = [
            Connection(connector, number, engine.info, prints)
            for number, connector in enumerate(connectors, 1)
        ]
        self.welcome: Welcome | None = None

    @property
    def several(self) -> bool:
        return len(self.connections) > 1

    @property
    def rtt_s(self) -> float | None:
        """The round trip to the cloud that is turned to first, as last measured."""
        return self._ranked()[0].rtt_s

    @property
    def at_hand(self) -> bool:
        """Whether there is a cloud that nothing is known against."""
        return not all(connection.shunned for connection in self.connections)

    async def ensure(
        self,
        patience: float,
        *,
        tell: Tell,
        like: Welcome | None = None,
        but: Collection[Connection] = (),
    ) -> Connection:
        """An open connection to the first cloud that answers, tried for `patience` seconds.

        `like`: the cloud must serve that model; without it, and with several clouds, the one of the
        first that ever answered. `but`: not these. `tell` is told of clouds left out. Raises
        CloudUnreachable, or Refused when none can work.
        """
        model = like or (self.welcome if self.several else None)
        began, refused = now(), dict[Connection, Refused]()
        tries = AsyncRetrying(
            stop=lambda _: now() - began >= patience,
            wait=wait_random_exponential(multiplier=0.1, max=2),
            retry=retry_if_exception_type(ChannelClosed),
        )
        try:
            return await tries(self._first, model, but, refused, tell)
        except RetryError as error:
            tried = f" (tried for {patience:.0f} s)" if patience else ""
            raise CloudUnreachable(f"{error.last_attempt.exception()}{tried}") from None

    async def close(self) -> None:
        for connection in self.connections:
            await connection.close()

    async def _first(
        self,
        like: Welcome | None,
        but: Collection[Connection],
        refused: dict[Connection, Refused],
        tell: Tell,
    ) -> Connection:
        """One attempt at each. Raises ChannelClosed if another round may help, or Refused."""
        failures = []
        for connection in self._ranked():
            if connection in but or connection in refused:
                continue
            try:
                welcome = await connection.open()
                _require_same(welcome, like)
            except ChannelClosed as error:
                connection.shun(SHUN_SECONDS)
                failures.append(str(error))
            except Refused as error:
                connection.shun(SHUN_SECONDS)
                refused[connection] = error
                if self.several:
                    tell(f"{connection.name} is left out: {error}")
            else:
                self.welcome = welcome
                return connection
        if refused and not failures:
            raise next(iter(refused.values()))
        raise ChannelClosed("; ".join(failures) or "there is no other cloud")

    def _ranked(self) -> list[Connection]:
        """The first to try comes first."""

        def rank(connection: Connection) -> tuple[float, float]:
            shunned = connection.shunned_until if connection.shunned else -math.inf
            return shunned, math.inf if connection.rtt_s is None else connection.rtt_s

        return sorted(self.connections, key=rank)


def _require_same(welcome: Welcome, like: Welcome | None) -> None:
    """One text is written by one model. Raises Refused."""
    if like and (welcome.model, welcome.fingerprint) != (like.model, like.fingerprint):
        raise Refused("model", f"it serves {welcome.model}, not {like.model}")
