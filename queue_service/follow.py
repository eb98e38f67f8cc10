"""Follows a batch to its end, writing its results as they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis import Redis, RedisError
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError

from queue_service import keys
from queue_service.batches import Batch, Batches
from queue_service.output import PAGE_LINES, BatchOutput

_BLOCK_MS = 500
_LEAST_ROUND_SECONDS = 0.1
_OUTAGES = (ConnectionError, TimeoutError, BusyLoadingError)
_OUTAGE_SECONDS = 0.5
_RUNNING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Standing:
    """How a batch that is followed stands.

    Attributes:
        num_running: lines that workers hold, as it was a second ago at most.
        num_written: lines in the file; None where the batch is only waited for.
    """

    batch: Batch
    num_running: int
    num_written: int | None

    @property
    def num_waiting(self) -> int:
        """Lines that have not ended and that no worker holds."""
        return max(0, self.batch.total - self.batch.ended - self.num_running)


def follow(
    connection: Redis,
    batch_id: str,
    output: BatchOutput | None,
    *,
    on_update: Callable[[Standing], None],
    should_stop: Callable[[], bool],
    on_outage: Callable[[RedisError], None] | None = None,
) -> Batch:
    """Write results until every line of the batch is in the file; return the batch as it ended.

    Args:
        output: resumed already; None only waits for the batch's end.
        on_update: told how the batch stands, several times a second.
        should_stop: asked every round; when it says so, the batch is returned as it is.
        on_outage: told once each time the server goes away, and it is waited for; None raises.

    Raises:
        BatchNotFound: the batch expired or was deleted meanwhile.
        redis.exceptions.RedisError: the server is away; what was written stays.
    """
    batches = Batches(connection)
    running = _Running(batches)
    last_id = b"$"
    is_away = False
    while True:
        started = time.monotonic()
        try:
            wrote = output.advance() if output is not None else 0
            batch = batches.current(batch_id)
            num_written = output.num_written if output is not None else None
            on_update(Standing(batch, running.count(batch), num_written))
            is_written = num_written is None or num_written >= batch.total
            if should_stop() or (batch.status.is_final and is_written):
                return batch
            if wrote == PAGE_LINES:
                continue  # there may be more already
            if not wrote:
                done = keys.batch_done(batch_id)
                replies: Any = connection.xread({done: last_id}, block=_BLOCK_MS)
                for _, entries in replies:
                    last_id = entries[-1][0]
            is_away = False
        except _OUTAGES as error:
            if on_outage is None:
                raise
            if not is_away:
                on_outage(error)
            is_away = True
            time.sleep(_OUTAGE_SECONDS)
        # Every line that ends wakes us, also when the first of a page still runs.
        time.sleep(max(0.0, _LEAST_ROUND_SECONDS - (time.monotonic() - started)))


class _Running:
    """Counts the lines of a batch that run; the list of them is read once a second."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._next = 0.0
        self._count = 0

    def count(self, batch: Batch) -> int:
        """Return how many run."""
        if batch.status.is_final:
            return 0
        if time.monotonic() >= self._next:
            self._count = self._batches.num_running(batch)
            self._next = time.monotonic() + _RUNNING_SECONDS
        return min(self._count, batch.total - batch.ended)
