"""Spans of jobs for OpenTelemetry. Import it where somebody collects them (see collector.py).

A job's tree: whoever queued it, then ``process <queue>`` for each execution that ended, and below
that a span for each phase. The context crosses Redis in the job's meta, as W3C trace context.

Source of names: OpenTelemetry's semantic conventions for messaging and generative AI.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from queue_service.broker import Claimed, Ending, Outcome
from queue_service.errors import RequestError
from queue_service.payload import Limits, decode_value
from queue_service.trace import Trace

logger = logging.getLogger(__name__)

_META_LIMITS = Limits(num_bytes=8192, depth=8, num_nodes=1000)
_PATIENCE_SECONDS = 2.0
# Well below what OpenTelemetry lets wait before it drops something (2,048).
_SEND_AFTER = 512


class _Exporter(OTLPSpanExporter):
    """Knows whether the collector took what was last sent."""

    is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = super().export(spans)
        finally:
            self.is_failing = result is not SpanExportResult.SUCCESS
        return result


class Spans:
    """Makes spans of jobs and sends them in batches; any thread may call it.

    OpenTelemetry's environment variables say where to, how many, and with what attributes.

    Args:
        service: the service's name where they name none.
        instance: tells one process of the service from another.
    """

    def __init__(self, service: str, instance: str = "") -> None:
        names = {"service.name": service}
        if instance:
            names["service.instance.id"] = instance
        resource = Resource.create(names).merge(OTELResourceDetector().detect())
        self._exporter = _Exporter()
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("qsvc")
        self._propagator = TraceContextTextMapPropagator()
        self._num_created = 0
        self._sending: threading.Thread | None = None

    @property
    def is_failing(self) -> bool:
        """Whether the collector did not take what it was last sent."""
        return self._exporter.is_failing

    def create(self, job_id: str, queue: str) -> dict[str, str]:
        """Begin the tree of a job that is about to be queued; return what belongs into its meta.

        A job that the server refuses then, or that is sent to it once more, leaves a tree that is
        its root alone.
        """
        span = self._tracer.start_span(
            f"create {queue}",
            kind=SpanKind.PRODUCER,
            attributes=_message("create", job_id, queue),
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        span.end()
        self._num_created += 1
        if self._num_created % _SEND_AFTER == 0:
            self._send()
        return carrier

    def context_in(self, claimed: Claimed) -> Context | None:
        """Return the context that a job carries; None where it carries none that is readable."""
        meta = claimed.fields.get("meta")
        if not meta:
            return None
        try:
            fields = decode_value(meta, _META_LIMITS)
        except RequestError as error:
            logger.debug("no trace context job=%s (%s)", claimed.job_id, error)
            return None
        if type(fields) is not dict:
            return None
        carrier = {key: text for key, text in fields.items() if type(text) is str}
        context = self._propagator.extract(carrier, Context())
        return context if get_current_span(context).get_span_context().is_valid else None

    def is_sampled(self, context: Context | None) -> bool:
        """Return whether the tree that a job belongs to is kept."""
        return get_current_span(context).get_span_context().trace_flags.sampled

    def export(
        self, claimed: Claimed, trace: Trace, context: Context | None, outcome: Outcome
    ) -> None:
        """Send an execution that has ended, below the context that its job carries."""
        attributes: dict[str, str | int] = {
            **_message("process", claimed.job_id, claimed.queue),
            "gen_ai.usage.input_tokens": outcome.prompt_tokens,
            "gen_ai.usage.output_tokens": outcome.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
            "qsvc.attempt": trace.attempt,
            "qsvc.outcome": trace.outcome,
        }
        if claimed.batch_id is not None:
            attributes["qsvc.batch"] = claimed.batch_id
        if outcome.error is not None:
            attributes["error.type"] = str(outcome.error["code"])
        span = self._tracer.start_span(
            f"process {claimed.queue}",
            context or Context(),
            SpanKind.CONSUMER,
            attributes,
            start_time=_nanoseconds(trace, 0.0),
        )
        below = set_span_in_context(span, Context())
        for event in trace.events:
            start_ns = _nanoseconds(trace, event.start_ms)
            if event.duration_ms:
                phase = self._tracer.start_span(
                    event.phase,
                    below,
                    attributes=_prefixed(event.attributes),
                    start_time=start_ns,
                )
                phase.end(_nanoseconds(trace, event.end_ms))
            else:
                span.add_event(event.phase, _prefixed(event.attributes), start_ns)
        if outcome.ending is not Ending.FINISHED:
            span.set_status(StatusCode.ERROR)
        span.end(_nanoseconds(trace, trace.total_ms))

    def close(self) -> None:
        """Send what waits; a collector that does not answer is not waited for long."""
        if _call_patiently(self._provider.shutdown).is_alive():
            logger.warning("the collector of spans does not answer: the last spans are lost")

    def _send(self) -> None:
        """Send what waits, or some of what is made at once would be dropped.

        A collector that takes nothing is not waited for again until it does.
        """
        if self._exporter.is_failing or (self._sending is not None and self._sending.is_alive()):
            return
        self._sending = _call_patiently(self._provider.force_flush)


def _call_patiently(call: Callable[[], object]) -> threading.Thread:
    """Call something on a thread, which is returned when it has ended or a while has passed."""
    thread = threading.Thread(target=call, daemon=True, name="spans")
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    return thread


def _message(operation: str, job_id: str, queue: str) -> dict[str, str]:
    return {
        "messaging.system": "rq",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": queue,
        "messaging.message.id": job_id,
    }


def _prefixed(attributes: Mapping[str, int | float | str]) -> dict[str, int | float | str]:
    return {f"qsvc.{name}": value for name, value in attributes.items()}


def _nanoseconds(trace: Trace, after_ms: float) -> int:
    # A time before 1970, which only others write, would cost all spans that are sent with it.
    return max(0, round(1e9 * trace.began_at) + round(1e6 * after_ms))
