"""Traces: what both models say along the target's own greedy text, position by position.

One pass of each model over a set of requests is enough to replay any rule, threshold and window
afterwards, and to study where the draft is right. A trace is a JSON Lines file: a header (kind,
version, the pair, the task and its rows), then one request a line, appended as it is finished. A
line cut off by an interruption is dropped when the file is read and overwritten when it is resumed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from e2sci.decoding.divergence import LN2

VERSION = 1
MAX_BYTES = 1 << 30
"""A trace is read whole; 400 positions take about 80 kB."""

MOST = 1e6
"""Nats, in place of infinity, which JSON has no number for."""

_ROUNDING = 1e-6
_BOUNDS = {
    "js": LN2,
    "js_fsd": np.inf,
    "tv": 1.0,
    "regret": np.inf,
    "entropy": np.inf,
    "target_entropy": np.inf,
}

Bools = NDArray[np.bool_]


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="e2sci-trace"):
    """Where a trace comes from. `draft`, `target`: identities of the models; `first`, `last`: the
    rows of `task` that were asked for; `max_tokens`: positions of a request at most."""

    draft: str
    target: str
    task: str
    first: int
    last: int
    max_tokens: int
    version: int = VERSION


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One request: n ≥ 1 positions along the target's greedy text, EOS included if reached.

    `tokens`: the target's picks y; `drafts`: the draft's picks x at the same positions. In nats:
    `js`, `js_fsd`, `regret` = log p(y) − log p(x), `entropy` of the draft, `target_entropy`; `tv`
    in [0, 1]; infinite values become MOST. `p`, `q`: sketches of target and draft (see
    `decoding.distribution`). `correct`: the task's verdict on the text, None if unscored. Raises
    ValueError when lengths differ or a value is out of range.
    """

    row: int
    id: str
    prompt_tokens: int
    tokens: list[int]
    drafts: list[int]
    js: list[float]
    js_fsd: list[float]
    tv: list[float]
    regret: list[float]
    entropy: list[float]
    target_entropy: list[float]
    p: list[bytes]
    q: list[bytes]
    correct: bool | None = None

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if n == 0:
            raise ValueError(f"row {self.row} has no positions; expected 1 or more")
        for name in ("drafts", *_BOUNDS, "p", "q"):
            if len(getattr(self, name)) != n:
                raise ValueError(
                    f"row {self.row} has {n} tokens but {len(getattr(self, name))} of {name}"
                )
        for name, most in _BOUNDS.items():
            values = np.array(getattr(self, name))
            if not ((values >= -_ROUNDING) & (values <= most + _ROUNDING)).all():
                raise ValueError(f"row {self.row}: {name} must lie in 0 to {most:.3g}")
            if np.isinf(values).any():
                msgspec.structs.force_setattr(self, name, np.minimum(values, MOST).tolist())

    @property
    def agreed(self) -> Bools:
        """Where the draft picks what the target picks; shape (n,)."""
        return np.asarray(np.array(self.tokens) == np.array(self.drafts))

    def accepted(self, threshold: float | None = None) -> Bools:
        """Where `elastic` at a constant threshold (nats of JS) takes the draft's token: x = y or
        JS ≤ T; None or 0: agreement only. Shape (n,)."""
        return self.agreed | (np.array(self.js) <= threshold) if threshold else self.agreed


class Trace:
    """A header and its requests, in the order they were recorded."""

    def __init__(self, header: TraceHeader, requests: Iterable[RequestTrace] = ()) -> None:
        self.header = header
        self.requests = list(requests)

    @property
    def rows(self) -> set[int]:
        """Rows of the task that are there."""
        return {request.row for request in self.requests}

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file, without a torn last line. Raises ValueError if it is no trace, unreadable,
        too large, of another version or damaged."""
        try:
            return cls(*_read(path)[:2])
        except OSError as error:
            raise ValueError(f"can't read the trace {path}: {error.strerror}") from None

    def save(self, path: Path) -> None:
        """Write the file anew, at once: it is either the old one or the new one."""
        part = path.with_name(path.name + ".part")
        part.write_bytes(_line(self.header) + b"".join(map(_line, self.requests)))
        part.replace(path)

    def require_pair(self, draft: str, target: str) -> None:
        """Raises ValueError unless the trace is of these two models."""
        own = self.header.draft, self.header.target
        if own != (draft, target):
            raise ValueError(
                f"trace of another pair: it has {own[0]} and {own[1]}, not {draft} and {target}"
            )

    def acceptance(self, threshold: float | None = None) -> float:
        """Share of all positions that `RequestTrace.accepted`; raises ValueError without any."""
        if not self.requests:
            raise ValueError("the trace holds no requests")
        return float(np.concatenate([r.accepted(threshold) for r in self.requests]).mean())


class TraceWriter:
    """Appends requests to a trace as they are finished; a file that exists is gone on with.

    `rows`: those already there. Resuming may widen the header's rows; all else must match. Raises
    ValueError when it does not, or when the file is no trace or can't be written.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.rows: set[int] = set()
        try:
            if path.exists() and path.stat().st_size:
                self._resume(path, header)
            else:
                Trace(header).save(path)
            self._file = path.open("ab")
        except OSError as error:
            raise ValueError(f"can't write the trace {path}: {error.strerror}") from None

    def append(self, request: RequestTrace) -> None:
        """Write one request through to the file. Raises ValueError on a row that is there."""
        if request.row in self.rows:
            raise ValueError(f"row {request.row} is in the trace already")
        self._file.write(_line(request))
        self._file.flush()
        self.rows.add(request.row)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resume(self, path: Path, header: TraceHeader) -> None:
        old, requests, whole = _read(path)
        trace = Trace(old, requests)
        trace.require_pair(header.draft, header.target)
        first, last = min(old.first, header.first), max(old.last, header.last)
        merged = msgspec.structs.replace(old, first=first, last=last)
        if merged != msgspec.structs.replace(header, first=first, last=last):
            raise ValueError(
                f"{path} is a trace of {old.task} with max_tokens {old.max_tokens}, not of "
                f"{header.task} with {header.max_tokens}; choose another file"
            )
        if merged != old:
            Trace(merged, requests).save(path)
        else:
            os.truncate(path, whole)
        self.rows = trace.rows


class _Kind(msgspec.Struct):
    kind: str = ""
    version: int = 0


def _read(path: Path) -> tuple[TraceHeader, list[RequestTrace], int]:
    """Header, requests, and how many bytes are whole lines."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is over {MAX_BYTES >> 20} MiB: not a trace, or split it")
    requests: dict[int, RequestTrace] = {}
    with path.open("rb") as file:
        first = file.readline()
        header, whole = _header(path, first), len(first)
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                break
            try:
                request = msgspec.json.decode(line, type=RequestTrace)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}, line {number} is damaged: {error}") from None
            if request.row in requests:
                raise ValueError(f"{path}, line {number} is row {request.row} a second time")
            requests[request.row] = request
            whole += len(line)
    return header, list(requests.values()), whole


def _header(path: Path, line: bytes) -> TraceHeader:
    try:
        kind = msgspec.json.decode(line, type=_Kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        kind = _Kind()
    if kind.kind != "e2sci-trace":
        raise ValueError(
            f"{path} is no trace; its first line should say so: `e2sci trace` writes it"
        )
    if kind.version != VERSION:
        raise ValueError(f"{path} is a trace of version {kind.version}; expected {VERSION}")
    try:
        return msgspec.json.decode(line, type=TraceHeader)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}, line 1 is damaged: {error}") from None


def _line(entry: TraceHeader | RequestTrace) -> bytes:
    return msgspec.json.encode(entry) + b"\n"
