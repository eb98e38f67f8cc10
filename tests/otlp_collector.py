"""A collector of spans: a real HTTP server that takes OTLP as the protocol buffers it comes in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True, slots=True)
class Collected:
    """A span, its times in nanoseconds since the epoch.

    Attributes:
        resource: attributes of the process that sent it.
        events: names and attributes.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    began: int
    ended: int
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]
    events: tuple[tuple[str, dict[str, Any]], ...]


class Collector:
    """Keeps what it was sent.

    Attributes:
        spans: in the order in which they came.
        bodies: the requests as they came.
        paths: what was asked for.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Collected] = []
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()

    def take(self, body: bytes) -> None:
        """Read one request."""
        self.bodies.append(body)
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _attributes(sent.resource.attributes)
            for scope in sent.scope_spans:
                self.spans += [_collected(span, resource) for span in scope.spans]

    def named(self, beginning: str) -> list[Collected]:
        """Return the spans whose names begin so."""
        return [span for span in self.spans if span.name.startswith(beginning)]

    def below(self, parent: Collected) -> list[Collected]:
        """Return the children of a span."""
        return [span for span in self.spans if span.parent_id == parent.span_id]


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """Serve on a port of the loopback for the length of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.paths.add(self.path)
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
        assert collector.paths <= {"/v1/traces"}


def _attributes(pairs: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value")
        for pair in pairs
    }


def _collected(span: Span, resource: dict[str, Any]) -> Collected:
    return Collected(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=Span.SpanKind.Name(span.kind),
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        attributes=_attributes(span.attributes),
        resource=resource,
        events=tuple((event.name, _attributes(event.attributes)) for event in span.events),
    )
