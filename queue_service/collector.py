"""Whether spans of jobs are collected: OpenTelemetry's environment variables say so."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from queue_service.spans import Spans

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


def spans_for(service: str, instance: str = "") -> Spans | None:
    """Return what sends spans to the collector of the environment; None where it names none.

    It names one in OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT. What keeps
    spans from being sent though somebody wants them is logged.

    Args:
        service, instance: as `Spans` has them.
    """
    if not _first_of(*_ENDPOINTS) or _first_of("OTEL_SDK_DISABLED").lower() == "true":
        return None
    if _first_of("OTEL_TRACES_EXPORTER") == "none":
        return None
    protocol = _first_of(*_PROTOCOLS) or _PROTOCOL
    if protocol != _PROTOCOL:
        logger.warning(
            "no spans are sent: qsvc speaks %s, and %s asks for %s",
            _PROTOCOL,
            " or ".join(_PROTOCOLS),
            protocol,
        )
        return None
    try:
        from queue_service.spans import Spans  # its libraries are not everywhere
    except ImportError as error:
        logger.warning("no spans are sent (%s): pip install 'qsvc[otel]'", error)
        return None
    try:
        return Spans(service, instance)
    except Exception as error:  # what a variable may be is OpenTelemetry's to say, in many ways
        logger.warning("no spans are sent: OpenTelemetry refuses its environment (%s)", error)
        return None


@contextlib.contextmanager
def collected(service: str, *, is_wanted: bool = True) -> Iterator[Spans | None]:
    """Give what `spans_for` returns, None where it is not wanted; at the end, send what waits.

    For commands that people watch: of a collector that is away, one line says so.
    """
    spans = spans_for(service) if is_wanted else None
    if spans is None:
        yield None
        return
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    try:
        yield spans
    finally:
        spans.close()
        if spans.is_failing:
            logger.warning("the collector of spans did not take them all; no job is affected")


def _first_of(*names: str) -> str:
    return next(filter(None, map(os.environ.get, names)), "")
