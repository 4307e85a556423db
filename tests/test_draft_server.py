"""A draft model that a server runs: the same drafts as here, and what ends well when it doesn't."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from e2sci import load_engine
from e2sci.cli import main
from e2sci.engines.base import EngineError, Step, Wrapper
from e2sci.engines.llama_server import LlamaServer, served_file
from e2sci.engines.sglang import SGLang
from e2sci.engines.vllm import Vllm
from live import LiveCloud, draft, free_port, pair, target
from remote_servers import DESCRIPTION, SGLangServer, StandIn, VllmServer
from remote_servers import LlamaServer as LlamaStandIn
from tiny_gguf import REAL, gguf

KINDS = {
    "vllm": (VllmServer, Vllm),
    "sglang": (SGLangServer, SGLang),
    "llama-server": (LlamaStandIn, LlamaServer),
}
SAMPLED = {"temperature": 0.8, "top_k": 9, "seed": 3}


@pytest.fixture(params=KINDS)
def served(request):
    """A server that runs the draft of `live`, and an engine in front of it."""
    stand_in, kind = KINDS[request.param]
    with stand_in(divergence=0.5) as server:
        engine = kind(server.url, tokenizer=DESCRIPTION, slots=2)
        yield server, engine
        engine.close()


@pytest.mark.parametrize(
    "asked",
    [
        {"mode": "draft"},
        {"mode": "draft", **SAMPLED},
        {"mode": "sync", "accept": "rejection", **SAMPLED},
        {"mode": "sync", "accept": "elastic"},
    ],
)
async def test_it_drafts_as_the_same_model_does_here(served, asked):
    async with pair(draft()) as edge:
        here = await edge.generate("hello", max_tokens=30, **asked)
    async with pair(served[1]) as edge:
        there = await edge.generate("hello", max_tokens=30, **asked)
    assert there.token_ids == here.token_ids


@pytest.mark.parametrize(
    "asked", [{"temperature": 1.0}, {"frequency_penalty": 0.5, "logit_bias": {104: 3.0}}]
)
async def test_the_text_is_the_targets_where_the_k_best_do_not_suffice(served, asked):
    asked = {"max_tokens": 30, "seed": 4, **asked}
    async with pair(served[1]) as edge:
        alone = await edge.generate("hello", mode="cloud", **asked)
        drafted = await edge.generate("hello", mode="sync", **asked)
    assert drafted.token_ids == alone.token_ids
    assert drafted.stats.accepted > 0


@pytest.mark.parametrize("asked", [{"mode": "auto"}, {"mode": "sync"}, {"fill": False}])
async def test_a_server_that_goes_away_costs_its_drafts_and_not_the_answer(served, asked):
    server, engine = served
    waits = asked != {"mode": "auto"}  # with fill the text may end before the draft is given up
    async with asyncio.timeout(20), pair(engine) as edge:
        alone = await edge.generate("hello", mode="cloud", max_tokens=40)
        server.fail = [500]
        broken = await edge.generate("hello", max_tokens=40, **asked)
        assert broken.token_ids == alone.token_ids
        assert not waits or "the draft model failed, so the cloud goes on" in broken.notices[0]
        server.__exit__()
        gone = await edge.generate("hello", max_tokens=40, **asked)
        assert gone.token_ids == alone.token_ids
        assert not waits or "is it running?" in gone.notices[0]
        server.__enter__()  # on the same port
        back = await edge.generate("hello", max_tokens=40, mode="sync")
        assert back.token_ids == alone.token_ids
        assert back.stats.accepted > 0


# --- llama-server -------------------------------------------------------------------------------


def test_each_sequence_has_a_slot_and_each_distribution_a_call():
    with LlamaStandIn() as server:
        engine = LlamaServer(server.url, tokenizer=DESCRIPTION, slots=2)
        engine.forward([Step(0, [1, 2, 3], 2), Step(1, [4])])
        engine.forward([Step(1, [5], 0)])
        assert [(r["id_slot"], r["prompt"]) for r in server.requests] == [
            (0, [1, 2]), (0, [1, 2, 3]), (1, [4]),
        ]  # fmt: skip
        assert (engine.info.name, engine.info.context) == ("big", 4096)
        server.fail = [b"{}"]
        with pytest.raises(EngineError, match="unexpected answer"):
            engine.forward([Step(0, [1])])
        server.fail = [b'{"completion_probabilities": []}']
        with pytest.raises(EngineError, match="0 rows of log-probs"):
            engine.forward([Step(0, [1])])


def test_a_token_that_ends_within_a_character_is_drafted_too():
    """The server says nothing of a token that it can't show as text."""
    behind = [1, 2, 3]
    [[p]] = target().forward([Step(0, behind)])
    while int(np.argmax(p.logits)) < 128 or int(np.argmax(p.logits)) > 255:
        behind.append(behind[-1] + 1)
        [[p]] = target().forward([Step(0, behind)])
    with LlamaStandIn() as server:
        [[q]] = LlamaServer(server.url, tokenizer=DESCRIPTION).forward([Step(0, behind)])
    assert q.argmax == p.argmax
    assert q.log_prob(q.ids) == pytest.approx(p.log_prob(q.ids), abs=1e-4)


