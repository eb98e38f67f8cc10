"""Counts the jobs that wait in a worker's queues, for who asks now and then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from queue_service import keys
from queue_service.connection import open_url

# Whoever asks has a time limit too, and gets no answer rather than a late one.
_TIMEOUT_SECONDS = 1.0


class Backlog:
    """What waits in some queues, the lanes of batches included.

    Args:
        url: the server; it is connected to when somebody asks.
        queues: their names.
    """

    def __init__(self, url: str, queues: Sequence[str]) -> None:
        self._queues = frozenset(queues)
        self._connection = open_url(
            url,
            socket_timeout=_TIMEOUT_SECONDS,
            socket_connect_timeout=_TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )

    def num_waiting(self) -> int | None:
        """Return how many jobs wait; None while the server does not say."""
        try:
            listed: Any = self._connection.smembers(f"{keys.RQ}:queues")
            with self._connection.pipeline(transaction=False) as pipeline:
                for key in self._ours(listed):
                    pipeline.llen(key)
                lengths: list[int] = pipeline.execute()
        except RedisError:
            return None
        return sum(lengths)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ours(self, listed: Iterable[bytes]) -> list[str]:
        found = {keys.rq_queue(queue) for queue in self._queues}
        for raw in listed:
            key = raw.decode("utf-8", "replace")
            if keys.queue_of_list(key) in self._queues:
                found.add(key)
        return sorted(found)
