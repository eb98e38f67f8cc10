"""Results as they are read: one job's, a batch's in order, and into a file that is resumed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.job import JobStatus
from rq.results import Result

from queue_service import keys
from queue_service.batch_file import open_batch
from queue_service.batches import Batches, Status
from queue_service.connection import connect
from queue_service.errors import BatchNotFound, JobNotFound
from queue_service.follow import Standing, follow
from queue_service.output import BatchOutput, CompletionOrder, InputOrder, OutputFile
from queue_service.results import BatchReader, read_job
from queue_service.settings import RedisSettings
from queue_service.streams import text_of
from queue_service.submission import SubmitOptions, submit_file
from tests.cli_helpers import (
    HandWorker,
    chat_lines,
    content_of,
    custom_ids_of,
    read_output,
    wait_until,
    write_lines,
)

QUEUE = "qsvc:tests"
BODY = {"messages": [{"role": "user", "content": "hello"}]}


def submit(redis: Redis, tmp_path: Path, lines: list[Any]) -> str:
    with open_batch(write_lines(tmp_path / "in.jsonl", lines)) as file:
        return submit_file(redis, file, SubmitOptions(queue=QUEUE, model="m")).batch.id


def enqueue(redis: Redis) -> str:
    """Enqueue one job as an application with nothing but RQ does."""
    queue = Queue(QUEUE, connection=redis, serializer="json")
    return queue.enqueue("queue_service.tasks.chat", BODY).id


@contextlib.contextmanager
def opened(
    redis: Redis, batch_id: str, *paths: Path, unordered: bool = False
) -> Iterator[BatchOutput]:
    """A batch's output on its files, resumed."""
    order = CompletionOrder if unordered else InputOrder
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(contextlib.closing(OutputFile(path))) for path in paths]
        output = BatchOutput(BatchReader(redis, batch_id), order(redis, batch_id), *files)
        output.resume()
        yield output


def write_ended(redis: Redis, batch_id: str, *paths: Path, unordered: bool = False) -> int:
    """Write what has ended; return how many lines the files hold."""
    with opened(redis, batch_id, *paths, unordered=unordered) as output:
        while output.advance():
            pass
        return output.num_written


def test_a_job_is_read_in_every_state(redis: Redis) -> None:
    job_id = enqueue(redis)
    waiting = read_job(redis, job_id)
    assert (waiting.status, waiting.body, waiting.error) == ("queued", None, None)
    assert not waiting.has_ended
    worker = HandWorker(redis, QUEUE)
    [claimed] = worker.claim()
    running = read_job(redis, job_id)
    assert (running.status, running.has_ended) == ("started", False)
    worker.answer(claimed, text="hello yourself")
    ended = read_job(redis, job_id)
    assert (ended.status, ended.has_ended, ended.error) == ("finished", True, None)
    assert ended.body is not None
    assert text_of(ended.body) == "hello yourself"


def test_a_failed_job_has_a_structured_error(redis: Redis) -> None:
    job_id = enqueue(redis)
    worker = HandWorker(redis, QUEUE)
    worker.fail(*worker.claim(), code="timeout")
    result = read_job(redis, job_id)
    assert (result.status, result.has_ended, result.body) == ("failed", True, None)
    assert result.error is not None
    assert result.error["code"] == "timeout"
    assert result.error["status_code"] == 500


def test_a_cancelled_job_has_neither_answer_nor_error(redis: Redis) -> None:
    job_id = enqueue(redis)
    Batches(redis).cancel_job(job_id)
    result = read_job(redis, job_id)
    assert (result.status, result.has_ended) == ("canceled", True)
    assert (result.body, result.error) == (None, None)


def test_an_unknown_job_is_an_error_with_its_name(redis: Redis) -> None:
    with pytest.raises(JobNotFound, match="no-such-job"):
        read_job(redis, "no-such-job")


def test_a_job_that_a_stock_tool_failed_shows_the_last_line_of_its_traceback(
    redis: Redis,
) -> None:
    job = Queue(QUEUE, connection=redis, serializer="json").enqueue(
        "queue_service.tasks.chat", BODY
    )
    Result.create_failure(job, ttl=60, exc_string="Traceback …\nValueError: out of paper\n")
    job.set_status(JobStatus.FAILED)
    result = read_job(redis, job.id)
    assert result.error is not None
    assert (result.error["code"], result.error["message"]) == ("failed", "ValueError: out of paper")


