"""RQ's own operations through our classes, on jobs that stock RQ or an attacker wrote."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import Callback, Queue, SimpleWorker, Webhook
from rq.exceptions import DeserializationError, NoSuchJobError
from rq.executions import prepare_execution
from rq.job import Job, JobStatus
from rq.registry import CanceledJobRegistry, FailedJobRegistry, StartedJobRegistry, clean_registries
from rq.results import Result

from queue_service import tasks
from queue_service.errors import ConfigurationError, RequestError
from queue_service.rqcompat import SafeJob, SafeQueue, SafeResult, SafeWorker

BODY = {"messages": [{"role": "user", "content": "a secret"}], "seed": 1}
QUEUE = "qsvc:test"


class Attack:
    """Makes a file when pickle reads it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.trace}",)


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Path]:
    """The file that an attack makes; the test fails if one did."""
    path = tmp_path / "attacked"
    yield path
    assert not path.exists()


def enqueue(redis: Redis, serializer: str = "json", *arguments: Any, **options: Any) -> str:
    """Enqueue as an application with plain RQ does; return the job's id."""
    queue = Queue(QUEUE, connection=redis, serializer=serializer)
    job: Job = queue.enqueue(tasks.CHAT, *(arguments or (BODY,)), **options)
    return job.id


def field(redis: Redis, job_id: str, name: str) -> Any:
    return redis.hget(Job.key_for(job_id), name)


def store_result(redis: Redis, job_id: str, **fields: Any) -> None:
    entry: dict[Any, Any] = {"type": 1} | fields
    redis.xadd(f"rq:results:{job_id}", entry)


def abandon(redis: Redis, job_id: str) -> None:
    """Leave the job as a worker does that died long ago."""
    redis.hset(Job.key_for(job_id), "status", JobStatus.STARTED)
    redis.zadd(f"rq:wip:{QUEUE}", {f"{job_id}:execution": 1})


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_job_of_stock_rq_is_read(redis: Redis, serializer: str) -> None:
    job = SafeJob.fetch(enqueue(redis, serializer, meta={"a": 1}), redis, serializer="pickle")
    assert (job.func_name, list(job.args), job.kwargs) == (tasks.CHAT, [BODY], {})
    assert job.meta == job.get_meta() == {"a": 1}
    assert job.instance is None


def test_the_function_is_never_imported(redis: Redis) -> None:
    job_id = Queue(QUEUE, connection=redis, serializer="json").enqueue("os.getcwd").id
    job = SafeJob.fetch(job_id, redis)
    with pytest.raises(ConfigurationError, match="qsvc worker"):
        job.perform()


def test_a_pickled_object_is_not_read(redis: Redis, trace: Path) -> None:
    job = SafeJob.fetch(enqueue(redis, "pickle", Attack(trace)), redis)
    with pytest.raises(DeserializationError, match="not plain data"):
        _ = job.args
    assert job.get_call_string() == "unreadable payload"


def test_pickled_meta_that_is_not_plain_is_kept_unread(redis: Redis, trace: Path) -> None:
    job_id = enqueue(redis)
    meta = pickle.dumps(Attack(trace))
    redis.hset(Job.key_for(job_id), mapping={"meta": meta, "result": meta})
    job = SafeJob.fetch(job_id, redis)
    with pytest.raises(RequestError):
        job.get_meta()
    job = SafeJob.fetch(job_id, redis)
    job.save()
    assert field(redis, job_id, "meta") == meta


def test_meta_that_is_no_dict_is_kept_unread(redis: Redis) -> None:
    job_id = enqueue(redis)
    redis.hset(Job.key_for(job_id), "meta", "[1]")
    SafeJob.fetch(job_id, redis).save()
    assert field(redis, job_id, "meta") == b"[1]"


def test_a_result_that_is_not_plain_is_refused(redis: Redis, trace: Path) -> None:
    job_id = enqueue(redis)
    store_result(redis, job_id, return_value=b64encode(pickle.dumps(Attack(trace))))
    job = SafeJob.fetch(job_id, redis)
    for read in (job.latest_result, job.results, job.return_value):
        with pytest.raises(RequestError, match="not plain data"):
            read()
    with pytest.raises(RequestError):
        SafeResult.fetch_latest(job, serializer="pickle")


@pytest.mark.parametrize(
    "fields",
    [
        {"return_value": "é"},
        {"return_value": "QQ"},
        {"type": "x"},
        {"exc_string": b64encode(b"nothing")},
    ],
)
def test_a_broken_result_is_refused(redis: Redis, fields: dict[str, Any]) -> None:
    job_id = enqueue(redis)
    store_result(redis, job_id, **fields)
    with pytest.raises(RequestError):
        SafeJob.fetch(job_id, redis).latest_result()


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_what_we_write_is_read_by_who_enqueued(redis: Redis, serializer: str) -> None:
    job_id = enqueue(redis, serializer)
    job = SafeJob.fetch(job_id, redis)
    job.meta["note"] = "ours"
    job.save()
    Result.create(job, Result.Type.SUCCESSFUL, ttl=60, return_value={"text": "é"})
    read = Job.fetch(job_id, redis, serializer=serializer)
    assert read.meta == {"note": "ours"}
    assert read.return_value() == {"text": "é"}
    assert list(read.args) == [BODY]
    assert SafeJob.fetch(job_id, redis).return_value() == {"text": "é"}


