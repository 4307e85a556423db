"""The sandbox: a program passes only by reaching its end, and every limit holds."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2sci.evaluation import sandbox
from e2sci.evaluation.sandbox import Outcome, run
from live import running

LINUX = sys.platform == "linux"


def refused(program: str, why: str, **limits: float) -> None:
    outcome = run(program, **limits)  # type: ignore[arg-type]
    assert not outcome.passed
    assert why in outcome.reason
    assert "\n" not in outcome.reason
    assert len(outcome.reason) <= 512


def test_reaching_the_end_passes() -> None:
    assert run("assert 1 + 1 == 2") == Outcome(True, "passed")
    assert run("") == Outcome(True, "passed")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("assert 1 + 1 == 3, 'sum'", "AssertionError: sum"),
        ("1 +", "SyntaxError"),
        ("x = undefined", "NameError"),
        ("f = lambda: f()\nf()", "RecursionError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise ValueError('x' * 10**7 + '\\n')", "ValueError: xxx"),
        ("raise ValueError('\\ud800')", "ValueError"),
        ("x = '\0'", "SyntaxError"),
    ],
)
def test_what_stopped_it_is_told(program: str, why: str) -> None:
    if "\0" in program and sys.version_info < (3, 12):
        why = "null bytes"
    refused(program, why)


# Leaving early ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import sys; sys.exit(0)", "SystemExit"),
        ("raise SystemExit", "SystemExit"),
        ("import os; os._exit(0)", "exit code 0"),
        ("import os; os.abort()", "SIGABRT"),
        ("import os; os.closerange(0, 99); os._exit(0)", "exit code 0"),
    ],
)
def test_leaving_early_is_no_pass(program: str, why: str) -> None:
    refused(program, why)


def test_closing_the_report_does_not_keep_it_running() -> None:
    began = time.monotonic()
    refused("import os, time\nos.closerange(0, 99)\ntime.sleep(60)", "ended early", seconds=30)
    assert time.monotonic() - began < 10


def test_writing_to_the_report_is_no_pass() -> None:
    program = """
import os
for fd in range(3, 99):
    try: os.write(fd, b"passed")
    except OSError: pass
os._exit(0)
"""
    refused(program, "passed")


# Limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "try:\n    while True: pass\nfinally:\n    while True: pass",
        "import signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_time_is_bounded(program: str) -> None:
    began = time.monotonic()
    refused(program, "took longer than 0.5 s", seconds=0.5)
    assert time.monotonic() - began < 5


@pytest.mark.skipif(not LINUX, reason="macOS doesn't bound address space")
@pytest.mark.parametrize(
    "program",
    ["x = bytearray(1 << 30)", "x = []\nwhile True: x.append(bytearray(1 << 20))"],
)
def test_memory_is_bounded(program: str) -> None:
    refused(program, "MemoryError", memory_mb=256)
    assert run("x = bytearray(1 << 27)", memory_mb=256).passed


@pytest.mark.skipif(not LINUX, reason="macOS doesn't keep all of them")
def test_the_kernel_bounds_the_rest() -> None:
    names = ("CPU", "AS", "FSIZE", "NOFILE", "NPROC", "CORE")
    want = (4, 512 << 20, 1 << 20, 32, 0, 0)
    program = "import resource as r\n" + "".join(
        f"assert r.getrlimit(r.RLIMIT_{name}) == ({most}, {most}), '{name}'\n"
        for name, most in zip(names, want, strict=True)
    )
    assert run(program, seconds=2.5, memory_mb=512) == Outcome(True, "passed")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("open('big', 'wb').write(bytes(2 << 20))", "OSError"),
        ("files = [open(f'{n}', 'w') for n in range(40)]", "Too many open files"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))", "resource."),
    ],
)
def test_files_are_bounded_and_limits_stay(program: str, why: str) -> None:
    refused(program, why)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_goes_nowhere(stream: str, capfd: pytest.CaptureFixture[str]) -> None:
    program = f"import sys\nfor _ in range(100): sys.{stream}.write('x' * 10**6)"
    assert run(program).passed
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "program",
    [
        "input()",
        "import sys\nassert sys.stdin.read(), 'EOF'",
        "import os\nos.lseek(0, 0, 0)\nassert os.read(0, 9), 'EOF'",
    ],
)
def test_there_is_no_input(program: str) -> None:
    refused(program, "EOF")


# What the program has no business with ------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import os; os.fork()", "os.fork"),
        ("import os; os.system('true')", "os.system"),
        ("import os; os.execv('/bin/true', ['true'])", "os.exec"),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", "os.posix_spawn"),
        ("import os; os.kill(os.getppid(), 15)", "os.kill"),
        ("import os; os.killpg(0, 9)", "os.killpg"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
        ("import multiprocessing as m\nm.Process(target=print).start()", "refused"),
        (
            "import multiprocessing as m\np = m.get_context('spawn').Process(target=print)\n"
            "p.start()",
            "_posixsubprocess",
        ),
        ("import ctypes", "ctypes"),
        ("import _ctypes", "_ctypes"),
    ],
)
def test_no_other_processes_and_no_c(program: str, why: str) -> None:
    refused(program, why)


def test_swallowing_the_refusal_does_not_help(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    program = f"import os\ntry:\n    os.system('touch {marker}')\nexcept OSError:\n    pass"
    assert run(program).passed
    assert not marker.exists()


def test_no_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        address = server.getsockname()
        refused(f"import socket; socket.create_connection({address})", "socket.")
        with pytest.raises(TimeoutError):
            server.accept()
    refused("import socket; socket.socket()", "socket.__new__")
    refused("import urllib.request as u; u.urlopen('http://127.0.0.1')", "socket.")


@pytest.mark.skipif(
    not LINUX
    or subprocess.run(["unshare", "-n" if os.geteuid() == 0 else "-nU", "true"]).returncode != 0,
    reason="the kernel lends no network namespace here",
)
def test_the_network_has_no_devices() -> None:
    program = """
