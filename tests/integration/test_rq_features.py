"""What users know of RQ, job by job, on a worker that runs other jobs at the same time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.sentinel import Sentinel
from rq import Callback, Queue, Repeat, Retry, Worker
from rq.command import send_stop_job_command
from rq.exceptions import DuplicateJobError
from rq.group import Group
from rq.job import Dependency, Job
from rq.rate_limit import RateLimit, RateLimitRegistry
from rq.registry import FailedJobRegistry
from rq.results import Result
from rq.suspension import resume, suspend
from rq.utils import now
from rq.webhook import Webhook

from queue_service import keys, tasks
from queue_service.batches import Batches
from queue_service.broker import Broker
from queue_service.errors import ConfigurationError
from queue_service.requests import Endpoint
from queue_service.results import read_execution, read_job
from queue_service.streams import text_of
from tests.cli_helpers import HandWorker
from tests.harness import (
    LONG_TEXT,
    SLOW_STEP_SECONDS,
    ThreadWorker,
    answer,
    chat_body,
    child_environment,
    enqueue_chat,
    error_code,
    eventually,
    running_worker,
    worker_settings,
)
from tests.rq_callbacks import NOTES
from workers.rq_cli import url_of

QUEUE = keys.DEFAULT_QUEUE
HIGH, NORMAL, LOW = keys.queue_names("fake")
META = {"tenant": "acme", "number": 7}
WEEK_SECONDS = 7 * 86_400
REFUSED = "refuse me"  # the fake tokenizer's template says no to it

SUCCESS, FAILURE, STOPPED, HANG, FAIL = (
    f"tests.rq_callbacks.{name}"
    for name in ("note_success", "note_failure", "note_stopped", "hang", "fail")
)


@contextlib.contextmanager
def busy_worker(redis: Redis, url: str, **settings: Any) -> Iterator[ThreadWorker]:
    """A worker with a batch of other jobs, which must come out right whatever the test does."""
    others = [enqueue_chat(redis, LONG_TEXT + str(i), meta=META) for i in range(3)]
    with running_worker(worker_settings(url, **settings), step_seconds=SLOW_STEP_SECONDS) as worker:
        eventually(lambda: len(worker.engine.rows) == 3, "the other jobs run")
        yield worker
        worker.hasten()
        wait_for(others, "finished")
    for i, job in enumerate(others):
        assert answer(redis, job) == LONG_TEXT + str(i)
        assert attempts(redis, job) == 1
        assert_meta(redis, job)


def enqueue(redis: Redis, text: str, queue: str = QUEUE, **options: Any) -> Job:
    return enqueue_chat(redis, text, queue, meta=META, **options)


def status(job: Job) -> str | None:
    found = job.get_status(refresh=True)
    return found.value if found else None


def wait_for(jobs: Job | Iterable[Job], wanted: str) -> None:
    for job in [jobs] if isinstance(jobs, Job) else jobs:
        eventually(lambda job=job: status(job) == wanted, f"{job.id} is {wanted}")  # type: ignore[misc]


def wait_until_gone(redis: Redis, job: Job) -> None:
    eventually(lambda: not redis.exists(keys.rq_job(job.id)), f"{job.id} is gone")


def number(redis: Redis, job: Job, field: str) -> int:
    return int(redis.hget(keys.rq_job(job.id), field) or 0)


def attempts(redis: Redis, job: Job) -> int:
    return number(redis, job, "qsvc_attempt")


def entries(redis: Redis, job: Job) -> list[dict[bytes, bytes]]:
    found: Any = redis.xrange(keys.rq_results(job.id))
    return [fields for _, fields in found]


def seconds_until(redis: Redis, job: Job) -> float:
    """How long a job still waits in the schedule, by the server's clock."""
    score = redis.zscore(keys.rq_scheduled(QUEUE), job.id)
    assert score is not None, f"{job.id} is not scheduled"
    moment: Any = redis.time()
    return float(score) - float(moment[0])


def let_its_time_come(redis: Redis, job: Job) -> None:
    assert redis.zadd(keys.rq_scheduled(QUEUE), {job.id: 1}, xx=True, ch=True) == 1


def let_aftercare_be_due(redis: Redis, member: str) -> None:
    assert redis.zadd(keys.aftercare(QUEUE), {member: 1}, xx=True, ch=True) == 1


def notes(redis: Redis, job: Job) -> list[dict[str, Any]]:
    """What callbacks noted of a job."""
    raw: Any = redis.lrange(NOTES, 0, -1)
    return [note for note in map(json.loads, raw) if note["job"] == job.id]


def assert_meta(redis: Redis, job: Job) -> None:
    assert Job.fetch(job.id, connection=redis, serializer="json").meta == META


# Retry --------------------------------------------------------------------------------------


