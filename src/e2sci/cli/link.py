"""`e2sci link`: an emulated network between two ends on one machine."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import errno
import json
from contextlib import AsyncExitStack, suppress
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal

from e2sci.cli.common import Address, BadInput, address, listen_option, refuse_remote
from e2sci.emulation.link import LINKS, LinkProfile, OutageMode
from e2sci.emulation.proxy import Link

REFRESH_S = 0.25


def outage(value: str) -> tuple[float, float]:
    """START:DURATION in seconds; raises BadInput."""
    start, _, duration = value.partition(":")
    with suppress(ValueError):
        return float(start), float(duration)
    raise BadInput(f"{value!r} is no outage; expected START:DURATION in seconds, as in 10:2.5")


@click.command()
@listen_option("127.0.0.1:7070")
@click.option("--allow-remote", is_flag=True, help="Let --listen take other than loopback.")
@click.option(
    "--to", type=address, metavar="HOST:PORT", required=True, help="Where the cloud listens."
)
@click.option(
    "--profile",
    "name",
    metavar="NAME",
    default="paper",
    show_default=True,
    help=f"Named link: {', '.join(LINKS)}. The options below override its values.",
)
@click.option("--rtt", type=float, help="Round-trip time in ms.")
@click.option("--jitter", type=float, help="The round trip varies by ± this many ms.")
@click.option("--up", type=float, help="Mbit/s from edge to cloud; inf for unlimited.")
@click.option("--down", type=float, help="Mbit/s from cloud to edge; inf for unlimited.")
@click.option(
    "--outage",
    "outages",
    type=outage,
    metavar="START:DURATION",
    multiple=True,
    help="Take the link down, in seconds from the start; may be repeated.",
)
@click.option(
    "--outage-mode",
    type=click.Choice(["stall", "cut"]),
    default="stall",
    show_default=True,
    help="In an outage bytes wait, or connections are reset and new ones refused.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the jitter.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def link(
    listen: Address,
    to: Address,
    name: str,
    rtt: float | None,
    jitter: float | None,
    up: float | None,
    down: float | None,
    outages: tuple[tuple[float, float], ...],
    outage_mode: OutageMode,
    seed: int,
    allow_remote: bool,
    as_json: bool,
) -> None:
    """Put an emulated network between an edge and a cloud on this machine.

    A TCP proxy that delays bytes as the link would: round trip, jitter, bandwidth with its queue,
    outages. It runs until Ctrl-C, then prints what it carried.

    \b
    e2sci link --to 127.0.0.1:7071
    e2sci link --to 127.0.0.1:7071 --profile mobile --outage 10:2
    """
    profile = _profile(
        name,
        rtt_ms=rtt,
        jitter_ms=jitter,
        up_mbps=up,
        down_mbps=down,
        outages=outages,
        outage_mode=outage_mode,
        seed=seed,
    )
    refuse_remote(listen, "--allow-remote", allow_remote)
    if to.port == 0 or to == listen:
        raise BadInput(f"--to {to} can't be reached; give the port the cloud listens on")
    proxy = Link(*to, profile, host=listen.host, port=listen.port)
    with suppress(KeyboardInterrupt):
        asyncio.run(_run(proxy, f"{to} ({name}: {_describe(profile)})"))
    click.echo(_json(proxy) if as_json else f"{proxy.now():.1f} s: {_traffic(proxy)}")


def _profile(name: str, **given: Any) -> LinkProfile:
    """The named profile with what was given in place of its own values; raises BadInput."""
    if name not in LINKS:
        near = difflib.get_close_matches(name, LINKS, n=1, cutoff=0.0)[0]
        raise BadInput(
            f"no link profile {name!r}; did you mean {near!r}? Known: {', '.join(LINKS)}"
        )
    changes = {field: value for field, value in given.items() if value is not None}
    try:
        return dataclasses.replace(LINKS[name], **changes)
    except ValueError as error:
        raise BadInput(str(error)) from None


async def _run(proxy: Link, target: str) -> None:
    """Serve until cancelled, with a live status on a terminal."""
    console = Console(stderr=True)
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(proxy)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            reason = "the port is in use; 0 takes any free one" if taken else error.strerror
            raise BadInput(f"can't listen on {Address(proxy.host, proxy.port)}: {reason}") from None
        click.echo(f"link {Address(proxy.host, proxy.port)} → {target}; Ctrl-C ends it", err=True)
        status = console.is_terminal and stack.enter_context(console.status(""))
        while True:
            if status:
                status.update(f"{_traffic(proxy)}, {proxy.open} open")
            await asyncio.sleep(REFRESH_S)


def _describe(profile: LinkProfile) -> str:
    up, down = (
        "unlimited" if rate is None else f"{rate:g} Mbit/s"
        for rate in (profile.up_mbps, profile.down_mbps)
    )
    jitter = f" ± {profile.jitter_ms:g}" if profile.jitter_ms else ""
    outages = "".join(
        f", {profile.outage_mode} at {start:g} s for {duration:g} s"
        for start, duration in profile.outages
    )
    return f"RTT {profile.rtt_ms:g}{jitter} ms, up {up}, down {down}{outages}"


def _traffic(proxy: Link) -> str:
    up, down = (decimal(proxy.delivered[way]) for way in ("up", "down"))
    refused = f" ({proxy.refused} refused)" if proxy.refused else ""
    return f"{up} up, {down} down, connections: {proxy.connections}{refused}"


def _json(proxy: Link) -> str:
    return json.dumps(
        {
            "seconds": round(proxy.now(), 3),
            "up_bytes": proxy.delivered["up"],
            "down_bytes": proxy.delivered["down"],
            "connections": proxy.connections,
            "refused": proxy.refused,
            "profile": dataclasses.asdict(proxy.profile),
        }
    )
