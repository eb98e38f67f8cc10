"""Batches as objects: what they show, and what a cancel does to queued, running and ended lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq.job import Job

from queue_service import keys
from queue_service.batch_file import open_batch
from queue_service.batches import Batches, Status
from queue_service.dead_letter import DeadLetter
from queue_service.errors import BatchNotFound, JobNotFound
from queue_service.output import CompletionOrder
from queue_service.results import BatchReader
from queue_service.rqcompat import SafeJob
from queue_service.scripts import Scripts
from queue_service.settings import RetentionSettings
from queue_service.submission import SubmitOptions, submit_file
from queue_service.sweeper import Sweeper
from tests.cli_helpers import HandWorker, chat_lines, content_of, wait_until, write_lines

QUEUE = "qsvc:tests"

# What an OpenAI client finds in a batch.
BATCH_FIELDS = {
    "id", "object", "endpoint", "status", "errors", "created_at", "in_progress_at",
    "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at",
    "expires_at", "request_counts", "usage", "metadata",
}  # fmt: skip


def submit(redis: Redis, tmp_path: Path, lines: list[Any], **retention: int) -> str:
    options = SubmitOptions(
        queue=QUEUE, model="a-model", retention=RetentionSettings.load(**retention)
    )
    with open_batch(write_lines(tmp_path / "in.jsonl", lines)) as file:
        return submit_file(redis, file, options).batch.id


def ended_lines_of(redis: Redis, batch_id: str) -> list[dict[str, Any]]:
    lines = BatchReader(redis, batch_id).read(list(Batches(redis).all_lines(batch_id)))
    assert None not in lines
    return [line for line in lines if line is not None]


def test_an_unknown_batch_is_an_error_with_its_name(redis: Redis) -> None:
    with pytest.raises(BatchNotFound, match="batch_nowhere"):
        Batches(redis).get("batch_nowhere")
    with pytest.raises(BatchNotFound, match="batch_nowhere"):
        Batches(redis).cancel("batch_nowhere")


def test_a_batch_shows_every_field_of_the_api(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(2))
    shown = Batches(redis).get(batch_id).to_object()
    assert shown.keys() >= BATCH_FIELDS
    assert shown["object"] == "batch"
    assert shown["status"] == "in_progress"
    assert shown["endpoint"] == "/v1/chat/completions"
    assert shown["created_at"] > 1_700_000_000
    assert shown["completed_at"] is None
    assert shown["request_counts"]["total"] == 2
    json.dumps(shown)


def test_counts_and_tokens_add_up_to_the_end_of_the_batch(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, [*chat_lines(4), "{"])
    worker = HandWorker(redis, QUEUE)
    first, second, third, fourth = worker.claim()
    worker.answer(first, second)
    worker.fail(third)
    batch = Batches(redis).get(batch_id)
    assert (batch.completed, batch.failed, batch.ended, batch.total) == (2, 2, 4, 5)
    assert batch.status is Status.IN_PROGRESS
    worker.answer(fourth)
    shown = Batches(redis).get(batch_id).to_object()
    assert shown["status"] == "completed"
    assert shown["completed_at"] >= shown["created_at"]
    counts = shown["request_counts"]
    assert (counts["total"], counts["completed"], counts["failed"]) == (5, 3, 2)
    assert shown["usage"]["input_tokens"] == 15
    assert shown["usage"]["input_tokens_details"]["cached_tokens"] == 6
    assert shown["usage"]["output_tokens"] == 9
    assert shown["usage"]["total_tokens"] == 24


def test_an_outcome_sent_twice_counts_once(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(2))
    worker = HandWorker(redis, QUEUE)
    first, _ = worker.claim()
    assert worker.answer(first) == worker.answer(first) == ["ok"]
    assert worker.fail(first) == ["ok"], "the first writer wins"
    batch = Batches(redis).get(batch_id)
    assert (batch.completed, batch.failed, batch.prompt_tokens) == (1, 0, 5)
    assert redis.xlen(keys.batch_done(batch_id)) == 1


def test_lines_are_read_in_pages_in_input_order(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(1201))
    batches = Batches(redis)
    page = batches.lines(batch_id, start=2, count=3)
    assert [(ref.line, ref.custom_id) for ref in page] == [(3, "c3"), (4, "c4"), (5, "c5")]
    assert batches.lines(batch_id, start=1201, count=10) == []
    assert [ref.line for ref in batches.all_lines(batch_id)] == list(range(1, 1202))


def test_an_ended_batch_is_kept_for_as_long_as_was_asked(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(1), result_seconds=1000)
    batch_keys = [keys.batch(batch_id), keys.batch_lines(batch_id)]
    assert [redis.ttl(key) for key in batch_keys] == [-1, -1]
    HandWorker(redis, QUEUE).answer_all()
    batch_keys.append(keys.batch_done(batch_id))
    assert all(0 < redis.ttl(key) <= 1000 for key in batch_keys)


def test_the_error_of_a_line_whose_job_is_gone_is_kept_no_longer_than_its_batch(
    redis: Redis, tmp_path: Path
) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(2), result_seconds=1000)
    worker = HandWorker(redis, QUEUE)
    failed, deleted = worker.claim()
    worker.fail(failed)
    Job.fetch(deleted.job_id, connection=redis, serializer="json").delete()
    Sweeper(redis).square(batch_id, list(Batches(redis).all_lines(batch_id)))
    assert Batches(redis).get(batch_id).status is Status.COMPLETED
    assert 0 < redis.ttl(keys.batch_errors(batch_id)) <= 1000
    redis.delete(keys.batch_errors(batch_id))
    assert DeadLetter(redis).purge([failed.job_id]) == 1
    assert 0 < redis.ttl(keys.batch_errors(batch_id)) <= 1000


def test_a_cancel_ends_queued_lines_at_once_and_keeps_finished_work(
    redis: Redis, tmp_path: Path
) -> None:
    batch_id = submit(redis, tmp_path, [*chat_lines(6), "{"])
    worker = HandWorker(redis, QUEUE)
    done, failed, *running = worker.claim(4)
    worker.answer(done)
    worker.fail(failed)
    assert Batches(redis).cancel(batch_id) == 4

    batch = Batches(redis).get(batch_id)
    assert batch.status is Status.CANCELLED
    assert (batch.completed, batch.failed, batch.cancelled, batch.total) == (1, 2, 4, 7)
    assert batch.timestamps["cancelling_at"] <= batch.timestamps["cancelled_at"]
    assert worker.claim() == [], "a cancelled line was still in the queue"

    assert worker.answer(*running) == ["canceled", "canceled"], "a late result was accepted"
    first, second, *others, refused = ended_lines_of(redis, batch_id)
    assert content_of(first) == "prompt 1"
    assert second["error"]["code"] == "internal_error"
    assert [line["error"]["code"] for line in others] == ["batch_cancelled"] * 4
    assert [line["response"] for line in others] == [None] * 4
    assert refused["error"]["code"] == "invalid_json_line"
    assert Batches(redis).get(batch_id) == batch, "a late result changed the counts"


def test_a_cancel_tells_the_worker_that_runs_the_lines(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(3))
    HandWorker(redis, QUEUE, name="busy").claim(2)
    untyped: Any = redis
    with untyped.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe("rq:pubsub:busy")
        channel.get_message(timeout=5)
        Batches(redis).cancel(batch_id)
        message = wait_until(lambda: channel.get_message(timeout=0.1), "a message")
    assert json.loads(message["data"]) == {"command": "qsvc-beat"}


def test_a_cancel_that_was_killed_leaves_no_line_that_nobody_runs(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(3))
    worker = HandWorker(redis, QUEUE)
    worker.fail(*worker.claim(1))
    with monkeypatch.context() as patch:
        patch.setattr(Scripts, "call", _killed_before("cancel"))
        with pytest.raises(InterruptedError):
            Batches(redis).cancel(batch_id)
    assert Batches(redis).retry_failed(batch_id) == 1
    assert worker.answer_all() == 3
    assert Batches(redis).get(batch_id).status is Status.COMPLETED


def _killed_before(script: str) -> Callable[..., Any]:
    call = Scripts.call

    def call_or_die(scripts: Scripts, name: str, *args: Any) -> Any:
        if name == script:
            raise InterruptedError
        return call(scripts, name, *args)

    return call_or_die


def test_a_cancel_of_a_batch_that_is_deleted_meanwhile_leaves_nothing(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(1))
    batches, before = Batches(redis), Batches(redis).get(batch_id)
    Batches(redis).delete(batch_id)
    monkeypatch.setattr(batches, "get", lambda _: before)
    assert batches.cancel(batch_id) == 0
    assert not redis.exists(keys.batch(batch_id))


def test_a_batch_that_ends_while_it_is_cancelled_stays_completed(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(1))
    batches, before = Batches(redis), Batches(redis).get(batch_id)
    HandWorker(redis, QUEUE).answer_all()
    with monkeypatch.context() as patch:
        patch.setattr(batches, "get", lambda _: before)
        assert batches.cancel(batch_id) == 0
    assert batches.get(batch_id).status is Status.COMPLETED


def test_a_full_server_takes_a_delete_that_makes_room(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(3))
    redis.config_set("maxmemory", "1mb")
    try:
        Batches(redis).delete(batch_id)
    finally:
        redis.config_set("maxmemory", "0")
    assert list(redis.scan_iter(f"*{batch_id}*")) == []


def test_the_jobs_of_many_small_batches_get_their_time_to_expire(
    redis: Redis, tmp_path: Path
) -> None:
    job_ids = [
        f"{submit(redis, tmp_path, chat_lines(1, start=i), result_seconds=1000)}-1"
        for i in range(10)
    ]
    HandWorker(redis, QUEUE).answer_all()
    Sweeper(redis).sweep_now()
    assert all(0 < redis.ttl(keys.rq_job(job_id)) <= 1000 for job_id in job_ids)
    assert redis.zcard(keys.closing()) == 0


def test_a_line_that_ran_again_is_written_once_in_completion_order(
    redis: Redis, tmp_path: Path
) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(4))
    worker = HandWorker(redis, QUEUE)
    retried, requeued, *others = worker.claim()
    worker.fail(retried, requeued)
    Batches(redis).retry_jobs([retried.job_id])
    SafeJob.fetch(requeued.job_id, connection=redis).requeue()
    worker.answer(*others)
    worker.answer_all()
    refs = CompletionOrder(redis, batch_id).peek(10)
    assert sorted(ref.line for ref in refs) == [1, 2, 3, 4]


def test_a_second_cancel_changes_nothing(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(3))
    batches = Batches(redis)
    assert batches.cancel(batch_id) == 3
    batch = batches.get(batch_id)
    assert batches.cancel(batch_id) == 0
    assert batches.get(batch_id) == batch


def test_a_completed_batch_cannot_be_cancelled(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(2))
    HandWorker(redis, QUEUE).answer_all()
    assert Batches(redis).cancel(batch_id) == 0
    assert Batches(redis).get(batch_id).status is Status.COMPLETED


def test_many_lines_are_cancelled_to_the_last(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(1203))
    assert Batches(redis).cancel(batch_id) == 1203
    batch = Batches(redis).get(batch_id)
    assert (batch.status, batch.cancelled) == (Status.CANCELLED, 1203)


def test_one_line_can_be_cancelled_alone(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(3))
    batches = Batches(redis)
    assert batches.cancel_job(f"{batch_id}-2")
    assert not batches.cancel_job(f"{batch_id}-2")
    assert HandWorker(redis, QUEUE).answer_all() == 2
    batch = batches.get(batch_id)
    assert batch.status is Status.COMPLETED
    assert (batch.completed, batch.cancelled) == (2, 1)
    assert not batches.cancel_job(f"{batch_id}-1")
    codes = [line["error"] and line["error"]["code"] for line in ended_lines_of(redis, batch_id)]
    assert codes == [None, "batch_cancelled", None]


def test_an_unknown_job_cannot_be_cancelled(redis: Redis) -> None:
    with pytest.raises(JobNotFound, match="nothing"):
        Batches(redis).cancel_job("nothing")


def test_plain_rq_sees_a_cancelled_line_as_cancelled(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(1))
    Batches(redis).cancel(batch_id)
    job = Job.fetch(f"{batch_id}-1", connection=redis, serializer="json")
    assert job.get_status() == "canceled"
    assert redis.zscore(f"rq:canceled:{QUEUE}", job.id) is not None


def test_a_cancelled_line_with_a_stream_ends_it(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(1))
    stream = keys.stream(f"{batch_id}-1")
    redis.xadd(stream, {"i": 0, "a": 1, "t": "so far"})
    Batches(redis).cancel(batch_id)
    entries: Any = redis.xrange(stream)
    assert entries[-1][1] == {b"e": b"cancelled"}
