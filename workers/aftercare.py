"""What follows a job's end: its callbacks, its dependents, its place under a rate limit.

The result is visible before any of this and does not change by it. The server remembers which
jobs still need it, so a worker that dies in between leaves it to another: at least once each.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from redis import Redis, RedisError
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.rate_limit import release_slot

from queue_service.broker import Broker
from queue_service.rqcompat import SafeJob, SafeQueue

logger = logging.getLogger(__name__)

CALLBACK = (sys.executable, "-m", "workers.callback")
_THREADS = 2
_LONGEST_CALLBACK_SECONDS = 3600


class Aftercare:
    """Sees to ended jobs on a few threads, so that a slow callback holds nothing up.

    Args:
        allowed: names of the callbacks that may run, from this worker's own settings.
        redis_url: where a callback's process connects; passed through its standard input.
    """

    def __init__(
        self,
        connection: Redis,
        broker: Broker,
        *,
        allowed: frozenset[str],
        redis_url: str,
        command: tuple[str, ...] = CALLBACK,
    ) -> None:
        self._connection = connection
        self._broker = broker
        self._allowed = allowed
        self._redis_url = redis_url
        self._command = command
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="aftercare")
        self._busy: set[str] = set()
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether some job is being seen to."""
        with self._lock:
            return bool(self._busy)

    def see_to(self, queue: str, job_id: str) -> None:
        """Begin a job's aftercare, unless it is going on here already; returns at once."""
        with self._lock:
            if job_id in self._busy:
                return
            self._busy.add(job_id)
        self._pool.submit(self._run, queue, job_id)

    def stop(self) -> None:
        """Wait for what runs; what has not begun stays due for another worker."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, queue: str, job_id: str) -> None:
        try:
            self._see_to_one(job_id)
            self._broker.cared_for(queue, job_id)
        except RedisError as error:
            logger.warning("aftercare put off job=%s (%s)", job_id, error)
        except Exception:  # the top of one job's aftercare; it is due again later
            logger.exception("aftercare failed job=%s", job_id)
        finally:
            with self._lock:
                self._busy.discard(job_id)

    def _see_to_one(self, job_id: str) -> None:
        try:
            job = SafeJob.fetch(job_id, connection=self._connection)
        except NoSuchJobError:
            return
        status = str(job.get_status(refresh=False).value)
        self._run_callback(job, status)
        SafeQueue(job.origin, connection=self._connection).enqueue_dependents(job)
        release_slot(job)

    def _run_callback(self, job: Job, status: str) -> None:
        callbacks: dict[str, tuple[str | None, Callable[[], int]]] = {
            "finished": (job._success_callback_name, lambda: job.success_callback_timeout),
            "failed": (job._failure_callback_name, lambda: job.failure_callback_timeout),
            "stopped": (job._stopped_callback_name, lambda: job.stopped_callback_timeout),
        }
        name, timeout = callbacks.get(status, (None, lambda: 0))
        if not name:
            return
        if name not in self._allowed:
            logger.warning("callback not allowed job=%s", job.id)
            return
        seconds = min(timeout(), _LONGEST_CALLBACK_SECONDS)
        # The name comes from our own list: what the job says is only compared with it.
        [allowed_name] = self._allowed.intersection([name])
        request = {
            "redis_url": self._redis_url,
            "job_id": job.id,
            "kind": status,
            "name": allowed_name,
        }
        try:
            done = subprocess.run(
                self._command,
                input=json.dumps(request),
                text=True,
                timeout=seconds,
                check=False,
                stdout=subprocess.DEVNULL,
            )
            problem = f"exit code {done.returncode}" if done.returncode else None
        except subprocess.TimeoutExpired:
            problem = f"it ran longer than {seconds} seconds"
        if problem:
            logger.error("callback failed job=%s callback=%s: %s", job.id, allowed_name, problem)
            self._connection.hset(job.key, "qsvc_callback_error", f"{allowed_name}: {problem}")
