"""A whole worker with the fake engine on a real server: commands, deaths, stops and outages."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from redis import Redis
from rq import Queue, Worker
from rq.command import send_stop_job_command
from rq.job import Job
from rq.suspension import resume, suspend

from queue_service import keys, tasks
from queue_service.connection import connect
from queue_service.errors import ConfigurationError, QsvcError
from queue_service.local_server import LocalServer
from queue_service.progress import Progress, join_elements
from queue_service.settings import RedisSettings
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
    supervised_worker,
    worker_settings,
)
from workers.rq_worker import EngineFailed
from workers.sampling import default_seed

HIGH, NORMAL, LOW = keys.queue_names("fake")


def status(job: Job) -> str | None:
    found = job.get_status(refresh=True)
    return found.value if found else None


def wait_for_status(jobs: Iterable[Job], wanted: str) -> None:
    for job in jobs:
        eventually(lambda job=job: status(job) == wanted, f"{job.id} is {wanted}")  # type: ignore[misc]


def wait_for_rows(worker: ThreadWorker, count: int) -> None:
    eventually(lambda: len(worker.engine.rows) == count, f"{count} rows in the batch")


def waiting(redis: Redis, queue: str = keys.DEFAULT_QUEUE) -> list[str]:
    ids: Any = redis.lrange(keys.rq_queue(queue), 0, -1)
    return [job_id.decode() for job_id in ids]


def matching(redis: Redis, pattern: str) -> list[bytes]:
    found: Any = redis.keys(pattern)
    return list(found)


def stream_entries(redis: Redis, job: Job) -> list[dict[bytes, bytes]]:
    entries: Any = redis.xrange(keys.stream(job.id))
    return [fields for _, fields in entries]


def streamed_text(entries: list[dict[bytes, bytes]]) -> str:
    """Return the text of a stream whose indexes rise without gap or overlap, one byte a token."""
    text = b""
    for fields in entries:
        if b"e" not in fields:
            assert int(fields[b"i"]) == len(text)
            text += fields[b"t"]
    return text.decode()


def assert_uncharged(redis: Redis, jobs: Iterable[Job]) -> None:
    for job in jobs:
        fields: Any = redis.hgetall(keys.rq_job(job.id))
        assert fields[b"status"] == b"queued"
        assert b"qsvc_execution" not in fields


# Queues -------------------------------------------------------------------------------------


def test_a_burst_ends_when_every_queue_is_empty(redis: Redis, redis_url: str) -> None:
    queues = [LOW, NORMAL, HIGH, keys.DEFAULT_QUEUE]
    jobs = [enqueue_chat(redis, f"{queue} {i}", queue) for queue in queues for i in range(10)]
    with running_worker(worker_settings(redis_url, burst=True)) as worker:
        worker.join()
    assert [answer(redis, job) for job in jobs] == [
        f"{queue} {i}" for queue in queues for i in range(10)
    ]
    assert worker.worker.num_done == len(jobs)
    assert redis.hexists(keys.rq_worker("worker"), "death")
    assert matching(redis, "rq:execution*") == []
    assert matching(redis, "qsvc:progress:*") == []


def test_queues_are_served_in_priority_order(redis: Redis, redis_url: str) -> None:
    normal = [enqueue_chat(redis, LONG_TEXT, NORMAL) for _ in range(2)]
    high = [enqueue_chat(redis, LONG_TEXT, HIGH) for _ in range(2)]
    settings = worker_settings(redis_url, slots=3, claim_ahead=0)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        wait_for_rows(worker, 3)
        assert [status(job) for job in high] == ["started", "started"]
        assert [status(job) for job in normal] == ["started", "queued"]
        worker.hasten()
        wait_for_status(normal + high, "finished")


def test_a_suspended_worker_claims_nothing_until_resumed(redis: Redis, redis_url: str) -> None:
    with running_worker(worker_settings(redis_url)) as worker:
        suspend(redis)
        eventually(lambda: worker.worker.get_state() == "suspended", "the worker says so")
        job = enqueue_chat(redis, "later")
        last = redis.hget(keys.rq_worker("worker"), "last_heartbeat")
        eventually(lambda: redis.hget(keys.rq_worker("worker"), "last_heartbeat") != last, "a beat")
        assert status(job) == "queued"
        resume(redis)
        wait_for_status([job], "finished")


# Commands -----------------------------------------------------------------------------------


def test_a_stop_command_ends_its_job_and_no_other(redis: Redis, redis_url: str) -> None:
    jobs = [enqueue_chat(redis, LONG_TEXT) for _ in range(5)]
    settings = worker_settings(redis_url)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        wait_for_rows(worker, 5)
        send_stop_job_command(redis, jobs[2].id)
        wait_for_status([jobs[2]], "stopped")
        wait_for_rows(worker, 4)
        assert error_code(redis, jobs[2]) == "stopped"
        others = [job for job in jobs if job is not jobs[2]]
        assert [status(job) for job in others] == ["started"] * 4
        worker.hasten()
        wait_for_status(others, "finished")
        assert {answer(redis, job) for job in others} == {LONG_TEXT}


def test_a_job_canceled_or_deleted_while_it_runs_leaves_the_batch(
    redis: Redis, redis_url: str
) -> None:
    canceled, deleted, kept = [enqueue_chat(redis, LONG_TEXT) for _ in range(3)]
    settings = worker_settings(redis_url)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        wait_for_rows(worker, 3)
        canceled.cancel()
        deleted.delete()
        wait_for_rows(worker, 1)
        worker.hasten()
        wait_for_status([kept], "finished")
    assert status(canceled) == "canceled"
    assert not redis.exists(keys.rq_job(deleted.id))
    for job in (canceled, deleted):
        assert not [key for key in matching(redis, f"*{job.id}*") if b"execution" in key]
        assert matching(redis, f"qsvc:progress:{job.id}:*") == []
        assert read_results(redis, job) == []


def read_results(redis: Redis, job: Job) -> list[Any]:
    entries: Any = redis.xrange(keys.rq_results(job.id))
    return list(entries)


def test_a_job_ends_at_its_own_timeout(redis: Redis, redis_url: str) -> None:
    limited = enqueue_chat(redis, LONG_TEXT, job_timeout=1)
    unlimited = enqueue_chat(redis, LONG_TEXT)
    settings = worker_settings(redis_url)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        wait_for_status([limited], "failed")
        assert error_code(redis, limited) == "timeout"
        assert status(unlimited) == "started"
        worker.hasten()
        wait_for_status([unlimited], "finished")


# Text and progress --------------------------------------------------------------------------


def test_progress_is_there_while_a_job_runs_and_gone_when_it_ends(
    redis: Redis, redis_url: str
) -> None:
    job = enqueue_chat(redis, LONG_TEXT)
    settings = worker_settings(redis_url, progress_interval_seconds=0.05)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        [key] = eventually(lambda: matching(redis, "qsvc:progress:*"), "progress")
        job_hash: Any = redis.hgetall(keys.rq_job(job.id))
        assert key.decode() == keys.progress(job.id, job_hash[b"qsvc_execution"].decode())
        elements: Any = eventually(lambda: redis.lrange(key, 0, -1), "token ids")
        progress = Progress.decode(join_elements(elements), num_top_logprobs=None)
        assert progress is not None
        assert progress.header.seed == default_seed(job.id, 0, 0)
        assert LONG_TEXT.startswith(bytes(progress.tokens[0]).decode())
        assert not redis.exists(keys.stream(job.id))
        worker.hasten()
        wait_for_status([job], "finished")
    assert matching(redis, "qsvc:progress:*") == []


def test_a_watched_jobs_stream_begins_with_the_text_so_far(redis: Redis, redis_url: str) -> None:
    job = enqueue_chat(redis, LONG_TEXT)
    settings = worker_settings(redis_url, progress_interval_seconds=0.05)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        eventually(lambda: matching(redis, "qsvc:progress:*"), "progress")
        assert stream_entries(redis, job) == []
        redis.set(keys.watch(job.id), "1", ex=30)
        eventually(lambda: len(stream_entries(redis, job)) >= 2, "two entries")
        worker.hasten()
        wait_for_status([job], "finished")
    entries = stream_entries(redis, job)
    assert streamed_text(entries) == LONG_TEXT
    assert [b"e" in fields for fields in entries].index(True) == len(entries) - 1


# Names --------------------------------------------------------------------------------------


def test_the_name_of_a_living_worker_is_refused(redis: Redis, redis_url: str) -> None:
    job = enqueue_chat(redis, LONG_TEXT)
    settings = worker_settings(redis_url, name="twin")
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as first:
        wait_for_rows(first, 1)
        second = ThreadWorker(settings)
        second.start()
        second.join()
        assert isinstance(second.failure, ConfigurationError)
        assert "twin" in str(second.failure)
        first.hasten()
        wait_for_status([job], "finished")
        assert [worker.name for worker in Worker.all(connection=redis)] == ["twin"]


def test_a_second_supervisor_does_not_bury_the_living_worker_of_its_name(
    redis: Redis, redis_url: str, fake_children: None
) -> None:
    job = enqueue_chat(redis, LONG_TEXT)
    settings = worker_settings(redis_url, name="twin")
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as first:
        wait_for_rows(first, 1)
        with supervised_worker(settings) as second:
            second.join()
            assert isinstance(second.failure, QsvcError)
            assert "twin" in str(second.failure)
        first.hasten()
        wait_for_status([job], "finished")
    assert redis.hget(keys.rq_job(job.id), "qsvc_attempt") == b"1"


def test_the_name_of_a_dead_worker_is_taken_over(redis: Redis, redis_url: str) -> None:
    long_ago = "2026-01-01T00:00:00Z"
    for field in ("birth", "last_heartbeat"):
        redis.hset(keys.rq_worker("worker"), field, long_ago)
    job = enqueue_chat(redis, "hello")
    with running_worker(worker_settings(redis_url)):
        wait_for_status([job], "finished")
        assert redis.hget(keys.rq_worker("worker"), "birth") != long_ago.encode()


def test_a_name_that_was_signed_off_is_free_at_once(redis: Redis, redis_url: str) -> None:
    settings = worker_settings(redis_url, lease_seconds=60, burst=True)
    since = time.monotonic()
    for _ in range(2):
        with running_worker(settings) as worker:
            worker.join()
    assert time.monotonic() - since < 10


def test_a_worker_told_to_stop_while_it_waits_for_a_name_leaves_it_alone(
    redis: Redis, redis_url: str
) -> None:
    redis.hset(keys.rq_worker("worker"), "last_heartbeat", "2026-01-01T00:00:00Z")
    with running_worker(worker_settings(redis_url, lease_seconds=60)) as worker:
        worker.request_stop()
        worker.join()
    assert redis.hkeys(keys.rq_worker("worker")) == [b"last_heartbeat"]


# Stops --------------------------------------------------------------------------------------


def test_a_stopping_worker_finishes_what_it_can_and_gives_back_the_rest(
    redis: Redis, redis_url: str
) -> None:
    running = [enqueue_chat(redis, text) for text in (LONG_TEXT, "y" * 30, LONG_TEXT, LONG_TEXT)]
    long = [running[0], *running[2:]]
    settings = worker_settings(redis_url, slots=4, claim_ahead=0, grace_seconds=0.8)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        wait_for_rows(worker, 4)
        behind = enqueue_chat(redis, "behind")
        worker.request_stop()
        worker.join()
    assert answer(redis, running[1]) == "y" * 30
    assert waiting(redis) == [job.id for job in [*long, behind]]
    assert_uncharged(redis, long)


def test_a_job_that_was_given_back_goes_on_where_it_stopped(redis: Redis, redis_url: str) -> None:
    queue = Queue(keys.DEFAULT_QUEUE, connection=redis, serializer="json")
    job = queue.enqueue(tasks.CHAT, {**chat_body(LONG_TEXT), "stream": True})
    settings = worker_settings(redis_url, grace_seconds=0, progress_interval_seconds=0.05)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as first:
        eventually(lambda: len(stream_entries(redis, job)) > 3, "some text")
        first.request_stop()
        first.join()
    num_before = len(stream_entries(redis, job))
    with running_worker(worker_settings(redis_url, name="second")) as second:
        wait_for_status([job], "finished")
    entries = stream_entries(redis, job)
    assert streamed_text(entries) == LONG_TEXT
    indexes = [int(fields[b"i"]) for fields in entries if b"i" in fields]
    assert indexes == sorted(set(indexes))  # every token once and in order
    assert {fields[b"a"] for fields in entries[num_before:-1]} == {b"2"}
    assert len(second.engine.batch_sizes) < len(LONG_TEXT)
    assert answer(redis, job) == LONG_TEXT


def test_a_full_worker_takes_jobs_of_the_queue_above_the_others(
    redis: Redis, redis_url: str
) -> None:
    usual = [enqueue_chat(redis, LONG_TEXT, NORMAL) for _ in range(4)]
    settings = worker_settings(redis_url, slots=4, claim_ahead=0)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        wait_for_rows(worker, 4)
        also_usual = enqueue_chat(redis, "me too", NORMAL)
        urgent = enqueue_chat(redis, "at once", HIGH)
        wait_for_status([urgent], "finished")
        assert {job.get_status(refresh=True) for job in usual} == {"started"}
        assert also_usual.get_status(refresh=True) == "queued"
        worker.hasten()
        wait_for_status([*usual, also_usual], "finished")


def test_a_second_request_to_stop_ends_the_grace(redis: Redis, redis_url: str) -> None:
    job = enqueue_chat(redis, LONG_TEXT)
    settings = worker_settings(redis_url, grace_seconds=60)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        wait_for_rows(worker, 1)
        worker.request_stop()
        worker.request_stop()
        worker.join(seconds=3)
    assert_uncharged(redis, [job])


def test_an_idle_worker_stops_within_a_second(redis: Redis, redis_url: str) -> None:
    with running_worker(worker_settings(redis_url)) as worker:
        eventually(lambda: worker.worker.get_state() == "idle", "the worker is up")
        since = time.monotonic()
        worker.request_stop()
        worker.join()
        assert time.monotonic() - since < 1


def test_a_signal_may_come_while_the_rq_thread_holds_its_wake_lock(
    redis: Redis, redis_url: str
) -> None:
    with running_worker(worker_settings(redis_url)) as worker:
        eventually(lambda: worker.worker.get_state() == "idle", "the worker is up")

        def interrupted() -> None:
            # A handler runs between two steps of the main thread, wherever that is.
            with worker.worker._results.wake._cond:  # type: ignore[attr-defined]
                worker.request_stop()

        thread = threading.Thread(target=interrupted, daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        worker.join()


# Children -----------------------------------------------------------------------------------


@pytest.fixture
def fake_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this test find the fake worker, whose engine takes its time."""
    for name, value in child_environment(step_seconds=SLOW_STEP_SECONDS).items():
        monkeypatch.setenv(name, value)


