"""Mode auto beside the fixed modes, on links and with drafts of every kind.

Synthetic models on the virtual clock, so every figure is exact and the same on any machine. Each
cell has tokens/s behind the first token, and cloud passes a token.

    python benchmarks/auto.py [--max-tokens 400]

With --wall on this machine's own clock: devices that sleep for their times, real sockets, a proxy
for the link. Methods take turns, each on a new edge, so that a noisy moment hits all alike; ratios
are taken within a round. Medians over rounds, with their range.

    python benchmarks/auto.py --wall [--rounds 3] [--max-tokens 160]
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import median
from e2sci.emulation.device import Device, Metered
from e2sci.emulation.link import LinkProfile
from e2sci.emulation.profile import PROFILES, Profile, from_dict
from e2sci.emulation.proxy import Link
from e2sci.engines.synthetic import Synthetic, SyntheticConfig
from e2sci.evaluation.methods import Setting, method
from e2sci.evaluation.world import write
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.edge import Edge
from e2sci.runtime.options import Result
from e2sci.server.cloud_app import listening

FIXED = ("cloud", "sd", "strict")
METHODS = (*FIXED, "auto", "auto@1", "auto@4")
HOST, PROMPT = "127.0.0.1", "the cat and the dog"
PAPER = PROFILES["paper"]
FAR = replace(PAPER, name="far", link=LinkProfile(500, up_mbps=1, down_mbps=1))
SLOW = from_dict({**PAPER.to_dict(), "name": "slow draft", "draft": {"ms": 70}})
_POINTS = [[1, 47], [2, 93], [4, 172], [8, 329], [16, 471], [32, 936]]
CPU = from_dict(
    {**PAPER.to_dict(), "name": "cpu", "draft": {"ms": 34}, "target": {"points": _POINTS}}
)


def drifted(divergence: float) -> SyntheticConfig:
    return SyntheticConfig(divergence=divergence, eos_bias=-9)


TARGET = SyntheticConfig(eos_bias=-9)
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
WALL = (
    "good, wan",
    "middling, paper",
    "middling, RTT 500 ms",
    "bad, paper",
    "always wrong",
    "slower than the target",
    "good, both on CPUs",
)


def cell(name: str, profile: Profile, draft: SyntheticConfig, most: int) -> str:
    """Tokens/s and passes a token of one method."""
    engines = Synthetic(draft, 1), Synthetic(TARGET, 1)
    outcome = write(method(name, Setting(profile)), profile, *engines, PROMPT, most)
    stats, tokens = outcome.result.stats, len(outcome.result.token_ids)
    return f"{stats.decode_tokens_per_s:.1f} · {stats.cloud_passes / tokens:.2f}"


async def on_the_wall(
    profile: Profile, draft: SyntheticConfig, most: int, rounds: int
) -> list[dict[str, Result]]:
    """What each method writes, by round."""
    far = Metered(Synthetic(TARGET, 1))
    cloud = Cloud(far, times=profile.pass_times, worker=Device(profile.target, far))
    done: list[dict[str, Result]] = []
    async with (
        cloud,
        listening(cloud, HOST, 0) as port,
        Link(HOST, port, profile.link) as link,
    ):
        for _ in range(rounds):
            done.append({})
            for name in (*FIXED, "auto"):
                near = Metered(Synthetic(draft, 1))
                options = method(name, Setting(profile)).options
                async with Edge(link.url(), near, worker=Device(profile.draft, near)) as edge:
                    await edge.connect()
                    done[-1][name] = await edge.generate(PROMPT, max_tokens=most, **options)
    return done


def row(rounds: list[dict[str, Result]]) -> list[str]:
    """Tokens/s of each method; and of auto, divided by those of the cloud alone and by the best of
    the others. The text is the target's in all."""
    assert all(r[name].token_ids == r["cloud"].token_ids for r in rounds for name in r)
    speeds = [{m: r[m].stats.decode_tokens_per_s for m in r} for r in rounds]
    ratios = [
        [each["auto"] / max(each[name] for name in others) for each in speeds]
        for others in (("cloud",), FIXED)
    ]
    return [median([each[m] for each in speeds]) for m in speeds[0]] + list(map(median, ratios))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--wall", action="store_true", help="on this machine's own clock")
    parser.add_argument("--rounds", type=int, default=3, help="of --wall")
    given = parser.parse_args(arguments)
    if given.wall:
        table = Table("", *FIXED, "auto", "auto / cloud", "auto / best")
        most = given.max_tokens or 160
        for name in track(WALL, "writing"):
            table.add_row(
                name, *row(asyncio.run(on_the_wall(*CONDITIONS[name], most, given.rounds)))
            )
    else:
        table = Table("", *METHODS)
        most = given.max_tokens or 400
        for name, (profile, draft) in track(CONDITIONS.items(), "writing"):
            table.add_row(name, *(cell(m, profile, draft, most) for m in METHODS))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
