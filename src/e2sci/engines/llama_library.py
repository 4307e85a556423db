"""llama.cpp's shared library: loading it, keeping it quiet, and why it failed.

It logs through one callback and reports failures as bare codes, so what it logged as an error is
kept until the next attempt.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from functools import cache
from importlib.metadata import version
from typing import Any

from e2sci.engines.base import EngineError

log = logging.getLogger("e2sci.engine")

errors: list[str] = []
"""What the library logged as errors since the last attempt began."""


@cache
def library() -> Any:
    """The C interface, silenced. Raises EngineError if it isn't installed or doesn't load."""
    # Tiled kernels pad 8 … 15 tokens to 16: 430 ms a pass of 8, 337 without (1.5B Q4_K_M, one core
    # with AVX-512). They win 7 % on long prompts, which is felt less often. Read once, at start.
    os.environ.setdefault("GGML_CPU_TILED_MM", "0")
    try:
        lib: Any = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError as error:
        raise EngineError('llama.cpp is missing; run: pip install "e2sci[llama]"') from error
    except (OSError, RuntimeError) as error:
        raise EngineError(f"llama-cpp-python does not load: {error}; reinstall it") from error
    lib.e2sci_log = lib.llama_log_callback(_log)  # kept: the library goes on calling it
    lib.llama_log_set(lib.e2sci_log, None)
    lib.llama_backend_init()
    return lib


def _log(level: int, text: bytes, _: object) -> None:
    if level == 4 and len(errors) < 100:  # GGML_LOG_LEVEL_ERROR
        errors.append(text.decode("utf-8", errors="replace").strip())


def arithmetic() -> str:
    """What computes, by name: another library or kernel rounds in another way."""
    kernels = "-amx" if _has_amx(library()) and _trusted() else ""
    return f"llama-cpp-python-{version('llama-cpp-python')}{kernels}"


def may_repack(lib: Any) -> bool:
    """Whether weights may be laid out anew for faster kernels: not for AMX ones. GCC before 14
    drops their tile configuration (its PR 114098), and the first pass over several tokens kills
    the process; which compiler built the library can't be seen."""
    if not _has_amx(lib) or _trusted():
        return True
    log.warning(
        "this llama.cpp is built with AMX, which some compilers break, so its fast kernels stay "
        "off; rebuild it without (see the README), or set E2SCI_AMX=1 if yours works"
    )
    return False


def _has_amx(lib: Any) -> bool:
    return b"AMX_INT8 = 1" in lib.llama_print_system_info()


def _trusted() -> bool:
    return os.environ.get("E2SCI_AMX") == "1"


def reason() -> str:
    """Why the library just failed, and what to do."""
    said = " ".join(errors)
    if re.search(r"failed to allocate|bad_alloc|out of memory|insufficient memory", said):
        return "not enough memory; use a smaller context, fewer slots or a smaller model"
    if re.search(r"not within the file bounds|failed to read", said):
        return "the file is cut off or damaged; download it again"
    if unknown := re.search(r"unknown (model architecture|pre-tokenizer type): '[^']*'", said):
        return f"{unknown[0]}; a newer llama-cpp-python may know it"
    return errors[0] if errors else "llama.cpp gave no reason"
