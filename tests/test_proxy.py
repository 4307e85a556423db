"""The emulated link on real sockets, and the command's errors."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
from click.testing import CliRunner

from e2sci.cli.common import Address, address
from e2sci.cli.link import link
from e2sci.emulation import proxy as proxy_module
from e2sci.emulation.link import LINKS, Direction, LinkProfile
from e2sci.emulation.proxy import Link

# The proxy


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """Port of a server that sends everything back and closes after the client's end of stream."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.fixture
async def dead() -> int:
    """A port where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def connect(proxy: Link) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def round_trip(
    ends: tuple[asyncio.StreamReader, asyncio.StreamWriter], data: bytes = b"ping"
) -> float:
    """Send, expect the same back, and return the seconds it took."""
    began = time.monotonic()
    ends[1].write(data)
    assert await ends[0].readexactly(len(data)) == data
    return time.monotonic() - began


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("never came true")


async def assert_reset(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)


async def test_bytes_arrive_intact_and_late(echo: int) -> None:
    async with Link("127.0.0.1", echo, LinkProfile(30)) as proxy:
        assert proxy.url() == f"ws://127.0.0.1:{proxy.port}"
        ends = await connect(proxy)
        for _ in range(3):
            assert await round_trip(ends) >= 0.030
        assert proxy.delivered == {"up": 12, "down": 12}
        assert (proxy.connections, proxy.open, proxy.refused) == (1, 1, 0)
        ends[1].close()


async def test_bandwidth_counts_and_half_close(echo: int) -> None:
    """The client ends its side first; the rest still comes back, then the end of the stream."""
    data = os.urandom(50_000)
    profile = LinkProfile(10, up_mbps=8, down_mbps=16)
    async with Link("127.0.0.1", echo, profile) as proxy:
        reader, writer = await connect(proxy)
        began = time.monotonic()
        writer.write(data)
        writer.write_eof()
        assert await reader.read(-1) == data
        assert time.monotonic() - began >= 0.010 + 0.050
        assert proxy.delivered == {"up": len(data), "down": len(data)}
        await eventually(lambda: proxy.open == 0)
        writer.close()


async def test_a_slow_reader_still_gets_everything(echo: int) -> None:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    async with Link("127.0.0.1", echo, LinkProfile(0)) as proxy:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", proxy.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
        writer.write(bytes(200_000))
        writer.write_eof()
        await eventually(lambda: proxy.delivered["down"] == 200_000)
        await asyncio.sleep(0.02)
        assert await reader.read(-1) == bytes(200_000)
        writer.close()


async def test_connections_share_the_bandwidth(echo: int) -> None:
    async with Link("127.0.0.1", echo, LinkProfile(0, up_mbps=8)) as proxy:
        one, other = await connect(proxy), await connect(proxy)
        took = await asyncio.gather(
            round_trip(one, bytes(25_000)), round_trip(other, bytes(25_000))
        )
        assert max(took) >= 0.050
        assert proxy.connections == 2
        for _, writer in (one, other):
            writer.close()


async def test_reading_stops_when_much_is_in_flight(
    echo: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "IN_FLIGHT", 4)
    held: list[int] = []

    class Watched(Link):
        def hand_in(self, direction: Direction, size: int) -> float:
            held.append(size)
            return super().hand_in(direction, size)

    async with Watched("127.0.0.1", echo, LinkProfile(20_000)) as proxy:
        _, writer = await connect(proxy)
        writer.write(bytes(1 << 20))
        # four queued, one out of the queue on its way, one waiting for room
        await eventually(lambda: len(held) == 6)
        await asyncio.sleep(0.02)
        assert len(held) == 6
        writer.transport.abort()


async def test_a_dead_target_refuses(dead: int, caplog: pytest.LogCaptureFixture) -> None:
    async with Link("127.0.0.1", dead, LinkProfile(0)) as proxy:
        reader, writer = await connect(proxy)
        await assert_reset(reader)
        assert (proxy.connections, proxy.refused, proxy.open) == (0, 1, 0)
        writer.close()
    (record,) = caplog.records
    assert f":{dead}" in record.getMessage()
    assert record.exc_info is None


async def test_too_many_connections_are_refused(echo: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "MAX_CONNECTIONS", 1)
    async with Link("127.0.0.1", echo, LinkProfile(0)) as proxy:
        first = await connect(proxy)
        await round_trip(first)
        reader, writer = await connect(proxy)
        await assert_reset(reader)
        await round_trip(first)
        for end in (first[1], writer):
            end.close()


async def test_cut_resets_and_loses_what_is_in_flight(echo: int) -> None:
    async with Link("127.0.0.1", echo, LinkProfile(20_000, up_mbps=0.1)) as proxy:
        reader, writer = await connect(proxy)
        writer.write(bytes(100_000))
        await eventually(lambda: proxy.hand_in("up", 0) > proxy.now() + 10)  # a queue stands
        proxy.cut()
        await assert_reset(reader)
        assert proxy.delivered["up"] == 0
        assert proxy.hand_in("up", 0) <= proxy.now() + 10  # the queue is gone
        writer.close()


async def test_cut_resets_the_target_too() -> None:
    lost = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        except ConnectionResetError:
            lost.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Link("127.0.0.1", port, LinkProfile(0)) as proxy:
        _, writer = await connect(proxy)
        await eventually(lambda: proxy.connections == 1)
        proxy.cut()
        async with asyncio.timeout(5):
            await lost.wait()
        again = await connect(proxy)
        await eventually(lambda: proxy.connections == 2)
        for end in (writer, again[1]):
            end.close()


async def test_cut_reaches_a_connection_still_being_opened(
    dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = asyncio.open_connection

    async def hang_for_the_target(
        host: str, port: int, **options: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if port == dead:
            await asyncio.Event().wait()
        return await opens(host, port, **options)

    monkeypatch.setattr(asyncio, "open_connection", hang_for_the_target)
    async with Link("127.0.0.1", dead, LinkProfile(0)) as proxy:
        reader, writer = await connect(proxy)
        await eventually(lambda: proxy.open == 1)
        proxy.cut()
        await assert_reset(reader)
        writer.close()


async def test_a_reset_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    """A target that resets loses the client its connection, and nothing stays open."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        proxy_module._reset(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Link("127.0.0.1", port, LinkProfile(2)) as proxy:
        reader, writer = await connect(proxy)
        writer.write(b"x")
        await assert_reset(reader)
        await eventually(lambda: proxy.open == 0)
        writer.close()
    gc.collect()  # an exception nobody asked for would be logged now
    assert not caplog.records


