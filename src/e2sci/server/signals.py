"""Ctrl-C and SIGTERM as events: the first one asks for an end, the second one for it now."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress


def signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second signal from now on. Of the running loop's thread."""
    first, second = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (second if first.is_set() else first).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # not on Windows, where Ctrl-C still interrupts
            loop.add_signal_handler(number, signalled)
    return first, second
