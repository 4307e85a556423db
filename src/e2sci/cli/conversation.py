"""A conversation, and the commands that change it or how it goes on: no terminal, no model.

A line is a question, or a command if it begins with a slash. While a question has no answer the
conversation is `due` for one. An answer that never comes takes its question back, so that turns
always alternate.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import get_args

from e2sci.cli.generation import summary
from e2sci.decoding.acceptance import RuleName
from e2sci.runtime.edge import options_from
from e2sci.runtime.options import Mode, Options, Result

COMMANDS = {
    "mode": ("[MODE]", f"how answers are written: {', '.join(get_args(Mode))}"),
    "accept": ("[RULE]", f"the acceptance rule: {', '.join(get_args(RuleName))}"),
    "system": ("[TEXT]", "set the system message; without TEXT, have none"),
    "origin": ("on|off", "colour each token by where it came from"),
    "stats": ("", "figures of the last answer, and of all"),
    "retry": ("", "answer the last question again, with another seed"),
    "undo": ("", "take the last question and its answer back"),
    "save": ("FILE", "write the conversation as JSON, to a file that is not there yet"),
    "help": ("", "this"),
    "quit": ("", "end; so does Ctrl-D. Ctrl-C stops an answer"),
}
_OF_MODE = ("gamma", "window", "doubt", "fill")
_OF_RULE = ("measure", "threshold", "budget", "floor", "agreement")


class Conversation:
    """What was said, oldest first, and the `options` of the next answer.

    `given`: the options it begins with. `show_origin`: whether answers are coloured; `over`:
    whether the user has had enough.
    """

    def __init__(self, given: Options, *, show_origin: bool = False) -> None:
        self.options = given
        self.messages: list[dict[str, str]] = []
        self.show_origin = show_origin
        self.over = False
        self._given = given
        self._before: list[dict[str, str]] = []  # to go back to, should there be no answer
        self._last: Result | None = None
        self._answers = self._tokens = self._accepted = self._judged = 0

    @property
    def due(self) -> bool:
        """Whether a question waits for its answer."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    def take(self, line: str) -> str:
        """A line of the user's; what to say to it. Raises ValueError on a command that can't be
        done, which changes nothing."""
        if line.startswith("/"):
            return self._command(line)
        if line.strip():
            self._before = list(self.messages)
            self.messages.append({"role": "user", "content": line})
        return ""

    def answered(self, text: str, result: Result | None = None) -> None:
        """The answer, maybe cut short; an empty one takes the question back. `result`: if known."""
        if not text:
            self.messages = self._before
            return
        self.messages.append({"role": "assistant", "content": text})
        self._answers += 1
        if result is not None:
            stats = result.stats
            self._last = result
            self._tokens += len(result.token_ids)
            self._accepted += stats.accepted
            self._judged += stats.accepted + stats.corrections

    # ---- commands -------------------------------------------------------------------------

    def _command(self, line: str) -> str:
        name, _, argument = line[1:].strip().partition(" ")
        argument = argument.strip()
        if name not in COMMANDS:
            raise ValueError(f"no command /{name}; {_nearest(name, list(COMMANDS))}")
        takes = COMMANDS[name][0]
        if argument and not takes:
            raise ValueError(f"/{name} takes nothing behind it")
        if not argument and takes[:1] not in ("", "["):
            raise ValueError(f"/{name} needs {takes}")
        said: str = getattr(self, f"_{name}")(*([argument] if takes else []))
        return said

    def _mode(self, mode: str) -> str:
        if mode:
            self._choose("mode", mode, get_args(Mode), _OF_MODE)
        return f"mode {self.options.mode}"

    def _accept(self, rule: str) -> str:
        if rule:
            self._choose("accept", rule, get_args(RuleName), _OF_RULE)
        return f"accept {self.options.accept}"

    def _choose(
        self, name: str, value: str, known: tuple[str, ...], details: tuple[str, ...]
    ) -> None:
        """Its details come with a choice: those given for it, or its own defaults."""
        if value not in known:
            raise ValueError(f"no {name} {value!r}; {_nearest(value, list(known))}")
        source = self._given if getattr(self._given, name) == value else Options()
        changes = {detail: getattr(source, detail) for detail in details}
        self.options = options_from(self.options, {name: value, **changes})

    def _system(self, text: str) -> str:
        self.options = options_from(self.options, {"system": text or None})
        return "system message set" if text else "no system message"

    def _origin(self, word: str) -> str:
        if word not in ("on", "off"):
            raise ValueError(f"/origin is on or off, not {word!r}")
        self.show_origin = word == "on"
        return f"origins {word}"

    def _stats(self) -> str:
        if self._last is None:
            raise ValueError("there is no answer to tell of yet")
        stats = self._last.stats
        lines = [f"last: {summary(self._last)}, behind a prompt of {self._last.prompt_tokens}"]
        if stats.credit is not None and stats.threshold is not None:
            lines.append(f"credit {stats.credit:.2f}, threshold {stats.threshold:.3f} nats")
        share = f", {self._accepted / self._judged:.0%} of drafts accepted" if self._judged else ""
        lines.append(f"all: {self._answers} answers, {self._tokens} tokens{share}")
        return "\n".join(lines)

    def _retry(self) -> str:
        if not self.messages:
            raise ValueError("there is no question to answer again")
        sampling = self.options.sampling
        self._before = list(self.messages)
        self.messages.pop()
        self.options = options_from(self.options, {"seed": (sampling.seed + 1) % (1 << 63)})
        return "" if sampling.temperature else "greedy answers don't depend on a seed"

    def _undo(self) -> str:
        if not self.messages:
            raise ValueError("there is nothing to take back")
        del self.messages[-2:]
        left = len(self.messages) // 2
        return f"taken back; {left} question{'' if left == 1 else 's'} left"

    def _save(self, name: str) -> str:
        path, chat = Path(name).expanduser(), list(self.messages)
        if self.options.system:
            chat.insert(0, {"role": "system", "content": self.options.system})
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump({"messages": chat}, file, ensure_ascii=False, indent=2)
        except FileExistsError:
            raise ValueError(f"{path} is there already; choose another name") from None
        except OSError as error:
            raise ValueError(f"can't write {path}: {error.strerror}") from None
        return f"{len(chat)} messages are in {path}"

    def _help(self) -> str:
        rows = [(f"/{name} {takes}".strip(), text) for name, (takes, text) in COMMANDS.items()]
        return "\n".join(f"{usage:16} {text}" for usage, text in rows)

    def _quit(self) -> str:
        self.over = True
        return ""


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"there is {', '.join(known)}"
