"""The dead letter: jobs that failed for good, kept in RQ's FailedJobRegistry with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis

from queue_service import keys
from queue_service.batches import Batches
from queue_service.errors import JobNotFound
from queue_service.results import read_job
from queue_service.scripts import Scripts


@dataclass(frozen=True, slots=True)
class DeadJob:
    """One failed job, without its prompt.

    Attributes:
        failed_at: RQ's time in ISO form.
        attempts: how often it was claimed.
    """

    job_id: str
    queue: str
    status: str
    code: str
    message: str
    batch_id: str | None
    line: int | None
    attempts: int
    failed_at: str

    def to_object(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return asdict(self)


class DeadLetter:
    """The failed jobs of every queue of a server."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._batches = Batches(connection)
        self._scripts = Scripts(connection)

    def entries(self, *, queue: str | None = None, code: str | None = None) -> Iterator[DeadJob]:
        """Yield the failed jobs, queue by queue."""
        for registry in self._registries(queue):
            members: Any = self._connection.zrange(registry, 0, -1)
            for member in members:
                try:
                    entry = self.entry(member.decode())
                except JobNotFound:
                    continue  # expired; RQ drops the id at its next cleanup
                if code is None or entry.code == code:
                    yield entry

    def entry(self, job_id: str) -> DeadJob:
        """Return one failed job.

        Raises:
            JobNotFound: the server knows no such job, or it has not failed.
        """
        result = read_job(self._connection, job_id)
        if result.status not in ("failed", "stopped"):
            raise JobNotFound(f"job {job_id!r} has not failed: it is {result.status}")
        names = ("origin", "qsvc_batch", "qsvc_line", "qsvc_attempt", "ended_at")
        raw: Any = self._connection.hmget(keys.rq_job(job_id), names)
        origin, batch_id, line, attempts, ended_at = (v.decode() if v else "" for v in raw)
        error = result.error or {}
        if not origin:  # a line that was refused before it was queued
            batch_id, line = keys.line_of(job_id)
            origin = self._batches.get(batch_id).queue
        return DeadJob(
            job_id=job_id,
            queue=origin,
            status=result.status,
            code=str(error.get("code") or "failed"),
            message=str(error.get("message") or "no reason was recorded"),
            batch_id=batch_id or None,
            line=int(line) if line else None,
            attempts=int(attempts or 0),
            failed_at=ended_at,
        )

    def retry(self, job_ids: Sequence[str]) -> int:
        """Queue failed jobs again with a clean record; return how many there were."""
        return len(self._batches.retry_jobs(list(job_ids)))

    def purge(self, job_ids: Sequence[str]) -> int:
        """Delete failed jobs; a batch keeps the error of its line. Return how many there were."""
        count = 0
        for job_id in job_ids:
            try:
                entry = self.entry(job_id)
            except JobNotFound:
                continue
            error = "" if entry.batch_id is None else self._error(entry)
            count += self._scripts.call("purge", [], [job_id, error])
        return count

    def _error(self, entry: DeadJob) -> str:
        error = read_job(self._connection, entry.job_id).error or {}
        meta: Any = self._connection.hget(keys.rq_job(entry.job_id), "meta")
        custom_id = json.loads(meta or b"{}").get("custom_id")
        return json.dumps({**error, "line": entry.line, "custom_id": custom_id}, ensure_ascii=False)

    def _registries(self, queue: str | None) -> list[str]:
        if queue is not None:
            return [keys.rq_failed(queue)]
        pattern = keys.rq_failed("*")
        found = self._connection.scan_iter(match=pattern, count=1000)
        return sorted(key.decode() for key in found)
