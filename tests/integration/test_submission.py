"""Submitting a batch file: once however often it is done, every bad line answered at once."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from redis import Redis
from redis.exceptions import ConnectionError
from rq import Queue
from rq.job import Job

from queue_service import keys
from queue_service.batch_file import open_batch
from queue_service.batches import Batches, Status
from queue_service.broker import Broker
from queue_service.connection import connect
from queue_service.errors import BatchConflict, BatchFileError
from queue_service.local_server import LocalServer
from queue_service.prefix_plan import PrefixPlan
from queue_service.results import BatchReader, read_job
from queue_service.scripts import Scripts
from queue_service.settings import RedisSettings, RetentionSettings, SubmitSettings
from queue_service.submission import Submission, SubmitOptions, submit_file, wait_for_disk
from tests.cli_helpers import (
    HandWorker,
    chat_line,
    chat_lines,
    content_of,
    custom_ids_of,
    write_lines,
)

QUEUE = "qsvc:tests"


def submit(
    redis: Redis,
    path: Path,
    *,
    queue: str = QUEUE,
    key: str = "",
    strict: bool = False,
    stream: bool = False,
    **limits: int | bool,
) -> Submission:
    options = SubmitOptions(
        queue=queue,
        model="a-model",
        key=key,
        strict=strict,
        stream=stream,
        submit=SubmitSettings.load(**limits),
        retention=RetentionSettings.load(),
    )
    with open_batch(path) as file:
        return submit_file(redis, file, options)


def queued(redis: Redis, queue: str = QUEUE) -> list[str]:
    """The ids that wait in a queue, in whatever lists it keeps them."""
    ids: list[str] = []
    for name in redis.scan_iter(f"{keys.rq_queue(queue)}*"):
        waiting: Any = redis.lrange(name, 0, -1)
        ids += [job_id.decode() for job_id in waiting]
    return ids


def the_only_batch(redis: Redis) -> str:
    batch_ids: Any = redis.zrange(keys.batches(), 0, -1)
    assert len(batch_ids) == 1
    return str(batch_ids[0], "utf-8")


def lines_of(redis: Redis, batch_id: str) -> list[dict[str, Any] | None]:
    refs = list(Batches(redis).all_lines(batch_id))
    return BatchReader(redis, batch_id).read(refs)


def ended_lines_of(redis: Redis, batch_id: str) -> list[dict[str, Any]]:
    lines = lines_of(redis, batch_id)
    assert None not in lines
    return [line for line in lines if line is not None]


def test_every_line_is_queued_in_order_under_an_id_made_of_batch_and_line(
    redis: Redis, tmp_path: Path
) -> None:
    lines: list[Any] = chat_lines(3)
    submission = submit(redis, write_lines(tmp_path / "in.jsonl", [*lines[:2], "", lines[2]]))
    batch = submission.batch
    assert submission.is_new
    assert batch.status is Status.IN_PROGRESS
    assert batch.is_submitted
    assert batch.total == 3
    assert batch.endpoint == "/v1/chat/completions"
    # The blank third line counts, so that numbers stay those of the file.
    assert queued(redis) == [f"{batch.id}-{line}" for line in (1, 2, 4)]
    refs = list(Batches(redis).all_lines(batch.id))
    assert [(ref.line, ref.custom_id) for ref in refs] == [(1, "c1"), (2, "c2"), (4, "c3")]


def test_plain_rq_sees_the_queue_and_the_jobs_without_their_prompts(
    redis: Redis, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", [chat_line("c1", "a secret", user="u")])
    batch = submit(redis, path).batch
    queues = Queue.all(connection=redis)
    assert Queue(QUEUE, connection=redis) in queues
    assert sum(queue.count for queue in queues) == 1
    job = Job.fetch(f"{batch.id}-1", connection=redis, serializer="json")
    assert job.func_name == "queue_service.tasks.chat"
    assert list(job.args) == [{"messages": [{"role": "user", "content": "a secret"}], "user": "u"}]
    assert job.get_status() == "queued"
    assert job.origin == QUEUE
    assert job.timeout == -1
    assert job.meta == {"batch": batch.id, "custom_id": "c1", "model": "a-model"}
    assert "secret" not in (job.description or "")


def test_the_same_file_submitted_again_queues_nothing_twice(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [*chat_lines(7), "not json"])
    first = submit(redis, path, chunk_lines=3)
    again = submit(redis, path, chunk_lines=2)
    assert first.is_new
    assert not again.is_new
    assert again.batch == first.batch
    assert again.batch.total == 8
    assert again.batch.failed == 1
    assert len(queued(redis)) == len(set(queued(redis))) == 7


def test_a_finished_batch_submitted_again_is_left_as_it_is(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(5))
    batch = submit(redis, path).batch
    HandWorker(redis, QUEUE).answer_all()
    again = submit(redis, path)
    assert not again.is_new
    assert again.batch.status is Status.COMPLETED
    assert again.batch.completed == again.batch.total == 5
    assert queued(redis) == []
    assert [content_of(line) for line in ended_lines_of(redis, batch.id)] == [
        f"prompt {i}" for i in range(1, 6)
    ]


def test_submits_of_one_file_at_once_queue_every_line_once(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    lines: list[Any] = chat_lines(400)
    lines[::50] = ["not json"] * 8
    path = write_lines(tmp_path / "in.jsonl", lines)
    barrier = threading.Barrier(4)
    submissions: list[Submission] = []

    def run(chunk_lines: int) -> None:
        with connect(RedisSettings.load(url=redis_url)) as connection:
            barrier.wait()
            submissions.append(submit(connection, path, chunk_lines=chunk_lines))

    threads = [threading.Thread(target=run, args=(size,)) for size in (3, 3, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [s.is_new for s in submissions].count(True) == 1
    [batch_id] = {s.batch.id for s in submissions}
    batch = Batches(redis).get(batch_id)
    assert (batch.total, batch.failed) == (400, 8)
    assert queued(redis) == [f"{batch_id}-{i}" for i in range(1, 401) if i % 50 != 1]
    assert [ref.line for ref in Batches(redis).all_lines(batch_id)] == list(range(1, 401))
    assert redis.xlen(keys.batch_done(batch_id)) == 8


class _Killed(Exception):
    """Stands for the end of the submitter's process."""