def test_a_child_in_burst_mode_ends_in_good_order(
    redis: Redis, redis_url: str, fake_children: None
) -> None:
    jobs = [enqueue_chat(redis, f"job {i}") for i in range(3)]
    with supervised_worker(worker_settings(redis_url, burst=True)) as supervised:
        supervised.join()
    assert supervised.failure is None
    assert supervised.num_starts == 1
    assert [answer(redis, job) for job in jobs] == ["job 0", "job 1", "job 2"]


def test_sigterm_makes_a_child_give_its_jobs_back_uncharged(
    redis: Redis, redis_url: str, fake_children: None
) -> None:
    jobs = [enqueue_chat(redis, LONG_TEXT) for _ in range(3)]
    with supervised_worker(worker_settings(redis_url, grace_seconds=0.2)) as supervised:
        wait_for_status(jobs, "started")
        supervised.supervisor.stop()
        supervised.join(seconds=5)
        assert supervised.failure is None
    assert waiting(redis) == [job.id for job in jobs]
    assert_uncharged(redis, jobs)


def test_a_child_whose_supervisor_is_killed_gives_its_jobs_back_and_ends(
    redis: Redis, redis_url: str
) -> None:
    jobs = [enqueue_chat(redis, LONG_TEXT) for _ in range(2)]
    settings = worker_settings(redis_url, grace_seconds=60, lease_seconds=60)
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "tests.harness"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **child_environment(step_seconds=SLOW_STEP_SECONDS)},
        text=True,
    )
    assert supervisor.stdin is not None
    try:
        supervisor.stdin.write(settings.to_json() + "\n")
        supervisor.stdin.flush()
        wait_for_status(jobs, "started")
    finally:
        supervisor.kill()
    # The child has the same standard error, so this waits for its end too.
    supervisor.communicate(timeout=15)
    assert waiting(redis) == [job.id for job in jobs]
    assert_uncharged(redis, jobs)