def test_a_job_that_runs_into_its_timeout_is_retried_as_often_as_it_asked(
    redis: Redis, redis_url: str
) -> None:
    with busy_worker(redis, redis_url):
        job = enqueue(redis, LONG_TEXT, job_timeout=1, retry=Retry(max=1))
        wait_for(job, "failed")
    assert attempts(redis, job) == 2
    assert error_code(redis, job) == "timeout"
    assert len(entries(redis, job)) == 1, "only the last failure is a result"
    assert job.id in FailedJobRegistry(QUEUE, connection=redis)
    assert_meta(redis, job)


def test_retries_wait_for_their_intervals_and_may_succeed(redis: Redis, redis_url: str) -> None:
    with busy_worker(redis, redis_url) as worker:
        retry = Retry(max=2, interval=[100, 200])
        job = enqueue(redis, LONG_TEXT, job_timeout=1, retry=retry)
        wait_for(job, "scheduled")
        assert 95 <= seconds_until(redis, job) <= 100
        let_its_time_come(redis, job)
        eventually(lambda: attempts(redis, job) == 2, "the second attempt")
        wait_for(job, "scheduled")
        assert 195 <= seconds_until(redis, job) <= 200
        assert entries(redis, job) == []
        worker.hasten()
        let_its_time_come(redis, job)
        wait_for(job, "finished")
    assert answer(redis, job) == LONG_TEXT
    assert (attempts(redis, job), number(redis, job, "retries_left")) == (3, 0)
    assert_meta(redis, job)


def test_a_refused_body_is_not_retried(redis: Redis, redis_url: str) -> None:
    with busy_worker(redis, redis_url):
        job = enqueue(redis, REFUSED, retry=Retry(max=3))
        wait_for(job, "failed")
    assert error_code(redis, job) == "invalid_request"
    assert (attempts(redis, job), number(redis, job, "retries_left")) == (1, 3)


def test_a_stopped_job_is_not_retried(redis: Redis, redis_url: str) -> None:
    with busy_worker(redis, redis_url) as worker:
        job = enqueue(redis, LONG_TEXT, retry=Retry(max=3))
        eventually(lambda: len(worker.engine.rows) == 4, "it runs")
        send_stop_job_command(redis, job.id)
        wait_for(job, "stopped")
    assert attempts(redis, job) == 1


# Repeat and schedule --------------------------------------------------------------------------


def test_a_job_repeats_as_often_as_it_asked_with_a_result_and_a_callback_each(
    redis: Redis, redis_url: str
) -> None:
    with busy_worker(redis, redis_url, callbacks=[SUCCESS]):
        job = enqueue(redis, "again", repeat=Repeat(times=2), on_success=Callback(SUCCESS))
        eventually(lambda: len(notes(redis, job)) == 3, "three callbacks")
        wait_for(job, "finished")
    assert attempts(redis, job) == len(entries(redis, job)) == 3
    assert number(redis, job, "repeats_left") == 0
    assert [text_of(note["detail"]) for note in notes(redis, job)] == ["again"] * 3
    assert 0 < redis.ttl(keys.rq_job(job.id)) <= WEEK_SECONDS
    assert_meta(redis, job)


def test_a_repeated_job_waits_for_its_intervals(redis: Redis, redis_url: str) -> None:
    with busy_worker(redis, redis_url):
        job = enqueue(redis, "again", repeat=Repeat(times=3, interval=[100, 200]))
        for seconds in (100, 200, 200):
            wait_for(job, "scheduled")
            assert seconds - 5 <= seconds_until(redis, job) <= seconds
            let_its_time_come(redis, job)
            eventually(lambda: status(job) != "scheduled", "it was queued")
        wait_for(job, "finished")
    assert len(entries(redis, job)) == 4


def test_a_job_that_repeats_releases_its_dependents_at_its_first_success(
    redis: Redis, redis_url: str
) -> None:
    with busy_worker(redis, redis_url):
        job = enqueue(redis, "again", repeat=Repeat(times=1, interval=1000))
        child = enqueue(redis, "child", depends_on=job)
        wait_for(child, "finished")
        wait_for(job, "scheduled")


def test_scheduled_jobs_run_at_their_time_and_not_before(redis: Redis, redis_url: str) -> None:
    queue = Queue(QUEUE, connection=redis, serializer="json")
    with busy_worker(redis, redis_url):
        soon = queue.enqueue_in(timedelta(seconds=2), tasks.CHAT, chat_body("soon"), meta=META)
        at = queue.enqueue_at(now() + timedelta(seconds=2), tasks.CHAT, chat_body("at"))
        later = queue.enqueue_in(timedelta(hours=1), tasks.CHAT, chat_body("later"))
        wait_for([soon, at], "finished")
        assert status(later) == "scheduled"
        assert Batches(redis).cancel_job(later.id)
        assert redis.zscore(keys.rq_scheduled(QUEUE), later.id) is None
    for job in (soon, at):
        [entry] = entries(redis, job)
        assert float(entry[b"execution_started_at"]) >= job.created_at.timestamp() + 1.9
    assert attempts(redis, later) == 0
    assert_meta(redis, soon)