def test_a_decompression_bomb_stays_packed(redis: Redis) -> None:
    job_id = enqueue(redis)
    bomb = zlib.compress(b" " * 20_000_000)
    redis.hset(Job.key_for(job_id), mapping={"data": bomb, "exc_info": bomb})
    job = SafeJob.fetch(job_id, redis)
    with pytest.raises(DeserializationError, match="too large"):
        _ = job.func_name
    job.save()
    assert field(redis, job_id, "data") == bomb


def test_a_long_traceback_is_cut(redis: Redis) -> None:
    job_id = enqueue(redis)
    store_result(redis, job_id, type=2, exc_string=b64encode(zlib.compress(b"x" * 20_000_000)))
    result = SafeJob.fetch(job_id, redis).latest_result()
    assert result is not None
    assert result.type is Result.Type.FAILED
    assert result.exc_string == "x" * (256 * 1024)


def test_a_failure_of_a_stock_worker_is_read(redis: Redis) -> None:
    job_id = enqueue(redis)
    SimpleWorker([Queue(QUEUE, connection=redis, serializer="json")], serializer="json").work(
        burst=True, logging_level="CRITICAL"
    )
    job = SafeJob.fetch(job_id, redis)
    result = job.latest_result()
    assert result is not None
    assert "qsvc worker" in (result.exc_string or "")
    assert [stored.type for stored in job.results()] == [Result.Type.FAILED]


def test_a_broken_hash_counts_as_no_job(redis: Redis) -> None:
    job_id = enqueue(redis)
    redis.hset(Job.key_for(job_id), "status", "nonsense")
    with pytest.raises(NoSuchJobError, match="broken"):
        SafeJob.fetch(job_id, redis)
    redis.delete(Job.key_for(job_id))
    redis.hset(Job.key_for(job_id), "last_heartbeat", "")
    with pytest.raises(NoSuchJobError):
        SafeJob.fetch(job_id, redis)


def test_fields_decoded_before_are_restored_too(redis: Redis) -> None:
    job_id = enqueue(redis)
    raw: Any = redis.hgetall(Job.key_for(job_id))
    fields = {name.decode(): value for name, value in raw.items()}
    job = SafeJob(job_id, redis)
    job.restore(fields)
    assert list(job.args) == [BODY]


def test_cleaning_up_after_a_dead_worker_runs_nothing(redis: Redis, trace: Path) -> None:
    attack = Callback("os.system")
    broken = enqueue(redis)
    abandon(redis, broken)
    redis.hset(Job.key_for(broken), "timeout", "nonsense")
    attacked = enqueue(redis, "pickle", Attack(trace), on_failure=attack)
    child = enqueue(redis, "pickle", Attack(trace), depends_on=attacked)
    for job_id in (attacked, child):
        redis.hset(Job.key_for(job_id), "meta", pickle.dumps(Attack(trace)))
    abandon(redis, attacked)
    clean_registries(SafeQueue(QUEUE, redis))
    queue = SafeQueue(QUEUE, redis)
    assert queue.failed_job_registry.get_job_ids() == [attacked]
    assert queue.started_job_registry.count == 0


def announce(job: Job, connection: Redis, *_: object) -> None:
    connection.rpush("called", job.id)


def test_a_callback_runs_only_when_it_is_allowed(redis: Redis) -> None:
    class Trusting(SafeJob):
        allowed_callbacks = frozenset({f"{__name__}.announce"})

    job_id = enqueue(
        redis,
        on_success=Callback(announce),
        on_failure=Callback(announce),
        on_stopped=Callback("os.system"),
    )
    refused, trusted = SafeJob.fetch(job_id, redis), Trusting.fetch(job_id, redis)
    assert refused.success_callback is None
    assert refused.failure_callback is None
    assert refused.stopped_callback is None
    assert trusted.stopped_callback is None
    assert trusted.failure_callback is not None
    assert trusted.success_callback is not None
    trusted.success_callback(trusted, redis, None)
    assert redis.lrange("called", 0, -1) == [job_id.encode()]


