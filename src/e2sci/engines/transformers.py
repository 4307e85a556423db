"""Hugging Face transformers in this process: safetensors and GGUF models, on a CPU or a GPU.

    folder │ owner/repo │ file.gguf ── load ──► model ── checked ──► forward, truncate

A pass is one forward call for any number of sequences: their tokens lie end to end in one row, and
attention is ours (`packed_attention`), with caches that can be cut anywhere. Of the logits only the
rows that were asked for are computed and leave the device.

Whether a model bears this is found out and not guessed: after loading a few tokens run the
library's own way and ours, and logits that differ refuse the model. So do layers that keep anything
but keys and values (recurrent and hybrid models), since that can't be cut back.

Safetensors only, no code from a repository or the hub, no pickle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("USE_HUB_KERNELS", "NO")  # or transformers may fetch compiled code

import torch
import transformers

from e2sci.decoding.distribution import Dense, Distribution
from e2sci.engines.base import (
    EngineError,
    ModelInfo,
    ModelNotFound,
    Step,
    require_feasible,
)
from e2sci.engines.hf_tokenizer import Description, HfTokenizer, describe
from e2sci.engines.packed_attention import NAME, Caches, Packed

_CHECKED = (5, 3)  # tokens of the two passes that a model is checked with
_TOLERANCE = {2: 0.1, 4: 0.01, 8: 0.01}  # of the logits' own spread, by bytes of a number
_ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
"""Tokens that end a text by their name: a GGUF file says of one only that it does."""


class Transformers:
    """One causal language model with the caches of `slots` sequences.

    `path`: a folder as `save_pretrained` writes it, or a GGUF file, whose weights are unpacked to
    `dtype`. `context`: tokens a sequence can hold, cut to what the model was trained for; its cache
    is set aside at the start. `threads`: None leaves torch's own choice; counts for the whole
    process. `gpu_layers`: 0 for the CPU, -1 for the GPU; a model isn't divided. `dtype`: a torch
    type's name; None for float32 on a CPU and half precision on a GPU (the checkpoint's kind, or
    bfloat16). Raises EngineError if the model can't be loaded or isn't fit for this engine.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        context: int = 4096,
        slots: int = 1,
        threads: int | None = None,
        gpu_layers: int = 0,
        dtype: str | None = None,
    ) -> None:
        if slots < 1:
            raise EngineError("the transformers engine needs 1 slot at least")
        if threads:
            torch.set_num_threads(threads)
        path = Path(path).expanduser()
        known = _describe(path)
        self._device = _device(gpu_layers)
        with _plain_errors(f"can't load {path}"):
            self._model = _load(path, self._device, dtype)
        self.slots, self.tokenizer = slots, known.tokenizer
        context = min(context, _trained_context(self._model.config.get_text_config()))
        self._lengths = [0] * slots
        self._caches: Caches | None = Caches(slots, context)
        with _plain_errors(f"{path} can't be run"):
            vocab_size = self._check(path)
        self.info = ModelInfo(
            name=name or known.name,
            vocab_size=vocab_size,
            real_vocab=_without_padding(known, vocab_size),
            context=context,
            eos_ids=frozenset(i for i in known.eos_ids if i < vocab_size),
            template=known.template,
            bos=known.bos,
            eos=known.eos,
        )

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        """One pass. Also raises ValueError on steps that make no sense, before anything is fed."""
        require_feasible(self, steps)
        with _plain_errors(f"a pass of {sum(len(step.tokens) for step in steps)} tokens failed"):
            rows = iter(self._run(steps).numpy())
        for step in steps:
            self._lengths[step.sequence] += len(step.tokens)
        return [[Dense(next(rows)) for _ in range(step.outputs)] for step in steps]

    def length(self, sequence: int) -> int:
        if self._caches is None:
            raise EngineError("the model is closed")
        if not 0 <= sequence < self.slots:
            raise ValueError(f"sequence {sequence} is out of range; slots: {self.slots}")
        return self._lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Also raises ValueError if `length` is not 0 … the present length."""
        held = self.length(sequence)
        if not 0 <= length <= held:
            raise ValueError(f"can't cut a cache of {held} tokens to {length}")
        self._lengths[sequence] = length

    def close(self) -> None:
        self._model = self._caches = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, steps: Sequence[Step]) -> torch.Tensor:
        """The logits asked for: (outputs of all steps, vocabulary), float32, on the CPU."""
        assert self._caches is not None
        row = Packed(steps, self._lengths, self._caches, self._device)
        if not row.spans:
            return torch.empty((0, 0))
        with torch.inference_mode():
            made = self._model(
                input_ids=row.ids,
                position_ids=row.positions,
                use_cache=False,
                logits_to_keep=row.outputs,
                packed=row,
            )
            return made.logits[0].float().cpu()

    def _check(self, path: Path) -> int:
        """Compare the library's own pass with ours, and ours in two; the number of logits.

        Raises EngineError if they differ. What differs less than rounding does isn't found: a
        window longer than the few tokens fed is seen from the configuration instead.
        """
        size = self._model.get_input_embeddings().num_embeddings
        tokens = [i * 7919 % size for i in range(1, sum(_CHECKED) + 1)]
        ids = torch.tensor([tokens], device=self._device)
        with torch.inference_mode():
            wanted = self._model(input_ids=ids, use_cache=False).logits[0].float().cpu()
        self._model.set_attn_implementation(NAME)
        found = []
        for start, n in ((0, _CHECKED[0]), _CHECKED):
            found.append(self._run([Step(0, tokens[start : start + n], n)]))
            self._lengths[0] = n
        self._lengths[0] = 0
        assert self._caches is not None
        if odd := _oddity(self._model.config.get_text_config(), self._caches.windows):
            raise EngineError(f"{path} can't be run on this engine: {odd}")
        off = torch.dist(torch.cat(found), wanted) / torch.dist(wanted, wanted.mean())
        if not off <= _TOLERANCE[self._model.dtype.itemsize]:  # nor if it isn't a number
            raise EngineError(
                f"{path} can't be run on this engine: it doesn't compute what transformers itself "
                "does, so its attention must be of another kind; try llama.cpp"
            )
        return int(wanted.shape[-1])


def _load(path: Path, device: torch.device, dtype: str | None) -> Any:
    """The model, whole and ready. Raises whatever the library does, or EngineError."""
    gguf = path.suffix == ".gguf"
    transformers.logging.set_verbosity_error()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent if gguf else path,
        gguf_file=path.name if gguf else None,
        dtype=getattr(torch, dtype) if dtype else _dtype(path, device),
        device_map={"": device},
        use_safetensors=None if gguf else True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise EngineError(
            f"{path} lacks {len(missing)} of the model's tensors ({missing[0]}, …); is it a causal "
            "language model, and whole?"
        )
    return model.eval()


def _dtype(path: Path, device: torch.device) -> torch.dtype:
    """Float32 on a CPU; on a GPU the half precision the checkpoint is in, else bfloat16."""
    if device.type == "cpu":
        return torch.float32
    if path.suffix != ".gguf":
        kept = transformers.AutoConfig.from_pretrained(path, local_files_only=True).dtype
        if kept in (torch.float16, torch.bfloat16):
            return kept
    return torch.bfloat16


def _device(gpu_layers: int) -> torch.device:
    """Where the model goes. Raises EngineError."""
    if gpu_layers == 0:
        return torch.device("cpu")
    if gpu_layers > 0:
        raise EngineError(
            "the transformers engine doesn't divide a model; use -1 GPU layers for the GPU, 0 for "
            "the CPU"
        )
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise EngineError("torch finds no GPU here; use 0 GPU layers, or a torch built for yours")
    return found


def _describe(path: Path) -> Description:
    """The model's tokenizer and settings. Raises EngineError."""
    if not path.exists():
        raise ModelNotFound(f"no model {path}; name a folder with safetensors in it or a GGUF file")
    if path.suffix != ".gguf":
        return describe(path)
    with _plain_errors(f"can't read the vocabulary of {path}"):
        read = transformers.AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
        tokenizer = HfTokenizer(read.backend_tokenizer)
    return Description(
        name=path.stem,
        tokenizer=tokenizer,
        real_vocab=tokenizer.size,
        eos_ids=frozenset({read.eos_token_id, *map(tokenizer.id_of, _ENDS)} - {None}),
        template=read.chat_template,
        bos=tokenizer.first(),
        eos=read.eos_token or "",
    )


