"""The RQ thread: an RQ worker that holds many jobs at once in one process.

It does all the bookkeeping in Redis and nothing else; what generates tokens sits behind
``Generator``. Nothing here blocks for longer than one round trip.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

from redis import Redis
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)
from rq.exceptions import NoSuchJobError
from rq.suspension import is_suspended
from rq.timeouts import BaseDeathPenalty
from rq.utils import now
from rq.worker import BaseWorker, WorkerStatus

from queue_service import keys
from queue_service.broker import Beat, Broker, Claimed, Ended, Outcome, Wanted
from queue_service.errors import ConfigurationError
from queue_service.rqcompat import SafeJob, SafeQueue
from queue_service.settings import WorkerSettings
from queue_service.sweeper import Sweeper
from queue_service.trace import save_trace
from workers.aftercare import Aftercare
from workers.claim_pace import ClaimPace
from workers.errors import Stopped, TimedOut
from workers.outcomes import OutcomeWriter
from workers.preparation import timeout_seconds
from workers.requests import Generated, Refused, Result
from workers.totals import Totals
from workers.tracing import Tracer

logger = logging.getLogger(__name__)

# Also when it is full, or a replica that is not promoted yet: that too passes by itself.
_SERVER_AWAY = (ConnectionError, TimeoutError, BusyLoadingError, OutOfMemoryError, ReadOnlyError)
# How long a worker that stopped beating stays listed in `rq info`.
_WORKER_KEEP_SECONDS = 90
_IDLE_POLL_SECONDS = 0.05
_BUSY_POLL_SECONDS = 0.02
_FINISH_CHUNK = 128
# Where jobs end fast, what ends meanwhile is written and replaced together.
_GATHER_SECONDS = 0.01
_MANY_RESULTS = 16
_SCHEDULE_SECONDS = 1.0
# How often a full worker looks for jobs that others make room for, and how many it takes then.
_URGENT_SECONDS = 0.2
_URGENT_JOBS = 8
# How often, and how far, plain jobs are looked at before they are claimed.
_LOOK_AHEAD_SECONDS = 1.0
_LOOK_AHEAD_JOBS = 32
_LISTEN_SECONDS = 0.1
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 1.0


class Generator(Protocol):
    """What turns claimed jobs into results; every method returns at once."""

    def submit(self, claimed: Sequence[Claimed]) -> None:
        """Prepare and run these."""

    @property
    def foresees(self) -> bool:
        """Whether it is of use to know what comes next."""

    def expect(self, coming: Sequence[Claimed]) -> None:
        """Note what is likely to be claimed next; nobody has claimed it yet."""

    def cancel(self, execution_ids: Iterable[str]) -> None:
        """Forget these; nothing is delivered for them any more."""

    def save(self) -> None:
        """Write what was generated so far, for whoever goes on with it."""

    def num_saved(self, execution_id: str) -> int:
        """Return how many tokens of a job the server has."""

    def watch(self, execution_ids: Iterable[str]) -> None:
        """Stream these from now on."""

    def figures(self) -> Mapping[str, str]:
        """Return what the worker's card shows."""

    def stop(self) -> None:
        """End the generator's threads."""


class EngineFailed(Exception):
    """The engine thread ended with an error; this process cannot go on."""


class ResultQueue:
    """Carries results to the RQ thread and wakes it."""

    def __init__(self) -> None:
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.wake = threading.Event()
        self.failure: BaseException | None = None

    def fail(self, failure: BaseException) -> None:
        """Tell the RQ thread that no more results will come."""
        self.failure = failure
        self.wake.set()

    def put(self, result: Result) -> None:
        """Deliver a result; any thread may call it."""
        self._results.put(result)
        # Whoever clears it looks for results after that, so one that finds it set need not wait
        # for its lock.
        if not self.wake.is_set():
            self.wake.set()

    @property
    def has_many(self) -> bool:
        """Whether so many wait that it does not pay to gather more."""
        return self._results.qsize() >= _MANY_RESULTS

    def take_all(self) -> list[Result]:
        """Return what has been delivered."""
        taken = []
        while not self._results.empty():
            taken.append(self._results.get())
        return taken


