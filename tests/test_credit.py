"""Credit and the elastic threshold, worked out by hand."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2sci.decoding.credit import Credit, CreditParams, CreditState
from e2sci.decoding.predictor import Forecast

pytestmark = pytest.mark.filterwarnings("error")

quick = settings(max_examples=40, deadline=None)


def params(**changes) -> CreditParams:
    """Windows of 4, the threshold free to move at each of them by any amount."""
    plain = {"window": 4, "hysteresis": 0.0, "refresh": 1, "beta": 0.5, "tau": 0.5, "a": 0.2}
    return CreditParams(**{**plain, **changes})


def feed(credit: Credit, *windows: int, regret: float = 0.0) -> Credit:
    """Whole windows of 4 positions, so many of which are accepted."""
    for passed in windows:
        for i in range(4):
            credit.observe(accepted=i < passed, base=i < passed, regret=regret)
    return credit


class Scripted:
    """A predictor that always says the same and keeps what it was asked."""

    def __init__(self, forecast: Forecast) -> None:
        self.forecast = forecast
        self.asked: list[tuple[float, float]] = []

    def __call__(self, r: float, delta: float) -> Forecast:
        self.asked.append((r, delta))
        return self.forecast


# ---- parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"t_min": -0.1},
        {"t_min": 0.3, "t_base": 0.2},
        {"t_base": 0.4},
        {"t_max": float("nan")},
        {"beta": 0},
        {"beta": 1.1},
        {"tau": -0.1},
        {"tau": 1.1},
        {"a": -1},
        {"a": float("nan")},
        {"window": 0},
        {"window": 65},
        {"history": 0},
        {"history": 65},
        {"refresh": 0},
        {"budget": -1.0},
        {"budget": float("nan")},
        {"hysteresis": -0.1},
        {"hysteresis": float("nan")},
        {"safety": 1.1},
        {"safety": float("nan")},
    ],
)
def test_parameters_are_checked(bad):
    with pytest.raises(ValueError, match=next(iter(bad))) as error:
        CreditParams(**bad)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "bad",
    [
        {"windows": [0.5] * 65},
        {"windows": [1.1]},
        {"windows": [float("nan")]},
        {"judged": 65},
        {"judged": 2, "passed": 3},
        {"passed": -1},
        {"since": -1},
        {"threshold": -0.1},
        {"threshold": float("nan")},
        {"spent": -1.0},
        {"kept": -1},
    ],
)
def test_a_state_from_elsewhere_is_checked(bad):
    with pytest.raises(ValueError, match="credit state"):
        CreditState(**bad)
    frame = msgspec.msgpack.encode(
        [bad.get(name, default) for name, default in STATE_DEFAULTS.items()]
    )
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(frame, type=CreditState)


STATE_DEFAULTS = msgspec.structs.asdict(CreditState())


# ---- credit -----------------------------------------------------------------------------------


def test_credit_by_hand():
    credit = Credit(params())
    assert credit.value == 0.5
    values = [feed(credit, passed).value for passed in (4, 2, 0, 3)]
    # .5 → +½(1 − .5) → +½(.5 − .75) → +½(0 − .625) → +½(.75 − .3125)
    assert values == [0.75, 0.625, 0.3125, 0.53125]
    assert credit.state.windows == [1, 0.5, 0, 0.75]


def test_an_unfinished_window_does_not_count():
    credit = Credit(params())
    for _ in range(3):
        credit.observe(accepted=True, base=True)
    assert (credit.value, credit.state.judged, credit.state.passed) == (0.5, 3, 3)
    credit.observe(accepted=False, base=False)
    assert (credit.value, credit.state.judged, credit.state.passed) == (0.625, 0, 0)


def test_only_the_last_k_windows_count():
    long = feed(Credit(params(history=3)), 0, 0, 0, 0, 4, 2, 3)
    short = feed(Credit(params(history=3)), 4, 2, 3)
    assert long.value == short.value
    assert long.state.windows == [1, 0.5, 0.75]
    assert feed(Credit(params(history=4)), 0, 4, 2, 3).value != short.value


def test_observed_credit_ends_a_window_at_its_rejection():
    credit = Credit(params(source="observed"))
    for accepted in (True, False, True, True, True, True, False):
        credit.observe(accepted=accepted, base=False)
    # One of four accepted, then all four, then none: the paper's L_acc / W.
    assert credit.state.windows == [0.25, 1, 0]


def test_counterfactual_credit_ignores_what_a_loose_threshold_accepts():
    loose, tight = Credit(params()), Credit(params())
    paper = Credit(params(source="observed"))
    for i in range(40):
        base = i % 2 == 0
        loose.observe(accepted=True, base=base)
        tight.observe(accepted=base, base=base)
        paper.observe(accepted=True, base=base)
    assert loose.value == tight.value == 0.5
    assert loose.threshold == tight.threshold == 0.2
    assert paper.value > 0.95
    assert paper.threshold > 0.28


# ---- the threshold ----------------------------------------------------------------------------


def test_threshold_by_hand():
    credit = Credit(params())
    assert credit.threshold == 0.2
    thresholds = [feed(credit, passed).threshold for passed in (4, 2, 0, 3)]
    # T = .2 + .2 (r̂ − .5)
    assert thresholds == pytest.approx([0.25, 0.225, 0.1625, 0.20625])


def test_threshold_moves_equally_far_both_ways():
    up, down = feed(Credit(params()), 4, 3, 4), feed(Credit(params()), 0, 1, 0)
    assert up.threshold - 0.2 == pytest.approx(0.2 - down.threshold)
    assert up.threshold > 0.2


def test_threshold_is_clipped():
    assert feed(Credit(params(a=100)), 4).threshold == 0.35
    assert feed(Credit(params(a=100)), 0).threshold == 0.05
    assert feed(Credit(params(a=100, t_min=0.1, t_max=0.2)), 4).threshold == 0.2


def test_small_changes_do_not_move_the_threshold():
    credit = Credit(params(hysteresis=0.03))
    thresholds = [feed(credit, passed).threshold for passed in (4, 2, 2)]
    # It would be .25, .225, .2125; the second is too near to the first, the third is not.
    assert thresholds == pytest.approx([0.25, 0.25, 0.2125])


def test_the_threshold_rests_for_the_refresh_interval():
    credit = Credit(params(refresh=3, history=5))
    # Windows since the last move: it may first move at the third, and again at the sixth.
    moved = []
    for passed in (4, 4, 4, 0, 0, 0):
        before = credit.threshold
        moved.append(feed(credit, passed).threshold != before)
    assert moved == [False, False, True, False, False, True]


def test_a_constant_threshold_never_moves():
    credit = Credit(CreditParams.constant(0.7, window=4))
    feed(credit, *([4] * 20), *([0] * 20), regret=9.0)
    assert credit.threshold == 0.7
    assert 0 < credit.value < 0.2
    assert Credit(CreditParams.constant(0.0)).threshold == 0
    assert Credit(CreditParams.constant(50.0)).threshold == 50
    for bad in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="0 nats or more"):
            CreditParams.constant(bad)


def test_the_predictor_scales_the_step_and_suggests_a_window():
    predictor = Scripted(Forecast(omega=2.0, window=7))
    credit = Credit(params(), predictor=predictor)
    assert credit.suggested_window is None
    assert feed(credit, 4).threshold == pytest.approx(0.2 + 0.2 * 2 * 0.25)
    assert credit.suggested_window == 7
    feed(credit, 2)
    assert predictor.asked == [(0.75, 0.25), (0.625, -0.125)]


@pytest.mark.parametrize(("accuracy", "threshold"), [(0.79, 0.05), (0.81, 0.25), (None, 0.25)])
def test_a_doubtful_forecast_gives_the_conservative_threshold(accuracy, threshold):
    predictor = Scripted(Forecast(accuracy=accuracy))
    credit = feed(Credit(params(safety=0.8), predictor=predictor), 4)
    assert credit.threshold == pytest.approx(threshold)


# ---- the budget -------------------------------------------------------------------------------


def test_an_overspent_budget_tightens_until_it_recovers():
    credit = Credit(CreditParams(budget=0.1, window=64))
    credit.observe(accepted=True, base=True, regret=0.45)
    thresholds = []
    for _ in range(5):
        thresholds.append(credit.threshold)
        credit.observe(accepted=True, base=True)
    # .45 nats over 1, 2, 3, 4 tokens are too many, over 5 they are not.
    assert thresholds == [0.05, 0.05, 0.05, 0.05, 0.2]


def test_the_budget_counts_no_gains_and_not_before_anything_is_spent():
    credit = Credit(CreditParams(budget=0.0))
    assert credit.threshold == 0.2
    credit.observe(accepted=True, base=True, regret=-5.0)
    assert (credit.threshold, credit.state.spent) == (0.2, 0)
    credit.observe(accepted=True, base=True, regret=1e-3)
    assert credit.threshold == 0.05


def test_the_budget_does_not_loosen_a_tighter_threshold():
    credit = Credit(CreditParams(budget=0.0, t_min=0.1), state=CreditState(threshold=0.02))
    credit.observe(accepted=True, base=True, regret=1.0)
    assert credit.threshold == 0.02


def test_without_a_budget_regret_is_free():
    assert feed(Credit(params(a=0.0)), 4, regret=50.0).threshold == 0.2


# ---- moving house -----------------------------------------------------------------------------

positions = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.sampled_from([0.0, 0.05, 1.0])), max_size=80
)


@quick
@given(
    positions,
    positions,
    st.builds(
        CreditParams,
        window=st.integers(1, 8),
        history=st.integers(1, 6),
        refresh=st.integers(1, 3),
        hysteresis=st.sampled_from([0.0, 0.02]),
        source=st.sampled_from(["counterfactual", "observed"]),
        budget=st.sampled_from([None, 0.1]),
    ),
)
def test_a_state_goes_on_elsewhere_as_it_would_have_here(before, after, constants):
    here = Credit(constants)
    for accepted, base, regret in before:
        here.observe(accepted=accepted, base=base, regret=regret)
    sent = msgspec.msgpack.encode(here.state)
    there = Credit(constants, state=msgspec.msgpack.decode(sent, type=CreditState))
    for accepted, base, regret in after:
        for credit in (here, there):
            credit.observe(accepted=accepted, base=base, regret=regret)
        assert there.state == here.state
        assert (there.value, there.threshold) == (here.value, here.threshold)
        assert constants.t_min <= here.threshold <= constants.t_max
        assert 0 <= here.value <= 1
        assert len(here.state.windows) <= constants.history


def test_a_state_is_copied_not_shared():
    state = CreditState(threshold=0.2)
    feed(Credit(params(), state=state), 4, 4)
    assert state == CreditState(threshold=0.2)
    assert CreditState().windows == []


def test_a_state_is_small():
    credit = feed(Credit(CreditParams(budget=0.1)), *([3] * 50), regret=0.123)
    assert len(msgspec.msgpack.encode(credit.state)) < 90
