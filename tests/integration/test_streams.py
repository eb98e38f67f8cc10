"""A job's text as a reader sees it: while it runs, after its end, over a change of workers.

Every test has a reader of each kind.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterator
from typing import Any, Protocol, TypeVar

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from queue_service import keys
from queue_service.batches import Batches
from queue_service.client import (
    AsyncStreamReader,
    End,
    EndReason,
    Event,
    Reconnect,
    Restarted,
    StreamReader,
    Text,
    TextKind,
    async_stream_text,
    async_wait,
    enqueue_chat,
    stream_text,
    wait,
)
from queue_service.errors import JobFailed, JobNotFound, TextReplaced
from queue_service.results import JobResult
from tests.cli_helpers import HandWorker

QUEUE = "qsvc:tests"
DONE = End(EndReason.DONE)

_T = TypeVar("_T")


class Reader(Protocol):
    """What both kinds of readers are to a test."""

    @property
    def cursor(self) -> str: ...

    def __iter__(self) -> Iterator[Event]: ...

    def __next__(self) -> Event: ...


class Client(Protocol):
    """The client library, of one kind."""

    def read(self, job_id: str, **options: Any) -> Reader: ...

    def text(self, job_id: str, **options: Any) -> Iterator[str]: ...

    def wait(self, job_id: str, **options: Any) -> JobResult: ...


class SyncClient:
    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    def read(self, job_id: str, **options: Any) -> Reader:
        return StreamReader(self._connection, job_id, **options)

    def text(self, job_id: str, **options: Any) -> Iterator[str]:
        return stream_text(self._connection, job_id, **options)

    def wait(self, job_id: str, **options: Any) -> JobResult:
        return wait(self._connection, job_id, **options)


class AsyncClient:
    """Takes one event after the other from an event loop."""

    def __init__(self, connection: AsyncRedis, runner: asyncio.Runner) -> None:
        self._connection = connection
        self._runner = runner

    def read(self, job_id: str, **options: Any) -> Reader:
        return DrivenReader(AsyncStreamReader(self._connection, job_id, **options), self._runner)

    def text(self, job_id: str, **options: Any) -> Iterator[str]:
        texts = async_stream_text(self._connection, job_id, **options)
        while True:
            try:
                yield self._runner.run(_awaited(anext(texts)))
            except StopAsyncIteration:
                return

    def wait(self, job_id: str, **options: Any) -> JobResult:
        return self._runner.run(async_wait(self._connection, job_id, **options))


class DrivenReader:
    def __init__(self, reader: AsyncStreamReader, runner: asyncio.Runner) -> None:
        self._reader = reader
        self._runner = runner

    @property
    def cursor(self) -> str:
        return self._reader.cursor

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        try:
            return self._runner.run(_awaited(anext(self._reader)))
        except StopAsyncIteration:
            raise StopIteration from None


async def _awaited(value: Awaitable[_T]) -> _T:
    return await value


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, redis: Redis, redis_url: str) -> Iterator[Client]:
    if request.param == "sync":
        yield SyncClient(redis)
        return
    with asyncio.Runner() as runner:
        connection = AsyncRedis.from_url(redis_url)
        yield AsyncClient(connection, runner)
        runner.run(connection.aclose())


@pytest.fixture
def worker(redis: Redis) -> HandWorker:
    return HandWorker(redis, QUEUE)


def enqueue(redis: Redis) -> str:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    return enqueue_chat(redis, body, queue=QUEUE)


def plain(events: Iterator[Event] | Reader) -> list[str | Restarted | End]:
    """Return events with no more of a text than the text."""
    return [event.text if isinstance(event, Text) else event for event in events]


def next_text(reader: Reader) -> str:
    event = next(reader)
    assert isinstance(event, Text)
    return event.text


def error(message: str) -> End:
    return End(EndReason.ERROR, message)


def test_the_text_of_a_running_job_comes_as_it_is_written(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    reader = client.read(job_id)
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "once "})
    assert next(reader) == Text(0, TextKind.TEXT, "once ", first_token=0, attempt=1)
    worker.stream(claimed, 2, {"i": 1, "a": 1, "t": "upon "}, {"i": 2, "a": 1, "t": "a "})
    assert [next_text(reader), next_text(reader)] == ["upon ", "a "]
    worker.stream(claimed, 3, {"i": 3, "a": 1, "t": "time"})
    worker.answer(claimed, text="once upon a time")
    assert plain(reader) == ["time", DONE]
    assert plain(reader) == []


def test_a_late_reader_gets_the_whole_text(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "all of "}, {"i": 2, "a": 1, "t": "it"})
    worker.answer(claimed, text="all of it")
    for _ in range(2):
        assert plain(client.read(job_id)) == ["all of ", "it", DONE]


def test_a_finished_job_that_never_streamed_gives_its_answer_at_once(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    worker.answer(*worker.claim(), text="the answer")
    assert list(client.read(job_id)) == [Text(0, TextKind.TEXT, "the answer"), DONE]
    assert not redis.exists(keys.watch(job_id))


def test_a_job_that_ends_before_its_worker_hears_of_the_reader_is_read_to_its_end(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    moments = iter([0.0])

    def clock() -> float:
        moment = next(moments, None)
        if moment is None:  # the reader is in its loop: it is about to ask for the stream
            worker.answer(claimed, text="quick")
            return 1.0
        return moment

    assert plain(client.read(job_id, clock=clock)) == ["quick", DONE]


def test_reading_asks_for_the_stream_of_a_job_that_has_not_ended_again_and_again(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    now = 0.0
    reader = client.read(job_id, clock=lambda: now)
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "a"}, {"i": 1, "a": 1, "t": "b"})
    assert next_text(reader) == "a"
    assert 0 < redis.ttl(keys.watch(job_id)) <= 30
    redis.delete(keys.watch(job_id))
    worker.stream(claimed, 2, {"i": 2, "a": 1, "t": "c"})
    assert [next_text(reader), next_text(reader)] == ["b", "c"]
    assert not redis.exists(keys.watch(job_id)), "asked again at once"
    now = 11.0
    worker.stream(claimed, 3, {"i": 3, "a": 1, "t": "d"})
    assert next_text(reader) == "d"
    assert redis.exists(keys.watch(job_id))


def test_an_unknown_job_is_an_error_before_anything_is_read(client: Client) -> None:
    with pytest.raises(JobNotFound, match="no-such-job"):
        next(client.read("no-such-job"))
    with pytest.raises(JobNotFound, match="no-such-job"):
        next(client.text("no-such-job"))
    with pytest.raises(JobNotFound, match="no-such-job"):
        client.wait("no-such-job")


def test_a_job_that_is_deleted_while_it_is_read_is_an_error(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "half"})
    reader = client.read(job_id)
    assert next_text(reader) == "half"
    redis.delete(keys.rq_job(job_id), keys.stream(job_id))
    with pytest.raises(JobNotFound, match=job_id):
        next(reader)


def test_the_stream_of_a_job_that_asked_to_be_deleted_at_its_end_is_read(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "all"})
    worker.answer(claimed, text="all")
    redis.delete(keys.rq_job(job_id), keys.rq_results(job_id))
    assert plain(client.read(job_id)) == ["all", DONE]


def test_a_failed_job_ends_with_its_reason(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    worker.fail(*worker.claim(), code="timeout")
    assert plain(client.read(job_id)) == [error("it failed: timeout")]


def test_a_refused_line_ends_with_its_reason(redis: Redis, client: Client) -> None:
    redis.hset(keys.batch_errors("batch_1"), "2", json.dumps({"message": "it is wrong"}))
    assert plain(client.read("batch_1-2")) == [error("it is wrong")]


def test_a_job_that_fails_half_way_ends_with_its_reason_after_its_text(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "half"})
    worker.fail(claimed, code="timeout")
    assert plain(client.read(job_id)) == ["half", error("it failed: timeout")]


@pytest.mark.parametrize("is_running", [False, True])
def test_a_cancelled_job_ends_as_cancelled(
    redis: Redis, client: Client, worker: HandWorker, is_running: bool
) -> None:
    job_id = enqueue(redis)
    text = []
    if is_running:
        [claimed] = worker.claim()
        worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "half"})
        text = ["half"]
    Batches(redis).cancel_job(job_id)
    assert plain(client.read(job_id)) == [*text, End(EndReason.CANCELLED)]


# Changes of workers ---------------------------------------------------------------------------


def test_a_worker_that_tells_another_text_restarts_it(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "}, {"i": 1, "a": 1, "t": "two "})
    worker.stream(claimed, 2, {"i": 0, "a": 2, "t": "uno "}, {"i": 1, "a": 2, "t": "dos"})
    # What the first worker still had under way.
    worker.stream(claimed, 3, {"i": 2, "a": 1, "t": "three"})
    worker.answer(claimed, text="uno dos")
    assert plain(client.read(job_id)) == ["one ", "two ", Restarted(0), "uno ", "dos", DONE]


def test_a_worker_that_goes_on_where_the_last_one_stopped_restarts_nothing(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "})
    worker.stream(claimed, 2, {"i": 1, "a": 2, "t": "two"})
    worker.answer(claimed, text="one two")
    assert plain(client.read(job_id)) == ["one ", "two", DONE]


def test_a_worker_that_tells_the_same_once_more_repeats_nothing(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "}, {"i": 1, "a": 1, "t": "two "})
    worker.stream(claimed, 2, {"i": 0, "a": 2, "t": "one"}, {"i": 1, "a": 2, "t": " two three"})
    worker.answer(claimed, text="one two three")
    assert plain(client.read(job_id)) == ["one ", "two ", "three", DONE]


def test_a_worker_that_begins_at_an_index_seen_replaces_what_was_told_from_there(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "}, {"i": 1, "a": 1, "t": "two"})
    worker.stream(claimed, 2, {"i": 1, "a": 2, "t": "two"}, {"i": 2, "a": 2, "t": " three"})
    worker.answer(claimed, text="one two three")
    assert plain(client.read(job_id)) == ["one ", "two", " three", DONE]


def test_another_choice_that_begins_anew_restarts_nothing(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "})
    other = {"i": 0, "a": 2, "c": 1, "t": "uno"}
    worker.stream(claimed, 2, other, {"i": 1, "a": 2, "t": "two"})
    worker.answer(claimed, text="one two")
    assert list(client.read(job_id)) == [
        Text(0, TextKind.TEXT, "one ", 0, 1),
        Text(1, TextKind.TEXT, "uno", 0, 2),
        Text(0, TextKind.TEXT, "two", 1, 2),
        DONE,
    ]


def test_kinds_of_text_are_told_apart_and_unknown_ones_left_out(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    thought = {"i": 0, "a": 1, "k": "reasoning", "t": "hm"}
    worker.stream(claimed, 1, thought, {"i": 0, "a": 1, "k": "image", "t": "?"})
    worker.stream(claimed, 2, {"i": 1, "a": 2, "t": "yes"})
    worker.fail(claimed, code="timeout")
    *texts, _ = client.read(job_id)
    assert texts == [
        Text(0, TextKind.REASONING, "hm", 0, 1),
        Text(0, TextKind.TEXT, "yes", 1, 2),
    ]


# Results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "rest"),
    [("one two", ["two"]), ("another answer", [Restarted(0), "another answer"])],
)
def test_what_the_last_worker_did_not_stream_comes_from_the_result(
    redis: Redis,
    client: Client,
    worker: HandWorker,
    answer: str,
    rest: list[str | Restarted],
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "})
    worker.answer(claimed, text=answer)
    assert plain(client.read(job_id)) == ["one ", *rest, DONE]


def test_a_stream_that_expires_under_its_reader_is_completed_from_the_result(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "})
    reader = client.read(job_id)
    assert next_text(reader) == "one "
    worker.answer(claimed, text="one two")
    redis.delete(keys.stream(job_id))
    assert plain(reader) == ["two", DONE]


@pytest.mark.parametrize("text", ["", "é😀\u2028\x00\n"])
def test_any_text_comes_through(
    redis: Redis, client: Client, worker: HandWorker, text: str
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": text})
    worker.answer(claimed, text=text)
    assert plain(client.read(job_id)) == [*([text] if text else []), DONE]


# Cursors --------------------------------------------------------------------------------------


def test_a_reader_goes_on_from_the_cursor_of_another(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "}, {"i": 1, "a": 1, "t": "two "})
    first = client.read(job_id)
    assert [next_text(first), next_text(first)] == ["one ", "two "]
    worker.stream(claimed, 2, {"i": 2, "a": 1, "t": "three "})
    second = client.read(job_id, after=first.cursor)
    assert next_text(second) == "three "
    # Another worker tells it all once more.
    worker.stream(claimed, 3, {"i": 0, "a": 2, "t": "one two three four"})
    third = client.read(job_id, after=second.cursor)
    assert next_text(third) == "four"
    worker.answer(claimed, text="one two three four.")
    fourth = client.read(job_id, after=third.cursor)
    assert plain(fourth) == [".", DONE]
    assert plain(client.read(job_id, after=fourth.cursor)) == [DONE]


@pytest.mark.parametrize(
    ("answer", "rest"), [("one two", ["two"]), ("uno dos", [Restarted(0), "uno dos"])]
)
def test_a_cursor_outlives_its_stream(
    redis: Redis,
    client: Client,
    worker: HandWorker,
    answer: str,
    rest: list[str | Restarted],
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "})
    reader = client.read(job_id)
    next(reader)
    worker.answer(claimed, text=answer)
    redis.delete(keys.stream(job_id))
    assert plain(client.read(job_id, after=reader.cursor)) == [*rest, DONE]


@pytest.mark.parametrize(
    "cursor", ["", "0-0", "[]", '{"v":1,"job":"another","id":"1-0","shown":{}}', '{"v":1}']
)
def test_what_is_no_cursor_of_the_job_is_refused_at_once(client: Client, cursor: str) -> None:
    with pytest.raises(ValueError, match="no cursor of job-1"):
        client.read("job-1", after=cursor)


# Plain text and waiting -----------------------------------------------------------------------


def test_plain_text_is_that_of_one_choice(redis: Redis, client: Client, worker: HandWorker) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    thought = {"i": 0, "a": 1, "k": "reasoning", "t": "hm"}
    other = {"i": 0, "a": 1, "c": 1, "t": "other"}
    worker.stream(claimed, 1, thought, other, {"i": 1, "a": 1, "t": "mine"})
    assert next(client.text(job_id)) == "mine"
    assert next(client.text(job_id, choice=1)) == "other"
    redis.delete(keys.stream(job_id))
    worker.answer(claimed, text="mine alone")
    assert list(client.text(job_id)) == ["mine alone"]


def test_plain_text_that_is_replaced_is_an_error(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one"}, {"i": 0, "a": 2, "t": "uno"})
    texts = client.text(job_id)
    assert next(texts) == "one"
    with pytest.raises(TextReplaced, match=job_id):
        next(texts)


def test_plain_text_of_a_job_that_fails_ends_in_an_error(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "half"})
    worker.fail(claimed, code="timeout")
    texts = client.text(job_id)
    assert next(texts) == "half"
    with pytest.raises(JobFailed, match="it failed: timeout"):
        next(texts)


def test_waiting_gives_the_result_of_a_job_however_it_ended(
    redis: Redis, client: Client, worker: HandWorker
) -> None:
    answered, failed, cancelled = [enqueue(redis) for _ in range(3)]
    first, second, _ = worker.claim()
    worker.answer(first, text="the answer")
    worker.fail(second, code="timeout")
    Batches(redis).cancel_job(cancelled)
    body = client.wait(answered).body
    assert body is not None
    assert body["choices"][0]["message"]["content"] == "the answer"
    assert (client.wait(failed).error or {})["code"] == "timeout"
    assert client.wait(cancelled).status == "canceled"


def test_waiting_for_a_job_that_does_not_end_has_an_end(redis: Redis, client: Client) -> None:
    job_id = enqueue(redis)
    with pytest.raises(TimeoutError, match=f"{job_id} is queued after 0.05 s"):
        client.wait(job_id, timeout_seconds=0.05)


# Connections ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"decode_responses": True}, {"protocol": 3}, {"protocol": 2}])
def test_a_connection_may_have_answers_of_any_form(
    redis: Redis, redis_url: str, worker: HandWorker, options: dict[str, Any]
) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "öne "})
    with Redis.from_url(redis_url, **options) as connection:
        reader = StreamReader(connection, job_id)
        assert next_text(reader) == "öne "
        worker.answer(claimed, text="öne two")
        assert plain(reader) == ["two", DONE]
        assert wait(connection, job_id).body is not None


def test_a_connection_may_have_a_timeout_shorter_than_a_reader_blocks(
    redis: Redis, redis_url: str, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queue_service.dialogue._BLOCK_SECONDS", 60)
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    outages: list[Exception] = []
    with Redis.from_url(redis_url, socket_timeout=2) as connection:
        reconnect = Reconnect(on_outage=outages.append)
        with pytest.raises(TimeoutError):
            wait(connection, job_id, timeout_seconds=2.5, reconnect=reconnect)
    assert outages == []
    assert claimed.job_id == job_id


def test_a_server_that_takes_no_writes_is_read_from(redis: Redis, worker: HandWorker) -> None:
    job_id = enqueue(redis)
    [claimed] = worker.claim()
    worker.stream(claimed, 1, {"i": 0, "a": 1, "t": "one"})
    redis.config_set("maxmemory", 1)
    try:
        assert next_text(StreamReader(redis, job_id)) == "one"
    finally:
        redis.config_set("maxmemory", 0)
