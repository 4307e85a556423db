"""One cloud engine and its crowd of users, on a virtual clock of its own.

Every user has an edge of their own (device and link of the profile), sends a request of a trace,
thinks, and sends the next. Edges, cloud and scheduler are those that serve real users; the engines
replay the trace (evaluation.replay). Texts are not at issue here, only time.

Users begin at random in the first WARM_UP_S seconds. Measured are the requests begun in the
`seconds` behind it, each to its end (users go on meanwhile, so that the load stays), and what the
engine does within those seconds.

*Co-located* speculative decoding is computed from the trace, in lock-step: draft and target take
turns on one engine. A cycle is W draft calls, each batched over all texts being written, and one
pass that verifies them all and takes in new prompts. W is the best one for the size of the batch,
so it does better than one fixed W would. It is too good in that batches cost no more than their
tokens and nothing to organise, that both models have room on one engine, and that uploads take no
time; it is too bad in that nobody's drafting overlaps another's verification.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from e2sci.decoding.yardsticks import tokens_per_window
from e2sci.emulation.clock import run
from e2sci.emulation.device import Device, Metered
from e2sci.emulation.profile import Profile
from e2sci.emulation.wire import LinkEnd, link_pair
from e2sci.evaluation.follow import centre
from e2sci.evaluation.methods import SD_WINDOWS, Method, Setting, method
from e2sci.evaluation.replay import Replay, Script
from e2sci.evaluation.traces import Trace
from e2sci.runtime.admission import TIMELESS
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.edge import Edge
from e2sci.runtime.scheduler import PREFILL
from e2sci.runtime.worker import now

WARM_UP_S = 10.0


@dataclass(frozen=True)
class Load:
    """What users do on which devices: requests drawn from `trace`, exponential pauses of mean
    `think_s` between them (0: none), measured for `seconds`. Raises ValueError out of range."""

    trace: Trace
    profile: Profile
    seconds: float = 60.0
    think_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < 1e6:
            raise ValueError(f"seconds is {self.seconds:g}; expected more than 0, below 1 000 000")
        if not 0 <= self.think_s < 1e6:
            raise ValueError(f"think time is {self.think_s:g} s; expected 0 to 1 000 000")

    @property
    def end(self) -> float:
        """When the measurement ends; it begins at WARM_UP_S."""
        return WARM_UP_S + self.seconds

    def method(self, name: str) -> Method:
        """The method called `name`, its credit centred on the trace as calibration centres it.
        Raises ValueError."""
        chosen = method(name, Setting(self.profile, tau=centre([self.trace])))
        if chosen.options["mode"] == "draft":
            raise ValueError("draft uses no engine: every user is alone with it; drop it")
        return chosen

    def asks(self, index: int, user: int) -> Iterator[tuple[float, int]]:
        """What a user of engine `index` does, without end: pause for so many seconds, send request
        n of the trace."""
        rng = random.Random(f"{self.seed} {index} {user}")
        pause = rng.uniform(0, WARM_UP_S)
        while True:
            yield pause, rng.randrange(len(self.trace.requests))
            pause = rng.expovariate(1 / self.think_s) if self.think_s else 0.0


class Sample(NamedTuple):
    """A request with at least one token: seconds to its last and to its first, and how many."""

    seconds: float
    ttft_s: float
    tokens: int


class Use(NamedTuple):
    """What an engine has done: tokens that reached users, tokens fed, passes, seconds computing."""

    tokens: float = 0
    fed: float = 0
    passes: float = 0
    busy_s: float = 0

    def since(self, before: Use) -> Use:
        return Use(*np.subtract(self, before).tolist())


class EngineRun(NamedTuple):
    """The requests measured and the engine's use in the seconds measured."""

    samples: list[Sample]
    use: Use


def engine_run(load: Load, script: Script, name: str, users: int, index: int = 0) -> EngineRun:
    """Engine number `index` with `users`, by the method called `name`; `script`: of the load's
    trace. Depends on nothing else. Raises ValueError, and what the runtime raises."""
    chosen = load.method(name)
    if chosen.colocated:
        return _Lockstep(load, script, users, index).run()
    return run(lambda: _Crowd(load, script, chosen, users, index).run())


