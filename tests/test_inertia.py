"""Credit inertia: sequences whose truth is known, known values, and the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from e2sci.cli import main
from e2sci.decoding.credit import Credit, CreditParams, CreditState
from e2sci.evaluation import inertia as analysis
from e2sci.evaluation.inertia import LAGS, Inertia, analyse
from e2sci.evaluation.plots import plot_inertia
from e2sci.evaluation.traces import RequestTrace, Trace, TraceHeader
from e2sci.evaluation.windows import BETA, HISTORY, credit, mean_so_far, parse_signal, windows_of

W = 5
REQUESTS, WINDOWS = 40, 40


def trace_of(agreements: list[np.ndarray], **series: list[np.ndarray]) -> Trace:
    """A trace whose draft agrees where `agreements` says so; `series`: other fields by request."""
    header = TraceHeader(draft="s", target="l", task="made up", first=0, last=9, max_tokens=999)
    requests = []
    for row, agreed in enumerate(agreements):
        n = len(agreed)
        values = {name: [0.0] * n for name in ("js", "js_fsd", "tv", "regret")}
        values |= {name: [0.0] * n for name in ("entropy", "target_entropy")}
        values |= {name: given[row].tolist() for name, given in series.items()}
        requests.append(
            RequestTrace(
                row=row,
                id=str(row),
                prompt_tokens=1,
                tokens=[1] * n,
                drafts=np.where(agreed, 1, 2).tolist(),
                p=[b""] * n,
                q=[b""] * n,
                **values,
            )
        )
    return Trace(header, requests)


def drawn(chances: np.ndarray, random: np.random.Generator) -> list[np.ndarray]:
    """Agreement at W positions a window, by each window's chance; shape (requests, windows)."""
    return list(random.random((len(chances), chances.shape[1] * W)) < np.repeat(chances, W, axis=1))


def independent(random: np.random.Generator) -> np.ndarray:
    return np.full((REQUESTS, WINDOWS), 0.8)


def modulated(random: np.random.Generator) -> np.ndarray:
    """Chance by an AR(1) process, the same for all requests."""
    z = random.normal(size=(REQUESTS, WINDOWS))
    for t in range(1, WINDOWS):
        z[:, t] = 0.8 * z[:, t - 1] + 0.6 * z[:, t]
    return 1 / (1 + np.exp(-1.0 - 1.5 * z))


def differing(random: np.random.Generator) -> np.ndarray:
    """One chance a request, from .3 to 1."""
    return np.repeat(np.linspace(0.3, 1, REQUESTS)[:, None], WINDOWS, axis=1)


def analysed(make, seed: int = 0, **options) -> Inertia:
    random = np.random.default_rng(seed)
    return analyse(trace_of(drawn(make(random), random)), "t", permutations=200, **options)


# ---- sequences whose truth is known -------------------------------------------------------


def test_nothing_is_found_where_nothing_is():
    found = analysed(independent)
    assert abs(found.lags[0].excess) < 3 * found.lags[0].null_sd
    assert found.between.icc < 0.05
    assert found.between.p > 0.01
    assert max(found.r2.values()) < 0.05
    bands = found.bands["terciles"]
    assert abs(bands.gap - bands.gap_null) < 3 * bands.gap_null_sd


def test_p_values_are_uniform_under_the_null():
    random = np.random.default_rng(1)
    ps = []
    for _ in range(100):
        x = random.binomial(W, 0.8, size=(8, 12)) / W
        null = [analysis.autocorrelation(analysis._shuffled(x, random))[0] for _ in range(50)]
        ps.append(analysis._p(float(analysis.autocorrelation(x)[0]), np.array(null)))
    assert 0.4 < np.mean(ps) < 0.6
    assert np.mean(np.array(ps) < 0.1) < 0.2
    assert np.mean(np.array(ps) > 0.9) > 0.02


def test_inertia_is_found():
    found = analysed(modulated)
    one = found.lags[0]
    assert one.p < 0.01
    assert one.excess > 0.2
    assert one.excess > found.lags[4].excess  # it fades
    for bands in found.bands.values():
        assert bands.p < 0.01
        assert bands.gap_interval[0] > bands.gap_null + 3 * bands.gap_null_sd
        assert [b.mean for b in bands.bands] == sorted(b.mean for b in bands.bands)
    assert found.r2["credit"] > found.r2["mean so far"] > 0
    assert "inertia:" in found.verdict
    assert not found.verdict.startswith("no")


def test_differing_requests_are_not_taken_for_inertia():
    found = analysed(differing)
    assert abs(found.lags[0].observed) < 0.1
    assert abs(found.lags[0].excess) < 3 * found.lags[0].null_sd
    assert found.between.icc > 0.4
    assert found.between.icc_noiseless > 0.9  # the rest of the variance is the windows' own noise
    assert found.between.p < 1e-6
    bands = found.bands["terciles"]
    assert bands.gap > 0.3  # history does tell, but only which request it is
    assert abs(bands.gap - bands.gap_null) < 3 * bands.gap_null_sd
    assert found.r2["oracle"] > found.r2["mean so far"] > found.r2["credit"] > 0.3


