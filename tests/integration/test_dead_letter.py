"""The dead letter: failed jobs are listed, shown, retried and purged; their batches stay whole."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis
from rq.job import Job
from rq.registry import FailedJobRegistry

from cli.main import main
from queue_service import keys
from queue_service.batch_file import BatchFile
from queue_service.batches import Batch, Batches, Status
from queue_service.dead_letter import DeadLetter
from queue_service.errors import JobNotFound
from queue_service.payload import Encoding, encode_value
from queue_service.results import BatchReader
from queue_service.submission import SubmitOptions, submit_file
from tests.cli_helpers import HandWorker, chat_lines, content_of, run_qsvc
from tests.harness import enqueue_chat

QUEUE, OTHER = "qsvc:fake", "qsvc:other"

Qsvc = Callable[..., tuple[int, str]]


@pytest.fixture
def qsvc(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Qsvc:
    """The qsvc command in this process: returns its exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["qsvc", *arguments, "--redis", redis_url])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0), capsys.readouterr().out

    return run


@pytest.fixture
def hand(redis: Redis) -> HandWorker:
    return HandWorker(redis, QUEUE)


def submit(redis: Redis, num_lines: int) -> str:
    lines = "\n".join([*(json.dumps(line) for line in chat_lines(num_lines)), "{"])
    file = BatchFile(io.BytesIO(lines.encode()), "lines")
    return submit_file(redis, file, SubmitOptions(queue=QUEUE, model="m")).batch.id


def fail_plain(redis: Redis, *codes: str, queue: str = QUEUE) -> list[Job]:
    """Plain jobs that failed with these codes."""
    jobs = [enqueue_chat(redis, "my secret", queue) for _ in codes]
    hand = HandWorker(redis, queue)
    for claimed, code in zip(hand.claim(), codes, strict=True):
        hand.fail(claimed, code=code)
    return jobs


def fail_lines(redis: Redis, hand: HandWorker, num_lines: int, *failing: int) -> str:
    """A batch whose lines are answered, but for some, and one refused line behind them."""
    batch_id = submit(redis, num_lines)
    for line, claimed in enumerate(hand.claim(num_lines), start=1):
        if line in failing:
            hand.fail(claimed, code="made_up")
        else:
            hand.answer(claimed)
    return batch_id


def outputs(redis: Redis, batch_id: str) -> list[dict[str, Any]]:
    lines = BatchReader(redis, batch_id).read(list(Batches(redis).all_lines(batch_id)))
    assert None not in lines
    return [line for line in lines if line is not None]


def codes_of(lines: list[dict[str, Any]]) -> list[str | None]:
    return [line["error"] and line["error"]["code"] for line in lines]


def counts(batch: Batch) -> tuple[int, int, int, int]:
    return batch.total, batch.completed, batch.failed, batch.cancelled


# Looking --------------------------------------------------------------------------------------


def test_the_list_names_code_and_reason_and_no_prompt(redis: Redis, qsvc: Qsvc) -> None:
    first, second = fail_plain(redis, "timeout", "worker_lost")
    [third] = fail_plain(redis, "timeout", queue=OTHER)
    code, shown = qsvc("dead", "list")
    assert code == 0
    assert "secret" not in shown
    assert f"{first.id}  {QUEUE}  timeout: it failed: timeout" in shown.splitlines()
    assert len(shown.splitlines()) == 3

    def listed(*filters: str) -> set[str]:
        lines = qsvc("dead", "list", "--json", *filters)[1].splitlines()
        return {json.loads(line)["job_id"] for line in lines}

    assert listed() == {first.id, second.id, third.id}
    assert listed("--queue", QUEUE) == {first.id, second.id}
    assert listed("--code", "timeout") == {first.id, third.id}
    assert listed("--code", "timeout", "--queue", OTHER) == {third.id}
    assert listed("--code", "no such") == set()


def test_one_failed_job_is_shown_with_its_batch_and_attempts(
    redis: Redis, qsvc: Qsvc, hand: HandWorker
) -> None:
    batch_id = fail_lines(redis, hand, 3, 2)
    code, shown = qsvc("dead", "show", f"{batch_id}-2")
    assert code == 0
    entry = json.loads(shown)
    assert entry.pop("failed_at").startswith("20")
    assert entry == {
        "job_id": f"{batch_id}-2",
        "queue": QUEUE,
        "status": "failed",
        "code": "made_up",
        "message": "it failed: made_up",
        "batch_id": batch_id,
        "line": 2,
        "attempts": 1,
    }