def _without_padding(known: Description, size: int) -> int:
    """Ids up to the last that stands for a token: converters to GGUF name those behind it so."""
    size = min(size, known.real_vocab)
    while size and known.tokenizer.name(size - 1) == f"[PAD{size - 1}]".encode():
        size -= 1
    return size


def _trained_context(config: Any) -> int:
    """Tokens the model was trained for; without such a limit, a number no context reaches.

    Rotations that change with a text's length would make caches stale: there it's the length up to
    which they don't.
    """
    longest = getattr(config, "max_position_embeddings", None) or 1 << 31
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for kind in [rope] if "rope_type" in rope else rope.values():
        if isinstance(kind, dict) and kind.get("rope_type") in ("dynamic", "longrope"):
            original = getattr(config, "original_max_position_embeddings", None)
            longest = min(
                longest, kind.get("original_max_position_embeddings") or original or longest
            )
    return int(longest)


def _oddity(config: Any, windows: dict[int, int | None]) -> str | None:
    """Why the layers can't be run here, None if they can. `windows`: of those that attended."""
    if len(windows) < config.num_hidden_layers:
        return (
            f"{config.num_hidden_layers - len(windows)} of its {config.num_hidden_layers} layers "
            "keep a state that can't be cut back (recurrent, hybrid), or attend in their own way"
        )
    kinds = getattr(config, "layer_types", None) or []
    if other := set(kinds) - {"full_attention", "sliding_attention"}:
        return f"it has layers of {min(other)}"
    if any(kind == "sliding_attention" and not windows[i] for i, kind in enumerate(kinds)):
        return "its sliding layers don't tell how wide their window is"
    return None


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Whatever torch and transformers raise as an EngineError of one line."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # the libraries raise anything
        raise EngineError(f"{what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in text:
        return "not enough memory; use a smaller context, fewer slots or a smaller model"
    if "trust_remote_code" in text:
        return "it brings code of its own, which isn't run here"
    if "does not recognize this architecture" in text:
        return "this transformers doesn't know its architecture; a newer one may"
    if "Unrecognized configuration class" in text:
        return "it's no causal language model that transformers knows"
    first = text.split(". ")[0] or type(error).__name__
    return first if len(first) <= 200 else first[:199] + "…"
