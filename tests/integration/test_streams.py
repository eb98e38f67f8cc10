"""A job's text as a reader sees it: while it runs, after its end, over a change of workers."""

from __future__ import annotations

import pytest
from redis import Redis
from rq import Queue

from queue_service import keys
from queue_service.batches import Batches
from queue_service.errors import JobNotFound
from queue_service.streams import StreamEnd, TextChunk, read_text
from tests.cli_helpers import HandWorker

QUEUE = "qsvc:tests"


@pytest.fixture
def worker(redis: Redis) -> HandWorker:
    return HandWorker(redis, QUEUE)


def enqueue(redis: Redis) -> str:
    queue = Queue(QUEUE, connection=redis, serializer="json")
    body = {"messages": [{"role": "user", "content": "hello"}]}
    return queue.enqueue("queue_service.tasks.chat", body).id


def text_of_all(items: list[TextChunk | StreamEnd]) -> str:
    text = ""
    for item in items:
        if isinstance(item, TextChunk):
            text = item.text if item.restarted else text + item.text
    return text


def test_the_text_of_a_running_job_comes_as_it_is_written(redis: Redis, worker: HandWorker) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    reader = read_text(redis, job_id)
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "once "})
    assert next(reader) == TextChunk("once ")
    worker.stream(claimed, 2, {"i": 1, "a": 1, "t": "upon "}, {"i": 2, "a": 1, "t": "a "})
    assert [next(reader), next(reader)] == [TextChunk("upon "), TextChunk("a ")]
    worker.stream(claimed, 3, {"i": 3, "a": 1, "t": "time"})
    worker.answer(claimed, text="once upon a time")
    assert list(reader) == [TextChunk("time"), StreamEnd("done")]


def test_a_late_reader_gets_the_whole_text(redis: Redis, worker: HandWorker) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "all of "}, {"i": 2, "a": 1, "t": "it"})
    worker.answer(claimed, text="all of it")
    for _ in range(2):
        items = list(read_text(redis, job_id))
        assert items == [TextChunk("all of "), TextChunk("it"), StreamEnd("done")]


def test_a_finished_job_that_never_streamed_gives_its_answer_at_once(
    redis: Redis, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    worker.answer(*worker.claim(), text="the answer")
    assert list(read_text(redis, job_id)) == [TextChunk("the answer"), StreamEnd("done")]
    assert not redis.exists(keys.watch(job_id))


def test_a_job_that_ends_before_its_worker_hears_of_the_reader_is_read_to_its_end(
    redis: Redis, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    moments = iter([0.0])

    def clock() -> float:
        moment = next(moments, None)
        if moment is None:  # the reader is in its loop: it has asked for the stream
            worker.answer(claimed, text="quick")
            return 1.0
        return moment

    assert list(read_text(redis, job_id, clock)) == [TextChunk("quick"), StreamEnd("done")]


def test_reading_asks_for_the_stream_of_a_job_that_has_not_ended_again_and_again(
    redis: Redis, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    now = 0.0
    reader = read_text(redis, job_id, lambda: now)
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "a"}, {"i": 1, "a": 1, "t": "b"})
    assert next(reader) == TextChunk("a")
    assert 0 < redis.ttl(keys.watch(job_id)) <= 30
    redis.delete(keys.watch(job_id))
    worker.stream(claimed, 2, {"i": 2, "a": 1, "t": "c"})
    assert [next(reader), next(reader)] == [TextChunk("b"), TextChunk("c")]
    assert not redis.exists(keys.watch(job_id)), "asked again at once"
    now = 11.0
    worker.stream(claimed, 3, {"i": 3, "a": 1, "t": "d"})
    assert next(reader) == TextChunk("d")
    assert redis.exists(keys.watch(job_id))


def test_an_unknown_job_is_an_error_before_anything_is_read(redis: Redis) -> None:
    with pytest.raises(JobNotFound, match="no-such-job"):
        next(read_text(redis, "no-such-job"))


def test_a_failed_job_ends_with_its_reason(redis: Redis, worker: HandWorker) -> None:
    job_id = enqueue(redis)
    worker.fail(*worker.claim(), code="timeout")
    assert list(read_text(redis, job_id)) == [StreamEnd("error", "it failed: timeout")]


def test_a_job_that_fails_half_way_ends_with_its_reason_after_its_text(
    redis: Redis, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "half"})
    worker.fail(claimed, code="timeout")
    items = list(read_text(redis, job_id))
    assert items == [TextChunk("half"), StreamEnd("error", "it failed: timeout")]


