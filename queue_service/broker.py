"""The worker's side of the queue: claim, beat, publish, finish, requeue and reap."""

from __future__ import annotations

import base64
import json
import logging
import time
import uuid
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError
from rq.utils import now, utcformat

from queue_service import keys
from queue_service.payload import json_bytes
from queue_service.rqcompat import moment_of
from queue_service.scripts import Arg, Scripts, failure_in

logger = logging.getLogger(__name__)

# A transient failure is tried again so often before it counts as the job's own.
_MOST_TRANSIENT_TRIES = 5
# A worker that dies between a job's end and its aftercare leaves it to others after this.
_AFTERCARE_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Claimed:
    """One execution of one job, ours until its lease ends.

    Attributes:
        queue: the queue it came from.
        fields: what a worker needs of the job's hash, as the claim found it but with this claim
            counted.
        started_at: seconds since the epoch, this machine's clock.
        claimed_at: seconds of this machine's monotonic clock.
    """

    job_id: str
    execution_id: str
    queue: str
    fields: Mapping[str, bytes]
    started_at: float
    claimed_at: float = 0.0

    def text(self, field: str) -> str | None:
        """Return a field of the job's hash, None when it is absent or empty."""
        value = self.fields.get(field)
        return value.decode("utf-8", "replace") if value else None

    def number(self, field: str) -> int | None:
        """Return a whole number of the job's hash, None when it is absent or no number."""
        value = self.fields.get(field)
        if not value:
            return None
        try:
            return int(value)
        except ValueError:
            return None

    @property
    def attempt(self) -> int:
        """How often the job was claimed, this time included."""
        return self.number("qsvc_attempt") or 1

    @property
    def deaths(self) -> int:
        """How many workers were lost while running the job, since it last made progress."""
        return self.number("qsvc_deaths") or 0

    @property
    def waited_seconds(self) -> float | None:
        """How long the job waited in its queue; None where its hash does not say since when."""
        enqueued_at = moment_of(self.text("enqueued_at") or "")
        return None if enqueued_at is None else max(0.0, self.started_at - enqueued_at)

    @property
    def batch_id(self) -> str | None:
        """The batch it is a line of, None for a plain job."""
        return self.text("qsvc_batch")


