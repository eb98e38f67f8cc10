"""The scripts against a simple model: whatever the order of events, no job is lost or doubled.

Two workers share a queue with plain jobs and lines of batches. After each step the server must
say what the model says; at the end everything that is left is claimed and finished.
"""

from __future__ import annotations

import base64
import io
import json
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import Redis
from rq import Queue, Retry
from rq.job import Job as RqJob
from rq.registry import StartedJobRegistry

from queue_service import keys
from queue_service.batch_file import BatchFile
from queue_service.batches import Batches, Status
from queue_service.broker import Broker, Claimed, Ending, Outcome, bury_worker
from queue_service.dead_letter import DeadLetter
from queue_service.results import BatchReader
from queue_service.rqcompat import SafeJob
from queue_service.settings import SubmitSettings
from queue_service.submission import Feeder, SubmitOptions
from queue_service.sweeper import Sweeper
from tests.cli_helpers import chat_line
from tests.harness import enqueue_chat

QUEUE = "qsvc:machine"
WORKERS = ("w1", "w2")
MOST_TRANSIENT_TRIES = 5
LONG_AGO = 1.0

ENDED = ("finished", "failed", "stopped", "canceled")
COUNTED = {"finished": "completed", "failed": "failed", "stopped": "failed"}

workers = st.sampled_from(WORKERS)
picks = st.integers(0, 30)


@dataclass
class Job:
    """What the model knows of a job.

    Attributes:
        status: RQ's word, or ``deleted``.
        execution: the one that may end it, while it is started.
        counted: how its batch counts it, None while it has not ended there.
        results: payloads that were accepted as final, the newest last.
        own_retries: what is left of the ``Retry`` it was enqueued with; None without one.
    """

    id: str
    batch: Batch | None = None
    status: str = "queued"
    execution: str | None = None
    counted: str | None = None
    results: list[bytes] = field(default_factory=list)
    own_retries: int | None = None
    transient: int = 0

    def end(self, status: str) -> None:
        self.status, self.execution = status, None

    def settle(self, outcome: str) -> None:
        if self.batch is not None and self.counted is None and not self.batch.is_gone:
            self.counted = outcome
            self.batch.close()

    def retry(self) -> None:
        self.status, self.transient, self.counted = "queued", 0, None
        if self.batch is not None:
            self.batch.status = Status.IN_PROGRESS

    def claim(self, execution: str) -> None:
        self.status, self.execution = "started", execution
        if self.batch is not None and self.counted is not None:
            self.counted = None
            self.batch.status = Status.IN_PROGRESS


@dataclass
class Batch:
    """What the model knows of a batch; a refused line is a job that was never one."""

    id: str
    lines: list[dict[str, Any] | str]
    jobs: list[Job] = field(default_factory=list)
    status: Status = Status.IN_PROGRESS
    ending: Status = Status.CANCELLED
    is_submitted: bool = False
    is_gone: bool = False

    def count(self, outcome: str) -> int:
        return sum(job.counted == outcome for job in self.jobs)

    def close(self) -> None:
        if not self.is_submitted or self.status.is_final:
            return
        if all(job.counted for job in self.jobs):
            is_cancelling = self.status is Status.CANCELLING
            self.status = self.ending if is_cancelling else Status.COMPLETED


