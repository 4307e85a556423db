"""Logs: lines for people, or JSON lines for machines.

Every event of the package goes through `logging`, below the logger `e2sci`, with what belongs to it
in `extra`: the request's id, the client's name. Prompts, texts and keys are in none of them, at any
level; a test looks. Other libraries are heard from errors on only, since below that some of them
tell whole headers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Literal

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter
from rich.console import Console
from rich.logging import RichHandler

Format = Literal["text", "json"]


def set_up(form: Format, level: int) -> None:
    """Log from `level` on to stderr, as `form`. Once a process."""
    logging.basicConfig(level=logging.ERROR, handlers=[_json() if form == "json" else _text()])
    logging.getLogger("e2sci").setLevel(level)


def _json() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    names = {"levelname": "level", "name": "logger", "message": "event"}
    handler.setFormatter(
        JsonFormatter(list(names), rename_fields=names, timestamp="time", exc_info_as_array=True)
    )
    return handler


class _Text(logging.Formatter):
    """The message, then what belongs to it, as name=value."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        more = {name: value for name, value in vars(record).items() if name not in _USUAL}
        return "  ".join([super().formatMessage(record), *_pairs(more)])


def _pairs(more: Mapping[str, object]) -> Iterator[str]:
    for name, value in more.items():
        if isinstance(value, Mapping):
            yield from _pairs(value)
        else:
            yield f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"


_USUAL = {*RESERVED_ATTRS, "taskName"}


def _text() -> logging.Handler:
    """In colour and columns on a terminal, one line an event elsewhere."""
    console = Console(stderr=True)
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(_Text())
    else:
        handler.setFormatter(_Text("%(asctime)s %(levelname)s %(message)s"))
    return handler
