"""Labels for the predictor g_θ(r̂, Δr̂) → (ω, W, accuracy), from a sweep in the virtual world.

Recorded requests are written again (`replay`) by the real runtime, pipelined, at every threshold
and window of a grid. At the close of each window of judged positions credit is in some state
(r̂, Δr̂); what each (T, W) then does over the next SEGMENT positions is read off: accepted tokens L
and time. A state's label is the (T, W) of the best goodput G = E[L] / E[time], where

    E[· | state]  is the mean over the state's nearest neighbours, so that a label follows what is
                  usual there and not one future;
    G itself      is maximised by Dinkelbach's iteration: choose max E[L] - λ E[time] in every
                  state, set λ = ΣE[L] / ΣE[time], until λ stays;
    accuracy      constrains it: only T at which requests of such credit keep their answers as
                  often as at T_base over all (`kept_share`), and none above 1.75 T_base, within
                  which elastic was found safe.

All of this is ours but the sweep, the two inputs and G (the paper's). What it approximates: a text
goes on along the trace behind a tolerated token; every position is judged (none filled) where
credit is followed; each (T, W) is seen in steady state, not behind a change of it; what Judged
records add to the downlink.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from e2sci.decoding.credit import CreditParams
from e2sci.decoding.distribution import Floats
from e2sci.emulation.profile import Profile
from e2sci.evaluation.figures import bench_module
from e2sci.evaluation.follow import Ints, Share, follow
from e2sci.evaluation.methods import Method, elastic_credit
from e2sci.evaluation.replay import replay_pair
from e2sci.evaluation.traces import Bools, RequestTrace, Trace, TraceHeader
from e2sci.evaluation.world import write

MULTIPLES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
"""Thresholds of the sweep, in T_base; the bounds of `elastic_credit`."""
WINDOWS = (2, 3, 4, 6, 8, 12, 16)
SEGMENT = 10
"""Positions a decision is judged by: T moves every second window of five."""
NEIGHBOURS = 100
OMEGA = (0.05, 8.0)
LEAST_CREDIT = 0.02
"""|r̂ - τ| below which T says nothing about ω."""
SLACK = 0.02
"""Of a segment: of windows that are so nearly equal the smallest is taken, for changing to a larger
one delays what is under way, which the sweep doesn't see."""


# ---- the sweep ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Swept:
    """Segments behind states. `states`: shape (n, 2); `lengths`, `times` (accepted tokens, ms):
    shape (n, MULTIPLES, WINDOWS)."""

    states: Floats
    lengths: Floats
    times: Floats


def sweep(
    traces: Sequence[Trace], profile: Profile, t_base: float, tau: float, *, jobs: int
) -> Iterator[Swept]:
    """Each request of the traces at every (T, W). `jobs`: processes, 0 for this one."""
    each = partial(_swept, profile=profile, params=elastic_credit(t_base, tau))
    work = [(trace.header, request) for trace in traces for request in trace.requests]
    if jobs == 0:
        yield from map(each, work)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        try:
            yield from pool.map(each, work)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _swept(
    work: tuple[TraceHeader, RequestTrace], *, profile: Profile, params: CreditParams
) -> Swept:
    header, request = work
    followed = follow(request, params)
    ends = followed.ends[followed.ends + SEGMENT <= len(request.tokens)]
    shape = len(ends), len(MULTIPLES), len(WINDOWS)
    lengths, times = np.empty(shape), np.empty(shape)
    known: dict[tuple[bytes, int], tuple[Floats, Floats]] = {}
    for i, multiple in enumerate(MULTIPLES):
        t = multiple * params.t_base
        pattern = request.accepted(t).tobytes()
        for j, window in enumerate(WINDOWS):
            if (pattern, window) not in known:  # what accepts the same takes the same time
                known[pattern, window] = _run(header, request, profile, t, window)
            accepted, ms = known[pattern, window]
            lengths[:, i, j] = accepted[ends + SEGMENT] - accepted[ends]
            times[:, i, j] = ms[ends + SEGMENT] - ms[ends]
    whole = np.isfinite(times).all((1, 2))
    return Swept(followed.states[: len(ends)][whole], lengths[whole], times[whole])


