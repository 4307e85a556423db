"""The predictor g_θ(r̂, Δr̂) → (ω > 0, W): how strongly credit moves the threshold, and the window.

The paper's is a five-layer feed-forward network trained offline; its sizes are not published.
Ours: 2-32-32-32-16-2, ReLU between, ω = softplus, W = 2 + 14·sigmoid, optionally with a third
output, the estimated accuracy as sigmoid. Until one is calibrated, `ConstantPredictor` (ω = 1, no
opinion on W) stands in, which makes T a plain linear function of credit.

Weights are an .npz file of arrays w0, b0 … w4, b4 (float32; wi of shape (inputs, outputs)).
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

LAYERS = 5
MIN_WINDOW, MAX_WINDOW = 2, 16
_MAX_BYTES = 4 << 20
_MAX_WEIGHT = 1e4  # far beyond any trained one; five layers of such still can't overflow


@dataclass(frozen=True)
class Forecast:
    """ω > 0; W in 2..16 or None (no opinion); estimated accuracy in [0, 1] or None."""

    omega: float = 1.0
    window: int | None = None
    accuracy: float | None = None


class Predictor(Protocol):
    """g_θ: credit r̂ in [0, 1] and its change Δr̂ in [-1, 1] to a forecast."""

    def __call__(self, r: float, delta: float) -> Forecast: ...


class ConstantPredictor:
    """ω = 1 and no opinion on the window: the uncalibrated default."""

    def __call__(self, r: float, delta: float) -> Forecast:
        return Forecast()


class NetworkPredictor:
    """The five-layer network. `weights`: LAYERS pairs (w, b); raises ValueError on wrong ones."""

    def __init__(self, weights: list[tuple[NDArray[np.float32], NDArray[np.float32]]]) -> None:
        if len(weights) != LAYERS:
            raise ValueError(f"a predictor has {LAYERS} layers, not {len(weights)}")
        width = 2
        for i, (w, b) in enumerate(weights):
            if w.ndim != 2 or b.shape != (w.shape[1],) or w.shape[0] != width:
                raise ValueError(f"layer {i} of the predictor has shapes {w.shape} and {b.shape}")
            if not w.dtype == b.dtype == np.float32:
                raise ValueError(f"layer {i} of the predictor is {w.dtype}, {b.dtype}, not float32")
            if not all((np.abs(values) <= _MAX_WEIGHT).all() for values in (w, b)):
                raise ValueError(f"layer {i} of the predictor holds values beyond ±{_MAX_WEIGHT:g}")
            width = w.shape[1]
        if width not in (2, 3):
            raise ValueError(f"a predictor gives 2 or 3 values, not {width}")
        self._weights = weights

    @classmethod
    def load(cls, path: Path) -> NetworkPredictor:
        """Read an .npz file. Raises ValueError if it is no predictor, OSError if unreadable."""
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path} is over {_MAX_BYTES} bytes: not a predictor")
        return cls.parse(path.read_bytes(), str(path))

    @classmethod
    def parse(cls, data: bytes, where: str = "the predictor") -> NetworkPredictor:
        """As `load`, from bytes that came from `where`."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                if sum(entry.file_size for entry in arrays.zip.infolist()) > _MAX_BYTES:
                    raise ValueError("too large once unpacked")
                weights = [(arrays[f"w{i}"], arrays[f"b{i}"]) for i in range(LAYERS)]
        except Exception as error:  # a damaged archive makes the readers raise almost anything
            raise ValueError(
                f"{where} is not a predictor: expected arrays w0, b0 … w4, b4"
            ) from error
        return cls(weights)

    def __call__(self, r: float, delta: float) -> Forecast:
        x = np.array([r, delta], dtype=np.float32)
        for i, (w, b) in enumerate(self._weights):
            x = x @ w + b
            if i < LAYERS - 1:
                x = np.maximum(x, 0)
        window = MIN_WINDOW + (MAX_WINDOW - MIN_WINDOW) * _sigmoid(float(x[1]))
        accuracy = _sigmoid(float(x[2])) if len(x) > 2 else None
        return Forecast(float(np.logaddexp(0, x[0])) + 1e-6, round(window), accuracy)


def _sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-np.clip(x, -60, 60))))