@pytest.mark.parametrize(("poison", "code"), [("fault", "exit=70"), ("crash", "exit=-9")])
def test_a_job_that_kills_its_worker_each_time_fails_alone(
    redis: Redis,
    redis_url: str,
    fake_children: None,
    caplog: pytest.LogCaptureFixture,
    poison: str,
    code: str,
) -> None:
    before = [enqueue_chat(redis, f"before {i}") for i in range(3)]
    # With so long a lease, only the supervisor can have handed the job back.
    settings = worker_settings(redis_url, crash_retries=1, lease_seconds=60)
    with supervised_worker(settings) as supervised:
        wait_for_status(before, "finished")
        job = enqueue_chat(redis, poison)
        wait_for_status([job], "failed")
        assert error_code(redis, job) == "worker_lost"
        after = enqueue_chat(redis, "after")
        wait_for_status([after], "finished")
        assert supervised.num_starts == 3
    assert caplog.text.count(code) == 2
    assert [answer(redis, job) for job in before] == [f"before {i}" for i in range(3)]


def test_an_engine_fault_leaves_the_worker_listed_with_what_it_held(
    redis: Redis, redis_url: str
) -> None:
    worker = ThreadWorker(worker_settings(redis_url))
    worker.start()
    job = enqueue_chat(redis, "fault")
    worker.join()
    assert isinstance(worker.failure, EngineFailed)
    assert status(job) == "started"
    assert redis.scard(f"{keys.rq_worker('worker')}:executions") == 1


