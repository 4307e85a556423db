"""What the bench keeps: one record per request and method, in a results directory.

    bench.json            the header: what was run, on which profile, rows and models
    <method>.jsonl        a Record a line, appended as requests finish
    <method>.texts.jsonl  {row, text, token_ids} a line, apart so that figures can go without texts

A run that was killed goes on where it stopped. A line counts once its newline is written: a torn
last one is left out when reading and cut off before the next is appended. The text goes first, so
a row with a record has a text; of a row's texts the last counts.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

VERSION = 1

_HEADER = "bench.json"
_TEXTS = ".texts"
_METHOD = re.compile(r"\w[\w.@=+-]*")

Line = TypeVar("Line", "Record", "Text")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory's records were made with.

    `profile`: name and all its numbers; `setting`: what calibration gave the methods; `file`: base
    name of the task's file, None if it needs none; `first`, `last`: rows of the task; `draft`,
    `target`: model identities; `abreast`: requests whose passes were common ones; `command`: the
    last command line that wrote here.
    """

    version: int = VERSION
    profile: dict[str, Any]
    task: str
    file: str | None
    first: int
    last: int
    draft: str
    target: str
    max_tokens: int
    abreast: int = 1
    clock: Literal["virtual", "wall"]
    command: str
    setting: dict[str, Any] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request by one method. Raises ValueError when a count or time is below zero or infinite.

    `tokens`: delivered; `digest`: of their ids, see `digest`; `correct`: None if unscored;
    `seconds`: request to last token, the time to answer; `ttft_s`: request to first token;
    `accepted` of `judged` draft tokens, `tolerated` of them against the target's own pick;
    `wasted` of `drafted` never judged or in vain; `fed`: tokens through the target in `passes`;
    `uplink`, `downlink`: bytes; `cloud_busy_s`, `edge_busy_s`: seconds of compute, a pass that
    the end cuts short in full; joules over the whole request; `regret`: nats, of the whole text.
    """

    row: int
    id: str
    finish: str
    tokens: int
    digest: str
    correct: bool | None
    seconds: float
    ttft_s: float | None
    accepted: int
    judged: int
    tolerated: int
    corrections: int
    filled: int
    drafted: int
    wasted: int
    passes: int
    fed: int
    windows: int
    uplink: int
    downlink: int
    cloud_busy_s: float
    edge_busy_s: float
    cloud_joules: float
    edge_joules: float
    regret: float | None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "regret" or not isinstance(value, int | float):
                continue
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of row {self.row} is {value}; expected 0 or more, finite")


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """What a request got to read, and its token ids."""

    row: int
    text: str
    token_ids: list[int]


def digest(token_ids: Sequence[int]) -> str:
    """Equal for equal token ids, on every machine: 16 hex digits of their SHA-256."""
    return hashlib.sha256(np.asarray(token_ids, "<i8").tobytes()).hexdigest()[:16]


class Results:
    """A results directory; `create_or_resume` to write, `load` to read. One writer at a time."""

    def __init__(self, directory: Path, header: Header) -> None:
        self.directory = directory
        self.header = header
        self._done: dict[str, set[int]] = {}
        self._mended: set[str] = set()

    @classmethod
    def create_or_resume(cls, directory: Path, header: Header) -> Results:
        """The directory for this run. Its rows may grow by rows that touch them; all else but the
        command must be as before. Raises ValueError otherwise."""
        header = msgspec.json.decode(msgspec.json.encode(header), type=Header)  # as it is read back
        if (directory / _HEADER).exists():
            before = _read_header(directory)
            _require_same(directory, before, header)
            first, last = min(before.first, header.first), max(before.last, header.last)
            header = msgspec.structs.replace(header, first=first, last=last)
        elif any(directory.glob("*.jsonl")):
            raise ValueError(
                f"{directory} holds .jsonl files but no {_HEADER}; choose another --out"
            )
        directory.mkdir(parents=True, exist_ok=True)
        new = directory / f"{_HEADER}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(header), indent=2) + b"\n")
        new.replace(directory / _HEADER)
        return cls(directory, header)

    @classmethod
    def load(cls, directory: Path) -> Results:
        """Raises ValueError when that is no results directory of this version."""
        return cls(directory, _read_header(directory))

    def methods(self) -> list[str]:
        """Methods with at least one record, sorted by name, numbers in it by value."""
        names = (path.stem for path in self.directory.glob("*.jsonl") if _whole(path))
        return sorted((name for name in names if not name.endswith(_TEXTS)), key=_natural)

    def records(self, method: str) -> list[Record]:
        """By row. Raises ValueError for a method without records, a damaged line, a row twice."""
        records = sorted(_read(self._path(method), Record), key=lambda record: record.row)
        if not records:
            known = self.methods()
            near = difflib.get_close_matches(method, known, n=1, cutoff=0.0)
            hint = f"; did you mean {near[0]!r}? There are: {', '.join(known)}" if near else ""
            raise ValueError(f"{self.directory} has no records of {method!r}{hint}")
        for one, other in itertools.pairwise(records):
            if one.row == other.row:
                raise ValueError(f"{self._path(method)}: row {one.row} is there twice; delete one")
        return records

    def texts(self, method: str) -> dict[int, Text]:
        """By row; empty where texts were left out. Raises ValueError for a damaged line."""
        return {text.row: text for text in _read(self._path(method + _TEXTS), Text)}

    def done(self, method: str) -> set[int]:
        """Rows with a record, read once; empty for a method not begun. Raises ValueError for a
        damaged line."""
        if method not in self._done:
            self._done[method] = {record.row for record in _read(self._path(method), Record)}
        return set(self._done[method])

    def append(self, method: str, record: Record, text: str, token_ids: Sequence[int]) -> None:
        """Keep a finished request. Raises ValueError when its row is there already."""
        if not _METHOD.fullmatch(method) or method.endswith(_TEXTS):
            raise ValueError(f"{method!r} can't name a method; expected letters, digits and ._@=+-")
        path, texts = self._path(method), self._path(method + _TEXTS)
        if record.row in self.done(method):
            raise ValueError(f"{path} has row {record.row} already")
        if method not in self._mended:
            _mend(path)
            _mend(texts)
            self._mended.add(method)
        _append(texts, Text(row=record.row, text=text, token_ids=list(token_ids)))
        _append(path, record)
        self._done[method].add(record.row)

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.jsonl"


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _whole(path: Path) -> bytes:
    """A file up to its last newline."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def _mend(path: Path) -> None:
    if path.exists():
        os.truncate(path, len(_whole(path)))