# Dependents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("serializer", ["json", None])
def test_success_releases_dependents_on_any_queue(
    redis: Redis, redis_url: str, serializer: str | None
) -> None:
    queues = [Queue(name, connection=redis, serializer=serializer) for name in (QUEUE, HIGH, LOW)]
    parent = queues[0].enqueue(tasks.CHAT, chat_body("parent"), meta=META)
    children = [
        queue.enqueue(tasks.CHAT, chat_body(queue.name), depends_on=parent, meta=META)
        for queue in queues
    ]
    assert [status(child) for child in children] == ["deferred"] * 3
    with busy_worker(redis, redis_url):
        wait_for(children, "finished")
    for child, queue in zip(children, queues, strict=True):
        assert answer(redis, child) == queue.name
        assert Job.fetch(child.id, connection=redis, serializer=serializer).meta == META


def test_failure_keeps_dependents_deferred_unless_they_allow_it(
    redis: Redis, redis_url: str
) -> None:
    parent = enqueue(redis, REFUSED)
    strict = enqueue(redis, "strict", depends_on=parent)
    tolerant = enqueue(redis, "tolerant", depends_on=Dependency(parent, allow_failure=True))
    with busy_worker(redis, redis_url):
        wait_for(tolerant, "finished")
    assert status(parent) == "failed"
    assert status(strict) == "deferred"


def test_a_stopped_or_canceled_parent_keeps_its_dependents_deferred(
    redis: Redis, redis_url: str
) -> None:
    with busy_worker(redis, redis_url) as worker:
        stopped, canceled = enqueue(redis, LONG_TEXT), enqueue(redis, LONG_TEXT)
        children = [
            enqueue(redis, "child", depends_on=Dependency(parent, allow_failure=True))
            for parent in (stopped, canceled)
        ]
        eventually(lambda: len(worker.engine.rows) == 5, "both run")
        send_stop_job_command(redis, stopped.id)
        canceled.cancel()
        wait_for(stopped, "stopped")
        eventually(lambda: len(worker.engine.rows) == 3, "both are gone")
    assert redis.zcard(keys.aftercare(QUEUE)) == 0
    assert [status(child) for child in children] == ["deferred"] * 2


def test_a_dependent_waits_for_the_last_of_several_parents(redis: Redis, redis_url: str) -> None:
    with busy_worker(redis, redis_url) as worker:
        short, long = enqueue(redis, "short"), enqueue(redis, LONG_TEXT)
        child = enqueue(redis, "child", depends_on=[short, long])
        after_short = enqueue(redis, "after short", depends_on=short)
        wait_for(after_short, "finished")
        assert status(child) == "deferred"
        worker.hasten()
        wait_for(child, "finished")


def test_a_failed_parent_that_is_requeued_and_succeeds_releases_its_dependents(
    redis: Redis, redis_url: str
) -> None:
    with busy_worker(redis, redis_url) as worker:
        parent = enqueue(redis, LONG_TEXT, job_timeout=1)
        child = enqueue(redis, "child", depends_on=parent)
        wait_for(parent, "failed")
        worker.hasten()
        parent.requeue()
        wait_for(child, "finished")
    assert answer(redis, parent) == LONG_TEXT
    assert len(entries(redis, parent)) == 2
    assert parent.id not in FailedJobRegistry(QUEUE, connection=redis)


# Callbacks and webhooks -------------------------------------------------------------------------


def test_allowed_callbacks_run_in_a_process_of_their_own(redis: Redis, redis_url: str) -> None:
    callbacks: dict[str, Any] = {
        "on_success": Callback(SUCCESS),
        "on_failure": Callback(FAILURE),
        "on_stopped": Callback(STOPPED),
    }
    with busy_worker(redis, redis_url, callbacks=[SUCCESS, FAILURE, STOPPED]) as worker:
        good = enqueue(redis, "good", **callbacks)
        bad = enqueue(redis, REFUSED, **callbacks)
        stopped = enqueue(redis, LONG_TEXT, **callbacks)
        eventually(lambda: len(worker.engine.rows) == 4, "the last one runs")
        send_stop_job_command(redis, stopped.id)
        noted = [
            eventually(lambda job=job: notes(redis, job), "its callback")  # type: ignore[misc]
            for job in (good, bad, stopped)
        ]
        eventually(lambda: redis.zcard(keys.aftercare(QUEUE)) == 0, "nothing is left to do")
    events = [[note["event"] for note in of_job] for of_job in noted]
    assert events == [["success"], ["failure"], ["stopped"]]
    [[success], [failure], [stop]] = noted
    assert text_of(success["detail"]) == "good"
    assert failure["detail"] == "the template says no"
    pids = {note["pid"] for note in (success, failure, stop)}
    assert len(pids) == 3
    assert os.getpid() not in pids
    assert [note["meta"] for note in (success, failure, stop)] == [META] * 3


