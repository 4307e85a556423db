"""A model's name to a running engine.

synthetic[:key=value,…]        the synthetic model (SyntheticConfig)
qwen2.5-coder[:draft|:target]  the catalogue, fetched when needed
path/to/file.gguf              a file
owner/repo[:file.gguf]         the Hugging Face hub
hf:path/to/folder              safetensors in Hugging Face's format, run by transformers
hf:owner/repo                  the same from the hub
hf:…                           any GGUF named as above, run by transformers
KIND:http://HOST:PORT          a draft that a server runs: llama-server, vllm or sglang

Without `hf:`, GGUF files are run by llama.cpp.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from e2sci.engines import catalog, fetch
from e2sci.engines.base import Engine, EngineError, ModelNotFound, Step
from e2sci.engines.catalog import Role
from e2sci.engines.fetch import Progress
from e2sci.engines.synthetic import Synthetic, SyntheticConfig

if TYPE_CHECKING:
    from e2sci.engines.hf_tokenizer import Description  # else only where they are used: an extra
    from e2sci.engines.remote import Remote

DEFAULT = "qwen2.5-coder"
HF = "hf:"
_SERVER = re.compile(r"(?:([\w.-]+):)?(https?://.*)")


def load_engine(
    name: str,
    role: Role,
    *,
    context: int = 4096,
    slots: int = 1,
    threads: int | None = None,
    gpu_layers: int = 0,
    apart: bool = False,
    tokenizer: str | Path | None = None,
    key: str | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Load the model called `name`; `role` says which of a pair. Raises EngineError.

    `context`: tokens a sequence; `slots`: sequences at once; `threads`: CPU threads (None: all
    cores this process may use); `gpu_layers`: layers on the GPU, -1 for all (transformers takes
    no other number); `apart`: of llama.cpp, see LlamaCpp. Of a server:
    `tokenizer` is a folder, owner/repo or a GGUF file, None for the file that a llama-server says
    it runs; `key` what it wants; threads and GPU are its own.
    """
    if role == "draft" and (server := _SERVER.fullmatch(name)):
        return _behind(server[1], server[2], tokenizer, key, context=context, slots=slots)
    if tokenizer is not None or key is not None:
        raise EngineError(
            "a tokenizer and a key go with a draft that a server runs, as in "
            f"vllm:http://127.0.0.1:8000; {name} is loaded here"
        )
    if name == "synthetic" or name.startswith("synthetic:"):
        config = SyntheticConfig.parse(name.partition(":")[2])
        return Synthetic(config, slots)
    if name.startswith(HF):
        try:
            from e2sci.engines.transformers import Transformers  # heavy, and an extra
        except ImportError as error:
            raise EngineError(
                f'transformers is missing ({error}); run: pip install "e2sci[transformers]"'
            ) from error
        return Transformers(
            _hf_path(name.removeprefix(HF), role, progress),
            name=name,
            context=context,
            slots=slots,
            threads=threads,
            gpu_layers=gpu_layers,
        )
    from e2sci.engines.llama_cpp import LlamaCpp  # heavy, and an extra

    path = catalog.local_path(name, role, progress=progress)
    pair = catalog.matching(name) and ":" not in name
    called = f"{name}:{role}" if pair else name
    return LlamaCpp(
        path,
        name=called,
        context=context,
        slots=slots,
        threads=threads,
        gpu_layers=gpu_layers,
        apart=apart,
    )


def _behind(
    kind: str | None,
    url: str,
    tokenizer: str | Path | None,
    key: str | None,
    *,
    context: int,
    slots: int,
) -> Engine:
    """The model that a server runs, once it has shown that it gives ids."""
    if kind not in ("llama-server", "vllm", "sglang"):
        raise EngineError(
            f"{kind or url} can't draft: a draft server must give token ids with log-probs, as "
            "llama-server:URL, vllm:URL and sglang:URL do. Others (OpenAI, Ollama, LM Studio, "
            "llama-cpp-python's) give text, which has other ids when it is tokenised anew"
        )
    made: type[Remote]
    if kind == "llama-server":
        from e2sci.engines.llama_server import LlamaServer, served_file

        made, tokenizer = LlamaServer, tokenizer or served_file(url, key)
    elif kind == "vllm":
        from e2sci.engines.vllm import Vllm as made
    else:
        from e2sci.engines.sglang import SGLang as made
    if tokenizer is None:
        raise EngineError(
            f"{kind}:{url} needs its model's tokenizer (--draft-tokenizer): a folder, owner/repo "
            "or a GGUF file"
        )
    about: str | Path | Description = tokenizer
    if str(tokenizer).endswith(".gguf"):
        from e2sci.engines.llama_cpp import describe_gguf

        about = describe_gguf(tokenizer)
    engine = made(url, tokenizer=about, key=key, context=context, slots=slots)
    try:
        engine.forward([Step(0, engine.tokenizer.encode("a", special=False))])
        engine.truncate(0, 0)
    except BaseException:
        engine.close()
        raise
    return engine


def _hf_path(name: str, role: Role, progress: Progress | None) -> Path:
    """The folder or GGUF file that `hf:name` stands for, downloaded if it must be."""
    if catalog.matching(name) or name.endswith(".gguf"):
        return catalog.local_path(name, role, progress=progress)
    with suppress(OSError, ValueError, RuntimeError):  # too long, a null byte, ~ of nobody
        path = Path(name).expanduser()
        if name and path.is_dir():
            return path
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        return fetch.hub_folder(name, progress)
    raise ModelNotFound(
        f"no model folder {name!r}; name a folder with safetensors, a .gguf file, or owner/repo "
        "on the hub"
    )
