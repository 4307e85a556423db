"""Requests, labels, a network and a calibration, for tests of what calibrates."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from e2sci.decoding.distribution import TopK, decode, encode
from e2sci.decoding.divergence import divergence
from e2sci.emulation.profile import profile
from e2sci.evaluation import training
from e2sci.evaluation.calibration import Calibration, Check, Measured
from e2sci.evaluation.sweep import Labels
from e2sci.evaluation.traces import RequestTrace, TraceHeader

PAPER = profile("paper")
HEADER = TraceHeader(draft="s", target="l", task="made up", first=0, last=9, max_tokens=400)


def sketched(*weights: float) -> bytes:
    return encode(TopK(np.array([1, 2]), np.log(weights), 10))


SURE = sketched(0.98, 0.015)
P_TORN, Q_TORN = sketched(0.6, 0.39), sketched(0.2, 0.79)
TORN = divergence("js", decode(P_TORN, 10), decode(Q_TORN, 10))  # JS where the draft differs


def request(agreed: list[bool], js: list[float] | None = None, row: int = 0) -> RequestTrace:
    """A request whose draft agrees where told. With `js` of its own it can't be replayed."""
    n = len(agreed)
    zeros = {name: [0.0] * n for name in ("js_fsd", "tv", "regret", "entropy", "target_entropy")}
    return RequestTrace(
        row=row,
        id=str(row),
        prompt_tokens=4,
        tokens=[1] * n,
        drafts=[1 if same else 2 for same in agreed],
        js=js or [0.0 if same else TORN for same in agreed],
        p=[SURE if same else P_TORN for same in agreed],
        q=[SURE if same else Q_TORN for same in agreed],
        correct=True,
        **zeros,
    )


def mixed(seed: int = 0, n: int = 120) -> RequestTrace:
    random = np.random.default_rng(seed)
    js = random.uniform(0, 0.4, n)
    return request((random.random(n) < 0.8).tolist(), js.tolist(), row=seed)


def some_labels() -> Labels:
    random = np.random.default_rng(0)
    r = random.uniform(0.5, 1, 300)
    return Labels(
        states=np.stack([r, random.normal(0, 0.05, 300)], 1),
        omega=np.where(r > 0.8, 2.0, 0.5),
        windows=np.where(r > 0.8, 16.0, 3.0),
        accuracy=np.clip(r, 0, 0.97),
        goodput=0.06,
        window=4,
    )


@lru_cache
def fitted():
    return training.fit(some_labels())


@lru_cache
def weights() -> bytes:
    return training.exported(fitted())


def row(**changed) -> Measured:
    given = {
        "method": "elastic@0.1",
        "threshold": 0.1,
        "accuracy": 0.5,
        "difference": -0.1,
        "low": -0.3,
        "high": 0.1,
        "lost": 2,
        "gained": 1,
        "tokens_per_s": 50.0,
        "speedup": 2.5,
        "acceptance": 0.9,
        "mean_tokens": 100.0,
        "keeps": True,
        **changed,
    }
    return Measured(**given)


def calibration(**changed) -> Calibration:
    given = {
        "draft": "s@1",
        "target": "l@2",
        "tasks": ["gsm8k"],
        "first": 0,
        "last": 9,
        "max_tokens": 400,
        "profile": "paper",
        "delta": 0.01,
        "tau": 0.92,
        "thresholds": {"elastic": 0.1},
        "window": 4,
        "matched": 0.11,
        "recorded": [0.1, 0.12],
        "measured": {"elastic": [row()]},
        "check": Check(passed=True, verdict="fine"),
        "predictor": weights(),
        "command": "e2sci calibrate",
        **changed,
    }
    return Calibration(**given)
