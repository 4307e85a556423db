"""What a method can reach at best: the analytic yardsticks that measurements are held against.

Times in milliseconds, results in tokens per second; α is the acceptance of a draft token, in
[0, 1]. The formulas take rejections as independent; real ones cluster, which helps a little.
"""

from __future__ import annotations

from collections.abc import Callable

PassMs = Callable[[int], float]
"""Time of a target pass by its number of tokens."""


def cloud_alone(t_pass: float) -> float:
    """The target decoding by itself: 1 / t_pass(1). The network is paid once, before the first."""
    return 1000 / t_pass


def tokens_per_window(alpha: float, window: int) -> float:
    """Expected tokens of a verified window, the target's own included: (1-α^{W+1})/(1-α)
    (Leviathan et al. 2023, eq. 1)."""
    if alpha >= 1:
        return window + 1.0
    return float((1 - alpha ** (window + 1)) / (1 - alpha))


def synchronous(alpha: float, window: int, t_draft: float, t_pass: PassMs, rtt: float) -> float:
    """Classic speculative decoding over a network: a window is drafted, sent, verified, awaited."""
    cycle = window * t_draft + rtt + t_pass(window + 1)
    return 1000 * tokens_per_window(alpha, window) / cycle


def verify_ms(alpha: float, t_pass: PassMs, most: int = 32) -> float:
    """The least target time a committed token can cost: min over n of c(n+1) / E[tokens of n].

    What a pass judges behind a rejection is in vain, so larger passes are not always better. Where
    a pass takes the same time at any size this is nearly (1-α)·c.
    """
    return min(t_pass(n + 1) / tokens_per_window(alpha, n) for n in range(most))


def pipelined(alpha: float, t_draft: float, t_pass: PassMs, rtt: float) -> float:
    """Bound of drafting and verifying at once; the tighter of two:

        edge    1 / (t_d + (1-α)·(RTT + c(1)))     it drafts all the time but for the loop from a
                                                   wrong token to its correction
        cloud   1 / (t_v + (1-α)·(RTT + t_d))      it verifies all the time but for the loop from a
                                                   correction to the next draft token

    The first is the usual 1/(t_d + (1-α)·L). The second binds where passes grow with their size.
    Both leave out what the cloud fills in meanwhile; `schedule.best_schedule` counts it.
    """
    edge = t_draft + (1 - alpha) * (rtt + t_pass(1))
    cloud = verify_ms(alpha, t_pass) + (1 - alpha) * (rtt + t_draft)
    return 1000 / max(edge, cloud)


def break_even_rtt(alpha: float, t_draft: float, t_pass: float) -> float:
    """RTT below which speculation can beat the cloud alone at all; negative: never.

    (α·t_AR − t_d) / (1−α), from t_d + (1−α)(RTT + t_AR) < t_AR.
    """
    if alpha >= 1:
        return float("inf") if t_draft < t_pass else -1.0
    return (alpha * t_pass - t_draft) / (1 - alpha)