def test_a_submit_killed_half_way_is_completed_by_the_next(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "in.jsonl", [*chat_lines(9), "not json", *chat_lines(9, start=10)]
    )
    options = SubmitOptions(queue=QUEUE, model="m", submit=SubmitSettings.load(chunk_lines=4))

    def die(num_lines: int) -> None:
        if num_lines >= 12:
            raise _Killed

    with open_batch(path) as file, pytest.raises(_Killed):
        submit_file(redis, file, options, on_progress=die)
    worker = HandWorker(redis, QUEUE)
    assert worker.answer_all() == 11
    batch_id = the_only_batch(redis)
    half = Batches(redis).get(batch_id)
    assert half.status is Status.IN_PROGRESS, "a batch that is not submitted to its end ended"
    assert not half.is_submitted
    assert (half.total, half.ended) == (12, 12)

    again = submit(redis, path)
    assert not again.is_new
    assert again.batch.id == batch_id
    assert worker.answer_all() == 7
    batch = Batches(redis).get(batch_id)
    assert batch.status is Status.COMPLETED
    assert (batch.total, batch.completed, batch.failed) == (19, 18, 1)
    ended = ended_lines_of(redis, batch_id)
    assert [line["id"].rsplit("-", 1)[1] for line in ended] == [str(i) for i in range(1, 20)]


@pytest.fixture
def before_enqueue(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Callable[[], None]]]:
    """What to do right before the first, second … chunk is sent, by its number."""
    actions: dict[int, Callable[[], None]] = {}
    call, numbers = Scripts.call, itertools.count(1)

    def call_after_action(scripts: Scripts, name: str, *args: Any) -> Any:
        if name == "enqueue":
            actions.get(next(numbers), lambda: None)()
        return call(scripts, name, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Scripts, "call", call_after_action)
        yield actions


