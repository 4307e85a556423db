"""A world without time: edge and cloud sessions under an arbitrary order of events.

Everything that can happen next is a possible event: a message arrives, a draft step begins or ends,
a pass begins or ends, the cloud fills, the connection dies. A seeded `Random` picks. So every
network, speed and interruption is one of these orders, and an oracle that holds for all of them
holds for real. Messages go through the wire format both ways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import msgspec

from e2sci.decoding.acceptance import RuleParams
from e2sci.decoding.credit import CreditParams
from e2sci.decoding.distribution import pack_ids
from e2sci.decoding.sampling import SamplingParams
from e2sci.engines.base import Engine, Step
from e2sci.engines.synthetic import EOS, REAL_VOCAB, Synthetic, SyntheticConfig
from e2sci.runtime.caches import Cache
from e2sci.runtime.drafter import Drafter, DraftJob
from e2sci.session.cloud import CloudSession, Pass
from e2sci.session.edge import Commit, EdgeSession
from e2sci.session.line import CloudModel
from e2sci.session.lookahead import Lookahead
from e2sci.session.messages import (
    Cancel,
    Finished,
    Message,
    Open,
    Opened,
    Verdict,
    Window,
    decode_message,
    encode_message,
)

PROMPT = [ord(c) for c in "tell me: "]
TARGET = Synthetic(SyntheticConfig(seed=11))
SAME = Synthetic(SyntheticConfig(seed=11))
DRAFT = Synthetic(SyntheticConfig(seed=11, divergence=1.0))
RANDOM = Synthetic(SyntheticConfig(seed=11, random=True))


@dataclass
class Outcome:
    output: list[int]
    commits: list[Commit]
    reason: str
    edge: EdgeSession
    cloud: CloudSession
    uplink: int = 0
    credits: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class World:
    """One request. `kill_at`: the connection dies when so many messages have been delivered."""

    opening: Open
    random: Random
    draft: Engine | None = None
    target: Engine = TARGET
    window: int = 4
    most: int = 32
    budget: int = 64
    doubt: float = 0.0
    kill_at: int | None = None
    fill_chance: float = 0.5
    mangle: Callable[[int], int] | None = None

    def run(self) -> Outcome:
        self._start()
        for _ in range(200_000):
            events = self._possible()
            if self.edge.finished and not self.down:
                break
            assert events, "deadlock: nothing can happen and the text is not finished"
            self.random.choice(events)()
            if self.kill_at is not None and self.delivered >= self.kill_at:
                self.kill_at = None
                self._kill()
        else:
            raise AssertionError("livelock")
        output = [t for t in self.edge.output if t != EOS]
        assert self.edge.finished is not None
        return Outcome(
            output,
            self.commits,
            self.edge.finished,
            self.edge,
            self.cloud,
            self.uplink,
            self.credits,
        )

    # ---- set-up ---------------------------------------------------------------------------

    def _start(self) -> None:
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.commits: list[Commit] = []
        self.credits: list[tuple[float, float]] = []
        self.delivered = self.uplink = 0
        self.job: DraftJob | None = None
        self.passing: Pass | None = None
        self.model = CloudModel(REAL_VOCAB, self.target.info.context, frozenset({EOS}))
        self.edge = EdgeSession(
            self.opening,
            window=self.window,
            eos=frozenset({EOS}),
            vocab=REAL_VOCAB,
            lookahead=Lookahead(self.window, most=self.most),
            doubt=self.doubt,
        )
        if self.draft is not None:
            self.draft.truncate(0, 0)
            self.drafter = Drafter(
                self.draft,
                Cache(0),
                rule=self.opening.rule,
                sampling=self.opening.sampling,
                vocab=REAL_VOCAB,
                trace=self.opening.trace,
            )
        self._connect(self.opening)

    def _connect(self, opening: Open) -> None:
        frame = decode_message(encode_message(opening))
        assert isinstance(frame, Open)
        self.target.truncate(0, 0)
        self.cloud = CloudSession(frame, self.model)
        self._send_down([Opened(request=1, limit=self.cloud.limit)])

    def _kill(self) -> None:
        """Everything under way is lost, and a cloud that knows nothing takes over."""
        if self.edge.finished:
            return
        self.up.clear()
        self.down.clear()
        self.passing = None
        self._connect(self.edge.reopen(2))
        self._send_up(self.edge.flush())

    # ---- events ---------------------------------------------------------------------------

    def _possible(self) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = []
        if self.up:
            events.append(self._arrive_up)
        if self.down:
            events.append(self._arrive_down)
        if self.job is not None:
            events.append(self._end_draft)
        elif self.draft is not None and self.edge.wants_draft:
            events.append(self._begin_draft)
        if self.passing is not None:
            events.append(self._end_pass)
        elif self.cloud.plan(self.budget, fill=False):
            events.append(self._begin_pass)
        if self.opening.fill and self.passing is None and not self.cloud.finished:
            stuck = not events
            if stuck or self.random.random() < self.fill_chance:
                events.append(self._fill)
        return events

    def _begin_draft(self) -> None:
        self.job = self.drafter.begin(self.edge)

    def _end_draft(self) -> None:
        job, self.job = self.job, None
        assert job is not None
        proposal = self.drafter.compute(job)
        if self.mangle:
            proposal = type(proposal)(self.mangle(job.position), proposal.sketch)
        self._send_up(self.edge.drafted(proposal, job.position, job.branch))

    def _begin_pass(self, fill: bool = False) -> None:
        self.passing = self.cloud.plan(self.budget, fill=fill)

    def _end_pass(self) -> None:
        done, self.passing = self.passing, None
        assert done is not None
        if self.target.length(0) > done.keep:
            self.target.truncate(0, done.keep)
        assert self.target.length(0) == done.keep
        [outputs] = self.target.forward([Step(0, done.tokens, done.outputs)])
        self._send_down(self.cloud.passed(done, outputs))

    def _fill(self) -> None:
        self._send_down(self.cloud.fill())
        if self.passing is None:
            self._begin_pass(fill=True)

    def _arrive_up(self) -> None:
        self.delivered += 1
        message = decode_message(self.up.popleft())
        assert isinstance(message, Window | Cancel)
        if isinstance(message, Cancel):
            self._send_down(self.cloud.cancel())
        else:
            self._send_down(self.cloud.window(message))

    def _arrive_down(self) -> None:
        self.delivered += 1
        message = decode_message(self.down.popleft())
        if isinstance(message, Verdict):
            self.commits += self.edge.verdict(message)
            if message.credit:
                self.credits.append((message.credit.credit, message.credit.threshold))
            self._send_up(self.edge.flush())
        elif isinstance(message, Finished):
            self.edge.finish(message)
        else:
            assert isinstance(message, Opened)
            self.edge.opened(message)

    def _send_up(self, messages: list[Window]) -> None:
        for message in messages:
            self.up.append(encode_message(message))
            self.uplink += len(self.up[-1])

    def _send_down(self, messages: list[Message]) -> None:
        self.down.extend(encode_message(m) for m in messages)


def opening(
    *,
    rule: RuleParams | None = None,
    sampling: SamplingParams | None = None,
    credit: CreditParams | None = None,
    max_tokens: int = 40,
    prompt: list[int] | None = None,
    **flags: bool,
) -> Open:
    return Open(
        request=1,
        prompt=pack_ids(PROMPT if prompt is None else prompt),
        max_tokens=max_tokens,
        rule=rule or RuleParams(),
        sampling=sampling or SamplingParams(),
        credit=credit or CreditParams(),
        **flags,
    )


def alone(opening: Open, target: Engine = TARGET) -> list[int]:
    """The target-only text."""
    plain = msgspec.structs.replace(opening, drafting=False, fill=True, rule=RuleParams())
    return World(plain, Random(0), target=target).run().output
