"""A trace as a pair of engines: both models' recorded words again, in microseconds.

    draft, target = replay_pair(trace)
    write(method, profile, draft, target, "#12", max_tokens)      # the trace's 13th request

A prompt is "#n": as many tokens as were recorded, of which the first is n, so that a sequence knows
whose words it follows. At output position i of request n the engines give the sketches p_i and q_i
of the trace, *whatever tokens stand before*, and a certain EOS behind the trace's end.

What that approximates: a text that leaves the target's own, behind a token that the rule tolerated,
goes on here as if it had not, where real models would go on differently. And sketches are coarse: a
JS computed on them differs from the recorded one by about 1e-4, so that a judgement within that
distance of the threshold may turn out the other way. The picks are exactly those recorded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from e2sci.decoding.distribution import Distribution, TopK, decode
from e2sci.engines.base import ModelInfo, Step
from e2sci.evaluation.traces import RequestTrace, Trace

CONTEXT = 1 << 20
"""Tokens a sequence can hold: nothing is cached, so it is no limit."""

_CACHED = 1 << 17  # decoded distributions, about 2 kB each
_HAIR = 1e-9

Side = Literal["draft", "target"]


class ReplayTokenizer:
    """Reads prompts "#n"; a token adds no text. `prompts`: the ids of each request's prompt."""

    def __init__(self, prompts: Sequence[list[int]], vocab: int) -> None:
        self.prompts = prompts
        self._vocab = vocab

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Raises ValueError on anything but the number of a request."""
        found = re.fullmatch(r"#(\d+)", text)
        if not found or int(found[1]) >= len(self.prompts):
            raise ValueError(
                f"no prompt {text!r} in the trace; expected #0 to #{len(self.prompts) - 1}"
            )
        return list(self.prompts[int(found[1])])

    def piece(self, token: int) -> bytes:
        if not 0 <= token < self._vocab:
            raise IndexError(f"token id {token} is out of range; ids lie below {self._vocab}")
        return b""

    def name(self, token: int) -> bytes:
        return token.to_bytes(4, "little")


class Script:
    """What both models say, decoded when it is asked for; shared by all engines of a trace.

    `end`: the EOS behind a trace's end, an id that occurs nowhere else; `eos`: it and those the
    texts end with. Raises ValueError on a trace without requests or without sketches.
    """

    def __init__(self, trace: Trace) -> None:
        if not trace.requests:
            raise ValueError("the trace holds no requests")
        self.requests = trace.requests
        self.names = {"draft": trace.header.draft, "target": trace.header.target}
        self.end = 1 + max(len(trace.requests), *map(_largest, trace.requests))
        self.vocab = self.end + 1
        self.eos = frozenset({self.end, *_endings(trace)})
        filler = int(np.median([token for r in trace.requests for token in r.tokens]))
        self.prompts = [
            [n] + [filler] * (request.prompt_tokens - 1) for n, request in enumerate(self.requests)
        ]
        self.tokenizer = ReplayTokenizer(self.prompts, self.vocab)
        self.says = lru_cache(_CACHED)(self._decoded)
        self._over = TopK(np.array([self.end]), np.array([0.0]), self.vocab)

    def _decoded(self, side: Side, n: int, position: int) -> TopK:
        """The distribution at an output position of request n."""
        request = self.requests[n]
        if not 0 <= position < len(request.tokens):
            return self._over
        sketches, picks = (
            (request.q, request.drafts) if side == "draft" else (request.p, request.tokens)
        )
        return _picking(decode(sketches[position], self.vocab), picks[position])


class Replay:
    """One of the two models as an engine. Sequences know their request and length, no tokens."""

    def __init__(self, script: Script, side: Side, slots: int = 1) -> None:
        self.script = script
        self.side = side
        self.slots = slots
        self.tokenizer = script.tokenizer
        self.info = ModelInfo(
            name=script.names[side],
            vocab_size=script.vocab,
            real_vocab=script.vocab,
            context=CONTEXT,
            eos_ids=script.eos,
        )
        self._held: dict[int, tuple[int, int]] = {}  # request and length, by sequence

    def forward(self, steps: Sequence[Step]) -> list[list[Distribution]]:
        return [self._feed(step) for step in steps]

    def length(self, sequence: int) -> int:
        return self._held.get(sequence, (0, 0))[1]

    def truncate(self, sequence: int, length: int) -> None:
        if length == 0:
            self._held.pop(sequence, None)
        elif length < self.length(sequence):
            self._held[sequence] = self._held[sequence][0], length

    def close(self) -> None:
        self._held.clear()

    def _feed(self, step: Step) -> list[Distribution]:
        if not 0 <= step.sequence < self.slots:
            raise ValueError(f"sequence {step.sequence} is out of range; slots: {self.slots}")
        n, held = self._held.get(step.sequence, (step.tokens[0], 0))
        if not 0 <= n < len(self.script.requests):
            raise ValueError(f"token {n} is no number of a request; a prompt begins with one")
        held += len(step.tokens)
        self._held[step.sequence] = n, held
        behind = held - len(self.script.prompts[n])
        places = range(behind - step.outputs + 1, behind + 1)
        return [self.script.says(self.side, n, place) for place in places]


def replay_pair(trace: Trace, *, slots: int = 1) -> tuple[Replay, Replay]:
    """Draft and target of `trace`, with `slots` sequences each. More engines of the same models:
    `Replay(draft.script, "draft")`. Raises ValueError on a trace that can't be replayed."""
    script = Script(trace)
    return Replay(script, "draft", slots), Replay(script, "target", slots)


def _picking(known: TopK, pick: int) -> TopK:
    """`known` with `pick` as its argmax: where codes are equal it is raised by a hair."""
    if known.argmax == pick:
        return known
    at = np.flatnonzero(known.ids == pick)
    if not at.size:
        raise ValueError(f"a sketch of the trace lacks the token {pick} that was picked there")
    raised = known.log_probs.copy()
    raised[at] = raised.max() + _HAIR
    return TopK(known.ids, raised, known.size)


def _endings(trace: Trace) -> set[int]:
    """Ids that end texts: an EOS comes last in a text that isn't full, and nowhere else."""
    full = trace.header.max_tokens
    last = {r.tokens[-1] for r in trace.requests if len(r.tokens) < full}
    return last.difference(*(r.tokens[:-1] for r in trace.requests))


def _largest(request: RequestTrace) -> int:
    """The largest id that a request's record names."""
    if request.prompt_tokens < 1:
        count = request.prompt_tokens
        raise ValueError(f"row {request.row} has {count} prompt tokens; expected 1 or more")
    sketches = map(_last_id, [*request.p, *request.q])
    try:
        return max(*request.tokens, *request.drafts, *sketches)
    except IndexError:
        raise ValueError(f"row {request.row} lacks sketches; record it with them") from None


def _last_id(sketch: bytes) -> int:
    """The largest id in a sketch: the sum of its gaps (see decoding.distribution.encode)."""
    total = shift = 0
    for byte in sketch[2 : len(sketch) - sketch[0]]:
        total += (byte & 127) << shift
        shift = shift + 7 if byte > 127 else 0
    return total
