"""Edges, the gateway, and real vLLM servers on this machine's CPU with the proposer in them.

The environment is made on first use (tests/vllm_env.py; several minutes, 4 GB in the cache folder),
and only where `make test-engines` asks for it. Texts are compared with those of a vLLM that has
never heard of drafts.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress

import httpx
import pytest

import vllm_env
from e2sci.emulation.link import LinkProfile
from e2sci.engines.hf_tokenizer import describe
from e2sci.engines.load import load_engine
from e2sci.runtime.connection import Refused
from gateways import edge_at, gateway
from guessing import Guessing
from live import free_port

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif("E2SCI_ENGINES" not in os.environ, reason="4 GB more: make test-engines"),
]

LENGTH = 32
PROMPTS = [
    f"{word} {i}: " for i, word in enumerate(["hello", "def f(", "Zürich 🙂", "x" * 90, "?"] * 10)
]
OPTIONS = [
    {"window": 1},
    {"window": 4},
    {"window": 8},
    {"mode": "sync", "window": 5},
    {"mode": "cloud"},
]
DELAYS = [0, 10, 60]  # ms of a round trip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    try:
        return vllm_env.tiny_model(tmp_path_factory.mktemp("vllm") / "tiny")
    except vllm_env.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def texts(folder):
    """Each prompt's ids with what plain vLLM writes behind them, its EOS left out."""
    about = describe(folder)
    found = {}
    with vllm_env.serving(folder, free_port()) as url:
        for prompt in PROMPTS:
            ids = about.tokenizer.encode(prompt, special=False)
            body = {"model": "tiny", "prompt": ids, "max_tokens": LENGTH, "temperature": 0}
            body["return_token_ids"] = True
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
            text = [t for t in answer["choices"][0]["token_ids"] if t not in about.eos_ids]
            found[prompt] = ids, text
    return found


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("d")
    folder.chmod(0o700)
    return f"ipc://{folder}/drafts"


@pytest.fixture(scope="module")
def url(folder, texts, address):
    with vllm_env.serving(folder, free_port(), drafts=address) as url:
        yield url


@pytest.fixture
async def cloud(folder, url, address):
    async with gateway([url], [address], about=describe(folder), slots=64) as cloud:
        yield cloud


def draft(folder, texts, **options):
    return Guessing(folder, *(ids + text for ids, text in texts.values()), **options)


async def counted(url: str) -> tuple[float, float, float]:
    """Of the server so far: steps that judged drafts, drafts accepted, tokens written."""
    wanted = ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens", "generation_tokens")
    async with httpx.AsyncClient() as client:
        lines = (await client.get(f"{url}/metrics")).text.splitlines()
    found = {
        name: float(line.rsplit(" ", 1)[1])
        for name in wanted
        for line in lines
        if line.startswith(f"vllm:{name}_total{{")
    }
    return tuple(found[name] for name in wanted)


# ---- the text -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, 4, 1], ids=["right", "one in four wrong", "always wrong"])
async def test_the_text_is_plain_vllms(folder, texts, cloud, wrong):
    """50 prompts, windows and delays in turn."""
    near = draft(folder, texts, wrong=wrong)
    for delay in DELAYS:
        async with edge_at(cloud, near=near, link=LinkProfile(rtt_ms=delay)) as edge:
            for i, (prompt, (_, text)) in enumerate(texts.items()):
                if DELAYS[i % len(DELAYS)] != delay:
                    continue
                options = OPTIONS[i % len(OPTIONS)]
                got = await edge.generate(prompt, raw=True, max_tokens=LENGTH, **options)
                assert got.token_ids == text, (prompt, options)
                if wrong == 0:
                    assert got.stats.corrections == 0


async def test_an_identical_draft_is_accepted_always(folder, texts, cloud, url):
    pytest.importorskip("transformers")
    near = load_engine(f"hf:{folder}", "draft", context=512, threads=1)
    try:
        async with edge_at(cloud, near=near) as edge:
            _, before, _ = await counted(url)
            for prompt, (_, text) in list(texts.items())[:10]:
                got = await edge.generate(prompt, raw=True, max_tokens=LENGTH, window=4)
                assert got.token_ids == text
                assert got.stats.corrections == 0
                assert got.stats.acceptance_rate in (None, 1.0)
            _, after, _ = await counted(url)
            assert after > before
    finally:
        near.close()


async def test_right_drafts_save_steps_and_eight_edges_share_the_server(folder, texts, cloud, url):
    """By vLLM's own counters: k drafts accepted in a step save k steps."""

    async def write(prompts) -> None:
        async with edge_at(cloud, near=draft(folder, texts, wrong=0)) as edge:
            for prompt in prompts:
                got = await edge.generate(prompt, raw=True, max_tokens=LENGTH)
                assert got.token_ids == texts[prompt][1]

    _, accepted, written = await counted(url)
    await asyncio.gather(*(write(PROMPTS[i::8]) for i in range(8)))
    _, accepted_now, written_now = await counted(url)
    saved = (accepted_now - accepted) / (written_now - written)
    print(f"steps a token with drafts: {1 - saved:.3f}")
    assert saved > 0.3