async def test_stall_holds_bytes_in_flight_and_new_ones(echo: int) -> None:
    async with Link("127.0.0.1", echo, LinkProfile(20)) as proxy:
        ends = await connect(proxy)
        await round_trip(ends)
        asyncio.get_running_loop().call_later(0.005, proxy.stall, 0.1)
        assert await round_trip(ends) >= 0.120
        began = proxy.now()
        proxy.stall(0.1)
        await round_trip(ends)
        assert proxy.now() - began >= 0.120
        ends[1].close()


async def test_a_scheduled_stall(echo: int) -> None:
    async with Link("127.0.0.1", echo, LinkProfile(0, outages=[(0, 0.1)])) as proxy:
        ends = await connect(proxy)
        await round_trip(ends)
        assert proxy.now() >= 0.1
        ends[1].close()


async def test_a_scheduled_cut_resets_then_refuses_then_ends(echo: int) -> None:
    profile = LinkProfile(0, outages=[(0.25, 0.25)], outage_mode="cut")
    async with Link("127.0.0.1", echo, profile) as proxy:
        before = await connect(proxy)
        await round_trip(before)
        await assert_reset(before[0])
        assert proxy.now() >= 0.25
        during = await connect(proxy)
        await assert_reset(during[0])
        assert proxy.refused == 1
        await asyncio.sleep(0.51 - proxy.now())
        after = await connect(proxy)
        await round_trip(after)
        for _, writer in (before, during, after):
            writer.close()


async def test_leaving_resets_and_frees_the_port(echo: int) -> None:
    async with Link("127.0.0.1", echo, LinkProfile(0)) as proxy:
        reader, writer = await connect(proxy)
        await round_trip((reader, writer))
    await assert_reset(reader)
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await connect(proxy)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in tasks if "Link" in repr(task) or "Flow" in repr(task)]


# The command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--to nowhere", ["'nowhere'", "HOST:PORT"]),
        ("--to 127.0.0.1:99999", ["'127.0.0.1:99999'"]),
        ("--to ::1:80", ["'::1:80'"]),
        ("--to 127.0.0.1:0", ["--to"]),
        ("--to 127.0.0.1:7070", ["--to 127.0.0.1:7070"]),
        ("--to h:1 --profile papr", ["'papr'", "'paper'"]),
        ("--to h:1 --profile MOBILE", ["did you mean", "mobile"]),
        ("--to h:1 --rtt -1", ["rtt_ms", "-1"]),
        ("--to h:1 --jitter 50", ["jitter_ms", "50"]),
        ("--to h:1 --up 0", ["up_mbps"]),
        ("--to h:1 --outage 5", ["'5'", "START:DURATION"]),
        ("--to h:1 --outage 1:0", ["outage", "1:0"]),
        ("--to h:1 --listen 0.0.0.0:0", ["--allow-remote"]),
        ("--to h:1 --listen example.org:0", ["--allow-remote"]),
    ],
)
def test_mistakes_are_one_line(
    arguments: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("e2sci.cli.link.Link", None)  # nothing may start
    result = CliRunner().invoke(link, arguments.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        result = CliRunner().invoke(link, ["--listen", at, "--to", "127.0.0.1:1"])
    assert result.exit_code == 2
    assert (
        result.stderr == f"Error: can't listen on {at}: the port is in use; 0 takes any free one\n"
    )


def test_addresses() -> None:
    assert address("localhost:1") == ("localhost", 1)
    assert address("[::1]:80") == ("::1", 80)
    assert str(Address("::1", 80)) == "[::1]:80"
    assert Address("::1", 1).loopback
    assert Address("127.0.0.9", 1).loopback
    assert Address("localhost", 1).loopback
    assert not Address("0.0.0.0", 1).loopback
    assert Link("h", 1, LINKS["lan"], host="::1", port=80).url("http") == "http://[::1]:80"


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
async def test_the_command_runs_until_interrupted(echo: int) -> None:
    code = "from e2sci.cli.link import link; link()"
    options = f"--listen 127.0.0.1:0 --to 127.0.0.1:{echo} --rtt 4 --up inf --json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *options.split()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    started = (await process.stderr.readline()).decode()
    assert "RTT 4 ms, up unlimited, down 50 Mbit/s" in started
    port = int(started.split()[1].rpartition(":")[2])
    ends = await asyncio.open_connection("127.0.0.1", port)
    await round_trip(ends, b"hello")
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    summary = json.loads(out)
    assert summary["up_bytes"] == summary["down_bytes"] == 5
    assert (summary["connections"], summary["refused"]) == (1, 0)
    assert summary["profile"]["up_mbps"] is None
    ends[1].close()
