"""What the commands that write text share: their options, the models and clouds these name, and the
line of figures below an answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from e2sci.cli.common import BadInput, Seconds, friendly, model_options, stderr
from e2sci.cli.draft import Draft, draft_options
from e2sci.cli.reach import dials, reach_options
from e2sci.decoding.acceptance import Measure, RuleName
from e2sci.decoding.credit import CreditParams
from e2sci.engines.base import Engine
from e2sci.engines.load import DEFAULT
from e2sci.runtime.edge import options_from
from e2sci.runtime.options import Mode, OnCloudLoss, Options, Result
from e2sci.runtime.transport import Dial

F = TypeVar("F", bound=Callable[..., Any])


def bias(value: str) -> tuple[int, float]:
    """ID=VALUE; raises BadInput."""
    token, _, change = value.partition("=")
    with suppress(ValueError):
        return int(token), float(change)
    raise BadInput(f"{value!r} is no bias; expected ID=VALUE, as in 151643=-100")


def _together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Options as one decorator, in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


tuning_options = _together(
    click.option(
        "--gamma",
        type=float,
        default=0.0,
        show_default=True,
        help="Auto: what 1 ms of the cloud's computing is worth in ms of waiting; 0: fastest.",
    ),
    click.option(
        "--accept",
        type=click.Choice(get_args(RuleName)),
        default="strict",
        show_default=True,
        help="The acceptance rule; strict changes nothing in the target's text.",
    ),
    click.option(
        "--measure",
        type=click.Choice(get_args(Measure)),
        default="js",
        show_default=True,
        help="What fuzzy and elastic compare with the threshold.",
    ),
    click.option("--threshold", type=float, help="Nats; a constant for fuzzy, T_base for elastic."),
    click.option(
        "--calibration",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Elastic: thresholds from `e2sci calibrate`.  [default pair: the shipped ones]",
    ),
    click.option("--budget", type=float, help="Elastic: mean regret in nats a token at most."),
)
window_options = _together(
    click.option(
        "--window",
        type=int,
        help="Draft tokens sent together.  [default: 4; with --doubt 8; sync 5; auto: what pays]",
    ),
    click.option(
        "--doubt",
        type=float,
        default=0.0,
        show_default=True,
        help="Pipelined: send a window at once where the draft gives nothing this probability.",
    ),
)
cloud_loss_option = click.option(
    "--on-cloud-loss",
    type=click.Choice(get_args(OnCloudLoss)),
    default="wait",
    show_default=True,
    help="With no cloud left: wait for one, let the draft go on alone meanwhile, or fail.",
)

generation_options = _together(
    reach_options,
    draft_options,
    click.option(
        "--mode",
        type=click.Choice(get_args(Mode)),
        default=Options.mode,
        show_default=True,
        help="Target alone, draft alone, classic speculative decoding, overlapping, or what pays.",
    ),
    tuning_options,
    click.option(
        "--floor",
        type=float,
        default=0.0,
        show_default=True,
        help="Least target probability of a token that is not its own pick.",
    ),
    click.option(
        "--agreement/--no-agreement",
        default=None,
        help="Accept whenever draft and target pick the same.  [default: all rules but fuzzy]",
    ),
    window_options,
    click.option("--lookahead", type=int, default=64, show_default=True, help="Unjudged tokens."),
    click.option(
        "--fill/--no-fill",
        default=None,
        help="The cloud decodes while no draft is there.  [default: pipelined; auto: if it pays]",
    ),
    click.option("--max-tokens", type=int, default=256, show_default=True),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy."),
    click.option("--top-k", type=int, default=0, show_default=True, help="0: off."),
    click.option("--top-p", type=float, default=1.0, show_default=True),
    click.option("--min-p", type=float, default=0.0, show_default=True),
    click.option("--repetition-penalty", type=float, default=1.0, show_default=True),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option(
        "--logit-bias", type=bias, metavar="ID=VALUE", multiple=True, help="May be repeated."
    ),
    click.option("--stop", multiple=True, help="End the text before this; may be repeated."),
    click.option("--system", help="A system message."),
    click.option("--show-origin", is_flag=True, help="Colour each token by where it came from."),
    click.option(
        "--wait",
        type=Seconds(0),
        default=15.0,
        show_default=True,
        help="Seconds to wait for a cloud that is lost in mid-answer, or has no place.",
    ),
    cloud_loss_option,
    model_options(4096),
)
"""The options that `Setup` is made of."""


@dataclass(frozen=True)
class Setup:
    """What a command was asked for. `clouds` are None where the draft is to write alone."""

    options: Options
    clouds: list[Dial] | None
    draft: Draft
    calibration: Path | None
    wait: float
    show_origin: bool
    context: int
    threads: int | None
    gpu_layers: int

    def load(self) -> Engine:
        """The draft model. Raises BadInput."""
        return self.draft.load(
            context=self.context, threads=self.threads, gpu_layers=self.gpu_layers
        )

    def calibrated(self, options: Options, cloud_model: str) -> Options:
        """`options` with constants for elastic from the calibration that was given, or else that of
        the default pair. Raises ValueError when it is another draft's."""
        tuned = calibrated(options, cloud_model, self.draft.name, self.calibration)
        if tuned.constants is not None and tuned is not options:
            t, tau = tuned.constants.t_base, tuned.constants.tau
            stderr.print(f"calibrated: T_base = {t:g}, τ = {tau:g}", style="dim")
        return tuned