async def test_a_repetition_penalty_is_that_of_vllm_alone(folder, cloud):
    asked = {"raw": True, "max_tokens": LENGTH, "repetition_penalty": 1.3}
    ids = describe(folder).tokenizer.encode(PROMPTS[0], special=False)
    async with edge_at(cloud, near=Guessing(folder)) as edge:
        alone = (await edge.generate(PROMPTS[0], mode="cloud", **asked)).token_ids
    async with edge_at(cloud, near=Guessing(folder, ids + alone, wrong=5)) as edge:
        got = await edge.generate(PROMPTS[0], window=4, **asked)
        assert got.token_ids == alone


async def test_a_build_that_draws_nonsense_beside_drafts_is_found_out(folder, url, address):
    """As the CPU builds do (docs/vllm-native.md). When they don't any more, this fails, and what
    is drawn with drafts can be compared with what is drawn without."""
    async with (
        gateway([url], [address], about=describe(folder), times=None) as cloud,
        edge_at(cloud, near=Guessing(folder)) as edge,
    ):
        assert cloud.examined[0].accepted
        assert not cloud.examined[0].samples
        with pytest.raises(Refused, match="set the temperature to 0"):
            await edge.generate("hello", temperature=1.0, accept="rejection", max_tokens=5)


# ---- faults -------------------------------------------------------------------------------


async def test_faults_at_random_moments_change_nothing(folder, texts, url, address):
    """The edge, its connection, the gateway, the drafts' socket: 100 runs."""
    rng = random.Random(5)
    near = draft(folder, texts, wrong=7)
    for run in range(100):
        prompt = PROMPTS[run % len(PROMPTS)]
        text, fault = texts[prompt][1], ("edge", "link", "gateway", "socket")[run % 4]
        written: list[int] = []

        async def write(edge, prompt=prompt, written=written) -> None:
            asked = {"raw": True, "max_tokens": LENGTH, "window": rng.choice([1, 4, 8])}
            async for piece in edge.stream(prompt, **asked):
                written += [commit.token for commit in piece.commits]

        async with (
            gateway([url], [address], about=describe(folder)) as one,
            gateway([url], [address], about=describe(folder)) as two,
            edge_at(one, two, near=near, link=LinkProfile(rtt_ms=5)) as edge,
        ):
            task = asyncio.create_task(write(edge))
            await asyncio.sleep(rng.uniform(0, 0.4))
            if fault == "edge":
                task.cancel()
            elif fault == "link":
                await edge.links[-1].close()
            elif fault == "gateway":
                one.draining = True
                await one.desk.close()
                await edge.links[0].close()
            else:
                one._servers.sender.close()
                two._servers.sender.close()
            with suppress(asyncio.CancelledError):
                await task
        ended = [t for t in written if t not in near.info.eos_ids]
        assert ended == (text[: len(ended)] if fault == "edge" else text), (run, fault)


async def test_a_proposer_whose_socket_dies_changes_nothing(folder, texts, tmp_path):
    """At random steps, 100 runs. It comes back each time."""
    tmp_path.chmod(0o700)
    address, proposer = f"ipc://{tmp_path}/drafts", "vllm_classes.Dying"
    with vllm_env.serving(folder, free_port(), drafts=address, proposer=proposer) as url:
        async with gateway([url], [address], about=describe(folder), slots=4) as cloud:

            async def write(number: int) -> None:
                async with edge_at(cloud, near=draft(folder, texts, wrong=7)) as edge:
                    for prompt in PROMPTS[number::4] * 2:
                        got = await edge.generate(prompt, raw=True, max_tokens=LENGTH, window=4)
                        assert got.token_ids == texts[prompt][1], prompt

            await asyncio.gather(*(write(number) for number in range(4)))
            judged, accepted, _ = await counted(url)
    deaths = (tmp_path / "drafts.deaths").read_text().splitlines()
    assert len(deaths) >= 10
    assert judged > 0
    assert accepted > 0


@pytest.mark.parametrize("version", ["before"])
async def test_the_version_before(folder, texts, version, tmp_path):
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/drafts"
    overlay = vllm_env.before()
    with vllm_env.serving(folder, free_port(), drafts=address, overlay=overlay) as url:
        async with gateway([url], [address], about=describe(folder), times=None) as cloud:
            [found] = cloud.examined
            assert found.version.startswith("0.31.")
            assert found.accepted
            async with edge_at(cloud, near=draft(folder, texts)) as edge:
                for prompt in PROMPTS[:5]:
                    got = await edge.generate(prompt, raw=True, max_tokens=LENGTH)
                    assert got.token_ids == texts[prompt][1]
