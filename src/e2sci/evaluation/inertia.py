"""Is there credit inertia: does acceptance in one window say something about the next?

The paper's ground for an elastic threshold is that acceptance of adjacent windows correlates. Two
things make it look so: windows of *one request* resemble each other in time (inertia), and
requests differ as a whole (some are easy). This module separates them (ours):

    autocorrelation  of window acceptance at lags 1 … 8, each request's own mean removed
    between          the share of variance that lies between requests (one-way ANOVA)
    bands            mean acceptance after low, middling and high credit r̂
    R²               how well the next window is predicted, by requests the fit has not seen

Windows are consecutive, W positions each; the last, partial one is dropped, and so are requests
of fewer than three. The null shuffles the windows of each request: it keeps how requests differ
and the small negative bias that removing means causes (about -1/n), and destroys order alone. So
"observed minus null" is what order, hence inertia, is worth.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from e2sci.decoding.distribution import Floats
from e2sci.evaluation.figures import bench_module
from e2sci.evaluation.traces import Trace
from e2sci.evaluation.windows import Windows, credit, mean_so_far, parse_signal, windows_of

LAGS = 8
FIXED_EDGES = (0.5, 0.8)
"""r̂ below the first is low, from the second on high (ours)."""

FOLDS = 5
RESAMPLES = 2000

Cut = Literal["fixed", "terciles"]


class Lag(msgspec.Struct, frozen=True):
    """Correlation of windows `lag` apart; `p`: share of shuffles that reach it (one-sided)."""

    lag: int
    observed: float
    null: float
    null_sd: float
    excess: float
    p: float


class Between(msgspec.Struct, frozen=True):
    """Variance between requests. `share`: of the sum of squares, which noise alone makes positive;
    `icc`: intraclass correlation, unbiased under independence; `icc_noiseless`: the same with the
    sampling noise of W positions (taken as independent) taken out of the windows, None at W = 1;
    `f`, `p`: of the one-way ANOVA. Inertia within requests makes all of them somewhat larger."""

    share: float
    icc: float
    icc_noiseless: float | None
    f: float
    p: float


class Band(msgspec.Struct, frozen=True):
    """Windows whose history gave an r̂ in [`low`, `high`) (the last band: ≤ `high`). `mean`: their
    acceptance, with a 95 % interval by resampling requests; null: the same in shuffles."""

    name: str
    low: float
    high: float
    windows: int
    mean: float
    interval: tuple[float, float]
    null: float
    null_sd: float


class Bands(msgspec.Struct, frozen=True):
    """Acceptance by band, and the `gap` from low to high; `p`: share of shuffles that reach it."""

    bands: list[Band]
    gap: float
    gap_interval: tuple[float, float]
    gap_null: float
    gap_null_sd: float
    p: float


class Inertia(msgspec.Struct, frozen=True):
    """All about one trace; as JSON the shape of `e2sci inertia --json` (null: not defined).

    `requests`, `windows`: used; `left_out`: requests of fewer than three windows; `mean`:
    acceptance; `r2`: cross-validated by request; negative: worse than the mean. `oracle` knows the
    request's overall mean, the window itself included.
    """

    name: str
    draft: str
    target: str
    signal: str
    window: int
    requests: int
    left_out: int
    windows: int
    mean: float
    permutations: int
    lags: list[Lag]
    between: Between
    bands: dict[Cut, Bands]
    r2: dict[str, float]

    @property
    def verdict(self) -> str:
        one = self.lags[0]
        found = "inertia" if one.p < 0.05 else "no inertia to speak of"
        return (
            f"{found}: windows in a row correlate by {one.observed:.2f}, shuffled ones by "
            f"{one.null:.2f} ± {one.null_sd:.2f} (p = {one.p:.2g})"
        )


def analyse(
    trace: Trace,
    name: str,
    *,
    signal: str = "agree",
    window: int = 5,
    permutations: int = 1000,
    seed: int = 0,
) -> Inertia:
    """The whole analysis of `trace`. Raises ValueError with fewer than two usable requests, on an
    unknown `signal`, or a `window` below 1; RuntimeError without the bench extra."""
    data = windows_of(trace, parse_signal(signal), window)
    random = np.random.default_rng(seed)
    shuffles = [_statistics(_shuffled(data.acceptance, random)) for _ in range(permutations)]
    observed = _statistics(data.acceptance)
    null = _Statistics(*(np.array(values) for values in zip(*shuffles, strict=True)))
    return Inertia(
        name,
        trace.header.draft,
        trace.header.target,
        signal,
        window,
        requests=len(data.acceptance),
        left_out=data.left_out,
        windows=int(data.known.sum()),
        mean=float(data.acceptance[data.known].mean()),
        permutations=permutations,
        lags=_lags(observed.autocorrelation, null.autocorrelation),
        between=_between(data),
        bands={
            "fixed": _bands(data.acceptance, FIXED_EDGES, null.fixed, random),
            "terciles": _bands(data.acceptance, None, null.terciles, random),
        },
        r2=predictive_r2(data),
    )


# ---- order within requests, against the null ----------------------------------------------


class _Statistics(NamedTuple):
    """What depends on the windows' order; an axis of shuffles comes in front for the null."""

    autocorrelation: Floats  # by lag
    fixed: Floats  # mean by band
    terciles: Floats


