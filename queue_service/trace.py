"""The trace of one job: what happened to it when, from its queue to its result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from redis import Redis

from queue_service import keys
from queue_service.batches import Batches
from queue_service.errors import ConfigurationError
from queue_service.json_text import load_json

VERSION = 1
KEEP_SECONDS = 86_400


class Phase(StrEnum):
    """What a job was doing, or waiting for."""

    QUEUE_WAIT = "queue.wait"
    REQUEST_WAIT = "request.wait"
    REQUEST_PREPARE = "request.prepare"
    ENGINE_REQUEST_WAIT = "engine.request_wait"
    ENGINE_ADMISSION_WAIT = "engine.admission_wait"
    CACHE_RESTORE = "cache.restore"
    PREFILL_CHUNK = "prefill.chunk"
    FIRST_TOKEN = "token_zero"
    DECODE_STEP = "decode.step"
    DECODE_STEPS = "decode.steps"
    STREAM_FIRST_WRITE = "stream.first_write"
    RESULT_WRITE = "result.write"


@dataclass(frozen=True, slots=True)
class Event:
    """One phase of a job.

    Attributes:
        start_ms: since the trace began.
        duration_ms: 0 for a mark.
        attributes: numbers and names; ``work`` is one for all jobs that a step served together, so
            that their times are not to be added up.
    """

    phase: str
    start_ms: float
    duration_ms: float = 0.0
    attributes: Mapping[str, int | float | str] = field(default_factory=dict)

    @property
    def end_ms(self) -> float:
        """When it was over, since the trace began."""
        return self.start_ms + self.duration_ms


@dataclass(frozen=True, slots=True)
class Trace:
    """One execution of one job.

    Attributes:
        started_at_ms: on the worker's monotonic clock, by which traces of one worker line up.
        began_at: when it was queued, in seconds since the epoch, by the worker's clock.
        outcome: how it ended: ``finished``, ``failed``, ``stopped`` or ``retried``.
        events: in the order in which they began.
    """

    job_id: str
    execution_id: str
    worker: str
    attempt: int
    started_at_ms: float
    began_at: float
    outcome: str
    total_ms: float
    events: tuple[Event, ...]

    def to_json(self) -> str:
        """Return what ``from_json`` reads."""
        fields: dict[str, Any] = {
            "version": VERSION,
            "clock": "monotonic-ms",
            "job_id": self.job_id,
            "execution_id": self.execution_id,
            "worker": self.worker,
            "attempt": self.attempt,
            "started_at_ms": round(self.started_at_ms, 3),
            "began_at": self.began_at,
            "outcome": self.outcome,
            "total_ms": round(self.total_ms, 3),
            "events": [
                {
                    "phase": event.phase,
                    "start_ms": round(event.start_ms, 3),
                    "duration_ms": round(event.duration_ms, 3),
                    **({"attributes": dict(event.attributes)} if event.attributes else {}),
                }
                for event in self.events
            ],
        }
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Trace:
        """Read a trace.

        Raises:
            ValueError: it is none, or of another version.
        """
        try:
            fields = load_json(text.decode() if isinstance(text, bytes) else text)
            if fields["version"] != VERSION:
                raise ValueError(f"a trace of version {fields['version']}, not {VERSION}")
            events = tuple(
                Event(
                    str(one["phase"]),
                    float(one["start_ms"]),
                    float(one["duration_ms"]),
                    dict(one.get("attributes", {})),
                )
                for one in fields["events"]
            )
            return cls(
                job_id=str(fields["job_id"]),
                execution_id=str(fields["execution_id"]),
                worker=str(fields["worker"]),
                attempt=int(fields["attempt"]),
                started_at_ms=float(fields["started_at_ms"]),
                began_at=float(fields["began_at"]),
                outcome=str(fields["outcome"]),
                total_ms=float(fields["total_ms"]),
                events=events,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no trace: {error}") from error


def save_trace(connection: Redis, trace: Trace) -> None:
    """Add a trace to those of its job; they are kept for a day."""
    key = keys.trace(trace.job_id)
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.rpush(key, trace.to_json())
        pipeline.expire(key, KEEP_SECONDS)
        pipeline.execute()


def read_traces(connection: Redis, job_id: str) -> list[Trace]:
    """Return the traces of a job's executions, the oldest first; unreadable ones are left out."""
    found: Any = connection.lrange(keys.trace(job_id), 0, -1)
    traces = []
    for text in found:
        try:
            traces.append(Trace.from_json(text))
        except ValueError:
            continue
    return traces


def read_batch_traces(connection: Redis, batch_id: str) -> Iterator[Trace]:
    """Yield the traces of a batch's lines, in input order."""
    for ref in Batches(connection).all_lines(batch_id):
        yield from read_traces(connection, keys.job_id(batch_id, ref.line))


def write_chrome_trace(path: Path, traces: Iterable[Trace]) -> None:
    """Write traces for Perfetto and chrome://tracing.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    text = json.dumps(chrome_trace(traces), ensure_ascii=False)
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"the traces cannot be written to {path}: {error.strerror}"
        ) from error


def chrome_trace(traces: Iterable[Trace]) -> dict[str, Any]:
    """Return traces in the Trace Event Format, which Perfetto and chrome://tracing show.

    A process for each worker, a thread for each execution, microseconds of the workers' monotonic
    clocks. Source: "Trace Event Format", complete (X), instant (i) and metadata (M) events.
    """
    events: list[dict[str, Any]] = []
    workers: dict[str, int] = {}
    for thread, trace in enumerate(traces, 1):
        process = workers.setdefault(trace.worker, len(workers) + 1)
        place = {"pid": process, "tid": thread}
        name = f"{trace.job_id} ({trace.outcome}, attempt {trace.attempt})"
        events.append({"ph": "M", "name": "thread_name", "args": {"name": name}, **place})
        for event in trace.events:
            start = {"ts": round(1e3 * (trace.started_at_ms + event.start_ms), 1), **place}
            common = {"name": event.phase, "cat": "qsvc", "args": dict(event.attributes), **start}
            if event.duration_ms:
                events.append({"ph": "X", "dur": round(1e3 * event.duration_ms, 1), **common})
            else:
                events.append({"ph": "i", "s": "t", **common})
    for worker, process in workers.items():
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": worker}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
