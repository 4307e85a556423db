"""Spans: one a request, under the request's own id, with figures and no text."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from e2sci.decoding.distribution import pack_ids
from e2sci.engines.synthetic import EOS
from e2sci.runtime.cloud import Cloud
from e2sci.server.cloud_app import listening
from e2sci.server.tracing import tracing
from e2sci.session.messages import Cancel, Error, Finished, Open
from live import HOST, TIMES, Watched, free_port, raw_client

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)


@contextmanager
def collector():
    """What an OpenTelemetry collector takes by HTTP: (its URL, spans, raw bodies)."""
    spans, bodies = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend((resource.resource, span) for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer((HOST, 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://{HOST}:{server.server_port}", spans, bodies
    finally:
        server.shutdown()
        server.server_close()


PROMPT = "plum tart for the ambassador"


async def requests(ended, *openings, engine=None):
    """Have a cloud serve these, each to its end or to a Cancel."""
    async with (
        Cloud(engine or Watched(), times=TIMES, on_end=ended) as cloud,
        listening(cloud, HOST, 0) as port,
        raw_client(f"ws://{HOST}:{port}") as client,
    ):
        for each in openings:
            await client.send(each)
            if each.drafting:
                await client.send(Cancel(request=each.request))
            while not isinstance(await client.receive(), Finished | Error):
                pass


def opening(request, id="", **fields):
    usual = {"drafting": False, "sampling": {"logit_bias": {EOS: -100.0}}, "max_tokens": 20}
    usual["prompt"] = pack_ids(PROMPT.encode())
    return Open(request=request, id=id, **{**usual, **fields})


async def test_a_span_a_request_under_the_requests_own_id(monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    first, second = "0123456789abcdef" * 2, "f" * 31
    with collector() as (url, spans, bodies):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with tracing("big") as ended:
            await requests(
                ended,
                opening(1, first),
                opening(2, second, drafting=True, fill=False),
                opening(3),
                opening(4, first),
                opening(5, max_tokens=9000, prompt=pack_ids([104] * 5000)),
            )
    ids = [span.trace_id.hex() for _, span in spans]
    assert ids[:2] + ids[3:] == [first, second.rjust(32, "0"), first]
    assert len({*ids, first, second}) == 4
    assert len({span.span_id for _, span in spans}) == 4
    assert not any(span.parent_span_id for _, span in spans)
    resource, span = spans[0]
    about = {a.key: a.value.string_value for a in resource.attributes}
    assert (about["service.name"], about["deployment.environment"]) == ("e2sci-cloud", "test")
    said = {a.key: a.value for a in span.attributes}
    assert said["gen_ai.request.model"].string_value == "big"
    assert said["gen_ai.usage.input_tokens"].int_value == len(PROMPT)
    assert said["gen_ai.usage.output_tokens"].int_value == 20
    assert said["e2sci.reason"].string_value == "length"
    assert said["e2sci.passes"].int_value > 0
    assert span.start_time_unix_nano < span.end_time_unix_nano
    assert [span.status.code for _, span in spans] == [0] * 4
    assert all(PROMPT.encode() not in body for body in bodies)


async def test_a_request_that_fails_is_an_error(monkeypatch):
    def fail(_):
        raise RuntimeError("out of memory")

    with collector() as (url, spans, _):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with tracing("big") as ended:
            await requests(ended, opening(1), engine=Watched(hook=fail))
    [(_, span)] = spans
    assert (span.status.code, span.status.message) == (2, "engine")


async def test_without_a_collector_requests_go_on(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{HOST}:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with tracing("big") as ended:
        await requests(ended, opening(1))


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r'run: pip install "e2sci\[otel\]"'), tracing("big"):
        pass
