"""Sampling parameters, and picks whose randomness is a function of (seed, position, token) only.

A pick is  y = argmax_v (log p'(v) + g(seed, position, v)),  p' the distribution after penalties,
temperature, top-k, top-p and min-p (in that order), g Gumbel noise from a counter hash. Draft and
target share the noise (Daliri, Musco and Suresh 2024), so they pick the same token whenever their
distributions nearly agree, and a text depends on models and seed alone: not on windows, batches or
the network. At temperature 0, and below 1e-5, a pick is plain argmax.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from e2sci.decoding.distribution import Dense, Distribution, Floats, Ids, Processed, TopK
from e2sci.decoding.noise import Stream, pick_among, pick_of_all

GREEDY_BELOW = 1e-5
"""Temperatures below this mean argmax: dividing by them would only overflow."""

_HEAD = 512  # candidates first looked at by top-p; the whole vocabulary only if they don't suffice


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen from a distribution. Raises ValueError out of range.

    `temperature` ≥ 0 (0: greedy); `top_k` ≥ 0 (0: off); `top_p` in (0, 1]; `min_p` in [0, 1),
    relative to the best token; `repetition_penalty` > 0 over prompt and output (1: off; divides
    positive logits, multiplies negative ones); `frequency_penalty` and `presence_penalty` in
    [-2, 2] over the output; `seed` in [0, 2⁶³); `logit_bias`: id → value in [-100, 100].
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature <= 100, "0 to 100")
        _require("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p < 1, "0 or more, below 1")
        penalty = self.repetition_penalty
        _require("repetition_penalty", penalty, 0 < penalty <= 10, "above 0, at most 10 (1 is off)")
        for name in ("frequency_penalty", "presence_penalty"):
            _require(name, getattr(self, name), -2 <= getattr(self, name) <= 2, "-2 to 2")
        _require("seed", self.seed, 0 <= self.seed < 2**63, "0 to 2**63 - 1")
        count = len(self.logit_bias)
        _require("the number of logit_bias entries", count, count <= 1024, "1024 at most")
        for token, bias in self.logit_bias.items():
            _require("a token id of logit_bias", token, token >= 0, "0 or more")
            _require(f"logit_bias[{token}]", bias, abs(bias) <= 100, "-100 to 100")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether some tokens can't be picked at all."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        """Whether a pick depends on the tokens before it."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )


def _require(name: str, value: float, ok: bool, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value}; expected {expected}")


class History:
    """The tokens before a position, with the counts that penalties need.

    `prompt` tokens count for the repetition penalty only. Can be cut back after a rollback.
    """

    def __init__(self, prompt: list[int]) -> None:
        self._prompt = len(prompt)
        self.tokens = list(prompt)
        self.seen = Counter(prompt)
        self.output: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.tokens)

    def copy(self) -> History:
        """An independent copy, for a thread that reads while the original goes on."""
        other = History.__new__(History)
        other._prompt, other.tokens = self._prompt, self.tokens.copy()
        other.seen, other.output = self.seen.copy(), self.output.copy()
        return other

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.seen[token] += 1
        self.output[token] += 1

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, at least the prompt."""
        for token in self.tokens[max(length, self._prompt) :]:
            self.seen[token] -= 1
            self.output[token] -= 1
        del self.tokens[max(length, self._prompt) :]


@dataclass(frozen=True)
class Support:
    """A processed distribution: the ids that can be picked and their log-probabilities (Σp = 1)."""

    ids: Ids
    log_probs: Floats

    def prob(self, token: int) -> float:
        found = np.flatnonzero(self.ids == token)
        return float(np.exp(self.log_probs[found[0]])) if found.size else 0.0


def adjusted(dist: Distribution, params: SamplingParams, history: History) -> Distribution:
    """`dist` with penalties and biases applied to its logits; itself when there are none.

    Of a top-k one: among the tokens it names, on their log-probabilities. Good enough to propose
    from; what must be exact is refused before (`runtime.exactness`).
    """
    if isinstance(dist, Processed):
        dist = dist.after
    if not (params.penalised or params.logit_bias):
        return dist
    if isinstance(dist, TopK):
        logits = np.full(dist.size, -np.inf, dtype=np.float32)
        logits[dist.ids] = dist.log_probs
        known = adjusted(Dense(logits), params, history)
        return TopK(dist.ids, known.log_prob(dist.ids), dist.size)
    assert isinstance(dist, Dense)
    logits = dist.logits.copy()
    if params.penalised:
        _penalise(logits, params, history)
    for token, bias in params.logit_bias.items():
        if token < dist.size:
            logits[token] += bias
    return Dense(logits)


def _penalise(logits: NDArray[np.float32], params: SamplingParams, history: History) -> None:
    def counted(counts: Counter[int]) -> tuple[Ids, Floats]:
        items = [(t, c) for t, c in counts.items() if c > 0 and t < logits.shape[0]]
        ids = np.array([t for t, _ in items], dtype=np.int64)
        return ids, np.array([c for _, c in items], dtype=np.float64)

    if params.repetition_penalty != 1:
        ids, _ = counted(history.seen)
        raw, penalty = logits[ids], params.repetition_penalty
        logits[ids] = np.where(raw > 0, raw / penalty, raw * penalty)
    ids, counts = counted(history.output)
    logits[ids] -= params.frequency_penalty * counts + params.presence_penalty


def support(dist: Distribution, params: SamplingParams, history: History) -> Support:
    """p': `dist` after penalties, temperature, top-k, top-p and min-p."""
    dist = adjusted(dist, params, history)
    if params.greedy:
        return Support(np.array([dist.argmax]), np.zeros(1))
    ids, log_probs = _filtered(_tempered(dist, params.temperature), params)
    if not params.filtered:
        return Support(ids, log_probs)
    if params.min_p > 0:
        keep = log_probs >= log_probs.max() + np.log(params.min_p)
        ids, log_probs = ids[keep], log_probs[keep]
    return Support(ids, log_probs - _log_sum_exp(log_probs))


