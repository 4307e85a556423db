"""Prompts to ids and ids to text: chat templates, incremental UTF-8, stop strings."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import cast

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from e2sci.engines.base import Engine, ModelInfo, Tokenizer

Chat = Sequence[dict[str, str]]
"""Messages with `role` and `content`, oldest first."""
Prompt = str | Chat | Sequence[int]
"""A text, a chat, or token ids as they are."""

_CONVERSATION: Chat = [
    {"role": role, "content": f"{role}'s words"} for role in ("system", "user", "assistant", "user")
]


class TextStream:
    """Text of tokens as they come.

    Bytes of a split character, and text that may turn out to be the beginning of a stop string,
    are held back until they are decided. What comes out is the same however tokens are grouped.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [s for s in stop if s]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is now certain. After a stop string `stopped` is set; push no more."""
        return self._emit(self._decoder.decode(self._tokenizer.piece(token)))

    def finish(self) -> str:
        """What was held back and is text after all: no more tokens will come."""
        if self.stopped:
            return ""
        text = self._emit(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _emit(self, text: str) -> str:
        text = self._held + text
        found = [i for i in (text.find(s) for s in self._stop) if i >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def prompt_ids(
    engine: Engine, prompt: Prompt, *, system: str | None, raw: bool, special: bool = False
) -> list[int]:
    """Token ids of a prompt. Raises ValueError when it is empty or the template refuses it.

    A string is one user message after the optional `system`, put through the model's chat template
    (once; the template says where BOS belongs), or with `raw` just the text. A model without a
    template gets the text. `special`: read special tokens' names in a raw text as those tokens.
    """
    info = engine.info
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ValueError("the prompt is empty; give some text")
    if isinstance(prompt[0], int):
        return _within(info, cast("Sequence[int]", prompt))
    if raw and system:
        raise ValueError("a system message needs the chat template; drop --raw or --system")
    if raw or info.template is None:
        if not isinstance(prompt, str):
            raise ValueError("the model has no chat template; give the prompt as one text")
        bos = engine.tokenizer.encode(info.bos, special=True) if info.bos else []
        return bos + engine.tokenizer.encode(prompt, special=special)
    chat = cast(
        "Chat", [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    )
    if system:
        chat = [{"role": "system", "content": system}, *chat]
    ids = engine.tokenizer.encode(render(info, chat), special=True)
    if not ids:
        raise ValueError(f"the chat template of {info.name} makes nothing of this prompt")
    return ids


def _within(info: ModelInfo, ids: Sequence[int]) -> list[int]:
    """`ids`, if they are the model's. Raises ValueError."""
    for token in ids:
        if not 0 <= token < info.real_vocab:
            raise ValueError(
                f"token id {token} is out of range; {info.name} has ids below {info.real_vocab}"
            )
    return list(ids)


def render(info: ModelInfo, chat: Chat) -> str:
    """`chat` as the model's template writes it. Raises ValueError with the template's complaint."""
    assert info.template is not None
    try:
        return _template(info.template).render(
            messages=chat, add_generation_prompt=True, bos_token=info.bos, eos_token=info.eos
        )
    except Exception as error:  # foreign code: anything can go wrong in it
        raise ValueError(f"the chat template of {info.name} refuses this: {error}") from None


def template_print(info: ModelInfo) -> str:
    """A short name for how a model writes chats; empty without a template.

    Two templates count as the same if they write the same for a small conversation: files of one
    family often differ in parts, as those for tools, that no prompt here uses.
    """
    if info.template is None:
        return ""
    try:
        written = render(info, _CONVERSATION)
    except ValueError:  # it may not like one of the roles
        written = info.template
    return hashlib.sha256(written.encode()).hexdigest()[:16]


@lru_cache(maxsize=8)
def _template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def complain(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = complain
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
