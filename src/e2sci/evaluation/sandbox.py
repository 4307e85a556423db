"""Runs generated code, with limits, and says whether it got to its end.

The program runs in a `python` of its own: standard library only, in an empty temporary directory,
without environment, input or network. The kernel bounds time, memory, file size, open files and
processes (except root's); an audit hook refuses sockets, processes, ctypes and writing outside the
directory; where the system gives one, a network namespace has no devices. Passed means that the
last statement was reached: only then does the child hand back a secret token, so leaving early
doesn't pass. What outlives the program is killed with its process group.

This protects against *careless* code: endless loops, memory hogs, stray files, calls home. It isn't
a wall against an attacker, who can read files, find the token, or get around the hook from inside
the interpreter: run code that you distrust in a container. On macOS there is no network namespace,
and some limits may not hold; the hook does.
"""

from __future__ import annotations

import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_MAX_REPORT = 512
"""Bytes that are read of what the child says."""


@dataclass(frozen=True)
class Outcome:
    """`passed`: the program ran to its end; `reason`: one line, "passed" or what stopped it."""

    passed: bool
    reason: str


def run(program: str, *, seconds: float = 10, memory_mb: int = 1024) -> Outcome:
    """Run `program` for `seconds` of wall time at most, the interpreter's start included, in
    `memory_mb` MiB of address space. Raises ValueError when a limit is not above 0."""
    if not (0 < seconds < math.inf and memory_mb > 0):
        raise ValueError(f"limits must be above 0, not {seconds} s and {memory_mb} MiB")
    token = secrets.token_hex(16)
    read, write = os.pipe()
    with (
        open(read, "rb", buffering=0) as report,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        tempfile.TemporaryFile() as source,
    ):
        try:
            source.write(f"{token}\n{program}".encode("utf-8", "replace"))
            source.seek(0)
            limits = [str(write), str(math.ceil(seconds)), str(memory_mb)]
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", __file__, *limits],
                cwd=directory,
                env={},
                stdin=source,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[write],
                start_new_session=True,
            )
        finally:
            os.close(write)
        return _outcome(child, report, token, seconds)


def _outcome(child: subprocess.Popen[bytes], report: Any, token: str, seconds: float) -> Outcome:
    """What the child says, or how it ended without a word; nothing of it runs afterwards."""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(report, selectors.EVENT_READ)
            if not selector.select(seconds):
                return Outcome(False, f"took longer than {seconds:g} s")
        said = report.read(_MAX_REPORT).decode("utf-8", "replace")
        if not said:
            with suppress(subprocess.TimeoutExpired):
                child.wait(1)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if said == token:
        return Outcome(True, "passed")
    return Outcome(False, said or f"ended early ({_ending(child.returncode)})")


def _ending(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


# The child: this file run as a script. ------------------------------------------------------------


def _child(report: int, seconds: int, memory_mb: int) -> None:
    """Run the program that stands on stdin behind the token, and report once."""
    token, _, program = sys.stdin.buffer.read().partition(b"\n")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _leave_network()
    _limit(seconds, memory_mb)
    module = sys.modules["program"] = ModuleType("program")
    sys.argv[1:] = []
    _guard()
    try:
        exec(compile(program, "program", "exec", dont_inherit=True), module.__dict__)
        said = token
    except BaseException as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0].encode("utf-8", "replace")
    os.write(report, said)
    os._exit(0)


def _leave_network() -> None:
    """Into a network namespace with no device up, where the kernel lets us; Linux only."""
    if sys.platform != "linux":
        return
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        new_net, new_user = 0x40000000, 0x10000000
        ctypes.CDLL(None).unshare(new_net if os.geteuid() == 0 else new_net | new_user)


def _limit(seconds: int, memory_mb: int) -> None:
    import resource

    memory = memory_mb << 20
    for kind, most in (
        (resource.RLIMIT_CPU, seconds + 1),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


_REFUSED = (
    "socket.",
    "ctypes.",
    "subprocess.",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "resource.",
)
"""Beginnings of the audit events that are refused."""

_WRITES = {
    "os.chmod": 1,
    "os.chown": 1,
    "os.link": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.utime": 1,
    "shutil.rmtree": 1,
    "sqlite3.connect": 1,
}
"""Audit events that change files, by how many paths they begin with."""


def _guard() -> None:
    """Refuse from now on what the program has no business with."""
    home = os.path.realpath(os.getcwd())
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    realpath, fsdecode, commonpath = os.path.realpath, os.fsdecode, os.path.commonpath

    def inside(path: Any) -> bool:
        """A number is a file that is open already."""
        if isinstance(path, int) or path == os.devnull:
            return True
        return commonpath([home, realpath(fsdecode(path))]) == home

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(f"{event} is refused here")
        paths = args[: _WRITES.get(event, 0)]
        if event == "open" and args[2] & writing:
            paths = args[:1]
        if not all(map(inside, paths)):
            raise PermissionError(f"{event} outside the working directory is refused here")

    # Both start things without an event: ctypes when loaded already, the other on its own.
    sys.modules.update(dict.fromkeys(("ctypes", "_ctypes", "_posixsubprocess")))  # type: ignore[arg-type]
    sys.addaudithook(hook)


if __name__ == "__main__":
    _child(*map(int, sys.argv[1:]))