def chance(dist: Distribution, params: SamplingParams, history: History, token: int) -> float:
    """p'(token), without the rest of p' where nothing is filtered."""
    if params.filtered or params.greedy or isinstance(dist, TopK):
        return support(dist, params, history).prob(token)
    warm = _tempered(adjusted(dist, params, history), params.temperature)
    return float(np.exp(warm.log_prob(np.array([token]))[0]))


def support_head(
    dist: Distribution, params: SamplingParams, history: History, most: int
) -> Support:
    """The `most` likeliest tokens of p', not normalised anew; cheap on a large vocabulary."""
    if params.filtered or params.greedy or isinstance(dist, TopK):
        chances = support(dist, params, history)
        order = np.lexsort((chances.ids, -chances.log_probs))[:most]
        return Support(chances.ids[order], chances.log_probs[order])
    head = _tempered(adjusted(dist, params, history), params.temperature).top(most)
    return Support(head.ids, head.log_probs)


def _tempered(dist: Distribution, temperature: float) -> Dense | TopK:
    if isinstance(dist, TopK):
        scaled = dist.log_probs / temperature
        return TopK(dist.ids, scaled - _log_sum_exp(scaled), dist.size)
    assert isinstance(dist, Dense)
    return dist if temperature == 1 else Dense(dist.logits / np.float32(temperature))


def _filtered(dist: Dense | TopK, params: SamplingParams) -> tuple[Ids, Floats]:
    """What top-k and then top-p leave of a tempered distribution."""
    if params.top_k:
        head = dist.top(params.top_k)
        log_probs = head.log_probs - _log_sum_exp(head.log_probs)
        return _nucleus(head.ids, log_probs, params.top_p)
    if params.top_p < 1:
        head = dist.top(_HEAD)
        if np.exp(head.log_probs).sum() < params.top_p + 1e-9:
            head = dist.top(dist.size)
        return _nucleus(head.ids, head.log_probs, params.top_p)
    if isinstance(dist, TopK):
        return dist.ids, dist.log_probs
    return np.arange(dist.size), dist.all_log_probs()


def _nucleus(ids: Ids, log_probs: Floats, top_p: float) -> tuple[Ids, Floats]:
    """The fewest of the likeliest tokens that reach top_p; given in falling order."""
    if top_p >= 1:
        return ids, log_probs
    p = np.exp(log_probs)
    keep = np.cumsum(p) - p < top_p
    return ids[keep], log_probs[keep]


def pick(dist: Distribution, params: SamplingParams, history: History) -> int:
    """The token chosen behind `history` from `dist`, with the shared noise of that position."""
    if params.greedy:
        return adjusted(dist, params, history).argmax
    if isinstance(dist, Dense) and not params.filtered:
        dist = adjusted(dist, params, history)
        assert isinstance(dist, Dense)
        where = (params.seed, len(history), Stream.PICK)
        return pick_of_all(dist.logits, params.temperature, *where)
    return pick_from(support(dist, params, history), params.seed, len(history), Stream.PICK)


def pick_from(chances: Support, seed: int, position: int, stream: Stream) -> int:
    """A sample of `chances` with the keyed noise of that stream."""
    return pick_among(chances.ids, chances.log_probs, seed, position, stream)


def _log_sum_exp(x: Floats) -> float:
    top = float(x.max())
    return top + float(np.log(np.exp(x - top).sum()))
