"""The network: it learns its labels, and is exported as it was trained."""

from __future__ import annotations

import numpy as np
import pytest

from calibrated import (
    fitted,
    some_labels,
    weights,
)
from e2sci.decoding.predictor import NetworkPredictor
from e2sci.evaluation import training


def test_the_exported_network_is_the_trained_one():
    network = NetworkPredictor.parse(weights())
    for state in some_labels().states[:50]:
        omega, width, accuracy = fitted().predict(state[None])[0]
        found = network(*state)
        assert found.omega == pytest.approx(np.log1p(np.exp(omega)), rel=1e-3)
        assert abs(found.window - (2 + 14 / (1 + np.exp(-width)))) <= 0.5 + 1e-3
        assert found.accuracy == pytest.approx(1 / (1 + np.exp(-accuracy)), abs=1e-4)


def test_the_network_learns_its_labels_the_same_every_time():
    network = NetworkPredictor.parse(weights())
    good, poor = network(0.95, 0.0), network(0.6, 0.0)
    assert (good.window, poor.window) == (16, 3)
    assert (good.omega, poor.omega) == pytest.approx((2.0, 0.5), rel=0.1)
    assert (good.accuracy, poor.accuracy) == pytest.approx((0.95, 0.6), abs=0.03)
    assert weights() == training.exported(training.fit(some_labels()))
