"""RQ's classes made safe for jobs that anyone may have written: no imports, no unpickling.

``RQ_JOB_CLASS=queue_service.rqcompat.SafeJob RQ_QUEUE_CLASS=queue_service.rqcompat.SafeQueue``
makes ``rq info`` and RQ's other commands use them.
"""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar, NoReturn

from redis import Redis
from rq import Queue, Worker
from rq.exceptions import DeserializationError, NoSuchJobError, TimeoutFormatError
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.results import Result
from rq.types import FailureCallbackType, SuccessCallbackType
from rq.utils import decode_redis_hash

from queue_service.errors import ConfigurationError, RequestError
from queue_service.payload import (
    CALL_LIMITS,
    Encoding,
    PlainPickleSerializer,
    PlainSerializer,
    decode_call,
    decode_value,
    encoding_of,
    inflate,
    inflate_text,
)

MAX_TRACEBACK_BYTES = 256 * 1024

logger = logging.getLogger(__name__)


class SafeResult(Result):
    """A result whose value is plain data and whose traceback has a size limit."""

    @classmethod
    def restore(
        cls,
        job_id: str,
        result_id: str,
        payload: Mapping[Any, Any],
        connection: Redis,
        serializer: object = None,
    ) -> Result:
        """Build a result from its stream entry, whatever serializer the caller names.

        Raises:
            RequestError: the stored value is not plain data, or broken.
        """
        fields = decode_redis_hash(dict(payload))
        value, traceback = fields.pop("return_value", None), fields.pop("exc_string", None)
        try:
            result = super().restore(job_id, result_id, fields, connection, PlainSerializer)
            if value is not None:
                result.return_value = decode_value(b64decode(value))
            if traceback:
                result.exc_string = inflate_text(b64decode(traceback), MAX_TRACEBACK_BYTES)
        except (ValueError, KeyError) as exc:
            message = f"A result of job {job_id} is broken."
            raise RequestError(message, code="invalid_payload") from exc
        return result