def _statistics(acceptance: Floats) -> _Statistics:
    r = credit(acceptance)
    means = [_means(*_banded(acceptance, r, _edges(acceptance, r, e))) for e in (FIXED_EDGES, None)]
    return _Statistics(autocorrelation(acceptance), *means)


def _shuffled(acceptance: Floats, random: np.random.Generator) -> Floats:
    """The windows of each request in random order."""
    keys = random.random(acceptance.shape)
    keys[np.isnan(acceptance)] = 2.0  # stay behind
    return np.take_along_axis(acceptance, np.argsort(keys, axis=1), axis=1)


def autocorrelation(acceptance: Floats) -> Floats:
    """Pooled over requests, each one's own mean removed, at lags 1 … LAGS; NaN without pairs.

    (Σ e_t e_{t+k} / pairs at lag k) / (Σ e² / windows).
    """
    known = ~np.isnan(acceptance)
    e = np.where(known, acceptance - np.nanmean(acceptance, axis=1, keepdims=True), 0.0)
    variance = (e**2).sum() / known.sum()
    out = np.full(LAGS, np.nan)
    for lag in range(1, min(LAGS, e.shape[1] - 1) + 1):
        pairs = known[:, lag:].sum()
        if variance > 1e-12:
            out[lag - 1] = (e[:, lag:] * e[:, :-lag]).sum() / pairs / variance
    return out


def _lags(observed: Floats, null: Floats) -> list[Lag]:
    out = []
    for i, value in enumerate(observed.tolist()):
        mean, sd = _moments(null[:, i])
        out.append(Lag(i + 1, value, mean, sd, value - mean, _p(value, null[:, i])))
    return out


def _edges(acceptance: Floats, r: Floats, fixed: tuple[float, float] | None) -> Floats:
    """The two edges between three bands: given ones, or the terciles of r̂."""
    if fixed is not None:
        return np.array(fixed)
    return np.quantile(r[~np.isnan(r) & ~np.isnan(acceptance)], [1 / 3, 2 / 3])


def _banded(acceptance: Floats, r: Floats, edges: Floats) -> tuple[Floats, Floats]:
    """Sum of acceptance and number of windows by request and band of r̂; shapes (requests, 3)."""
    known = ~np.isnan(r) & ~np.isnan(acceptance)
    band = np.searchsorted(edges, r, side="right")
    held = [known & (band == b) for b in range(3)]
    sums = [np.where(h, acceptance, 0.0).sum(axis=1) for h in held]
    return np.stack(sums, axis=1), np.stack([h.sum(axis=1) for h in held], axis=1)


def _means(sums: Floats, counts: Floats) -> Floats:
    """Acceptance by band; NaN where it is empty."""
    with np.errstate(invalid="ignore"):
        return np.asarray(sums.sum(axis=-2) / counts.sum(axis=-2))


