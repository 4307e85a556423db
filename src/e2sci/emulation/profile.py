"""Profiles: which devices and which link a measurement stands on.

Named ones are the design's; a TOML file describes any other:

    name = "my-setup"
    [draft]                 # at the edge; as [target], and [colocated] for the draft in the cloud
    ms = 10.0               # a call over up to `free` tokens …
    free = 32
    per_token_ms = 0.5      # … and each token beyond
    watts = 15.0
    idle_watts = 5.0
    [target]
    points = [[1, 47.0], [8, 329.0], [32, 940.0]]   # or measured (tokens, ms), interpolated
    [link]
    rtt_ms = 40.0
    jitter_ms = 0.0
    up_mbps = 10.0
    down_mbps = 50.0

Ours, since the paper gives none: what a long prompt costs, the watts, and the time of a draft that
runs beside the target (half the edge's). The cloud's idle time is not billed to one request.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from e2sci.emulation.device import DeviceProfile
from e2sci.emulation.link import LINKS, LinkProfile
from e2sci.engines.base import Engine
from e2sci.runtime.passes import SIZES, PassTimes, measure_passes

FREE = 32
"""Tokens a call takes at no extra time, where a profile says nothing else (the design's)."""


@dataclass(frozen=True)
class Profile:
    """Draft device, target device, the link between them, and the draft model in the cloud."""

    name: str
    draft: DeviceProfile
    target: DeviceProfile
    link: LinkProfile
    colocated: DeviceProfile

    @property
    def pass_times(self) -> PassTimes:
        """What a cloud on the target device would measure at start."""
        return PassTimes(tuple((n, self.target.ms(n)) for n in (1, 2, 4, 8, 16, 32, 64, 512)))

    def to_dict(self) -> dict[str, Any]:
        """The TOML file's shape; `from_dict` reads it back."""
        link = self.link
        return {
            "name": self.name,
            **{part: _device_dict(getattr(self, part)) for part in _DEVICES},
            "link": {
                "rtt_ms": link.rtt_ms,
                "jitter_ms": link.jitter_ms,
                **({"up_mbps": link.up_mbps} if link.up_mbps else {}),
                **({"down_mbps": link.down_mbps} if link.down_mbps else {}),
            },
        }

    def to_toml(self) -> str:
        """As a file that `profile` reads."""
        data = self.to_dict()
        lines = [f'name = "{data.pop("name")}"']
        for section, values in data.items():
            lines += ["", f"[{section}]"]
            lines += [f"{key} = {value}" for key, value in values.items()]
        return "\n".join(lines) + "\n"


_SIZES = (*SIZES, 256)  # prompts are read in large passes, which cost less a token
_DEVICES = ("draft", "target", "colocated")


def _gpu(ms: float, per_token: float, watts: float, idle: float) -> DeviceProfile:
    return DeviceProfile(((1, ms), (FREE, ms)), per_token, watts, idle)


def _named(name: str, draft_ms: float, pass_ms: float) -> Profile:
    return Profile(
        name,
        draft=_gpu(draft_ms, 0.5, watts=15.0, idle=5.0),
        target=_gpu(pass_ms, 0.25, watts=300.0, idle=0.0),
        link=LINKS[name],
        colocated=_gpu(draft_ms / 2, 0.05, watts=300.0, idle=0.0),
    )


PROFILES = {
    name: _named(name, draft_ms, pass_ms)
    for name, draft_ms, pass_ms in (
        ("paper", 10, 50),
        ("wan", 10, 50),
        ("slow-edge", 20, 60),
        ("fast-cloud", 10, 25),
        ("lan", 10, 50),
        ("mobile", 15, 50),
    )
}


def profile(spec: str) -> Profile:
    """A named profile, or the one in a .toml file. Raises ValueError."""
    if spec in PROFILES:
        return PROFILES[spec]
    path = Path(spec)
    if path.suffix != ".toml":
        near = difflib.get_close_matches(spec, PROFILES, n=2) or sorted(PROFILES)
        raise ValueError(f"no profile {spec!r}; there are {', '.join(near)}, or give a .toml file")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"can't read the profile {spec}: {error}") from None
    return from_dict({"name": path.stem, **data}, where=spec)


def from_dict(data: Mapping[str, Any], where: str = "the profile") -> Profile:
    """The profile that `to_dict` or a TOML file describes. Raises ValueError."""
    extra = data.keys() - {"name", "link", *_DEVICES}
    if extra or not {"draft", "target", "link"} <= data.keys():
        raise ValueError(f"{where}: expected sections draft, target, link, and perhaps colocated")
    try:
        draft = _device(data["draft"])
        colocated = _device(data["colocated"]) if "colocated" in data else _halved(draft)
        link = LinkProfile(**data["link"])
        return Profile(str(data["name"]), draft, _device(data["target"]), link, colocated)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def measured(name: str, draft: Engine, target: Engine, link: LinkProfile) -> Profile:
    """The profile of this machine's engines over `link`. Takes some seconds.

    Passes are timed one engine at a time, each on the cores it has; watts are left out.
    """
    edge, cloud = (_from_points(measure_passes(e, _SIZES).points) for e in (draft, target))
    return Profile(name, edge, cloud, link, edge)


def _from_points(points: tuple[tuple[int, float], ...]) -> DeviceProfile:
    # A pass can't get faster by growing: what looks so is noise.
    times = np.maximum.accumulate([ms for _, ms in points]).tolist()
    rising = [(n, ms) for (n, _), ms in zip(points, times, strict=True)]
    return DeviceProfile(tuple(rising), _slope(rising))


def _device(data: Mapping[str, Any]) -> DeviceProfile:
    known = {"ms", "free", "points", "per_token_ms", "watts", "idle_watts"}
    if extra := sorted(data.keys() - known):
        raise ValueError(f"a device has no {extra[0]!r}; it has {', '.join(sorted(known))}")
    if ("ms" in data) == ("points" in data):
        raise ValueError("a device is described by either ms or points")
    if "ms" in data:
        free = int(data.get("free", FREE))
        points = [(1, float(data["ms"]))] + ([(free, float(data["ms"]))] if free > 1 else [])
    else:
        points = [(int(n), float(ms)) for n, ms in data["points"]]
    slope = _slope(points) if "points" in data else 0.0
    return DeviceProfile(
        tuple(points),
        float(data.get("per_token_ms", slope)),
        float(data.get("watts", 0.0)),
        float(data.get("idle_watts", 0.0)),
    )


def _slope(points: list[tuple[int, float]]) -> float:
    """ms a token at the end of measured points."""
    if len(points) < 2:
        return 0.0
    (n, a), (m, b) = points[-2:]
    return max(0.0, (b - a) / (m - n))


def _halved(device: DeviceProfile) -> DeviceProfile:
    points = tuple((n, ms / 2) for n, ms in device.points)
    return DeviceProfile(points, device.per_token / 2, device.watts, device.idle_watts)


def _device_dict(device: DeviceProfile) -> dict[str, Any]:
    return {
        "points": [list(point) for point in device.points],
        "per_token_ms": device.per_token,
        "watts": device.watts,
        "idle_watts": device.idle_watts,
    }