class Ending(StrEnum):
    """How an execution ended; the value is the job's status in RQ."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an execution ended with.

    Attributes:
        payload: the serialized return value when finished, else the text for RQ's exc_string.
        error: the OpenAI error object with ``status_code``; None when finished.
        keep_seconds: how long job and result stay; 0 deletes at once, -1 keeps for ever.
        may_retry: the job's own ``Retry`` applies when it failed this way.
        retry_seconds: the failure is transient, try again after so long; None: it is not.
        stream_end: fields of the stream's last entry.
        has_stream: the job's stream is ended even when nothing was written to it yet.
        ended_at: seconds since the epoch.
    """

    ending: Ending
    payload: bytes
    error: Mapping[str, Any] | None
    keep_seconds: int
    ended_at: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    stream_end: tuple[str, ...] = ("e", "done")
    has_stream: bool = False
    stream_keep_seconds: int = 600
    may_retry: bool = False
    retry_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """An execution that ended and whose job has callbacks, dependents or a slot to see to."""

    queue: str
    job_id: str
    execution_id: str
    ending: Ending

    @property
    def member(self) -> str:
        """How the server remembers it."""
        return f"{self.job_id}:{self.execution_id}:{self.ending.value}"

    @classmethod
    def from_member(cls, queue: str, member: str) -> Ended:
        """Read what the server remembers."""
        job_id, execution_id, ending = member.split(":")
        return cls(queue, job_id, execution_id, Ending(ending))


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat said.

    Attributes:
        registered: the worker's own hash was still there.
        suspended: ``rq suspend`` is in force.
        lost: execution ids that are no longer ours, with the job's status now.
        watched: execution ids whose job somebody watches.
    """

    registered: bool
    suspended: bool
    lost: Mapping[str, str]
    watched: frozenset[str]


@dataclass(frozen=True, slots=True)
class Publication:
    """Text and progress of one execution, sent together.

    Attributes:
        number: rises with each publication of the execution; one sent twice is applied once.
        progress: elements for the progress list.
        is_new: the list begins with them, whatever an earlier execution has left.
        entries: flat field lists (name, value, …) of stream entries.
    """

    claimed: Claimed
    number: int
    progress: Sequence[bytes]
    entries: Sequence[Sequence[str]]
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """Jobs to claim.

    Attributes:
        count: the most.
        crash_retries: workers that a job may lose in company.
        queues: some of the worker's, in their order; None for all.
    """

    count: int
    crash_retries: int
    queues: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Trade:
    """What came of ending executions and claiming jobs.

    Attributes:
        replies: what became of each end. ``ok`` is accepted; ``aftercare`` too, and dependents or
            callbacks are to be seen to; ``retry`` is accepted, and the job will run again. ``lost``
            (the lease was gone) and a status such as ``canceled`` or ``deleted`` mean that the
            outcome was refused and left no trace. ``server error: …`` is a key whose type somebody
            changed.
        claimed: new executions, ours.
        looked: ids that were looked at to find them.
        failure: why the server cannot take the ends, or the claim. Without replies it is not known
            which ends took effect: they are to be sent again.
    """

    replies: list[str]
    claimed: list[Claimed] = field(default_factory=list)
    looked: int = 0
    failure: Exception | None = None


class Broker:
    """Runs the scripts for one worker that serves some queues in a fixed order."""

    def __init__(
        self, connection: Redis, *, worker: str, queues: Sequence[str], lease_seconds: int
    ) -> None:
        self._connection = connection
        self._scripts = Scripts(connection)
        self._worker = worker
        self._queues = list(queues)
        self._queue_index = {queue: i for i, queue in enumerate(queues)}
        self._lease_seconds = lease_seconds
        self._worker_key = keys.rq_worker(worker)
        self._executions_key = f"{self._worker_key}:executions"

    def claim(
        self, count: int, *, crash_retries: int, queues: Sequence[str] | None = None
    ) -> tuple[list[Claimed], int]:
        """Claim up to ``count`` jobs; also return how many ids were looked at to find them.

        Args:
            queues: some of the worker's, in their order; None for all.
        """
        trade = self.trade((), Wanted(count, crash_retries, queues))
        if trade.failure is not None:
            raise trade.failure
        return trade.claimed, trade.looked

    def finish(self, outcomes: Sequence[tuple[Claimed, Outcome]]) -> list[str]:
        """End executions in one round trip; return what became of each, as ``trade`` does."""
        trade = self.trade(outcomes)
        if trade.failure is not None:
            raise trade.failure
        return trade.replies

    def trade(
        self, outcomes: Sequence[tuple[Claimed, Outcome]], wanted: Wanted | None = None
    ) -> Trade:
        """End executions, then claim jobs, in one round trip.

        What was claimed is ours also where writing failed: the failure is in the reply.
        """
        by_queue: dict[str, list[int]] = {}
        for i, (claimed, _) in enumerate(outcomes):
            by_queue.setdefault(claimed.queue, []).append(i)
        calls = [
            ("finish", *self._finish_call(queue, [outcomes[i] for i in indexes]))
            for queue, indexes in by_queue.items()
        ]
        if wanted is None:
            return self._ended(list(by_queue.values()), self._scripts.send(calls))
        names = self._queues if wanted.queues is None else wanted.queues
        # One random number a call, counted up: drawing one a job costs a system call each.
        unique = uuid.uuid4().hex[:26]
        execution_ids = [f"{unique}{i:06x}" for i in range(wanted.count)]
        moment = now()
        calls.append(("claim", *self._claim_call(wanted, names, moment, execution_ids)))
        *replies, reply = self._scripts.send(calls)
        trade = self._ended(list(by_queue.values()), replies)
        if isinstance(reply, Exception):
            return replace(trade, failure=trade.failure or failure_in(reply) or reply)
        rows, looked = reply
        claimed_at = time.monotonic()
        taken = [
            Claimed(
                job_id=job_id.decode(),
                execution_id=execution_id,
                queue=names[index],
                fields={flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)},
                started_at=moment.timestamp(),
                claimed_at=claimed_at,
            )
            # Fewer jobs than ids when the queues hold no more.
            for execution_id, (job_id, index, flat) in zip(execution_ids, rows, strict=False)
        ]
        return replace(trade, claimed=taken, looked=looked)

    def peek(self, count: int) -> list[Claimed]:
        """Return what is likely to be claimed next of plain jobs, without claiming it.

        Lines of batches are left out: who submitted them has looked at all of them. Nothing is
        promised: others may claim them first, and they may be gone.
        """
        with self._connection.pipeline(transaction=False) as pipeline:
            for queue in self._queues:
                pipeline.lrange(keys.rq_queue(queue), 0, count - 1)
            lists = pipeline.execute(raise_on_error=False)
            coming = [
                (queue, job_id.decode("utf-8", "replace"))
                for queue, ids in zip(self._queues, lists, strict=True)
                if isinstance(ids, list)
                for job_id in ids
            ][:count]
            for _, job_id in coming:
                pipeline.hmget(keys.rq_job(job_id), "data", "qsvc_batch")
            found = pipeline.execute(raise_on_error=False) if coming else []
        return [
            Claimed(job_id, "", queue, {"data": fields[0]}, started_at=0.0)
            for (queue, job_id), fields in zip(coming, found, strict=True)
            if isinstance(fields, list) and fields[0] and not fields[1]
        ]

    def _claim_call(
        self, wanted: Wanted, queues: Sequence[str], moment: datetime, execution_ids: Sequence[str]
    ) -> tuple[list[str], list[Arg]]:
        script_keys = [
            self._worker_key,
            self._executions_key,
            f"{keys.RQ}:suspended",
            f"{keys.RQ}:queues",
            *(
                key
                for queue in queues
                for key in (keys.rq_queue(queue), keys.rq_started(queue), keys.lanes(queue))
            ),
        ]
        args: list[Arg] = [
            self._worker,
            utcformat(moment),
            self._lease_seconds,
            wanted.count,
            wanted.crash_retries,
            keys.FORMAT_VERSION,
            *execution_ids,
        ]
        return script_keys, args

    @staticmethod
    def _ended(groups: Sequence[Sequence[int]], replies: Sequence[Any]) -> Trade:
        """Return what became of executions that were ended in groups."""
        became = [""] * sum(map(len, groups))
        for indexes, reply in zip(groups, replies, strict=True):
            if (failure := failure_in(reply)) is not None:
                return Trade([], failure=failure)
            words = reply
            if isinstance(reply, ResponseError):
                # Somebody changed the type of a key of the queue or of the worker.
                words = [f"server error: {reply}".encode()] * len(indexes)
            for i, word in zip(indexes, words, strict=True):
                became[i] = word.decode()
        return Trade(became)

    def _finish_call(
        self, queue: str, outcomes: Sequence[tuple[Claimed, Outcome]]
    ) -> tuple[list[str], list[Arg]]:
        script_keys = [
            keys.rq_started(queue),
            keys.rq_finished(queue),
            keys.rq_failed(queue),
            self._worker_key,
            self._executions_key,
            keys.rq_queue(queue),
            keys.rq_scheduled(queue),
            keys.aftercare(queue),
        ]
        args: list[Arg] = [
            utcformat(now()),
            self._worker,
            _MOST_TRANSIENT_TRIES,
            _AFTERCARE_SECONDS,
        ]
        for claimed, outcome in outcomes:
            is_finished = outcome.ending is Ending.FINISHED
            payload = outcome.payload if is_finished else zlib.compress(outcome.payload)
            error, retry = outcome.error, outcome.retry_seconds
            described = [
                claimed.job_id,
                claimed.execution_id,
                outcome.ending.value,
                outcome.keep_seconds,
                str(claimed.started_at),
                str(outcome.ended_at),
                "" if error is None else json.dumps(error, ensure_ascii=False),
                outcome.prompt_tokens,
                outcome.completion_tokens,
                outcome.cached_tokens,
                outcome.stream_end,
                outcome.stream_keep_seconds,
                outcome.has_stream,
                outcome.may_retry,
                -1 if retry is None else retry,
            ]
            args += [base64.b64encode(payload), json_bytes(described)]
        return script_keys, args

    def beat(
        self,
        running: Sequence[Claimed],
        *,
        figures: Mapping[str, str],
        card: tuple[str, Mapping[str, str]],
        keep_seconds: int,
    ) -> Beat:
        """Renew the leases of everything that runs, the worker's registration and its cards.

        Args:
            figures: what the worker's own card shows.
            card: a model's alias and what its card shows.
            keep_seconds: how long registration and cards outlive the last beat.
        """
        alias, model_fields = card
        args: list[Arg] = [
            utcformat(now()),
            self._lease_seconds,
            keep_seconds,
            json.dumps([dict(figures), dict(model_fields)]),
        ]
        for claimed in running:
            args += [self._queue_index[claimed.queue], claimed.job_id, claimed.execution_id]
        registered, suspended, lost, watched = self._scripts.call(
            "beat",
            [
                self._worker_key,
                self._executions_key,
                f"{keys.RQ}:workers",
                f"{keys.RQ}:suspended",
                keys.worker_card(self._worker),
                keys.model_card(alias),
            ]
            + [k for q in self._queues for k in (keys.rq_started(q), f"{keys.RQ}:workers:{q}")],
            args,
        )
        return Beat(
            registered=bool(registered),
            suspended=bool(suspended),
            lost={execution.decode(): status.decode() for execution, status in lost},
            watched=frozenset(execution.decode() for execution in watched),
        )

    def publish(self, publications: Sequence[Publication], *, keep_seconds: int) -> list[bool]:
        """Write text and progress in one round trip; False where the execution is not ours.

        Text that the server refuses for a fault of its own key (somebody changed its type) is
        dropped with a log line; the job's result has it.
        """
        calls: list[tuple[list[str], list[Arg]]] = []
        for publication in publications:
            claimed = publication.claimed
            composite = f"{claimed.job_id}:{claimed.execution_id}"
            args: list[Arg] = [composite, publication.number, keep_seconds]
            args += [int(publication.is_new), len(publication.progress), *publication.progress]
            for entry in publication.entries:
                args += [len(entry), *entry]
            script_keys = [
                keys.rq_started(claimed.queue),
                keys.stream(claimed.job_id),
                keys.progress(claimed.job_id, claimed.execution_id),
            ]
            calls.append((script_keys, args))
        replies = self._scripts.try_many("publish", calls)
        for publication, reply in zip(publications, replies, strict=True):
            if isinstance(reply, ResponseError):
                logger.error("text not written job=%s: %s", publication.claimed.job_id, reply)
        return [isinstance(reply, ResponseError) or bool(reply) for reply in replies]

    def requeue(self, running: Sequence[Claimed]) -> int:
        """Give executions back to the front of their queues in order; return how many went."""
        if not running:
            return 0
        args: list[Arg] = []
        for claimed in running:
            args += [self._queue_index[claimed.queue], claimed.job_id, claimed.execution_id]
        script_keys = [self._executions_key] + [
            k for q in self._queues for k in (keys.rq_queue(q), keys.rq_started(q))
        ]
        return int(self._scripts.call("requeue", script_keys, args))

    def release(self, claimed: Claimed) -> None:
        """Forget an execution that was taken from us: its keys, not the job."""
        self._scripts.call(
            "release",
            [keys.rq_started(claimed.queue), self._executions_key],
            [claimed.job_id, claimed.execution_id],
        )

    def reap(self, *, everything: bool = False) -> list[str]:
        """Put jobs whose lease has ended back to the front of their queues; return their ids.

        Args:
            everything: take live leases too. Only for the sole owner of a server, when no
                worker runs.
        """
        flag = "1" if everything else "0"
        replies = self._scripts.call_many(
            "reap", [([keys.rq_started(q), keys.rq_queue(q)], [flag]) for q in self._queues]
        )
        return [job_id.decode() for reply in replies for job_id in reply]

    def schedule(self) -> tuple[int, list[tuple[str, str]]]:
        """Queue the jobs whose time has come; return how many, and those under a rate limit.

        The latter as pairs of queue and job id: RQ's own code has to find them a slot.
        """
        replies = self._scripts.call_many(
            "schedule",
            [
                ([keys.rq_scheduled(q), keys.rq_queue(q), f"{keys.RQ}:queues"], [utcformat(now())])
                for q in self._queues
            ],
        )
        limited = [
            (queue, job_id.decode())
            for queue, (_, ids) in zip(self._queues, replies, strict=True)
            for job_id in ids
        ]
        return sum(int(count) for count, _ in replies), limited

    def run_alone(self, claimed: Claimed) -> None:
        """Note that a suspect is about to run with no neighbour: its next death is its own."""
        self._mark(claimed.job_id, "qsvc_alone", "1")

    def note_callback_error(self, job_id: str, problem: str) -> None:
        """Note on a job, if it is still there, what went wrong with its callback."""
        self._mark(job_id, "qsvc_callback_error", problem)

    def _mark(self, job_id: str, field: str, value: str) -> None:
        self._scripts.call("mark", [keys.rq_job(job_id)], [field, value])

    def due_aftercare(self) -> list[Ended]:
        """Return executions whose aftercare another worker did not finish.

        Each is ours for a while: it is due again later unless ``cared_for`` is told.
        """
        calls = [([keys.aftercare(queue)], [_AFTERCARE_SECONDS]) for queue in self._queues]
        replies = self._scripts.call_many("due", calls)
        return [
            Ended.from_member(queue, member.decode())
            for queue, members in zip(self._queues, replies, strict=True)
            for member in members
        ]

    def put_off_aftercare(self, ended: Ended, seconds: int) -> bool:
        """Keep an aftercare that takes so many seconds more to ourselves; False: it is done."""
        moment, microseconds = self._connection.time()
        due = moment + microseconds / 1e6 + seconds + _AFTERCARE_SECONDS
        members = {ended.member: due}
        return bool(self._connection.zadd(keys.aftercare(ended.queue), members, xx=True, ch=True))

    def cared_for(self, ended: Ended) -> None:
        """Forget an aftercare; it is done."""
        self._connection.zrem(keys.aftercare(ended.queue), ended.member)

    def forget_expired(self) -> None:
        """Drop from the registries of ended jobs those that have expired by the server's clock."""
        moment = self._connection.time()[0]
        registries = (keys.rq_finished, keys.rq_failed, keys.rq_canceled)
        with self._connection.pipeline(transaction=False) as pipeline:
            for queue in self._queues:
                for registry in registries:
                    pipeline.zremrangebyscore(registry(queue), 0, moment)
            pipeline.execute()

    def may_reap(self, *, seconds: float) -> bool:
        """Take the turn to reap for this many seconds; False when another worker has it."""
        lock = keys.reap_lock(self._queues[0])
        return bool(self._connection.set(lock, self._worker, nx=True, px=int(seconds * 1000)))

    def server_uptime_seconds(self) -> int:
        """Return how long the server has been up."""
        return int(self._connection.info("server")["uptime_in_seconds"])


def bury_worker(connection: Redis, name: str, *, begun: Collection[str] | None = None) -> list[str]:
    """Hand back what a dead worker held, at once, and sign it off; return the jobs' ids.

    Args:
        begun: executions that had begun; the death is charged to their jobs only. None where
            nobody knows: then to all.
    """
    worker = keys.rq_worker(name)
    script_keys = [
        worker,
        f"{worker}:executions",
        f"{keys.RQ}:workers",
        keys.worker_card(name),
    ]
    args = [] if begun is None else ["1", *begun]
    return [job_id.decode() for job_id in Scripts(connection).call("bury", script_keys, args)]