def test_lines_are_read_in_the_order_asked_for_and_none_where_they_run(
    redis: Redis, tmp_path: Path
) -> None:
    batch_id = submit(redis, tmp_path, [*chat_lines(3), "{"])
    worker = HandWorker(redis, QUEUE)
    first, _, third = worker.claim()
    worker.answer(first, third)
    reader = BatchReader(redis, batch_id)
    refs = list(Batches(redis).all_lines(batch_id))
    lines = reader.read([refs[3], refs[2], refs[1], refs[0]])
    assert lines[0] is not None
    assert lines[0]["error"]["code"] == "invalid_json_line"
    assert [line and line["custom_id"] for line in lines[1:]] == ["c3", None, "c1"]
    assert custom_ids_of(reader.read_ended(refs)) == ["c1"]
    assert reader.read([]) == []


def test_a_result_that_is_gone_leaves_a_line_that_says_so(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(2))
    HandWorker(redis, QUEUE).answer_all()
    redis.delete(keys.rq_results(f"{batch_id}-1"), keys.rq_job(f"{batch_id}-1"))
    assert write_ended(redis, batch_id, tmp_path / "out.jsonl") == 2
    gone, there = read_output(tmp_path / "out.jsonl")
    assert gone["custom_id"] == "c1"
    assert gone["response"] is None
    assert gone["error"]["code"] == "result_expired"
    assert content_of(there) == "prompt 2"


