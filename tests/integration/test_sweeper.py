"""Stock RQ tools end lines behind our back; the batch still ends, and each line says how it did."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.job import Job
from rq.registry import StartedJobRegistry

from queue_service import keys
from queue_service.batch_file import BatchFile
from queue_service.batches import Batch, Batches, Status
from queue_service.dead_letter import DeadLetter
from queue_service.follow import follow
from queue_service.results import BatchReader
from queue_service.submission import SubmitOptions, submit_file
from queue_service.sweeper import Sweeper
from tests.cli_helpers import HandWorker, chat_lines, run_qsvc
from tests.harness import eventually, running_worker, worker_settings

QUEUE = "qsvc:fake"


def submit(redis: Redis, num_lines: int, **options: Any) -> str:
    text = "\n".join(json.dumps(line) for line in chat_lines(num_lines))
    file = BatchFile(io.BytesIO(text.encode()), "lines")
    return submit_file(redis, file, SubmitOptions(queue=QUEUE, model="m", **options)).batch.id


def job_of(redis: Redis, batch_id: str, line: int) -> Job:
    """The job of a line as an application that only knows RQ has it."""
    return Job.fetch(keys.job_id(batch_id, line), connection=redis, serializer="json")


def sweep(redis: Redis) -> int:
    """Look twice: what was squared is what did not come on in between."""
    sweeper = Sweeper(redis)
    assert sweeper.sweep_now() == 0
    return sweeper.sweep_now()


def ended(redis: Redis, batch_id: str) -> Batch:
    """The batch, which must have ended with counts that add up."""
    batch = Batches(redis).get(batch_id)
    assert batch.status.is_final
    assert batch.ended == batch.total
    return batch


def counts(batch: Batch) -> tuple[int, int, int]:
    return batch.completed, batch.failed, batch.cancelled


def codes(redis: Redis, batch_id: str) -> list[str | None]:
    """The error code of each output line, None for an answer; every line must have ended."""
    lines = BatchReader(redis, batch_id).read(list(Batches(redis).all_lines(batch_id)))
    assert None not in lines
    return [(line or {})["error"] and (line or {})["error"]["code"] for line in lines]


def done_lines(redis: Redis, batch_id: str) -> list[int]:
    """The lines that followers were told of."""
    entries: Any = redis.xrange(keys.batch_done(batch_id))
    return sorted(int(fields[b"l"]) for _, fields in entries)


# Cancelled, deleted, emptied, failed ----------------------------------------------------------


def cancel(redis: Redis, job: Job) -> None:
    job.cancel()


def delete(redis: Redis, job: Job) -> None:
    job.delete()


@pytest.mark.parametrize(
    ("act", "code", "counted"),
    [(cancel, "batch_cancelled", (2, 0, 2)), (delete, "job_deleted", (2, 2, 0))],
)
def test_lines_that_stock_rq_ended_while_they_waited_or_ran_are_counted(
    redis: Redis, act: Callable[[Redis, Job], None], code: str, counted: tuple[int, int, int]
) -> None:
    batch_id = submit(redis, 4)
    hand = HandWorker(redis, QUEUE)
    first, second = hand.claim(2)
    act(redis, job_of(redis, batch_id, 2))  # running
    act(redis, job_of(redis, batch_id, 3))  # waiting
    assert hand.answer(first) == ["ok"]
    assert hand.answer(second) != ["ok"]
    assert hand.answer_all() == 1
    assert Batches(redis).get(batch_id).status is Status.IN_PROGRESS
    assert sweep(redis) == 2
    batch = ended(redis, batch_id)
    assert (batch.status, counts(batch)) == (Status.COMPLETED, counted)
    assert codes(redis, batch_id) == [None, code, code, None]
    assert done_lines(redis, batch_id) == [1, 2, 3, 4]
    assert sweep(redis) == 0
    assert Batches(redis).get(batch_id) == batch


def test_a_deleted_answer_is_counted_once_and_its_line_says_so(redis: Redis) -> None:
    batch_id = submit(redis, 3)
    hand = HandWorker(redis, QUEUE)
    first, *others = hand.claim()
    hand.answer(first)
    job_of(redis, batch_id, 1).delete()
    assert sweep(redis) == 0
    assert Batches(redis).get(batch_id).ended == 1
    hand.answer(*others)
    assert counts(ended(redis, batch_id)) == (3, 0, 0)
    assert codes(redis, batch_id) == ["result_expired", None, None]


def test_an_emptied_lane_ends_its_batch(redis: Redis) -> None:
    batch_id = submit(redis, 5)
    hand = HandWorker(redis, QUEUE)
    hand.answer(*hand.claim(2))
    assert Queue(keys.lane(QUEUE, batch_id), connection=redis).empty() == 3  # type: ignore[no-untyped-call]
    assert hand.claim() == []
    assert sweep(redis) == 3
    assert counts(ended(redis, batch_id)) == (2, 3, 0)
    assert codes(redis, batch_id) == [None, None] + ["job_deleted"] * 3


def test_a_line_that_a_stock_cleanup_failed_is_counted_as_failed(redis: Redis) -> None:
    batch_id = submit(redis, 2)
    hand = HandWorker(redis, QUEUE)
    lost, kept = hand.claim()
    # A worker of ours fills the budget up; a stock one would have spent it.
    redis.hset(keys.rq_job(lost.job_id), "retries_left", 0)
    redis.zadd(keys.rq_started(QUEUE), {f"{lost.job_id}:{lost.execution_id}": 1})
    StartedJobRegistry(QUEUE, connection=redis, serializer="json").cleanup()
    assert job_of(redis, batch_id, 1).get_status() == "failed"
    hand.answer(kept)
    assert hand.answer(lost) == ["lost"]
    assert sweep(redis) == 1
    assert counts(ended(redis, batch_id)) == (1, 1, 0)
    assert codes(redis, batch_id) == ["failed", None]
    [line, _] = BatchReader(redis, batch_id).read(list(Batches(redis).all_lines(batch_id)))
    assert line is not None
    assert "AbandonedJobError" in line["error"]["message"]


def test_a_line_that_a_stock_cleanup_failed_may_be_purged_before_it_was_counted(
    redis: Redis,
) -> None:
    batch_id = submit(redis, 1)
    [lost] = HandWorker(redis, QUEUE).claim()
    redis.hset(keys.rq_job(lost.job_id), "retries_left", 0)
    redis.zadd(keys.rq_started(QUEUE), {f"{lost.job_id}:{lost.execution_id}": 1})
    StartedJobRegistry(QUEUE, connection=redis, serializer="json").cleanup()
    assert DeadLetter(redis).purge([lost.job_id]) == 1
    assert counts(ended(redis, batch_id)) == (0, 1, 0)
    assert codes(redis, batch_id) == ["failed"]


def test_a_line_that_stock_rq_requeued_is_counted_anew(redis: Redis) -> None:
    batch_id = submit(redis, 2)
    hand = HandWorker(redis, QUEUE)
    first, second = hand.claim()
    hand.fail(first)
    hand.answer(second)
    assert counts(ended(redis, batch_id)) == (1, 1, 0)
    job_of(redis, batch_id, 1).requeue()
    [again] = hand.claim()
    batch = Batches(redis).get(batch_id)
    assert (batch.status, counts(batch)) == (Status.IN_PROGRESS, (1, 0, 0))
    assert redis.ttl(keys.batch(batch_id)) == -1
    hand.answer(again)
    assert counts(ended(redis, batch_id)) == (2, 0, 0)
    assert codes(redis, batch_id) == [None, None]


def test_a_batch_that_comes_on_is_left_alone(redis: Redis) -> None:
    batch_id = submit(redis, 5)
    job_of(redis, batch_id, 3).cancel()
    sweeper, hand = Sweeper(redis), HandWorker(redis, QUEUE)
    for _ in range(4):
        assert sweeper.sweep_now() == 0
        hand.answer(*hand.claim(1))
    assert sweeper.sweep_now() == 0
    assert sweeper.sweep_now() == 1
    assert counts(ended(redis, batch_id)) == (4, 0, 1)


def test_a_sweep_takes_its_turn_by_the_clock(redis: Redis) -> None:
    batch_id = submit(redis, 1)
    job_of(redis, batch_id, 1).delete()
    clock = [100.0]
    sweeper = Sweeper(redis, interval_seconds=15, clock=lambda: clock[0])
    squared = []
    for clock[0] in (114.0, 115.0, 129.0, 130.0):
        squared.append(sweeper.sweep())
    assert squared == [0, 0, 0, 1]


def test_a_large_batch_is_squared_to_its_last_line(redis: Redis) -> None:
    batch_id = submit(redis, 1200)
    Queue(keys.lane(QUEUE, batch_id), connection=redis).empty()  # type: ignore[no-untyped-call]
    assert sweep(redis) == 1200
    assert counts(ended(redis, batch_id)) == (0, 1200, 0)


# Cancel and expiry ----------------------------------------------------------------------------


def test_a_cancel_that_was_killed_half_way_is_completed(redis: Redis) -> None:
    batch_id = submit(redis, 4)
    hand = HandWorker(redis, QUEUE)
    answered, running = hand.claim(2)
    hand.answer(answered)
    # What a cancel does first; then it lost its power.
    fields: Any = {"status": "cancelling", "ending": "cancelled", "submitted": "1"}
    redis.hset(keys.batch(batch_id), mapping=fields)
    redis.delete(keys.rq_queue(keys.lane(QUEUE, batch_id)))
    assert sweep(redis) == 0
    batch = ended(redis, batch_id)
    assert (batch.status, counts(batch)) == (Status.CANCELLED, (1, 0, 3))
    assert hand.answer(running) == ["canceled"]
    assert codes(redis, batch_id) == [None] + ["batch_cancelled"] * 3


def test_a_batch_whose_time_is_over_expires_and_keeps_what_was_answered(redis: Redis) -> None:
    batch_id = submit(redis, 5, expires_in_seconds=3600)
    hand = HandWorker(redis, QUEUE)
    answered, failed, running = hand.claim(3)
    hand.answer(answered)
    hand.fail(failed)
    Sweeper(redis).sweep_now()
    assert Batches(redis).get(batch_id).status is Status.IN_PROGRESS
    redis.hset(keys.batch(batch_id), "expires_at", 1)
    Sweeper(redis).sweep_now()
    batch = ended(redis, batch_id)
    assert (batch.status, counts(batch)) == (Status.EXPIRED, (1, 1, 3))
    assert batch.timestamps["expired_at"] >= batch.timestamps["cancelling_at"]
    assert hand.answer(running) == ["canceled"]
    assert hand.claim() == []
    assert codes(redis, batch_id) == [None, "internal_error", *["batch_expired"] * 3]


def test_a_worker_claims_nothing_whose_time_was_over_when_it_started(
    redis: Redis, redis_url: str
) -> None:
    batch_id = submit(redis, 3, expires_in_seconds=3600)
    redis.hset(keys.batch(batch_id), "expires_at", 1)
    with running_worker(worker_settings(redis_url)):
        eventually(lambda: Batches(redis).get(batch_id).status is Status.EXPIRED, "it expires")
    assert codes(redis, batch_id) == ["batch_expired"] * 3


def test_whoever_follows_a_batch_or_asks_for_it_needs_no_worker_for_it_to_expire(
    redis: Redis, redis_url: str
) -> None:
    followed, asked = (submit(redis, n, expires_in_seconds=3600) for n in (3, 4))
    for batch_id in (followed, asked):
        redis.hset(keys.batch(batch_id), "expires_at", 1)
    batch = follow(redis, followed, None, on_update=lambda now: None, should_stop=lambda: False)
    assert (batch.status, batch.cancelled) == (Status.EXPIRED, 3)
    shown = run_qsvc("status", asked, "--redis", redis_url)
    assert "expired  4 of 4" in shown.stdout
    assert "given up" not in shown.stdout


def test_status_says_until_when_a_batch_has_time(redis: Redis, redis_url: str) -> None:
    batch_id = submit(redis, 1, expires_in_seconds=3600)
    shown = run_qsvc("status", batch_id, "--redis", redis_url)
    due = datetime.fromtimestamp(Batches(redis).get(batch_id).expires_at or 0).astimezone()
    assert f"{due:%H:%M:%S %z} is given up" in shown.stdout


def test_an_expired_batch_with_a_deleted_line_ends_too(redis: Redis) -> None:
    batch_id = submit(redis, 3, expires_in_seconds=3600)
    job_of(redis, batch_id, 2).delete()
    redis.hset(keys.batch(batch_id), "expires_at", 1)
    assert sweep(redis) == 1
    batch = ended(redis, batch_id)
    assert (batch.status, counts(batch)) == (Status.EXPIRED, (0, 1, 2))
    assert codes(redis, batch_id) == ["batch_expired", "job_deleted", "batch_expired"]


def test_the_retry_of_an_expired_batch_is_not_expired_at_once(redis: Redis) -> None:
    batch_id = submit(redis, 2, expires_in_seconds=3600)
    redis.hset(keys.batch(batch_id), "expires_at", 1)
    Sweeper(redis).sweep_now()
    assert Batches(redis).retry_failed(batch_id) == 2
    sweep(redis)
    batch = Batches(redis).get(batch_id)
    assert (batch.status, batch.expires_at) == (Status.IN_PROGRESS, None)
    assert HandWorker(redis, QUEUE).answer_all() == 2
    assert ended(redis, batch_id).status is Status.COMPLETED
    assert codes(redis, batch_id) == [None, None]


def test_a_worker_expires_a_batch_and_drops_its_running_lines(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.rq_worker.Sweeper", lambda c: Sweeper(c, interval_seconds=0.1))
    batch_id = submit(redis, 6, expires_in_seconds=3600)
    settings = worker_settings(redis_url, slots=3, claim_ahead=0)
    with running_worker(settings, step_seconds=1.0) as worker:
        eventually(lambda: len(worker.engine.rows) == 3, "lines run")
        redis.hset(keys.batch(batch_id), "expires_at", 1)
        eventually(lambda: Batches(redis).get(batch_id).status is Status.EXPIRED, "it expires")
        worker.hasten()
        eventually(lambda: not worker.engine.rows, "its lines stop")
    assert codes(redis, batch_id) == ["batch_expired"] * 6
