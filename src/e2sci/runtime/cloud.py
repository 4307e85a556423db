"""The cloud: a target model that verifies for any number of edges."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from e2sci.engines.base import Engine, fingerprint
from e2sci.runtime.admission import Limits
from e2sci.runtime.exactness import require_exact
from e2sci.runtime.passes import PassTimes, measure_passes
from e2sci.runtime.scheduler import Scheduler
from e2sci.runtime.seat import Ended
from e2sci.runtime.service import Service
from e2sci.runtime.worker import ThreadWorker, Worker, now
from e2sci.session.cloud import CloudSession
from e2sci.session.line import CloudModel
from e2sci.session.messages import Open

FAILED_SECONDS = 30.0
"""How long a cloud whose engine has failed says that it is not ready, unless a pass works."""


def require_truncation(engine: Engine) -> None:
    """Raises ValueError on a model whose cache can't be cut back."""
    if not engine.info.can_truncate:
        raise ValueError(
            f"{engine.info.name}: its cache can't be cut back after a rejection (recurrent or "
            "sliding-window); choose a model with plain attention"
        )


class Cloud(Service):
    """An engine at the service of edges. Use as an async context manager.

    `times`: pass times if known; else they are measured at start. `worker`: what runs the engine's
    calls, a thread by default; closed with the cloud. `session` makes a request's session. `on_end`
    hears what became of each request. `keep_caches`: let what a request has read outlive it until
    its place is needed, for the same client's next turn of a conversation.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        session: Callable[[Open, CloudModel], CloudSession] = CloudSession,
        times: PassTimes | None = None,
        worker: Worker | None = None,
        limits: Limits | None = None,
        on_end: Callable[[Ended], None] | None = None,
        keep_caches: bool = False,
    ) -> None:
        require_truncation(engine)
        super().__init__(engine.info, fingerprint(engine), limits)
        self.engine = engine
        self.times = times
        self.scheduler: Scheduler | None = None
        self._session = session
        self._worker = worker or ThreadWorker("target")
        self._on_end = on_end
        self._keep_caches = keep_caches

    async def __aenter__(self) -> Cloud:
        if self.times is None:
            self.times = await self._worker.submit(lambda: measure_passes(self.engine))
        self.scheduler = Scheduler(
            self.engine,
            self._worker,
            self.times,
            limits=self.limits,
            metrics=self.metrics,
            on_end=self._on_end,
            keep_caches=self._keep_caches,
        )
        self._running = asyncio.create_task(self.scheduler.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running
        self._worker.close()

    @property
    def desk(self) -> Scheduler:
        assert self.scheduler is not None
        return self.scheduler

    @property
    def failing(self) -> bool:
        at = self.desk.failed_at
        return self._running.done() or (at is not None and now() - at < FAILED_SECONDS)

    def _begin(self, opening: Open, model: CloudModel) -> CloudSession:
        require_exact(self.info, opening)
        return self._session(opening, model)
