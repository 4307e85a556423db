"""Sampling parameters, and picks whose randomness is a function of (seed, position, token) only.

A pick is  y = argmax_v (log p'(v) + g(seed, position, v)),  p' the distribution after penalties,
temperature, top-k, top-p and min-p (in that order), g Gumbel noise from a counter hash. Draft and
target share the noise, so they pick the same token whenever their distributions nearly agree, and
a text depends on models and seed alone: not on windows, batches or the network (ours; the
Gumbel-max trick is standard). At temperature 0, and below 1e-5, a pick is plain argmax.

Independent uses of randomness at one position draw from different streams.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from e2sci.decoding.distribution import Dense, Distribution, Floats, Ids, TopK

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
        for token, bias in self.logit_bias.items():
            _require(f"logit_bias[{token}]", bias, token >= 0 and abs(bias) <= 100, "-100 to 100")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

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


class Stream(IntEnum):
    """Independent noise at one position."""

    PICK = 0  # the shared noise of draft and target
    DRAFT = 1  # the draft's own sample under the rejection rule
    ACCEPT = 2  # the uniform number of the rejection rule
    RESIDUAL = 3  # its sample from the residual


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
    """`dist` with penalties and biases applied to its logits; itself when there are none."""
    if not (params.penalised or params.logit_bias):
        return dist
    if isinstance(dist, TopK):
        raise ValueError("penalties and logit_bias need an engine that gives full distributions")
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
    ids, logits = _candidates(dist, params)
    scaled = logits / params.temperature
    log_probs = scaled - _log_sum_exp(scaled)
    if params.top_p < 1:
        before = np.cumsum(np.exp(log_probs)) - np.exp(log_probs)
        keep = before < params.top_p
        ids, log_probs = ids[keep], log_probs[keep]
    if params.min_p > 0:
        keep = log_probs >= log_probs.max() + np.log(params.min_p)
        ids, log_probs = ids[keep], log_probs[keep]
    return Support(ids, log_probs - _log_sum_exp(log_probs))


def _candidates(dist: Distribution, params: SamplingParams) -> tuple[Ids, Floats]:
    """Ids and log-probabilities to process; in falling order where a filter needs an order."""
    if isinstance(dist, TopK):
        head = dist.without_tail().top(params.top_k or len(dist.ids))
        return head.ids, head.log_probs
    assert isinstance(dist, Dense)
    if params.top_k:
        head = dist.top(params.top_k)
        return head.ids, head.log_probs
    if params.top_p < 1:
        return _nucleus_candidates(dist, params)
    return np.arange(dist.size), dist.all_log_probs()


def _nucleus_candidates(dist: Dense, params: SamplingParams) -> tuple[Ids, Floats]:
    """All ids in falling order, the mass beyond the first 512 folded away if never needed.

    The nucleus lies inside the head when the head's share of the tempered mass reaches top_p; the
    folded rest stands as one entry at the end, so that normalising still sees the whole mass.
    """
    head = dist.top(_HEAD)
    scaled = dist.all_log_probs() / params.temperature
    total = _log_sum_exp(scaled)
    mass = np.exp(head.log_probs / params.temperature - total).sum()
    if mass < params.top_p + 1e-9 or len(head.ids) < _HEAD:
        order = np.lexsort((np.arange(dist.size), -scaled))
        return order.astype(np.int64), scaled[order] * params.temperature
    if mass >= 1:
        return head.ids, head.log_probs
    rest = (total + np.log1p(-mass)) * params.temperature
    return np.append(head.ids, -1), np.append(head.log_probs, rest)


def pick(dist: Distribution, params: SamplingParams, history: History) -> int:
    """The token chosen behind `history` from `dist`, with the shared noise of that position."""
    if params.greedy:
        return adjusted(dist, params, history).argmax
    return pick_from(support(dist, params, history), params.seed, len(history), Stream.PICK)


def pick_from(chances: Support, seed: int, position: int, stream: Stream) -> int:
    """argmax over `chances` of log-probability plus the keyed Gumbel noise of that stream."""
    ids, log_probs = chances.ids, chances.log_probs
    if len(ids) == 1:
        return int(ids[0])
    u = _uniform(seed, position, stream, ids)
    if len(ids) > 4 * _HEAD:
        keep = _contenders(log_probs, u)
        ids, log_probs, u = ids[keep], log_probs[keep], u[keep]
    scores = log_probs - np.log(-np.log(u))
    best = np.flatnonzero(scores == scores.max())
    return int(ids[best].min())


def _contenders(log_probs: Floats, u: Floats) -> NDArray[np.bool_]:
    """The entries that can win: exact, and it saves two logarithms for most of a vocabulary.

    Those near the most probable are scored; one further than 6 nats off then needs noise above
    the best score less that distance, which few have.
    """
    far = log_probs.max() - 6
    near = log_probs > far
    best = (log_probs[near] - np.log(-np.log(u[near]))).max()
    contenders: NDArray[np.bool_] = near | (u >= np.exp(-np.exp(-(best - far - 1e-9))))
    return contenders


def uniform(seed: int, position: int, stream: Stream) -> float:
    """One keyed number in (0, 1)."""
    return float(_uniform(seed, position, stream, np.zeros(1, dtype=np.int64))[0])


def _uniform(seed: int, position: int, stream: Stream, ids: Ids) -> Floats:
    """Keyed numbers in (0, 1), 52 bits each: SplitMix64's finaliser over (seed, position, id)."""
    key = _mix(np.array([seed], dtype=np.uint64) * _GOLDEN + np.uint64(stream))
    key = _mix(key + np.array([position], dtype=np.uint64) * _GOLDEN)
    bits = _mix(ids.astype(np.uint64) * _GOLDEN + key)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _log_sum_exp(x: Floats) -> float:
    top = float(x.max())
    return top + float(np.log(np.exp(x - top).sum()))
