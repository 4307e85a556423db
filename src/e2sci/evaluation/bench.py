"""Methods side by side: every problem by every method, on the virtual clock, kept as records.

The unit of work is a problem: a worker process answers it by all methods that lack it, so that they
share its memory, and the parent appends what comes back. Several problems go abreast in a worker,
in threads whose passes are common ones. Requests are independent and each has a clock of its own,
so neither the workers' number nor an interruption changes a single byte.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from e2sci.engines.base import Engine, Step
from e2sci.engines.memory import Remembering
from e2sci.evaluation.methods import Setting, method
from e2sci.evaluation.pair import Models, Pair, PairSpec
from e2sci.evaluation.records import Record, Results, digest
from e2sci.evaluation.tasks import MAX_TOKENS, Problem, Task
from e2sci.evaluation.workers import spread
from e2sci.evaluation.world import Outcome, write
from e2sci.runtime.text import prompt_ids
from e2sci.session.edge import Origin


@dataclass(frozen=True)
class Plan:
    """What to run: `methods` as `methods.expanded` gives them, each with its own setting or the
    common one."""

    pair: PairSpec
    task: Task
    setting: Setting
    methods: Sequence[str]
    max_tokens: int = MAX_TOKENS


@dataclass(frozen=True)
class Answer:
    """One finished request, as it goes into the results."""

    method: str
    record: Record
    text: str
    token_ids: list[int]


def todo(results: Results, problems: Sequence[Problem], methods: Sequence[str]) -> int:
    """Requests that are still missing."""
    rows = {problem.row for problem in problems}
    return sum(len(rows - results.done(name)) for name in methods)


def bench(
    plan: Plan, results: Results, problems: Sequence[Problem], *, jobs: int = 1
) -> Generator[Answer, None, None]:
    """Run what is missing and keep it in `results`; yields each answer when it is kept.

    `jobs`: worker processes, 0 to run in this one. Closing the generator drops what is under way
    (see `spread`). Raises what a worker raises.
    """
    done = {name: results.done(name) for name in plan.methods}
    each = [(p, [name for name in plan.methods if p.row not in done[name]]) for p in problems]
    work = [(problem, names) for problem, names in each if names]
    if not work:
        return
    make = partial(Bencher, plan)
    abreast = plan.pair.abreast
    answered = spread(make, Bencher.answer, work, jobs=jobs, abreast=abreast, in_order=False)
    for answers in answered:
        for answer in answers:
            results.append(answer.method, answer.record, answer.text, answer.token_ids)
            yield answer


class Bencher:
    """Answers problems with a loaded pair."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pair = Pair(plan.pair)

    def close(self) -> None:
        self.pair.close()

    def answer(self, work: tuple[Problem, Sequence[str]]) -> list[Answer]:
        """A problem by each of the methods named with it."""
        problem, names = work
        verdicts: dict[str, bool | None] = {}
        with self.pair.request(problem.prompt) as models:
            by = {
                name: self._by(problem, name, models, verdicts)
                for name in sorted(names, key=self._reach, reverse=True)
            }
        return [by[name] for name in names]

    def _reach(self, name: str) -> int:
        """How far a method in turns drafts past what will stand. Who reaches furthest goes first,
        so that the others find all of it remembered and no text is read again for a token more."""
        options = method(name, self.plan.setting).options
        return int(options["window"]) if options.get("mode") == "sync" else 0

    def _by(
        self, problem: Problem, name: str, models: Models, verdicts: dict[str, bool | None]
    ) -> Answer:
        """By one method; `verdicts` on the texts so far, since many write the same."""
        plan, (draft, target) = self.plan, models
        chosen = method(name, plan.setting)
        outcome = write(
            chosen, plan.setting.profile, draft, target, problem.prompt, plan.max_tokens
        )
        result = outcome.result
        if result.text not in verdicts:
            verdicts[result.text] = plan.task.score(problem, result.text)
        regret = None
        if chosen.options.get("mode") != "draft":
            prompt = prompt_ids(draft, problem.prompt, system=None, raw=False)
            regret = text_regret(target, prompt, result.token_ids)
        record = record_of(problem, outcome, verdicts[result.text], regret)
        return Answer(name, record, result.text, result.token_ids)


def record_of(
    problem: Problem, outcome: Outcome, correct: bool | None, regret: float | None
) -> Record:
    """The record of one request."""
    result = outcome.result
    stats = result.stats
    tolerated = sum(commit.origin is Origin.TOLERATED for commit in result.commits)
    return Record(
        row=problem.row,
        id=problem.id,
        finish=result.finish_reason,
        tokens=len(result.token_ids),
        digest=digest(result.token_ids),
        correct=correct,
        seconds=stats.seconds,
        ttft_s=stats.ttft_s,
        accepted=stats.accepted,
        judged=stats.accepted + stats.corrections,
        tolerated=tolerated,
        corrections=stats.corrections,
        filled=stats.filled,
        drafted=stats.drafted,
        wasted=stats.wasted_drafts,
        passes=stats.cloud_passes,
        fed=stats.cloud_tokens,
        windows=stats.windows,
        uplink=stats.uplink_bytes,
        downlink=stats.downlink_bytes,
        cloud_busy_s=outcome.cloud_busy_s,
        edge_busy_s=outcome.edge_busy_s,
        cloud_joules=outcome.cloud_joules,
        edge_joules=outcome.edge_joules,
        regret=regret,
    )


def text_regret(target: Engine, prompt: list[int], output: list[int]) -> float | None:
    """Σ log p(y) − log p(x) over a text, y the target's pick at each place: what all its tokens
    cost the target, in nats. None when the engine has no memory of the text to look it up in."""
    if not output or not isinstance(target, Remembering):
        return None
    target.truncate(0, 0)
    [places] = target.forward([Step(0, prompt + output[:-1], len(output))])
    target.truncate(0, 0)
    total = 0.0
    for p, token in zip(places, output, strict=True):
        top = p.top(1)
        if int(top.ids[0]) != token:
            total += float(top.log_probs[0] - p.log_prob(np.array([token]))[0])
    return total
