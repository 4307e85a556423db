"""The arithmetic of a network link.

Each direction is a *pipe*. A chunk of n bytes handed in at t leaves once the chunks before it
have left, and arrives after the propagation delay; chunks never overtake each other:

    departure = max(t, previous departure) + n / bandwidth
    arrival   = max(departure + (RTT ± jitter) / 2, previous arrival)

An outage stops the link's own clock, its *up-time*: nothing leaves or arrives meanwhile, and
afterwards everything goes on as if the outage had taken no time, never faster than the bandwidth.
The formula above is computed in up-time; `Outages` translates. With outage mode "cut" connections
die instead of waiting, so there the pipes know no outages.

Nothing here reads a clock or sleeps: `emulation.proxy` is the same on sockets, `emulation.wire` on
the event loop. Only payload bytes count; packet headers, loss and TCP's own opening handshake are
not emulated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Direction = Literal["up", "down"]
OutageMode = Literal["stall", "cut"]


@dataclass(frozen=True)
class LinkProfile:
    """How a link behaves. Raises ValueError naming the field that is out of range.

    `rtt_ms` ≥ 0, split evenly over the directions; `jitter_ms` in 0 … rtt_ms: the round trip
    varies uniformly by ± this much; `up_mbps`, `down_mbps` > 0 in Mbit/s (10⁶ bits), None or inf
    for unlimited; `outages`: (start, duration) in seconds from the link's start; `outage_mode`:
    "stall" (bytes wait) or "cut" (connections are reset, new ones refused); `seed`: of the jitter.
    """

    rtt_ms: float
    jitter_ms: float = 0.0
    up_mbps: float | None = None
    down_mbps: float | None = None
    outages: Sequence[tuple[float, float]] = ()
    outage_mode: OutageMode = "stall"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rtt_ms < math.inf:
            raise ValueError(f"rtt_ms must be 0 or more, not {self.rtt_ms:g}")
        if not 0 <= self.jitter_ms <= self.rtt_ms:
            raise ValueError(
                f"jitter_ms must lie between 0 and rtt_ms ({self.rtt_ms:g}), not {self.jitter_ms:g}"
            )
        for name in ("up_mbps", "down_mbps"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} must be more than 0 (or unlimited), not {rate:g}")
            object.__setattr__(self, name, None if rate == math.inf else rate)
        object.__setattr__(self, "outages", tuple((s, d) for s, d in self.outages))
        for start, duration in self.outages:
            if not (0 <= start < math.inf and 0 < duration < math.inf):
                raise ValueError(
                    f"an outage lasts some time from 0 s on, not {start:g}:{duration:g}"
                )
        if self.outage_mode not in get_args(OutageMode):
            raise ValueError(f'outage_mode must be "stall" or "cut", not {self.outage_mode!r}')

    def seconds_per_byte(self, direction: Direction) -> float:
        """Serialisation time of one byte; 0 when unlimited."""
        rate = self.up_mbps if direction == "up" else self.down_mbps
        return 0.0 if rate is None else 8e-6 / rate


LINKS = {
    "paper": LinkProfile(40, up_mbps=10, down_mbps=50),
    "wan": LinkProfile(100, up_mbps=2, down_mbps=20),
    "slow-edge": LinkProfile(40, up_mbps=10, down_mbps=50),
    "fast-cloud": LinkProfile(40, up_mbps=10, down_mbps=50),
    "lan": LinkProfile(2, up_mbps=1000, down_mbps=1000),
    "mobile": LinkProfile(60, jitter_ms=20, up_mbps=1, down_mbps=10),
}
"""The links of the named device-and-link profiles."""


class Outages:
    """When a link is down, and its up-time: the clock that stands still meanwhile.

    Spans are (start, duration) in seconds and may overlap.
    """

    def __init__(self, spans: Sequence[tuple[float, float]] = ()) -> None:
        self.spans: list[tuple[float, float]] = []  # (start, end), ascending, disjoint
        for start, duration in spans:
            self.add(start, duration)

    def add(self, start: float, duration: float) -> None:
        """Take the link down for `duration` seconds from `start`."""
        end, apart = start + duration, []
        for span in self.spans:
            if span[1] < start or span[0] > end:
                apart.append(span)
            else:
                start, end = min(start, span[0]), max(end, span[1])
        self.spans = sorted([*apart, (start, end)])

    def down(self, now: float) -> bool:
        return any(start <= now < end for start, end in self.spans)

    def uptime(self, now: float) -> float:
        """Seconds the link has been up until `now`."""
        lost, least = 0.0, -math.inf
        for start, end in self.spans:
            if now < start:
                break
            least = start - lost
            if now < end:
                return least
            lost += end - start
        return max(now - lost, least)  # rounding must not take us back before the outage

    def when(self, uptime: float) -> float:
        """The time at which the up-time reaches `uptime`: never within an outage."""
        lost, least = 0.0, -math.inf
        for start, end in self.spans:
            if uptime < start - lost:
                break
            lost += end - start
            least = end
        return max(uptime + lost, least)


class Pipe:
    """One direction of a link: tells when chunks arrive. Times are seconds from the link's start.

    `outages` defaults to those the profile stalls for; give both directions the same object when
    outages are added later.
    """

    def __init__(
        self, profile: LinkProfile, direction: Direction, outages: Outages | None = None
    ) -> None:
        if outages is None:
            outages = Outages(profile.outages if profile.outage_mode == "stall" else ())
        self.outages = outages
        self._delay = profile.rtt_ms / 2e3
        self._jitter = profile.jitter_ms / 2e3
        self._per_byte = profile.seconds_per_byte(direction)
        self._random = random.Random(f"{profile.seed} {direction}")
        self._free = self._last = -math.inf  # up-time of the previous departure and arrival

    def send(self, size: int, now: float) -> float:
        """When a chunk of `size` bytes handed in at `now` arrives, by the outages known so far."""
        arrival = self.outages.when(self.carry(size, self.outages.uptime(now)))
        return max(arrival, now)  # rounding must not make it arrive before it is sent

    def carry(self, size: int, uptime: float) -> float:
        """`send` in up-time on both sides: stays right when outages are added later."""
        self._free = max(self._free, uptime) + size * self._per_byte
        delay = self._delay + self._random.uniform(-self._jitter, self._jitter)
        self._last = max(self._last, self._free + delay)
        return self._last

    def flush(self) -> None:
        """Forget what is queued and in flight: it was lost."""
        self._free = self._last = -math.inf
