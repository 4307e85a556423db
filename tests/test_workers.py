"""Worker processes and threads: every item is done once, and nobody stays behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2sci.evaluation.workers import spread
from live import running

SECONDS = 60


class Squarer:
    def close(self) -> None:
        pass

    def square(self, n: int) -> int:
        time.sleep(0.001 * (n % 3))
        if n < 0:
            raise ValueError(f"{n} is below 0")
        return n * n


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("abreast", [1, 3])
@pytest.mark.parametrize("jobs", [0, 1, 2])
def test_each_item_is_done_once(jobs, abreast, in_order):
    items = list(range(20))
    found = list(
        spread(Squarer, Squarer.square, items, jobs=jobs, abreast=abreast, in_order=in_order)
    )
    assert (found if in_order else sorted(found)) == [n * n for n in items]


@pytest.mark.parametrize("abreast", [1, 3])
@pytest.mark.parametrize("jobs", [0, 1])
def test_what_a_step_raises_is_raised(jobs, abreast):
    with pytest.raises(ValueError, match="-1 is below 0"):
        list(spread(Squarer, Squarer.square, [1, -1], jobs=jobs, abreast=abreast, in_order=False))


SLEEPERS = """
import os, sys, time
from e2sci.evaluation.workers import spread

class Sleeper:
    def close(self):
        pass

    def sleep(self, name):
        open(f"{name}.{os.getpid()}", "w").close()
        time.sleep(600)

if __name__ == "__main__":
    list(spread(Sleeper, Sleeper.sleep, sys.argv[1:], jobs=1, abreast=2, in_order=False))
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path):
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS)
    names = [str(tmp_path / name) for name in "ab"]
    parent = subprocess.Popen([sys.executable, script, *names])
    try:
        working = until(lambda: list(tmp_path.glob("a.*")))
        pid = int(working[0].suffix[1:])
        parent.send_signal(signal.SIGKILL)
        parent.wait(SECONDS)
        until(lambda: not running(pid))
    finally:
        parent.kill()


def until(true):
    for _ in range(10 * SECONDS):
        if found := true():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not come true in time")
