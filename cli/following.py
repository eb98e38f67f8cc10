"""Waiting for a batch, as `submit --wait` and `results --follow` do it."""

from __future__ import annotations

from collections.abc import Callable

from redis import Redis

from cli.progress import Progress
from queue_service.batches import Batch
from queue_service.follow import Standing, follow
from queue_service.output import BatchOutput
from queue_service.served import ServedWatch


def follow_shown(
    connection: Redis,
    batch_id: str,
    output: BatchOutput | None,
    progress: Progress,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Batch:
    """Follow a batch to its end, and show how it comes on and what it waits for.

    Args:
        output, should_stop: as for `follow`.

    Raises:
        BatchNotFound: the batch expired or was deleted meanwhile.
    """
    watch = ServedWatch(connection, progress.note)

    def on_update(now: Standing) -> None:
        watch.look(now)
        progress.update(now)

    return follow(
        connection,
        batch_id,
        output,
        on_update=on_update,
        should_stop=should_stop,
        on_outage=lambda error: progress.note(f"waiting for the server ({error})"),
    )
