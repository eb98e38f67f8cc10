"""Batches as objects: create, look at, cancel."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from redis import Redis
from rq.utils import now, utcformat

from queue_service import keys
from queue_service.errors import BatchNotFound, JobNotFound
from queue_service.requests import Endpoint
from queue_service.scripts import Scripts

_T = TypeVar("_T")

_PAGE_LINES = 500
# Of a queue, looked at to count those of one batch: more than any set of workers holds.
_MOST_RUNNING = 20_000
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
    EXPIRED = "expired"

    @property
    def is_final(self) -> bool:
        """Whether no line of the batch can change any more."""
        return self in (Status.COMPLETED, Status.CANCELLED, Status.EXPIRED)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as it was at one moment.

    Attributes:
        total: lines known so far; all of them once ``is_submitted``.
        queue: the queue its lines wait in.
        forgotten: lines whose results are on their reader's disk only.
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
    timestamps: Mapping[str, int]
    metadata: Mapping[str, str]
    retention_seconds: int
    forgotten: int

    @property
    def expires_at(self) -> int | None:
        """When lines that have not ended are given up, seconds since the epoch."""
        return self.timestamps.get("expires_at")

    @property
    def kept_until(self) -> int | None:
        """When an ended batch and its results expire, seconds since the epoch."""
        ends = [self.timestamps.get(f"{status}_at") for status in Status if status.is_final]
        end = max((moment for moment in ends if moment is not None), default=None)
        return None if end is None else end + self.retention_seconds

    @property
    def ended(self) -> int:
        """Lines that have reached their end."""
        return self.completed + self.failed + self.cancelled

    @property
    def cached_share(self) -> float | None:
        """The part of the prompt tokens that was not computed again; None before the first ones."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

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
            "metadata": dict(self.metadata) or None,
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
        self,
        batch_id: str,
        *,
        endpoint: Endpoint,
        queue: str,
        model: str,
        retention_seconds: int,
        expires_in_seconds: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> bool:
        """Make a batch that takes lines; False when it was there already, and is unchanged.

        Args:
            retention_seconds: how long it is kept after its end.
            expires_in_seconds: lines that have not ended by then are given up.
            metadata: the caller's own words, returned with the batch.
        """
        moment = int(self._clock())
        fields: dict[str, str | int] = {
            "endpoint": endpoint.value,
            "queue": queue,
            "model": model,
            "created_at": moment,
            "in_progress_at": moment,
            "retention_seconds": retention_seconds,
            "cursor": 0,
            "metadata": json.dumps(dict(metadata or {}), ensure_ascii=False),
        }
        if expires_in_seconds is not None:
            fields["expires_at"] = moment + expires_in_seconds
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
            raise batch_not_found(batch_id)
        return read_batch_hash(batch_id, raw)

    def num_running(self, batch: Batch) -> int:
        """Return how many lines of a batch workers hold now."""
        members: Any = self._connection.zrange(keys.rq_started(batch.queue), 0, _MOST_RUNNING - 1)
        prefix = keys.job_id_prefix(batch.id).encode()
        return sum(member.startswith(prefix) for member in members)

    def newest(self, count: int) -> list[Batch]:
        """Return the newest batches, the newest first."""
        members: Any = self._connection.zrevrange(keys.batches(), 0, count - 1)
        found = []
        for member in members:
            try:
                found.append(self.get(member.decode()))
            except BatchNotFound:
                continue  # it expired; the sweeper drops its id
        return found

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
        return self._give_up(batch_id, Status.CANCELLED)

    def current(self, batch_id: str) -> Batch:
        """Return a batch, every line that has not ended given up first if its time is over.

        Raises:
            BatchNotFound: the server knows no such batch.
        """
        batch = self.get(batch_id)
        if batch.expires_at is None or batch.status is not Status.IN_PROGRESS:
            return batch
        moment: Any = self._connection.time()
        if batch.expires_at > moment[0]:
            return batch
        self.expire(batch_id)
        return self.get(batch_id)

    def expire(self, batch_id: str) -> int:
        """Give up every line that has not ended, since the batch's time is over."""
        return self._give_up(batch_id, Status.EXPIRED)

    def _give_up(self, batch_id: str, ending: Status) -> int:
        batch = self.get(batch_id)
        if batch.status.is_final:
            return 0
        args = [ending.value, int(self._clock())]
        if not self._scripts.call("give_up", [keys.batch(batch_id)], args):
            return 0
        return self._cancel_lines(batch)

    def resume_cancel(self, batch_id: str) -> int:
        """Go on with a cancel whose command was killed; return how many lines it cancelled."""
        return self._cancel_lines(self.get(batch_id))

    def _cancel_lines(self, batch: Batch) -> int:
        cancelled = 0
        for page in _batched(self.all_lines(batch.id), _PAGE_LINES):
            cancelled += self._cancel_jobs([keys.job_id(batch.id, ref.line) for ref in page])
        # Not before: a cancel that is killed must not leave queued lines that are in no list.
        lane = keys.rq_queue(keys.lane(batch.queue, batch.id))
        with self._connection.pipeline(transaction=True) as pipeline:
            pipeline.delete(lane)
            pipeline.srem(f"{keys.RQ}:queues", lane)
            pipeline.lrem(keys.lanes(batch.queue), 0, batch.id)
            pipeline.execute()
        # Also with nothing left: it ends a batch all of whose lines had ended.
        return cancelled + self._cancel_jobs([], batch.id)

    def retry_failed(self, batch_id: str) -> int:
        """Run the lines again that failed or were cancelled; return how many.

        Lines that were refused before they were queued stay refused.

        Raises:
            BatchNotFound: the server knows no such batch.
        """
        self.get(batch_id)
        job_ids = (keys.job_id(batch_id, ref.line) for ref in self.all_lines(batch_id))
        return len(self.retry_jobs(job_ids))

    def num_without_job(self, batch_id: str) -> int:
        """Return how many failed lines are no jobs: refused before they were queued, or deleted."""
        return int(self._connection.hlen(keys.batch_errors(batch_id)))

    def retry_jobs(self, job_ids: Iterable[str]) -> list[str]:
        """Give failed, stopped or cancelled jobs a new generation; return those that were."""
        retried: list[str] = []
        for page in _batched(iter(job_ids), _PAGE_LINES):
            queued = self._scripts.call("retry", [], [utcformat(now()), *page])
            retried += [job_id.decode() for job_id in queued]
        return retried

    def forget(self, batch_id: str, refs: Sequence[LineRef]) -> None:
        """Delete the jobs and results of lines that have ended; the batch still counts them.

        For the sole reader of a batch, who has the results on disk.
        """
        self._delete_jobs(self.get(batch_id), refs)
        self._connection.hincrby(keys.batch(batch_id), "forgotten", len(refs))

    def _delete_jobs(self, batch: Batch, refs: Sequence[LineRef]) -> None:
        job_ids = [keys.job_id(batch.id, ref.line) for ref in refs]
        self._scripts.call("delete", [], [batch.queue, *job_ids])

    def delete(self, batch_id: str) -> None:
        """Cancel a batch and delete it with everything it owns: jobs, results, streams.

        Raises:
            BatchNotFound: the server knows no such batch.
        """
        batch = self.get(batch_id)
        self.cancel(batch_id)
        for page in _batched(self.all_lines(batch_id), _PAGE_LINES):
            self._delete_jobs(batch, page)
        self._connection.delete(
            keys.batch(batch_id),
            keys.batch_lines(batch_id),
            keys.batch_done(batch_id),
            keys.batch_errors(batch_id),
            keys.batch_outcomes(batch_id),
        )
        self._connection.zrem(keys.batches(), batch_id)

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


def batch_not_found(batch_id: str) -> BatchNotFound:
    """Return what to tell a person who asked for a batch that the server does not know."""
    return BatchNotFound(
        f"no batch {batch_id!r} on this server; it may have expired, or never been submitted here"
    )


def read_batch_hash(batch_id: str, raw: Mapping[bytes, bytes]) -> Batch:
    """Return a batch from its hash, which has fields."""
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
        metadata=json.loads(fields.get("metadata") or "{}"),
        retention_seconds=number("retention_seconds"),
        forgotten=number("forgotten"),
    )


def _batched(items: Iterator[_T], size: int) -> Iterator[list[_T]]:
    """Yield lists of up to ``size``; itertools.batched needs Python 3.12."""
    while page := list(itertools.islice(items, size)):
        yield page
