"""What calibrating a pair has found, as a file: thresholds, τ, the predictor, how sure they are.

A calibration belongs to one pair of models. Its thresholds were found safe on some rows of some
tasks; its predictor also knows a profile's times. Everything it was decided by is in it, and no
date, so that making it again gives the same bytes. Some are shipped, see `shipped`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Self

import msgspec

from e2sci.decoding.credit import CreditParams
from e2sci.decoding.predictor import NetworkPredictor
from e2sci.emulation.profile import Profile
from e2sci.evaluation.figures import keeps, speedup, summary
from e2sci.evaluation.methods import Setting, elastic_credit
from e2sci.evaluation.records import Record

VERSION = 1
MOST_RECORDED = 512
MAX_BYTES = 4 << 20


_RULES = {"js": "elastic", "regret": "elastic-regret"}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A method on the calibration rows. `threshold`: its T_base in nats; accuracies in [0, 1], the
    paired difference to the cloud alone with its 95 % interval, rows `lost` and `gained`;
    `speedup`: tokens/s over the cloud alone's; `keeps`: whether that counts as keeping the
    accuracy."""

    method: str
    threshold: float
    accuracy: float | None
    difference: float | None
    low: float | None
    high: float | None
    lost: int
    gained: int
    tokens_per_s: float
    speedup: float
    acceptance: float | None
    mean_tokens: float
    keeps: bool


def measure(
    name: str, threshold: float, own: Sequence[Record], cloud: Sequence[Record], delta: float
) -> Measured:
    """A method's records held against the cloud alone's."""
    figures = summary(own, cloud)
    return Measured(
        method=name,
        threshold=threshold,
        accuracy=figures["accuracy"],
        difference=figures["accuracy_diff"],
        low=figures["accuracy_diff_low"],
        high=figures["accuracy_diff_high"],
        lost=int(figures["lost"] or 0),
        gained=int(figures["gained"] or 0),
        tokens_per_s=figures["tokens_per_s"] or 0.0,
        speedup=speedup(own, cloud)[0],
        acceptance=figures["acceptance"],
        mean_tokens=figures["mean_tokens"] or 0.0,
        keeps=keeps(figures, margin=delta),
    )


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The predictor held against its alternatives on the calibration rows: ω = 1, and T = T_min for
    good. `gain`: tokens/s with it over those with ω = 1, with its 95 % interval."""

    passed: bool
    verdict: str
    predictor: Measured | None = None
    constant: Measured | None = None
    conservative: Measured | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """A calibration of `draft` and `target` (identities). Raises ValueError out of range.

    `tasks`: names; `first`, `last`: their rows; `profile`: the one the predictor and the speeds
    stand on; `delta`: accuracy that a safe threshold may lose, as a share; `tau`: what credit is
    centred on;
    `thresholds`: T_base in nats by rule, 0 where none was safe; `window`: the fastest constant W;
    `matched`, `recorded`: see `methods.Setting`; `measured`: what each rule did at each T;
    `predictor`: an .npz as decoding.predictor reads it, None to go without.
    """

    version: int = VERSION
    draft: str
    target: str
    tasks: list[str]
    first: int
    last: int
    max_tokens: int
    profile: str
    delta: float
    tau: float
    thresholds: dict[str, float]
    window: int | None
    matched: float | None
    recorded: list[float]
    measured: dict[str, list[Measured]]
    check: Check
    predictor: bytes | None
    command: str

    def __post_init__(self) -> None:
        nats = [*self.thresholds.values(), *self.recorded, self.matched or 0.0]
        if not all(0 <= t < math.inf for t in nats) or len(self.recorded) > MOST_RECORDED:
            raise ValueError(
                f"thresholds are 0 nats or more, finite, {MOST_RECORDED} recorded at most"
            )
        if not (0 <= self.tau <= 1 and 0 <= self.delta <= 1):
            raise ValueError("tau and delta must lie in [0, 1]")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file. Raises ValueError if it is no calibration of this version, or damaged."""
        try:
            data = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b""
        except OSError as error:
            raise ValueError(f"can't read the calibration {path}: {error.strerror}") from None
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: bytes, where: str) -> Self:
        """As `load`, from bytes that came from `where`."""
        try:
            version = msgspec.json.decode(data, type=_Version).version
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ValueError(
                f"{where} is no calibration; `e2sci calibrate --out FILE` writes one"
            ) from None
        if version != VERSION:
            raise ValueError(
                f"{where} is a calibration of version {version}, expected {VERSION}; calibrate anew"
            )
        try:
            found = msgspec.json.decode(data, type=cls)
            found.network()
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{where} is damaged: {error}") from None
        return found

    def save(self, path: Path) -> None:
        """Write the file at once. Raises ValueError when it can't be written."""
        part = path.with_name(path.name + ".part")
        try:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
            part.replace(path)
        except OSError as error:
            raise ValueError(f"can't write the calibration {path}: {error.strerror}") from None

    def require_pair(self, draft: str, target: str) -> None:
        """Raises ValueError unless the calibration is of these two models."""
        if (self.draft, self.target) != (draft, target):
            raise ValueError(
                f"calibration for another pair: {self.draft} and {self.target}, not {draft} and "
                f"{target}; make one with `e2sci calibrate`"
            )

    def constants(self, measure: str) -> CreditParams | None:
        """Credit and threshold for elastic on `measure`; None where it was not calibrated."""
        t = self.thresholds.get(_RULES.get(measure, ""))
        return None if t is None else elastic_credit(t, self.tau)

    def network(self) -> NetworkPredictor | None:
        """The predictor. Raises ValueError on a damaged one."""
        return None if self.predictor is None else NetworkPredictor.parse(self.predictor)

    def setting(self, profile: Profile) -> Setting:
        """What the methods are to be run with."""
        return Setting(
            profile,
            tau=self.tau,
            thresholds=self.thresholds,
            predictor=self.network(),
            matched=self.matched,
            recorded=self.recorded,
        )


class _Version(msgspec.Struct):
    version: int


def shipped(draft: str, target: str | None = None) -> Calibration | None:
    """The calibration of these two models (identities) that comes with the package, if any; without
    `target`, of this draft."""
    folder = resources.files("e2sci.evaluation") / "data"
    files = sorted(folder.iterdir(), key=lambda file: file.name) if folder.is_dir() else []
    for file in files:
        if file.name.endswith(".json"):
            found = Calibration.parse(file.read_bytes(), file.name)
            if found.draft == draft and target in (None, found.target):
                return found
    return None