class SafeJob(Job):
    """A job that reads plain data only, JSON or pickle, whatever serializer the caller passes.

    It imports nothing that its hash names: ``func`` raises, callbacks come from
    ``allowed_callbacks``, webhooks are not sent. It writes with the serializer it came with.
    """

    allowed_callbacks: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, id: str | None = None, connection: Redis | None = None, serializer: object = None
    ) -> None:
        super().__init__(id, connection, PlainSerializer)
        self._unread_data: bytes | None = None

    def restore(self, raw_data: Mapping[Any, Any]) -> None:
        """Take over the fields of the job's hash.

        A payload over the limits stays unread, and is written back as it was.

        Raises:
            NoSuchJobError: there is no payload, or the hash is broken: RQ's tools skip the job.
        """
        fields = decode_redis_hash(dict(raw_data))
        fields.pop("exc_info", None)  # RQ no longer writes it, and reads it without a limit
        stored = fields.get("data", b"")
        if "data" in fields:
            fields["data"] = b""  # RQ would decompress it without a limit
        try:
            super().restore(fields)
        except (ValueError, AssertionError, TimeoutFormatError) as exc:  # asserts on the timeout
            raise NoSuchJobError(f"The hash of job {self.id} is broken: {exc}") from exc
        meta: object = self.meta
        if not isinstance(meta, dict):
            self._unreadable_meta = fields["meta"]
            self.meta = {"unserialized": self._unreadable_meta}
        self._take_data(stored)

    def _take_data(self, stored: bytes) -> None:
        try:
            self.data, self._unread_data = inflate(stored, CALL_LIMITS.num_bytes), None
        except RequestError:
            self.data, self._unread_data = b"", stored
        if encoding_of(self.data) is Encoding.PICKLE:
            self.serializer = PlainPickleSerializer

    def to_dict(self, include_meta: bool = True, include_result: bool = True) -> dict[str, Any]:
        """Return the fields of the job's hash."""
        fields: dict[str, Any] = super().to_dict(include_meta, include_result)
        if self._unread_data is not None:
            fields["data"] = self._unread_data
        return fields

    def _deserialize_data(self) -> None:
        try:
            call = decode_call(self._unread_data or self.data)
        except RequestError as exc:
            raise DeserializationError(exc.message) from exc
        self._func_name, self._instance = call.function, None
        self._args, self._kwargs = call.args, call.kwargs

    def get_call_string(self) -> str:
        """Name the function without its arguments: they hold prompts."""
        try:
            return f"{self.func_name}(…)"
        except DeserializationError:
            return "unreadable payload"

    @property
    def func(self) -> NoReturn:
        """Refuse to import the function.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            f"Job {self.id} is run by `qsvc worker` only: its function is never imported."
        )

    @property
    def success_callback(self) -> SuccessCallbackType | None:
        """The callback if it is allowed, else None."""
        return super().success_callback if self._allows(self._success_callback_name) else None

    @property
    def failure_callback(self) -> FailureCallbackType | None:
        """The callback if it is allowed, else None."""
        return super().failure_callback if self._allows(self._failure_callback_name) else None

    @property
    def stopped_callback(self) -> Callable[[Job, Redis], Any] | None:
        """The callback if it is allowed, else None."""
        return super().stopped_callback if self._allows(self._stopped_callback_name) else None

    def _allows(self, callback: str | None) -> bool:
        if not callback:
            return False
        if callback not in self.allowed_callbacks:
            logger.warning("Job %s: a callback is not allowed and was left out", self.id)
            return False
        return True

    def send_webhooks(self, status: str | JobStatus, *, exc_string: str | None = None) -> None:
        """Send nothing: the job would choose which hosts this process talks to."""
        if self.webhooks:
            logger.warning("Job %s: its webhooks were not sent", self.id)

    def results(self) -> list[Result]:
        """Return every stored result, latest first; raise RequestError for an unsafe one."""
        results: list[Result] = SafeResult.all(self)
        return results

    def latest_result(self, timeout: int = 0) -> Result | None:
        """Return the latest result, waiting up to ``timeout`` seconds; None when there is none.

        Raises:
            RequestError: its value is not plain data.
        """
        return SafeResult.fetch_latest(self, timeout=timeout)

    @property
    def execution_registry(self) -> ExecutionRegistry:
        """The job's executions, also those whose own hash has expired."""
        return _ExecutionRegistry(self.id, connection=self.connection)


class SafeQueue(Queue):
    """A queue of SafeJobs, whatever job class and serializer the caller passes."""

    job_class: type[Job] = SafeJob

    def __init__(
        self, name: str = "default", connection: Redis | None = None, **options: Any
    ) -> None:
        options["job_class"] = _safe_job_class(options.get("job_class"))
        options["serializer"] = PlainSerializer
        super().__init__(name, connection, **options)


class SafeWorker(Worker):
    """A worker to look at, not to run: lists workers and their jobs safely."""

    queue_class: type[Queue] = SafeQueue
    job_class: type[Job] = SafeJob

    def __init__(self, queues: Any, name: str | None = None, **options: Any) -> None:
        options["job_class"] = _safe_job_class(options.get("job_class"))
        options["queue_class"] = None
        options["serializer"] = PlainSerializer
        super().__init__(queues, name, **options)


class _ExecutionRegistry(ExecutionRegistry):
    """RQ's registry raises when an execution's hash expired before its entry here did.

    A job whose worker died could then be neither canceled nor deleted until somebody reaps it,
    and the id is all that both need.
    """

    def get_executions(self, start: int = 0, end: int = -1) -> list[Execution]:
        executions = []
        for execution_id in self.get_execution_ids(start, end):
            execution = Execution(execution_id, self.job_id, self.connection)
            fields = self.connection.hgetall(execution.key)
            if fields:
                execution.restore(fields)
            executions.append(execution)
        return executions


def _safe_job_class(job_class: str | type[Job] | None) -> type[SafeJob] | None:
    """Return the class if it is safe; else None, which stands for the default."""
    if isinstance(job_class, type) and issubclass(job_class, SafeJob):
        return job_class
    return None


def moment_of(text: str) -> float | None:
    """Return a time that RQ or our scripts wrote, in seconds since 1970; None where it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
