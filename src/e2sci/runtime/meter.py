"""What is measured of one request at the edge: bytes, times, judgements; and the tale of it.

The request reports what it sends, hears and drafts. From that come its `Stats`, the time in which
the lookahead must be filled, and with `tells` what every piece tells of the way here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from e2sci.decoding.distribution import unpack_ids
from e2sci.runtime.connection import Inbox
from e2sci.runtime.options import Stats
from e2sci.runtime.record import Record
from e2sci.runtime.tale import Figures, Heard, Sent, Tale
from e2sci.runtime.trips import Trips
from e2sci.runtime.worker import now
from e2sci.session.edge import Commit, EdgeSession
from e2sci.session.messages import MAX_WINDOW, Judged, Message, Verdict, Window

_NEWEST = 0.2  # what the newest draft time weighs in the mean


class Meter:
    """Of the request whose output is in `record`, its state in `session`, its mail in `inbox`.

    `trace`: every judgement so far; `news`: whether something was sent or heard that no tale has
    told.
    """

    def __init__(self, record: Record, session: EdgeSession, inbox: Inbox, *, tells: bool) -> None:
        self.trace: list[Judged] = []
        self._record = record
        self._session = session
        self._inbox = inbox
        self._tells = tells
        self._trips = Trips()
        self._uplink = 0
        self._draft_s: float | None = None
        self._judged = 0  # of the trace, told
        self._sent: list[Sent] = []
        self._heard: list[Heard] = []

    # ---- what happens ---------------------------------------------------------------------

    def sent(self, message: Message, size: int) -> None:
        """A message went up, in `size` bytes."""
        self._uplink += size
        if isinstance(message, Window):
            self._trips.sent(message, now())
            if self._tells and message.ids:
                tokens = len(unpack_ids(message.ids, MAX_WINDOW))
                self._sent.append(Sent(self._ms, message.branch, message.start, tokens))

    def drafted(self, seconds: float) -> None:
        """A draft token took so long."""
        mean = seconds if self._draft_s is None else self._draft_s
        self._draft_s = mean + _NEWEST * (seconds - mean)

    def heard(self, verdict: Verdict, commits: Sequence[Commit]) -> None:
        """A verdict has made `commits` final. Learn how many tokens are drafted in the time from a
        window to its verdict."""
        took = self._trips.took(verdict, now())
        if took is not None and self._draft_s:
            self._session.lookahead.measured(took / self._draft_s + 1)
        ms = self._ms
        self.trace += [msgspec.structs.replace(judged, ms=ms) for judged in verdict.trace]
        if self._tells and commits:
            self._heard.append(
                Heard(
                    ms=ms,
                    branch=verdict.branch,
                    start=verdict.start,
                    accepted=verdict.accepted,
                    rejected=verdict.rejected,
                    own=len(commits) - verdict.accepted,
                    passes=verdict.passes,
                )
            )

    def lost(self) -> None:
        """What is on its way will not be answered."""
        self._trips.lost()

    # ---- what comes of it -----------------------------------------------------------------

    @property
    def news(self) -> bool:
        return bool(self._sent or self._heard)

    @property
    def _ms(self) -> float:
        return round(1000 * (now() - self._record.began), 3)

    def tale(
        self, mode: str, *, drafting: bool, rtt_s: float | None, cloud_ms: float | None
    ) -> Tale:
        """What has not been told yet. `mode`, `drafting`, `cloud_ms`: as in Figures."""
        counts, credit = self._session.stats, self._session.credit
        figures = Figures(
            mode=mode,
            drafting=drafting,
            tokens=len(self._record.ids),
            uplink_bytes=self._uplink,
            downlink_bytes=self._inbox.bytes,
            drafted=counts.drafted,
            accepted=counts.accepted,
            windows=counts.windows,
            passes=counts.passes,
            credit=credit.credit if credit else None,
            threshold=credit.threshold if credit else None,
            rtt_ms=None if rtt_s is None else round(1000 * rtt_s, 3),
            draft_ms=None if self._draft_s is None else round(1000 * self._draft_s, 3),
            cloud_ms=cloud_ms,
        )
        judged, self._judged = tuple(self.trace[self._judged :]), len(self.trace)
        sent, self._sent = tuple(self._sent), []
        heard, self._heard = tuple(self._heard), []
        return Tale(self._ms, figures, judged, sent, heard)

    def stats(self, mode: str, accept: str, reconnects: int) -> Stats:
        """The figures of a generation that has ended."""
        counts, credit = self._session.stats, self._session.credit
        judged = counts.accepted + counts.corrections
        return Stats(
            mode=mode,
            accept=accept,
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
            reconnects=reconnects,
            drafted_alone=counts.alone,
        )
