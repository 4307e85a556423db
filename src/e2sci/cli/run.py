"""`e2sci run`: one prompt, streamed."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from e2sci.cli.common import BadInput, friendly, load, model_options, stderr
from e2sci.cli.printer import Printer, show_notice
from e2sci.cli.reach import dials, reach_options
from e2sci.engines.base import Engine
from e2sci.engines.load import DEFAULT
from e2sci.runtime.edge import Edge, options_from
from e2sci.runtime.options import Options, Result
from e2sci.runtime.request import CloudLost
from e2sci.runtime.transport import Dial
from e2sci.session.messages import Judged

CLOUD_LOST = 3
"""Exit code when the cloud goes away in the middle of an answer."""


def bias(value: str) -> tuple[int, float]:
    """ID=VALUE; raises BadInput."""
    token, _, change = value.partition("=")
    with suppress(ValueError):
        return int(token), float(change)
    raise BadInput(f"{value!r} is no bias; expected ID=VALUE, as in 151643=-100")


@click.command()
@click.argument("prompt")
@reach_options
@click.option("--draft", default=DEFAULT, show_default=True, help="The draft model.")
@click.option(
    "--mode",
    type=click.Choice(["cloud", "draft", "sync", "pipelined"]),
    default="pipelined",
    show_default=True,
    help="Target alone, draft alone, classic speculative decoding, or overlapping.",
)
@click.option(
    "--accept",
    type=click.Choice(["strict", "rejection", "fuzzy", "elastic", "typical"]),
    default="strict",
    show_default=True,
    help="The acceptance rule; strict changes nothing in the target's text.",
)
@click.option(
    "--measure",
    type=click.Choice(["js", "kl", "tv", "js_fsd", "regret"]),
    default="js",
    show_default=True,
    help="What fuzzy and elastic compare with the threshold.",
)
@click.option("--threshold", type=float, help="Nats; a constant for fuzzy, T_base for elastic.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Elastic: thresholds from `e2sci calibrate`.  [default pair: the shipped ones]",
)
@click.option("--budget", type=float, help="Elastic: mean regret in nats a token at most.")
@click.option(
    "--floor",
    type=float,
    default=0.0,
    show_default=True,
    help="Least target probability of a token that is not its own pick.",
)
@click.option(
    "--agreement/--no-agreement",
    default=None,
    help="Accept whenever draft and target pick the same.  [default: all rules but fuzzy]",
)
@click.option("--window", type=int, help="Draft tokens sent together.  [default: 4; sync 5]")
@click.option("--lookahead", type=int, default=64, show_default=True, help="Unjudged tokens.")
@click.option(
    "--fill/--no-fill",
    default=None,
    help="Let the cloud decode while no draft is there.  [default: pipelined only]",
)
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="0: off.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--min-p", type=float, default=0.0, show_default=True)
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True)
@click.option("--frequency-penalty", type=float, default=0.0, show_default=True)
@click.option("--presence-penalty", type=float, default=0.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--logit-bias", type=bias, metavar="ID=VALUE", multiple=True, help="May be repeated.")
@click.option("--stop", multiple=True, help="End the text before this; may be repeated.")
@click.option("--system", help="A system message.")
@click.option("--raw", is_flag=True, help="No chat template: go on with PROMPT as it is.")
@click.option("--show-origin", is_flag=True, help="Colour each token by where it came from.")
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a JSON line per judged position.",
)
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=15.0,
    show_default=True,
    help="Seconds to wait for a cloud that is lost in mid-answer, or has no place.",
)
@click.option(
    "--on-cloud-loss",
    type=click.Choice(["wait", "draft", "fail"]),
    default="wait",
    show_default=True,
    help="With no cloud left: wait for one, let the draft go on alone meanwhile, or fail.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@model_options(4096)
def run(
    prompt: str,
    cloud: tuple[str, ...],
    key_file: Path | None,
    ca: Path | None,
    allow_insecure: bool,
    draft: str,
    calibration: Path | None,
    trace_file: Path | None,
    wait: float,
    as_json: bool,
    show_origin: bool,
    logit_bias: tuple[tuple[int, float], ...],
    context: int,
    threads: int | None,
    gpu_layers: int,
    **settings: Any,
) -> None:
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
    if as_json and show_origin:
        raise BadInput("--json prints no colours; drop --show-origin")
    with friendly():
        settings["stop"] = tuple(settings["stop"])
        settings["logit_bias"] = dict(logit_bias)
        settings["request_id"] = secrets.token_hex(16)
        options = options_from(Options(), {**settings, "trace": trace_file is not None})
        if not prompt.strip():
            raise ValueError("the prompt is empty; give some text")
        given = (options.threshold, options.budget) != (None, None)
        if calibration is not None and (options.accept != "elastic" or given):
            raise ValueError(
                "--calibration goes with --accept elastic, without threshold or budget"
            )
    reached = None if options.mode == "draft" else dials(cloud, key_file, ca, allow_insecure)
    with ExitStack() as stack:
        trace = stack.enter_context(_writable(trace_file)) if trace_file else None
        engine = load(draft, "draft", context=context, threads=threads, gpu_layers=gpu_layers)
        stack.callback(engine.close)
        out = None if as_json else Printer(engine, show_origin)
        changes = partial(_calibrated, options, draft, calibration)
        told: list[str] = []
        result, error = _generate(reached, engine, prompt, options, wait, out, changes, told)
        if trace is not None and result is not None:
            _write_trace(trace, result.trace)
    _report(result, error, told if as_json else None)


def _generate(
    clouds: list[Dial] | None,
    engine: Engine,
    prompt: str,
    options: Options,
    wait: float,
    out: Printer | None,
    changes: Callable[[str], dict[str, Any]],
    told: list[str],
) -> tuple[Result | None, Exception | None]:
    """Run to the end. The error is CloudLost, or none; others are raised as BadInput. `changes`:
    further options, by the cloud's model. `told` gets the notices, which are shown as they come."""

    def tell(notice: str) -> None:
        show_notice(notice, mid_line=out is not None and out.mid_line)
        told.append(notice)

    async def main() -> Result | None:
        async with Edge(clouds, engine, patience=wait, options=options) as edge:
            more: dict[str, Any] = {}
            if clouds is not None:
                for notice in await edge.connect():
                    tell(notice)
                more = changes(edge.cloud_model)
            async for piece in edge.stream(prompt, **more):
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


