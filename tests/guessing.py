"""A draft that knows texts by heart, over the vocabulary of a model in Hugging Face's format."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from e2sci.decoding.distribution import Dense
from e2sci.engines.base import Step
from e2sci.engines.hf_tokenizer import describe
from e2sci.engines.synthetic import Synthetic, SyntheticConfig


class Guessing(Synthetic):
    """Of each text (prompt ids and all) it gets every `wrong`-th position wrong; 0: none."""

    def __init__(self, folder, *texts: list[int], wrong: int = 4, slots: int = 4) -> None:
        described = describe(folder)
        super().__init__(SyntheticConfig(seed=3), slots)
        size = described.real_vocab
        self.info = replace(
            self.info, vocab_size=size, real_vocab=size, eos_ids=described.eos_ids, template=None
        )
        self.tokenizer = described.tokenizer
        self.texts, self.wrong = texts, wrong
        self._fed: dict[int, list[int]] = {}
        self._ids = self._ids[:size]
        self._bias = np.zeros(size)

    def _feed(self, step: Step):
        held = self.length(step.sequence)
        line = self._fed[step.sequence] = [*self._fed.get(step.sequence, [])[:held], *step.tokens]
        rows = super()._feed(step)
        return [
            self._hint(row, line[: len(line) - len(rows) + 1 + i]) for i, row in enumerate(rows)
        ]

    def _hint(self, row: Dense, line: list[int]) -> Dense:
        logits, at = row.logits.copy(), len(line)
        if not self.wrong or at % self.wrong:
            for text in self.texts:
                if len(text) > at and text[:at] == line:
                    logits[text[at]] += 50
        return Dense(logits)
