"""`e2sci run`: one prompt, streamed."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from e2sci.cli.common import BadInput, friendly, stderr
from e2sci.cli.generation import Setup, generation_options, request_id, setup, summary
from e2sci.cli.printer import Printer, show_notice
from e2sci.engines.base import Engine
from e2sci.runtime.edge import Edge
from e2sci.runtime.options import Result
from e2sci.runtime.request import CloudLost
from e2sci.session.messages import Judged

CLOUD_LOST = 3
"""Exit code when the cloud goes away in the middle of an answer."""


@click.command()
@click.argument("prompt")
@generation_options
@click.option("--raw", is_flag=True, help="No chat template: go on with PROMPT as it is.")
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a JSON line per judged position.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def run(prompt: str, trace_file: Path | None, as_json: bool, **settings: Any) -> None:
    """Write an answer to PROMPT (- reads it from standard input) with a draft model here and a
    target model at --cloud.

    \b
    e2sci run "Write a haiku about rivers"
    e2sci run "Is 97 prime?" --accept elastic --measure regret --show-origin
    e2sci run "…" --cloud wss://a.example,wss://b.example --on-cloud-loss draft

    Exit codes: 0 done; 2 bad input or no cloud; 3 the cloud was lost in mid-answer (what it said is
    printed); 130 interrupted.
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    if as_json and settings["show_origin"]:
        raise BadInput("--json prints no colours; drop --show-origin")
    asked = setup(trace=trace_file is not None, request_id=request_id(), **settings)
    if not prompt.strip():
        raise BadInput("the prompt is empty; give some text")
    with ExitStack() as stack:
        trace = stack.enter_context(_writable(trace_file)) if trace_file else None
        engine = asked.load()
        stack.callback(engine.close)
        out = None if as_json else Printer(engine, asked.show_origin)
        told: list[str] = []
        result, error = _generate(asked, engine, prompt, out, told)
        if trace is not None and result is not None:
            _write_trace(trace, result.trace)
    _report(result, error, told if as_json else None)


def _generate(
    asked: Setup, engine: Engine, prompt: str, out: Printer | None, told: list[str]
) -> tuple[Result | None, Exception | None]:
    """Run to the end. The error is CloudLost, or none; others are raised as BadInput. `told` gets
    the notices, which are shown as they come."""

    def tell(notice: str) -> None:
        show_notice(notice, mid_line=out is not None and out.mid_line)
        told.append(notice)

    async def main() -> Result | None:
        async with Edge(asked.clouds, engine, patience=asked.wait, options=asked.options) as edge:
            if asked.clouds is not None:
                for notice in await edge.connect():
                    tell(notice)
                edge.options = asked.calibrated(asked.options, edge.cloud_model)
            async for piece in edge.stream(prompt):
                if piece.notice is not None:
                    tell(piece.notice)
                if out is not None:
                    out.show(piece)
                if piece.result is not None:
                    return piece.result
        return None

    try:
        with friendly():
            return asyncio.run(main()), None
    except BadInput as error:
        if isinstance(error.__cause__, CloudLost):
            if out is not None:
                out.rest(error.__cause__.result)
            return error.__cause__.result, error.__cause__
        raise
    finally:
        if out is not None:
            out.close()


def _report(result: Result | None, error: Exception | None, told: list[str] | None) -> None:
    """Figures on standard error; with the notices `told`, all of it as JSON."""
    if result is not None and told is not None:
        click.echo(json.dumps({**result.to_dict(), "notices": told}, ensure_ascii=False))
    elif result is not None:
        stderr.print(summary(result), style="dim", soft_wrap=True)
    if error is not None:
        click.echo(f"Error: {error}", err=True)
        sys.exit(CLOUD_LOST)


def _writable(path: Path) -> IO[str]:
    try:
        return path.open("a", encoding="utf-8")  # an old trace stays until there is a new one
    except OSError as error:
        raise BadInput(f"can't write {path}: {error.strerror}") from None


def _write_trace(file: IO[str], records: list[Judged]) -> None:
    file.seek(0)
    file.truncate()
    for record in records:
        names = record.__struct_fields__
        file.write(json.dumps(dict(zip(names, msgspec.structs.astuple(record), strict=True))))
        file.write("\n")
