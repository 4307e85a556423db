"""The methods that are measured side by side, by name.

    cloud                the target alone, streamed                 mode cloud
    draft                the draft alone                            mode draft
    colocated            speculative decoding, both in the cloud    sync, W = 5, no network between
    sd, sd-wN, sd-best   speculative decoding over the network      sync, W = 5, N, or the best N
    fsd, fsd-released    Fuzzy SD (Holsman et al. 2025)             sync, W = 5, constant T; on JS,
                                                                    or on what its code computes
    pearl                PEARL's overlap (Liu et al. 2025)          one window drafted while one is
                                                                    verified, each a round trip long
    amusd                asynchronous drafting (AMUSD, PipeSpec)    drafts run ahead without limit
    strict               E²-SCI, the target's own text              pipelined, filled
    elastic              E²-SCI, threshold by credit                pipelined, filled
    …-doubt              both, and elastic-regret; ours             windows end at a doubted token
    auto                 what pays, by what is measured meanwhile   the target's own text

`auto@1`: where a ms of the cloud is worth as much as one of waiting (γ). `fsd@0.1`, `elastic@0.1`:
at that threshold. `elastic-regret`: on the regret. Variants of elastic leave out or change one
thing; VARIANTS says what. `strict` and `elastic` take `-no-fill`.

Baselines run on the same runtime, so a difference between two rows is the method's and not the
implementation's; what is PEARL's or AMUSD's is their schedule, not their code.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from e2sci.decoding.credit import Credit, CreditParams, CreditState
from e2sci.decoding.predictor import Forecast, Predictor
from e2sci.emulation.profile import Profile
from e2sci.runtime.choice import DOUBT
from e2sci.session.cloud import CloudSession
from e2sci.session.line import CloudModel
from e2sci.session.messages import MAX_WINDOW, Open

SD_WINDOW = 5
SD_WINDOWS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
"""The windows among which sd-best chooses."""

PAPER_ETA = 0.25

Sessions = Callable[[Open, CloudModel], CloudSession]


@dataclass(frozen=True)
class Method:
    """A name and what it means: options of Edge.generate, where the draft runs, how the cloud
    judges."""

    name: str
    options: Mapping[str, Any]
    colocated: bool = False
    session: Sessions = CloudSession


@dataclass(frozen=True)
class Setting:
    """What methods depend on beside their name: the profile, and what calibration has found.

    `tau`: the pair's mean acceptance, which credit is centred on; `thresholds`: T in nats by rule
    (`fsd`, `fsd-released`, `elastic`, `elastic-regret`); `matched`: the constant T of the same mean
    acceptance as elastic; `recorded`: thresholds that elastic has used, to permute.
    """

    profile: Profile
    tau: float = 0.9
    thresholds: Mapping[str, float] = field(default_factory=dict)
    predictor: Predictor | None = None
    matched: float | None = None
    recorded: Sequence[float] = ()

    def threshold(self, rule: str) -> float:
        """T of a rule: calibrated, else the paper's .2 (regret: .5, ours)."""
        return self.thresholds.get(rule, 0.5 if rule == "elastic-regret" else 0.2)

    def described(self) -> dict[str, Any]:
        """All of it but the profile, small enough for a header: two that differ differ here."""
        g, recorded = self.predictor, ",".join(map(repr, self.recorded))
        return {
            "tau": self.tau,
            "thresholds": dict(sorted(self.thresholds.items())),
            "matched": self.matched,
            "recorded": _print(recorded) if recorded else None,
            "predictor": None if g is None else _print(repr(_sampled(g))),
        }


def _sampled(g: Predictor) -> list[Forecast]:
    """What g says on a grid: as good as its weights to tell it from others."""
    return [g(r / 20, delta / 10) for r in range(21) for delta in range(-10, 11)]