def _calibrated(
    options: Options, draft: str, path: Path | None, cloud_model: str
) -> dict[str, Any]:
    """Constants for elastic from a calibration: the one in `path`, or that of the default pair.
    Raises ValueError when it is another draft's."""
    if options.accept != "elastic" or (options.threshold, options.budget) != (None, None):
        return {}
    from e2sci.evaluation.calibration import Calibration, shipped  # only here: not light
    from e2sci.evaluation.pair import identity

    default = (draft, cloud_model) == (DEFAULT, f"{DEFAULT}:target")
    if path is None and not default:
        return {}
    mine = identity(draft, "draft")
    found = Calibration.load(path) if path else shipped(mine)
    if found is None:
        return {}
    found.require_pair(mine, found.target)
    constants = found.constants(options.measure)
    if constants is None:
        return {}
    stderr.print(f"calibrated: T_base = {constants.t_base:g}, τ = {constants.tau:g}", style="dim")
    return {"constants": constants}


def _report(result: Result | None, error: Exception | None, told: list[str] | None) -> None:
    """Figures on standard error; with the notices `told`, all of it as JSON."""
    if result is not None and told is not None:
        click.echo(json.dumps({**result.to_dict(), "notices": told}, ensure_ascii=False))
    elif result is not None:
        stderr.print(summary(result), style="dim", soft_wrap=True)
    if error is not None:
        click.echo(f"Error: {error}", err=True)
        sys.exit(CLOUD_LOST)


def summary(result: Result) -> str:
    """One line of figures."""
    s = result.stats
    parts = [f"{len(result.token_ids)} tokens in {s.seconds:.1f} s", f"{s.tokens_per_s:.1f} tok/s"]
    if s.acceptance_rate is not None:
        parts.append(f"{s.acceptance_rate:.0%} of judged drafts accepted")
    if s.cloud_passes and result.token_ids:
        parts.append(f"{s.cloud_passes / len(result.token_ids):.2f} passes a token")
    if s.reconnects:
        parts.append(f"{s.reconnects} reconnects")
    if s.drafted_alone:
        parts.append(f"{s.drafted_alone} tokens by the draft alone, unchecked")
    return " · ".join(parts)


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