def test_a_job_that_did_not_fail_is_not_in_the_dead_letter(
    redis: Redis, qsvc: Qsvc, hand: HandWorker
) -> None:
    batch_id = fail_lines(redis, hand, 2, 2)
    assert qsvc("dead", "show", f"{batch_id}-1")[0] == 4
    assert qsvc("dead", "show", "nothing")[0] == 4
    with pytest.raises(JobNotFound, match="finished"):
        DeadLetter(redis).entry(f"{batch_id}-1")


def test_a_failure_of_a_stock_tool_is_listed_by_the_end_of_its_traceback(redis: Redis) -> None:
    job = enqueue_chat(redis, "x", QUEUE)
    with redis.pipeline() as pipeline:
        job.set_status("failed", pipeline=pipeline)  # type: ignore[arg-type]
        job._handle_failure("Traceback…\nValueError: broken", pipeline)
        pipeline.execute()
    [entry] = DeadLetter(redis).entries()
    assert (entry.code, entry.message, entry.attempts) == ("failed", "ValueError: broken", 0)


# Retry ----------------------------------------------------------------------------------------


def test_retried_jobs_run_again_with_a_clean_record(
    redis: Redis, qsvc: Qsvc, hand: HandWorker
) -> None:
    first, second, third = fail_plain(redis, "timeout", "worker_lost", "timeout")
    assert qsvc("dead", "retry", first.id) == (0, "1 queued again\n")
    assert qsvc("dead", "retry", "--all", "--code", "worker_lost") == (0, "1 queued again\n")
    assert [entry.job_id for entry in DeadLetter(redis).entries()] == [third.id]
    claimed = hand.claim()
    assert [one.job_id for one in claimed] == [first.id, second.id]
    assert [one.deaths for one in claimed] == [0, 0]
    assert [one.number("qsvc_generation") for one in claimed] == [1, 1]
    hand.answer(*claimed)
    assert first.is_finished
    assert redis.xlen(keys.rq_results(first.id)) == 2
    assert qsvc("dead", "retry", first.id)[0] == 4, "it has not failed any more"


def test_everything_is_chosen_only_when_it_is_said(redis: Redis, qsvc: Qsvc) -> None:
    [job] = fail_plain(redis, "timeout")
    for action in ("retry", "purge"):
        assert qsvc("dead", action)[0] == 2
        assert qsvc("dead", action, "--code", "timeout")[0] == 2
        assert qsvc("dead", action, job.id, "--all")[0] == 2
    assert job.is_failed


def test_the_retry_of_a_batch_reruns_what_failed_and_changes_nothing_else(
    redis: Redis, qsvc: Qsvc, hand: HandWorker
) -> None:
    batch_id = fail_lines(redis, hand, 5, 2, 4)
    batches = Batches(redis)
    before = outputs(redis, batch_id)
    assert codes_of(before) == [None, "made_up", None, "made_up", None, "invalid_json_line"]
    assert counts(batches.get(batch_id)) == (6, 3, 3, 0)

    assert qsvc("retry", batch_id) == (0, "2 queued again\n")
    batch = batches.get(batch_id)
    assert (batch.status, counts(batch)) == (Status.IN_PROGRESS, (6, 3, 1, 0))
    assert "completed_at" not in batch.timestamps
    again = hand.claim()
    assert [one.job_id for one in again] == [f"{batch_id}-2", f"{batch_id}-4"]
    hand.answer(again[0], text="better")
    hand.fail(again[1], code="worse")

    batch = batches.get(batch_id)
    assert (batch.status, counts(batch)) == (Status.COMPLETED, (6, 4, 2, 0))
    after = outputs(redis, batch_id)
    assert content_of(after[1]) == "better"
    assert codes_of(after) == [None, None, None, "worse", None, "invalid_json_line"]
    untouched = [0, 2, 4, 5]
    assert [after[i] for i in untouched] == [before[i] for i in untouched]
    assert qsvc("retry", f"{batch_id}-4") == (0, "1 queued again\n")
    assert batches.get(batch_id).failed == 1


