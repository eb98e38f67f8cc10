"""An application that knows rq and redis only: it enqueues, reads results and tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from rq import Queue, Worker
from rq.job import Job
from rq.results import Result

from tests.harness import (
    LONG_TEXT,
    SLOW_STEP_SECONDS,
    eventually,
    running_worker,
    worker_settings,
)

CHAT = "queue_service.tasks.chat"
QUEUE = "qsvc:default"


@pytest.fixture
def connection(redis_url: str) -> Iterator[redis_py.Redis]:
    """A connection as an application makes it, with redis-py's own defaults."""
    with redis_py.Redis.from_url(redis_url) as connection:
        yield connection


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def enqueue(
    connection: redis_py.Redis, request: dict[str, Any], serializer: str | None = "json"
) -> Job:
    queue = Queue(QUEUE, connection=connection, serializer=serializer)
    return queue.enqueue(CHAT, request)


def ended(job: Job) -> Result:
    """Return a job's latest result once it has ended."""
    result = eventually(lambda: job.latest_result(timeout=1), "the job's result")
    assert result is not None
    return result


def read_stream(connection: redis_py.Redis, job: Job) -> list[dict[bytes, bytes]]:
    """Read a job's tokens as they come, by plain XREAD, up to the last entry."""
    entries: list[tuple[bytes, dict[bytes, bytes]]] = []

    def read() -> Any:
        last_id = entries[-1][0] if entries else "0"
        return connection.xread({f"qsvc:stream:{job.id}": last_id}, block=1000)

    while not (entries and b"e" in entries[-1][1]):
        entries += eventually(read, "an entry of the stream")[0][1]
    return [fields for _, fields in entries]


@pytest.mark.parametrize("serializer", ["json", None])
def test_an_application_gets_the_answer_and_its_tokens(
    connection: redis_py.Redis, redis_url: str, serializer: str | None
) -> None:
    job = enqueue(connection, body("to be, or not to be", stream=True), serializer)
    with running_worker(worker_settings(redis_url), step_seconds=SLOW_STEP_SECONDS):
        entries = read_stream(connection, job)
        result = ended(job)
    value: Any = job.return_value()
    assert result.type == Result.Type.SUCCESSFUL
    assert result.return_value == value
    assert value["choices"][0]["message"]["content"] == "to be, or not to be"
    assert value["usage"]["completion_tokens"] == 19
    assert value["id"] == f"chatcmpl-{job.id}"
    *texts, end = entries
    assert len(texts) > 1
    assert b"".join(fields[b"t"] for fields in texts) == b"to be, or not to be"
    first = 0
    for fields in texts:
        assert (int(fields[b"i"]), fields[b"a"]) == (first, b"1")
        first += len(fields[b"t"])
    assert end == {b"e": b"done", b"f": b"stop"}
    assert connection.ttl(f"qsvc:stream:{job.id}") > 0


def test_the_prompt_does_not_stay_in_the_jobs_description(
    connection: redis_py.Redis, redis_url: str
) -> None:
    job = enqueue(connection, body("a secret"))
    assert "a secret" in str(job.description)
    with running_worker(worker_settings(redis_url)):
        ended(job)
    fetched = Job.fetch(job.id, connection=connection, serializer="json")
    assert fetched.description == "qsvc request"


@pytest.mark.parametrize("serializer", ["json", None])
def test_a_refused_body_fails_the_job_with_a_reason_for_people_and_programs(
    connection: redis_py.Redis, redis_url: str, serializer: str | None
) -> None:
    job = enqueue(connection, body("hello", temprature=1, stream=True), serializer)
    with running_worker(worker_settings(redis_url)):
        result = ended(job)
        entries = read_stream(connection, job)
    assert job.get_status() == "failed"
    assert result.type == Result.Type.FAILED
    assert "temprature" in str(result.exc_string)
    results: Any = connection.xrange(f"rq:results:{job.id}")
    [(_, fields)] = results
    error = json.loads(fields[b"qsvc_error"])
    assert error["type"] == "invalid_request_error"
    assert error["status_code"] == 400
    assert "temprature" in error["message"]
    [end] = entries
    assert (end[b"e"], end[b"message"].decode()) == (b"error", error["message"])
    assert job.id in Queue(QUEUE, connection=connection).failed_job_registry.get_job_ids()


def test_a_canceled_jobs_stream_ends(connection: redis_py.Redis, redis_url: str) -> None:
    job = enqueue(connection, body(LONG_TEXT, stream=True))
    with running_worker(worker_settings(redis_url), step_seconds=SLOW_STEP_SECONDS):
        eventually(lambda: connection.xlen(f"qsvc:stream:{job.id}"), "the first text")
        job.cancel()
        *_, end = read_stream(connection, job)
    assert end == {b"e": b"cancelled"}


def test_a_function_that_is_not_ours_is_not_run(connection: redis_py.Redis, redis_url: str) -> None:
    queue = Queue(QUEUE, connection=connection)
    job = queue.enqueue("os.getcwd")
    with running_worker(worker_settings(redis_url)):
        result = ended(job)
    assert result.type == Result.Type.FAILED
    assert "os.getcwd" in str(result.exc_string)


def test_rqs_own_tools_see_worker_queues_and_counts(
    connection: redis_py.Redis, redis_url: str
) -> None:
    enqueue(connection, body("done"))
    settings = worker_settings(redis_url, name="seen", slots=2, claim_ahead=0)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        registry = Queue(QUEUE, connection=connection).finished_job_registry
        eventually(lambda: registry.count == 1, "one finished job")
        for _ in range(5):
            enqueue(connection, body(LONG_TEXT))
        eventually(lambda: len(worker.engine.rows) == 2, "two running jobs")
        [seen] = Worker.all(connection=connection)
        assert (seen.name, seen.get_state()) == ("seen", "busy")
        assert QUEUE in seen.queue_names()
        assert seen.successful_job_count == 1
        lines = rq_info(redis_url)
        assert lines[0].startswith(QUEUE)
        assert lines[0].endswith(" 3, 2 executing, 1 finished, 0 failed")
        [line] = [line for line in lines if line.startswith("seen ")]
        assert " busy " in line
        assert "jobs: 1 finished, 0 failed" in line


def rq_info(url: str) -> list[str]:
    program = Path(sys.executable).with_name("rq")
    run = subprocess.run(
        [program, "info", "-u", url], capture_output=True, text=True, check=True, timeout=30
    )
    return run.stdout.splitlines()
