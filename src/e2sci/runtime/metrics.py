"""What a cloud counts, as Prometheus reads it.

Names begin with `e2sci_`; docs/operations.md lists them. Every cloud has a registry of its own, so
that several live in one process without mixing. Nothing here ever holds a prompt, a text or a key.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from e2sci.decoding.distribution import unpack_ids
from e2sci.session.messages import Verdict

PASS_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
PASS_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
NATS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.5, 0.7, 1.0)


class Metrics:
    """The metrics of one cloud, in `registry`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.connections = self._gauge("connections", "Edges connected")
        self.sessions = self._gauge("sessions", "Requests with a place in the engine")
        self.waiting = self._gauge("waiting", "Requests in line for a place")
        self.drafts_queued = self._gauge("drafts_queued", "Draft tokens received and not judged")
        self.cached_tokens = self._gauge("cached_tokens", "Tokens in the engine's cache")
        self.draining = self._gauge("draining", "1 while no new request is taken")
        self.pass_seconds = self._histogram("pass_seconds", "Time of a target pass", PASS_SECONDS)
        self.pass_tokens = self._histogram("pass_tokens", "Tokens fed in a pass", PASS_TOKENS)
        self.pass_requests = self._histogram("pass_requests", "Requests in a pass", PASS_TOKENS)
        self.credit = self._histogram("credit", "Credit of elastic verdicts", SHARES)
        self.threshold = self._histogram("threshold_nats", "Threshold of elastic verdicts", NATS)
        self.requests = self._counter("requests", "Requests ended, by reason", ("reason",))
        self.errors = self._counter("errors", "Errors sent, by code", ("code",))
        self.judged = self._counter(
            "drafts_judged", "Draft tokens judged, by outcome", ("outcome",)
        )
        self.tokens = self._counter("tokens", "Tokens committed, by origin", ("origin",))
        self.fed = self._counter("fed_tokens", "Tokens fed to the target, prompts included")
        self.evictions = self._counter("evictions", "Caches given to another request")
        self.received = self._counter("received_bytes", "Payload bytes received from edges")
        self.sent = self._counter("sent_bytes", "Payload bytes sent to edges")

    def passed(self, tokens: int, requests: int, seconds: float) -> None:
        """A target pass is done."""
        self.pass_seconds.observe(seconds)
        self.pass_tokens.observe(tokens)
        self.pass_requests.observe(requests)
        self.fed.inc(tokens)

    def verdict(self, verdict: Verdict) -> None:
        """A verdict goes out."""
        own = len(unpack_ids(verdict.ids, len(verdict.ids)))
        self.judged.labels("accepted").inc(verdict.accepted)
        self.judged.labels("rejected").inc(verdict.rejected)
        self.tokens.labels("drafted").inc(verdict.accepted)
        self.tokens.labels("corrected").inc(verdict.rejected)
        self.tokens.labels("filled").inc(own - verdict.rejected)
        if verdict.credit is not None:
            self.credit.observe(verdict.credit.credit)
            self.threshold.observe(verdict.credit.threshold)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"e2sci_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"e2sci_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"e2sci_{name}", text, buckets=buckets, registry=self.registry)