def test_a_callback_is_ended_at_its_timeout_and_harms_no_result(
    redis: Redis, redis_url: str
) -> None:
    with busy_worker(redis, redis_url, callbacks=[HANG, FAIL]):
        hanging = enqueue(redis, "hanging", on_success=Callback(HANG, timeout=6))
        failing = enqueue(redis, "failing", on_success=Callback(FAIL))
        child = enqueue(redis, "child", depends_on=hanging)
        eventually(lambda: notes(redis, hanging), "the callback hangs")
        assert status(hanging) == "finished"
        wait_for(child, "finished")
        problems = [
            eventually(
                lambda job=job: redis.hget(keys.rq_job(job.id), "qsvc_callback_error"),  # type: ignore[misc]
                "the job shows what went wrong",
            )
            for job in (hanging, failing)
        ]
    assert problems[0] == f"{HANG}: it ran longer than 6 seconds".encode()
    assert problems[1] == f"{FAIL}: exit code 1".encode()
    assert [answer(redis, job) for job in (hanging, failing)] == ["hanging", "failing"]


def test_a_long_callback_stays_with_its_worker(redis: Redis, redis_url: str) -> None:
    with busy_worker(redis, redis_url, callbacks=[HANG]):
        job = enqueue(redis, "x", on_success=Callback(HANG, timeout=600))
        [note] = eventually(lambda: notes(redis, job), "the callback runs")
        scored: Any = redis.zrange(keys.aftercare(QUEUE), 0, -1, withscores=True)
        [(_, due)] = scored
        moment: Any = redis.time()
        assert due > moment[0] + 600
        os.kill(note["pid"], 9)