class QueueMachine(RuleBasedStateMachine):
    """Every way in which a job's state can change, in any order."""

    connection: ClassVar[Redis]

    def __init__(self) -> None:
        super().__init__()
        redis = self.connection
        redis.flushdb()
        self.redis = redis
        self.brokers = {
            name: Broker(redis, worker=name, queues=[QUEUE], lease_seconds=60) for name in WORKERS
        }
        self.batch_api = Batches(redis)
        self.sweeper = Sweeper(redis)
        self.jobs: dict[str, Job] = {}
        self.batches: dict[str, Batch] = {}
        self.claims: dict[str, list[Claimed]] = {name: [] for name in WORKERS}
        self.outdated: set[str] = set()
        self.num_names = 0

    # Submitting ---------------------------------------------------------------------------------

    @rule(num_lines=st.integers(1, 4), bad=st.booleans(), part=st.booleans())
    def submit_a_batch(self, num_lines: int, bad: bool, part: bool) -> None:
        self.num_names += 1
        lines: list[dict[str, Any] | str] = [
            chat_line(f"c{i}", f"batch {self.num_names}") for i in range(num_lines)
        ]
        if bad:
            lines.insert(0, f"no line {self.num_names}")
        self._submit(lines, only_two=part)

    @precondition(lambda self: self.batches)
    @rule(pick=picks)
    def submit_again(self, pick: int) -> None:
        known = list(self.batches.values())
        self._submit(known[pick % len(known)].lines, only_two=False)

    @rule(retries=st.none() | st.just(1))
    def enqueue_a_plain_job(self, retries: int | None) -> None:
        retry = Retry(max=retries) if retries else None
        job = enqueue_chat(self.redis, "plain", QUEUE, retry=retry)
        self.jobs[job.id] = Job(job.id, own_retries=retries)

    # Workers ------------------------------------------------------------------------------------

    @rule(worker=workers, count=st.integers(1, 4))
    def claim(self, worker: str, count: int) -> None:
        queued = sum(job.status == "queued" for job in self.jobs.values())
        assert len(self._claim(worker, count)) == min(count, queued), "a queued job is stuck"

    @rule(worker=workers)
    def beat(self, worker: str) -> None:
        held = self.claims[worker]
        beat = self.brokers[worker].beat(held, figures={}, card=("machine", {}), keep_seconds=90)
        lost = {claimed.execution_id for claimed in held if not self._is_live(claimed)}
        assert beat.lost.keys() == lost
        self.outdated -= {c.execution_id for c in held if self._is_live(c)}
        for claimed in [c for c in held if c.execution_id in lost]:
            self.brokers[worker].release(claimed)

    @rule(worker=workers, pick=picks, answer=st.sampled_from(["a", "b"]))
    def finish(self, worker: str, pick: int, answer: str) -> None:
        self._end(worker, pick, _outcome(Ending.FINISHED, answer))

    @rule(worker=workers, pick=picks, may_retry=st.booleans())
    def fail(self, worker: str, pick: int, may_retry: bool) -> None:
        self._end(worker, pick, _outcome(Ending.FAILED, "failed", may_retry=may_retry))

    @rule(worker=workers, pick=picks)
    def stop(self, worker: str, pick: int) -> None:
        self._end(worker, pick, _outcome(Ending.STOPPED, "stopped"))

    @rule(worker=workers, pick=picks)
    def fail_for_a_moment(self, worker: str, pick: int) -> None:
        self._end(worker, pick, _outcome(Ending.FAILED, "not now", retry_seconds=3600))

    @rule(worker=workers, pick=picks, count=st.integers(1, 3))
    def give_back(self, worker: str, pick: int, count: int) -> None:
        chosen = self._some(worker, pick, count)
        live = [self.jobs[c.job_id] for c in chosen if self._is_live(c)]
        assert self.brokers[worker].requeue(chosen) == len(live)
        for job in live:
            job.end("queued")

    @rule(worker=workers, pick=picks)
    def let_a_lease_end(self, worker: str, pick: int) -> None:
        for claimed in self._some(worker, pick, 1):
            composite = f"{claimed.job_id}:{claimed.execution_id}"
            self.redis.zadd(keys.rq_started(QUEUE), {composite: LONG_AGO}, xx=True)
            self.outdated.add(claimed.execution_id)

    @rule(worker=workers)
    def reap(self, worker: str) -> None:
        expired = self._expired()
        assert set(self.brokers[worker].reap()) == {job.id for job in expired}
        for job in expired:
            job.end("queued")

    @rule(worker=workers)
    def bury(self, worker: str) -> None:
        live = {c.job_id for c in self.claims[worker] if self._is_live(c)}
        assert set(bury_worker(self.redis, worker)) == live
        for job_id in live:
            self.jobs[job_id].end("queued")

    @rule()
    def let_the_schedule_come(self) -> None:
        scheduled = [job for job in self.jobs.values() if job.status == "scheduled"]
        for job in scheduled:
            self.redis.zadd(keys.rq_scheduled(QUEUE), {job.id: LONG_AGO}, xx=True)
        assert self.brokers["w1"].schedule() == (len(scheduled), [])
        for job in scheduled:
            job.status = "queued"

    # People and their tools ---------------------------------------------------------------------

    @rule(pick=picks)
    def cancel_a_job(self, pick: int) -> None:
        for job in self._pick(pick, "queued", "started", "scheduled"):
            assert self.batch_api.cancel_job(job.id)
            job.end("canceled")
            job.settle("cancelled")

    @rule(pick=picks, is_expiry=st.booleans())
    def cancel_a_batch(self, pick: int, is_expiry: bool) -> None:
        batch = self._pick_batch(pick)
        if batch is None:
            return
        open_jobs = [j for j in batch.jobs if j.status in ("queued", "started", "scheduled")]
        act = self.batch_api.expire if is_expiry else self.batch_api.cancel
        was_final = batch.status.is_final
        assert act(batch.id) == (0 if was_final else len(open_jobs))
        if was_final:
            return
        batch.status = Status.CANCELLING
        batch.ending = Status.EXPIRED if is_expiry else Status.CANCELLED
        batch.is_submitted = True
        for job in open_jobs:
            job.end("canceled")
            job.settle("cancelled")
        batch.close()

    @rule(pick=picks)
    def cancel_with_stock_rq(self, pick: int) -> None:
        for job in self._pick(pick, "queued", "started", "scheduled"):
            self._fetch(job).cancel()
            job.end("canceled")

    @rule(pick=picks)
    def delete_with_stock_rq(self, pick: int) -> None:
        for job in self._pick(pick, "queued", "started", "scheduled", *ENDED):
            self._fetch(job).delete()
            self._forget(job)

    @rule(pick=picks)
    def requeue_with_stock_rq(self, pick: int) -> None:
        for job in self._pick(pick, "failed", "stopped"):
            self._fetch(job).requeue()
            job.status = "queued"

    @rule()
    def clean_up_with_stock_rq(self) -> None:
        expired = self._expired()
        StartedJobRegistry(QUEUE, connection=self.redis, job_class=SafeJob).cleanup()
        for job in expired:
            if job.own_retries == 0:
                job.end("failed")
                job.results.append(b"")
            else:
                job.end("queued")
                if job.own_retries is not None:
                    job.own_retries -= 1

    @rule(pick=picks)
    def retry(self, pick: int) -> None:
        for job in self._pick(pick, "failed", "stopped", "canceled"):
            assert self.batch_api.retry_jobs([job.id]) == [job.id]
            job.retry()

    @rule(pick=picks)
    def retry_a_batch(self, pick: int) -> None:
        batch = self._pick_batch(pick)
        if batch is None:
            return
        again = [j for j in batch.jobs if j.status in ("failed", "stopped", "canceled")]
        assert self.batch_api.retry_failed(batch.id) == len(again)
        for job in again:
            job.retry()

    @rule(pick=picks)
    def purge(self, pick: int) -> None:
        for job in self._pick(pick, "failed", "stopped"):
            assert DeadLetter(self.redis).purge([job.id]) == 1
            self._forget(job)
            job.settle("failed")

    @rule(pick=picks)
    def delete_a_batch(self, pick: int) -> None:
        batch = self._pick_batch(pick)
        if batch is None:
            return
        self.batch_api.delete(batch.id)
        batch.is_gone = True
        for job in batch.jobs:
            self._forget(job)

    @rule()
    def sweep(self) -> None:
        self._sweep()

    # What must hold after every step --------------------------------------------------------------

    @invariant()
    def jobs_are_in_the_one_state_that_the_model_says(self) -> None:
        known = list(self.jobs.values())
        waiting = self._waiting()
        started: Any = self.redis.zrange(keys.rq_started(QUEUE), 0, -1)
        executions = [member.decode().split(":") for member in started]
        with self.redis.pipeline(transaction=False) as pipeline:
            for job in known:
                pipeline.hget(keys.rq_job(job.id), "status")
                pipeline.xrange(keys.rq_results(job.id))
            replies = pipeline.execute()
        for job, status, results in zip(known, replies[::2], replies[1::2], strict=True):
            assert (status.decode() if status else "deleted") == job.status, job.id
            assert job.status != "queued" or job.id in waiting, f"{job.id} waits nowhere"
            leases = [ex for job_id, ex in executions if job_id == job.id]
            assert len(leases) <= 1, f"{job.id} runs twice"
            if job.status == "started":
                assert leases == [job.execution]
            answers = [fields.get(b"return_value", b"") for _, fields in results]
            assert answers == ([] if job.status == "deleted" else job.results), job.id

    @invariant()
    def batches_count_what_the_model_counts(self) -> None:
        for batch in self.batches.values():
            if batch.is_gone:
                continue
            shown = self.batch_api.get(batch.id)
            assert shown.total == len(batch.jobs)
            counts = (shown.completed, shown.failed, shown.cancelled)
            assert counts == tuple(map(batch.count, ("completed", "failed", "cancelled")))
            assert shown.status is batch.status

    def teardown(self) -> None:
        """Lose both workers, then claim and finish what is left: every batch must end."""
        for worker in WORKERS:
            self.bury(worker)
        self.let_the_schedule_come()
        while claimed := self._claim("w1", 5):
            for _ in claimed:
                self._end("w1", len(self.claims["w1"]) - 1, _outcome(Ending.FINISHED, "last"))
                self.claims["w1"].pop()
        for batch in list(self.batches.values()):
            if not batch.is_gone:
                self._submit(batch.lines, only_two=False)
        while claimed := self._claim("w2", 5):
            for _ in claimed:
                self._end("w2", len(self.claims["w2"]) - 1, _outcome(Ending.FINISHED, "last"))
                self.claims["w2"].pop()
        self._sweep()
        self.jobs_are_in_the_one_state_that_the_model_says()
        self.batches_count_what_the_model_counts()
        for batch in self.batches.values():
            if not batch.is_gone:
                assert batch.status.is_final, batch.id
                refs = list(self.batch_api.all_lines(batch.id))
                lines = BatchReader(self.redis, batch.id).read(refs)
                assert [line is not None for line in lines] == [True] * len(batch.jobs)
        self.brokers["w1"].reap(everything=True)
        assert self.redis.keys("rq:execution:*") == []
        assert self.redis.keys("qsvc:progress:*") == []
        assert self.redis.keys("qsvc:lanes:*") == []
        assert self.redis.zrange(keys.rq_started(QUEUE), 0, -1) == []

    # Helpers --------------------------------------------------------------------------------------

    def _feeder(self, lines: list[dict[str, Any] | str]) -> Feeder:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        options = SubmitOptions(
            queue=QUEUE, model="machine", submit=SubmitSettings.load(chunk_lines=1)
        )
        return Feeder(self.redis, BatchFile(io.BytesIO(text.encode()), "machine"), options)

    def _submit(self, lines: list[dict[str, Any] | str], *, only_two: bool) -> None:
        """Feed a file; a feeder that is stopped at once has sent two lines by then."""
        feeder = self._feeder(lines)
        batch = self.batches.get(feeder.batch_id)
        if batch is None or batch.is_gone:
            batch = self.batches[feeder.batch_id] = Batch(feeder.batch_id, lines)
        feeder.feed(self.redis, should_stop=lambda: only_two)
        if batch.is_submitted or batch.status is not Status.IN_PROGRESS:
            return
        end = min(2, len(batch.lines)) if only_two else len(batch.lines)
        for number in range(len(batch.jobs) + 1, end + 1):
            job = Job(keys.job_id(batch.id, number), batch)
            batch.jobs.append(job)
            if isinstance(batch.lines[number - 1], str):
                job.status, job.counted = "deleted", "failed"
            self.jobs[job.id] = job
        batch.is_submitted = end == len(batch.lines)
        batch.close()

    def _claim(self, worker: str, count: int) -> list[Claimed]:
        claimed, _ = self.brokers[worker].claim(count, crash_retries=2)
        for one in claimed:
            job = self.jobs[one.job_id]
            assert job.status == "queued"
            job.claim(one.execution_id)
        self.claims[worker] += claimed
        return claimed

    def _end(self, worker: str, pick: int, outcome: Outcome) -> None:
        for claimed in self._some(worker, pick, 1):
            job, is_live = self.jobs[claimed.job_id], self._is_live(claimed)
            [reply] = self.brokers[worker].finish([(claimed, outcome)])
            if is_live:
                assert reply == self._accept(job, outcome)
            else:
                # One that was accepted before is told so again, and nothing changes.
                assert reply not in ("retry", "aftercare")

    def _accept(self, job: Job, outcome: Outcome) -> str:
        if outcome.retry_seconds is not None and job.transient < MOST_TRANSIENT_TRIES:
            job.transient += 1
            job.end("scheduled")
            return "retry"
        if outcome.may_retry and job.own_retries:
            job.own_retries -= 1
            job.end("queued")
            return "retry"
        job.end(outcome.ending.value)
        job.transient = 0
        job.results.append(_stored(outcome))
        job.settle(COUNTED[outcome.ending.value])
        return "ok"

    def _sweep(self) -> None:
        """Two looks: the first only sees which batches do not come on."""
        self.sweeper.sweep_now()
        self.sweeper.sweep_now()
        for batch in self.batches.values():
            if batch.is_gone or batch.status.is_final:
                continue
            for job in batch.jobs:
                if batch.status is Status.CANCELLING and job.status in (
                    "queued",
                    "started",
                    "scheduled",
                ):
                    job.end("canceled")
                    job.settle("cancelled")
                elif job.status == "deleted":
                    job.settle("failed")
                elif job.status == "canceled":
                    job.settle("cancelled")
                elif job.status in ENDED:
                    job.settle(COUNTED[job.status])
            batch.close()

    def _is_live(self, claimed: Claimed) -> bool:
        return self.jobs[claimed.job_id].execution == claimed.execution_id

    def _expired(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.execution in self.outdated]

    def _some(self, worker: str, pick: int, count: int) -> list[Claimed]:
        """Executions that a worker ever had, also such as were taken from it."""
        had = self.claims[worker]
        start = pick % len(had) if had else 0
        return had[start : start + count]

    def _pick(self, pick: int, *statuses: str) -> list[Job]:
        jobs = [
            job
            for job in self.jobs.values()
            if job.status in statuses and not (job.batch and job.batch.is_gone)
        ]
        return [jobs[pick % len(jobs)]] if jobs else []

    def _pick_batch(self, pick: int) -> Batch | None:
        batches = [batch for batch in self.batches.values() if not batch.is_gone]
        return batches[pick % len(batches)] if batches else None

    def _fetch(self, job: Job) -> RqJob:
        return SafeJob.fetch(job.id, connection=self.redis)

    def _forget(self, job: Job) -> None:
        job.end("deleted")
        job.results.clear()

    def _waiting(self) -> set[str]:
        """Ids in the lists that a claim looks at."""
        lanes: Any = self.redis.lrange(keys.lanes(QUEUE), 0, -1)
        listed = {queue.name for queue in Queue.all(connection=self.redis)}
        lists = [QUEUE, *(keys.lane(QUEUE, lane.decode()) for lane in lanes if lane != b"-")]
        ids: set[str] = set()
        for name in lists:
            found: Any = self.redis.lrange(keys.rq_queue(name), 0, -1)
            assert not found or name in listed, f"rq does not list {name}"
            ids |= {job_id.decode() for job_id in found}
        return ids


def _outcome(
    ending: Ending, payload: str, *, may_retry: bool = False, retry_seconds: int | None = None
) -> Outcome:
    is_finished = ending is Ending.FINISHED
    error = {"message": payload, "type": "server_error", "param": None, "code": "made_up"}
    return Outcome(
        ending=ending,
        payload=json.dumps({"answer": payload}).encode(),
        error=None if is_finished else error,
        keep_seconds=3600,
        ended_at=time.time(),
        may_retry=may_retry,
        retry_seconds=retry_seconds,
    )


def _stored(outcome: Outcome) -> bytes:
    """What a result entry holds of an outcome's value; failures have their text elsewhere."""
    return base64.b64encode(outcome.payload) if outcome.ending is Ending.FINISHED else b""


def run(redis: Redis, max_examples: int) -> None:
    class Machine(QueueMachine):
        connection = redis

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_queue_does_what_the_model_does(redis: Redis) -> None:
    run(redis, 60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_queue_does_what_the_model_does_for_long(redis: Redis) -> None:
    run(redis, 600)
