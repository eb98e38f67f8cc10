"""Reads results: one job's, or a batch's output lines in input order."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from queue_service import keys
from queue_service.batches import Batches, LineRef, Status
from queue_service.errors import BatchNotFound, JobNotFound, RequestError
from queue_service.payload import decode_value, inflate_text
from queue_service.responses import failure_line, success_line, unanswered_line

# A job that may still change; every other status is an end.
_OPEN_STATUSES = frozenset(
    {
        b"created",
        b"queued",
        b"started",
        b"deferred",
        b"scheduled",
        b"rate_limited",
        b"ready_to_enqueue",
    }
)
_MAX_ERROR_TEXT_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job stands.

    Attributes:
        status: RQ's word for it.
        body: the answer, when it finished.
        error: the error object with ``status_code``, when it failed or was stopped.
    """

    job_id: str
    status: str
    body: Mapping[str, Any] | None
    error: Mapping[str, Any] | None

    @property
    def has_ended(self) -> bool:
        """Whether the job cannot change any more by itself."""
        return self.status.encode() not in _OPEN_STATUSES


def read_job(connection: Redis, job_id: str) -> JobResult:
    """Return how a job stands now.

    Raises:
        JobNotFound: the server knows no such job; it may have expired.
    """
    with connection.pipeline(transaction=False) as pipeline:
        status, entries = send_all(pipeline, job_commands(job_id)).execute()
        refusal = None
        if status is None:
            [refusal] = send_all(pipeline, [refusal_command(job_id)]).execute()
    result = job_result(job_id, status, entries, refusal)
    if result is None:
        raise _not_found_now(connection, job_id)
    return result


def send_all(pipeline: Any, commands: Sequence[tuple[str | int, ...]]) -> Any:
    """Add commands to a pipeline, which is returned."""
    for command in commands:
        pipeline.execute_command(*command)
    return pipeline


def job_commands(job_id: str) -> list[tuple[str | int, ...]]:
    """Return the commands whose replies say how a job stands: its status and its last result."""
    return [
        ("HGET", keys.rq_job(job_id), "status"),
        ("XREVRANGE", keys.rq_results(job_id), "+", "-", "COUNT", 1),
    ]


def refusal_command(job_id: str) -> tuple[str, ...]:
    """Return the command to ask about a job without a status.

    It gives the error of a batch's line that was refused before it became a job.
    """
    batch_id, line = keys.line_of(job_id)
    return ("HGET", keys.batch_errors(batch_id), line)


def job_result(
    job_id: str,
    status: bytes | None,
    entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]],
    refusal: bytes | None,
) -> JobResult | None:
    """Return how a job stands by the replies to the commands; None when nobody knows it."""
    if status is None:
        return None if refusal is None else JobResult(job_id, "failed", None, json.loads(refusal))
    body, error = None, None
    if status not in _OPEN_STATUSES and entries:
        body, error = _answer(entries[0][1])
    return JobResult(job_id, status.decode(), body, error)


def job_not_found(job_id: str) -> JobNotFound:
    """Return what to tell a person who asked for a job that nobody knows."""
    return JobNotFound(f"no job {job_id!r} on this server; it may have expired")


def _not_found_now(connection: Redis, job_id: str) -> JobNotFound:
    """Return why nobody knows a job: of a batch that is there, it may be none of the lines."""
    batch_id, line = keys.line_of(job_id)
    batches = Batches(connection)
    try:
        batch = batches.get(batch_id)
    except BatchNotFound:
        return job_not_found(job_id)
    last = batches.lines(batch_id, start=-1, count=1)
    if last and line.isdecimal() and 1 <= int(line) <= last[0].line:
        return job_not_found(job_id)
    lines = "1 line" if batch.total == 1 else f"{batch.total} lines"
    so_far = "" if batch.is_submitted else " so far"
    return JobNotFound(f"no job {job_id!r}: {batch_id} has {lines}{so_far}")