def _bands(
    acceptance: Floats,
    fixed: tuple[float, float] | None,
    null: Floats,
    random: np.random.Generator,
) -> Bands:
    r = credit(acceptance)
    edges = _edges(acceptance, r, fixed)
    sums, counts = _banded(acceptance, r, edges)
    means, n = _means(sums, counts), len(sums)
    weights = random.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    with np.errstate(invalid="ignore"):
        resampled = (weights @ sums) / (weights @ counts)
    limits = [0.0, *edges.tolist(), 1.0]
    bands = [
        Band(
            name,
            limits[i],
            limits[i + 1],
            int(counts[:, i].sum()),
            float(means[i]),
            _interval(resampled[:, i]),
            *_moments(null[:, i]),
        )
        for i, name in enumerate(("low", "mid", "high"))
    ]
    gap, gaps = float(means[2] - means[0]), null[:, 2] - null[:, 0]
    apart = _interval(resampled[:, 2] - resampled[:, 0])
    return Bands(bands, gap, apart, *_moments(gaps), _p(gap, gaps))


def _moments(values: Floats) -> tuple[float, float]:
    known = values[~np.isnan(values)]
    return (float(known.mean()), float(known.std())) if len(known) else (np.nan, np.nan)


def _interval(values: Floats) -> tuple[float, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return np.nan, np.nan
    low, high = np.quantile(known, [0.025, 0.975]).tolist()
    return low, high


def _p(observed: float, null: Floats) -> float:
    """One-sided permutation p-value, the observed order counted in."""
    if np.isnan(observed):
        return np.nan
    return float((1 + (null >= observed - 1e-12).sum()) / (1 + len(null)))


# ---- between requests, and prediction -----------------------------------------------------


def _between(data: Windows) -> Between:
    x, known = data.acceptance, data.known
    n, total = known.sum(axis=1), int(known.sum())
    means = np.nanmean(x, axis=1)
    between = float((n * (means - x[known].mean()) ** 2).sum())
    within = float(np.nansum((x - means[:, None]) ** 2))
    if between + within < 1e-12:
        return Between(np.nan, np.nan, np.nan, np.nan, np.nan)
    groups = len(n)
    ms_between, ms_within = between / (groups - 1), within / (total - groups)
    size = (total - float((n**2).sum()) / total) / (groups - 1)
    variance = max(0.0, (ms_between - ms_within) / size)
    noise = float(np.nanmean(data.noise)) if not np.isnan(data.noise[known]).any() else None
    f = ms_between / ms_within if ms_within > 0 else np.inf
    return Between(
        share=between / (between + within),
        icc=variance / (variance + ms_within),
        icc_noiseless=None if noise is None else _ratio(variance, max(0.0, ms_within - noise)),
        f=f,
        p=float(bench_module("scipy.stats").f.sf(f, groups - 1, total - groups)),
    )


def _ratio(part: float, rest: float) -> float:
    return part / (part + rest) if part + rest > 0 else np.nan


def predictive_r2(data: Windows) -> dict[str, float]:
    """1 − Σ(y − ŷ)² / Σ(y − ȳ)² of linear predictions of a window's acceptance, over 5 folds of
    whole requests (fewer if there are fewer); ȳ is the training folds' mean. `entropy` is the
    window's own, known before it is verified. NaN if acceptance never varies."""
    model_selection, linear, dummy = (
        bench_module(f"sklearn.{name}") for name in ("model_selection", "linear_model", "dummy")
    )
    x = data.acceptance
    r = credit(x)
    known = data.known & ~np.isnan(r)
    groups = np.broadcast_to(np.arange(len(x))[:, None], x.shape)[known]
    folds = model_selection.GroupKFold(min(FOLDS, len(x)))

    def errors(model: Any, *features: Floats) -> float:
        inputs = np.stack([f[known] for f in features], axis=1)
        guess = model_selection.cross_val_predict(model, inputs, x[known], groups=groups, cv=folds)
        return float(((x[known] - guess) ** 2).sum())

    overall = np.broadcast_to(np.nanmean(x, axis=1, keepdims=True), x.shape)
    predictors = {
        "credit": [r],
        "mean so far": [mean_so_far(x)],
        "oracle": [overall],
        "entropy": [data.entropy],
        "credit + entropy": [r, data.entropy],
    }
    base = errors(dummy.DummyRegressor(), r)
    return {
        name: 1 - errors(linear.LinearRegression(), *features) / base if base > 1e-12 else np.nan
        for name, features in predictors.items()
    }
