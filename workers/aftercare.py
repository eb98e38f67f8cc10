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
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from redis import Redis, RedisError
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus
from rq.rate_limit import RateLimitRegistry, release_slot

from queue_service.broker import Broker, Ended, Ending
from queue_service.rqcompat import SafeJob, SafeQueue

logger = logging.getLogger(__name__)

CALLBACK = (sys.executable, "-m", "workers.callback")
_THREADS = 2
_LONGEST_CALLBACK_SECONDS = 3600
# A callback that runs when its worker ends gets so long to end too.
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.05


class _Interrupted(Exception):
    """The worker ends, and its callback was ended with it."""


class Aftercare:
    """Sees to ended executions on a few threads, so that a slow callback holds nothing up.

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
        self._busy: set[Ended] = set()
        self._callbacks: set[subprocess.Popen[str]] = set()
        self._is_tidying = False
        self._stopping = threading.Event()
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether some execution is being seen to."""
        with self._lock:
            return bool(self._busy)

    def see_to(self, ended: Ended) -> None:
        """Begin an execution's aftercare, unless it is going on here; returns at once."""
        with self._lock:
            if ended in self._busy:
                return
            self._busy.add(ended)
        self._pool.submit(self._run, ended)

    def tidy(self, queues: Sequence[str]) -> None:
        """Begin to repair what an aftercare that was cut off left half-way; returns at once."""
        with self._lock:
            if self._is_tidying:
                return
            self._is_tidying = True
        self._pool.submit(self._tidy, queues)

    def stop(self) -> None:
        """End within seconds; what is not done by then stays due for another worker."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + _STOP_SECONDS
        while self._callbacks and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        with self._lock:
            self._stopping.set()
            for process in self._callbacks:
                process.kill()
        self._pool.shutdown(wait=True)

    def _tidy(self, queues: Sequence[str]) -> None:
        try:
            for queue in queues:
                SafeQueue(queue, connection=self._connection).ready_job_registry.cleanup()
            for limit in RateLimitRegistry.all(self._connection):
                limit.cleanup()
        except RedisError as error:
            logger.warning("dependents and rate limits not looked after (%s)", error)
        finally:
            with self._lock:
                self._is_tidying = False

    def _run(self, ended: Ended) -> None:
        try:
            # Another worker may have done it while it waited here.
            if self._broker.put_off_aftercare(ended, 0):
                self._see_to_one(ended)
                self._broker.cared_for(ended)
        except _Interrupted:
            logger.warning("callback cut off, another worker runs it again job=%s", ended.job_id)
        except RedisError as error:
            logger.warning("aftercare put off job=%s (%s)", ended.job_id, error)
        except Exception:  # the top of one job's aftercare; it is due again later
            logger.exception("aftercare failed job=%s", ended.job_id)
        finally:
            with self._lock:
                self._busy.discard(ended)

    def _see_to_one(self, ended: Ended) -> None:
        try:
            job = SafeJob.fetch(ended.job_id, connection=self._connection)
        except NoSuchJobError:
            return
        self._run_callback(job, ended)
        release_slot(job)
        # It may be queued again by now (a repeat); its dependents ask how this execution ended.
        job._status = JobStatus(ended.ending.value)
        SafeQueue(job.origin, connection=self._connection).enqueue_dependents(
            job, refresh_job_status=False
        )

    def _run_callback(self, job: Job, ended: Ended) -> None:
        callbacks: dict[Ending, tuple[str | None, Callable[[], int]]] = {
            Ending.FINISHED: (job._success_callback_name, lambda: job.success_callback_timeout),
            Ending.FAILED: (job._failure_callback_name, lambda: job.failure_callback_timeout),
            Ending.STOPPED: (job._stopped_callback_name, lambda: job.stopped_callback_timeout),
        }
        name, timeout = callbacks[ended.ending]
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
            "execution_id": ended.execution_id,
            "ending": ended.ending.value,
            "name": allowed_name,
        }
        self._broker.put_off_aftercare(ended, seconds)
        try:
            problem = self._call(json.dumps(request), seconds)
        except _Interrupted:
            self._broker.put_off_aftercare(ended, 0)
            raise
        if problem:
            logger.error("callback failed job=%s callback=%s: %s", job.id, allowed_name, problem)
            self._broker.note_callback_error(job.id, f"{allowed_name}: {problem}")

    def _call(self, request: str, seconds: int) -> str | None:
        """Run a callback's process to its end; return what went wrong, None when nothing did."""
        with self._lock:
            if self._stopping.is_set():
                raise _Interrupted
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
            )
            self._callbacks.add(process)
        try:
            process.communicate(request, timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"it ran longer than {seconds} seconds"
        finally:
            with self._lock:
                self._callbacks.discard(process)
        if process.returncode < 0 and self._stopping.is_set():
            raise _Interrupted
        return f"exit code {process.returncode}" if process.returncode else None