def _run(
    header: TraceHeader, request: RequestTrace, profile: Profile, threshold: float, window: int
) -> tuple[Floats, Floats]:
    """Accepted tokens, and ms, before each position and behind the last; shapes (n + 1,). Filled
    positions count as not accepted, half-way between their neighbours in time. NaN ms behind an
    EOS that was tolerated."""
    n = len(request.tokens)
    options = {
        "mode": "pipelined",
        "accept": "elastic",
        "constants": CreditParams.constant(threshold),
        "window": window,
        "trace": True,
    }
    pair = replay_pair(Trace(header, [request]))
    result = write(Method("sweep", options), profile, *pair, "#0", n).result
    judged = [(j.position - request.prompt_tokens, j.accepted, j.ms) for j in result.trace]
    accepted, at, ms = np.zeros(n + 1), [0], [0.0]
    for position, passed, moment in judged:
        accepted[position + 1] = passed
        at.append(position + 1)
        ms.append(moment)
    if len(result.token_ids) > at[-1]:
        at.append(len(result.token_ids))
        ms.append(1000 * result.stats.seconds)
    return np.cumsum(accepted), np.interp(np.arange(n + 1), at, ms, right=np.nan)


# ---- labels -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labels:
    """What the network is to say in each state; shapes (n, 2) and (n,). `goodput`: λ, accepted
    tokens a ms, that the labels reach; `window`: the best W at T_base everywhere."""

    states: Floats
    omega: Floats
    windows: Floats
    accuracy: Floats
    goodput: float
    window: int


def labels(swept: Sequence[Swept], share: Share, floor: float, params: CreditParams) -> Labels:
    """The best (ω, W) in each state, T such that `share` is at least `floor`; where none is, the
    tightest. There must be a state."""
    states = np.concatenate([each.states for each in swept])
    lengths = _expected(states, np.concatenate([each.lengths for each in swept]))
    times = _expected(states, np.concatenate([each.times for each in swept]))
    thresholds = np.array(MULTIPLES) * params.t_base
    shares = share(states[:, :1], thresholds[None])
    allowed = shares >= floor
    allowed[:, 0] |= ~allowed.any(1)
    chosen, goodput = dinkelbach(
        lengths, times, np.broadcast_to(allowed[:, :, None], lengths.shape)
    )
    multiple = np.unravel_index(chosen, lengths.shape[1:])[0]
    rows = np.arange(len(states))
    worth = lengths[rows, multiple] - goodput * times[rows, multiple]
    window = (worth >= worth.max(1, keepdims=True) - SLACK * SEGMENT).argmax(1)
    level = MULTIPLES.index(1.0)
    rates = lengths[:, level].sum(0) / times[:, level].sum(0)
    return Labels(
        states,
        omega_of(thresholds[multiple], states[:, 0], params),
        np.array(WINDOWS, float)[window],
        np.take_along_axis(shares, multiple[:, None], 1)[:, 0],
        goodput,
        WINDOWS[int(rates.argmax())],
    )


def dinkelbach(lengths: Floats, times: Floats, allowed: Bools) -> tuple[Ints, float]:
    """One choice a state that maximises Σ lengths / Σ times (Dinkelbach 1967). Arrays of shape
    (states, *choices), times > 0, some choice allowed in each state; returns flat indices (of
    equals the first) and the ratio."""
    n = len(lengths)
    lengths, times = lengths.reshape(n, -1), times.reshape(n, -1)
    allowed = allowed.reshape(n, -1)
    rows, ratio = np.arange(n), 0.0
    while True:
        worth = np.where(allowed, lengths - ratio * times, -np.inf)
        chosen = worth.argmax(1)
        better = float(lengths[rows, chosen].sum() / times[rows, chosen].sum())
        if better <= ratio * (1 + 1e-12):
            return chosen, better
        ratio = better


def omega_of(thresholds: Floats, r: Floats, params: CreditParams) -> Floats:
    """The ω that gives these T at credit r̂, from T = T_base + a·ω·(r̂ - τ); within OMEGA, and 1
    where r̂ is so near τ that it makes no difference."""
    away = r - params.tau
    known = np.abs(away) >= LEAST_CREDIT
    away = np.where(known, away, 1.0)
    omega = (thresholds - params.t_base) / (params.a * away)
    return np.where(known, np.clip(omega, *OMEGA), 1.0)


def _expected(states: Floats, outcomes: Floats) -> Floats:
    """Mean outcome in the neighbourhood of each state; of many equal ones a random choice."""
    scattered = states + np.random.default_rng(0).normal(0, 1e-4, states.shape)
    neighbours = bench_module("sklearn.neighbors").KNeighborsRegressor(min(NEIGHBOURS, len(states)))
    flat = outcomes.reshape(len(states), -1)
    return np.asarray(neighbours.fit(scattered, flat).predict(states)).reshape(outcomes.shape)
