"""Credit along traces: what elastic would do there, and what its threshold then costs in accuracy.

Credit is followed as if every position were judged by a draft token. In the runtime some are filled
by the cloud, so that windows of credit shift by a few positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from e2sci.decoding.credit import Credit, CreditParams
from e2sci.decoding.distribution import Floats
from e2sci.decoding.predictor import Predictor
from e2sci.evaluation.calibration import MOST_RECORDED
from e2sci.evaluation.figures import bench_module
from e2sci.evaluation.traces import Bools, RequestTrace, Trace

PRIOR = 10
"""Requests that the overall share of kept answers weighs in each band of credit."""

Ints = np.ndarray[Any, np.dtype[np.int64]]
Share = Callable[[Floats, Floats], Floats]
"""(r̂, T) to the estimated probability that an answer stays as right as the cloud alone's."""


@dataclass(frozen=True)
class Followed:
    """Credit along one request. `states`: (r̂, Δr̂) at the close of each window, shape (n, 2);
    `ends`: the positions behind those windows; `thresholds`: T in force at each position;
    `accepted`: what it accepts."""

    states: Floats
    ends: Ints
    thresholds: Floats
    accepted: Bools


def follow(
    request: RequestTrace, params: CreditParams, predictor: Predictor | None = None
) -> Followed:
    """Run elastic's credit over a request, on JS, as if every position were judged."""
    credit = Credit(params, predictor=predictor)
    states, ends, thresholds, accepted = [], [], [], []
    base = request.accepted(params.t_base)
    for i, (agreed, js) in enumerate(zip(request.agreed, request.js, strict=True)):
        thresholds.append(credit.threshold)
        accepted.append(bool(agreed) or js <= credit.threshold)
        before = credit.value
        credit.observe(accepted=accepted[-1], base=bool(base[i]))
        if credit.state.judged == 0:
            states.append((credit.value, credit.value - before))
            ends.append(i + 1)
    return Followed(
        np.array(states).reshape(-1, 2),
        np.array(ends, np.int64),
        np.array(thresholds),
        np.array(accepted),
    )


_STEP = 0.05
CENTRE = 0.1
"""Nats: the T_base at which τ is taken."""


def centre(traces: Sequence[Trace]) -> float:
    """τ: what credit is centred on, the pair's mean counterfactual acceptance at a middling T_base,
    in steps of .05: a finer one moves T by less than its hysteresis. (Mean agreement would lie
    below nearly every r̂, and T would only loosen.) Raises ValueError without any request."""
    every = [request.accepted(CENTRE) for trace in traces for request in trace.requests]
    if not every:
        raise ValueError("the trace holds no requests")
    return round(round(float(np.concatenate(every).mean()) / _STEP) * _STEP, 2)


def used(
    traces: Sequence[Trace], params: CreditParams, predictor: Predictor | None = None
) -> tuple[float, list[float]]:
    """The constant T that accepts as much of the traces as elastic does, and a sample of the T it
    had at the close of each window, MOST_RECORDED at most."""
    requests = [request for trace in traces for request in trace.requests]
    followed = [follow(request, params, predictor) for request in requests]
    accepted = int(sum(each.accepted.sum() for each in followed))
    recorded = np.concatenate([each.thresholds[each.ends - 1] for each in followed])
    at = np.linspace(0, len(recorded) - 1, min(MOST_RECORDED, len(recorded))).round().astype(int)
    return matched(traces, accepted), recorded[at].round(6).tolist()


def matched(traces: Sequence[Trace], accepted: int) -> float:
    """The least constant T in nats that accepts so many positions of the traces, on JS or on
    agreement; 0 where agreement is enough."""
    requests = [request for trace in traces for request in trace.requests]
    agreed = np.concatenate([request.agreed for request in requests])
    tolerable = np.sort(np.concatenate([request.js for request in requests])[~agreed])
    needed = min(accepted - int(agreed.sum()), len(tolerable))
    return float(tolerable[needed - 1]) if needed > 0 else 0.0


# ---- accuracy by credit -------------------------------------------------------------------


def kept_share(credit: Floats, thresholds: Floats, kept: Bools) -> Share:
    """Estimate it from requests (ours). `credit`: mean r̂ of each, shape (n,); `thresholds`: mean T
    it was judged by at each T_base of a grid, and `kept`: whether its answer was then still as
    right; shapes (n, grid).

    By thirds of credit: the share of requests, drawn to that of all by PRIOR of them; from 1 at
    T = 0, where nothing changes, never rising with T (isotonic), linear between.
    """
    edges = np.quantile(credit, [1 / 3, 2 / 3])
    bands = np.digitize(credit, edges)
    overall = (kept.sum(0) + 1) / (len(kept) + 2)
    curves = []
    for band in range(3):
        own = bands == band
        share = (kept[own].sum(0) + PRIOR * overall) / (own.sum() + PRIOR)
        used = thresholds[own].mean(0) if own.any() else thresholds.mean(0)
        curves.append(_falling(np.append(0.0, used), np.append(1.0, share)))

    def estimate(r: Floats, t: Floats) -> Floats:
        r, t = np.broadcast_arrays(r, t)
        each = np.stack([np.interp(t, x, y) for x, y in curves])
        return np.asarray(np.take_along_axis(each, np.digitize(r, edges)[None], 0)[0])

    return estimate


def _falling(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    order = np.argsort(x, kind="stable")
    isotonic = bench_module("sklearn.isotonic").IsotonicRegression(increasing=False)
    return x[order], np.asarray(isotonic.fit_transform(x[order], y[order]))
