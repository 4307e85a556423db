"""The draft model at work on one request: the next token of the edge's line.

A step has two halves, since the line may be cut while the model computes: `begin` reads the
session (on the event loop), `compute` runs the model (on a worker thread). Whatever was cut in
between, the next `begin` feeds from the length up to which the cache still holds the line.
"""

from __future__ import annotations

from dataclasses import dataclass

from e2sci.decoding.acceptance import Proposal, RuleParams, make_rule
from e2sci.decoding.sampling import History, SamplingParams
from e2sci.engines.base import Engine, Step
from e2sci.session.edge import EdgeSession


@dataclass(frozen=True)
class DraftJob:
    """One step: behind `history`, on `branch`; the cache still holds its first `keep` tokens."""

    keep: int
    history: History
    branch: int

    @property
    def position(self) -> int:
        return len(self.history)


class Drafter:
    """Drafts for one request on sequence `sequence` of `engine`; ids stay below `vocab`."""

    def __init__(
        self,
        engine: Engine,
        sequence: int,
        *,
        rule: RuleParams,
        sampling: SamplingParams,
        vocab: int,
        trace: bool = False,
    ) -> None:
        self._engine = engine
        self._sequence = sequence
        self._rule = make_rule(rule)
        self._sampling = sampling
        self._vocab = vocab
        self._with_sketch = self._rule.needs_sketch or trace

    def begin(self, session: EdgeSession) -> DraftJob:
        """The next step for the session's line as it is now."""
        keep = min(session.intact, len(session.line) - 1)
        session.intact = len(session.line)
        return DraftJob(keep, session.line.copy(), session.branch)

    def compute(self, job: DraftJob) -> Proposal:
        """Run the model. Raises ContextFull or EngineError; the session must then start anew."""
        held = self._engine.length(self._sequence)
        keep = min(job.keep, held)
        if held > keep:
            self._engine.truncate(self._sequence, keep)
        [[q]] = self._engine.forward([Step(self._sequence, job.history.tokens[keep:])])
        q = q.limited(self._vocab)
        return self._rule.propose(q, self._sampling, job.history, with_sketch=self._with_sketch)

    def free(self) -> None:
        """Give the sequence's cache back."""
        self._engine.truncate(self._sequence, 0)
