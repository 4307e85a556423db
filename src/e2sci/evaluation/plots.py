"""Figures of the credit analysis and of the planner: PNG or SVG, by the file's suffix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from e2sci.evaluation.figures import bench_module
from e2sci.evaluation.inertia import Inertia, Lag
from e2sci.evaluation.plan import Plan, Speeds

SUFFIXES = (".png", ".svg")


def check_picture(path: Path) -> None:
    """Before long work: raises ValueError unless `path` names a kind of picture that can be
    written, RuntimeError without the bench extra."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is no picture; its name should end in {' or '.join(SUFFIXES)}")
    bench_module("matplotlib")


@contextmanager
def figure(path: Path, inches: tuple[float, float]) -> Iterator[Any]:
    """A matplotlib Figure that is written to `path` behind the block; remaking gives the same
    bytes. Raises ValueError on another suffix or an unwritable path, RuntimeError without the bench
    extra."""
    check_picture(path)
    matplotlib = bench_module("matplotlib")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "e2sci", "font.size": 11})
        made = bench_module("matplotlib.figure").Figure(figsize=inches, layout="constrained")
        yield made
        try:
            made.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise ValueError(f"can't write {path}: {error.strerror}") from None


# ---- credit inertia -----------------------------------------------------------------------


def plot_inertia(results: Sequence[Inertia], path: Path) -> None:
    """A row of three panels a trace: autocorrelation, acceptance by band of credit, R²."""
    with figure(path, (13, 4.2 * len(results))) as whole:
        rows = whole.subfigures(len(results), 1, squeeze=False)[:, 0]
        for row, result in zip(rows, results, strict=True):
            row.suptitle(
                f"{result.name}: {result.signal}, windows of {result.window}, "
                f"{result.requests} requests"
            )
            correlation, bands, prediction = row.subplots(1, 3)
            _lags(correlation, result.lags)
            _bands(bands, result)
            _r2(prediction, result.r2)


def _lags(axes: Any, lags: list[Lag]) -> None:
    x = [lag.lag for lag in lags]
    null, sd = (np.array([getattr(lag, name) for lag in lags]) for name in ("null", "null_sd"))
    axes.fill_between(x, null - 2 * sd, null + 2 * sd, color="0.85", label="shuffled, ± 2 sd")
    axes.plot(x, null, color="0.5", linestyle="--")
    axes.plot(x, [lag.observed for lag in lags], "o-", label="observed")
    axes.set(xlabel="lag (windows)", ylabel="autocorrelation within requests")
    _legend_below(axes)


def _bands(axes: Any, result: Inertia) -> None:
    """Fixed bands left, terciles right; null beside each."""
    starts = (0, 4)
    for start, (cut, bands) in zip(starts, result.bands.items(), strict=True):
        x = np.arange(start, start + 3)
        means, null, sd = (
            np.array([getattr(band, name) for band in bands.bands])
            for name in ("mean", "null", "null_sd")
        )
        low, high = np.array([band.interval for band in bands.bands]).T
        first = start == starts[0]
        axes.vlines(x - 0.12, low, high, color="C0")
        axes.plot(x - 0.12, means, "o", color="C0", label="observed, 95 %" if first else None)
        label = "shuffled, ± 2 sd" if first else None
        axes.errorbar(x + 0.12, null, 2 * sd, fmt="s", color="0.5", mfc="none", label=label)
        axes.text(start + 1, 1.02, cut, transform=axes.get_xaxis_transform(), ha="center")
    names = [band.name for bands in result.bands.values() for band in bands.bands]
    axes.set_xticks([start + i for start in starts for i in range(3)], names)
    axes.set(xlabel="credit r̂ before the window", ylabel="acceptance of the window")
    _legend_below(axes)


def _legend_below(axes: Any) -> None:
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _r2(axes: Any, r2: dict[str, float]) -> None:
    axes.barh(list(r2), list(r2.values()))
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.invert_yaxis()
    axes.set(xlabel="R² of the next window, unseen requests")


# ---- the plan -----------------------------------------------------------------------------

_STYLES = {
    "cloud": ("cloud alone", "k-"),
    "sync": ("sync SD, W = {window}", "C0--"),
    "sync_best": ("sync SD, best W", "C0-"),
    "pipelined": ("pipelined", "C1-"),
    "pipelined_fill": ("pipelined with fill, at best", "C1:"),
    "colocated": ("SD with the draft in the cloud", "C2-."),
}


def plot_plan(plan: Plan, curve: Sequence[tuple[float, Speeds]], path: Path) -> None:
    """Speed of each mode over the round trip; `curve`: (RTT ms, speeds), see `plan.over_rtt`."""
    with figure(path, (10, 5)) as whole:
        axes = whole.subplots()
        rtts = [rtt for rtt, _ in curve]
        for mode, (label, style) in _STYLES.items():
            speeds = [getattr(speeds, mode) for _, speeds in curve]
            axes.plot(rtts, speeds, style, label=label.format(window=plan.window))
        axes.axvline(plan.rtt_ms, color="0.6", linewidth=0.8)
        axes.text(plan.rtt_ms, 1.01, "here", transform=axes.get_xaxis_transform(), ha="center")
        even = plan.break_even.rtt_ms
        if even is not None and even <= rtts[-1]:
            axes.plot(even, plan.speeds.cloud, "kX", label=f"break-even, {even:.0f} ms")
        axes.set(xlabel="round trip (ms)", ylabel="tokens/s", xlim=(0, rtts[-1]))
        axes.set_ylim(bottom=0)
        axes.set_title(f"{plan.profile}: acceptance {plan.acceptance:.3g}", pad=18)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
