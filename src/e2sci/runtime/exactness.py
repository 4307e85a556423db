"""What a request may ask of a target that names only the k best tokens of each position.

An engine in front of a server gives top-k log-probabilities. What that suffices for:

    greedy           exact: a pick needs no more than the best token
    temperature > 0  exact where the sampler itself keeps at most k tokens (top_k ≤ k)
    penalties, bias  refused: they may lift a token from below the k best
    rule             by sampling alone, but for divergences without a bound under merging (KL and
                     FSD's variant of JS): refused

A draft token that isn't among the k best has p ≤ p_k, and counts as impossible: regret, typical
and p_min then reject more than they would knowing all of p, never less, and what stands instead is
the target's own pick. JS and TV are compared on merged outcomes, which bounds what they can be off
by (`divergence.js_bounds`). docs/engines.md has the table.
"""

from __future__ import annotations

from e2sci.engines.base import ModelInfo
from e2sci.session.messages import Open, ProtocolError

_UNBOUNDED = {"kl": "KL", "js_fsd": "FSD's variant of JS"}


def require_exact(info: ModelInfo, opening: Open) -> None:
    """Raises ProtocolError("unsupported") on a request that the model can't serve as promised."""
    k, sampling, rule = info.top, opening.sampling, opening.rule
    if k is None:
        return
    gives = f"{info.name} gives only the {k} best log-probs a position"
    if sampling.penalised or sampling.logit_bias:
        raise _unsupported(
            f"penalties and logit_bias need all of them, and {gives}; leave them out"
        )
    if not (sampling.greedy or 1 <= sampling.top_k <= k):
        raise _unsupported(
            f"sampling needs all of them unless top_k is 1 to {k}, and {gives}; "
            "set top_k, or temperature to 0"
        )
    if rule.name in ("fuzzy", "elastic") and rule.measure in _UNBOUNDED:
        raise _unsupported(
            f"{_UNBOUNDED[rule.measure]} can be off by any amount, as {gives}; measure js instead"
        )


def _unsupported(reason: str) -> ProtocolError:
    return ProtocolError("unsupported", reason)
