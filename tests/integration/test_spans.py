"""Spans of real jobs, sent over HTTP to a collector of the test's own."""

from __future__ import annotations

import logging
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace import TracerProvider
from redis import Redis
from rq import Queue
from rq.job import Job

from queue_service import keys, tasks
from queue_service.collector import spans_for
from queue_service.spans import Spans
from queue_service.trace import Phase, read_traces
from tests.cli_helpers import chat_line, chat_lines, run_qsvc, write_lines
from tests.harness import (
    answer,
    chat_body,
    enqueue_chat,
    error_code,
    eventually,
    running_worker,
    worker_settings,
)
from tests.otlp_collector import Collected, Collector, running_collector

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with running_collector() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        yield collector


def has_ended(job: Job) -> bool:
    status = job.get_status(refresh=True)
    return status is not None and status.value in ("finished", "failed", "stopped")


def run_jobs(url: str, jobs: list[Job], **settings: Any) -> None:
    """Let a worker answer jobs, and end, which sends what it has to tell."""
    with running_worker(worker_settings(url, name="host-1", **settings)):
        for job in jobs:
            eventually(lambda job=job: has_ended(job), f"the end of {job.id}")  # type: ignore[misc]


def traceparent(flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-{flags}"}


def enqueue_within(redis: Redis, meta: Mapping[str, Any], **options: Any) -> Job:
    return enqueue_chat(redis, "some words", meta=dict(meta), **options)


# Trees ----------------------------------------------------------------------------------------


def test_a_line_is_one_tree_from_its_submit_to_its_result(
    tmp_path: Path, redis: Redis, redis_url: str, collector: Collector
) -> None:
    lines = [chat_line(f"line {n}", f"private words {n}", max_tokens=20) for n in range(3)]
    file = write_lines(tmp_path / "in.jsonl", lines)
    before = time.time_ns()
    done = run_qsvc("submit", file, "--alias", "fake", "--trace", "--redis", redis_url)
    assert done.returncode == 0, done.stderr
    batch_id = done.stdout.strip()
    job_ids = [keys.job_id(batch_id, line) for line in (1, 2, 3)]
    run_jobs(redis_url, [Job.fetch(job_id, redis, serializer="json") for job_id in job_ids])

    roots = collector.named("create ")
    assert [root.attributes["messaging.message.id"] for root in roots] == job_ids
    assert len({root.trace_id for root in roots}) == 3
    for root, job_id in zip(roots, job_ids, strict=True):
        assert root.parent_id == ""
        assert root.kind == "SPAN_KIND_PRODUCER"
        assert root.resource["service.name"] == "qsvc-submit"
        [job] = collector.below(root)
        assert_tells_of_one_job(job, job_id, batch_id)
        phases = collector.below(job)
        [trace] = read_traces(redis, job_id)
        told = {span.name for span in phases} | {name for name, _ in job.events}
        assert told == {event.phase for event in trace.events} >= {Phase.QUEUE_WAIT}
        assert {span.trace_id for span in [root, job, *phases]} == {root.trace_id}
        for span in phases:
            assert before <= job.began <= span.began <= span.ended <= job.ended + 1_000_000
        assert job.ended <= time.time_ns()
    # Numbers and names only: nothing that a person wrote or a model said.
    assert not any(b"private" in body for body in collector.bodies)


def assert_tells_of_one_job(job: Collected, job_id: str, batch_id: str) -> None:
    queue = keys.queue_name("fake", None)
    assert job.name == f"process {queue}"
    assert job.kind == "SPAN_KIND_CONSUMER"
    assert not job.is_error
    assert job.resource["service.name"] == "qsvc-worker"
    assert job.resource["service.instance.id"] == "host-1"
    output_tokens = job.attributes.pop("gen_ai.usage.output_tokens")
    input_tokens = job.attributes.pop("gen_ai.usage.input_tokens")
    assert output_tokens > 0 < input_tokens
    assert job.attributes == {
        "messaging.system": "rq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": queue,
        "messaging.message.id": job_id,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "qsvc.attempt": 1,
        "qsvc.outcome": "finished",
        "qsvc.batch": batch_id,
    }


def test_a_plain_job_is_below_the_span_that_its_application_was_in(
    redis: Redis, redis_url: str, collector: Collector
) -> None:
    application = TracerProvider(shutdown_on_exit=False).get_tracer("application")
    meta: dict[str, Any] = {"tenant": "a", "number": 7}
    with application.start_as_current_span("ask") as asking:
        inject(meta)
    asked = asking.get_span_context()
    job = enqueue_within(redis, meta)
    plain_pickle = Queue(keys.DEFAULT_QUEUE, connection=redis)
    pickled = plain_pickle.enqueue(tasks.CHAT, chat_body("other words"), meta=meta)
    untraced = enqueue_within(redis, {"tenant": "a"})
    run_jobs(redis_url, [job, pickled, untraced])

    spans = collector.named("process ")
    assert {span.attributes["messaging.message.id"] for span in spans} == {job.id, pickled.id}
    assert {span.trace_id for span in spans} == {f"{asked.trace_id:032x}"}
    assert {span.parent_id for span in spans} == {f"{asked.span_id:016x}"}
    # They are the application's; nobody asked for them by `qsvc trace`.
    assert not any(read_traces(redis, one.id) for one in (job, pickled, untraced))
    job.refresh()
    assert job.meta == meta


def test_the_application_decides_what_is_kept(
    redis: Redis, redis_url: str, collector: Collector
) -> None:
    job = enqueue_within(redis, traceparent(flags="00"))
    run_jobs(redis_url, [job], trace_every=1)
    assert read_traces(redis, job.id)  # by the worker's own rule
    assert not collector.spans


def test_a_job_that_nobody_began_a_tree_for_has_one_of_its_own(
    redis: Redis, redis_url: str, collector: Collector
) -> None:
    job = enqueue_chat(redis, "words")
    run_jobs(redis_url, [job], trace_every=1)
    [span] = collector.named("process ")
    assert span.parent_id == ""
    assert collector.below(span)


def test_what_failed_is_an_error(redis: Redis, redis_url: str, collector: Collector) -> None:
    plain = Queue(keys.DEFAULT_QUEUE, connection=redis, serializer="json")
    job = plain.enqueue(tasks.CHAT, chat_body("words", temperature=9), meta=traceparent())
    run_jobs(redis_url, [job])
    [span] = collector.named("process ")
    assert span.is_error
    assert (span.trace_id, span.parent_id) == (TRACE_ID, SPAN_ID)
    assert span.attributes["error.type"] == error_code(redis, job)
    assert span.attributes["qsvc.outcome"] == "failed"


# What must not matter ---------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return (pytest.fail, ("a class was looked up",))


@pytest.mark.parametrize(
    "meta",
    [
        b'{"traceparent": 7}',
        b'{"traceparent": "00-none-at-all-01"}',
        b'{"traceparent": "00-' + b"0" * 32 + b"-" + b"0" * 16 + b'-01"}',
        b'["traceparent"]',
        b"traceparent",
        b'{"traceparent": ' + b"[" * 5000,
        b'{"traceparent": "' + b"a" * 9000 + b'"}',
        pickle.dumps({"traceparent": Evil()}),
    ],
)
def test_a_job_with_a_context_that_is_none_is_answered(
    redis: Redis, redis_url: str, collector: Collector, meta: bytes
) -> None:
    job = enqueue_chat(redis, "some words")
    redis.hset(job.key, "meta", meta)
    with running_worker(worker_settings(redis_url)):
        key = f"{keys.RQ}:finished:{keys.DEFAULT_QUEUE}"
        eventually(lambda: redis.zscore(key, job.id), "the end")
        assert answer(redis, job)
    assert not collector.spans


@pytest.fixture
def deaf_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{deaf.getsockname()[1]}")
        yield


@pytest.mark.usefixtures("deaf_collector")
def test_a_collector_that_does_not_answer_holds_nothing_up(
    tmp_path: Path, redis: Redis, redis_url: str
) -> None:
    file = write_lines(tmp_path / "in.jsonl", chat_lines(600))
    done = run_qsvc("submit", file, "--alias", "none", "--trace", "--redis", redis_url)
    assert done.returncode == 0, done.stderr
    assert "600 lines" in done.stderr
    [told] = [line for line in done.stderr.splitlines() if "collector" in line]
    assert "does not answer" in told
    job = enqueue_within(redis, traceparent())
    run_jobs(redis_url, [job])
    assert answer(redis, job) == "some words"


@pytest.mark.usefixtures("deaf_collector")
def test_a_collector_that_does_not_answer_is_waited_for_once() -> None:
    spans = Spans("service")
    since = time.monotonic()
    for number in range(10_000):
        spans.create(f"job-{number}", "queue")
    # Each wait is two seconds, and 19 would be possible.
    assert time.monotonic() - since < 20
    spans.close()


def test_a_collector_that_is_not_there_is_told_of_in_one_line(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{gone.getsockname()[1]}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    file = write_lines(tmp_path / "in.jsonl", chat_lines(3))
    done = run_qsvc("submit", file, "--alias", "none", "--trace", "--redis", redis_url)
    assert done.returncode == 0, done.stderr
    [told] = [line for line in done.stderr.splitlines() if "collector" in line]
    assert "did not take them all" in told
    assert "opentelemetry" not in done.stderr


def test_many_lines_have_all_their_spans(
    tmp_path: Path, redis_url: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By itself nothing is sent before the end, and nothing waits but so many.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1024")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1024")
    file = write_lines(tmp_path / "in.jsonl", chat_lines(3000))
    done = run_qsvc("submit", file, "--alias", "fake", "--trace", "--redis", redis_url)
    assert done.returncode == 0, done.stderr
    assert len(collector.named("create ")) == 3000


def test_a_file_that_was_submitted_before_has_no_second_tree(
    tmp_path: Path, redis_url: str, collector: Collector
) -> None:
    file = write_lines(tmp_path / "in.jsonl", chat_lines(2))
    for _ in range(2):
        done = run_qsvc("submit", file, "--alias", "fake", "--trace", "--redis", redis_url)
        assert done.returncode == 0, done.stderr
    assert len(collector.named("create ")) == 2


def test_spans_are_sent_where_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert spans_for("service") is None
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    spans = spans_for("service")
    assert spans is not None
    spans.close()
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert spans_for("service") is None
    assert not caplog.messages
    with monkeypatch.context() as changed:
        changed.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        assert spans_for("service") is None
    assert "http/protobuf" in caplog.messages[-1]
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "opentelemetry.sdk.trace", None)
        changed.delitem(sys.modules, "queue_service.spans", raising=False)
        assert spans_for("service") is None
    assert "pip install 'qsvc[otel]'" in caplog.messages[-1]
    with monkeypatch.context() as changed:
        changed.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")
        assert spans_for("service") is None
    assert "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT" in caplog.messages[-1]


def test_a_process_has_the_names_that_the_environment_gives_it(
    redis: Redis, redis_url: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "answers")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=mine,site=cellar")
    job = enqueue_within(redis, traceparent())
    redis.hset(job.key, "enqueued_at", "1960-01-01T00:00:00Z")
    run_jobs(redis_url, [job])
    resource = collector.named("process ")[0].resource
    assert resource["service.name"] == "answers"
    assert resource["service.instance.id"] == "mine"
    assert resource["site"] == "cellar"
