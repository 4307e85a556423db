"""The gateway as it is run: places, limits, what it counts, which server, the command line."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2sci import BlockingEdge
from e2sci.engines.base import EngineError
from e2sci.engines.remote import Busy
from e2sci.runtime.admission import Client, Limits
from e2sci.runtime.connection import Refused
from e2sci.runtime.prefixes import BEGINNING, crowded, ranked
from gateways import LONG, PROMPT, drafted, edge_at, expected, gateway, joined
from live import HOST, ended, free_port, listens, process, target, until
from streaming_server import StreamingServer

# ---- running it ---------------------------------------------------------------------------


async def test_places_lines_and_limits(vllm):
    vllm.seconds = 0.02
    async with (
        gateway([vllm.url], [], slots=1, limits=Limits(waiting=1)) as cloud,
        edge_at(cloud, patience=0) as edge,
    ):
        first = asyncio.create_task(edge.generate(PROMPT, **LONG))
        second = asyncio.create_task(edge.generate(PROMPT, **LONG))
        await until(lambda: len(cloud.desk._guests) == 2)
        with pytest.raises(Refused, match="all 1 places are taken and 1 requests wait"):
            await edge.generate(PROMPT, **LONG)
        assert (await first).token_ids == (await second).token_ids == await expected()
        assert max(len(vllm.requests), 2) == 2


async def test_clients_take_turns_in_line(vllm):
    vllm.seconds = 0.01
    ended = []
    async with (
        gateway([vllm.url], [], slots=1, on_end=ended.append) as cloud,
        edge_at(cloud, client=Client("alice")) as alice,
        edge_at(cloud, client=Client("bob")) as bob,
    ):
        tasks = []
        for edge in (alice, alice, alice, bob):
            tasks.append(asyncio.create_task(edge.generate(PROMPT, **LONG)))
            await until(lambda: len(cloud.desk._guests) == len(tasks))
        await asyncio.gather(*tasks)
    assert [each.client for each in ended] == ["alice", "bob", "alice", "alice"]


async def test_a_keys_limits_hold(vllm):
    client = Client("alice", sessions=1, tokens_per_minute=100, context=70)
    async with joined(vllm, client=client, patience=0) as edge:
        vllm.seconds = 0.02
        first = asyncio.create_task(edge.generate(PROMPT, **LONG))
        await until(lambda: edge.cloud.desk._guests)
        with pytest.raises(Refused, match="its key allows 1"):
            await edge.generate(PROMPT, **LONG)
        assert (await first).prompt_tokens + len((await first).token_ids) <= 70
        await edge.generate(PROMPT, **LONG)
        with pytest.raises(Refused, match="has used its 100 tokens a minute"):
            await edge.generate(PROMPT, **LONG)


async def test_what_is_counted(vllm):
    async with joined(vllm, near=target()) as edge:
        got = await drafted(edge, vllm)
        metrics = edge.cloud.metrics.registry
        tokens = sum(
            metrics.get_sample_value("e2sci_tokens_total", {"origin": origin}) or 0
            for origin in ("drafted", "corrected", "filled")
        )
        # An EOS is a token too, and in no result.
        assert tokens == sum(map(sum, vllm.steps))
        assert metrics.get_sample_value("e2sci_sessions") == 0
        prompts = got.prompt_tokens * len(vllm.requests)
        assert metrics.get_sample_value("e2sci_fed_tokens_total") == tokens + prompts


async def test_a_drained_gateway_lets_requests_end(vllm):
    async with joined(vllm, patience=0) as edge:
        task = asyncio.create_task(edge.generate(PROMPT, **LONG))
        await until(lambda: vllm.steps)
        assert await edge.cloud.drain(5)
        assert (await task).token_ids == await expected()
        with pytest.raises(Refused, match="about to stop"):
            await edge.generate(PROMPT, **LONG)


async def test_it_finds_out_whether_drafts_are_accepted(vllm, caplog):
    async with gateway([vllm.url], [vllm.address], times=None) as cloud:
        [found] = cloud.examined
        assert (found.version, found.tried, found.drafted) == ("0.32.0", True, 32)
        assert found.accepted == 32 - 5
        assert found.samples
        assert not found.trouble
        assert [n for n, _ in cloud.times.points] == [1, 6]
    with caplog.at_level(logging.WARNING), StreamingServer(version="0.99.1") as other:
        async with gateway([other.url], [vllm.address], times=None) as cloud:
            assert cloud.examined[0].accepted == 0
            assert [n for n, _ in cloud.times.points] == [1]
    assert "accepts no drafts, so edges get its plain stream" in caplog.text


async def test_a_server_that_draws_nonsense_beside_drafts_is_asked_greedily_only(vllm, caplog):
    vllm.broken = True
    async with (
        gateway([vllm.url], [vllm.address], times=None) as cloud,
        edge_at(cloud) as edge,
    ):
        assert not cloud.examined[0].samples
        assert "draws wrong tokens beside drafts" in caplog.text
        with pytest.raises(Refused, match="set the temperature to 0"):
            await edge.generate(PROMPT, accept="rejection", temperature=1.0, **LONG)
        got = await edge.generate(PROMPT, **LONG)
        assert got.token_ids == await expected()


async def test_an_untried_version_is_told_of(vllm, caplog):
    vllm.version = "0.99.1"
    async with gateway([vllm.url], [vllm.address], times=None):
        assert "runs vLLM 0.99.1; tried were 0.31 and 0.32" in caplog.text


async def test_a_server_that_cant_be_examined(vllm):
    vllm.fail = [500]
    with pytest.raises(Busy, match="it is broken"):
        async with gateway([vllm.url], [], times=None):
            pass
    with pytest.raises(EngineError, match="no server answers"):
        gateway([f"http://127.0.0.1:{free_port()}"], [])


# ---- which server -------------------------------------------------------------------------


def test_a_beginning_has_its_server_and_keeps_it():
    names = [f"http://engine-{i}:8000" for i in range(5)]
    prompts = [[i, *range(40)] for i in range(2000)]
    first = [ranked(p, names)[0] for p in prompts]
    for i in range(5):
        assert 300 < first.count(i) < 500
    assert first == [ranked([*p, *range(50)][: len(p)], names)[0] for p in prompts]
    without = names[:2] + names[3:]
    for prompt, before in zip(prompts, first, strict=True):
        if before != 2:
            assert without[ranked(prompt, without)[0]] == names[before]


def test_only_the_beginning_counts():
    names = ["a", "b", "c"]
    start = list(range(BEGINNING))
    assert ranked(start, names) == ranked([*start, 7, 8, 9], names)


def test_a_server_takes_hardly_more_than_its_share():
    assert not crowded(0, [0, 0, 0])
    assert crowded(1, [1, 0, 0])
    assert not crowded(12, [12, 10, 9])
    assert crowded(20, [20, 5, 5])


async def test_requests_of_one_beginning_meet_at_one_server(drafts_at, tmp_path):
    with StreamingServer(drafts_at) as one, StreamingServer(f"ipc://{tmp_path}/two") as two:
        async with joined(one, two) as edge:
            for _ in range(4):
                await edge.generate(PROMPT, max_tokens=5)
            assert sorted([len(one.requests), len(two.requests)]) == [0, 4]
            for i in range(12):
                await edge.generate(f"{i} is another beginning", max_tokens=5)
            assert one.requests
            assert two.requests


# ---- on the command line ------------------------------------------------------------------


AS_DESCRIBED = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from remote_servers import DESCRIPTION
import e2sci.engines.hf_tokenizer
e2sci.engines.hf_tokenizer.describe = lambda _: DESCRIPTION
from e2sci.cli import main
main()
"""