# Outages ------------------------------------------------------------------------------------


def wait_for_ears(redis: Redis) -> None:
    """Wait until the worker hears commands; what is sent to it before is lost."""
    channel = "rq:pubsub:worker"
    eventually(lambda: dict(redis.pubsub_numsub(channel))[channel.encode()], "a listener")


def test_a_restarted_server_costs_no_job_and_no_token(
    make_server: Callable[..., LocalServer], kill_server: Callable[[LocalServer], None]
) -> None:
    server = make_server()
    url = server.start()
    with connect(RedisSettings.load(url=url)) as redis:
        jobs = [enqueue_chat(redis, LONG_TEXT + str(i)) for i in range(6)]
        for job in jobs[:3]:
            redis.set(keys.watch(job.id), "1", ex=30)
        settings = worker_settings(url, redis={"connect_timeout_seconds": 0.5})
        with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
            eventually(lambda: len(matching(redis, "qsvc:progress:*")) == 6, "progress of all")
            kill_server(server)
            worker.hasten()
            wait_for_rows(worker, 0)
            server.start()
            wait_for_status(jobs, "finished")
            for i, job in enumerate(jobs):
                assert answer(redis, job) == LONG_TEXT + str(i)
                assert len(read_results(redis, job)) == 1
                assert redis.hget(keys.rq_job(job.id), "qsvc_attempt") == b"1"
            for i, job in enumerate(jobs[:3]):
                entries = stream_entries(redis, job)
                assert streamed_text(entries) == LONG_TEXT + str(i)
                assert entries[-1][b"e"] == b"done"
            worker.engine.step_seconds = SLOW_STEP_SECONDS
            wait_for_ears(redis)
            stopped = enqueue_chat(redis, LONG_TEXT)
            wait_for_rows(worker, 1)
            send_stop_job_command(redis, stopped.id)
            wait_for_status([stopped], "stopped")


