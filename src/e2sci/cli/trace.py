"""`e2sci trace`: record what both models say along the target's own text."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click
import msgspec

from e2sci.cli.common import friendly
from e2sci.cli.measuring import (
    abreast_option,
    bar,
    identities,
    jobs_option,
    max_tokens_option,
    models,
    pair_option,
    rows_of,
    rows_option,
)
from e2sci.evaluation.pair import PairSpec
from e2sci.evaluation.recorder import Recording, record
from e2sci.evaluation.tasks import task
from e2sci.evaluation.traces import Trace, TraceHeader, TraceWriter


@click.command()
@click.option("--task", "spec", required=True, metavar="NAME[:FILE]", help="What is asked.")
@rows_option
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False))
@pair_option
@max_tokens_option
@jobs_option
@abreast_option
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON.")
def trace(
    spec: str,
    span: str,
    out: Path,
    pair: str,
    max_tokens: int,
    jobs: int,
    abreast: int,
    as_json: bool,
) -> None:
    """Record a trace: at each position of the target's greedy answers, what both models say.

    A trace is what `e2sci inertia`, `plan`, `fleet` and `calibrate` work on. Rows that are in the
    file already are left alone, so an interrupted recording goes on where it stopped.

    \b
    e2sci trace --task gsm8k --rows 0:30 --out gsm8k.jsonl
    e2sci trace --task jsonl:mine.jsonl --rows 0:8 --pair small.gguf,large.gguf --out mine.trace
    """
    with friendly():
        chosen, file = task(spec)
        rows = rows_of(span)
        problems = chosen.load(file, rows)
        draft, target = models(pair)
        draft_id, target_id = identities(draft, target)
        header = TraceHeader(
            draft=draft_id,
            target=target_id,
            task=f"{chosen.name}:{file.name}" if file else chosen.name,
            first=rows[0],
            last=rows[1] - 1,
            max_tokens=max_tokens,
        )
        recording = Recording(PairSpec(draft, target, abreast=abreast), chosen, max_tokens)
        with TraceWriter(out, header) as writer:
            left = sum(problem.row not in writer.rows for problem in problems)
            with closing(record(recording, writer, problems, jobs=jobs)) as requests:
                for _ in bar(requests, left, f"trace {chosen.name}"):
                    pass
        _show(Trace.load(out), out, as_json)


def _show(recorded: Trace, out: Path, as_json: bool) -> None:
    positions = sum(len(request.tokens) for request in recorded.requests)
    figures = {
        "file": str(out),
        "requests": len(recorded.requests),
        "positions": positions,
        "agreement": recorded.acceptance(),
    }
    if as_json:
        click.echo(msgspec.json.encode(figures).decode())
        return
    click.echo(
        f"{out}: {len(recorded.requests)} requests, {positions} positions, "
        f"agreement {recorded.acceptance():.3f}"
    )
