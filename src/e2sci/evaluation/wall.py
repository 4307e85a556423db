"""The same methods on this machine's own clock, to see how well the virtual one predicts it.

The cloud is a process on one core, the edge runs on another, and an emulated link lies between
(emulation.local). Both models are the real ones, computing anew: no memory. Only what users can
have is measured here: methods with another session than the shipped one have no place on a cloud.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Generator, Sequence
from typing import Any

import msgspec

from e2sci.emulation.local import EDGE_CORE, cloud_process, edge_over, pinned
from e2sci.emulation.profile import from_dict
from e2sci.engines.load import load_engine
from e2sci.evaluation.bench import Answer, Plan, record_of
from e2sci.evaluation.figures import summary
from e2sci.evaluation.methods import Method, method
from e2sci.evaluation.records import Header, Results
from e2sci.evaluation.report import METHOD, Column, number
from e2sci.evaluation.tasks import Problem
from e2sci.evaluation.world import Outcome
from e2sci.runtime.edge import Edge
from e2sci.session.cloud import CloudSession

_LISTEN = ("--listen", "127.0.0.1:0", "--threads", "1", "--slots", "1")


def header(virtual: Header) -> Header:
    """The header of a run on the wall clock."""
    return msgspec.structs.replace(virtual, clock="wall")


def bench(
    plan: Plan, results: Results, problems: Sequence[Problem]
) -> Generator[Answer, None, None]:
    """Run what is missing in `results`, one request at a time. Raises ValueError for a method that
    only the virtual clock has, RuntimeError when the cloud doesn't start."""
    chosen = [_real(method(name, plan.setting)) for name in plan.methods]
    done = {each.name: results.done(each.name) for each in chosen}
    todo = [
        (problem, each)
        for problem in problems
        for each in chosen
        if problem.row not in done[each.name]
    ]
    if not todo:
        return
    command = ("-m", "e2sci", "cloud", "--model", plan.pair.target, *_LISTEN)
    loop = asyncio.new_event_loop()
    with cloud_process(command) as url, pinned(EDGE_CORE):
        draft = load_engine(plan.pair.draft, "draft", context=plan.pair.context, threads=1)
        link = edge_over(url, draft, from_dict(results.header.profile).link)
        edge = loop.run_until_complete(link.__aenter__())
        try:
            for problem, each in todo:
                answer = loop.run_until_complete(_answer(edge, plan, problem, each))
                results.append(answer.method, answer.record, answer.text, answer.token_ids)
                yield answer
        finally:
            loop.run_until_complete(link.__aexit__(None, None, None))
            loop.close()
            draft.close()


def _real(chosen: Method) -> Method:
    if chosen.colocated or chosen.session is not CloudSession:
        raise ValueError(f"{chosen.name} has no place on the wall clock; take strict, sd, fsd, …")
    return chosen


async def _answer(edge: Edge, plan: Plan, problem: Problem, chosen: Method) -> Answer:
    result = await edge.generate(problem.prompt, max_tokens=plan.max_tokens, **chosen.options)
    correct = plan.task.score(problem, result.text)
    outcome = Outcome(result, 0.0, 0.0, 0.0, 0.0)  # compute and watts are not metered here
    return Answer(
        chosen.name, record_of(problem, outcome, correct, None), result.text, result.token_ids
    )


def compare(virtual: Results, runs: Sequence[Results]) -> list[dict[str, Any]]:
    """A row a method: tokens/s on the virtual clock, the median over `runs` with its range, and
    `error`: virtual over median, less 1."""
    rows = []
    for name in runs[0].methods():
        speeds = [summary(run.records(name))["tokens_per_s"] or 0.0 for run in runs]
        predicted = summary(virtual.records(name))["tokens_per_s"] or 0.0
        median = statistics.median(speeds)
        rows.append(
            {
                "method": name,
                "label": name,
                "virtual": predicted,
                "median": median,
                "least": min(speeds),
                "most": max(speeds),
                "error": predicted / median - 1 if median else None,
            }
        )
    return rows


COLUMNS = (
    METHOD,
    Column("virtual tok/s", number("virtual")),
    Column("wall tok/s, median", number("median")),
    Column("from", number("least")),
    Column("to", number("most")),
    Column("error %", number("error", 1, 100)),
)