def test_entropy_is_credited_with_what_it_tells():
    random = np.random.default_rng(2)
    chances = random.uniform(0.2, 1, size=(REQUESTS, WINDOWS))
    entropy = list(np.repeat(1 - chances, W, axis=1))
    found = analyse(trace_of(drawn(chances, random), entropy=entropy), "t", permutations=20)
    assert found.r2["entropy"] > 0.4
    assert found.r2["credit"] < 0.05
    assert found.r2["credit + entropy"] == pytest.approx(found.r2["entropy"], abs=0.03)


def test_a_seed_gives_the_same_again():
    assert analysed(modulated, seed=3) == analysed(modulated, seed=3)


# ---- known values -------------------------------------------------------------------------


def test_autocorrelation_of_an_alternation():
    x = np.array([[0.0, 1.0] * 6, [0.5, 0.5] + [np.nan] * 10])
    expected = [(-1.0) ** lag for lag in range(1, LAGS + 1)]
    got = analysis.autocorrelation(x[:1])
    assert got == pytest.approx(expected)
    diluted = analysis.autocorrelation(x)  # two windows more, at the mean; one pair more at lag 1
    assert diluted[0] == pytest.approx(-(11 / 12) / (12 / 14))


def test_autocorrelation_without_pairs_or_variance():
    assert np.isnan(analysis.autocorrelation(np.ones((3, 12)))).all()
    short = analysis.autocorrelation(np.array([[0.0, 1.0, 0.0]]))
    assert np.isnan(short[2:]).all()
    assert not np.isnan(short[:2]).any()


shares = st.lists(st.integers(0, 5).map(lambda n: n / 5), min_size=1, max_size=9)


@given(shares)
def test_credit_is_that_of_decoding_without_its_start(windows):
    start = 0.6
    state = CreditState(windows=windows[-HISTORY:], threshold=0.2)
    theirs = Credit(CreditParams(beta=BETA, history=HISTORY, tau=start), state=state).value
    ours = credit(np.array([[*windows, 0.0]]))[0, -1]
    kept = (1 - BETA) ** min(len(windows), HISTORY)
    assert kept * start + (1 - kept) * ours == pytest.approx(theirs)


@given(st.lists(shares, min_size=2, max_size=5), st.integers(0, 99))
def test_a_shuffle_keeps_each_request(rows, seed):
    x = np.full((len(rows), max(map(len, rows))), np.nan)
    for i, row in enumerate(rows):
        x[i, : len(row)] = row
    shuffled = analysis._shuffled(x, np.random.default_rng(seed))
    for before, after in zip(rows, shuffled, strict=True):
        assert sorted(after[: len(before)]) == sorted(before)
        assert np.isnan(after[len(before) :]).all()


def test_windows_and_what_is_left_out():
    agreed = [
        np.array([True] * 5 + [False] * 10 + [True] * 4),
        np.ones(15, bool),
        np.ones(14, bool),
    ]
    data = windows_of(trace_of(agreed), parse_signal("agree"), 5)
    assert data.acceptance.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert data.left_out == 1
    four = windows_of(trace_of(agreed), parse_signal("agree"), 4)
    assert four.acceptance[0].tolist() == [1, 0.25, 0, 0.25]
    assert four.noise[0, 1] == pytest.approx(0.25 * 0.75 / 3)
    assert np.isnan(four.acceptance[1, 3])


def test_too_few_requests_and_wrong_windows():
    one = trace_of([np.ones(30, bool), np.ones(9, bool)])
    with pytest.raises(ValueError, match="1 of 2 have 3 windows of 5 positions"):
        analyse(one, "t")
    with pytest.raises(ValueError, match="window is 0"):
        analyse(one, "t", window=0)


def test_signals():
    agreed, js, tv = (
        np.array([True, False, False]),
        np.array([0.4, 0.1, 0.3]),
        np.array([0, 1, 0.5]),
    )
    request = trace_of([agreed], js=[js], tv=[tv]).requests[0]
    for spec, expected in (
        ("agree", [1, 0, 0]),
        ("accept:0.2", [1, 1, 0]),
        ("accept:0", [1, 0, 0]),
        ("tv", [1, 0, 0.5]),
    ):
        assert parse_signal(spec)(request).tolist() == expected
    for spec in ("agreed", "accept", "accept:x", "accept:-1", "accept:nan", "tv:1", ""):
        with pytest.raises(ValueError, match="expected agree, tv or accept:T"):
            parse_signal(spec)


