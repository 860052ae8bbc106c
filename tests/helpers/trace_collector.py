"""A collector of traces, over OTLP/HTTP."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from helpers.server import wait_until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Received(NamedTuple):
    name: str
    trace_id: str
    span_id: str
    parent: str
    state: str
    start: int
    end: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    failed: bool
    kind: int


class Collector:
    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.headers: list[dict[str, str]] = []

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.headers.append(headers)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [_received(span, resource.resource) for span in scope.spans]

    def trace(self, trace_id: str) -> list[Received]:
        return sorted(
            (span for span in self.spans if span.trace_id == trace_id), key=lambda s: s.start
        )

    def wait_for(self, trace_id: str, name: str) -> Received:
        wait_until(lambda: any(span.name == name for span in self.trace(trace_id)), 20)
        return next(span for span in self.trace(trace_id) if span.name == name)


def _received(span: Any, resource: Any) -> Received:  # noqa: ANN401
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        state=span.trace_state,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        resource=_values(resource.attributes),
        failed=span.status.code == 2,
        kind=span.kind,
    )


def _values(attributes: Any) -> dict[str, Any]:  # noqa: ANN401
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(body, {name.lower(): value for name, value in self.headers.items()})
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as receiver:
        thread = threading.Thread(target=receiver.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{receiver.server_address[1]}", collector
        receiver.shutdown()
        thread.join()
