"""The remembering engine: the answers of the engine behind it, computed once, kept for good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from e2sci.decoding.distribution import Dense, Distribution
from e2sci.engines.base import ContextFull, Step
from e2sci.engines.memory import KEPT, LEAST, Remembering, kept_ids
from e2sci.engines.synthetic import Synthetic, SyntheticConfig

PROMPT = [100, 101, 102]


class Fed(Synthetic):
    """A synthetic engine that keeps a list of the calls it got."""

    def __init__(self, config: SyntheticConfig | None = None) -> None:
        super().__init__(config or SyntheticConfig(), 1)
        self.calls: list[list[int]] = []

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        self.calls += [list(step.tokens) for step in steps]
        return super().forward(steps)


def plain(tokens: list[int]) -> Dense:
    engine = Synthetic(SyntheticConfig(), 1)
    [[p]] = engine.forward([Step(0, tokens)])
    assert isinstance(p, Dense)
    return p


def same(p: Distribution, tokens: list[int]) -> None:
    """p is what the plain engine says behind `tokens`, on all that is kept."""
    q = plain(tokens)
    head = p.top(LEAST)
    assert head.ids.tolist() == q.top(LEAST).ids.tolist()
    np.testing.assert_array_equal(head.log_probs, q.log_prob(head.ids))
    assert p.argmax == q.argmax


def test_prompt_at_once_then_token_by_token(tmp_path: Path) -> None:
    engine = Fed()
    memory = Remembering(engine, tmp_path)
    with memory.request(PROMPT):
        [outputs] = memory.forward([Step(0, [*PROMPT, 104, 105], 3)])
        assert engine.calls == []  # nothing has been looked at
        same(outputs[2], [*PROMPT, 104, 105])
        same(outputs[0], PROMPT)
        assert engine.calls == [PROMPT, [104], [105]]
        memory.truncate(0, len(PROMPT))
        [[p]] = memory.forward([Step(0, [104])])
        same(p, [*PROMPT, 104])
        [[p]] = memory.forward([Step(0, [110])])
        same(p, [*PROMPT, 104, 110])
        assert engine.calls == [PROMPT, [104], [105], [110]]


def test_what_is_not_looked_at_is_never_computed(tmp_path: Path) -> None:
    engine = Fed()
    memory = Remembering(engine, tmp_path)
    with memory.request(PROMPT):
        [outputs] = memory.forward([Step(0, [*PROMPT, 104, 105, 106], 4)])
        same(outputs[1], [*PROMPT, 104])
    assert engine.calls == [PROMPT, [104]]
    assert memory.computed == 2


def test_guesses_follow_what_is_sure_then_the_model_where_drafts_differ(tmp_path: Path) -> None:
    engine = Fed()
    memory = Remembering(engine, tmp_path)
    own = [*PROMPT]
    for _ in range(8):
        own.append(plain(own).argmax)
    wrong = next(token for token in range(100, 200) if token != own[4])

    def guessed() -> list[int]:
        """What is fed until there is nothing left to guess."""
        fed = []
        while len(fed) < 4 and (token := memory.guess()) is not None:
            [[p]] = engine.forward([Step(0, [token])])
            memory.guessed(token, p)
            fed.append(token)
        return fed

    with memory.request(PROMPT):
        [[p]] = memory.forward([Step(0, PROMPT)])
        assert p.argmax == own[3]  # looked at: the prompt is read
        # The second draft is one that the model wouldn't say: behind it nothing is read ahead.
        memory.forward([Step(0, [own[3], wrong, 7], 4)])
        assert guessed() == own[3:7]
        # Once it is sure, as a correction is, it is followed.
        memory.truncate(0, len(PROMPT))
        memory.forward([Step(0, [own[3], wrong, 7], 2)])
        follows = plain([*PROMPT, own[3], wrong]).argmax
        assert guessed()[:2] == [wrong, follows]


def test_it_survives_on_disk_and_a_torn_record_is_computed_again(tmp_path: Path) -> None:
    def ask() -> int:
        engine = Fed()
        memory = Remembering(engine, tmp_path)
        with memory.request(PROMPT):
            [outputs] = memory.forward([Step(0, [*PROMPT, 104], 2)])
            for p, n in zip(outputs, (3, 4), strict=True):
                same(p, [*PROMPT, 104][:n])
        return memory.computed

    assert ask() == 2
    assert ask() == 0
    [file] = tmp_path.glob("*.mem")
    file.write_bytes(file.read_bytes()[:-5])
    assert ask() == 2  # the prompt is fed again to reach the lost place
    assert ask() == 0


def test_prompts_do_not_mix(tmp_path: Path) -> None:
    memory = Remembering(Fed(), tmp_path)
    for prompt in (PROMPT, [100, 101, 103], PROMPT):
        with memory.request(prompt):
            [[p]] = memory.forward([Step(0, [*prompt, 104])])
            same(p, [*prompt, 104])
    assert len(list(tmp_path.glob("*.mem"))) == 2
    with memory.request(PROMPT), pytest.raises(ValueError, match="open the request"):
        memory.forward([Step(0, [1, 2, 3, 4])])
    with pytest.raises(ValueError, match="open the request"):
        memory.forward([Step(0, PROMPT)])


def test_the_context_is_the_engines(tmp_path: Path) -> None:
    memory = Remembering(Fed(SyntheticConfig(context=5)), tmp_path)
    with memory.request(PROMPT):
        with pytest.raises(ContextFull):
            memory.forward([Step(0, [*PROMPT, 104, 105, 106])])
        assert memory.length(0) == 0
        with pytest.raises(ValueError, match="cut"):
            memory.truncate(0, 1)


def test_what_is_kept_is_everything_near_and_never_too_little() -> None:
    logits = np.full(1000, -50, dtype=np.float32)
    logits[:40] = 0
    assert set(kept_ids(Dense(logits)).tolist()) == set(range(40))
    logits[1:40] = -KEPT - 1
    assert len(kept_ids(Dense(logits))) == LEAST


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.sampled_from([104, 105]), min_size=1))))
def test_any_course_of_cuts_and_feeds(tmp_path: Path, course: list[tuple[int, list[int]]]) -> None:
    """The answer depends on the prefix alone, whatever was asked before."""
    memory = Remembering(Fed(), tmp_path)
    with memory.request(PROMPT):
        memory.forward([Step(0, PROMPT)])
        line = list(PROMPT)
        for keep, fed in course:
            line = line[: max(len(PROMPT), min(len(line), len(PROMPT) + keep))]
            memory.truncate(0, len(line))
            [outputs] = memory.forward([Step(0, fed, len(fed))])
            line += fed
            same(outputs[-1], line)
            assert memory.length(0) == len(line)