def test_a_chunk_that_did_not_arrive_is_sent_by_the_next_submit(
    redis: Redis, tmp_path: Path, before_enqueue: dict[int, Callable[[], None]]
) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(10))

    def lose_the_connection() -> None:
        raise ConnectionError("the connection broke")

    before_enqueue[2] = lose_the_connection
    with pytest.raises(ConnectionError):
        submit(redis, path, chunk_lines=2)
    batch = submit(redis, path, chunk_lines=2).batch
    assert (batch.total, batch.is_submitted) == (10, True)
    assert queued(redis) == [f"{batch.id}-{i}" for i in range(1, 11)]


def test_lines_that_a_crashed_server_forgot_are_added_again(
    redis: Redis, tmp_path: Path, before_enqueue: dict[int, Callable[[], None]]
) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(10))
    kept: dict[bytes, Any] = {}

    def write_to_disk() -> None:
        kept.update({key: redis.dump(key) for key in redis.scan_iter()})

    def come_back_after_a_crash() -> None:
        redis.flushdb()
        for key, value in kept.items():
            redis.restore(key, 0, value)

    before_enqueue[2], before_enqueue[4] = write_to_disk, come_back_after_a_crash
    batch = submit(redis, path, chunk_lines=2).batch
    assert (batch.total, batch.is_submitted) == (10, True)
    assert queued(redis) == [f"{batch.id}-{i}" for i in range(1, 11)]


def test_another_key_or_queue_gives_another_batch(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(2))
    batches = [
        submit(redis, path).batch,
        submit(redis, path, key="monday").batch,
        submit(redis, path, queue="qsvc:other").batch,
    ]
    assert len({batch.id for batch in batches}) == 3
    assert len(queued(redis)) == 4
    assert len(queued(redis, "qsvc:other")) == 2
    assert not submit(redis, path, key="monday").is_new


def test_a_key_stands_for_one_content_only(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(2))
    batch = submit(redis, path, key="monday").batch
    write_lines(path, chat_lines(3))
    with pytest.raises(BatchConflict, match=batch.id):
        submit(redis, path, key="monday")
    assert len(queued(redis)) == 2
    assert submit(redis, path, key="tuesday").is_new


def test_a_refused_file_does_not_use_up_its_key(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [*chat_lines(2), "{"])
    with pytest.raises(BatchFileError):
        submit(redis, path, key="monday", strict=True)
    with pytest.raises(BatchFileError):
        submit(redis, write_lines(path, []), key="monday")
    assert submit(redis, write_lines(path, chat_lines(2)), key="monday").is_new


def test_changed_content_under_the_same_name_gives_another_batch(
    redis: Redis, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(2))
    first = submit(redis, path).batch
    write_lines(path, chat_lines(3))
    assert submit(redis, path).batch.id != first.id


BAD_LINES: list[tuple[str, Any]] = [
    ("invalid_json_line", "{not json"),
    ("invalid_json_line", '["a", "list"]'),
    ("missing_field", {k: v for k, v in chat_line("no-body", "x").items() if k != "body"}),
    ("missing_field", {k: v for k, v in chat_line("x", "x").items() if k != "custom_id"}),
    ("duplicate_custom_id", chat_line("c1", "used on line 1")),
    (
        "url_mismatch",
        {
            "custom_id": "text",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x"},
        },
    ),
    ("invalid_request", chat_line("streams", "x", stream=True)),
    ("invalid_request", chat_line("unknown", "x", no_such_field=1)),
    ("invalid_request", chat_line("zero", "x", max_tokens=0)),
    ("invalid_request", {**chat_line("get", "x"), "method": "GET"}),
]


