"""`e2sci top`: a running cloud, live."""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from e2sci.cli.common import BadInput, Seconds
from e2sci.cli.reach import dials, key_options
from e2sci.cli.scrape import Figures, Look, Source, figures

HISTORY = 48  # looks
BARS = "▁▂▃▄▅▆▇█"


@click.command()
@click.argument("url", default="ws://127.0.0.1:7071")
@click.option(
    "--interval",
    type=Seconds(0.1, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Print the figures of one interval and end.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object an interval.")
@key_options
def top(
    url: str,
    interval: float,
    once: bool,
    as_json: bool,
    key_file: Path | None,
    ca: Path | None,
    allow_insecure: bool,
) -> None:
    """Watch the cloud at URL: requests, speed, pass times, acceptance, traffic, errors.

    Rates, shares and percentiles are those of the last interval.

    \b
    e2sci top
    e2sci top wss://cloud.example.org:7071 --interval 10
    """
    where = "ws" + url.removeprefix("http") if url.startswith("http") else url
    source = Source(dials((where,), key_file, ca, allow_insecure)[0])
    before = source.look()
    if not (once or as_json):
        with suppress(KeyboardInterrupt):
            _watch(source, before, interval)
        return
    while True:
        time.sleep(interval)
        after = source.look()
        found = figures(before, after)
        if as_json:
            click.echo(json.dumps(asdict(found)))
        else:
            Console(highlight=False).print(view(source.url, [found]))
        if once:
            return
        before = after


def _watch(source: Source, before: Look, interval: float) -> None:
    """Until Ctrl-C; a cloud that is away for a while is waited for."""
    history: deque[Figures] = deque(maxlen=HISTORY)
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        live.update(Text(f"{source.url}: the first figures come in {interval:g} s"), refresh=True)
        while True:
            time.sleep(interval)
            problem = ""
            try:
                after = source.look()
                history.append(figures(before, after))
                before = after
            except BadInput as error:
                problem = error.message
            live.update(view(source.url, list(history), problem), refresh=True)


def view(url: str, history: list[Figures], problem: str = "") -> RenderableType:
    """The latest figures, each with how it went."""
    title = Text(url.removesuffix("/metrics"), style="bold")
    if problem:
        title.append(f"  {problem}", style="red")
    if not history:
        return title
    f = history[-1]
    if f.draining:
        title.append("  draining", style="yellow")
    table = Table.grid(padding=(0, 2))
    for name, value, course in _rows(f, history):
        table.add_row(Text(name, style="dim"), value, Text(course, style="cyan"))
    return Group(title, table)


def _rows(f: Figures, history: list[Figures]) -> list[tuple[str, str, str]]:
    """(name, value, sparkline)"""

    def course(name: str) -> str:
        return sparkline([getattr(each, name) for each in history])

    origins = ", ".join(
        f"{getattr(f, f'{origin}_per_s'):.1f} {origin}"
        for origin in ("drafted", "corrected", "filled")
    )
    shape = f"{_some(f.pass_tokens, '.1f')} tokens of {_some(f.pass_requests, '.1f')} requests"
    pass_ms = f"{_some(f.pass_ms_p50, '.0f')} / {_some(f.pass_ms_p95, '.0f')} ms"
    traffic = (
        f"{decimal(int(f.received_bytes_per_s))}/s in, {decimal(int(f.sent_bytes_per_s))}/s out"
    )
    elastic = f"{_some(f.credit, '.2f')} / {_some(f.threshold, '.3f')} nats"
    return [
        ("edges", f"{f.connections}", course("connections")),
        ("requests", f"{f.sessions} seated, {f.waiting} waiting", course("sessions")),
        ("cached tokens", f"{f.cached_tokens}", course("cached_tokens")),
        ("drafts queued", f"{f.drafts_queued}", course("drafts_queued")),
        ("tokens/s", f"{f.tokens_per_s:.1f}: {origins}", course("tokens_per_s")),
        ("fed/s", f"{f.fed_per_s:.1f}", course("fed_per_s")),
        ("passes/s", f"{f.passes_per_s:.1f}, of {shape}", course("passes_per_s")),
        ("pass p50 / p95", pass_ms, course("pass_ms_p95")),
        ("acceptance", _some(f.acceptance, ".1%"), course("acceptance")),
        ("credit / threshold", elastic, course("threshold")),
        ("evictions/s", f"{f.evictions_per_s:.1f}", course("evictions_per_s")),
        ("traffic", traffic, course("received_bytes_per_s")),
        ("ended so far", _counts(f.requests), ""),
        ("errors so far", _counts(f.errors), ""),
    ]


def sparkline(values: list[float | None]) -> str:
    """A bar a value, the highest for the largest; a space where there is none. Of one: nothing."""
    if len(values) < 2:
        return ""
    most = max((v for v in values if v is not None), default=0.0) or 1.0
    return "".join(
        " " if v is None else BARS[min(len(BARS) - 1, int(v / most * len(BARS)))] for v in values
    )


def _some(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items()) or "none"
