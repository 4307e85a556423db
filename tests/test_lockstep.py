"""Readers in lockstep get, in common passes, what each of them would get alone."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from e2sci.decoding.distribution import Dense, Distribution
from e2sci.engines.base import ContextFull, Engine, Step, Wrapper
from e2sci.engines.lockstep import Lockstep, Seat
from e2sci.engines.memory import Remembering
from e2sci.engines.synthetic import Synthetic, SyntheticConfig
from tiny_gguf import CONTEXT, gguf

SECONDS = 60
PROMPT = [100, 101, 102]


class Watched(Wrapper):
    """Keeps the steps of each pass, which takes `seconds`; `broken`: tokens at which one fails."""

    def __init__(self, engine: Engine, seconds: float = 0.0) -> None:
        super().__init__(engine)
        self.passes: list[list[int]] = []
        self.broken: Sequence[int] = ()
        self.seconds = seconds

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        self.passes.append([len(step.tokens) for step in steps])
        time.sleep(self.seconds)
        if any(token in self.broken for step in steps for token in step.tokens):
            raise OSError("gone")
        return super().forward(steps)


def synthetic(slots: int = 4, seconds: float = 0.0, **config: int) -> Watched:
    return Watched(Synthetic(SyntheticConfig(**config), slots), seconds)


def together(lockstep: Lockstep, *readers) -> list:
    """Each reader in a thread, begun at the same time."""
    begun = Barrier(len(readers))

    def one(reader):
        with lockstep.reader() as engines:
            begun.wait(SECONDS)
            return reader(*engines)

    with ThreadPoolExecutor(len(readers)) as pool:
        return [each.result(SECONDS) for each in [pool.submit(one, reader) for reader in readers]]


def writer(seed: int, tokens: int = 12):
    """A reader that writes and takes back at random; returns all logits it got."""

    def write(engine: Engine, *others: Engine) -> np.ndarray:
        chosen, got = random.Random(seed), []

        def feed(ids: list[int], on: Engine = engine) -> None:
            [[p]] = on.forward([Step(0, ids)])
            assert isinstance(p, Dense)
            got.append(p.logits)

        feed([chosen.randrange(97, 122) for _ in range(chosen.randrange(2, 30))])
        for _ in range(tokens):
            feed([chosen.randrange(97, 122)])
            if chosen.random() < 0.3:
                engine.truncate(0, engine.length(0) - 1)
            if others and chosen.random() < 0.5:
                feed([chosen.randrange(97, 122)], others[0])
        return np.array(got)

    return write


def test_each_gets_what_it_would_get_alone():
    found = together(Lockstep([synthetic(), synthetic(seed=2)]), *map(writer, range(4)))
    for seed, got in enumerate(found):
        [alone] = together(Lockstep([synthetic(), synthetic(seed=2)]), writer(seed))
        np.testing.assert_array_equal(got, alone)


def test_passes_are_common_and_always_as_wide():
    engine = synthetic()
    met = Barrier(2)

    def read(engine: Engine) -> None:
        engine.forward([Step(0, [97, 98])])
        met.wait(SECONDS)  # from here on each waits for the other
        for token in (99, 100):
            engine.forward([Step(0, [token])])

    together(Lockstep([engine]), read, read)
    assert engine.passes == [[2]] * 2 + [[1] * 4] * 2
    assert [engine.length(place) for place in range(4)] == [0] * 4


def test_a_cheap_pass_with_few_comes_before_a_dear_one_that_they_would_miss():
    cheap, dear = synthetic(), synthetic(seconds=0.05)
    lockstep, met = Lockstep([cheap, dear]), Barrier(3)
    lockstep._seconds = [0.001, 0.05]

    def read(*wanted: int):
        def reader(*engines: Engine) -> None:
            for engine in engines:
                engine.forward([Step(0, [97, 98])])
            met.wait(SECONDS)  # none has asked for a pass
            for model in wanted:
                engines[model].forward([Step(0, [100])])

        return reader

    together(lockstep, read(1), read(1), read(0, 0, 1))
    assert [sum(steps == [1] * 4 for steps in each.passes) for each in (cheap, dear)] == [2, 1]


def test_one_that_ends_or_never_asks_holds_nobody_up():
    engine = synthetic()
    together(Lockstep([engine]), writer(1, tokens=2), writer(2, tokens=30), lambda engine: None)
    assert 30 <= sum(steps == [1] * 4 for steps in engine.passes) <= 32


def test_an_error_reaches_those_in_the_pass_and_no_later_one():
    engine = synthetic()
    engine.broken = [65]  # no writer feeds it
    lockstep = Lockstep([engine])
    with pytest.raises(OSError, match="gone"):
        together(lockstep, lambda engine: engine.forward([Step(0, [65])]))
    [got] = together(lockstep, writer(3))
    [alone] = together(Lockstep([synthetic()]), writer(3))
    np.testing.assert_array_equal(got, alone)


def test_a_full_context_and_a_full_house_are_said():
    lockstep = Lockstep([synthetic(slots=1)])
    with lockstep.reader() as [engine]:
        room = engine.info.context
        with pytest.raises(RuntimeError, match="all 1 places are taken"), lockstep.reader():
            pass
        engine.forward([Step(0, [97] * room)])
        with pytest.raises(ContextFull):
            engine.forward([Step(0, [97])])
    with lockstep.reader() as [engine]:
        assert engine.length(0) == 0
    with pytest.raises(ValueError, match="same number of slots"):
        Lockstep([synthetic(slots=1), synthetic(slots=2)])


def test_on_llama_cpp_companions_change_no_bit(tmp_path):
    llama_cpp = pytest.importorskip("e2sci.engines.llama_cpp")
    pytest.importorskip("llama_cpp")
    path = gguf(tmp_path / "tiny.gguf")

    def made() -> Lockstep:
        engine = llama_cpp.LlamaCpp(path, context=CONTEXT, slots=8, threads=1, apart=True)
        return Lockstep([engine])

    lockstep = made()
    found = together(lockstep, *map(writer, range(8)))
    lockstep.close()
    for seed in (0, 3, 7):
        lockstep = made()
        [alone] = together(lockstep, writer(seed))
        lockstep.close()
        np.testing.assert_array_equal(found[seed], alone)


def test_a_place_that_is_not_needed_computes_what_will_be(tmp_path):
    """One reader writes with the first model, another with the second, then the other way round."""
    engines = synthetic(eos_bias=-9), synthetic(seed=2, eos_bias=-9)
    lockstep, met, known = Lockstep(engines), Barrier(2), []

    def write(engine: Engine, fed: list[int]) -> list[int]:
        written = []
        for _ in range(10):
            [[p]] = engine.forward([Step(0, fed)])
            fed = [p.argmax]
            written += fed
        return written

    def reader(number: int):
        def read(*seats: Seat) -> list[int]:
            folders = [tmp_path / f"{number}-{model}" for model in (0, 1)]
            both = [Remembering(*each) for each in zip(seats, folders, strict=True)]
            known.extend(both)
            with both[0].request(PROMPT), both[1].request(PROMPT):
                for engine, seat in zip(both, seats, strict=True):
                    engine.compute(PROMPT, engine._keys)
                    seat.meanwhile(engine)
                met.wait(SECONDS)
                return write(both[number], PROMPT) + write(both[1 - number], PROMPT)

        return read

    found = together(lockstep, reader(0), reader(1))
    for number, written in enumerate(found):
        for model, part in ((number, written[:10]), (1 - number, written[10:])):
            alone = Synthetic(SyntheticConfig(seed=model + 1, eos_bias=-9), 1)
            assert part == write(alone, PROMPT)
    assert sum(engine.computed for engine in known) < 36  # of 40


@pytest.mark.models
def test_on_the_real_draft_companions_change_no_bit():
    from e2sci.engines.load import load_engine

    def made() -> Lockstep:
        engine = load_engine("qwen2.5-coder", "draft", context=128, slots=4, threads=1, apart=True)
        return Lockstep([engine])

    lockstep = made()
    found = together(lockstep, *(writer(seed, tokens=6) for seed in range(4)))
    lockstep.close()
    lockstep = made()
    [alone] = together(lockstep, writer(2, tokens=6))
    lockstep.close()
    np.testing.assert_array_equal(found[2], alone)
