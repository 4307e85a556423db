"""Mode auto beside the fixed modes, on links and with drafts of every kind.

Synthetic models on the virtual clock, so every figure is exact and the same on any machine. Each
cell has tokens/s behind the first token, and cloud passes a token.

    python benchmarks/auto.py [--max-tokens 400]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import track
from rich.table import Table

from e2sci.emulation.link import LinkProfile
from e2sci.emulation.profile import PROFILES, Profile, from_dict
from e2sci.engines.synthetic import Synthetic, SyntheticConfig
from e2sci.evaluation.methods import Setting, method
from e2sci.evaluation.world import write

METHODS = ("cloud", "sd", "strict", "auto", "auto@1", "auto@4")
PAPER = PROFILES["paper"]
FAR = replace(PAPER, name="far", link=LinkProfile(500, up_mbps=1, down_mbps=1))
SLOW = from_dict({**PAPER.to_dict(), "name": "slow draft", "draft": {"ms": 70}})
_POINTS = [[1, 47], [2, 93], [4, 172], [8, 329], [16, 471], [32, 936]]
CPU = from_dict(
    {**PAPER.to_dict(), "name": "cpu", "draft": {"ms": 34}, "target": {"points": _POINTS}}
)


def drifted(divergence: float) -> SyntheticConfig:
    return SyntheticConfig(divergence=divergence, eos_bias=-9)


GOOD, MIDDLING, BAD = drifted(0.3), drifted(1.0), drifted(4.0)
WRONG = SyntheticConfig(random=True, eos_bias=-9)

CONDITIONS: dict[str, tuple[Profile, SyntheticConfig]] = {
    "good draft, lan": (PROFILES["lan"], GOOD),
    "good, wan": (PROFILES["wan"], GOOD),
    "good, RTT 500 ms": (FAR, GOOD),
    "middling, paper": (PAPER, MIDDLING),
    "middling, mobile": (PROFILES["mobile"], MIDDLING),
    "middling, slow-edge": (PROFILES["slow-edge"], MIDDLING),
    "middling, fast-cloud": (PROFILES["fast-cloud"], MIDDLING),
    "middling, RTT 500 ms": (FAR, MIDDLING),
    "bad, paper": (PAPER, BAD),
    "bad, wan": (PROFILES["wan"], BAD),
    "always wrong": (PAPER, WRONG),
    "slower than the target": (SLOW, GOOD),
    "good, both on CPUs": (CPU, GOOD),
    "middling, both on CPUs": (CPU, MIDDLING),
}


def cell(name: str, profile: Profile, draft: SyntheticConfig, most: int) -> str:
    """Tokens/s and passes a token of one method."""
    engines = Synthetic(draft, 1), Synthetic(SyntheticConfig(eos_bias=-9), 1)
    outcome = write(method(name, Setting(profile)), profile, *engines, "the cat and the dog", most)
    stats, tokens = outcome.result.stats, len(outcome.result.token_ids)
    return f"{stats.decode_tokens_per_s:.1f} · {stats.cloud_passes / tokens:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--max-tokens", type=int, default=400)
    given = parser.parse_args(arguments)
    table = Table("", *METHODS)
    for name, (profile, draft) in track(CONDITIONS.items(), "writing"):
        table.add_row(name, *(cell(m, profile, draft, given.max_tokens) for m in METHODS))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