# ---- the runtime --------------------------------------------------------------------------


class _Crowd:
    def __init__(self, load: Load, script: Script, how: Method, users: int, index: int) -> None:
        self._load = load
        self._script = script
        self._method = how
        self._users = users
        self._index = index
        self._engine = Metered(Replay(script, "target", users))
        self._device = Device(load.profile.target, self._engine)
        self._cloud = Cloud(
            self._engine,
            times=load.profile.pass_times,
            worker=self._device,
            session=how.session,
            limits=TIMELESS,
        )
        self._serving: list[asyncio.Task[None]] = []
        self._samples: list[Sample] = []
        self._tokens = self._measured = 0
        self._ended = asyncio.Event()

    async def run(self) -> EngineRun:
        async with self._cloud:
            measuring = asyncio.create_task(self._measure())
            users = [asyncio.create_task(self._user(user)) for user in range(self._users)]
            await asyncio.wait([measuring, *users], return_when=asyncio.FIRST_COMPLETED)
            for user in filter(asyncio.Task.done, users):
                user.result()  # one ends only by an error
            for task in (*users, *self._serving):
                task.cancel()
            await asyncio.gather(*users, *self._serving, return_exceptions=True)
            return measuring.result()

    async def _measure(self) -> EngineRun:
        await asyncio.sleep(WARM_UP_S)
        before = self._use()
        await asyncio.sleep(self._load.end - now())
        use = self._use().since(before)
        while self._measured:
            self._ended.clear()
            await self._ended.wait()
        return EngineRun(self._samples, use)

    def _use(self) -> Use:
        return Use(self._tokens, self._engine.fed, self._device.calls, self._device.busy_s)

    async def _user(self, user: int) -> None:
        engine = Metered(Replay(self._script, "draft"))
        device = Device(self._load.profile.draft, engine)
        async with Edge(partial(self._connect, user), engine, worker=device) as edge:
            await edge.connect()
            for pause, n in self._load.asks(self._index, user):
                await asyncio.sleep(pause)
                await self._ask(edge, n)

    async def _connect(self, user: int) -> LinkEnd:
        link = self._load.profile.link
        # Everyone has jitter of their own.
        edge, cloud = link_pair(replace(link, seed=link.seed + (self._index << 16) + user))
        self._serving.append(asyncio.create_task(self._cloud.serve(cloud)))
        return edge

    async def _ask(self, edge: Edge, n: int) -> None:
        measured = WARM_UP_S <= now() < self._load.end
        self._measured += measured
        most = len(self._script.requests[n].tokens)
        pieces = edge.stream(f"#{n}", raw=True, max_tokens=most, **self._method.options)
        async with aclosing(pieces):
            async for piece in pieces:
                self._tokens += len(piece.commits)
        assert piece.result is not None
        stats = piece.result.stats
        if measured and stats.ttft_s is not None:
            sample = Sample(stats.seconds, stats.ttft_s, len(piece.result.token_ids))
            self._samples.append(sample)
        self._measured -= measured
        self._ended.set()


# ---- co-located, in lock-step -------------------------------------------------------------


@dataclass
class _Text:
    """A request: its user, which one of the trace, when it was sent; prompt tokens to be fed yet,
    position reached, and when its first and last token reached the user."""

    began: float
    user: int
    n: int
    prompt: int
    at: int = 0
    first: float = 0.0
    last: float = 0.0


