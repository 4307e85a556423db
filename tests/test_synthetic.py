"""The synthetic engine refuses what makes no sense, as the others do, before anything is fed."""

from __future__ import annotations

import pytest

from e2sci.engines.base import ContextFull, Step
from e2sci.engines.synthetic import REAL_VOCAB, Synthetic, SyntheticConfig


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        ([Step(2, [1])], ValueError, "sequence 2 is out of range; slots: 2"),
        ([Step(-1, [1])], ValueError, "sequence -1 is out of range"),
        ([Step(0, [REAL_VOCAB])], ValueError, f"ids lie below {REAL_VOCAB}"),
        ([Step(0, [1], 2)], ValueError, "2 outputs asked of 1 tokens"),
        ([Step(1, [1]), Step(1, [2])], ValueError, "a sequence occurs twice"),
        ([Step(1, [1]), Step(0, [1] * 7)], ContextFull, r"2 \+ 7 tokens are more than .* of 8"),
    ],
)
def test_steps_that_make_no_sense(steps, error, message):
    engine = Synthetic(SyntheticConfig(context=8), slots=2)
    engine.forward([Step(0, [5, 6])])
    with pytest.raises(error, match=message):
        engine.forward(steps)
    assert [engine.length(0), engine.length(1)] == [2, 0]
