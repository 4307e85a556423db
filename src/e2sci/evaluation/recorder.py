"""Records traces: both models along the target's own greedy text, each asked once a position.

The target writes its answer token by token, as the cloud alone would; behind each prefix of it the
draft is asked too. Both are limited to the ids they share, as the runtime does, and fed one token
at a time, so that a pair with a memory (`engines.memory`) computes nothing twice. What a rule
compares is what a cloud would: JS and FSD's variant between the target and the draft's *sketch*.
TV, entropies and regret are of the whole distributions, as far as a memory keeps them.

Requests are independent, so any number of processes writes the same file; it is in the order of the
problems, and rows already there are left alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from e2sci.decoding.distribution import Distribution, decode, sketch
from e2sci.decoding.divergence import divergence
from e2sci.engines.base import Engine, Step, fingerprint, text_of
from e2sci.evaluation.pair import Models, Pair, PairSpec
from e2sci.evaluation.tasks import MAX_TOKENS, Problem, Task
from e2sci.evaluation.traces import RequestTrace, TraceWriter
from e2sci.evaluation.workers import spread
from e2sci.runtime.service import different_vocabularies
from e2sci.runtime.text import prompt_ids

_Place = dict[str, Any]
"""One position, by the names of RequestTrace's fields."""

TARGET_SKETCH = 32
"""Tokens of p that are kept; q is kept as it would travel."""


@dataclass(frozen=True)
class Recording:
    """What to record: problems of `task`, `max_tokens` positions each at most."""

    pair: PairSpec
    task: Task
    max_tokens: int = MAX_TOKENS


def record(
    recording: Recording, writer: TraceWriter, problems: Sequence[Problem], *, jobs: int = 1
) -> Generator[RequestTrace, None, None]:
    """Record the problems that `writer` lacks; yields each when it is written.

    `jobs`: worker processes, 0 to run in this one. Raises ValueError when the two models don't
    share their token ids or a prompt leaves no room in the context.
    """
    missing = [problem for problem in problems if problem.row not in writer.rows]
    if not missing:
        return
    make = partial(Recorder, recording)
    abreast = recording.pair.abreast
    requests = spread(make, Recorder.record, missing, jobs=jobs, abreast=abreast, in_order=True)
    for request in requests:
        writer.append(request)
        yield request


class Recorder:
    """Records requests with a loaded pair. Raises ValueError when its vocabularies differ."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.pair = Pair(recording.pair)
        self._vocab = shared_vocab(self.pair)

    def close(self) -> None:
        self.pair.close()

    def record(self, problem: Problem) -> RequestTrace:
        """The trace of one request. Raises ValueError when its prompt fills the context."""
        with self.pair.request(problem.prompt) as models:
            prompt = prompt_ids(models.draft, problem.prompt, system=None, raw=False)
            room = min(engine.info.context for engine in models) - len(prompt)
            if room < 1:
                raise ValueError(
                    f"the prompt of row {problem.row} has {len(prompt)} tokens and leaves no room "
                    "in the context; raise --context"
                )
            most = min(room, self.recording.max_tokens)
            places = list(self._places(models, prompt, most))
        return self._request(problem, len(prompt), places)

    def _places(self, models: Models, prompt: list[int], most: int) -> Iterator[_Place]:
        """Position by position, up to the target's EOS."""
        feed = prompt
        for _ in range(most):
            place = self._place(models, feed)
            yield place
            if place["tokens"] in models.target.info.eos_ids:
                return
            feed = [place["tokens"]]

    def _place(self, models: Models, feed: list[int]) -> _Place:
        p, q = (self._next(engine, feed) for engine in (models.target, models.draft))
        y, x = p.argmax, q.argmax
        sent = sketch(q, keep=x)
        seen = decode(sent, self._vocab)
        at_y, at_x = p.log_prob(np.array([y, x])).tolist()
        return {
            "tokens": y,
            "drafts": x,
            "js": divergence("js", p, seen),
            "js_fsd": divergence("js_fsd", p, seen),
            "tv": divergence("tv", p, q),
            "regret": at_y - at_x,
            "entropy": q.entropy,
            "target_entropy": p.entropy,
            "p": sketch(p, keep=x, size=TARGET_SKETCH),
            "q": sent,
        }

    def _next(self, engine: Engine, feed: list[int]) -> Distribution:
        [[p]] = engine.forward([Step(0, feed)])
        return p.limited(self._vocab)

    def _request(self, problem: Problem, prompt: int, places: list[_Place]) -> RequestTrace:
        series: dict[str, Any] = {name: [place[name] for place in places] for name in places[0]}
        text = text_of(self.pair.models.target.tokenizer, series["tokens"])
        return RequestTrace(
            row=problem.row,
            id=problem.id,
            prompt_tokens=prompt,
            correct=self.recording.task.score(problem, text),
            **series,
        )


def shared_vocab(pair: Pair) -> int:
    """Ids below this mean the same to both models. Raises ValueError when they don't."""
    draft, target = pair.models
    shared = min(draft.info.real_vocab, target.info.real_vocab)
    if fingerprint(draft).at(shared) != fingerprint(target).at(shared):
        raise ValueError(str(different_vocabularies(draft.info.name, target.info.name)))
    return shared
