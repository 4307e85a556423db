"""Trains the predictor's network on labels, and writes it as decoding.predictor reads it."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np

from e2sci.decoding.distribution import Floats
from e2sci.decoding.predictor import MAX_WINDOW, MIN_WINDOW
from e2sci.evaluation.figures import bench_module
from e2sci.evaluation.sweep import Labels

HIDDEN = (32, 32, 32, 16)
"""Widths of the network's layers (ours)."""


def fit(made: Labels) -> Any:
    """A scikit-learn regressor from states to what the network's last layer should give, before
    its softplus and sigmoids; the same every time."""
    neural, compose, processing, pipeline = (
        bench_module(f"sklearn.{name}")
        for name in ("neural_network", "compose", "preprocessing", "pipeline")
    )
    network = neural.MLPRegressor(
        hidden_layer_sizes=HIDDEN, solver="lbfgs", alpha=1e-3, max_iter=300, random_state=0
    )
    scaled = pipeline.make_pipeline(processing.StandardScaler(), network)
    regressor = compose.TransformedTargetRegressor(scaled, transformer=processing.StandardScaler())
    width = (made.windows - MIN_WINDOW) / (MAX_WINDOW - MIN_WINDOW)
    targets = np.stack(
        [
            np.log(np.expm1(made.omega)),
            _logit(width, 0.02),
            _logit(made.accuracy, 1e-3),
        ],
        axis=1,
    )
    single = bench_module("threadpoolctl").threadpool_limits(1)  # sums in one order everywhere
    with single, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it could go on improving
        return regressor.fit(made.states, targets)


def _logit(share: Floats, least: float) -> Floats:
    clipped = np.clip(share, least, 1 - least)
    return np.asarray(np.log(clipped / (1 - clipped)))


def exported(fitted: Any) -> bytes:
    """The fitted network as the .npz that decoding.predictor reads; both scalers are folded into
    its first and last layer."""
    inputs, network = (step for _, step in fitted.regressor_.steps)
    outputs = fitted.transformer_
    weights, biases = list(network.coefs_), list(network.intercepts_)
    biases[0] = biases[0] - (inputs.mean_ / inputs.scale_) @ weights[0]
    weights[0] = weights[0] / inputs.scale_[:, None]
    weights[-1] = weights[-1] * outputs.scale_
    biases[-1] = biases[-1] * outputs.scale_ + outputs.mean_
    arrays = {f"w{i}": w.astype(np.float32) for i, w in enumerate(weights)}
    arrays |= {f"b{i}": b.astype(np.float32) for i, b in enumerate(biases)}
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()