def test_a_worker_can_be_stopped_while_the_server_is_away(
    make_server: Callable[..., LocalServer], kill_server: Callable[[LocalServer], None]
) -> None:
    server = make_server()
    url = server.start()
    with connect(RedisSettings.load(url=url)) as redis:
        enqueue_chat(redis, LONG_TEXT)
        settings = worker_settings(url, grace_seconds=0.3)
        with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
            wait_for_rows(worker, 1)
            kill_server(server)
            worker.request_stop()
            worker.join()


def test_a_long_outage_is_no_stalled_engine(
    make_server: Callable[..., LocalServer],
    kill_server: Callable[[LocalServer], None],
    fake_children: None,
) -> None:
    server = make_server()
    url = server.start()
    with connect(RedisSettings.load(url=url)) as redis:
        job = enqueue_chat(redis, LONG_TEXT[:60])
        redis.set(keys.watch(job.id), "1", ex=30)
        settings = worker_settings(url, engine_stall_seconds=2)
        with supervised_worker(settings) as supervised:
            eventually(lambda: stream_entries(redis, job), "its text streams")
            kill_server(server)
            down_until = time.monotonic() + 4.2
            eventually(lambda: time.monotonic() > down_until, "the outage lasts")
            server.start()
            wait_for_status([job], "finished")
            assert supervised.num_starts == 1
        assert redis.hget(keys.rq_job(job.id), "qsvc_attempt") == b"1"


def test_commands_are_heard_again_after_a_server_that_hung(
    make_server: Callable[..., LocalServer], kill_server: Callable[[LocalServer], None]
) -> None:
    server = make_server()
    url = server.start()
    socket_path = url.removeprefix("unix://")
    with connect(RedisSettings.load(url=url)) as redis:
        settings = worker_settings(url, redis={"socket_timeout_seconds": 0.2})
        with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
            wait_for_ears(redis)
            job = enqueue_chat(redis, LONG_TEXT)
            wait_for_rows(worker, 1)
            kill_server(server)
            os.unlink(socket_path)
            with socket.socket(socket.AF_UNIX) as deaf:
                deaf.bind(socket_path)
                deaf.listen()
                hung_until = time.monotonic() + 1.0
                eventually(lambda: time.monotonic() > hung_until, "the server hangs")
            os.unlink(socket_path)
            server.start()
            wait_for_ears(redis)
            send_stop_job_command(redis, job.id)
            wait_for_status([job], "stopped")
