"""`e2sci chat`: a conversation in the terminal, streamed.

The edge lives on an event loop in the background, so that its connections stay alive while the user
types, and Ctrl-C reaches the answer under way and nothing else. Both ends keep what they have read
for the next turn. Lines come from a terminal, with editing and a history (the extra `chat`), or
from a pipe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any

import click

from e2sci.cli.common import BadInput, friendly, stderr
from e2sci.cli.conversation import COMMANDS, Conversation
from e2sci.cli.generation import Setup, generation_options, request_id, setup
from e2sci.cli.printer import Printer, show_notice
from e2sci.cli.reach import dials
from e2sci.decoding.credit import CreditParams
from e2sci.runtime.background import Background
from e2sci.runtime.edge import Edge
from e2sci.runtime.options import Options, Result
from e2sci.runtime.request import CloudLost


@click.command()
@generation_options
def chat(**settings: Any) -> None:
    """Talk with a draft model here and a target model at --cloud.

    A line is a question; /help lists the commands. Ctrl-C stops the answer under way, Ctrl-D ends
    the chat. Without a terminal, lines are read from standard input.

    \b
    e2sci chat
    e2sci chat --accept elastic --temperature 0.7 --show-origin
    echo "Is 97 prime?" | e2sci chat
    """
    asked = setup(**settings)
    reach = ("cloud", "key_file", "ca", "allow_insecure")
    clouds = asked.clouds or dials(*(settings[name] for name in reach))  # /mode may want one later
    lines = _typed() if sys.stdin.isatty() and sys.stdout.isatty() else _piped()
    with ExitStack() as stack, friendly():
        engine = asked.load()
        stack.callback(engine.close)
        if engine.info.template is None:
            raise BadInput(
                f"{engine.info.name} has no chat template; use e2sci run, or an instruct model"
            )
        background = stack.enter_context(Background())
        edge = Edge(clouds, engine, patience=asked.wait, keep_caches=True)
        background.run(edge.__aenter__())
        stack.callback(lambda: background.run(edge.__aexit__()))
        talk = _Talk(asked, edge, background)
        if asked.options.mode != "draft":
            background.run(talk.meet(0.0))
        talk.hold(lines)


class _Talk:
    """A conversation with the models of `edge`, whose loop is `background`'s."""

    def __init__(self, asked: Setup, edge: Edge, background: Background) -> None:
        self._asked = asked
        self._edge = edge
        self._background = background
        self._chat = Conversation(asked.options, show_origin=asked.show_origin)
        self._met = False
        self._constants: dict[object, CreditParams | None] = {}
        self._said = ""

    def hold(self, lines: Iterator[str]) -> None:
        """Until the lines end, or the user has had enough."""
        for line in lines:
            try:
                told = self._chat.take(line)
                if told:
                    stderr.print(told, style="dim", markup=False, highlight=False, soft_wrap=True)
            except ValueError as error:
                _complain(str(error))
            if self._chat.due:
                self._answer()
            if self._chat.over:
                return

    async def meet(self, patience: float) -> None:
        """Connect, and tell what the user should know of the cloud. Raises EdgeError."""
        for notice in await self._edge.connect(patience=patience):
            show_notice(notice)
        self._met = True

    def _answer(self) -> None:
        """The last question. Whatever happens, the chat goes on."""
        printer = Printer(self._edge.engine, self._chat.show_origin)
        result, note, error, self._said = None, "", "", ""
        try:
            with friendly():
                result = self._background.run(self._stream(printer))
        except KeyboardInterrupt:
            note = "stopped"
        except BadInput as failure:
            error = failure.message
            if isinstance(failure.__cause__, CloudLost):
                result = failure.__cause__.result
                printer.rest(result)
        printer.close()
        self._chat.answered(result.text if result else self._said, result)
        if result is not None and result.finish_reason == "length":
            note = f"cut at {len(result.token_ids)} tokens; see --max-tokens and --context"
        if note:
            show_notice(note)
        if error:
            _complain(error)

    async def _stream(self, printer: Printer) -> Result | None:
        options = self._chat.options
        if options.mode != "draft" and not self._met:
            await self.meet(self._asked.wait)
        self._edge.options = replace(self._calibrated(options), request_id=request_id())
        async with aclosing(self._edge.stream(self._chat.messages)) as pieces:
            async for piece in pieces:
                if piece.notice is not None:
                    show_notice(piece.notice, mid_line=printer.mid_line)
                printer.show(piece)
                self._said += piece.text
                if piece.result is not None:
                    return piece.result
        return None

    def _calibrated(self, options: Options) -> Options:
        """With constants for elastic, looked up once for each way to measure."""
        if options.accept != "elastic":
            return options
        key = (options.measure, options.threshold, options.budget)
        if key not in self._constants:
            found = self._asked.calibrated(options, self._edge.cloud_model)
            self._constants[key] = found.constants
        return replace(options, constants=self._constants[key])


def _complain(message: str) -> None:
    click.echo(f"Error: {message}", err=True)


# ---- lines ------------------------------------------------------------------------------------


def _piped() -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\r\n")


def _typed() -> Iterator[str]:
    """From the terminal, with editing, a history for as long as the chat lasts, and completion of
    commands. Raises BadInput without the extra."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
    except ModuleNotFoundError as error:
        raise BadInput(f'{error.name} is missing; run: pip install "e2sci[chat]"') from None
    commands = WordCompleter([f"/{name}" for name in COMMANDS], sentence=True)
    session: PromptSession[str] = PromptSession(
        "› ", completer=commands, complete_while_typing=False
    )
    return _prompted(session.prompt)


def _prompted(prompt: Callable[[], str]) -> Iterator[str]:
    while True:
        try:
            line = prompt()
        except KeyboardInterrupt:  # drops the line, as in a shell
            continue
        except EOFError:
            return
        yield line
