"""The gateway in front of stand-ins for vLLM, which run the real proposer."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from e2sci import BlockingEdge
from e2sci.engines.base import EngineError
from e2sci.engines.remote import Busy
from e2sci.runtime.admission import Client, Limits
from e2sci.runtime.connection import EdgeError, Refused
from e2sci.runtime.prefixes import BEGINNING, crowded, ranked
from e2sci.runtime.request import CloudLost
from gateways import edge_at, gateway, joined
from live import HOST, draft, ended, free_port, listens, pair, process, target, until
from streaming_server import MOST, StreamingServer

LONG = {"max_tokens": 60}
PROMPT = "hello"


@pytest.fixture
def address(tmp_path):
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path}/drafts"


@pytest.fixture
def server(address):
    with StreamingServer(address, seconds=0.003) as server:
        yield server


async def expected(prompt: str = PROMPT, **options) -> list[int]:
    """The text of a built-in cloud."""
    async with pair() as edge:
        return (await edge.generate(prompt, mode="cloud", **{**LONG, **options})).token_ids


async def drafted(edge, server, **options):
    """A result of which several tokens came in one step: a new socket takes a moment to join."""
    for _ in range(100):
        got = await edge.generate(PROMPT, **{**LONG, **options})
        if max(server.steps[-1]) > 1:
            return got
    raise AssertionError("no draft was ever accepted")


# ---- the text -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 4},
        {"window": 8},
        {"mode": "sync", "window": 5},
        {"mode": "cloud"},
        {"mode": "auto"},
        {"fill": False},
    ],
    ids=str,
)
async def test_the_text_is_the_servers_own(server, options):
    async with joined(server) as edge:
        for prompt in ("hello", "def add(a, b):", "Zürich 🙂"):
            got = await edge.generate(prompt, **{**LONG, **options})
            assert got.token_ids == await expected(prompt)


async def test_drafts_are_judged_in_the_servers_own_steps(server):
    async with joined(server, near=target()) as edge:
        got = await drafted(edge, server)
        assert got.token_ids == await expected()
        assert got.stats.corrections == 0
        assert got.stats.acceptance_rate == 1
        assert got.stats.cloud_passes == len(server.steps[-1]) < len(got.token_ids)
        assert 1 < max(server.steps[-1]) <= MOST + 1


async def test_drafts_that_are_always_wrong_change_nothing(server):
    async with joined(server, near=draft(random=True)) as edge:
        got = await edge.generate("hello", **LONG)
        assert got.token_ids == await expected("hello")


async def test_without_a_proposer_there_is_the_plain_stream():
    with StreamingServer(seconds=0.001) as server:
        async with joined(server, near=target()) as edge:
            got = await edge.generate(PROMPT, **LONG)
            assert got.token_ids == await expected()
            assert set(server.steps[-1]) == {1}


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_no_more_tokens_than_asked_for(server, most):
    async with joined(server, near=target()) as edge:
        got = await edge.generate(PROMPT, max_tokens=most, window=8)
        assert len(got.token_ids) == most
        assert got.finish_reason == "length"
        assert server.requests[-1]["max_tokens"] == most


async def test_log_probabilities_are_the_targets(server):
    async with pair() as edge:
        there = await edge.generate(PROMPT, mode="cloud", logprobs=3, max_tokens=20)
    async with joined(server, near=target()) as edge:
        got = await drafted(edge, server, logprobs=3, max_tokens=20)
        for ours, theirs in zip(got.commits, there.commits, strict=True):
            assert ours.token == theirs.token
            assert ours.score.log_prob == pytest.approx(theirs.score.log_prob, abs=1e-4)
            assert ours.score.ids == theirs.score.ids
            assert ours.score.log_probs == pytest.approx(theirs.score.log_probs, abs=1e-4)


# ---- rules and sampling -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"accept": "elastic"}, "tolerates nothing, so elastic"),
        ({"accept": "fuzzy"}, "tolerates nothing, so fuzzy"),
        ({"accept": "typical"}, "tolerates nothing, so typical"),
        ({"temperature": 1.0}, "use --accept rejection"),
        ({"accept": "rejection", "temperature": 1.0, "min_p": 0.1}, "no min_p"),
        ({"logit_bias": {5: 1.0}}, "no logit_bias"),
        ({"presence_penalty": 1.0}, "a resumed text would change"),
        ({"frequency_penalty": 1.0}, "a resumed text would change"),
    ],
    ids=str,
)
async def test_what_cant_be_served_as_promised_is_refused(server, options, reason):
    async with joined(server) as edge:
        with pytest.raises(Refused, match=reason):
            await edge.generate(PROMPT, **LONG, **options)
        assert not server.requests


async def test_sampling_is_the_servers_own(server):
    asked = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}
    async with joined(server) as edge:
        got = await edge.generate(PROMPT, accept="rejection", max_tokens=20, **asked)
        assert {k: server.requests[-1][k] for k in asked} == asked
        assert got.token_ids
        await edge.generate(PROMPT, mode="cloud", max_tokens=20, **asked)
        assert {k: server.requests[-1][k] for k in asked} == asked


async def test_a_text_that_goes_on_draws_anew(server):
    server.die = [4]
    async with joined(server) as edge:
        await edge.generate(
            PROMPT, accept="rejection", temperature=1.0, seed=2**63 - 1, max_tokens=20
        )
    first, second = server.requests
    written = len(second["prompt"]) - len(first["prompt"])
    assert written >= 4
    assert second["seed"] == written - 1
    assert second["max_tokens"] == 20 - written


# ---- faults -------------------------------------------------------------------------------


async def test_a_server_that_breaks_off_is_asked_to_go_on(server):
    server.die = [3, 1, 2, 1]
    async with joined(server, near=target()) as edge:
        got = await edge.generate(PROMPT, **LONG)
        assert got.token_ids == await expected()
        assert len(server.requests) == 5
        assert not got.notices


async def test_another_server_goes_on_where_one_has_failed(server, tmp_path):
    with StreamingServer(f"ipc://{tmp_path}/other", seconds=0.003) as other:
        async with joined(server, other) as edge:
            for _ in range(4):
                server.die, other.die = [3], [3]
                got = await edge.generate(PROMPT, **LONG)
                assert got.token_ids == await expected()
            server.fail = [500] * 9
            got = await edge.generate(PROMPT, **LONG)
            assert got.token_ids == await expected()


async def test_when_no_server_answers_the_edge_may_ask_again(address):
    with StreamingServer(address, seconds=0.003) as server:
        async with joined(server, patience=20) as edge:
            server.die = [3]
            server.fail = []
            task = asyncio.create_task(edge.generate(PROMPT, **LONG))
            await until(lambda: server.requests)
            server.fail = [503, 503]
            got = await task
            assert got.token_ids == await expected()
            assert any("answered 503" in notice for notice in got.notices)
            server.fail = [400]
            with pytest.raises((Refused, EdgeError), match="it is broken"):
                await edge.generate(PROMPT, **LONG)


async def test_a_server_that_stays_away_is_given_up(server):
    server.fail = [503] * 1000
    async with joined(server, patience=0.5) as edge:
        with pytest.raises(Refused, match="answered 503"):
            await edge.generate(PROMPT, **LONG)
    server.fail, server.die = [], [3]
    async with joined(server, patience=0.5) as edge:
        task = asyncio.create_task(edge.generate(PROMPT, **LONG))
        await until(lambda: server.steps)
        server.fail = [503] * 1000
        with pytest.raises(CloudLost, match="answered 503"):
            await task


async def test_nonsense_from_a_server_ends_the_request_only(server):
    async with joined(server) as edge:
        for nonsense, said in (
            (b"data: {", "unexpected answer"),
            (b'data: {"choices": [{"token_ids": [99999], "finish_reason": null}]}', "99999"),
            (b"data: " + b"x" * (1 << 21), "more than 1 MiB"),
            (b'data: {"choices": [{"text": "no ids"}]}', "is it a vLLM server"),
        ):
            server.fail = [nonsense + b"\n\n"]
            with pytest.raises((Refused, EdgeError), match=said):
                await edge.generate(PROMPT, **LONG)
        got = await edge.generate(PROMPT, **LONG)
        assert got.token_ids == await expected()


async def test_a_proposer_that_loses_its_socket_costs_nothing_but_speed(server):
    async with joined(server, near=target()) as edge:
        await drafted(edge, server)
        server.proposer._receiver.close()
        got = await edge.generate(PROMPT, **LONG)
        assert got.token_ids == await expected()
        assert set(server.steps[-1]) == {1}


async def test_an_edge_that_goes_ends_the_request_at_the_server(server):
    server.seconds = 0.02
    async with joined(server) as edge:
        task = asyncio.create_task(edge.generate(PROMPT, max_tokens=2000))
        await until(lambda: server.steps and len(server.steps[-1]) > 3)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await until(lambda: edge.cloud.desk.empty.is_set())
        await until(lambda: server.left == 1)


async def test_a_resume_at_another_gateway_is_the_same_text(server):
    async with (
        gateway([server.url], [server.address]) as one,
        gateway([server.url], [server.address]) as two,
        edge_at(one, two, near=target()) as edge,
    ):
        server.seconds = 0.01
        task = asyncio.create_task(edge.generate(PROMPT, **LONG))
        await until(lambda: server.steps and len(server.steps[-1]) > 3)
        serving = one if one.desk._guests else two
        serving.draining = True
        for guest in list(serving.desk._guests):
            guest.send([])
            await next(iter(edge._clouds.connections))._channel.close()
        got = await task
        assert got.token_ids == await expected()
        assert got.stats.reconnects == 1


# ---- running it ---------------------------------------------------------------------------


async def test_places_lines_and_limits(server):
    server.seconds = 0.02
    async with (
        gateway([server.url], [], slots=1, limits=Limits(waiting=1)) as cloud,
        edge_at(cloud, patience=0) as edge,
    ):
        first = asyncio.create_task(edge.generate(PROMPT, **LONG))
        second = asyncio.create_task(edge.generate(PROMPT, **LONG))
        await until(lambda: len(cloud.desk._guests) == 2)
        with pytest.raises(Refused, match="all 1 places are taken and 1 requests wait"):
            await edge.generate(PROMPT, **LONG)
        assert (await first).token_ids == (await second).token_ids == await expected()
        assert max(len(server.requests), 2) == 2


async def test_clients_take_turns_in_line(server):
    server.seconds = 0.01
    ended = []
    async with (
        gateway([server.url], [], slots=1, on_end=ended.append) as cloud,
        edge_at(cloud, client=Client("alice")) as alice,
        edge_at(cloud, client=Client("bob")) as bob,
    ):
        tasks = []
        for edge in (alice, alice, alice, bob):
            tasks.append(asyncio.create_task(edge.generate(PROMPT, **LONG)))
            await until(lambda: len(cloud.desk._guests) == len(tasks))
        await asyncio.gather(*tasks)
    assert [each.client for each in ended] == ["alice", "bob", "alice", "alice"]


async def test_a_keys_limits_hold(server):
    client = Client("alice", sessions=1, tokens_per_minute=100, context=70)
    async with joined(server, client=client, patience=0) as edge:
        server.seconds = 0.02
        first = asyncio.create_task(edge.generate(PROMPT, **LONG))
        await until(lambda: edge.cloud.desk._guests)
        with pytest.raises(Refused, match="its key allows 1"):
            await edge.generate(PROMPT, **LONG)
        assert (await first).prompt_tokens + len((await first).token_ids) <= 70
        await edge.generate(PROMPT, **LONG)
        with pytest.raises(Refused, match="has used its 100 tokens a minute"):
            await edge.generate(PROMPT, **LONG)


async def test_what_is_counted(server):
    async with joined(server, near=target()) as edge:
        got = await drafted(edge, server)
        metrics = edge.cloud.metrics.registry
        tokens = sum(
            metrics.get_sample_value("e2sci_tokens_total", {"origin": origin}) or 0
            for origin in ("drafted", "corrected", "filled")
        )
        # An EOS is a token too, and in no result.
        assert tokens == sum(map(sum, server.steps))
        assert metrics.get_sample_value("e2sci_sessions") == 0
        prompts = got.prompt_tokens * len(server.requests)
        assert metrics.get_sample_value("e2sci_fed_tokens_total") == tokens + prompts


async def test_a_drained_gateway_lets_requests_end(server):
    async with joined(server, patience=0) as edge:
        task = asyncio.create_task(edge.generate(PROMPT, **LONG))
        await until(lambda: server.steps)
        assert await edge.cloud.drain(5)
        assert (await task).token_ids == await expected()
        with pytest.raises(Refused, match="about to stop"):
            await edge.generate(PROMPT, **LONG)


async def test_it_finds_out_whether_drafts_are_accepted(server, caplog):
    async with gateway([server.url], [server.address], times=None) as cloud:
        [found] = cloud.examined
        assert (found.version, found.tried, found.drafted) == ("0.32.0", True, 32)
        assert found.accepted == 32 - 5
        assert found.samples
        assert not found.trouble
        assert [n for n, _ in cloud.times.points] == [1, 6]
    with caplog.at_level(logging.WARNING), StreamingServer(version="0.99.1") as other:
        async with gateway([other.url], [server.address], times=None) as cloud:
            assert cloud.examined[0].accepted == 0
            assert [n for n, _ in cloud.times.points] == [1]
    assert "accepts no drafts, so edges get its plain stream" in caplog.text


async def test_a_server_that_draws_nonsense_beside_drafts_is_asked_greedily_only(server, caplog):
    server.broken = True
    async with (
        gateway([server.url], [server.address], times=None) as cloud,
        edge_at(cloud) as edge,
    ):
        assert not cloud.examined[0].samples
        assert "draws wrong tokens beside drafts" in caplog.text
        with pytest.raises(Refused, match="set the temperature to 0"):
            await edge.generate(PROMPT, accept="rejection", temperature=1.0, **LONG)
        got = await edge.generate(PROMPT, **LONG)
        assert got.token_ids == await expected()


async def test_an_untried_version_is_told_of(server, caplog):
    server.version = "0.99.1"
    async with gateway([server.url], [server.address], times=None):
        assert "runs vLLM 0.99.1; tried were 0.31 and 0.32" in caplog.text


async def test_a_server_that_cant_be_examined(server):
    server.fail = [500]
    with pytest.raises(Busy, match="it is broken"):
        async with gateway([server.url], [], times=None):
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


async def test_requests_of_one_beginning_meet_at_one_server(address, tmp_path):
    with StreamingServer(address) as one, StreamingServer(f"ipc://{tmp_path}/two") as two:
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


def test_the_command_serves_edges_with_drafts(server):
    at = ["--url", server.url, "--drafts", server.address, "--tokenizer", "any"]
    with command("cloud", "--engine", "vllm-native", *at, "--listen", f"{HOST}:0") as child:
        with BlockingEdge(listens(child), target()) as edge:
            got = edge.generate(PROMPT, **LONG)
        assert got.token_ids == asyncio.run(expected())
        assert max(server.steps[-1]) > 1  # it has joined the proposer to examine the server
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
def test_mistakes_are_one_line(server, flags, words):
    given = flags.format(url=server.url).split()
    with command("cloud", "--engine", "vllm-native", *given, "--listen", f"{HOST}:0") as child:
        said = child.communicate(timeout=60)[1].splitlines()
    assert child.returncode == 2
    assert words in said[-1]
    assert len(said) == 1


def test_doctor_examines_a_server(server):
    with process("doctor", "--vllm", server.url, "--drafts", server.address, "--json") as child:
        code, out, _ = ended(child)
    found = json.loads(out)
    assert code == 0
    assert (found["version"], found["accepted"], found["trouble"]) == ("0.32.0", 27, "")
    with process("doctor", "--vllm", server.url, "--drafts", "tcp://10.0.0.1:5") as child:
        code, _, lines = ended(child)
    assert code == 2
    with process("doctor", "--drafts", server.address) as child:
        code, _, lines = ended(child)
    assert (code, lines[-1]) == (2, "Error: --drafts and --engine-key-env go with --vllm")
