"""What may be told of a generation while it goes on, beside its text.

With `Options.tale` every piece of a stream carries a `Tale`: what has been judged, sent and heard
since the piece before, and the figures so far. Nothing more goes up for it. All times are
milliseconds from where `Stats.seconds` counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from e2sci.session.messages import Judged


@dataclass(frozen=True)
class Sent:
    """A window of `tokens` draft tokens, at positions `start`, … of `branch`, has gone up."""

    ms: float
    branch: int
    start: int
    tokens: int


@dataclass(frozen=True)
class Heard:
    """A verdict has come: from `start` on so many draft tokens of `branch` are `accepted`, and
    `own` tokens of the cloud's follow, of which the first is a correction if one was `rejected`.
    None accepted and none rejected: fill. `passes`: the target's so far."""

    ms: float
    branch: int
    start: int
    accepted: int
    rejected: bool
    own: int
    passes: int


@dataclass(frozen=True)
class Figures:
    """Totals up to now, named as in `Stats`; `tokens`: of the output.

    `mode`: what is used at this moment, which under auto changes; `drafting`: whether the draft is
    at work. `rtt_ms`: the round trip as last measured; `draft_ms`: a draft token's time, a running
    mean; `cloud_ms`: a pass over one token, as the cloud told at the handshake. None: not known.
    """

    mode: str
    drafting: bool
    tokens: int
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    drafted: int = 0
    accepted: int = 0
    windows: int = 0
    passes: int = 0
    credit: float | None = None
    threshold: float | None = None
    rtt_ms: float | None = None
    draft_ms: float | None = None
    cloud_ms: float | None = None


@dataclass(frozen=True)
class Tale:
    """At `ms`: what has been `judged`, the `windows` that went up and the `verdicts` that came
    since the tale before, and the `figures`."""

    ms: float
    figures: Figures
    judged: tuple[Judged, ...] = ()
    windows: tuple[Sent, ...] = ()
    verdicts: tuple[Heard, ...] = ()