def test_every_bad_line_has_an_error_line_at_once_and_every_good_one_an_answer(
    redis: Redis, tmp_path: Path
) -> None:
    lines = [good for i in range(len(BAD_LINES)) for good in chat_lines(1, start=i + 1)]
    mixed = [line for i, (_, bad) in enumerate(BAD_LINES) for line in (lines[i], bad)]
    batch = submit(redis, write_lines(tmp_path / "in.jsonl", mixed), chunk_lines=3).batch
    assert (batch.total, batch.failed) == (20, 10)

    before = lines_of(redis, batch.id)
    assert before[::2] == [None] * 10
    for number, (code, line) in enumerate(
        zip([code for code, _ in BAD_LINES], before[1::2], strict=True)
    ):
        assert line is not None
        assert line["response"]["status_code"] == 400
        detail = line["response"]["body"]["error"]
        assert (line["error"]["code"], detail["code"]) == (code, code)
        assert line["error"]["line"] == 2 * number + 2
        assert detail["type"] == "invalid_request_error"
        assert detail["message"] == line["error"]["message"]
    duplicate = before[9]
    assert duplicate is not None
    assert "line 10" in duplicate["error"]["message"]
    assert "line 1" in duplicate["error"]["message"]

    HandWorker(redis, QUEUE).answer_all()
    after = ended_lines_of(redis, batch.id)
    assert [content_of(line) for line in after[::2]] == [f"prompt {i}" for i in range(1, 11)]
    assert after[1::2] == before[1::2]
    assert custom_ids_of(after[1::2]) == [
        "", "", "no-body", "", "c1", "text", "streams", "unknown", "zero", "get",
    ]  # fmt: skip


def test_lines_beyond_the_limit_are_refused_one_by_one(redis: Redis, tmp_path: Path) -> None:
    batch = submit(redis, write_lines(tmp_path / "in.jsonl", chat_lines(5)), max_lines=3).batch
    assert (batch.total, batch.failed, len(queued(redis))) == (5, 2, 3)
    codes = [line["error"]["code"] for line in lines_of(redis, batch.id) if line]
    assert codes == ["too_many_tasks", "too_many_tasks"]


def test_a_file_of_bad_lines_only_ends_at_once_with_one_error_line_each(
    redis: Redis, tmp_path: Path
) -> None:
    batch = submit(redis, write_lines(tmp_path / "in.jsonl", ["{", "[]", "nonsense"])).batch
    assert batch.status is Status.COMPLETED
    assert (batch.total, batch.failed, batch.completed) == (3, 3, 0)
    assert [line["error"]["line"] for line in ended_lines_of(redis, batch.id)] == [1, 2, 3]
    assert queued(redis) == []


