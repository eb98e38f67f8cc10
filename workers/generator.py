"""From claimed job to result: preparation pool, engine thread and publisher behind one door."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from queue_service.broker import Broker, Claimed
from queue_service.errors import RequestError
from queue_service.settings import WorkerSettings
from queue_service.trace import Phase
from workers.begun import BegunNotes
from workers.errors import WorkerLost
from workers.generation import GenerationThread
from workers.preparation import Preparer
from workers.publisher import Publisher
from workers.requests import PreparedRequest, Refused, Result
from workers.tracing import Tracer
from workers.waiting_room import WaitingRoom

logger = logging.getLogger(__name__)

_PREPARATION_THREADS = 2
# Some take long, such as those with a new constraint: what is ready then goes on without them.
_HAND_OVER_SECONDS = 0.05
_PREPARATION_CHUNK = 16
# So many are claimed at once where jobs end fast. Then two threads only take the interpreter from
# one another.
_MANY_CLAIMED = 48


class EngineGenerator:
    """Runs claimed jobs on an engine thread that is already loaded.

    Args:
        waiting_room: leads to the engine.
        notes: has what is being prepared; the waiting room notes what is with the engine.
        deliver: takes what cannot be run; called on several threads, returns at once.
        foresees: it is of use to know what comes next.
        tracer: notes when what happened.
        figures: more of them for the worker's card.
        on_stop: called when all threads have ended.
    """

    def __init__(
        self,
        *,
        preparer: Preparer,
        engine: GenerationThread,
        waiting_room: WaitingRoom,
        notes: BegunNotes,
        publisher: Publisher,
        deliver: Callable[[Result], None],
        crash_retries: int,
        foresees: bool = False,
        tracer: Tracer | None = None,
        figures: Callable[[], Mapping[str, str]] = dict,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._preparer = preparer
        self._engine = engine
        self._waiting_room = waiting_room
        self._notes = notes
        self._publisher = publisher
        self._deliver = deliver
        self._crash_retries = crash_retries
        self.foresees = foresees
        self._tracer = tracer or Tracer()
        self._figures = figures
        self._on_stop = on_stop
        self._pool = ThreadPoolExecutor(_PREPARATION_THREADS, thread_name_prefix="prepare")
        self._cancelled: set[str] = set()
        self._preparing: set[str] = set()
        self._lock = threading.Lock()

    def submit(self, claimed: Sequence[Claimed]) -> None:
        """Prepare and run these."""
        for one in claimed:
            self._tracer.begin(one)
        with self._lock:
            self._preparing.update(one.execution_id for one in claimed)
        size = _PREPARATION_CHUNK if len(claimed) < _MANY_CLAIMED else len(claimed)
        for start in range(0, len(claimed), size):
            self._pool.submit(self._prepare, claimed[start : start + size])

    def expect(self, coming: Sequence[Claimed]) -> None:
        """Let the engine know what prompts are likely to come next; they are nobody's yet."""
        self._pool.submit(self._expect, coming)

    def cancel(self, execution_ids: Iterable[str]) -> None:
        """Forget these; nothing is delivered for them any more."""
        execution_ids = list(execution_ids)
        if not execution_ids:
            return
        with self._lock:
            self._cancelled.update(self._preparing.intersection(execution_ids))
        # First: what leaves the waiting room after this is known to the engine before its cancel.
        self._waiting_room.drop(execution_ids)
        self._engine.cancel(execution_ids)

    def save(self) -> None:
        """Write what was generated so far; raises RedisError while the server is away."""
        self._publisher.save()

    def num_saved(self, execution_id: str) -> int:
        """Return how many tokens of a job the server has."""
        return self._publisher.num_saved(execution_id)

    def watch(self, execution_ids: Iterable[str]) -> None:
        """Stream these from now on."""
        self._publisher.watch(execution_ids)

    @property
    def num_rows(self) -> int:
        """Rows in the batch or waiting for a place in it."""
        return self._engine.num_rows

    @property
    def steps(self) -> int:
        """How many steps the engine has made."""
        return self._engine.steps

    @property
    def peak_bytes(self) -> int:
        """The most memory that the model and its rows took."""
        return self._engine.peak_bytes

    @property
    def peak_kv_bytes(self) -> int:
        """The most memory that keys and values of running rows took."""
        return self._engine.peak_kv_bytes

    def figures(self) -> Mapping[str, str]:
        """Return what the worker's card shows."""
        return {
            "rows": str(self._engine.num_rows),
            "steps": str(self._engine.steps),
            "peak_bytes": str(self.peak_bytes),
            "kv_bytes": str(self._engine.kv_bytes),
            **self._figures(),
        }

    def stop(self) -> None:
        """End the threads; what still runs is forgotten."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._engine.stop()
        self._publisher.stop()
        self._on_stop()

    def _prepare(self, claimed: Sequence[Claimed]) -> None:
        waiting: list[Claimed] = []
        ready: list[PreparedRequest] = []
        began = time.monotonic()
        for one in claimed:
            if ready and time.monotonic() - began > _HAND_OVER_SECONDS:
                self._hand_over(waiting, ready)
                waiting, ready, began = [], [], time.monotonic()
            waiting.append(one)
            self._notes.begin(one.execution_id)
            self._tracer.until_now(one.execution_id, Phase.REQUEST_WAIT)
            try:
                if one.deaths > self._crash_retries:
                    raise WorkerLost(one.deaths)
                request = self._preparer.prepare(one)
            except (RequestError, WorkerLost) as error:
                self._refuse(one, error)
            except Exception as error:  # the top of one job: a fault of ours ends it alone
                logger.exception("preparation failed job=%s", one.job_id)
                self._refuse(one, error)
            else:
                ready.append(request)
            finally:
                self._notes.end(one.execution_id)
                self._tracer.until_now(one.execution_id, Phase.REQUEST_PREPARE)
        self._hand_over(waiting, ready)

    def _expect(self, coming: Sequence[Claimed]) -> None:
        prompts = []
        for one in coming:
            try:
                prompts.append(self._preparer.prompt_ids(one))
            except Exception as error:  # it will be told when the job is claimed
                logger.debug("what comes cannot be read job=%s (%s)", one.job_id, error)
        self._engine.expect(prompts)

    def _hand_over(self, claimed: Sequence[Claimed], ready: Sequence[PreparedRequest]) -> None:
        with self._lock:
            ids = {one.execution_id for one in claimed}
            cancelled = ids & self._cancelled
            self._cancelled -= ids
            self._preparing -= ids
            # Under the lock, so that a cancel that comes now reaches the engine after this.
            self._waiting_room.add([r for r in ready if r.execution_id not in cancelled])

    def _refuse(self, claimed: Claimed, error: Exception) -> None:
        self._deliver(Refused(claimed, error))


def make_publisher(
    broker: Broker,
    settings: WorkerSettings,
    deliver: Callable[[Result], None],
    on_failure: Callable[[BaseException], None],
    tracer: Tracer | None = None,
) -> Publisher:
    """Return a publisher with the worker's intervals; its lost executions end at the next beat."""
    return Publisher(
        broker,
        deliver=deliver,
        on_failure=on_failure,
        lost=lambda execution_id: logger.debug("text refused execution=%s", execution_id),
        stream_interval_seconds=settings.publish_interval_seconds,
        progress_interval_seconds=settings.progress_interval_seconds,
        tracer=tracer,
    )
