"""Looks after batches: squares them with stock RQ tools, lets them expire.

Stock tools cancel, delete and empty without our scripts, so lines can end uncounted.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from redis import Redis

from queue_service import keys
from queue_service.batches import Batch, Batches, LineRef, Status
from queue_service.errors import BatchNotFound
from queue_service.scripts import Arg, Scripts

_PAGE_LINES = 500
_PAGES_A_LOOK = 10
_BATCHES_A_LOOK = 200
_GONE = {
    "message": "the job was deleted from the server before it had an answer",
    "type": "server_error",
    "param": None,
    "code": "job_deleted",
    "status_code": 410,
}


class Sweeper:
    """Looks now and then at batches that do not come on, a bounded part of one at a time.

    Args:
        interval_seconds: time between two looks at a batch.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        connection: Redis,
        *,
        interval_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._batches = Batches(connection)
        self._scripts = Scripts(connection)
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._next = clock() + interval_seconds
        self._seen: dict[str, int] = {}
        self._position: dict[str, int] = {}
        self._closed: dict[str, int] = {}

    def sweep(self) -> int:
        """Look at the batches in progress if it is time; return how many lines were squared."""
        if self._clock() < self._next:
            return 0
        self._next = self._clock() + self._interval_seconds
        return self.sweep_now()

    def expire_late(self) -> None:
        """Give up what has not ended of batches whose time is over, before it is claimed."""
        for batch_id in self._not_ended():
            with contextlib.suppress(BatchNotFound):  # deleted just now
                self._batches.current(batch_id)

    def sweep_now(self) -> int:
        """Look at the batches in progress; return how many lines were squared."""
        squared = 0
        live: dict[str, int] = {}
        for batch_id in self._not_ended():
            try:
                batch = self._batches.current(batch_id)
            except BatchNotFound:
                continue  # deleted just now
            if batch.status.is_final:
                continue
            live[batch_id] = batch.ended
            if self._seen.get(batch_id) == batch.ended:
                if batch.status is Status.CANCELLING:
                    self._batches.resume_cancel(batch_id)
                squared += sum(self._sweep_page(batch) for _ in range(_PAGES_A_LOOK))
        self._seen = live
        self._position = {b: position for b, position in self._position.items() if b in live}
        self._close_some()
        return squared

    def _not_ended(self) -> list[str]:
        """Return the batches that have not ended; drop the ids of those that are gone.

        Ended ones are kept for days: there may be many, and the worker waits meanwhile.
        """
        members: Any = self._connection.zrange(keys.batches(), 0, -1)
        batch_ids = [member.decode() for member in members]
        found = []
        for start in range(0, len(batch_ids), _PAGE_LINES):
            page = batch_ids[start : start + _PAGE_LINES]
            with self._connection.pipeline(transaction=False) as pipeline:
                for batch_id in page:
                    pipeline.hget(keys.batch(batch_id), "status")
                statuses = pipeline.execute()
            for batch_id, status in zip(page, statuses, strict=True):
                if status is None:
                    self._connection.zrem(keys.batches(), batch_id)
                elif not Status(status.decode()).is_final:
                    found.append(batch_id)
        return found

    def _close_some(self) -> None:
        """Give the lines of ended batches their time to expire, some pages at a time."""
        members: Any = self._connection.zrange(keys.closing(), 0, _BATCHES_A_LOOK - 1)
        lines_left = _PAGES_A_LOOK * _PAGE_LINES
        for member in members:
            if lines_left <= 0:
                return
            lines_left -= self._close(member.decode(), lines_left)

    def _close(self, batch_id: str, most_lines: int) -> int:
        """Go on with one ended batch; return how many lines were given their time."""
        start = position = self._closed.pop(batch_id, 0)
        with contextlib.suppress(BatchNotFound):
            batch = self._batches.get(batch_id)
            while batch.kept_until is not None:  # else it is in progress once more
                refs = self._batches.lines(batch_id, start=position, count=_PAGE_LINES)
                self._expire_lines(batch, refs, batch.kept_until)
                position += len(refs)
                if len(refs) < _PAGE_LINES:
                    break
                if position - start >= most_lines:
                    self._closed[batch_id] = position
                    return position - start
        self._connection.zrem(keys.closing(), batch_id)
        return position - start

    def _expire_lines(self, batch: Batch, refs: list[LineRef], moment: int) -> None:
        with self._connection.pipeline(transaction=False) as pipeline:
            for ref in refs:
                job_id = keys.job_id(batch.id, ref.line)
                pipeline.expireat(keys.rq_job(job_id), moment)
                pipeline.expireat(keys.rq_results(job_id), moment)
                for registry in (keys.rq_finished, keys.rq_failed, keys.rq_canceled):
                    pipeline.zadd(registry(batch.queue), {job_id: moment}, xx=True)
            pipeline.execute()

    def _sweep_page(self, batch: Batch) -> int:
        position = self._position.get(batch.id, 0)
        refs = self._batches.lines(batch.id, start=position, count=_PAGE_LINES)
        self._position[batch.id] = position + len(refs) if refs else 0
        # With no lines too: it ends a batch that a killed command left cancelling.
        return self.square(batch.id, refs)

    def square(self, batch_id: str, refs: list[LineRef]) -> int:
        """Count lines that have ended but were not counted; return how many there were."""
        gone = json.dumps(_GONE).removesuffix("}")
        args: list[Arg] = [batch_id, gone]
        for ref in refs:
            args += [ref.line, json.dumps(ref.custom_id, ensure_ascii=False)]
        return int(self._scripts.call("sweep", [keys.batch(batch_id)], args))
