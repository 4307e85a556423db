"""The predictor's network, its file, and what it refuses."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2sci.decoding.predictor import (
    LAYERS,
    MAX_WINDOW,
    MIN_WINDOW,
    ConstantPredictor,
    Forecast,
    NetworkPredictor,
)

pytestmark = pytest.mark.filterwarnings("error")

quick = settings(max_examples=40, deadline=None)
WIDTHS = [2, 32, 32, 32, 16]


def layers(seed: int = 0, outputs: int = 2, scale: float = 1.0) -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(seed)
    return [
        (
            (rng.normal(0, scale, (rows, columns)) / np.sqrt(rows)).astype(np.float32),
            rng.normal(0, scale, columns).astype(np.float32),
        )
        for rows, columns in zip(WIDTHS, [*WIDTHS[1:], outputs], strict=True)
    ]


def named(weights) -> dict[str, np.ndarray]:
    arrays = {f"w{i}": w for i, (w, _) in enumerate(weights)}
    return arrays | {f"b{i}": b for i, (_, b) in enumerate(weights)}


@quick
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3]), st.floats(0, 1), st.floats(-1, 1))
def test_forward_pass(seed, outputs, r, delta):
    weights = layers(seed, outputs)
    x = np.array([r, delta])
    for i, (w, b) in enumerate(weights):
        x = np.array([x @ w[:, j] + b[j] for j in range(w.shape[1])], dtype=np.float64)
        if i < LAYERS - 1:
            x[x < 0] = 0
    found = NetworkPredictor(weights)(r, delta)
    assert found.omega == pytest.approx(np.log1p(np.exp(x[0])), rel=1e-3, abs=1e-4)
    assert found.window is not None
    assert abs(found.window - (2 + 14 / (1 + np.exp(-x[1])))) <= 0.5 + 1e-3
    if outputs == 2:
        assert found.accuracy is None
    else:
        assert found.accuracy == pytest.approx(1 / (1 + np.exp(-x[2])), abs=1e-4)


@quick
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(-1, 1), st.sampled_from([1, 50, 2e3]))
def test_forecasts_stay_in_range(seed, r, delta, scale):
    found = NetworkPredictor(layers(seed, 3, scale))(r, delta)
    assert 0 < found.omega < np.inf
    assert found.window in range(MIN_WINDOW, MAX_WINDOW + 1)
    assert 0 <= found.accuracy <= 1


def test_the_ends_of_the_window_are_reached():
    for bias, window in [(-50, MIN_WINDOW), (50, MAX_WINDOW), (0, 9)]:
        weights = [(np.zeros_like(w), np.zeros_like(b)) for w, b in layers()]
        weights[-1][1][1] = bias
        found = NetworkPredictor(weights)(0.5, 0.0)
        assert found.window == window
        assert found.omega == pytest.approx(np.log(2), abs=1e-5)


def test_the_default_has_no_opinion():
    assert ConstantPredictor()(0.3, -0.1) == Forecast(omega=1.0, window=None, accuracy=None)


# ---- files ------------------------------------------------------------------------------------


def test_a_file_round_trips(tmp_path):
    path = tmp_path / "g.npz"
    weights = layers(4, 3)
    np.savez_compressed(path, **named(weights))
    assert NetworkPredictor.load(path)(0.4, 0.1) == NetworkPredictor(weights)(0.4, 0.1)


def changed(**arrays) -> dict[str, np.ndarray]:
    return named(layers()) | arrays


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def lacking(name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in named(layers()).items() if key != name}


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        (lacking("w0"), "expected arrays"),
        (lacking("b4"), "expected arrays"),
        ({}, "expected arrays"),
        (changed(w0=zeros(3, 32)), "layer 0"),
        (changed(w2=zeros(32, 31)), "layer 2"),
        (changed(b1=zeros(31)), "layer 1"),
        (changed(w1=zeros(32)), "layer 1"),
        (changed(w3=np.float32(1)), "layer 3"),
        (changed(w4=zeros(16, 4), b4=zeros(4)), "2 or 3 values"),
        (changed(w4=zeros(16, 1), b4=zeros(1)), "2 or 3 values"),
        (changed(b3=np.full(16, np.nan, np.float32)), "layer 3"),
        (changed(w1=np.full((32, 32), -np.inf, np.float32)), "layer 1"),
        (changed(w1=np.zeros((32, 32))), "float64"),
        (changed(w1=np.full((32, 32), 1e30, np.float32)), "layer 1"),
        (changed(b1=np.array(["x"] * 32)), "layer 1"),
        (changed(b1=np.full(32, 1j)), "layer 1"),
        (changed(b1=np.array([{}] * 32, dtype=object)), "expected arrays"),
    ],
)
def test_other_arrays_are_refused(tmp_path, arrays, complaint):
    path = tmp_path / "g.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=complaint):
        NetworkPredictor.load(path)


def archive(data: bytes) -> bytes:
    """An .npz whose w0 is `data`."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("w0.npy", data)
    return out.getvalue()


def header(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def packed(**arrays) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def single(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


WHOLE = packed(**named(layers()))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        b"\x80\x04N.",
        b"PK\x03\x04 and no more",
        WHOLE[: len(WHOLE) // 2],
        single(np.zeros(4)),
        archive(b""),
        archive(header("(2, 32)")),
        archive(header("(1000000000000, 1000)")),
        archive(header("(10" + "0" * 30 + ",)")),
        archive(header("what")),
        packed(**named(layers()), more=np.zeros(600_000)),
        bytes(5 << 20),
    ],
    ids=[
        "empty",
        "text",
        "pickle",
        "zip-head",
        "cut-off",
        "npy",
        "hollow",
        "no-data",
        "vast",
        "vaster",
        "header",
        "bomb",
        "oversized",
    ],
)
def test_other_files_are_refused(tmp_path, data):
    path = tmp_path / "g.npz"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"not a predictor") as error:
        NetworkPredictor.load(path)
    assert "\n" not in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255), st.booleans())
def test_a_damaged_file_is_refused_or_still_a_predictor(tmp_path_factory, at, flip, cut):
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    data = bytearray(WHOLE[:at] if cut else WHOLE)
    if not cut:
        data[at] ^= flip
    path.write_bytes(data)
    try:
        found = NetworkPredictor.load(path)
    except ValueError:
        return
    assert found(0.5, 0.0).omega > 0


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        NetworkPredictor.load(tmp_path / "none.npz")


def test_a_network_of_another_depth_is_refused():
    with pytest.raises(ValueError, match="5 layers, not 4"):
        NetworkPredictor(layers()[:4])