def test_results_grow_in_input_order_and_go_on_after_a_restart(
    redis: Redis, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    batch_id = submit(redis, tmp_path, [*chat_lines(5), "{"])
    worker = HandWorker(redis, QUEUE)
    first, second, *rest = worker.claim()
    worker.answer(*rest)
    assert write_ended(redis, batch_id, path) == 0
    worker.answer(first)
    assert write_ended(redis, batch_id, path) == 1
    head = path.read_bytes()
    worker.fail(second)
    assert write_ended(redis, batch_id, path) == 6
    assert path.read_bytes().startswith(head)
    assert custom_ids_of(read_output(path)) == ["c1", "c2", "c3", "c4", "c5", ""]
    assert write_ended(redis, batch_id, path) == 6


def test_unordered_results_come_as_they_end_and_go_on_after_a_restart(
    redis: Redis, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    batch_id = submit(redis, tmp_path, ["{", *chat_lines(4)])
    worker = HandWorker(redis, QUEUE)
    first, second, third, fourth = worker.claim()
    worker.answer(third)
    worker.fail(first)
    assert write_ended(redis, batch_id, path, unordered=True) == 3
    path.write_bytes(path.read_bytes()[:-9])
    worker.answer(fourth)
    Batches(redis).cancel(batch_id)
    assert worker.answer(second) == ["canceled"]
    assert write_ended(redis, batch_id, path, unordered=True) == 5
    assert custom_ids_of(read_output(path)) == ["", "c3", "c1", "c4", "c2"]


@pytest.mark.parametrize("unordered", [False, True])
def test_a_line_that_was_run_again_replaces_its_failure_in_a_file_written_before(
    redis: Redis, tmp_path: Path, unordered: bool
) -> None:
    path = tmp_path / "out.jsonl"
    batch_id = submit(redis, tmp_path, ["{", *chat_lines(4)])
    worker = HandWorker(redis, QUEUE)
    first, second, third, fourth = worker.claim()
    worker.answer(first)
    worker.fail(second)
    worker.answer(third, fourth)
    assert write_ended(redis, batch_id, path, unordered=unordered) == 5
    assert Batches(redis).retry_failed(batch_id) == 1
    # The line runs: it and, in the order of the input, all behind it wait for its new end.
    [again] = worker.claim()
    assert write_ended(redis, batch_id, path, unordered=unordered) == (4 if unordered else 2)
    worker.answer(again, text="better now")
    assert write_ended(redis, batch_id, path, unordered=unordered) == 5
    lines = read_output(path)
    by_id = {line["custom_id"]: line for line in lines}
    assert len(lines) == len(by_id) == 5
    assert content_of(by_id["c2"]) == "better now"
    assert by_id[""]["error"]["code"] == "invalid_json_line"
    order = ["", "c1", "c3", "c4", "c2"] if unordered else ["", "c1", "c2", "c3", "c4"]
    assert custom_ids_of(lines) == order


def test_a_retried_line_is_written_once_into_each_of_two_files(
    redis: Redis, tmp_path: Path
) -> None:
    paths = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    batch_id = submit(redis, tmp_path, chat_lines(3))
    worker = HandWorker(redis, QUEUE)
    worker.fail(*worker.claim())
    write_ended(redis, batch_id, *paths)
    assert Batches(redis).retry_jobs([f"{batch_id}-2"]) == [f"{batch_id}-2"]
    worker.answer_all()
    assert write_ended(redis, batch_id, *paths) == 3
    assert custom_ids_of(read_output(paths[0])) == ["c2"]
    assert custom_ids_of(read_output(paths[1])) == ["c1", "c3"]


def test_a_retry_that_failed_again_leaves_the_file_as_it_is(redis: Redis, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    batch_id = submit(redis, tmp_path, chat_lines(3))
    worker = HandWorker(redis, QUEUE)
    worker.fail(*worker.claim())
    write_ended(redis, batch_id, path)
    before = path.read_bytes()
    assert Batches(redis).retry_failed(batch_id) == 3
    worker.fail(*worker.claim())
    assert write_ended(redis, batch_id, path) == 3
    assert path.read_bytes() == before


def test_lines_of_an_expired_batch_say_so(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(2))
    worker = HandWorker(redis, QUEUE)
    worker.answer(*worker.claim(1))
    assert Batches(redis).expire(batch_id) == 1
    assert Batches(redis).get(batch_id).status is Status.EXPIRED
    write_ended(redis, batch_id, tmp_path / "out.jsonl")
    done, late = read_output(tmp_path / "out.jsonl")
    assert done["error"] is None
    assert late["response"] is None
    assert late["error"]["code"] == "batch_expired"


def test_errors_have_a_file_of_their_own_in_both_orders(redis: Redis, tmp_path: Path) -> None:
    batch_id = submit(redis, tmp_path, [*chat_lines(3), "{"])
    worker = HandWorker(redis, QUEUE)
    first, second, third = worker.claim()
    worker.fail(second)
    worker.answer(third, first)
    for unordered, answers in ((False, ["c1", "c3"]), (True, ["c3", "c1"])):
        paths = [tmp_path / f"{name}-{unordered}.jsonl" for name in ("out", "errors")]
        assert write_ended(redis, batch_id, *paths, unordered=unordered) == 4
        assert custom_ids_of(read_output(paths[0])) == answers
        assert set(custom_ids_of(read_output(paths[1]))) == {"c2", ""}


def test_following_writes_every_line_and_ends_with_the_batch(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    batch_id = submit(redis, tmp_path, chat_lines(500))
    seen: list[Standing] = []

    def work() -> None:
        with connect(RedisSettings.load(url=redis_url)) as connection:
            worker = HandWorker(connection, QUEUE)
            for claimed in iter(lambda: worker.claim(37), []):
                worker.answer(*reversed(claimed))

    thread = threading.Thread(target=work)
    with opened(redis, batch_id, path) as output:
        thread.start()
        batch = follow(
            redis,
            batch_id,
            output,
            on_update=seen.append,
            should_stop=lambda: False,
        )
    thread.join()
    assert batch.status is Status.COMPLETED
    assert custom_ids_of(read_output(path)) == [f"c{i}" for i in range(1, 501)]
    written = [standing.num_written or 0 for standing in seen]
    assert written == sorted(written)
    assert written[-1] == 500


def test_following_stops_when_told_and_leaves_what_was_written(
    redis: Redis, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    batch_id = submit(redis, tmp_path, chat_lines(3))
    worker = HandWorker(redis, QUEUE)
    worker.answer(*worker.claim(1))
    with opened(redis, batch_id, path) as output:
        batch = follow(redis, batch_id, output, on_update=lambda *_: None, should_stop=lambda: True)
    assert (batch.status, batch.completed) == (Status.IN_PROGRESS, 1)
    assert custom_ids_of(read_output(path)) == ["c1"]


def test_following_a_batch_that_vanishes_is_an_error(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(1))
    rounds: list[int] = []
    errors: list[BaseException] = []

    def run() -> None:
        with (
            connect(RedisSettings.load(url=redis_url)) as connection,
            opened(connection, batch_id, tmp_path / "out.jsonl") as output,
        ):
            try:
                follow(
                    connection,
                    batch_id,
                    output,
                    on_update=lambda now: rounds.append(now.num_written or 0),
                    should_stop=lambda: False,
                )
            except BatchNotFound as error:
                errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: rounds, "a first round")
    redis.delete(keys.batch(batch_id))
    thread.join(timeout=10)
    assert len(errors) == 1


def test_a_follower_beside_a_blocked_head_does_not_spin(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    batch_id = submit(redis, tmp_path, chat_lines(200))
    worker = HandWorker(redis, QUEUE)
    first, *rest = worker.claim()
    rounds: list[int] = []

    def run() -> None:
        with (
            connect(RedisSettings.load(url=redis_url)) as connection,
            opened(connection, batch_id, tmp_path / "out.jsonl") as output,
        ):
            follow(
                connection,
                batch_id,
                output,
                on_update=lambda now: rounds.append(now.num_written or 0),
                should_stop=lambda: False,
            )

    thread = threading.Thread(target=run)
    started = time.monotonic()
    thread.start()
    wait_until(lambda: rounds, "a first round")
    # Each of these wakes the follower, and none of them can be written yet.
    for claimed in rest:
        worker.answer(claimed)
    worker.answer(first)
    thread.join(timeout=30)
    assert rounds[-1] == 200
    most = 10 * (time.monotonic() - started) + 3
    assert len(rounds) < most, "one round of 200 reads for every line that ended"
