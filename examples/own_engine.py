"""An engine of your own: a draft without a model

    python examples/own_engine.py [CLOUD DRAFT]

It proposes what followed the last two tokens when they were there before: prompt lookup, which does
well where a text repeats its prompt, as in editing. DRAFT gives the vocabulary and the template.
Whatever an engine proposes, `strict` writes the target's own text.
"""

import sys
from collections.abc import Sequence

import numpy as np

from e2sci import BlockingEdge, load_engine
from e2sci.decoding.distribution import Distribution, TopK
from e2sci.engines.base import Step, Wrapper


class Lookup(Wrapper):
    """The engine `vocabulary` with its model left out. A cache is the list of tokens itself."""

    def __init__(self, vocabulary) -> None:
        super().__init__(vocabulary)
        self._caches: dict[int, list[int]] = {}

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        return [self._feed(step) for step in steps]

    def length(self, sequence: int) -> int:
        return len(self._caches.get(sequence, ()))

    def truncate(self, sequence: int, length: int) -> None:
        del self._caches.setdefault(sequence, [])[length:]

    def _feed(self, step: Step) -> list[Distribution]:
        cache = self._caches.setdefault(step.sequence, [])
        cache += step.tokens
        ends = range(len(cache) - step.outputs + 1, len(cache) + 1)
        return [self._certain(_next(cache[:end])) for end in ends]

    def _certain(self, token: int) -> TopK:
        """All mass on one token."""
        return TopK(np.array([token]), np.zeros(1), self.info.vocab_size)


def _next(text: list[int]) -> int:
    """What came behind the latest occurrence of the last two tokens, or else the last token."""
    pair = text[-2:]
    for at in range(len(text) - 3, -1, -1):
        if text[at : at + 2] == pair:
            return text[at + 2]
    return text[-1]


cloud, draft = sys.argv[1:] or ("ws://127.0.0.1:7071", "qwen2.5-coder")

with BlockingEdge(cloud, Lookup(load_engine(draft, "draft"))) as edge:
    code = "def area(width, height):\n    return width * height\n"
    result = edge.generate(f"Rename width to w. Only the code.\n\n{code}", max_tokens=80)
    rate = result.stats.acceptance_rate or 0.0
    print(f"{result.text}\n\n{rate:.0%} of its guesses were right")