def calibrated(options: Options, cloud_model: str, draft: str, file: Path | None) -> Options:
    """`options` with constants for elastic, where they leave these open. Raises ValueError."""
    if options.accept != "elastic" or (options.threshold, options.budget) != (None, None):
        return options
    constants = _constants(options.measure, cloud_model, draft, file)
    return options if constants is None else replace(options, constants=constants)


@cache
def _constants(
    measure: Measure, cloud_model: str, draft: str, file: Path | None
) -> CreditParams | None:
    """From the calibration in `file`, or else that of the default pair."""
    from e2sci.evaluation.calibration import Calibration, shipped  # only here: not light
    from e2sci.evaluation.pair import identity

    if file is None and (draft, cloud_model) != (DEFAULT, f"{DEFAULT}:target"):
        return None
    mine = identity(draft, "draft")
    found = Calibration.load(file) if file else shipped(mine)
    if found is None:
        return None
    found.require_pair(mine, found.target)
    return found.constants(measure)


def setup(
    *,
    cloud: tuple[str, ...],
    key_file: Path | None,
    ca: Path | None,
    allow_insecure: bool,
    draft: Draft,
    calibration: Path | None,
    wait: float,
    show_origin: bool,
    logit_bias: tuple[tuple[int, float], ...],
    context: int,
    threads: int | None,
    gpu_layers: int,
    **settings: Any,
) -> Setup:
    """Check what was asked for, before anything is loaded. Raises BadInput."""
    with friendly():
        settings["stop"] = tuple(settings["stop"])
        settings["logit_bias"] = dict(logit_bias)
        options = options_from(Options(), settings)
        given = (options.threshold, options.budget) != (None, None)
        if calibration is not None and (options.accept != "elastic" or given):
            raise ValueError(
                "--calibration goes with --accept elastic, without threshold or budget"
            )
    alone = options.mode == "draft"
    return Setup(
        options=options,
        clouds=None if alone else dials(cloud, key_file, ca, allow_insecure),
        draft=draft,
        calibration=calibration,
        wait=wait,
        show_origin=show_origin,
        context=context,
        threads=threads,
        gpu_layers=gpu_layers,
    )


def request_id() -> str:
    """A fresh name for a request, by which both ends call it in their logs."""
    return secrets.token_hex(16)


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
