"""A span a request, for OpenTelemetry.

The trace's id is the request's (`Open.id`, the same at the edge and after a resume), so what the
edge traces under it and what each cloud did for it lie side by side. Where spans go is up to the
standard OTEL_ variables; without them, to a collector on this machine. Needs the extra `otel`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from e2sci import __version__
from e2sci.runtime.seat import Ended

_FINE = frozenset({"stop", "length", "cancelled"})


@contextmanager
def tracing(model: str) -> Iterator[Callable[[Ended], None]]:
    """What a cloud's `on_end` calls, for requests to the target `model`. Raises ValueError where
    the extra is missing. At the end it sends what is left, for OTEL_EXPORTER_OTLP_TIMEOUT at most.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.trace import SpanKind, StatusCode
    except ImportError as error:
        raise ValueError(f'{error}; run: pip install "e2sci[otel]"') from None

    class Ids(RandomIdGenerator):
        """Gives a trace the id that is wanted."""

        wanted = 0

        def generate_trace_id(self) -> int:
            return self.wanted or super().generate_trace_id()

    def ended(request: Ended) -> None:
        end = time.time_ns()
        ids.wanted = int(request.id or "0", 16)
        span = tracer.start_span(
            "verify",
            kind=SpanKind.SERVER,
            start_time=end - int(1e9 * request.seconds),
            attributes={
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": request.prompt,
                "gen_ai.usage.output_tokens": request.tokens,
                "e2sci.client": request.client,
                "e2sci.reason": request.reason,
                "e2sci.passes": request.passes,
                "e2sci.fed_tokens": request.fed,
                "e2sci.acceptance": request.acceptance,
            },
        )
        if request.reason not in _FINE:
            span.set_status(StatusCode.ERROR, request.reason)
        span.end(end)

    ids = Ids()
    resource = Resource.create({"service.name": "e2sci-cloud", "service.version": __version__})
    provider = TracerProvider(resource=resource, id_generator=ids)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracer = provider.get_tracer("e2sci", __version__)
    try:
        yield ended
    finally:
        provider.shutdown()
