"""Whether anybody runs what waits in a queue, for people who wait for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from redis import Redis
from redis.exceptions import NoPermissionError

from queue_service import keys
from queue_service.follow import Standing

_LOOK_SECONDS = 5.0


def why_unserved(connection: Redis, queue: str, model: str) -> str | None:
    """Return why no job of a queue would run now, and what to do; None where a worker serves it.

    Args:
        model: as the batch that waits names it, for the command that starts a worker.
    """
    if connection.scard(f"{keys.RQ}:workers:{queue}"):
        with contextlib.suppress(NoPermissionError):  # a producer need not have it
            if connection.exists(f"{keys.RQ}:suspended"):
                return "all workers are suspended; `rq resume` lets them go on"
        return None
    served = sorted(filter(keys.is_ours, _served(connection)))
    others = f" (those that live serve {', '.join(served)})" if served else ""
    wanted = "…" if queue == keys.DEFAULT_QUEUE else model
    return f"no worker serves {queue} now{others}; start one: qsvc worker --model {wanted}"


def _served(connection: Redis) -> set[str]:
    members: Any = connection.smembers(f"{keys.RQ}:workers")
    with connection.pipeline(transaction=False) as pipeline:
        for member in members:
            pipeline.hget(member.decode(), "queues")
        queues = pipeline.execute()
    return {name for text in queues if text for name in text.decode().split(",")}


class ServedWatch:
    """Tells, while a batch waits and nothing of it runs, that no worker serves it.

    Args:
        tell: told once each time that it becomes so.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        connection: Redis,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._tell = tell
        self._clock = clock
        self._next = clock()
        self._told: str | None = None

    def look(self, now: Standing) -> None:
        """See how a batch stands; asks the server every five seconds at most."""
        if now.num_running or not now.num_waiting or now.batch.status.is_final:
            self._told = None
        elif self._clock() >= self._next:
            self._next = self._clock() + _LOOK_SECONDS
            why = why_unserved(self._connection, now.batch.queue, now.batch.model)
            if why is not None and why != self._told:
                self._tell(why)
            self._told = why
