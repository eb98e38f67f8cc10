"""The Redis users of docs/acl.md may do all that qsvc and plain RQ need, and no more."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError
from rq import Callback, Queue, Repeat, Worker
from rq.command import send_stop_job_command
from rq.group import Group
from rq.job import Job
from rq.rate_limit import RateLimit

from queue_service import keys, tasks
from queue_service.batch_file import BatchFile
from queue_service.batches import Batches, Status
from queue_service.broker import bury_worker
from queue_service.client import stream_text, wait
from queue_service.connection import Level, connect, inspect_server
from queue_service.dead_letter import DeadLetter
from queue_service.follow import follow
from queue_service.output import BatchOutput, InputOrder, OutputFile
from queue_service.results import BatchReader, read_job
from queue_service.settings import RedisSettings
from queue_service.streams import text_of
from queue_service.submission import SubmitOptions, submit_file, wait_for_disk
from queue_service.sweeper import Sweeper
from tests.cli_helpers import HandWorker, chat_lines, read_output, run_qsvc, write_lines
from tests.harness import (
    LONG_TEXT,
    SLOW_STEP_SECONDS,
    chat_body,
    enqueue_chat,
    eventually,
    running_worker,
    worker_settings,
)
from tests.rq_callbacks import NOTES

QUEUE = keys.DEFAULT_QUEUE
RULES = (Path(__file__).parents[2] / "docs" / "acl.md").read_text(encoding="utf-8")
PASSWORD = "a-secret"


def send(connection: Any, *words: str) -> Any:
    return connection.execute_command(*words)


def rule_of(user: str) -> list[str]:
    """The ACL command of a user as the documentation has it, with a password of ours."""
    found = re.search(rf"```redis\n(ACL SETUSER {user} .*?)```", RULES, re.DOTALL)
    assert found is not None
    return found[1].replace("CHANGE-ME", PASSWORD).split()


@pytest.fixture
def url_for(redis: Redis, redis_url: str) -> Iterator[Callable[[str], str]]:
    """Make a user of the documentation and return the URL that it connects with."""
    made: list[str] = []

    def make(user: str) -> str:
        send(redis, *rule_of(user))
        made.append(user)
        return redis_url.replace("unix://", f"unix://{user}:{PASSWORD}@")

    yield make
    for user in made:
        redis.acl_deluser(user)


@pytest.fixture
def producer(url_for: Callable[[str], str]) -> Iterator[Redis]:
    with connect(RedisSettings.load(url=url_for("qsvc-producer"))) as connection:
        yield connection


@pytest.fixture
def worker_url(url_for: Callable[[str], str]) -> str:
    return url_for("qsvc-worker")


def submit(connection: Redis, num_lines: int, *, start: int = 1) -> str:
    text = "\n".join(json.dumps(line) for line in chat_lines(num_lines, start=start))
    file = BatchFile(io.BytesIO(text.encode()), "lines")
    options = SubmitOptions(queue=QUEUE, model="m", key="a key")
    return submit_file(connection, file, options).batch.id


# Producers ------------------------------------------------------------------------------------


def test_a_producer_enqueues_with_every_feature_of_plain_rq(producer: Redis, redis: Redis) -> None:
    queue = Queue(QUEUE, connection=producer, serializer="json")
    parent = enqueue_chat(producer, "parent", meta={"a": 1})
    child = enqueue_chat(producer, "child", depends_on=parent)
    repeated = enqueue_chat(producer, "again", repeat=Repeat(times=1))
    unique = enqueue_chat(producer, "once", job_id="once", unique=True)
    later = queue.enqueue_in(timedelta(hours=1), tasks.CHAT, chat_body("later"))
    limited = [enqueue_chat(producer, "x", rate_limit=RateLimit("k", 1)) for _ in range(2)]
    group = Group.create(connection=producer, name="g")
    grouped = group.enqueue_many(queue, [Queue.prepare_data(tasks.CHAT, (chat_body("g"),))])
    many = queue.enqueue_many([Queue.prepare_data(tasks.CHAT, (chat_body("m"),))] * 2)
    assert queue.count == 7
    hand = HandWorker(redis, QUEUE)
    claimed = hand.claim(7)
    hand.answer(*claimed)
    assert text_of(read_job(producer, parent.id).body or {}) == "parent"
    value: Any = Job.fetch(unique.id, connection=producer, serializer="json").return_value()
    assert text_of(value) == "once"
    assert [job.id for job in group.get_jobs()] == [grouped[0].id]
    assert child.get_status() == "deferred"
    later.cancel()
    limited[1].cancel()
    limited[0].delete()
    many[0].delete()
    assert repeated.get_status() == "queued"
    [running] = hand.claim()
    send_stop_job_command(producer, running.job_id)
    hand.fail(running)
    repeated.requeue()
    [running] = hand.claim()
    Job.fetch(running.job_id, connection=producer, serializer="json").cancel()
    assert hand.answer(running) == ["lost"]


def test_a_producer_submits_follows_and_manages_batches(
    producer: Redis, redis: Redis, tmp_path: Path
) -> None:
    batch_id = submit(producer, 4)
    assert wait_for_disk(producer)
    hand, batches = HandWorker(redis, QUEUE), Batches(producer)
    first, second, third, _ = hand.claim()
    hand.stream(first, 1, {"i": 0, "a": 1, "t": "prompt 1"})
    hand.answer(first, second)
    hand.fail(third)
    assert [batch.id for batch in batches.newest(5)] == [batch_id]
    assert list(stream_text(producer, first.job_id)) == ["prompt 1"]
    assert wait(producer, first.job_id).status == "finished"
    assert batches.cancel_job(f"{batch_id}-4")
    output = OutputFile(tmp_path / "out.jsonl")
    order = InputOrder(producer, batch_id)
    written = BatchOutput(BatchReader(producer, batch_id), order, output)
    written.resume()
    batch = follow(
        producer, batch_id, written, on_update=lambda *_: None, should_stop=lambda: False
    )
    output.close()
    assert batch.status is Status.COMPLETED
    assert len(read_output(tmp_path / "out.jsonl")) == 4
    assert [entry.code for entry in DeadLetter(producer).entries(queue=QUEUE)] == ["internal_error"]
    assert batches.retry_failed(batch_id) == 2
    assert batches.cancel(batch_id) == 2
    batches.delete(batch_id)
    assert batches.newest(5) == []


DENIED_TO_ALL = [
    "FLUSHALL",
    "FLUSHDB",
    "CONFIG SET maxmemory 1",
    "CONFIG GET requirepass",
    "KEYS *",
    "SHUTDOWN NOSAVE",
    "ACL LIST",
    "ACL SETUSER qsvc-worker +@all",
    "SCRIPT FLUSH",
    "CLIENT KILL TYPE normal",
    "REPLICAOF 127.0.0.1 1",
    "MONITOR",
    "SAVE",
    "SWAPDB 0 1",
    "GET somebody-elses",
    "SET somebody-elses 1",
    "PUBLISH somebody-elses hello",
]
DENIED_TO_PRODUCERS = [
    "HSET rq:worker:w state busy",
    "SADD rq:workers rq:worker:w",
    "ZADD qsvc:aftercare:qsvc:default 1 job:execution:finished",
    "HSET qsvc:model:fake model another",
    "SET rq:suspended 1",
    "SCAN 0",
    "LPOP rq:queue:qsvc:default",
]


def test_the_commands_for_producers_run_as_one(
    url_for: Callable[[str], str], redis: Redis, tmp_path: Path
) -> None:
    url = url_for("qsvc-producer")
    lines = write_lines(tmp_path / "lines.jsonl", chat_lines(4))

    def qsvc(*words: str | Path, code: int = 0) -> str:
        done = run_qsvc(*words, env={"QSVC_REDIS_URL": url})
        assert (done.returncode, "permission" in done.stderr) == (code, False), done.stderr
        return done.stdout

    batch_id = qsvc("submit", lines, "--model", "m", "--alias", "default").split()[-1]
    first, second, third, _ = HandWorker(redis, QUEUE).claim()
    hand = HandWorker(redis, QUEUE)
    hand.answer(first)
    hand.fail(second)
    assert "prompt 1" in qsvc("tail", first.job_id)
    qsvc("cancel", third.job_id)
    qsvc("cancel", batch_id)
    assert batch_id in qsvc("batches")
    assert qsvc("status", batch_id, code=0)
    qsvc("results", batch_id, "-o", tmp_path / "out.jsonl", code=1)
    qsvc("retry", batch_id)
    qsvc("delete", batch_id, "--yes")
    assert not redis.exists(keys.batch(batch_id))


@pytest.mark.parametrize("command", [*DENIED_TO_ALL, *DENIED_TO_PRODUCERS])
def test_a_producer_may_not(producer: Redis, command: str) -> None:
    with pytest.raises(NoPermissionError):
        send(producer, *command.split())


def test_a_producers_script_may_not_do_more_than_the_producer(producer: Redis) -> None:
    script = producer.script_load("return redis.call('FLUSHALL')")
    with pytest.raises(ResponseError, match="ACL"):
        producer.evalsha(script, 0)


# Workers --------------------------------------------------------------------------------------


def test_a_worker_does_all_its_work(
    redis: Redis, worker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    # A callback is a client as the worker is; what it writes needs a rule of its own.
    send(redis, "ACL", "SETUSER", "qsvc-worker", f"~{NOTES}")
    callback = "tests.rq_callbacks.note_success"
    parent = enqueue_chat(redis, "parent", on_success=Callback(callback))
    child = enqueue_chat(redis, "child", depends_on=parent)
    limited = [enqueue_chat(redis, "x", rate_limit=RateLimit("k", 1)) for _ in range(2)]
    queue = Queue(QUEUE, connection=redis, serializer="json")
    later = queue.enqueue_in(timedelta(seconds=1), tasks.CHAT, chat_body("later"))
    batch_id = submit(redis, 5)
    stopped, watched = enqueue_chat(redis, LONG_TEXT), enqueue_chat(redis, LONG_TEXT)
    redis.set(keys.watch(watched.id), "1", ex=30)
    settings = worker_settings(worker_url, callbacks=[callback], progress_interval_seconds=0.05)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        eventually(lambda: all(job.is_finished for job in [child, *limited, later]), "plain jobs")
        eventually(lambda: Batches(redis).get(batch_id).status is Status.COMPLETED, "the batch")
        eventually(lambda: redis.xlen(keys.stream(watched.id)), "text in the stream")
        eventually(lambda: list(redis.scan_iter("qsvc:progress:*")), "progress")
        send_stop_job_command(redis, stopped.id)
        eventually(lambda: stopped.is_stopped, "the stop command")
        [listed] = Worker.all(connection=redis)
        assert listed.get_state() == "busy"
        # Long enough up to look after leases and batches.
        reaped = keys.reap_lock("qsvc:fake:high")
        eventually(lambda: redis.exists(reaped), "the worker reaps")
        worker.hasten()
        eventually(lambda: watched.is_finished, "the last one")
    assert redis.llen(NOTES) == 1
    assert "NOPERM" not in caplog.text


def test_a_dead_worker_is_buried_and_batches_are_swept_by_a_worker(
    redis: Redis, worker_url: str
) -> None:
    job = enqueue_chat(redis, "x")
    batch_id = submit(redis, 2)
    Queue(keys.lane(QUEUE, batch_id), connection=redis).empty()  # type: ignore[no-untyped-call]
    HandWorker(redis, QUEUE, name="dead").claim()
    with connect(RedisSettings.load(url=worker_url)) as connection:
        assert bury_worker(connection, "dead") == [job.id]
        sweeper = Sweeper(connection)
        assert (sweeper.sweep_now(), sweeper.sweep_now()) == (0, 2)
        assert [entry.job_id for entry in DeadLetter(connection).entries()] == []
        findings = inspect_server(connection)
    assert not [finding for finding in findings if finding.level is Level.REFUSED]


def test_the_commands_that_look_around_run_as_a_worker(worker_url: str) -> None:
    seen = run_qsvc("top", "--once", "--interval", "0.1", "--redis", worker_url)
    assert (seen.returncode, seen.stderr) == (0, "")


@pytest.mark.parametrize("command", DENIED_TO_ALL)
def test_a_worker_may_not(worker_url: str, command: str) -> None:
    settings = RedisSettings.load(url=worker_url)
    with connect(settings) as connection, pytest.raises(NoPermissionError):
        send(connection, *command.split())