class _Lockstep:
    """Texts that are written together. `now` is the engine's clock; users are half a round trip
    away."""

    def __init__(self, load: Load, script: Script, users: int, index: int) -> None:
        self._load = load
        self._script = script
        self._away = load.profile.link.rtt_ms / 2000
        self._asks = [load.asks(index, user) for user in range(users)]
        self._coming: list[tuple[float, int, int]] = []  # when sent, user, request
        self._prompts: deque[_Text] = deque()
        self._writing: list[_Text] = []
        self._runs = [_runs(request.agreed.tolist()) for request in script.requests]
        self._alpha = load.trace.acceptance()
        self._window = lru_cache(None)(self._best_window)
        self._samples: list[Sample] = []
        self._use = Use()
        self._now = 0.0

    def run(self) -> EngineRun:
        for user in range(len(self._asks)):
            self._ask(user, 0.0)
        while self._now < self._load.end + self._away or self._measured_left():
            self._receive()
            self._cycle()
        return EngineRun(self._samples, self._use)

    def _ask(self, user: int, moment: float) -> None:
        pause, n = next(self._asks[user])
        heapq.heappush(self._coming, (moment + pause, user, n))

    def _measured_left(self) -> bool:
        return any(self._measured(text.began) for text in (*self._prompts, *self._writing))

    def _measured(self, moment: float) -> bool:
        return WARM_UP_S <= moment < self._load.end

    def _receive(self) -> None:
        """Take what has arrived; if there is nothing to do, wait for it."""
        if not (self._prompts or self._writing):
            self._now = max(self._now, self._coming[0][0] + self._away)
        while self._coming and self._coming[0][0] + self._away <= self._now:
            began, user, n = heapq.heappop(self._coming)
            self._prompts.append(_Text(began, user, n, len(self._script.prompts[n])))

    def _cycle(self) -> None:
        batch = len(self._writing)
        window = self._window(batch) if batch else 0
        ready, prompt = self._take_prompts()
        fed = batch * (window + 1) + prompt
        profile = self._load.profile
        ms = window * profile.colocated.ms(batch) if batch else 0.0
        ms += profile.target.ms(fed) + (profile.colocated.ms(prompt) if prompt else 0.0)
        began, self._now = self._now, self._now + ms / 1000
        got = sum(self._advance(text, window) for text in self._writing)
        got += sum(self._advance(text, 0) for text in ready)
        self._writing = [text for text in (*self._writing, *ready) if not self._finished(text)]
        if self._measured(began):
            self._use = Use(*np.add(self._use, (got, fed, 1, ms / 1000)).tolist())

    def _take_prompts(self) -> tuple[list[_Text], int]:
        """Texts whose prompt is complete with this pass, and how many prompt tokens it feeds."""
        ready: list[_Text] = []
        left = PREFILL
        while self._prompts and left:
            fed = min(left, self._prompts[0].prompt)
            left -= fed
            self._prompts[0].prompt -= fed
            if not self._prompts[0].prompt:
                ready.append(self._prompts.popleft())
        return ready, PREFILL - left

    def _advance(self, text: _Text, window: int) -> int:
        """Commit what agrees within the window, and the target's own token; how many reach the
        user."""
        tokens = self._script.requests[text.n].tokens
        start = text.at
        text.at = min(len(tokens), start + 1 + min(window, self._runs[text.n][start]))
        got = text.at - start - (tokens[text.at - 1] in self._script.eos)
        if got:
            text.last = self._now + self._away
            text.first = text.first or text.last
        return got

    def _finished(self, text: _Text) -> bool:
        tokens = self._script.requests[text.n].tokens
        if text.at < len(tokens):
            return False
        count = len(tokens) - (tokens[-1] in self._script.eos)
        if count and self._measured(text.began):
            sample = Sample(text.last - text.began, text.first - text.began, count)
            self._samples.append(sample)
        self._ask(text.user, self._now + self._away)
        return True

    def _best_window(self, batch: int) -> int:
        """Of SD_WINDOWS, what writes fastest with `batch` texts at once."""
        profile = self._load.profile

        def speed(window: int) -> float:
            ms = window * profile.colocated.ms(batch) + profile.target.ms(batch * (window + 1))
            return tokens_per_window(self._alpha, window) / ms

        return max(SD_WINDOWS, key=speed)


def _runs(agreed: list[bool]) -> list[int]:
    """How many positions in a row agree from each one on."""
    runs = [0]
    for agrees in reversed(agreed):
        runs.append(runs[-1] + 1 if agrees else 0)
    return runs[:0:-1]
