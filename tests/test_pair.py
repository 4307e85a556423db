"""A pair of models that several requests share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from e2sci.engines.base import Step
from e2sci.evaluation.pair import Models, Pair, PairSpec

SECONDS = 60


def write(models: Models, prompt: list[int]) -> list[int]:
    """A few tokens of each model in turn."""
    for engine in models:
        engine.forward([Step(0, prompt)])
    tokens = [97]
    for n in range(12):
        [[p]] = models[n % 2].forward([Step(0, [tokens[-1]])])
        tokens.append(p.argmax)
    return tokens


@pytest.mark.parametrize("questions", ["abc", "aab", "aaa"])
def test_requests_with_one_prompt_wait_for_each_other_and_end(questions, tmp_path):
    pair = Pair(PairSpec("synthetic:eos_bias=-9", "synthetic:seed=2,eos_bias=-9", abreast=3))
    pair._memories = [tmp_path / "draft", tmp_path / "target"]  # synthetic models have none

    def ask(question: str) -> list[int]:
        with pair.request(question) as models:
            return write(models, [*models.draft._prompt])

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, question) for question in questions]
        found = [each.result(SECONDS) for each in asked]
    assert found == [ask(question) for question in questions]
    pair.close()
