"""Several readers of the same models, in lockstep: what many need at once is one pass.

A pass over many tokens reads the weights once, so it costs far less than a pass for each. Each
reader is a thread with a place of its own in every model; its engines block until a pass answers:

    lockstep = Lockstep([draft, target])           # both with N slots
    with lockstep.reader() as (draft, target):     # in any of up to N threads
        ...                                        # forward, truncate: as with any engine

A pass begins once every reader waits for one, on the model that serves the most of them for its
time: a pass of a small draft model with few in it costs less than one of the target that some
would miss. A reader counts from its first step on: before, it may wait for something else (a
file's lock).

A pass always feeds N tokens, one for each place. Whoever asks for nothing may have a guess at what
it will ask for (`Ahead`); else a dummy is fed and cut off again. So a pass has the same shape
whoever is in it, and on an engine that keeps its sequences apart (`LlamaCpp(…, apart=True)`) what a
reader reads depends on its own tokens alone, bit for bit. Longer steps, which are prompts, go in a
pass of their own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from e2sci.decoding.distribution import Distribution
from e2sci.engines.base import ContextFull, Engine, ModelInfo, Step, Tokenizer

_DUMMY = 0


class Ahead(Protocol):
    """Uses a place in passes that its reader doesn't need. Called while every reader waits."""

    def guess(self) -> int | None:
        """The token to feed behind what the place holds; None for none."""
        ...

    def guessed(self, token: int, p: Distribution) -> None:
        """`token` has been fed, and stays."""
        ...


class Lockstep:
    """`engines`, all with the same number of slots, shared by as many readers. Closes them."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if len({engine.slots for engine in engines}) != 1:
            raise ValueError("engines in lockstep need the same number of slots")
        self.engines = list(engines)
        self.places = engines[0].slots
        self._changed = threading.Condition()
        self._free = list(range(self.places))
        self._reading: set[int] = set()  # places that have asked for something
        self._asked: list[dict[int, int]] = [{} for _ in engines]  # by model: place → token
        self._answers: dict[int, Distribution | BaseException] = {}  # by place
        self._ahead: list[dict[int, Ahead]] = [{} for _ in engines]  # by model and place
        self._seconds = [0.0] * len(engines)  # of the last pass of each model

    @contextmanager
    def reader(self) -> Iterator[list[Seat]]:
        """One engine of a single sequence for each model. Raises RuntimeError when all N places
        are taken."""
        with self._changed:
            if not self._free:
                raise RuntimeError(f"all {self.places} places are taken")
            place = self._free.pop(0)
        seats = [Seat(self, model, place) for model in range(len(self.engines))]
        try:
            yield seats
        finally:
            with self._changed:
                for engine, ahead in zip(self.engines, self._ahead, strict=True):
                    engine.truncate(place, 0)
                    ahead.pop(place, None)
                self._free.append(place)
                self._reading.discard(place)
                self._pass_if_all_wait()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def token(self, model: int, place: int, token: int) -> Distribution:
        """Feed one token at a reader's place in the next pass of that model; waits for it."""
        with self._changed:
            self._reading.add(place)
            self._asked[model][place] = token
            self._pass_if_all_wait()
            self._changed.wait_for(lambda: place in self._answers)
            answer = self._answers.pop(place)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def alone(self, model: int, step: Step) -> list[Distribution]:
        """A step of several tokens, in a pass of its own."""
        with self._changed:
            self._reading.add(step.sequence)
            return self.engines[model].forward([step])[0]

    def truncate(self, model: int, place: int, length: int) -> None:
        with self._changed:
            self.engines[model].truncate(place, length)

    def ahead(self, model: int, place: int, ahead: Ahead) -> None:
        self._ahead[model][place] = ahead

    def _pass_if_all_wait(self) -> None:
        """The last reader to wait makes the pass, for all."""
        if sum(map(len, self._asked)) == len(self._reading) > 0:
            model = max(range(len(self._asked)), key=self._gain)
            asked, self._asked[model] = self._asked[model], {}
            began = time.perf_counter()
            try:
                answers = self._pass(model, asked)
            except BaseException as error:
                self._answers |= dict.fromkeys(asked, error)
            else:
                self._answers |= {place: answers[place] for place in asked}
            self._seconds[model] = time.perf_counter() - began
            self._changed.notify_all()

    def _gain(self, model: int) -> float:
        """Readers served a second by a pass of `model`."""
        waiting, seconds = len(self._asked[model]), self._seconds[model]
        if not waiting:
            return 0.0
        return waiting / seconds if seconds else math.inf

    def _pass(self, model: int, asked: dict[int, int]) -> list[Distribution]:
        """What follows `asked`, by place; guesses and dummies answered too."""
        engine, ahead = self.engines[model], self._ahead[model]
        guesses = {
            place: token
            for place, each in ahead.items()
            if place not in asked and (token := each.guess()) is not None
        }
        fed = {**guesses, **asked}
        idle = {place: engine.length(place) for place in range(self.places) if place not in fed}
        steps = [Step(place, [fed.get(place, _DUMMY)]) for place in range(self.places)]
        try:
            answers = [found for [found] in engine.forward(steps)]
        finally:
            for place, length in idle.items():
                engine.truncate(place, length)
        for place, token in guesses.items():
            ahead[place].guessed(token, answers[place])
        return answers


class Seat:
    """A reader's sequence of one model, as an engine."""

    slots = 1

    def __init__(self, lockstep: Lockstep, model: int, place: int) -> None:
        self._lockstep, self._model, self._place = lockstep, model, place
        self._engine = lockstep.engines[model]
        # A place must always have room for a dummy.
        self.info: ModelInfo = replace(self._engine.info, context=self._engine.info.context - 1)
        self.tokenizer: Tokenizer = self._engine.tokenizer

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        """As Engine.forward, for the one sequence 0."""
        [step] = steps
        held, most = self.length(0), self.info.context
        if held + len(step.tokens) > most:
            raise ContextFull(f"{held} + {len(step.tokens)} tokens are more than {most}")
        if len(step.tokens) == step.outputs == 1:
            return [[self._lockstep.token(self._model, self._place, step.tokens[0])]]
        return [self._lockstep.alone(self._model, replace(step, sequence=self._place))]

    def meanwhile(self, ahead: Ahead) -> None:
        """Let `ahead` use the place when the reader doesn't."""
        self._lockstep.ahead(self._model, self._place, ahead)

    def length(self, sequence: int) -> int:
        return self._engine.length(self._place)

    def truncate(self, sequence: int, length: int) -> None:
        self._lockstep.truncate(self._model, self._place, length)

    def close(self) -> None:
        """The place is given back by its reader; the models stay."""