def _print(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


VARIANTS: dict[str, str] = {
    "no-plc": "drafting and verification take turns (W = 5)",
    "no-prehit": "the first token of a window is judged with the rest",
    "no-threshold": "T = 0: only agreement counts",
    "no-history": "T constant, at elastic's mean acceptance",
    "permuted": "T drawn from those elastic used, in random order",
    "no-window": "the predictor's windows are ignored",
    "no-agreement": "a draft equal to the target's pick still needs D ≤ T",
    "observed": "credit follows what was accepted, not what T_base would have",
    "k1": "history of 1 window",
    "k3": "history of 3 windows",
    "k5": "history of 5 windows (the default)",
    "k10": "history of 10 windows",
    "eta": "the lookahead grows from W by η = .25 a feedback, as in the paper",
    "no-fill": "the cloud never decodes by itself",
}

BASES = ("cloud", "draft", "colocated", "sd", "sd-best", "fsd", "fsd-released", "pearl", "amusd")
NAMES = (
    *(*BASES, "auto", "strict", "strict-no-fill", "elastic", "elastic-regret"),
    *("strict-doubt", "elastic-doubt"),
    *(f"elastic-{variant}" for variant in VARIANTS),
)

_NAME = re.compile(r"(?P<base>[a-z0-9-]+?)(?:@(?P<threshold>[0-9.]+))?$")


def expanded(names: Sequence[str]) -> list[str]:
    """The methods to run for `names`: sd-best runs every window. Raises ValueError."""
    runs: dict[str, None] = {}
    for name in names:
        _check(name)
        many = [f"sd-w{n}" for n in SD_WINDOWS] if name == "sd-best" else [name]
        runs.update(dict.fromkeys("sd" if n == f"sd-w{SD_WINDOW}" else n for n in many))
    return list(runs)


def method(name: str, setting: Setting) -> Method:
    """The method called `name`. Raises ValueError, naming the nearest ones."""
    base, given = _check(name)
    if base in ("cloud", "draft"):
        return Method(name, {"mode": base})
    if base == "colocated":
        return Method(name, {"mode": "sync", "window": SD_WINDOW}, colocated=True)
    if base == "sd":
        return Method(name, {"mode": "sync", "window": SD_WINDOW})
    if base.startswith("sd-w"):
        return Method(name, {"mode": "sync", "window": int(base[4:])})
    if base.startswith("fsd"):
        return _fuzzy(name, base, setting, given)
    if base == "pearl":
        window = _round_trip(setting.profile)
        return Method(name, {**_PIPELINED, "window": window, "lookahead": min(64, 2 * window)})
    if base == "amusd":
        return Method(name, {**_PIPELINED, "lookahead": 64})
    if base == "auto":
        return Method(name, {"mode": "auto", "gamma": given or 0.0})
    if base.startswith("strict"):
        changes = {"doubt": DOUBT} if base == "strict-doubt" else {}
        fill = base != "strict-no-fill"
        return Method(name, {"mode": "pipelined", "fill": fill, **changes})
    return _elastic(name, base, setting, given)


_PIPELINED = {"mode": "pipelined", "fill": False}


def _check(name: str) -> tuple[str, float | None]:
    """Base name and threshold. Raises ValueError."""
    found = _NAME.match(name)
    base = found["base"] if found else name
    window = re.fullmatch(r"sd-w([1-9]\d?)", base)
    regret = base.replace("elastic-regret-", "elastic-")
    known = base in NAMES or regret in NAMES or (window and int(window[1]) <= MAX_WINDOW)
    if found is None or not known:
        near = difflib.get_close_matches(base, NAMES, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(NAMES)}"
        raise ValueError(f"no method {name!r}; {hint}")
    if found["threshold"] is None:
        return base, None
    if not base.startswith(("fsd", "elastic", "auto")):
        raise ValueError(f"{base} has no threshold; write {base} alone")
    try:
        return base, float(found["threshold"])
    except ValueError:
        unit = "γ" if base == "auto" else "threshold in nats"
        raise ValueError(f"{name!r}: {found['threshold']!r} is no {unit}") from None


def _round_trip(profile: Profile) -> int:
    """Draft tokens in the time from a window to its verdict."""
    trip = profile.link.rtt_ms + profile.target.ms(8)
    return max(1, min(32, math.ceil(trip / profile.draft.ms(1))))


def _fuzzy(name: str, base: str, setting: Setting, given: float | None) -> Method:
    threshold = setting.threshold(base) if given is None else given
    measure = "js_fsd" if base == "fsd-released" else "js"
    options = {"accept": "fuzzy", "measure": measure, "threshold": threshold}
    return Method(name, {"mode": "sync", "window": SD_WINDOW, **options})


# ---- elastic ------------------------------------------------------------------------------


def elastic_credit(t: float, tau: float, **changes: Any) -> CreditParams:
    """Credit around T_base = t (ours): T moves within t/4 … 1.75 t, as the paper's defaults do, by
    1.5 t a unit of credit, and credit is centred on the pair's own acceptance τ."""
    constants: dict[str, Any] = {
        "t_base": t,
        "t_min": t / 4,
        "t_max": 1.75 * t,
        "a": 1.5 * t,
        "hysteresis": t / 10,
        "tau": tau,
    }
    return CreditParams(**{**constants, **changes})


def _elastic(name: str, base: str, setting: Setting, given: float | None) -> Method:
    rule = "elastic-regret" if base.startswith("elastic-regret") else "elastic"
    variant = base.removeprefix(rule).removeprefix("-")
    t = setting.threshold(rule) if given is None else given
    if variant == "no-threshold":
        t = 0.0
    options: dict[str, Any] = {
        "mode": "sync" if variant == "no-plc" else "pipelined",
        "accept": "elastic",
        "measure": "regret" if rule == "elastic-regret" else "js",
        "constants": elastic_credit(t, setting.tau, **_credit_changes(variant)),
        **_option_changes(variant),
    }
    if variant == "no-history":
        matched = t if setting.matched is None else setting.matched
        options["constants"] = CreditParams.constant(matched)
    return Method(name, options, session=_session(variant, setting, t))


def _session(variant: str, setting: Setting, t: float) -> Sessions:
    """How the cloud judges: as for users, unless a predictor is given or the variant asks."""
    predictor = setting.predictor
    if variant == "no-window" and predictor is not None:
        predictor = partial(_without_window, predictor)
    credit: Callable[[CreditParams, CreditState | None], Credit] = Credit
    if predictor is not None:
        credit = partial(Credit, predictor=predictor)
    if variant == "permuted":
        credit = partial(_Permuted, setting.recorded or [t])
    if variant == "no-prehit":
        return partial(CloudSession, credit=credit, prehit=False)
    return CloudSession if credit is Credit else partial(CloudSession, credit=credit)


def _credit_changes(variant: str) -> dict[str, Any]:
    if variant == "observed":
        return {"source": "observed"}
    if re.fullmatch(r"k\d+", variant):
        return {"history": int(variant[1:])}
    return {}


def _option_changes(variant: str) -> dict[str, Any]:
    changes: dict[str, dict[str, Any]] = {
        "no-plc": {"window": SD_WINDOW},
        "no-agreement": {"agreement": False},
        "no-fill": {"fill": False},
        "eta": {"eta": PAPER_ETA},
        "doubt": {"doubt": DOUBT},
    }
    return changes.get(variant, {})


def _without_window(predictor: Predictor, r: float, delta: float) -> Forecast:
    forecast = predictor(r, delta)
    return Forecast(forecast.omega, None, forecast.accuracy)


class _Permuted(Credit):
    """Credit whose threshold is drawn from those elastic has used: the same values, no history."""

    def __init__(
        self, recorded: Sequence[float], params: CreditParams, state: CreditState | None = None
    ) -> None:
        super().__init__(params, state)
        self._recorded = recorded
        self._random = random.Random(len(recorded))

    def _refresh(self, r: float, delta: float) -> None:
        threshold = self._random.choice(self._recorded)
        self.state = msgspec.structs.replace(self.state, threshold=threshold, since=0)