def _append(path: Path, line: Record | Text) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def _read(path: Path, kind: type[Line]) -> Iterator[Line]:
    for number, line in enumerate(_whole(path).splitlines(), start=1):
        try:
            yield msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {number} is damaged ({error}); delete it") from None


class _Version(msgspec.Struct):
    version: int


def _read_header(directory: Path) -> Header:
    path = directory / _HEADER
    if not path.is_file():
        raise ValueError(f"{directory} has no {_HEADER}; expected a directory that the bench wrote")
    data = path.read_bytes()
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise ValueError(
                f"{directory} holds results of format {version}, this is format {VERSION}; "
                "choose another --out"
            )
        return msgspec.json.decode(data, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); choose another --out") from None


_SAME = ("profile", "task", "file", "draft", "target", "max_tokens", "abreast", "clock", "setting")


def _require_same(directory: Path, before: Header, now: Header) -> None:
    for name in _SAME:
        old, new = getattr(before, name), getattr(now, name)
        if old != new:
            raise ValueError(
                f"{directory} holds results of another {name} ({_difference(old, new)}); "
                "choose another --out"
            )
    if now.first > before.last + 1 or now.last + 1 < before.first:
        raise ValueError(
            f"{directory} holds rows {before.first}…{before.last}, which {now.first}…{now.last} "
            "don't touch; choose another --out"
        )


def _difference(old: Any, new: Any) -> str:
    """What differs, in a few words; of two profiles the name, or else the first number."""
    if isinstance(old, dict) and isinstance(new, dict):
        differing = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
        key = min(differing, key=lambda key: (key != "name", key))
        return f"{key}: {_difference(old.get(key), new.get(key))}"
    return f"{old!r}, not {new!r}"