def test_webhooks_are_not_sent(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        job_id = enqueue(redis, webhooks=[Webhook(url, "failed")])
        SafeJob.fetch(job_id, redis).send_webhooks(JobStatus.FAILED, exc_string="")
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert "webhooks were not sent" in caplog.text
    assert url not in caplog.text


def test_a_queue_of_ours_enqueues_json_without_the_prompt_in_sight(redis: Redis) -> None:
    queue = SafeQueue(QUEUE, redis, serializer="pickle", job_class="os.system")
    job = queue.enqueue(tasks.chat, BODY, meta={"a": 1})
    assert isinstance(job, SafeJob)
    read = Job.fetch(job.id, redis, serializer="json")
    assert list(read.args) == [BODY]
    assert read.description == f"{tasks.CHAT}(…)"
    with pytest.raises(RequestError, match="not plain data"):
        queue.enqueue(tasks.chat, {"a": {1, 2}})


def test_a_queue_of_ours_may_have_a_safe_job_class(redis: Redis) -> None:
    class Ours(SafeJob):
        pass

    queue = SafeQueue(QUEUE, redis, job_class=Ours)
    assert type(queue.enqueue(tasks.chat, BODY)) is Ours
    assert SafeQueue(QUEUE, redis, job_class=Job).job_class is SafeJob
    assert [type(queue) for queue in SafeQueue.all(redis, job_class=Job)] == [SafeQueue]


def test_dependents_wait_and_follow(redis: Redis) -> None:
    queue = SafeQueue(QUEUE, redis)
    parent = queue.enqueue(tasks.chat, BODY)
    child = queue.enqueue(tasks.chat, BODY, depends_on=parent)
    assert child.get_status() == JobStatus.DEFERRED
    assert SafeJob.fetch(child.id, redis).dependency == parent
    parent.set_status(JobStatus.FINISHED)
    queue.enqueue_dependents(parent)
    assert child.get_status() == JobStatus.QUEUED


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_failed_job_is_requeued_as_it_was(redis: Redis, serializer: str) -> None:
    job_id = enqueue(redis, serializer, meta={"a": 1})
    data = field(redis, job_id, "data")
    abandon(redis, job_id)
    clean_registries(SafeQueue(QUEUE, redis))
    redis.delete(f"rq:queue:{QUEUE}")
    assert SafeJob.fetch(job_id, redis).requeue().get_status() == JobStatus.QUEUED
    assert redis.lrange(f"rq:queue:{QUEUE}", 0, -1) == [job_id.encode()]
    assert zlib.decompress(field(redis, job_id, "data")) == zlib.decompress(data)
    assert Job.fetch(job_id, redis, serializer=serializer).meta == {"a": 1}


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_queued_job_is_canceled_and_deleted(redis: Redis, serializer: str) -> None:
    job_id = enqueue(redis, serializer)
    job = SafeJob.fetch(job_id, redis)
    job.cancel()
    assert CanceledJobRegistry(QUEUE, redis, job_class=SafeJob).get_job_ids() == [job_id]
    job.delete()
    assert not Job.exists(job_id, redis)


@pytest.mark.parametrize("end", [Job.cancel, Job.delete])
def test_a_started_job_is_ended_also_after_its_execution_expired(
    redis: Redis, end: Callable[[Job], object]
) -> None:
    job_id = enqueue(redis)
    worker = SimpleWorker([Queue(QUEUE, connection=redis)], serializer="json")
    execution = prepare_execution(worker, SafeJob.fetch(job_id, redis))
    redis.hset(Job.key_for(job_id), "status", JobStatus.STARTED)
    assert [e.worker_name for e in SafeJob.fetch(job_id, redis).get_executions()] == [worker.name]
    redis.delete(execution.key)
    end(SafeJob.fetch(job_id, redis))
    assert StartedJobRegistry(QUEUE, redis).get_job_ids(cleanup=False) == []


def test_a_worker_with_a_pickled_job_is_listed(redis: Redis, trace: Path) -> None:
    job_id = enqueue(redis, "pickle")
    redis.hset(Job.key_for(job_id), "meta", pickle.dumps(Attack(trace)))
    worker = SimpleWorker([Queue(QUEUE, connection=redis)], connection=redis)
    worker.register_birth()  # type: ignore[no-untyped-call]
    prepare_execution(worker, SafeJob.fetch(job_id, redis))
    (listed,) = SafeWorker.all(redis, job_class=Job, queue_class=Queue, serializer="pickle")
    job = listed.get_current_job()
    assert isinstance(job, SafeJob)
    assert (job.id, list(job.args)) == (job_id, [BODY])


def test_rq_info_with_our_classes_runs_nothing(redis: Redis, redis_url: str, trace: Path) -> None:
    job_id = enqueue(redis, "pickle", Attack(trace), on_failure=Callback("os.system"))
    redis.hset(Job.key_for(job_id), "meta", pickle.dumps(Attack(trace)))
    abandon(redis, job_id)
    environment = os.environ | {
        "RQ_JOB_CLASS": "queue_service.rqcompat.SafeJob",
        "RQ_QUEUE_CLASS": "queue_service.rqcompat.SafeQueue",
    }
    run = subprocess.run(
        [sys.executable, "-m", "rq.cli", "info", "-u", redis_url],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert QUEUE in run.stdout
    assert FailedJobRegistry(QUEUE, redis, job_class=SafeJob).get_job_ids() == [job_id]
