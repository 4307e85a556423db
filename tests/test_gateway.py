"""The gateway in front of stand-ins for vLLM, which run the real proposer."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from e2sci.runtime.connection import EdgeError, Refused
from e2sci.runtime.request import CloudLost
from gateways import LONG, PROMPT, drafted, edge_at, expected, gateway, joined
from live import draft, pair, target, until
from streaming_server import MOST, StreamingServer

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
async def test_the_text_is_the_servers_own(vllm, options):
    async with joined(vllm) as edge:
        for prompt in ("hello", "def add(a, b):", "Zürich 🙂"):
            got = await edge.generate(prompt, **{**LONG, **options})
            assert got.token_ids == await expected(prompt)


async def test_drafts_are_judged_in_the_servers_own_steps(vllm):
    async with joined(vllm, near=target()) as edge:
        got = await drafted(edge, vllm)
        assert got.token_ids == await expected()
        assert got.stats.corrections == 0
        assert got.stats.acceptance_rate == 1
        assert got.stats.cloud_passes == len(vllm.steps[-1]) < len(got.token_ids)
        assert 1 < max(vllm.steps[-1]) <= MOST + 1


async def test_drafts_that_are_always_wrong_change_nothing(vllm):
    async with joined(vllm, near=draft(random=True)) as edge:
        got = await edge.generate("hello", **LONG)
        assert got.token_ids == await expected("hello")


async def test_without_a_proposer_there_is_the_plain_stream():
    with StreamingServer(seconds=0.001) as vllm:
        async with joined(vllm, near=target()) as edge:
            got = await edge.generate(PROMPT, **LONG)
            assert got.token_ids == await expected()
            assert set(vllm.steps[-1]) == {1}


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_no_more_tokens_than_asked_for(vllm, most):
    async with joined(vllm, near=target()) as edge:
        got = await edge.generate(PROMPT, max_tokens=most, window=8)
        assert len(got.token_ids) == most
        assert got.finish_reason == "length"
        assert vllm.requests[-1]["max_tokens"] == most


async def test_log_probabilities_are_the_targets(vllm):
    async with pair() as edge:
        there = await edge.generate(PROMPT, mode="cloud", logprobs=3, max_tokens=20)
    async with joined(vllm, near=target()) as edge:
        got = await drafted(edge, vllm, logprobs=3, max_tokens=20)
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
async def test_what_cant_be_served_as_promised_is_refused(vllm, options, reason):
    async with joined(vllm) as edge:
        with pytest.raises(Refused, match=reason):
            await edge.generate(PROMPT, **LONG, **options)
        assert not vllm.requests


async def test_sampling_is_the_servers_own(vllm):
    asked = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}
    async with joined(vllm) as edge:
        got = await edge.generate(PROMPT, accept="rejection", max_tokens=20, **asked)
        assert {k: vllm.requests[-1][k] for k in asked} == asked
        assert got.token_ids
        await edge.generate(PROMPT, mode="cloud", max_tokens=20, **asked)
        assert {k: vllm.requests[-1][k] for k in asked} == asked


async def test_a_text_that_goes_on_draws_anew(vllm):
    vllm.die = [4]
    async with joined(vllm) as edge:
        await edge.generate(
            PROMPT, accept="rejection", temperature=1.0, seed=2**63 - 1, max_tokens=20
        )
    first, second = vllm.requests
    written = len(second["prompt"]) - len(first["prompt"])
    assert written >= 4
    assert second["seed"] == written - 1
    assert second["max_tokens"] == 20 - written


# ---- faults -------------------------------------------------------------------------------


async def test_a_server_that_breaks_off_is_asked_to_go_on(vllm):
    vllm.die = [3, 1, 2, 1]
    async with joined(vllm, near=target()) as edge:
        got = await edge.generate(PROMPT, **LONG)
        assert got.token_ids == await expected()
        assert len(vllm.requests) == 5
        assert not got.notices


async def test_another_server_goes_on_where_one_has_failed(vllm, tmp_path):
    with StreamingServer(f"ipc://{tmp_path}/other", seconds=0.003) as other:
        async with joined(vllm, other) as edge:
            for _ in range(4):
                vllm.die, other.die = [3], [3]
                got = await edge.generate(PROMPT, **LONG)
                assert got.token_ids == await expected()
            vllm.fail = [500] * 9
            got = await edge.generate(PROMPT, **LONG)
            assert got.token_ids == await expected()


async def test_when_no_server_answers_the_edge_may_ask_again(drafts_at):
    with StreamingServer(drafts_at, seconds=0.003) as vllm:
        async with joined(vllm, patience=20) as edge:
            vllm.die = [3]
            vllm.fail = []
            task = asyncio.create_task(edge.generate(PROMPT, **LONG))
            await until(lambda: vllm.requests)
            vllm.fail = [503, 503]
            got = await task
            assert got.token_ids == await expected()
            assert any("answered 503" in notice for notice in got.notices)
            vllm.fail = [400]
            with pytest.raises((Refused, EdgeError), match="it is broken"):
                await edge.generate(PROMPT, **LONG)


async def test_a_server_that_stays_away_is_given_up(vllm):
    vllm.fail = [503] * 1000
    async with joined(vllm, patience=0.5) as edge:
        with pytest.raises(Refused, match="answered 503"):
            await edge.generate(PROMPT, **LONG)
    vllm.fail, vllm.die = [], [3]
    async with joined(vllm, patience=0.5) as edge:
        task = asyncio.create_task(edge.generate(PROMPT, **LONG))
        await until(lambda: vllm.steps)
        vllm.fail = [503] * 1000
        with pytest.raises(CloudLost, match="answered 503"):
            await task


async def test_nonsense_from_a_server_ends_the_request_only(vllm):
    async with joined(vllm) as edge:
        for nonsense, said in (
            (b"data: {", "unexpected answer"),
            (b'data: {"choices": [{"token_ids": [99999], "finish_reason": null}]}', "99999"),
            (b"data: " + b"x" * (1 << 21), "more than 1 MiB"),
            (b'data: {"choices": [{"text": "no ids"}]}', "is it a vLLM server"),
        ):
            vllm.fail = [nonsense + b"\n\n"]
            with pytest.raises((Refused, EdgeError), match=said):
                await edge.generate(PROMPT, **LONG)
        got = await edge.generate(PROMPT, **LONG)
        assert got.token_ids == await expected()


async def test_a_proposer_that_loses_its_socket_costs_nothing_but_speed(vllm):
    async with joined(vllm, near=target()) as edge:
        await drafted(edge, vllm)
        vllm.proposer._receiver.close()
        got = await edge.generate(PROMPT, **LONG)
        assert got.token_ids == await expected()
        assert set(vllm.steps[-1]) == {1}


async def test_an_edge_that_goes_ends_the_request_at_the_server(vllm):
    vllm.seconds = 0.02
    async with joined(vllm) as edge:
        task = asyncio.create_task(edge.generate(PROMPT, max_tokens=2000))
        await until(lambda: vllm.steps and len(vllm.steps[-1]) > 3)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await until(lambda: edge.cloud.desk.empty.is_set())
        await until(lambda: vllm.left == 1)


async def test_a_resume_at_another_gateway_is_the_same_text(vllm):
    async with (
        gateway([vllm.url], [vllm.address]) as one,
        gateway([vllm.url], [vllm.address]) as two,
        edge_at(one, two, near=target()) as edge,
    ):
        vllm.seconds = 0.01
        task = asyncio.create_task(edge.generate(PROMPT, **LONG))
        await until(lambda: vllm.steps and len(vllm.steps[-1]) > 3)
        serving = one if one.desk._guests else two
        serving.draining = True
        for guest in list(serving.desk._guests):
            guest.send([])
            await next(iter(edge._clouds.connections))._channel.close()
        got = await task
        assert got.token_ids == await expected()
        assert got.stats.reconnects == 1
