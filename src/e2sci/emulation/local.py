"""Two devices on one machine: a cloud as a process on a core of its own, the edge on another.

What `e2sci demo` and the wall-clock benchmarks stand on. Where a process can't be kept to a core,
or there is only one, everything still runs, only less evenly.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from urllib.parse import urlsplit

from e2sci.emulation.link import LinkProfile
from e2sci.emulation.proxy import Link
from e2sci.engines.base import Engine
from e2sci.runtime.edge import Edge

EDGE_CORE, CLOUD_CORE = 0, 1


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Keep this process, and threads it starts, to one core."""
    if not _can_pin():
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def cloud_process(command: Sequence[str]) -> Iterator[str]:
    """Run `command`, Python arguments that start a cloud, on the cloud's core; yields its URL.

    It must say `listens on ws://…` on stderr, as `e2sci cloud` does. Raises RuntimeError with its
    last words if it ends before.
    """
    with pinned(CLOUD_CORE):  # inherited before the child starts any thread
        process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
    try:
        yield _url_of(process)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


@asynccontextmanager
async def edge_over(url: str, engine: Engine, profile: LinkProfile) -> AsyncIterator[Edge]:
    """An edge, connected to the cloud at `url` over an emulated link."""
    cloud = urlsplit(url)
    assert cloud.hostname is not None
    assert cloud.port is not None
    async with Link(cloud.hostname, cloud.port, profile) as link, Edge(link.url(), engine) as edge:
        await edge.connect(patience=5)
        yield edge


def _can_pin() -> bool:
    wanted = {EDGE_CORE, CLOUD_CORE}
    return hasattr(os, "sched_getaffinity") and wanted <= os.sched_getaffinity(0)


def _url_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = ["it said nothing"]
    for line in process.stderr:
        said.append(line.strip())
        found = re.search(r"listens on (ws://[^\s;]+)", line)
        if found:
            return found[1]
    raise RuntimeError(f"the cloud did not start: {said[-1]}")
