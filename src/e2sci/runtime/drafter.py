"""The draft model at work on one request: the next token of the edge's line.

A step has two halves, since the line may be cut while the model computes: `begin` reads the
session (on the event loop), `compute` runs the model (on a worker thread). Whatever was cut in
between, the next `begin` feeds from the length up to which the cache still holds the line. At the
first step that is what the cache kept of an earlier text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from e2sci.decoding.acceptance import Proposal, RuleParams, make_rule
from e2sci.decoding.distribution import peak
from e2sci.decoding.sampling import History, SamplingParams
from e2sci.engines.base import Engine
from e2sci.runtime.caches import Cache
from e2sci.session.edge import EdgeSession


@dataclass(frozen=True)
class DraftJob:
    """One step: behind `history`, on `branch`; the cache still holds its first `keep` tokens.
    `doubts`: whether the proposal must say how confident the draft is."""

    keep: int
    history: History
    branch: int
    doubts: bool = False

    @property
    def position(self) -> int:
        return len(self.history)


class Drafter:
    """Drafts for one request in `cache`, a sequence of `engine`; ids stay below `vocab`."""

    def __init__(
        self,
        engine: Engine,
        cache: Cache,
        *,
        rule: RuleParams,
        sampling: SamplingParams,
        vocab: int,
        trace: bool = False,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._rule = make_rule(rule)
        self._sampling = sampling
        self._vocab = vocab
        self._with_sketch = self._rule.needs_sketch or trace
        self._begun = False

    def begin(self, session: EdgeSession) -> DraftJob:
        """The next step for the session's line as it is now."""
        if not self._begun:
            self._begun, session.intact = True, len(self._cache.tokens)
        keep = min(session.intact, len(session.line) - 1)
        session.intact = len(session.line)
        return DraftJob(keep, session.line.copy(), session.branch, session.doubt > 0)

    def compute(self, job: DraftJob) -> Proposal:
        """Run the model. Raises ContextFull or EngineError; the session must then start anew."""
        q = self._cache.behind(self._engine, job.history.tokens, job.keep)
        q = q.limited(self._vocab)
        proposal = self._rule.propose(q, self._sampling, job.history, with_sketch=self._with_sketch)
        return replace(proposal, confidence=peak(q)) if job.doubts else proposal
