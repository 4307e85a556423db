"""Bearer keys: who may use a cloud, and how much.

A key reads `e2sci_<id>_<secret>`. It is shown once, when it is made; the file keeps its id, its
holder's name, its limits and a salted SHA-256. The secret is 256 random bits, which nobody guesses
at any speed, so a slow hash would only slow the handshake. The file is JSON, mode 0600, replaced as
a whole under a lock; a cloud that serves by it reads it again whenever it has changed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from filelock import FileLock, Timeout

from e2sci.runtime.admission import Client

log = logging.getLogger("e2sci.keys")

VERSION = 1
MAX_BYTES = 4 << 20
"""A key file is at most this large: some fifteen thousand keys."""
LOCK_SECONDS = 10.0
_KEY = re.compile(r"e2sci_([0-9a-f]{8})_([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_Id = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8}\Z")]
_Name = Annotated[str, msgspec.Meta(pattern=rf"^{_NAME.pattern}\Z")]
_Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Least1 = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class Key(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key as the file has it. `salt`, `hash`: hex; `created`, `revoked`: UTC, ISO 8601; limits as
    in `Client`."""

    id: _Id
    name: _Name
    salt: str
    hash: _Hash
    created: str
    revoked: str | None = None
    sessions: _Least1 | None = None
    tokens_per_minute: _Least1 | None = None
    context: _Least1 | None = None

    @property
    def client(self) -> Client:
        """Who holds it. Limits and turns are a key's, so the id is part of the client's name."""
        name = f"{self.name}/{self.id}"
        return Client(name, self.sessions, self.tokens_per_minute, self.context)


class _File(msgspec.Struct, frozen=True):
    version: int
    keys: list[Key]


_NOBODY = Key(id="0" * 8, name="nobody", salt="", hash="0" * 64, created="")


class Keys:
    """The keys in a file, as it is now. `Keys.load` raises ValueError where there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, ...] = ()
        self._keys: dict[str, Key] = {}
        self._clients: set[Client] = set()

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read a key file. Raises ValueError if it is missing, damaged, or others may write it."""
        keys = cls(path)
        keys._stamp = _stamp(path)
        keys._take(read(path))
        return keys

    def find(self, presented: str) -> Client | None:
        """Whose key this is; None if it is nobody's, or revoked. Takes as long for an unknown id as
        for a wrong secret."""
        self._refresh()
        parts = _KEY.fullmatch(presented)
        if parts is None:
            return None
        key = self._keys.get(parts[1], _NOBODY)
        right = hmac.compare_digest(_digest(key.salt, parts[2]), key.hash)
        return key.client if right and key.revoked is None else None

    def holds(self, client: Client) -> bool:
        """Whether a client that was let in still may be: its key is neither revoked nor changed."""
        self._refresh()
        return client in self._clients

    def _refresh(self) -> None:
        """Read the file again if it has changed; a damaged one changes nothing."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp  # also of a damaged file: it is told of once
        try:
            self._take(read(self._path))
        except ValueError as error:
            log.error("%s; the keys read before stay in force", error)
        else:
            log.info("keys read again: %d in force", len(self._clients))

    def _take(self, keys: list[Key]) -> None:
        self._keys = {key.id: key for key in keys}
        self._clients = {key.client for key in keys if key.revoked is None}


def read(path: Path) -> list[Key]:
    """The keys in a file, the revoked ones too. Raises ValueError on one that can't be trusted."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"the key file {path} is over {MAX_BYTES} bytes")
        if os.name == "posix" and path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"others may write the key file {path}; chmod 600 it")
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"no key file {path}; `e2sci keys add NAME` makes one") from None
    except OSError as error:
        raise ValueError(f"can't read the key file {path}: {error.strerror}") from None
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the key file {path} is damaged: {error}") from None
    if file.version != VERSION:
        raise ValueError(f"the key file {path} is of version {file.version}; expected {VERSION}")
    if len({key.id for key in file.keys}) < len(file.keys):
        raise ValueError(f"the key file {path} is damaged: an id comes twice")
    return file.keys


def add(
    path: Path,
    name: str,
    *,
    sessions: int | None = None,
    tokens_per_minute: int | None = None,
    context: int | None = None,
) -> tuple[Key, str]:
    """Make a key and put it into the file, which is made if need be. Returns it, and the text that
    its holder presents, which is kept nowhere. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name for a key; expected 1 to 64 letters, digits, or . _ @ -"
        )
    salt, secret = secrets.token_hex(16), secrets.token_hex(32)
    with _locked(path):
        keys = read(path) if path.exists() else []
        key = Key(
            id=_new_id(keys),
            name=name,
            salt=salt,
            hash=_digest(salt, secret),
            created=_now(),
            sessions=sessions,
            tokens_per_minute=tokens_per_minute,
            context=context,
        )
        _write(path, [*keys, key])
    return key, f"e2sci_{key.id}_{secret}"


def revoke(path: Path, id: str) -> Key:
    """Put a key out of force; what it has open ends within seconds. Raises ValueError if there is
    no such key; revoking one twice changes nothing."""
    with _locked(path):
        keys = read(path)
        found = next((key for key in keys if key.id == id), None)
        if found is None:
            raise ValueError(f"no key {id!r} in {path}; `e2sci keys list` shows them")
        if found.revoked is None:
            revoked = msgspec.structs.replace(found, revoked=_now())
            _write(path, [revoked if key is found else key for key in keys])
            found = revoked
    return found


def _digest(salt: str, secret: str) -> str:
    return hashlib.sha256(f"{salt}{secret}".encode()).hexdigest()


def _new_id(keys: list[Key]) -> str:
    taken = {key.id for key in keys} | {_NOBODY.id}
    while (id := secrets.token_hex(4)) in taken:
        pass
    return id


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _stamp(path: Path) -> tuple[int, ...]:
    """What tells one state of a file from another; empty if there is none."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time; a lock file beside the keys. Raises ValueError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_SECONDS, mode=0o600):
            yield
    except Timeout:
        raise ValueError(f"{path} is being written by someone else; try again") from None
    except OSError as error:
        raise ValueError(f"can't write the key file {path}: {error.strerror}") from None


def _write(path: Path, keys: list[Key]) -> None:
    """Replace the file as a whole, so that no reader ever sees half of it."""
    data = msgspec.json.format(msgspec.json.encode(_File(VERSION, keys)), indent=1) + b"\n"
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # of a writer that died; the lock is ours
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
