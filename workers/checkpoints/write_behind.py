"""Writes checkpoints while the engine goes on: one thread that gets out of everybody's way."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from workers.checkpoints.records import Segment
from workers.checkpoints.store import CheckpointStore, Tally

logger = logging.getLogger(__name__)

_BYTES_PER_SECOND = 150_000_000
_BYTES_PER_DAY = 100_000_000_000
_DAY_SECONDS = 86_400
# How often a write that waits for its turn looks whether the engine has become idle.
_LOOK_SECONDS = 0.05
_CLOSE_SECONDS = 10.0
_LOWEST_NICENESS = 19
_QOS_CLASS_UTILITY = 0x11  # <sys/qos.h>


def _never() -> bool:
    return False


class Pace:
    """Says how long to wait between writes for a certain rate; a write may go ahead of it once.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, bytes_per_second: float, clock: Callable[[], float]) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = clock()

    def note(self, num_bytes: int, began: float) -> None:
        """Count what was written since a time: the write itself is part of what it may take."""
        self._free_at = max(self._free_at, began) + num_bytes / self._rate

    def delay_seconds(self) -> float:
        """Return how long the next write should wait."""
        return max(0.0, self._free_at - self._clock())


class WriteBehind:
    """Puts segments into a store, in their order, on a thread of its own.

    What it cannot take it drops, with all that follows it, and counts: a checkpoint that is not
    written costs time later and nothing else. No call waits, and none raises for what a write does.

    Args:
        store: where they go; only this thread writes to it.
        max_bytes: of the arrays that wait.
        is_busy: whether rows are decoded just now: then it writes at its rate, else at once.
        bytes_per_second: the rate, of arrays.
        bytes_per_day: what may be written to files in 24 hours; more is dropped.
        clock: a time in seconds that does not jump.
    """

    def __init__(
        self,
        store: CheckpointStore,
        max_bytes: int,
        *,
        is_busy: Callable[[], bool] = _never,
        bytes_per_second: float = _BYTES_PER_SECOND,
        bytes_per_day: int = _BYTES_PER_DAY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._is_busy = is_busy
        self._pace = Pace(bytes_per_second, clock)
        self._bytes_per_day = bytes_per_day
        self._clock = clock
        self._day_began = clock()
        self._day_bytes = 0
        self._tally = Tally()
        self._waiting: deque[Segment] = deque()  # the first one may be in work
        self._digests: set[bytes] = set()
        self._num_bytes = 0
        self._num_flushes = 0
        self._is_closed = False
        self._has_failed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def put(self, segments: Sequence[Segment]) -> int:
        """Let segments that follow one another be written.

        Returns:
            how many of them will be, or are about to be already; what does not fit is dropped.
        """
        with self._changed:
            for taken, segment in enumerate(segments):
                if segment.digest in self._digests:
                    continue
                if self._is_closed or self._num_bytes + segment.nbytes > self._max_bytes:
                    why = "at_end" if self._is_closed else "full"
                    self._drop(why, segments[taken:])
                    return taken
                self._waiting.append(segment)
                self._digests.add(segment.digest)
                self._num_bytes += segment.nbytes
                self._changed.notify_all()
        return len(segments)

    def has(self, digest: bytes) -> bool:
        """Whether the segment that ends at a digest waits to be written."""
        with self._changed:
            return digest in self._digests

    def flush(self, timeout_seconds: float) -> bool:
        """Write what waits, at any rate; tell whether all was written, or dropped, in time."""
        with self._changed:
            self._num_flushes += 1
            self._changed.notify_all()
            is_empty = self._changed.wait_for(lambda: not self._waiting, timeout_seconds)
            self._num_flushes -= 1
        return is_empty

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Write what waits as long as there is time, and end the thread."""
        with self._changed:
            self._is_closed = True
        is_empty = self.flush(timeout_seconds)
        with self._changed:
            if not is_empty:
                self._drop("at_end", self._waiting)
                self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(timeout_seconds)

    def counts(self) -> dict[str, int]:
        """Return how many segments were ``written``, ``refused``, ``dropped_<why>``, ``failed``.

        ``refused``: by the store; it counts the reasons. ``dropped_bytes``: of all dropped ones.
        """
        return self._tally.counts()

    # The thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        _lower_priority()
        while (segment := self._next()) is not None:
            try:
                self._write(segment)
            except Exception:
                self._tally.add("failed")
                if not self._has_failed:
                    self._has_failed = True
                    logger.exception("a checkpoint could not be written; more are only counted")
            finally:
                self._done(segment)

    def _next(self) -> Segment | None:
        """Return the next segment once it is its turn, None when there are no more."""
        with self._changed:
            while True:
                if not self._waiting:
                    if self._is_closed:
                        return None
                    self._changed.wait()
                    continue
                delay = 0.0
                if not self._num_flushes and self._is_busy():
                    delay = self._pace.delay_seconds()
                if delay <= 0:
                    return self._waiting[0]
                self._changed.wait(min(delay, _LOOK_SECONDS))

    def _write(self, segment: Segment) -> None:
        now = self._clock()
        if now - self._day_began >= _DAY_SECONDS:
            self._day_began, self._day_bytes = now, 0
        if self._day_bytes >= self._bytes_per_day:
            self._drop("daily", [segment])
            return
        num_bytes = self._store.put(segment)
        if num_bytes is None:
            self._tally.add("refused")
            return
        self._day_bytes += num_bytes
        if num_bytes:
            self._tally.add("written")
            self._pace.note(segment.nbytes, now)

    def _drop(self, why: str, segments: Collection[Segment]) -> None:
        self._tally.add(f"dropped_{why}", len(segments))
        self._tally.add("dropped_bytes", sum(segment.nbytes for segment in segments))

    def _done(self, segment: Segment) -> None:
        with self._changed:
            if self._waiting and self._waiting[0] is segment:
                self._waiting.popleft()
            self._digests.discard(segment.digest)
            self._num_bytes -= segment.nbytes
            self._changed.notify_all()


def _lower_priority() -> None:
    """Let every other thread go first; where the system does not allow that, nothing happens."""
    try:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_NICENESS)
        elif sys.platform == "darwin":
            ctypes.CDLL(None).pthread_set_qos_class_self_np(_QOS_CLASS_UTILITY, 0)
    except (OSError, AttributeError):
        logger.debug("the writer of checkpoints runs at normal priority")
