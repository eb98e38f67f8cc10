"""Batches as objects: create, look at, cancel."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from redis import Redis
from rq.utils import now, utcformat

from queue_service import keys
from queue_service.errors import BatchNotFound, JobNotFound
from queue_service.requests import Endpoint
from queue_service.scripts import Scripts

_PAGE_LINES = 500
_TIMESTAMPS = (
    "created_at",
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
    "expires_at",
)


class Status(StrEnum):
    """Where a batch stands."""

    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether no line of the batch can change any more."""
        return self in (Status.COMPLETED, Status.CANCELLED)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as it was at one moment.

    Attributes:
        total: lines known so far; all of them once ``is_submitted``.
        queue: the queue its lines wait in.
        timestamps: seconds since the epoch by name, only those that have happened.
    """

    id: str
    status: Status
    endpoint: str
    queue: str
    model: str
    total: int
    completed: int
    failed: int
    cancelled: int
    is_submitted: bool
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timestamps: dict[str, int]

    @property
    def ended(self) -> int:
        """Lines that have reached their end."""
        return self.completed + self.failed + self.cancelled

    def to_object(self) -> dict[str, Any]:
        """Return the batch as the OpenAI API shows one."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "status": self.status.value,
            "errors": None,
            **{name: self.timestamps.get(name) for name in _TIMESTAMPS},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
                "cancelled": self.cancelled,
            },
            "usage": {
                "input_tokens": self.prompt_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.prompt_tokens + self.completion_tokens,
            },
            "metadata": None,
        }


@dataclass(frozen=True, slots=True)
class LineRef:
    """One line of a batch by number and custom id."""

    line: int
    custom_id: str


class Batches:
    """The batches of one server."""

    def __init__(self, connection: Redis, clock: Callable[[], float] = time.time) -> None:
        self._connection = connection
        self._scripts = Scripts(connection)
        self._clock = clock

    def create(
        self, batch_id: str, *, endpoint: Endpoint, queue: str, model: str, retention_seconds: int
    ) -> bool:
        """Make a batch that takes lines; False when it was there already, and is unchanged."""
        moment = int(self._clock())
        fields: dict[str, str | int] = {
            "endpoint": endpoint.value,
            "queue": queue,
            "model": model,
            "created_at": moment,
            "in_progress_at": moment,
            "retention_seconds": retention_seconds,
            "cursor": 0,
        }
        key = keys.batch(batch_id)
        with self._connection.pipeline(transaction=True) as pipeline:
            pipeline.hsetnx(key, "status", Status.IN_PROGRESS.value)
            for name, value in fields.items():
                pipeline.hsetnx(key, name, str(value))
            pipeline.zadd(keys.batches(), {batch_id: moment}, nx=True)
            is_new = pipeline.execute()[0]
        return bool(is_new)

    def get(self, batch_id: str) -> Batch:
        """Return a batch as it is now.

        Raises:
            BatchNotFound: the server knows no such batch.
        """
        raw: Any = self._connection.hgetall(keys.batch(batch_id))
        if not raw:
            raise BatchNotFound(
                f"no batch {batch_id!r} on this server; it may have expired, or never been "
                "submitted here"
            )
        fields = {name.decode(): value.decode() for name, value in raw.items()}

        def number(name: str) -> int:
            return int(fields.get(name) or 0)

        return Batch(
            id=batch_id,
            status=Status(fields["status"]),
            endpoint=fields["endpoint"],
            queue=fields["queue"],
            model=fields["model"],
            total=number("total"),
            completed=number("completed"),
            failed=number("failed"),
            cancelled=number("cancelled"),
            is_submitted=fields.get("submitted") == "1",
            prompt_tokens=number("prompt_tokens"),
            completion_tokens=number("completion_tokens"),
            cached_tokens=number("cached_tokens"),
            timestamps={name: int(fields[name]) for name in _TIMESTAMPS if name in fields},
        )

    def lines(self, batch_id: str, *, start: int, count: int) -> list[LineRef]:
        """Return up to ``count`` lines in input order, from the one at index ``start``."""
        raw: Any = self._connection.lrange(keys.batch_lines(batch_id), start, start + count - 1)
        refs = []
        for entry in raw:
            line, custom_id = entry.decode().split(" ", 1)
            refs.append(LineRef(int(line), custom_id))
        return refs

    def all_lines(self, batch_id: str) -> Iterator[LineRef]:
        """Yield every line that the batch has now, in input order."""
        start = 0
        while page := self.lines(batch_id, start=start, count=_PAGE_LINES):
            yield from page
            start += len(page)

    def cancel(self, batch_id: str) -> int:
        """Cancel every line that has not ended; return how many were cancelled.

        Lines that ended keep their results. A submit that still runs adds nothing more.

        Raises:
            BatchNotFound: the server knows no such batch.
        """
        batch = self.get(batch_id)
        if batch.status.is_final:
            return 0
        self._connection.hset(
            keys.batch(batch_id),
            mapping={
                "status": Status.CANCELLING.value,
                "submitted": "1",
                "cancelling_at": int(self._clock()),
            },
        )
        cancelled = 0
        ids: list[str] = []
        for ref in self.all_lines(batch_id):
            ids.append(keys.job_id(batch_id, ref.line))
            if len(ids) == _PAGE_LINES:
                cancelled += self._cancel_jobs(ids)
                ids = []
        # Also with no ids left: it ends a batch all of whose lines had ended.
        return cancelled + self._cancel_jobs(ids, batch_id)

    def cancel_job(self, job_id: str) -> bool:
        """Cancel one job; False when it had ended already.

        Raises:
            JobNotFound: the server knows no such job.
        """
        if not self._connection.exists(keys.rq_job(job_id)):
            raise JobNotFound(f"no job {job_id!r} on this server")
        return bool(self._cancel_jobs([job_id]))

    def _cancel_jobs(self, job_ids: list[str], batch_id: str = "") -> int:
        count, workers = self._scripts.call(
            "cancel", [], [utcformat(now()), 7 * 86_400, batch_id, *job_ids]
        )
        for worker in workers:
            # The worker looks at once what is no longer its own, not only at its next beat.
            channel = f"{keys.RQ}:pubsub:{worker.decode()}"
            self._connection.publish(channel, json.dumps({"command": "qsvc-beat"}))
        return int(count)
