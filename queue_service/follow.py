"""Follows a batch to its end, writing its results as they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from redis import Redis

from queue_service import keys
from queue_service.batches import Batch, Batches
from queue_service.output import PAGE_LINES, BatchOutput

_BLOCK_MS = 500
_LEAST_ROUND_SECONDS = 0.1


def follow(
    connection: Redis,
    batch_id: str,
    output: BatchOutput,
    *,
    on_update: Callable[[Batch, int], None],
    should_stop: Callable[[], bool],
) -> Batch:
    """Write results until every line of the batch is in the file; return the batch as it ended.

    Args:
        output: resumed already.
        on_update: told the batch and the number of lines written, several times a second.
        should_stop: asked every round; when it says so, the batch is returned as it is.

    Raises:
        BatchNotFound: the batch expired or was deleted meanwhile.
        redis.exceptions.RedisError: the server is away; what was written stays.
    """
    batches = Batches(connection)
    last_id = b"$"
    while True:
        started = time.monotonic()
        wrote = output.advance()
        batch = batches.get(batch_id)
        on_update(batch, output.num_written)
        if should_stop() or (batch.status.is_final and output.num_written >= batch.total):
            return batch
        if wrote == PAGE_LINES:
            continue  # there may be more already
        if not wrote:
            replies: Any = connection.xread({keys.batch_done(batch_id): last_id}, block=_BLOCK_MS)
            for _, entries in replies:
                last_id = entries[-1][0]
        # Every line that ends wakes us, also when the first of a page still runs.
        time.sleep(max(0.0, _LEAST_ROUND_SECONDS - (time.monotonic() - started)))