# --- by name ------------------------------------------------------------------------------------


class Kept(Wrapper):
    """One that a cloud does not close when it starts."""

    def close(self) -> None:
        pass


@pytest.fixture
def tiny(tmp_path):
    """A llama-server of a tiny GGUF file, its file, and a cloud with the same model."""
    llama_cpp = pytest.importorskip("e2sci.engines.llama_cpp")
    pytest.importorskip("llama_cpp")
    path = gguf(tmp_path / "tiny.gguf")
    engines = [llama_cpp.LlamaCpp(path, threads=1) for _ in range(2)]
    with LlamaStandIn(engine=engines[0], max_len=97, key="secret") as server:
        server.file = path
        with LiveCloud(Kept(engines[1])) as cloud:
            yield server, path, cloud
    for engine in engines:
        engine.close()


def test_the_command_line_needs_no_more_than_the_address(tiny, monkeypatch):
    server, path, cloud = tiny
    monkeypatch.setenv("DRAFT_KEY", "secret")

    def run(draft: str, *more: str) -> dict:
        asked = ["run", "hi", "--raw", "--json", "--max-tokens", "20", "--draft", draft, *more]
        done = CliRunner().invoke(main, [*asked, "--cloud", cloud.url])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    name, key = f"llama-server:{server.url}", ("--draft-key-env", "DRAFT_KEY")
    for mode in ("draft", "sync"):
        here = run(str(path), "--mode", mode)
        for more in ((), ("--draft-tokenizer", str(path))):
            there = run(name, *key, *more, "--mode", mode)
            assert there["token_ids"] == here["token_ids"]
            assert there["stats"]["corrections"] == here["stats"]["corrections"] == 0
    assert server.requests


def test_a_gguf_file_says_what_it_says_when_it_is_loaded(tmp_path):
    llama_cpp = pytest.importorskip("e2sci.engines.llama_cpp")
    pytest.importorskip("llama_cpp")
    path = gguf(tmp_path / "tiny.gguf", add_bos=True)
    about, engine = llama_cpp.describe_gguf(path), llama_cpp.LlamaCpp(path, threads=1)
    info = engine.info
    for name in ("name", "vocab_size", "real_vocab", "eos_ids", "template", "bos", "eos"):
        assert getattr(about, name) == getattr(info, name)
    names = [[t.name(i) for i in range(REAL)] for t in (about.tokenizer, engine.tokenizer)]
    assert names[0] == names[1]
    engine.close()
    with pytest.raises(EngineError, match="not a GGUF file"):
        llama_cpp.describe_gguf(__file__)


def test_a_file_that_is_not_here():
    with LlamaStandIn() as server:
        assert served_file(server.url, None) is None
        server.file = "x" * 5000 + ".gguf"
        assert served_file(server.url, None) is None
        with pytest.raises(EngineError, match=r"needs its model's tokenizer \(--draft-tokenizer\)"):
            load_engine(f"llama-server:{server.url}", "draft")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("openai:https://127.0.0.1:1", "openai can't draft: a draft server must give token ids"),
        ("ollama:http://127.0.0.1:1", "give text, which has other ids when it is tokenised anew"),
        ("http://127.0.0.1:1", "as llama-server:URL, vllm:URL and sglang:URL do"),
        ("vllm:http://127.0.0.1:1", "needs its model's tokenizer (--draft-tokenizer)"),
        ("vllm:http://127.0.0.1:1 --draft-tokenizer no/such/folder", "no/such/folder"),
        ("synthetic --draft-tokenizer x", "go with a draft that a server runs"),
        ("vllm:http://127.0.0.1:1 --draft-key-env NOT_SET", "--draft-key-env names NOT_SET"),
        (f"llama-server:http://127.0.0.1:{free_port()}", "is it running?"),
    ],
)
def test_mistakes(args, words):
    for command in ("run hello", "doctor", "chat", "serve"):
        done = CliRunner().invoke(main, [*command.split(), "--draft", *args.split()])
        assert done.exit_code == 2
        assert words in done.stderr.replace("\n", " ")


class TextOnly(StandIn):
    """OpenAI's completions as servers give them that know text alone."""

    path = "/v1/completions"

    def answer(self, request):
        top = {" the": -0.1, **{f" a{i}": -9.0 for i in range(20)}}
        logprobs = {"tokens": [" the"], "token_logprobs": [-0.1], "top_logprobs": [top]}
        return {"choices": [{"index": 0, "text": " the", "logprobs": logprobs}]}


def test_another_server_is_found_out_at_once(tiny):
    _, path, _ = tiny
    with TextOnly() as server:
        with pytest.raises(EngineError, match="gave tokens as text, not as ids"):
            load_engine(f"vllm:{server.url}", "draft", tokenizer=path)
        with pytest.raises(EngineError, match="answered 404"):
            load_engine(f"llama-server:{server.url}", "draft", tokenizer=path)
    small = replace(DESCRIPTION, real_vocab=100)
    with LlamaStandIn() as server, pytest.raises(EngineError, match="is the tokenizer the model's"):
        LlamaServer(server.url, tokenizer=small).forward([Step(0, [1])])