@contextmanager
def command(*args):
    """`e2sci` with args in a process of its own, where any tokenizer is the synthetic one."""
    here = str(Path(__file__).parent)
    child = subprocess.Popen(
        [sys.executable, "-c", AS_DESCRIBED, here, *args], stderr=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_the_command_serves_edges_with_drafts(vllm):
    at = ["--url", vllm.url, "--drafts", vllm.address, "--tokenizer", "any"]
    with command("cloud", "--engine", "vllm-native", *at, "--listen", f"{HOST}:0") as child:
        with BlockingEdge(listens(child), target()) as edge:
            got = edge.generate(PROMPT, **LONG)
        assert got.token_ids == asyncio.run(expected())
        assert max(vllm.steps[-1]) > 1  # it has joined the proposer to examine the server
        child.terminate()
        assert child.wait(20) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--url http://127.0.0.1:9 --tokenizer any", "no server answers at http://127.0.0.1:9"),
        ("--url {url} --tokenizer any --model other", "doesn't serve other"),
        ("--url {url} --tokenizer any --drafts tcp://10.0.0.1:5", "they stay on this machine"),
    ],
)
def test_mistakes_are_one_line(vllm, flags, words):
    given = flags.format(url=vllm.url).split()
    with command("cloud", "--engine", "vllm-native", *given, "--listen", f"{HOST}:0") as child:
        said = child.communicate(timeout=60)[1].splitlines()
    assert child.returncode == 2
    assert words in said[-1]
    assert len(said) == 1


def test_doctor_examines_a_server(vllm):
    with process("doctor", "--vllm", vllm.url, "--drafts", vllm.address, "--json") as child:
        code, out, _ = ended(child)
    found = json.loads(out)
    assert code == 0
    assert (found["version"], found["accepted"], found["trouble"]) == ("0.32.0", 27, "")
    with process("doctor", "--vllm", vllm.url, "--drafts", "tcp://10.0.0.1:5") as child:
        code, _, lines = ended(child)
    assert code == 2
    with process("doctor", "--drafts", vllm.address) as child:
        code, _, lines = ended(child)
    assert (code, lines[-1]) == (2, "Error: --drafts and --engine-key-env go with --vllm")
