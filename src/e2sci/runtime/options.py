"""What a caller may ask of a generation, and what comes back."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from e2sci.decoding.acceptance import Measure, RuleName, RuleParams
from e2sci.decoding.credit import CreditParams
from e2sci.decoding.sampling import SamplingParams
from e2sci.runtime.choice import DOUBTING_WINDOW, Way
from e2sci.runtime.tale import Tale
from e2sci.session.edge import Commit
from e2sci.session.messages import MAX_TOP, MAX_WINDOW, Judged

Mode = Literal["cloud", "draft", "sync", "pipelined", "auto"]
OnCloudLoss = Literal["wait", "draft", "fail"]

DEFAULT_WINDOW = {"sync": 5, "pipelined": 4}
"""Draft tokens a window. Sync: the usual setting of speculative decoding. Pipelined: small, since
windows don't wait for each other and a rejection is then known sooner."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One generation. Raises ValueError on contradictory or out-of-range settings.

    `mode`: `cloud` (target alone, streamed), `draft` (draft alone, no cloud), `sync` (classic
    speculative decoding), `pipelined`, or `auto`: what pays, by what the edge measures meanwhile,
    where `gamma` ≥ 0 is what a ms of the cloud's computing is worth in ms of waiting.

    `accept`: the acceptance rule; `strict` changes nothing in the target's text. Of fuzzy and
    elastic: `measure` and `threshold` (nats); a threshold given to elastic is its T_base, and T
    stays between a quarter of it and 1.75 times it (ours: the ratios of the default bounds).
    `budget`: mean regret in nats a token at most. `floor`: least p(x) of a
    token that is not the target's pick. `agreement`: accept on x = y (None: the rule's own way).
    `constants`: of credit and threshold, in place of those derived from the fields before.

    `window`: draft tokens sent together; `doubt`: in pipelined mode, a token is sent at once, with
    those before it, where the draft gives nothing this probability (0: none is); `lookahead`:
    unjudged tokens at most; `eta`: how much of itself the lookahead grows by on positive feedback.
    `fill`: let the cloud decode by itself while no draft is there (None: in pipelined mode, and in
    auto where it pays). `stop`: texts that end the output. `raw`: no chat template. `trace`: record
    every judgement.

    `on_cloud_loss`: what to do when no cloud is left in mid-answer: `wait` for one as long as the
    edge is patient, let the `draft` go on alone until one is back (what it writes is nobody's but
    its own, whatever the rule), or `fail` at once. `request_id`: up to 32 hex digits that both ends
    call the request in their logs; none by default. `logprobs`: let every commit carry the target's
    log-probability of its token, and of so many best ones (0 to 20; None: neither). `tale`: let
    every piece tell what has happened on the way to it; unlike `trace` it lets nothing more go up,
    so it has divergences only where the rule needs them, and it goes with any mode.
    """

    mode: Mode = "auto"
    gamma: float = 0.0
    accept: RuleName = "strict"
    measure: Measure = "js"
    threshold: float | None = None
    budget: float | None = None
    floor: float = 0.0
    agreement: bool | None = None
    constants: CreditParams | None = None
    window: int | None = None
    doubt: float = 0.0
    lookahead: int = 64
    eta: float | None = None
    fill: bool | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    system: str | None = None
    raw: bool = False
    trace: bool = False
    logprobs: int | None = None
    on_cloud_loss: OnCloudLoss = "wait"
    request_id: str = ""
    tale: bool = False

    def __post_init__(self) -> None:
        _within("window", self.window, 1, MAX_WINDOW)
        _within("lookahead", self.lookahead, 1, MAX_WINDOW)
        _within("logprobs", self.logprobs, 0, MAX_TOP)
        _within("max_tokens", self.max_tokens, 1, 1 << 18)
        if not 0 <= self.gamma < inf:
            raise ValueError(f"gamma is {self.gamma}; expected 0 or more")
        if not 0 <= self.doubt <= 1:
            raise ValueError(f"doubt is {self.doubt}; expected a probability, 0 to 1")
        if self.eta is not None and not 0 <= self.eta <= 8:
            raise ValueError(f"eta is {self.eta}; expected 0 to 8")
        if len(self.stop) > 16 or any(not s or len(s) > 256 for s in self.stop):
            raise ValueError("stop takes up to 16 texts of 1 to 256 characters")
        if not re.fullmatch("[0-9a-f]{0,32}", self.request_id):
            raise ValueError("request_id must be up to 32 hex digits")
        self._contradictions()
        _ = self.rule, self.credit

    def _contradictions(self) -> None:
        thresholded = self.accept in ("fuzzy", "elastic")
        if self.mode in ("cloud", "draft"):
            alone = "the target alone" if self.mode == "cloud" else "the draft alone"
            for name in ("window", "threshold", "budget", "fill"):
                if getattr(self, name) is not None:
                    raise ValueError(f"mode {self.mode} is {alone}: drop {name}")
            if self.accept != "strict":
                raise ValueError(f"mode {self.mode} is {alone}: drop accept={self.accept}")
        if self.gamma and self.mode != "auto":
            raise ValueError(f"mode {self.mode} weighs nothing: drop gamma, or use mode auto")
        if self.doubt and self.mode != "pipelined":
            raise ValueError(f"doubt closes windows of mode pipelined, not {self.mode}: drop doubt")
        if self.threshold is not None and not thresholded:
            raise ValueError(
                f"{self.accept} has no threshold; use it with accept=fuzzy or accept=elastic"
            )
        if self.measure != "js" and not thresholded:
            raise ValueError(f"{self.accept} has no measure; use it with fuzzy or elastic")
        if self.accept != "elastic" and (self.budget is not None or self.constants is not None):
            raise ValueError("a quality budget and credit constants go with accept=elastic")
        if self.floor and not (thresholded or self.accept == "typical"):
            raise ValueError(f"{self.accept} tolerates nothing, so a floor has no use: drop it")
        if self.agreement is not None and not (thresholded or self.accept == "typical"):
            raise ValueError(f"agreement is no choice under {self.accept}: drop it")
        if self.constants is not None and (self.threshold, self.budget) != (None, None):
            raise ValueError("give either constants, or threshold and budget")
        if self.mode in ("cloud", "draft") and self.on_cloud_loss == "draft":
            raise ValueError(
                f"mode {self.mode} never goes from one to the other: drop on_cloud_loss"
            )
        if self.logprobs is not None and self.mode == "draft":
            raise ValueError("logprobs are the target's, and mode draft has none: drop logprobs")
        if self.trace and self.mode in ("cloud", "draft"):
            raise ValueError(f"mode {self.mode} judges nothing, so there is no trace")

    @property
    def rule(self) -> RuleParams:
        return RuleParams(
            name=self.accept, measure=self.measure, agreement=self.agreement, p_min=self.floor
        )

    @property
    def credit(self) -> CreditParams:
        if self.constants is not None:
            return self.constants
        window = min(self._plain_window, 16)  # whatever doubt makes of those that are sent
        t = self.threshold
        if self.accept == "fuzzy":
            return CreditParams.constant(0.2 if t is None else t, window=window)
        if t is None:
            return CreditParams(window=window, budget=self.budget)
        if t < 0:
            raise ValueError(f"threshold is {t}; expected 0 nats or more")
        return CreditParams(
            window=window, t_base=t, t_min=t / 4, t_max=1.75 * t, budget=self.budget
        )

    @property
    def window_size(self) -> int:
        return DOUBTING_WINDOW if self.doubt and self.window is None else self._plain_window

    @property
    def _plain_window(self) -> int:
        return self.window or DEFAULT_WINDOW.get(self.mode, 4)

    @property
    def way(self) -> Way:
        """How to write, where that does not depend on measurements."""
        assert self.mode in ("cloud", "sync", "pipelined")
        fill = self.mode != "sync" if self.fill is None else self.fill
        return Way(self.mode, fill, self.window_size, self.doubt)


def _within(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ValueError(f"{name} is {value}; expected {low} to {high}")


@dataclass(frozen=True)
class Stats:
    """Figures of one generation; counts are of what was delivered.

    `tokens_per_s`: completion tokens over `seconds` (from the request to the last token; models are
    loaded before); `decode_tokens_per_s`: those behind the first over the time behind it.
    `acceptance_rate`: accepted of all judged draft tokens. `wasted_drafts`: drafted and never
    committed. `cloud_tokens`: tokens the target was fed, without the prompt. `drafted_alone`:
    committed unjudged while no cloud was there.
    """

    mode: str
    accept: str
    seconds: float
    ttft_s: float | None
    tokens_per_s: float
    decode_tokens_per_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    acceptance_rate: float | None = None
    windows: int = 0
    cloud_passes: int = 0
    cloud_tokens: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    wasted_drafts: int = 0
    corrections: int = 0
    filled: int = 0
    credit: float | None = None
    threshold: float | None = None
    reconnects: int = 0
    drafted_alone: int = 0


@dataclass(frozen=True)
class Result:
    """A finished text. `token_ids` hold no EOS; with a stop string they reach to the token that
    completed it, while `text` ends before it. `finish_reason`: stop, length, cancelled or lost.
    `notices`: what the user was told of the cloud meanwhile."""

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    stats: Stats
    commits: list[Commit] = field(default_factory=list, repr=False)
    trace: list[Judged] = field(default_factory=list, repr=False)
    request_id: str = ""
    notices: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The shape of `e2sci run --json`."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": len(self.token_ids),
            },
            "stats": dict(vars(self.stats)),
            "request_id": self.request_id,
            "notices": self.notices,
        }


@dataclass(frozen=True)
class Piece:
    """One step of a stream: text that is now certain, and the tokens committed with it; or a
    `notice` for the user, without any. `tale`: with `Options.tale`, and such pieces may have
    nothing else."""

    text: str
    commits: list[Commit]
    result: Result | None = None
    notice: str | None = None
    tale: Tale | None = None
