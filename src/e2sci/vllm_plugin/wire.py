"""The local socket that drafts travel on: ZeroMQ, gateways publish and a proposer subscribes.

    Sender(addresses) ── PUB, connects ──►  SUB, binds ── Receiver(address)

Any number of gateways reach a proposer, and a gateway reaches any number of proposers; either end
may come, go and come back. Nothing ever waits: what can't be taken is dropped. An address is
ipc:///path/of/socket, in a folder that nobody else may write to, or tcp:// on loopback.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

VARIABLE = "E2SCI_DRAFTS"
"""The environment variable with a proposer's address."""

_MAX_FRAME = 2048
_WAITING = 4096  # messages in a socket's queue at most
_TOPIC = b"e2sci-drafts-1:"  # of another version nothing arrives
_MAX_PATH = 100


class Drafts(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens `ids` behind the `start` tokens whose hash is `key` (`store.prefix_key`)."""

    key: int
    start: int
    ids: list[int]


class AddressError(Exception):
    """An address can't be used; the message says why."""


def default_address() -> str:
    """What $E2SCI_DRAFTS says, else one of this user's own in the folder for temporary files."""
    own = f"ipc://{tempfile.gettempdir()}/e2sci-{os.getuid()}/drafts"
    return os.environ.get(VARIABLE, "").strip() or own


class Receiver:
    """Listens at `address`. Raises AddressError, also when another process listens there."""

    def __init__(self, address: str) -> None:
        self._lock: int | None = None
        if path := _checked(address):
            self._lock = _locked(path)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, _WAITING)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
        self._socket.setsockopt(zmq.SUBSCRIBE, _TOPIC)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(f"can't listen on {address}: {error}") from None

    def drain(self) -> Iterator[Drafts]:
        """What has come, without waiting, a queue's worth at most; what isn't ours is passed
        over."""
        for _ in range(_WAITING):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            with suppress(msgspec.MsgspecError, ValueError):
                yield _decoder.decode(frame[len(_TOPIC) :])

    def close(self) -> None:
        self._context.destroy(linger=0)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class Sender:
    """Sends drafts to the proposers at `addresses`, whether they are there or not. Raises
    AddressError."""

    def __init__(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            _checked(address)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, _WAITING)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        for address in addresses:
            self._socket.connect(address)

    def send(self, drafts: Drafts) -> None:
        """Lost where they can't be taken now: a request goes on without."""
        with suppress(zmq.ZMQError):
            self._socket.send(_TOPIC + _encoder.encode(drafts), zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _checked(address: str) -> Path | None:
    """The path of a socket file, None for TCP. Raises AddressError."""
    if address.startswith("ipc:///"):
        path = Path(address.removeprefix("ipc://"))
        if len(str(path)) > _MAX_PATH:
            raise AddressError(f"{address} is longer than a socket's path may be; choose a shorter")
        _require_private(path.parent)
        return path
    found = re.fullmatch(r"tcp://(\[[0-9a-f:]+\]|[0-9.]+):(\d{1,5})", address)
    if found and _is_loopback(found[1].strip("[]")) and 0 < int(found[2]) < 1 << 16:
        return None
    raise AddressError(
        f"{address!r} is no address for drafts; expected ipc:///PATH or tcp://127.0.0.1:PORT, "
        "since they stay on this machine"
    )


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _require_private(folder: Path) -> None:
    """Make `folder` if need be. Raises AddressError if others could put a socket of theirs there,
    and so read drafts."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError as error:
        raise AddressError(f"can't use {folder} for drafts: {error.strerror}") from None
    if about.st_uid not in (os.getuid(), 0) or about.st_mode & 0o022:
        raise AddressError(
            f"{folder} is another user's or can be written to by others; choose a folder of your "
            f"own with {VARIABLE}"
        )


def _locked(path: Path) -> int:
    """Hold `path` for this process, since ZeroMQ would take a socket from its owner. Raises
    AddressError."""
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise AddressError(
            f"another engine listens at {path} for drafts; give each its own with {VARIABLE}"
        ) from None
    return lock


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Drafts)