@pytest.mark.parametrize("content", [b"", b"\n \r\n\n"])
def test_an_empty_file_is_refused_and_leaves_nothing(
    redis: Redis, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(BatchFileError) as caught:
        submit(redis, path)
    assert caught.value.code == "empty_file"
    assert redis.dbsize() == 0


def test_a_strict_submit_refuses_the_file_before_anything_is_queued(
    redis: Redis, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", [*chat_lines(3), "{", chat_line("c1", "again")])
    with pytest.raises(BatchFileError) as caught:
        submit(redis, path, strict=True)
    message = str(caught.value)
    assert "2 bad lines" in message
    assert "line 4: invalid_json_line" in message
    assert "line 5: duplicate_custom_id" in message
    assert redis.dbsize() == 0


def test_a_strict_submit_of_a_good_file_is_like_any_other(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(3))
    assert submit(redis, path, strict=True).batch.total == 3
    assert len(queued(redis)) == 3


def test_compressed_content_is_the_same_batch_as_the_plain_one(
    redis: Redis, tmp_path: Path
) -> None:
    plain = write_lines(tmp_path / "in.jsonl", chat_lines(4))
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    squeezed = tmp_path / "in.jsonl.zst"
    squeezed.write_bytes(zstandard.compress(plain.read_bytes()))
    submissions = [submit(redis, path) for path in (packed, squeezed, plain)]
    assert [s.is_new for s in submissions] == [True, False, False]
    assert len({s.batch.id for s in submissions}) == 1
    assert len(queued(redis)) == 4


def test_a_cut_file_is_refused_and_leaves_nothing(redis: Redis, tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "in.jsonl", chat_lines(50))
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes())[:-20])
    with pytest.raises(BatchFileError, match=r"in\.jsonl\.gz"):
        submit(redis, packed)
    assert redis.dbsize() == 0


def test_bare_bodies_are_lines_of_the_endpoint_that_their_fields_tell(
    redis: Redis, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    batch = submit(redis, path).batch
    assert batch.endpoint == "/v1/completions"
    HandWorker(redis, QUEUE).answer_all()
    lines = ended_lines_of(redis, batch.id)
    assert custom_ids_of(lines) == ["line-1", "line-2"]
    assert [line["response"]["body"]["choices"][0]["text"] for line in lines] == ["one", "two"]


def test_custom_ids_of_any_text_come_back_as_they_were(redis: Redis, tmp_path: Path) -> None:
    wanted = ["with space and  two", "né\u2028é", 'quote"s\\', "x" * 512, "7"]
    lines: list[Any] = [chat_line(custom_id, "x") for custom_id in wanted[:-1]]
    lines.append({**chat_line("", "x"), "custom_id": 7})
    batch = submit(redis, write_lines(tmp_path / "in.jsonl", lines)).batch
    HandWorker(redis, QUEUE).answer_all()
    assert custom_ids_of(ended_lines_of(redis, batch.id)) == wanted


def test_lone_surrogates_in_ids_and_prompts_become_valid_utf8(redis: Redis, tmp_path: Path) -> None:
    line = json.dumps(chat_line("id-\ud800", "half \ud83d"))
    batch = submit(redis, write_lines(tmp_path / "in.jsonl", [line, chat_line("c2", "x")])).batch
    HandWorker(redis, QUEUE).answer_all()
    ended = ended_lines_of(redis, batch.id)
    assert custom_ids_of(ended) == ["id-\ufffd", "c2"]
    assert content_of(ended[0]) == "half \ufffd"


def test_a_submit_after_a_cancel_adds_nothing(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(3))
    batch = submit(redis, path).batch
    Batches(redis).cancel(batch.id)
    again = submit(redis, path)
    assert not again.is_new
    assert again.batch.status is Status.CANCELLED
    assert again.batch.total == 3
    assert HandWorker(redis, QUEUE).claim() == []


def test_a_cancel_stops_a_submit_that_still_runs(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(40))
    options = SubmitOptions(queue=QUEUE, model="m", submit=SubmitSettings.load(chunk_lines=5))

    def cancel_once(num_lines: int) -> None:
        if num_lines == 10:
            Batches(redis).cancel(the_only_batch(redis))

    with open_batch(path) as file:
        batch = submit_file(redis, file, options, on_progress=cancel_once).batch
    assert batch.status is Status.CANCELLED
    assert batch.total == batch.cancelled < 40


def test_a_streaming_submit_marks_every_job(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(2))
    quiet = submit(redis, path).batch.id
    streaming = submit(redis, path, key="streaming", stream=True).batch.id
    marks = {c.job_id: c.text("qsvc_stream") for c in HandWorker(redis, QUEUE).claim()}
    assert marks == {
        f"{quiet}-1": "0",
        f"{quiet}-2": "0",
        f"{streaming}-1": "1",
        f"{streaming}-2": "1",
    }


def test_what_was_submitted_is_on_the_disk_of_a_server_with_an_append_only_file(
    redis: Redis, tmp_path: Path
) -> None:
    submit(redis, write_lines(tmp_path / "in.jsonl", chat_lines(2)))
    assert wait_for_disk(redis)


def test_a_server_without_an_append_only_file_cannot_promise_the_disk(
    make_server: Callable[..., LocalServer],
) -> None:
    with connect(RedisSettings.load(url=make_server().start())) as connection:
        connection.config_set("appendonly", "no")
        connection.set("key", "value")
        assert not wait_for_disk(connection)


def test_a_line_that_was_refused_is_known_with_its_reason(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [*chat_lines(1), {"custom_id": "bad"}])
    batch = submit(redis, path).batch
    refused = read_job(redis, f"{batch.id}-2")
    assert refused.status == "failed"
    assert refused.error is not None
    assert refused.error["code"] == "missing_field"


NOTES, RULES = "You know the town well. " * 40, "Answer in one word. " * 60


def marked_lines() -> list[Any]:
    texts = (NOTES + "one", RULES + "one", "short", "not json", NOTES + "two", RULES + "two")
    lines: list[Any] = [chat_line(f"c{i}", text) for i, text in enumerate(texts, 1)]
    lines[3] = texts[3]
    return lines


def prefix_fields(redis: Redis, batch_id: str) -> dict[int, str]:
    """The marks of a batch's jobs, by line."""
    found: dict[int, str] = {}
    for key in redis.scan_iter(f"{keys.rq_job(batch_id)}-*"):
        mark = redis.hget(key, "qsvc_prefix")
        if isinstance(mark, bytes):
            found[int(key.rsplit(b"-", 1)[1])] = mark.decode()
    return found


def test_lines_that_begin_alike_are_queued_with_one_mark(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", marked_lines())
    marks = prefix_fields(redis, submit(redis, path).batch.id)
    assert marks.keys() == {1, 2, 5, 6}
    assert marks[1] == marks[5] != marks[2] == marks[6]
    assert int(marks[1].split(":")[1]) >= len(NOTES)


def test_marks_are_left_out_where_nobody_wants_them(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", marked_lines())
    assert prefix_fields(redis, submit(redis, path, plan=False).batch.id) == {}


def test_a_mark_takes_less_than_a_hundred_bytes(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", marked_lines())
    sizes = [
        redis.memory_usage(keys.rq_job(f"{submission.batch.id}-1"), samples=0) or 0
        for submission in (submit(redis, path), submit(redis, path, key="k", plan=False))
    ]
    # Below 0 where the server's secret puts the fields more densely with one more of them.
    assert sizes[0] - sizes[1] < 100


def test_the_file_once_more_is_the_same_batch_with_the_same_marks(
    redis: Redis, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", marked_lines())
    first = submit(redis, path)
    marks = prefix_fields(redis, first.batch.id)
    again = submit(redis, path)
    assert (again.is_new, again.batch.id) == (False, first.batch.id)
    assert prefix_fields(redis, first.batch.id) == marks
    # What is no part of the requests is none of the batch's name.
    assert not submit(redis, path, plan=False).is_new


def test_a_submit_that_was_cut_off_goes_on_with_the_same_marks(
    redis: Redis, tmp_path: Path, before_enqueue: dict[int, Callable[[], None]]
) -> None:
    path = write_lines(tmp_path / "in.jsonl", marked_lines())

    def lose_the_connection() -> None:
        raise ConnectionError("the connection broke")

    before_enqueue[2] = lose_the_connection
    with pytest.raises(ConnectionError):
        submit(redis, path, chunk_lines=2)
    batch_id = the_only_batch(redis)
    begun = prefix_fields(redis, batch_id)
    assert begun.keys() == {1, 2}
    submit(redis, path, chunk_lines=2)
    marks = prefix_fields(redis, batch_id)
    assert marks.keys() == {1, 2, 5, 6}
    assert {line: marks[line] for line in begun} == begun
    assert (marks[5], marks[6]) == (marks[1], marks[2])


def test_what_is_submitted_already_is_not_looked_at_again(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", marked_lines())
    options = SubmitOptions(queue=QUEUE, model="a-model")
    found: list[PrefixPlan] = []
    for _ in range(2):
        with open_batch(path) as file:
            submit_file(redis, file, options, on_plan=found.append)
    [plan] = found
    assert (plan.num_groups, plan.num_lines) == (2, 4)


def test_a_claim_hands_the_mark_to_the_worker(redis: Redis, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", marked_lines())
    marks = prefix_fields(redis, submit(redis, path).batch.id)
    broker = Broker(redis, worker="w", queues=[QUEUE], lease_seconds=10)
    claimed, _ = broker.claim(9, crash_retries=2)
    assert [job.text("qsvc_prefix") for job in claimed] == [
        marks.get(line) for line in (1, 2, 3, 5, 6)
    ]