devices = [line.split(":")[0].strip() for line in open("/proc/self/net/dev")][2:]
assert devices == ["lo"], devices
"""
    assert run(program) == Outcome(True, "passed")


@pytest.mark.parametrize(
    "program",
    [
        "open(outside + '/new', 'w')",
        "open(outside + '/kept', 'a')",
        "open(outside + '/kept', 'r+')",
        "open((outside + '/new').encode(), 'x')",
        "pathlib.Path(outside, 'new').write_text('')",
        "os.open(outside + '/new', os.O_CREAT)",
        "os.chdir(outside); open('new', 'w')",
        "open(os.path.relpath(outside) + '/new', 'w')",
        "os.remove(outside + '/kept')",
        "os.truncate(outside + '/kept', 0)",
        "os.chmod(outside + '/kept', 0)",
        "os.utime(outside + '/kept', (0, 0))",
        "os.rename(outside + '/kept', 'here')",
        "open('mine', 'w'); os.replace('mine', outside + '/kept')",
        "os.link(outside + '/kept', 'here')",
        "os.symlink(outside, 'here')",
        "os.mkdir(outside + '/new')",
        "os.rmdir(outside + '/empty')",
        "shutil.rmtree(outside)",
        "shutil.copy(__import__('types').__file__, outside + '/new')",
        "import sqlite3; sqlite3.connect(outside + '/new')",
    ],
)
def test_no_writing_outside(program: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "empty").mkdir()
    before = (tmp_path / "kept").stat()
    refused(f"import os, pathlib, shutil\noutside = {str(tmp_path)!r}\n{program}", "refused here")
    after = (tmp_path / "kept").stat()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "kept"]
    assert (after.st_mode, after.st_mtime, after.st_size) == (before.st_mode, before.st_mtime, 4)


def test_the_directory_is_its_own_and_goes_away() -> None:
    program = """
import os, shutil, sqlite3, tempfile
assert os.listdir() == []
assert not set(os.environ) - {"LC_CTYPE", "__CF_USER_TEXT_ENCODING"}, os.environ
os.mkdir("d"); open("d/f", "w").write("text"); os.rename("d/f", "g"); os.remove("g")
with tempfile.TemporaryDirectory() as t: open(t + "/h", "w").close()
with tempfile.TemporaryFile() as t: t.write(b"x")
shutil.rmtree("d")
sqlite3.connect(":memory:").execute("select 1")
open(os.devnull, "w").write("x")
os.symlink("k", "l"); open("l", "w").write(os.getcwd())
os.mkdir("locked", 0)
raise ValueError(os.getcwd())
"""
    outcome = run(program)
    assert outcome.reason.startswith("ValueError: ")
    assert not Path(outcome.reason.removeprefix("ValueError: ")).exists()


def test_code_may_use_dataclasses_and_future_imports() -> None:
    program = """from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Point:
    x: int
assert Point(3).x == 3 and __name__ != "__main__"
"""
    assert run(program) == Outcome(True, "passed")
    assert run("def f(x: int): ...\nassert f.__annotations__['x'] is int").passed


# The parent ---------------------------------------------------------------------------------------


def test_what_the_child_started_is_killed() -> None:
    read, write = os.pipe()
    child = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"],
        stdout=subprocess.PIPE,
        pass_fds=[write],
        start_new_session=True,
    )
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    with open(read, "rb", buffering=0) as report:
        assert not sandbox._outcome(child, report, "token", 0.2).passed
    os.close(write)
    child.stdout.close()
    deadline = time.monotonic() + 5
    while running(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(grandchild)


@pytest.mark.skipif(not LINUX, reason="looks into /proc")
def test_nothing_is_left_open() -> None:
    run("pass")
    before = len(os.listdir("/proc/self/fd"))
    for program in ("pass", "1 +", "import os; os._exit(1)"):
        run(program)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"seconds": float("nan")}, {"memory_mb": 0}])
def test_limits_must_be_above_zero(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        run("pass", **limits)  # type: ignore[arg-type]


def test_large_programs_go_through() -> None:
    assert run("x = '" + "y" * (1 << 20) + "'\nassert len(x) == 1 << 20").passed