class _Due:
    """Says when something that is done at intervals is to be done again; at first at once."""

    def __init__(self, interval_seconds: float, clock: Callable[[], float]) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._next = clock()

    def has_come(self) -> bool:
        """Whether it is time; if so, the next time is one interval from now."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._interval_seconds
        return True


class _NoDeathPenalty(BaseDeathPenalty):
    """RQ's job timeouts by signal do not fit many jobs on one thread; ours are deadlines."""

    def setup_death_penalty(self) -> None:
        """Do nothing."""

    def cancel_death_penalty(self) -> None:
        """Do nothing."""


class BatchWorker(BaseWorker):
    """An RQ worker with its own loop.

    Args:
        queues: names in the order in which they are served.
        generator: runs the jobs; results come back through ``results``.
        outcomes: turns results into what is written to Redis.
        aftercare: sees to callbacks and dependents of ended jobs.
        broker: the scripts, for these queues and this name.
        model_card: published for the model's alias while the worker lives.
        totals: counts what this worker has done.
        tracer: has the traces of jobs that are traced.
        on_end: told of each job whose end was accepted, and will not run again.
    """

    job_class = SafeJob
    queue_class = SafeQueue  # type: ignore[assignment]  # RQ names the class itself
    death_penalty_class = _NoDeathPenalty

    def __init__(
        self,
        queues: Sequence[str],
        *,
        connection: Redis,
        name: str,
        settings: WorkerSettings,
        generator: Generator,
        results: ResultQueue,
        outcomes: OutcomeWriter,
        aftercare: Aftercare,
        broker: Broker,
        model_card: tuple[str, Mapping[str, str]],
        totals: Totals | None = None,
        tracer: Tracer | None = None,
        on_end: Callable[[Result, Outcome], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            list(queues), name=name, connection=connection, serializer="json", worker_ttl=30
        )
        self._settings = settings
        self._generator = generator
        self._results = results
        self._outcomes = outcomes
        self._aftercare = aftercare
        self._broker = broker
        self._sweeper = Sweeper(connection)
        self._model_card = model_card
        self._totals = totals if totals is not None else Totals()
        self._tracer = tracer or Tracer()
        self._on_end = on_end
        self._clock = clock
        self._on_turn = on_turn
        self._running: dict[str, Claimed] = {}
        self._deadlines: dict[str, float] = {}
        self._unsaved: list[tuple[Claimed, Result]] = []
        self._pace = ClaimPace(settings.claim_ahead, clock)
        self._commands: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._stop_level = 0
        self._stop_at: float | None = None
        self._beat_due = _Due(settings.beat_seconds, clock)
        self._schedule_due = _Due(_SCHEDULE_SECONDS, clock)
        self._maintenance_due = _Due(settings.reap_seconds, clock)
        self._urgent_due = _Due(_URGENT_SECONDS, clock)
        self._look_ahead_due = _Due(_LOOK_AHEAD_SECONDS, clock)
        self._foreseen: set[str] = set()
        self._has_plain = False
        self._urgent = [queue for queue in queues if keys.queue_priority(queue) > 0]
        self._suspended = False
        self._suspects: list[Claimed] = []
        self._on_trial: Claimed | None = None
        self._cleared: set[str] = set()
        self._connected_since = clock()
        self.num_done = 0

    # RQ's hooks -----------------------------------------------------------------------------

    def _set_connection(self, connection: Redis) -> Redis:
        # RQ would raise the socket timeout to minutes, for a blocking pop that we do not use.
        return connection

    def subscribe(self) -> None:
        """Listen for commands on a thread."""
        self.pubsub = self.connection.pubsub()  # type: ignore[no-untyped-call]
        self.pubsub.subscribe(**{self.pubsub_channel_name: self.handle_payload})
        # RQ would listen for a minute at a time, and its end would wait for this thread.
        self.pubsub_thread = self.pubsub.run_in_thread(  # type: ignore[assignment]  # RQ says None
            sleep_time=_LISTEN_SECONDS, daemon=True, exception_handler=self._listen_again
        )

    def _listen_again(self, error: BaseException, *_: object) -> None:
        # RQ's own handler lets the thread die of a timeout: no command would ever come again.
        if not isinstance(error, _SERVER_AWAY):
            raise error
        logger.debug("the server is away, commands are not heard name=%s", self.name)
        time.sleep(_FIRST_PAUSE_SECONDS)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """Stop claiming, give running jobs the grace period; asked again, hurry."""
        # Nothing but this: the main thread may hold the wake event's lock when a signal comes,
        # and it looks here often enough.
        self._stop_level += 1

    def handle_payload(self, message: Mapping[str, Any]) -> None:
        """Take a command from the worker's channel. An error here would end RQ's thread."""
        try:
            command = json.loads(message["data"])
            if not isinstance(command, dict):
                raise ValueError("a command is an object")
        except (ValueError, KeyError, RecursionError):
            logger.warning("worker %s: unreadable command ignored", self.name)
            return
        if command.get("command") == "shutdown":
            self.request_stop(signal.SIGINT, None)
        else:
            self._commands.put(command)
            self._results.wake.set()

    # The loop -------------------------------------------------------------------------------

    def work(self, burst: bool = False, *_: Any, **__: Any) -> bool:
        """Serve the queues until told to stop; in burst mode until they are empty.

        Returns:
            Whether any job was done.

        Raises:
            ConfigurationError: a living worker has this name.
            EngineFailed: this process cannot go on; what it held is still in its name.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.request_stop)
        try:
            self._await_name()
            if not self._stop_level:
                self._register()
                self._loop(burst=burst)
        finally:
            self._generator.stop()
            self._aftercare.stop()
            self._tracer.close()
        # After a failure the worker stays listed with what it held: the supervisor hands it back.
        if self.birth_date is not None:
            self._sign_off()
        logger.info("worker stopped name=%s done=%d", self.name, self.num_done)
        return self.num_done > 0

    def _register(self) -> None:
        self.register_birth()  # type: ignore[no-untyped-call]
        self.subscribe()
        self._suspended = bool(is_suspended(self.connection))
        self._show_state()
        self._heartbeat()
        self._sweeper.expire_late()
        logger.info("worker started name=%s queues=%s", self.name, ",".join(self.queue_names()))

    def _await_name(self) -> None:
        """Take over the name of a worker that died; RQ refuses it for as long as it is listed.

        Returns early, with nothing done, when told to stop.
        """
        last, death = self.connection.hmget(self.key, "last_heartbeat", "death")
        if last is None or death is not None:
            return
        logger.info(
            "waiting whether a worker of this name lives name=%s seconds=%d",
            self.name,
            self._settings.lease_seconds,
        )
        until = self._clock() + self._settings.lease_seconds
        while self._clock() < until:
            self._rest(self._settings.beat_seconds)
            if self._stop_level:
                return
            now_last = self.connection.hget(self.key, "last_heartbeat")
            if now_last not in (None, last):
                raise ConfigurationError(
                    f"a worker named {self.name} is at work already; stop it, or give this one "
                    "another name"
                )
        self.connection.delete(self.key)

    def _sign_off(self) -> None:
        try:
            self.teardown()  # type: ignore[no-untyped-call]
        except _SERVER_AWAY as error:
            logger.warning("worker %s: could not sign off (%s)", self.name, error)

    def _loop(self, *, burst: bool) -> None:
        pause, is_away = _FIRST_PAUSE_SECONDS, False
        while True:
            # Also while the server is away: the supervisor watches the engine by it.
            self._on_turn()
            try:
                if not self._turn(burst=burst):
                    return
                if is_away:
                    logger.info("the server is back name=%s", self.name)
                pause, is_away = _FIRST_PAUSE_SECONDS, False
            except _SERVER_AWAY as error:
                if not is_away:
                    logger.warning(
                        "the server is away name=%s running=%d results_waiting=%d (%s)",
                        self.name, len(self._running), len(self._unsaved), error,
                    )  # fmt: skip
                is_away = True
                if self._is_out_of_grace():
                    return
                self._rest(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
                self._connected_since = self._clock()

    def _turn(self, *, burst: bool) -> bool:
        """Do everything that is due once; False when the worker should end."""
        self._commit()  # what an outage kept from being written
        self._collect()
        if self._results.failure is not None:
            self._commit()
            raise EngineFailed("the engine failed") from self._results.failure
        if self._beat_due.has_come():
            self._heartbeat()
        self._obey()
        self._end_overdue(self._clock())
        self._run_suspects()
        if self._schedule_due.has_come():
            self._schedule()
        if self._maintenance_due.has_come():
            self._maintain()
        if self._stop_level:
            self._commit()
            return self._wind_down()
        # Asked before the claim: what an aftercare or a retry has queued by then is seen by it.
        is_busy = bool(self._load()) or self._aftercare.is_busy
        looked = self._trade(self._wanted())
        self._commit()
        self._look_ahead()
        if self._pace.is_fast:
            if not self._results.has_many:
                time.sleep(_GATHER_SECONDS)
            return True
        if looked:
            return True
        if burst and not is_busy:
            return False
        self._rest(_BUSY_POLL_SECONDS if self._load() else _IDLE_POLL_SECONDS)
        return True

    def _wind_down(self) -> bool:
        """Let what runs finish within the grace period; give back what does not."""
        is_over = self._is_out_of_grace()
        if not self._load():
            return False
        if is_over:
            self._give_back()
            return False
        self._rest(_BUSY_POLL_SECONDS)
        return True

    def _is_out_of_grace(self) -> bool:
        if not self._stop_level:
            return False
        if self._stop_at is None:
            self._stop_at = self._clock() + self._settings.grace_seconds
            logger.info("worker stopping name=%s running=%d", self.name, self._load())
        return self._stop_level > 1 or self._clock() >= self._stop_at

    def _rest(self, seconds: float) -> None:
        self._results.wake.wait(seconds)
        self._results.wake.clear()

    def _load(self) -> int:
        return len(self._running) + len(self._unsaved)

    def _wanted(self) -> Wanted | None:
        """Return what there is room for, None for nothing."""
        if self._suspended or self._suspects or self._is_suspect_at_work():
            return None
        room = self._settings.slots + self._pace.ahead - len(self._running)
        queues = None
        if room < self._pace.at_once:
            # Others make room for what comes in a queue above theirs.
            room, queues = room + _URGENT_JOBS, self._urgent
            if room <= 0 or not queues or not self._urgent_due.has_come():
                return None
        return Wanted(room, self._settings.crash_retries, queues)

    def _trade(self, wanted: Wanted | None = None) -> int:
        """Write some of what has ended and claim, in one round trip; return how much was looked at.

        One for both: a server that is busy with the one makes a worker wait once.
        """
        chunk = self._unsaved[:_FINISH_CHUNK]
        if not chunk and wanted is None:
            return 0
        outcomes = [(claimed, self._outcomes.outcome(result)) for claimed, result in chunk]
        trade = self._broker.trade(outcomes, wanted)
        self._take(trade.claimed)
        if trade.replies:
            del self._unsaved[: len(chunk)]
            self._settle([result for _, result in chunk], outcomes, trade.replies)
        if trade.failure is not None:
            raise trade.failure
        return trade.looked

    def _take(self, claimed: Sequence[Claimed]) -> None:
        if not claimed:
            return
        moment = self._clock()
        self._has_plain = self._has_plain or any(one.batch_id is None for one in claimed)
        for one in claimed:
            self._running[one.execution_id] = one
            seconds = timeout_seconds(one)
            if seconds is not None:
                self._deadlines[one.execution_id] = moment + seconds
        suspects = [one for one in claimed if self._is_suspect(one)]
        self._suspects += suspects
        self._generator.submit([one for one in claimed if one not in suspects])

    def _look_ahead(self) -> None:
        """Tell the generator what plain jobs come next, so that it keeps what they begin with.

        Of a batch whoever submitted it has looked at every line.
        """
        if not self._has_plain or not self._generator.foresees or self._pace.is_fast:
            return
        if not self._look_ahead_due.has_come():
            return
        self._has_plain = False
        coming = self._broker.peek(_LOOK_AHEAD_JOBS)
        new = [one for one in coming if one.job_id not in self._foreseen]
        self._foreseen = {one.job_id for one in coming}
        if new:
            self._generator.expect(new)

    def _is_suspect(self, claimed: Claimed) -> bool:
        """Whether it has lost as many workers as it may in company; one more is refused there."""
        return claimed.deaths == self._settings.crash_retries

    def _is_suspect_at_work(self) -> bool:
        """Whether a suspect is on trial, or its end is not written yet and could still be lost."""
        if self._on_trial is None:
            return False
        unsaved = [claimed.execution_id for claimed, _ in self._unsaved]
        execution_id = self._on_trial.execution_id
        return execution_id in self._running or execution_id in unsaved

    def _run_suspects(self) -> None:
        """Start a job that may kill its worker when nothing else runs that it would take along.

        Once it has come further than before, no death would be charged to it. Then the next one
        starts beside it. A death is charged to that one only if it was alone from its start, since
        one of those beside it may be at fault after all; so the next worker tries it alone.
        """
        self._clear_suspect()
        self._suspects = [s for s in self._suspects if s.execution_id in self._running]
        self._cleared &= self._running.keys()
        num_others = len(self._running) - len(self._suspects) - len(self._cleared)
        if not self._suspects or num_others:
            return
        suspect = self._suspects[0]
        if not self._cleared:
            self._broker.run_alone(suspect)
        del self._suspects[0]
        self._on_trial = suspect
        logger.warning(
            "suspect on trial job=%s deaths=%d beside=%d",
            suspect.job_id, suspect.deaths, len(self._cleared),
        )  # fmt: skip
        self._generator.submit([suspect])

    def _clear_suspect(self) -> None:
        suspect = self._on_trial
        if suspect is None or suspect.execution_id not in self._running:
            return
        reached = suspect.number("qsvc_reached") or 0
        if self._generator.num_saved(suspect.execution_id) > reached:
            logger.info("suspect cleared job=%s", suspect.job_id)
            self._cleared.add(suspect.execution_id)
            self._on_trial = None

    def _collect(self) -> None:
        num_answered = 0
        for result in self._results.take_all():
            claimed = result.claimed
            if self._running.pop(claimed.execution_id, None) is not None:
                self._deadlines.pop(claimed.execution_id, None)
                self._unsaved.append((claimed, result))
                num_answered += isinstance(result, Generated)
        self._pace.note(num_answered)

    def _commit(self) -> None:
        """Write all that has ended."""
        while self._unsaved:
            self._trade()

    def _settle(
        self,
        results: Sequence[Result],
        outcomes: Sequence[tuple[Claimed, Outcome]],
        replies: Sequence[str],
    ) -> None:
        """See to ends that the server has answered."""
        for result, (claimed, outcome), reply in zip(results, outcomes, replies, strict=True):
            if reply in ("ok", "aftercare"):
                self.num_done += 1
                self._totals.count(outcome)
                self._on_end(result, outcome)
                self._keep_trace(claimed, outcome)
                if outcome.error is not None:
                    code = outcome.error["code"]
                    logger.info("job failed job=%s code=%s", claimed.job_id, code)
                if reply == "aftercare":
                    self._aftercare.see_to(
                        Ended(claimed.queue, claimed.job_id, claimed.execution_id, outcome.ending)
                    )
            elif reply == "retry":
                self._totals.retried += 1
                self._keep_trace(claimed, outcome, is_retried=True)
                logger.info("job will be tried again job=%s", claimed.job_id)
            else:
                self._totals.refused += 1
                logger.warning("job result refused job=%s because=%s", claimed.job_id, reply)
        if not self._load():
            self._show_state()

    def _keep_trace(self, claimed: Claimed, outcome: Outcome, *, is_retried: bool = False) -> None:
        trace = self._tracer.finish(claimed.execution_id, outcome, is_retried=is_retried)
        if trace is None:
            return
        try:
            save_trace(self.connection, trace)
        except RedisError as error:  # the job's end is written: nothing else may fail for this
            logger.warning("a trace is lost job=%s (%s)", claimed.job_id, error)

    def _heartbeat(self) -> None:
        held = [*self._running.values(), *(claimed for claimed, _ in self._unsaved)]
        alias, card = self._model_card
        beat = self._broker.beat(
            held,
            figures={**self._generator.figures(), **self._totals.figures()},
            card=(alias, card),
            keep_seconds=_WORKER_KEEP_SECONDS,
        )
        self.last_heartbeat = now()
        if not beat.registered:
            state = WorkerStatus.BUSY if held else WorkerStatus.IDLE
            self.connection.hset(self.key, mapping={**self.serialize(), "state": state})
        if beat.suspended != self._suspended:
            self._suspended = beat.suspended
            self._show_state()
        self._forget_lost(beat)
        self._generator.watch(beat.watched)

    def _forget_lost(self, beat: Beat) -> None:
        lost = [e for e in beat.lost if e in self._running]
        self._generator.cancel(lost)
        for execution_id in lost:
            claimed = self._running.pop(execution_id)
            self._deadlines.pop(execution_id, None)
            logger.warning(
                "job taken away job=%s status=%s", claimed.job_id, beat.lost[execution_id]
            )
            self._broker.release(claimed)
        self._totals.lost += len(lost)

    def _show_state(self) -> None:
        if not self._load():
            idle = WorkerStatus.SUSPENDED if self._suspended else WorkerStatus.IDLE
            self.set_state(idle)

    def _obey(self) -> None:
        """Carry out ``stop-job``, ``stop-execution`` and our own ``beat-now``."""
        while not self._commands.empty():
            command = self._commands.get()
            name = command.get("command")
            if name == "qsvc-beat":
                self._heartbeat()
            elif name in ("stop-job", "stop-execution"):
                execution_id, job_id = command.get("execution_id"), command.get("job_id")
                for claimed in list(self._running.values()):
                    if claimed.execution_id == execution_id or (
                        execution_id is None and claimed.job_id == job_id
                    ):
                        self._end_early(claimed, Stopped())

    def _end_overdue(self, moment: float) -> None:
        overdue = [e for e, deadline in self._deadlines.items() if moment >= deadline]
        for execution_id in overdue:
            claimed = self._running[execution_id]
            self._end_early(claimed, TimedOut(timeout_seconds(claimed) or 0))

    def _end_early(self, claimed: Claimed, error: Exception) -> None:
        del self._running[claimed.execution_id]
        self._deadlines.pop(claimed.execution_id, None)
        self._generator.cancel([claimed.execution_id])
        self._unsaved.append((claimed, Refused(claimed, error)))
        self._results.wake.set()

    def _schedule(self) -> None:
        """Queue what has come due. RQ's own scheduler would fork a process with MLX in it."""
        count, limited = self._broker.schedule()
        if count:
            logger.info("scheduled jobs queued jobs=%d", count)
        for queue_name, job_id in limited:
            self._queue_under_limit(queue_name, job_id)

    def _queue_under_limit(self, queue_name: str, job_id: str) -> None:
        rq_queue = SafeQueue(queue_name, connection=self.connection)
        with self.connection.pipeline() as pipeline:
            rq_queue.scheduled_job_registry.remove(job_id, pipeline=pipeline)
            try:
                job = SafeJob.fetch(job_id, connection=self.connection)
            except NoSuchJobError:
                pipeline.execute()
                return
            rq_queue._enqueue_rate_limited_job(
                job, pipeline=pipeline, at_front=job.should_enqueue_at_front()
            )
            pipeline.execute()

    def _maintain(self) -> None:
        # After an outage every lease looks ended: their owners get one lease's time to beat.
        lease = self._settings.lease_seconds
        if self._clock() - self._connected_since < lease:
            return
        if self._broker.server_uptime_seconds() < lease:
            return
        if not self._broker.may_reap(seconds=self._settings.reap_seconds * 0.9):
            return
        back = self._broker.reap()
        if back:
            logger.warning("jobs of a lost worker put back jobs=%d", len(back))
        for ended in self._broker.due_aftercare():
            self._aftercare.see_to(ended)
        self._aftercare.tidy(self.queue_names())
        self._broker.forget_expired()
        self._sweeper.sweep()

    def _give_back(self) -> None:
        # A full server takes jobs back, but no more text.
        with contextlib.suppress(*_SERVER_AWAY):
            self._generator.save()
        self._generator.cancel(list(self._running))
        returned = self._broker.requeue(list(self._running.values()))
        logger.info("jobs given back name=%s jobs=%d", self.name, returned)
        self._running.clear()
        self._deadlines.clear()