def test_a_worker_does_not_wait_long_for_a_callback_when_it_ends(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.aftercare._STOP_SECONDS", 0.3)
    with busy_worker(redis, redis_url, callbacks=[HANG]):
        job = enqueue(redis, "x", on_success=Callback(HANG, timeout=600))
        child = enqueue(redis, "child", depends_on=job)
        [note] = eventually(lambda: notes(redis, job), "the callback runs")
    with pytest.raises(ProcessLookupError):
        os.kill(note["pid"], 0)
    scored: Any = redis.zrange(keys.aftercare(QUEUE), 0, -1, withscores=True)
    [(_, due)] = scored
    moment: Any = redis.time()
    assert due <= moment[0] + 121, "another worker does it soon"
    assert status(child) == "deferred"


@pytest.mark.parametrize("kind", ["on_success", "on_failure", "on_stopped"])
def test_a_callback_that_is_not_allowed_fails_the_job_before_it_runs_and_is_not_imported(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    trace = tmp_path / "imported"
    (tmp_path / "evil.py").write_text(f"open({str(trace)!r}, 'w').close()\ndef run(*_): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    options: dict[str, Any] = {kind: Callback("evil.run")}
    with busy_worker(redis, redis_url, callbacks=[SUCCESS]):
        job = enqueue(redis, "x", **options)
        wait_for(job, "failed")
        eventually(lambda: redis.zcard(keys.aftercare(QUEUE)) == 0, "the aftercare is over")
    assert error_code(redis, job) == "callback_not_allowed"
    assert "evil" not in sys.modules
    assert not trace.exists()


def test_a_job_with_webhooks_is_refused(redis: Redis, redis_url: str) -> None:
    with busy_worker(redis, redis_url):
        webhook = Webhook("http://127.0.0.1:9/hook", "finished")
        job = enqueue(redis, "x", webhooks=[webhook])
        wait_for(job, "failed")
    assert error_code(redis, job) == "webhook_not_allowed"


def test_the_aftercare_of_a_worker_that_died_is_done_by_another(
    redis: Redis, redis_url: str
) -> None:
    job = enqueue(redis, "good", on_success=Callback(SUCCESS))
    child = enqueue(redis, "child", depends_on=job)
    dead = HandWorker(redis, QUEUE, name="dead")
    [claimed] = dead.claim()
    assert dead.answer(claimed) == ["aftercare"]
    assert status(child) == "deferred"
    let_aftercare_be_due(redis, f"{job.id}:{claimed.execution_id}:finished")
    with busy_worker(redis, redis_url, callbacks=[SUCCESS]):
        wait_for(child, "finished")
        eventually(lambda: redis.zcard(keys.aftercare(QUEUE)) == 0, "it is forgotten")
    assert [text_of(note["detail"]) for note in notes(redis, job)] == ["good"]


def test_dependents_that_a_dead_worker_left_half_way_are_queued(
    redis: Redis, redis_url: str
) -> None:
    job = enqueue(redis, "x")
    child = enqueue(redis, "child", depends_on=job)
    hand = HandWorker(redis, QUEUE)
    hand.answer(*hand.claim())
    queue = Queue(QUEUE, connection=redis, serializer="json")
    queue.move_dependents_to_ready(Job.fetch(job.id, connection=redis, serializer="json"))
    redis.delete(keys.aftercare(QUEUE))
    assert status(child) == "ready_to_enqueue"
    assert not read_job(redis, child.id).has_ended
    with busy_worker(redis, redis_url):
        wait_for(child, "finished")


def test_dependents_ask_how_the_execution_ended_and_not_how_the_job_is_now(
    redis: Redis, redis_url: str
) -> None:
    parent = enqueue(redis, "x")
    child = enqueue(redis, "child", depends_on=parent)
    dead = HandWorker(redis, QUEUE, name="dead")
    [claimed] = dead.claim()
    assert dead.fail(claimed) == ["aftercare"]
    parent.requeue()
    let_aftercare_be_due(redis, f"{parent.id}:{claimed.execution_id}:failed")
    suspend(redis)
    with running_worker(worker_settings(redis_url)):
        eventually(lambda: redis.zcard(keys.aftercare(QUEUE)) == 0, "the aftercare is done")
        assert [status(job) for job in (parent, child)] == ["queued", "deferred"]
        resume(redis)
        wait_for(child, "finished")


# How long things are kept -----------------------------------------------------------------------


def test_results_are_kept_as_long_as_the_job_asked_else_a_week(
    redis: Redis, redis_url: str
) -> None:
    with busy_worker(redis, redis_url):
        at_once = enqueue(redis, "at once", result_ttl=0)
        for_ever = enqueue(redis, "for ever", result_ttl=-1)
        explicit = enqueue(redis, "explicit", result_ttl=40)
        unset = enqueue(redis, "unset")
        failed = enqueue(redis, REFUSED, failure_ttl=50)
        failed_unset = enqueue(redis, REFUSED)
        wait_for([for_ever, explicit, unset], "finished")
        wait_for([failed, failed_unset], "failed")
        wait_until_gone(redis, at_once)
    kept = [explicit, unset, failed, failed_unset]
    for job, seconds in zip(kept, (40, WEEK_SECONDS, 50, WEEK_SECONDS), strict=True):
        for key in (keys.rq_job(job.id), keys.rq_results(job.id)):
            assert seconds - 30 < redis.ttl(key) <= seconds, key
    assert redis.ttl(keys.rq_job(for_ever.id)) == redis.ttl(keys.rq_results(for_ever.id)) == -1
    assert redis.zscore(keys.rq_finished(QUEUE), for_ever.id) == float("inf")
    assert not list(redis.scan_iter(f"*{at_once.id}*"))


def test_a_job_to_be_deleted_at_its_end_still_has_its_aftercare(
    redis: Redis, redis_url: str
) -> None:
    with busy_worker(redis, redis_url, callbacks=[SUCCESS]):
        job = enqueue(redis, "x", result_ttl=0, on_success=Callback(SUCCESS))
        child = enqueue(redis, "child", depends_on=job)
        wait_for(child, "finished")
    [note] = notes(redis, job)
    assert text_of(note["detail"]) == "x"
    for key in (keys.rq_job(job.id), keys.rq_results(job.id)):
        assert 0 < redis.ttl(key) <= 300


def test_a_requeued_job_outlives_the_time_its_failure_was_to_be_kept(
    redis: Redis, redis_url: str
) -> None:
    with busy_worker(redis, redis_url) as worker:
        job = enqueue(redis, LONG_TEXT, job_timeout=1, failure_ttl=600)
        wait_for(job, "failed")
        job.requeue()
        wait_for(job, "started")
        assert redis.ttl(keys.rq_job(job.id)) == -1
        worker.hasten()
        wait_for(job, "finished")


# Groups, ids, commands ----------------------------------------------------------------------------


def test_the_jobs_of_a_group_are_found_by_it(redis: Redis, redis_url: str) -> None:
    queue = Queue(QUEUE, connection=redis, serializer="json")
    datas = [Queue.prepare_data(tasks.CHAT, (chat_body(f"job {i}"),)) for i in range(3)]
    with busy_worker(redis, redis_url):
        jobs = Group.create(connection=redis, name="of-three").enqueue_many(queue, datas)
        wait_for(jobs, "finished")
    found = Group.fetch("of-three", connection=redis).get_jobs()
    assert {job.id for job in found} == {job.id for job in jobs}
    assert sorted(answer(redis, job) for job in found) == ["job 0", "job 1", "job 2"]


def test_a_unique_job_is_refused_while_another_of_its_id_is_there(
    redis: Redis, redis_url: str
) -> None:
    with busy_worker(redis, redis_url):
        job = enqueue(redis, "once", job_id="the-one", unique=True)
        with pytest.raises(DuplicateJobError):
            enqueue(redis, "twice", job_id="the-one", unique=True)
        wait_for(job, "finished")
        with pytest.raises(DuplicateJobError):
            enqueue(redis, "thrice", job_id="the-one", unique=True)
    assert (answer(redis, job), attempts(redis, job)) == ("once", 1)


def test_queued_jobs_that_are_canceled_or_deleted_never_run(redis: Redis, redis_url: str) -> None:
    with busy_worker(redis, redis_url, slots=3, claim_ahead=0) as worker:
        canceled, deleted, kept = (enqueue(redis, text) for text in ("c", "d", "kept"))
        canceled.cancel()
        deleted.delete()
        worker.hasten()
        wait_for(kept, "finished")
    assert (status(canceled), attempts(redis, canceled)) == ("canceled", 0)
    assert not list(redis.scan_iter(f"*{deleted.id}*"))


def test_one_claim_takes_high_before_default_before_low(redis: Redis, redis_url: str) -> None:
    low, default, normal, high = (
        enqueue(redis, LONG_TEXT, queue) for queue in (LOW, QUEUE, NORMAL, HIGH)
    )
    settings = worker_settings(redis_url, slots=2, claim_ahead=0)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        eventually(lambda: len(worker.engine.rows) == 2, "two rows")
        assert [status(job) for job in (high, normal)] == ["started"] * 2
        assert [status(job) for job in (low, default)] == ["queued"] * 2
        worker.hasten()
        wait_for([low, default], "finished")
    [before], [after] = entries(redis, low), entries(redis, default)
    assert before[b"execution_started_at"] <= after[b"execution_started_at"], "low, then default"


def test_a_burst_does_not_end_before_what_the_last_job_released(
    redis: Redis, redis_url: str
) -> None:
    jobs = [enqueue(redis, "0")]
    for i in range(1, 6):
        jobs.append(enqueue(redis, str(i), depends_on=jobs[-1]))
    with running_worker(worker_settings(redis_url, burst=True)) as worker:
        worker.join()
    assert [status(job) for job in jobs] == ["finished"] * 6


# Rate limits --------------------------------------------------------------------------------------


def spans(redis: Redis, jobs: Iterable[Job]) -> list[tuple[float, float]]:
    """When the executions of jobs began and ended, by their results."""
    return sorted(
        (float(entry[b"execution_started_at"]), float(entry[b"execution_ended_at"]))
        for job in jobs
        for entry in entries(redis, job)
    )


def test_jobs_under_a_limit_of_one_run_one_after_the_other(redis: Redis, redis_url: str) -> None:
    limit = RateLimit("one", concurrency=1)
    with busy_worker(redis, redis_url):
        jobs = [enqueue(redis, f"limited {i}", rate_limit=limit) for i in range(3)]
        assert not any(read_job(redis, job.id).has_ended for job in jobs[1:])
        wait_for(jobs, "finished")
        eventually(
            lambda: not RateLimitRegistry("one", redis).get_allowed_job_count(), "a free slot"
        )
    ran = spans(redis, jobs)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ran))
    for i, job in enumerate(jobs):
        assert answer(redis, job) == f"limited {i}"
        assert_meta(redis, job)


def test_a_limited_job_that_is_canceled_while_it_runs_makes_room(
    redis: Redis, redis_url: str
) -> None:
    limit = RateLimit("one", concurrency=1)
    with busy_worker(redis, redis_url) as worker:
        # RQ orders those of one second by their ids.
        running, waiting, dropped, last = (
            enqueue(redis, text, job_id=job_id, rate_limit=limit)
            for text, job_id in ((LONG_TEXT, "a"), (LONG_TEXT, "b"), ("short", "c"), ("short", "d"))
        )
        eventually(lambda: len(worker.engine.rows) == 4, "the first runs")
        running.cancel()
        wait_for(waiting, "started")
        assert Batches(redis).cancel_job(dropped.id)
        assert Batches(redis).cancel_job(waiting.id)
        wait_for(last, "finished")
    assert status(dropped) == "canceled"
    assert attempts(redis, dropped) == 0


def test_a_limited_job_that_waits_for_its_retry_holds_nobody_up(
    redis: Redis, redis_url: str
) -> None:
    limit = RateLimit("one", concurrency=1)
    with busy_worker(redis, redis_url) as worker:
        retry = Retry(max=1, interval=1000)
        job = enqueue(redis, LONG_TEXT, job_timeout=1, retry=retry, rate_limit=limit)
        other = enqueue(redis, "other", rate_limit=limit)
        wait_for(other, "finished")
        assert status(job) == "scheduled"
        worker.hasten()
        let_its_time_come(redis, job)
        wait_for(job, "finished")


def test_a_limited_job_that_repeats_takes_turns_with_others(redis: Redis, redis_url: str) -> None:
    limit = RateLimit("one", concurrency=1)
    with busy_worker(redis, redis_url):
        job = enqueue(redis, "again", repeat=Repeat(times=1, interval=1000), rate_limit=limit)
        other = enqueue(redis, "other", rate_limit=limit)
        wait_for(other, "finished")
        wait_for(job, "scheduled")
        let_its_time_come(redis, job)
        wait_for(job, "finished")
    assert len(entries(redis, job)) == 2


def test_a_limited_job_that_failed_and_is_retried_by_a_person_waits_for_its_turn(
    redis: Redis, redis_url: str
) -> None:
    limit = RateLimit("one", concurrency=1)
    with busy_worker(redis, redis_url) as worker:
        failed = enqueue(redis, LONG_TEXT, job_timeout=1, rate_limit=limit)
        wait_for(failed, "failed")
        running = enqueue(redis, LONG_TEXT, rate_limit=limit)
        wait_for(running, "started")
        Batches(redis).retry_jobs([failed.id])
        wait_for(failed, "rate_limited")
        worker.hasten()
        wait_for([running, failed], "finished")


def test_one_worker_at_a_time_finds_a_slot_for_a_limited_job_whose_time_has_come(
    redis: Redis,
) -> None:
    queue = Queue(QUEUE, connection=redis, serializer="json")
    limit = RateLimit("one", concurrency=1)
    job = queue.enqueue_at(now(), tasks.CHAT, chat_body("x"), rate_limit=limit)
    first, second = (
        Broker(redis, worker=name, queues=[QUEUE], lease_seconds=60) for name in ("w1", "w2")
    )
    assert eventually(lambda: first.schedule()[1], "its time") == [(QUEUE, job.id)]
    assert second.schedule() == (0, [])
    assert 25 <= seconds_until(redis, job) <= 31, "should the first one die, another finds it one"


# Jobs that anybody may have written ---------------------------------------------------------------


def test_hashes_of_garbage_hurt_nobody_else(redis: Redis, redis_url: str) -> None:
    garbage = {
        "qsvc_v": "x",
        "qsvc_attempt": "y",
        "qsvc_deaths": "z",
        "qsvc_execution": "none",
        "qsvc_generation": "1.5",
        "qsvc_batch": "nowhere",
        "qsvc_line": "-1",
        "rate_limit_key": "no limit",
        "retries_left": "many",
        "retry_intervals": "{",
        "repeats_left": "often",
        "repeat_intervals": '["a", {}]',
        "timeout": "soon",
        "result_ttl": "long",
    }
    with busy_worker(redis, redis_url) as worker:
        broken = []
        for name, value in garbage.items():
            # At once: a worker that has claimed it meanwhile would see it change.
            with redis.pipeline() as pipeline:
                job = enqueue(redis, "x", at_front=True, pipeline=pipeline)
                pipeline.hset(keys.rq_job(job.id), name, value)
                pipeline.execute()
            broken.append(job)
        batches = Batches(redis)
        batches.create(
            "victim", endpoint=Endpoint.CHAT, queue=QUEUE, model="fake", retention_seconds=60
        )
        for line in ("x", "-1", str(2**40)):
            with redis.pipeline() as pipeline:
                job = enqueue(redis, "x", at_front=True, pipeline=pipeline)
                fields = {"qsvc_batch": "victim", "qsvc_line": line}
                pipeline.hset(keys.rq_job(job.id), mapping=fields)
                pipeline.execute()
            broken.append(job)
        redis.set(keys.rq_job("wrong-type"), "no hash")
        redis.lpush(keys.rq_queue(QUEUE), "wrong-type")
        good = enqueue(redis, "good")
        wait_for(good, "finished")
        for job in broken:
            eventually(lambda job=job: read_job(redis, job.id).has_ended, "every job ends")  # type: ignore[misc]
            assert status(job) in ("finished", "failed")
        assert worker.is_running
    assert batches.get("victim").ended == 0


def test_a_result_is_read_by_its_execution(redis: Redis) -> None:
    job = enqueue(redis, "x")
    hand = HandWorker(redis, QUEUE)
    [first] = hand.claim()
    hand.fail(first, code="first")
    Batches(redis).retry_jobs([job.id])
    [second] = hand.claim()
    hand.answer(second)
    body, error = read_execution(redis, job.id, first.execution_id)
    assert body is None
    assert error is not None
    assert error["code"] == "first"
    body, error = read_execution(redis, job.id, second.execution_id)
    assert body is not None
    assert error is None
    assert read_execution(redis, job.id, "never") == (None, None)


def test_stock_rq_reads_the_answer(redis: Redis, redis_url: str) -> None:
    with busy_worker(redis, redis_url):
        job = enqueue(redis, "hello")
        wait_for(job, "finished")
    fetched = Job.fetch(job.id, connection=redis, serializer="json")
    value: Any = fetched.return_value()
    assert text_of(value) == "hello"
    latest = fetched.latest_result()
    assert latest is not None
    assert latest.type is Result.Type.SUCCESSFUL
    assert fetched.ended_at is not None
    assert time.time() - fetched.ended_at.timestamp() < 60


# RQ's command line --------------------------------------------------------------------------------

RQ = str(Path(sys.executable).with_name("rq"))


@contextlib.contextmanager
def rq_worker(
    url: str, *arguments: str, model: str | None = "fake", step_seconds: float = 0.0
) -> Iterator[subprocess.Popen[str]]:
    """A worker that ``rq worker`` starts, with the fake engine; killed if it still runs."""
    environment = {**os.environ, **child_environment(step_seconds=step_seconds)}
    if model is not None:
        environment["QSVC_WORKER_MODEL"] = model
    command = [RQ, "worker", "-w", "tests.fake_rq_worker.FakeQsvcWorker", "-u", url, *arguments]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and what a process said, once it has ended by itself."""
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def test_rqs_own_command_runs_a_burst_of_our_worker(redis: Redis, redis_url: str) -> None:
    jobs = [enqueue(redis, f"job {i}", queue) for i, queue in enumerate((QUEUE, HIGH, "other"))]
    with rq_worker(redis_url, "--burst", "--name", "by-rq", QUEUE, HIGH) as process:
        assert ended(process)[0] == 0
    assert [status(job) for job in jobs] == ["finished", "finished", "queued"]
    assert [answer(redis, job) for job in jobs[:2]] == ["job 0", "job 1"]
    [entry] = entries(redis, jobs[0])
    assert entry[b"worker_name"] == b"by-rq"


def test_ctrl_c_makes_the_worker_of_rqs_command_give_its_jobs_back(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSVC_WORKER_GRACE_SECONDS", "0.2")
    job = enqueue(redis, LONG_TEXT)
    with rq_worker(redis_url, QUEUE, step_seconds=SLOW_STEP_SECONDS) as process:
        wait_for(job, "started")
        [worker] = Worker.all(connection=redis)
        assert (worker.queue_names(), worker.get_state()) == ([QUEUE], "busy")
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 0
    assert status(job) == "queued"
    assert redis.hget(keys.rq_job(job.id), "qsvc_execution") is None


def test_a_worker_of_rqs_command_whose_engine_fails_hands_its_jobs_back_and_ends(
    redis: Redis, redis_url: str
) -> None:
    job = enqueue(redis, "fault")
    with rq_worker(redis_url, QUEUE) as process:
        code, output = ended(process)
    assert code == 1
    assert "the device is on fire" in output
    assert status(job) == "queued"
    assert redis.hexists(keys.rq_job(job.id), "qsvc_execution"), "the next claim charges the death"
    assert Worker.all(connection=redis) == []


@pytest.mark.parametrize(
    ("arguments", "model", "said"),
    [
        (["--max-jobs", "1"], "fake", "--max-jobs"),
        (["--max-idle-time", "1"], "fake", "--max-idle-time"),
        ([], None, "QSVC_WORKER_MODEL"),
    ],
)
def test_what_rqs_command_cannot_ask_for_is_refused(
    redis_url: str, arguments: list[str], model: str | None, said: str
) -> None:
    with rq_worker(redis_url, *arguments, QUEUE, model=model) as process:
        code, output = ended(process)
    assert code == 1
    assert said in output


@pytest.mark.parametrize(
    "url",
    [
        "redis://example.org:6380/3",
        "redis://user:p%40ss%2F%25@example.org",
        "redis://:secret@[::1]:6379",
        "rediss://example.org:6379/1?ssl_ca_certs=/etc/my%20ca.pem&ssl_cert_reqs=none",
        "unix:///tmp/a%20b/server.sock?db=2",
        "unix://user:pw@/tmp/server.sock",
    ],
)
def test_the_url_of_rqs_connection_leads_to_the_same_server(url: str) -> None:
    given = Redis.from_url(url).connection_pool
    rebuilt = Redis.from_url(url_of(Redis.from_url(url))).connection_pool
    assert rebuilt.connection_class is given.connection_class
    for option in ("host", "port", "path", "username", "password", "ssl_ca_certs", "ssl_cert_reqs"):
        default = 6379 if option == "port" else None
        wanted = given.connection_kwargs.get(option, default) or None
        assert (rebuilt.connection_kwargs.get(option, default) or None) == wanted, option
    assert rebuilt.connection_kwargs.get("db", 0) == given.connection_kwargs.get("db", 0)


def test_a_connection_without_an_address_of_its_own_is_refused() -> None:
    sentinel: Any = Sentinel([("127.0.0.1", 1)])  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigurationError, match="--url"):
        url_of(sentinel.master_for("main"))