def read_execution(
    connection: Redis, job_id: str, execution_id: str
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return the body or the error that one execution ended with; None twice when it is gone.

    Other than ``read_job`` also when the job has been queued again since.
    """
    entries: Any = connection.xrevrange(keys.rq_results(job_id))
    for _, entry in entries:
        if entry.get(b"execution_id") == execution_id.encode():
            return _answer(entry)
    return None, None


class BatchReader:
    """Reads a batch's output lines from its first to its last."""

    def __init__(self, connection: Redis, batch_id: str) -> None:
        self._connection = connection
        self._batch_id = batch_id

    def job_id(self, ref: LineRef) -> str:
        """Return the job that ran a line."""
        return keys.job_id(self._batch_id, ref.line)

    def read(self, refs: Sequence[LineRef]) -> list[dict[str, Any] | None]:
        """Return the output line of each, None where the line has not ended."""
        if not refs:
            return []
        job_ids = [self.job_id(ref) for ref in refs]
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.hget(keys.batch(self._batch_id), "ending")
            pipeline.hmget(keys.batch_errors(self._batch_id), [str(ref.line) for ref in refs])
            for job_id in job_ids:
                pipeline.hget(keys.rq_job(job_id), "status")
                pipeline.xrevrange(keys.rq_results(job_id), count=1)
            ending, errors, *replies = pipeline.execute()
        lines: list[dict[str, Any] | None] = []
        for i, (ref, job_id) in enumerate(zip(refs, job_ids, strict=True)):
            status, entries = replies[2 * i], replies[2 * i + 1]
            if errors[i] is not None:
                lines.append(failure_line(job_id, ref.custom_id, json.loads(errors[i])))
            elif status in _OPEN_STATUSES:
                lines.append(None)
            elif status == b"canceled" and ending == Status.EXPIRED.value.encode():
                late = "the batch's time was over before the request ended"
                lines.append(unanswered_line(job_id, ref.custom_id, "batch_expired", late))
            else:
                lines.append(_output_line(job_id, ref.custom_id, status, entries))
        return lines

    def read_ended(self, refs: Sequence[LineRef]) -> list[dict[str, Any]]:
        """Return the output lines of the first of these, up to the first that has not ended."""
        ended: list[dict[str, Any]] = []
        for line in self.read(refs):
            if line is None:
                break
            ended.append(line)
        return ended


def custom_ids(connection: Redis, batch_id: str, lines: Sequence[int]) -> list[LineRef]:
    """Return lines with their custom ids; an id is empty when its job is gone."""
    if not lines:
        return []
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.hmget(keys.batch_errors(batch_id), [str(line) for line in lines])
        for line in lines:
            pipeline.hget(keys.rq_job(keys.job_id(batch_id, line)), "meta")
        errors, *metas = pipeline.execute()
    refs = []
    for line, error, meta in zip(lines, errors, metas, strict=True):
        fields = json.loads(error or meta or b"{}")
        refs.append(LineRef(line, fields.get("custom_id") or ""))
    return refs


def _output_line(
    job_id: str, custom_id: str, status: bytes | None, entries: Sequence[Any]
) -> dict[str, Any]:
    if status == b"canceled":
        return unanswered_line(
            job_id, custom_id, "batch_cancelled", "the request was cancelled before it ended"
        )
    if not entries:
        gone = "the result is gone from the server: it expired or was deleted"
        return unanswered_line(job_id, custom_id, "result_expired", gone)
    body, error = _answer(entries[0][1])
    if body is not None:
        return success_line(job_id, custom_id, body)
    return failure_line(job_id, custom_id, error or {})


def _answer(
    entry: Mapping[bytes, bytes],
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return the body or the error of one entry of RQ's result stream."""
    if b"return_value" in entry:
        try:
            value = decode_value(base64.b64decode(entry[b"return_value"]))
        except (RequestError, ValueError) as error:
            return None, _server_error("unreadable_result", f"the result is unreadable: {error}")
        if isinstance(value, dict):
            return value, None
        return None, _server_error("unreadable_result", "the result is no object")
    if b"qsvc_error" in entry:
        error_object: dict[str, Any] = json.loads(entry[b"qsvc_error"])
        return None, error_object
    return None, _server_error("failed", _last_line(entry.get(b"exc_string", b"")))


def _last_line(packed: bytes) -> str:
    """Return the last line of an error that another RQ tool recorded."""
    try:
        text = inflate_text(base64.b64decode(packed), _MAX_ERROR_TEXT_BYTES)
    except (RequestError, ValueError, zlib.error):
        return "the job failed for a reason that cannot be read"
    return text.strip().rsplit("\n", 1)[-1] or "the job failed without a reason"


def _server_error(code: str, message: str) -> dict[str, Any]:
    return {
        "message": message,
        "type": "server_error",
        "param": None,
        "code": code,
        "status_code": 500,
    }
