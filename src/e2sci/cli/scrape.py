"""What a running cloud counts: fetched from its /metrics, and the figures between two looks.

Rates and shares are those of the time between the looks, as Prometheus would have them: a counter
that has gone down has begun anew.
"""

from __future__ import annotations

import http.client
import math
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from e2sci.cli.common import BadInput
from e2sci.cli.reach import KEY_VARIABLE
from e2sci.runtime.transport import Dial

MAX_BYTES = 4 << 20
TIMEOUT_S = 10.0
_Samples = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Look:
    """`samples`: by name, without e2sci_, and by label value; "" where there is no label. `at`:
    seconds of a clock that only goes forward."""

    at: float
    samples: _Samples

    def value(self, name: str, label: str = "") -> float:
        return self.samples.get(name, {}).get(label, 0.0)


@dataclass(frozen=True)
class Figures:
    """A cloud between two looks. Rates a second; acceptance and credit in [0, 1], threshold in
    nats, None where nothing was judged; `requests`, `errors`: since the cloud's start, by reason
    and code."""

    connections: int
    sessions: int
    waiting: int
    drafts_queued: int
    cached_tokens: int
    draining: bool
    tokens_per_s: float
    drafted_per_s: float
    corrected_per_s: float
    filled_per_s: float
    fed_per_s: float
    passes_per_s: float
    pass_ms_p50: float | None
    pass_ms_p95: float | None
    pass_tokens: float | None
    pass_requests: float | None
    acceptance: float | None
    credit: float | None
    threshold: float | None
    evictions_per_s: float
    received_bytes_per_s: float
    sent_bytes_per_s: float
    requests: dict[str, int]
    errors: dict[str, int]


class Source:
    """The /metrics of the cloud that `dial` would connect to."""

    def __init__(self, dial: Dial) -> None:
        place = urlsplit("http" + dial.url.removeprefix("ws"))  # and https of wss
        self.url = f"{place.scheme}://{place.netloc}{place.path.rstrip('/')}/metrics"
        self._key = dial.key
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=dial.tls or ssl.create_default_context()),
            _NoRedirect,
        )

    def look(self) -> Look:
        """What is counted now. Raises BadInput."""
        request = urllib.request.Request(self.url)
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as response:
                text = response.read(MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise BadInput(self._refused(error.code)) from None
        except (OSError, http.client.HTTPException) as error:
            raise BadInput(f"can't read {self.url}: {_reason(error)}") from None
        samples = _parsed(text) if len(text) <= MAX_BYTES else {}
        if "connections" not in samples:
            raise BadInput(f"{self.url} answers, but not as an e2sci cloud")
        return Look(time.monotonic(), samples)

    def _refused(self, status: int) -> str:
        if status == 401 and self._key:
            return f"{self.url} does not accept this API key"
        if status == 401:
            return f"{self.url} needs an API key; set {KEY_VARIABLE}, or give --key-file"
        return f"{self.url} answers, but not as an e2sci cloud: HTTP {status}"


def figures(before: Look, after: Look) -> Figures:
    """What went on between two looks, which lie apart in time."""
    seconds = after.at - before.at

    def grown(name: str, label: str = "") -> float:
        was, now = before.value(name, label), after.value(name, label)
        return now - was if now >= was else now

    def rate(name: str, label: str = "") -> float:
        return grown(name, label) / seconds

    def mean(name: str) -> float | None:
        return _ratio(grown(f"{name}_sum"), grown(f"{name}_count"))

    def percentile(share: float) -> float | None:
        ends = sorted(after.samples.get("pass_seconds_bucket", {}), key=float)
        at = quantile(share, [(float(le), grown("pass_seconds_bucket", le)) for le in ends])
        return None if at is None else 1000 * at

    def totals(name: str) -> dict[str, int]:
        return {label: int(n) for label, n in sorted(after.samples.get(name, {}).items())}

    origins = {o: rate("tokens_total", o) for o in ("drafted", "corrected", "filled")}
    accepted, rejected = (grown("drafts_judged_total", o) for o in ("accepted", "rejected"))
    return Figures(
        connections=int(after.value("connections")),
        sessions=int(after.value("sessions")),
        waiting=int(after.value("waiting")),
        drafts_queued=int(after.value("drafts_queued")),
        cached_tokens=int(after.value("cached_tokens")),
        draining=bool(after.value("draining")),
        tokens_per_s=sum(origins.values()),
        **{f"{origin}_per_s": value for origin, value in origins.items()},
        fed_per_s=rate("fed_tokens_total"),
        passes_per_s=rate("pass_seconds_count"),
        pass_ms_p50=percentile(0.5),
        pass_ms_p95=percentile(0.95),
        pass_tokens=mean("pass_tokens"),
        pass_requests=mean("pass_requests"),
        acceptance=_ratio(accepted, accepted + rejected),
        credit=mean("credit"),
        threshold=mean("threshold_nats"),
        evictions_per_s=rate("evictions_total"),
        received_bytes_per_s=rate("received_bytes_total"),
        sent_bytes_per_s=rate("sent_bytes_total"),
        requests=totals("requests_total"),
        errors=totals("errors_total"),
    )


def quantile(share: float, buckets: list[tuple[float, float]]) -> float | None:
    """The value below which `share` of the observations lie. `buckets`: (upper end, how many lie
    below it), ascending, the last one infinite. Linear within a bucket; beyond the last finite end
    it is that end. None without observations."""
    if not buckets or not buckets[-1][1]:
        return None
    wanted = share * buckets[-1][1]
    for (low, below), (high, upto) in pairwise([(0.0, 0.0), *buckets]):
        if upto >= wanted and upto > below:
            return (
                low if math.isinf(high) else low + (high - low) * (wanted - below) / (upto - below)
            )
    return None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _parsed(text: bytes) -> _Samples:
    """Empty if it is no Prometheus text."""
    samples: dict[str, dict[str, float]] = {}
    try:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                label = next(iter(sample.labels.values()), "")
                samples.setdefault(sample.name.removeprefix("e2sci_"), {})[label] = sample.value
    except (ValueError, UnicodeDecodeError):
        return {}
    return samples


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    match cause:
        case ssl.SSLCertVerificationError():
            return f"its certificate is not trusted ({cause.verify_message}); see --ca"
        case TimeoutError():
            return f"no answer within {TIMEOUT_S:.0f} s"
        case ConnectionRefusedError():
            return "nothing listens there"
        case OSError() if cause.strerror:
            return cause.strerror
    return " ".join(str(cause).split()) or type(cause).__name__


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key is for the place it was given for."""

    def redirect_request(self, *_: Any) -> None:
        return None