@pytest.mark.parametrize("is_running", [False, True])
def test_a_cancelled_job_ends_as_cancelled(
    redis: Redis, worker: HandWorker, is_running: bool
) -> None:
    job_id = enqueue(redis)
    text = []
    if is_running:
        [claimed] = worker.claim()
        worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "half"})
        text = [TextChunk("half")]
    Batches(redis).cancel_job(job_id)
    assert list(read_text(redis, job_id)) == [*text, StreamEnd("cancelled")]


def test_a_worker_that_begins_anew_restarts_the_text(redis: Redis, worker: HandWorker) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "}, {"i": 1, "a": 1, "t": "two "})
    worker.stream(claimed, 2, {"i": 0, "a": 2, "t": "uno "}, {"i": 1, "a": 2, "t": "dos"})
    # What the first worker still had under way.
    worker.stream(claimed, 3, {"i": 2, "a": 1, "t": "three"})
    worker.answer(claimed, text="uno dos")
    assert list(read_text(redis, job_id)) == [
        TextChunk("one "),
        TextChunk("two "),
        TextChunk("uno ", restarted=True),
        TextChunk("dos"),
        StreamEnd("done"),
    ]


def test_a_worker_that_goes_on_where_the_last_one_stopped_restarts_nothing(
    redis: Redis, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "})
    worker.stream(claimed, 2, {"i": 1, "a": 2, "t": "two"})
    worker.answer(claimed, text="one two")
    items = list(read_text(redis, job_id))
    assert items == [TextChunk("one "), TextChunk("two"), StreamEnd("done")]


def test_another_choice_that_begins_anew_restarts_nothing(redis: Redis, worker: HandWorker) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "})
    other = {"i": 0, "a": 2, "c": 1, "t": "uno"}
    worker.stream(claimed, 2, other, {"i": 1, "a": 2, "t": "two"})
    worker.answer(claimed, text="one two")
    items = list(read_text(redis, job_id))
    assert items == [TextChunk("one "), TextChunk("two"), StreamEnd("done")]


@pytest.mark.parametrize(
    ("answer", "rest"),
    [
        ("one two", TextChunk("two")),
        ("another answer", TextChunk("another answer", restarted=True)),
    ],
)
def test_what_the_last_worker_did_not_stream_comes_from_the_result(
    redis: Redis, worker: HandWorker, answer: str, rest: TextChunk
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "})
    worker.answer(claimed, text=answer)
    items = list(read_text(redis, job_id))
    assert items == [TextChunk("one "), rest, StreamEnd("done")]
    assert text_of_all(items) == answer


def test_a_stream_that_expires_under_its_reader_is_completed_from_the_result(
    redis: Redis, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "})
    reader = read_text(redis, job_id)
    assert next(reader) == TextChunk("one ")
    worker.answer(claimed, text="one two")
    redis.delete(keys.stream(job_id))
    assert list(reader) == [TextChunk("two"), StreamEnd("done")]


def test_other_choices_are_left_out(redis: Redis, worker: HandWorker) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(
        claimed, 1, {"i": 0, "a": 1, "c": 1, "t": "other"}, {"i": 0, "a": 1, "c": 0, "t": "mine"}
    )
    worker.answer(claimed, text="mine")
    assert list(read_text(redis, job_id)) == [TextChunk("mine"), StreamEnd("done")]


@pytest.mark.parametrize("text", ["", "é😀\u2028\x00\n"])
def test_any_text_comes_through(redis: Redis, worker: HandWorker, text: str) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": text})
    worker.answer(claimed, text=text)
    assert list(read_text(redis, job_id)) == [TextChunk(text), StreamEnd("done")]