def test_the_retry_of_a_cancelled_batch_runs_what_was_cancelled(
    redis: Redis, qsvc: Qsvc, hand: HandWorker
) -> None:
    batch_id = submit(redis, 4)
    [answered] = hand.claim(1)
    hand.answer(answered)
    batches = Batches(redis)
    assert batches.cancel(batch_id) == 3
    assert qsvc("retry", batch_id) == (0, "3 queued again\n")
    assert counts(batches.get(batch_id)) == (5, 1, 1, 0)
    assert hand.answer_all() == 3
    batch = batches.get(batch_id)
    assert (batch.status, counts(batch)) == (Status.COMPLETED, (5, 4, 1, 0))
    assert "cancelled_at" not in batch.timestamps
    assert codes_of(outputs(redis, batch_id)) == [None] * 4 + ["invalid_json_line"]


def test_a_result_of_before_the_retry_is_refused_after_it(redis: Redis, hand: HandWorker) -> None:
    batch_id = submit(redis, 1)
    [zombie] = hand.claim()
    batches = Batches(redis)
    batches.cancel_job(zombie.job_id)
    batches.retry_jobs([zombie.job_id])
    other = HandWorker(redis, QUEUE, name="other")
    [claimed] = other.claim()
    assert hand.answer(zombie, text="of before") == ["lost"]
    assert other.answer(claimed, text="of after") == ["ok"]
    assert content_of(outputs(redis, batch_id)[0]) == "of after"
    assert batches.get(batch_id).completed == 1


def test_what_cannot_run_again_is_told(redis: Redis, redis_url: str, hand: HandWorker) -> None:
    batch_id = fail_lines(redis, hand, 2, 2)
    shown = run_qsvc("dead", "show", f"{batch_id}-3", "--redis", redis_url)
    entry = json.loads(shown.stdout)
    assert (entry["queue"], entry["batch_id"], entry["line"]) == (QUEUE, batch_id, 3)
    assert entry["code"] == "invalid_json_line"

    for words in (("dead", "retry"), ("retry",)):
        refused = run_qsvc(*words, f"{batch_id}-3", "--redis", redis_url)
        assert refused.stdout == "0 queued again\n"
        assert "1 failed line is no job" in refused.stderr
        assert "a file of its own" in refused.stderr
    answered = run_qsvc("retry", f"{batch_id}-1", "--redis", redis_url)
    assert (answered.stdout, answered.returncode) == ("0 queued again\n", 0)
    assert "it is finished" in answered.stderr
    whole = run_qsvc("retry", batch_id, "--redis", redis_url)
    assert whole.stdout == "1 queued again\n"
    assert "1 failed line is no job" in whole.stderr


# Purge ----------------------------------------------------------------------------------------


def test_a_purged_line_keeps_its_error_in_the_results_of_its_batch(
    redis: Redis, qsvc: Qsvc, hand: HandWorker
) -> None:
    batch_id = fail_lines(redis, hand, 3, 2)
    before = outputs(redis, batch_id)
    assert qsvc("dead", "purge", f"{batch_id}-2") == (0, "1 deleted\n")
    assert not list(redis.scan_iter(f"*:{batch_id}-2*"))
    assert f"{batch_id}-2" not in FailedJobRegistry(QUEUE, connection=redis)
    after = outputs(redis, batch_id)
    assert after[1]["error"] == {**before[1]["error"], "line": 2}
    assert after[1]["response"]["body"] == before[1]["response"]["body"]
    assert [after[i] for i in (0, 2, 3)] == [before[i] for i in (0, 2, 3)]
    assert counts(Batches(redis).get(batch_id)) == (4, 2, 2, 0)
    assert qsvc("retry", batch_id) == (0, "0 queued again\n")


def test_a_purge_by_filter_takes_failed_jobs_only(
    redis: Redis, qsvc: Qsvc, hand: HandWorker
) -> None:
    first, second = fail_plain(redis, "timeout", "worker_lost")
    good = enqueue_chat(redis, "good", QUEUE)
    hand.answer_all()
    assert qsvc("dead", "purge", "--all", "--code", "timeout") == (0, "1 deleted\n")
    for name in (good.id, "nothing"):
        assert qsvc("dead", "purge", second.id, name)[0] == 4
    assert not redis.exists(keys.rq_job(first.id))
    assert second.is_failed
    assert good.is_finished


def test_a_failed_job_with_pickled_meta_can_be_purged(redis: Redis) -> None:
    [job] = fail_plain(redis, "timeout")
    redis.hset(keys.rq_job(job.id), "meta", encode_value({"a": 1}, Encoding.PICKLE))
    assert DeadLetter(redis).purge([job.id]) == 1
    assert not redis.exists(keys.rq_job(job.id))