def test_bands_hold_every_window_with_a_history():
    found = analysed(modulated)
    for bands in found.bands.values():
        assert sum(b.windows for b in bands.bands) == found.windows - found.requests
        for band in bands.bands:
            assert band.interval[0] <= band.mean <= band.interval[1]
    fixed = found.bands["fixed"].bands
    assert [(b.low, b.high) for b in fixed] == [(0, 0.5), (0.5, 0.8), (0.8, 1)]


def test_the_mean_by_band_is_what_follows_such_a_history():
    x = np.array([[0.0, 0.2, 1.0, 1.0], [1.0, 0.8, 0.0, np.nan]])
    r = credit(x)
    sums, counts = analysis._banded(x, r, np.array([0.5, 1.0]))
    expected = [[], [], []]
    for i, row in enumerate(x):
        for t in range(1, len(row)):
            if not np.isnan(row[t]):
                expected[0 if r[i, t] < 0.5 else 1 if r[i, t] < 1 else 2].append(row[t])
    assert counts.sum(axis=0).tolist() == [len(e) for e in expected]
    assert sums.sum(axis=0) == pytest.approx([sum(e) for e in expected])
    assert r[1, 1] == 1  # all there is before the second window is the first
    assert len(expected[2]) == 1  # an edge belongs to the band above it


def test_the_mean_so_far_knows_only_what_was():
    x = np.array([[0.0, 1.0, 0.5, 0.9], [1.0, 0.4, 0.0, np.nan]])
    means = mean_so_far(x)
    assert np.isnan(means[:, 0]).all()
    assert means[:, 1:3].tolist() == [[0, 0.5], [1, 0.7]]
    assert means[0, 3] == 0.5


def test_a_prediction_has_not_seen_its_request():
    found = analyse(trace_of([np.ones(50, bool), np.zeros(50, bool)]), "t", permutations=20)
    assert found.r2["credit"] == pytest.approx(0)  # one request never varies: nothing to learn


def test_single_positions_have_no_noise_to_take_out():
    found = analysed(differing, window=1)
    assert found.between.icc_noiseless is None
    assert found.window == 1


# ---- the command --------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    random = np.random.default_rng(4)
    trace_of(drawn(modulated(random)[:12], random)).save(tmp_path / "sums.jsonl")
    return tmp_path / "sums.jsonl"


def test_json(recorded):
    out = CliRunner().invoke(main, ["inertia", str(recorded), "--permutations", "50", "--json"])
    assert out.exit_code == 0, out.output
    (one,) = json.loads(out.output)
    assert (one["name"], one["requests"], one["window"]) == ("sums", 12, 5)
    assert set(one) == set(Inertia.__struct_fields__)
    assert set(one["bands"]) == {"fixed", "terciles"}
    assert set(one["r2"]) == {"credit", "mean so far", "oracle", "entropy", "credit + entropy"}
    assert len(one["lags"]) == LAGS


def test_text_says_what_was_found(recorded):
    out = CliRunner().invoke(main, ["inertia", str(recorded), "--permutations", "50"])
    assert out.exit_code == 0, out.output
    assert "→ inertia: windows in a row correlate by" in out.output
    assert "12 requests (0 too short)" in out.output


def test_acceptance_that_never_varies_has_no_correlation(tmp_path):
    path = tmp_path / "all.jsonl"
    trace_of([np.ones(30, bool)] * 4).save(path)
    picture = tmp_path / "all.png"
    command = [str(path), "--permutations", "20"]
    out = CliRunner().invoke(main, ["inertia", *command, "--json", "--plot", str(picture)])
    assert out.exit_code == 0, out.output
    (one,) = json.loads(out.output)
    assert one["lags"][0]["observed"] is None
    assert one["between"]["icc"] is None
    assert one["r2"]["credit"] is None
    assert CliRunner().invoke(main, ["inertia", *command]).exit_code == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_figures_are_the_same_again(tmp_path):
    found = analysed(modulated)
    for name in ("a.svg", "b.svg"):
        plot_inertia([found, found], tmp_path / name)
    picture = (tmp_path / "a.svg").read_bytes()
    assert picture == (tmp_path / "b.svg").read_bytes()
    assert b"<dc:date>" not in picture


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--signal", "agreed"], "no signal 'agreed'"),
        (["--plot", "figure.pdf"], "should end in .png or .svg"),
        (["--window", "100"], "too few requests"),
        (["nowhere.jsonl"], "can't read the trace nowhere.jsonl"),
    ],
)
def test_mistakes_are_one_line(recorded, extra, words):
    out = CliRunner().invoke(main, ["inertia", str(recorded), "--permutations", "20", *extra])
    assert out.exit_code == 2
    assert words in out.output
    assert out.output.count("\n") == 1


def test_without_the_extra_it_says_so(recorded, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.model_selection", None)
    out = CliRunner().invoke(main, ["inertia", str(recorded), "--permutations", "20"])
    assert out.exit_code == 2
    assert 'pip install "e2sci[bench]"' in out.output
