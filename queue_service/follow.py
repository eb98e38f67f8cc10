"""Follows a batch to its end, writing its results as they come."""

from __future__ import annotations

import time
from collections.abc import Callable
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


def follow(
    connection: Redis,
    batch_id: str,
    output: BatchOutput,
    *,
    on_update: Callable[[Batch, int], None],
    should_stop: Callable[[], bool],
    on_outage: Callable[[RedisError], None] | None = None,
) -> Batch:
    """Write results until every line of the batch is in the file; return the batch as it ended.

    Args:
        output: resumed already.
        on_update: told the batch and the number of lines written, several times a second.
        should_stop: asked every round; when it says so, the batch is returned as it is.
        on_outage: told once each time the server goes away, and it is waited for; None raises.

    Raises:
        BatchNotFound: the batch expired or was deleted meanwhile.
        redis.exceptions.RedisError: the server is away; what was written stays.
    """
    batches = Batches(connection)
    last_id = b"$"
    is_away = False
    while True:
        started = time.monotonic()
        try:
            wrote = output.advance()
            batch = batches.get(batch_id)
            on_update(batch, output.num_written)
            if should_stop() or (batch.status.is_final and output.num_written >= batch.total):
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
