"""Who may do how much at a cloud: clients, their limits, and the limits that hold for all.

A *client* is the holder of a key, or anyone where keys are off. Tokens are paid behind: what the
target is fed for a client is charged to it, and a new request is refused while its minute is
overdrawn. So a request under way is never cut, and the mean rate still holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from e2sci.session.messages import ProtocolError

_MINUTE = 60.0


@dataclass(frozen=True)
class Client:
    """`name`: who it is in logs and turns; `sessions`: requests at once; `tokens_per_minute`: fed
    to the target, prompts included; `context`: tokens of one text. None: no limit of its own."""

    name: str = "anyone"
    sessions: int | None = None
    tokens_per_minute: int | None = None
    context: int | None = None


ANYONE = Client()


@dataclass(frozen=True)
class Limits:
    """What holds for every connection. Raises ValueError below the least that makes sense.

    `waiting`: requests in line for a place; `hello_s`: seconds for the handshake; `idle_s`: seconds
    a connection may say nothing while it has no request, None: for ever; `messages_per_s`: read
    from a connection, on average over ten seconds; `unread`: messages an edge may leave unread;
    `quiet_s`: seconds behind which a request with nothing to do gives its place to one in line.
    """

    waiting: int = 64
    hello_s: float = 10.0
    idle_s: float | None = 600.0
    messages_per_s: float = 1000.0
    unread: int = 4096
    quiet_s: float = 1.0

    def __post_init__(self) -> None:
        least = {"waiting": 0, "unread": 1}
        for name, value in vars(self).items():
            if value is None:
                continue
            low = least.get(name, 0.0)
            if not (value >= low if name in least else value > low):
                raise ValueError(
                    f"{name} is {value}; expected {'at least' if low else 'above'} {low}"
                )


TIMELESS = Limits(idle_s=None)
"""For a virtual clock, on which an idle world must be found stuck and not run on for ever."""


class Bucket:
    """A rate on average: `rate` a second, up to `size` at once. `now` in seconds."""

    def __init__(self, rate: float, size: float, now: float) -> None:
        self._rate, self._size = rate, size
        self._left, self._at = size, now

    def left(self, now: float) -> float:
        """What may still be taken; below zero when more was taken than there was."""
        self._left = min(self._size, self._left + self._rate * (now - self._at))
        self._at = now
        return self._left

    def take(self, amount: float, now: float) -> None:
        self._left = self.left(now) - amount

    def wait(self, now: float) -> float:
        """Seconds until something is left."""
        return max(0.0, -self.left(now) / self._rate)


class Ledger:
    """What clients hold and have used. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: Counter[str] = Counter()
        self._used: dict[str, Bucket] = {}

    def enter(self, client: Client) -> None:
        """A request begins. Raises ProtocolError("limited") beyond the client's limits."""
        if client.sessions is not None and self._open[client.name] >= client.sessions:
            raise ProtocolError(
                "limited",
                f"{client.name} has {self._open[client.name]} requests open; its key allows "
                f"{client.sessions}: finish one first",
                retryable=True,
                retry_after_s=1.0,
            )
        wait = self._bucket(client).wait(self._clock()) if client.tokens_per_minute else 0.0
        if wait > 0:
            raise ProtocolError(
                "limited",
                f"{client.name} has used its {client.tokens_per_minute} tokens a minute; "
                f"try again in {wait:.0f} s",
                retryable=True,
                retry_after_s=wait,
            )
        self._open[client.name] += 1

    def leave(self, client: Client) -> None:
        """A request has ended."""
        self._open[client.name] -= 1
        if not self._open[client.name]:
            del self._open[client.name]

    def charge(self, client: Client, tokens: int) -> None:
        """The target was fed `tokens` for this client."""
        if client.tokens_per_minute:
            self._bucket(client).take(tokens, self._clock())

    def open(self, client: Client) -> int:
        """Requests a client has open."""
        return self._open[client.name]

    def _bucket(self, client: Client) -> Bucket:
        limit = client.tokens_per_minute
        assert limit
        if client.name not in self._used:
            self._used[client.name] = Bucket(limit / _MINUTE, limit, self._clock())
        return self._used[client.name]
