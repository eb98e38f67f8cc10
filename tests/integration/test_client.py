"""The client library with workers, servers and programs that go away while it reads."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
from redis import AuthenticationError, Redis
from redis.asyncio import Redis as AsyncRedis

from queue_service import keys
from queue_service.client import (
    AsyncStreamReader,
    End,
    EndReason,
    Event,
    Reconnect,
    StreamReader,
    Text,
    TextKind,
    async_stream_text,
    async_wait,
    enqueue_chat,
    enqueue_completion,
    stream_text,
    wait,
)
from queue_service.connection import connect
from queue_service.errors import ServerUnavailable
from queue_service.local_server import LocalServer
from queue_service.settings import RedisSettings
from queue_service.streams import text_of
from tests.cli_helpers import ROOT, HandWorker
from tests.document_code import python_blocks, run_block
from tests.harness import (
    LONG_TEXT,
    SLOW_STEP_SECONDS,
    chat_body,
    eventually,
    running_worker,
    worker_settings,
)

DONE = End(EndReason.DONE)
Kill = Callable[[LocalServer], None]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


class Readers:
    """Readers of one job on threads of their own, one of each kind and one that is always new."""

    def __init__(self, pool: ThreadPoolExecutor, url: str, job_id: str) -> None:
        self._url = url
        self._job_id = job_id
        self.outages: list[Exception] = []
        self._num_seen = [0, 0, 0]
        reads = (self._read, self._read_async, self._read_by_cursors)
        self._futures: list[Future[list[Event]]] = [pool.submit(read) for read in reads]

    def wait_for_texts(self, count: int) -> None:
        """Wait until each has seen so many events."""
        eventually(lambda: min(self._num_seen) >= count, f"every reader has {count} events")

    def results(self) -> list[list[Event]]:
        """Return all events of each reader, when it is at the end."""
        return [future.result(30) for future in self._futures]

    @property
    def _reconnect(self) -> Reconnect:
        return Reconnect(most_pause_seconds=0.2, on_outage=self.outages.append)

    def _read(self) -> list[Event]:
        events = []
        with closing(connect(RedisSettings.load(url=self._url))) as connection:
            for event in StreamReader(connection, self._job_id, reconnect=self._reconnect):
                events.append(event)
                self._num_seen[0] += 1
        return events

    def _read_async(self) -> list[Event]:
        async def read() -> list[Event]:
            events = []
            async with AsyncRedis.from_url(self._url) as connection:
                reader = AsyncStreamReader(connection, self._job_id, reconnect=self._reconnect)
                async for event in reader:
                    events.append(event)
                    self._num_seen[1] += 1
            return events

        return asyncio.run(read())

    def _read_by_cursors(self) -> list[Event]:
        events: list[Event] = []
        cursor = None
        with Redis.from_url(self._url) as connection:
            while not events or not isinstance(events[-1], End):
                reader = StreamReader(
                    connection, self._job_id, after=cursor, reconnect=self._reconnect
                )
                events.append(next(reader))
                self._num_seen[2] += 1
                cursor = reader.cursor
        return events


def assert_told_once(events: Sequence[Event], text: str) -> None:
    """There is nothing but texts, which make up the whole, and the end."""
    *texts, end = events
    assert end == DONE
    assert all(isinstance(event, Text) for event in texts)
    assert "".join(event.text for event in texts if isinstance(event, Text)) == text


@contextmanager
def two_workers(url: str, is_time: Callable[[], None]) -> Iterator[None]:
    """Run a slow worker, which gives its jobs back when it is time, and then a quick one."""
    settings = worker_settings(url, grace_seconds=0, progress_interval_seconds=0.05)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as first:
        is_time()
        first.request_stop()
        first.join()
    with running_worker(worker_settings(url, name="second")):
        yield


# Workers ------------------------------------------------------------------------------------


def test_readers_of_every_kind_see_the_same_text_over_a_change_of_workers(
    redis: Redis, redis_url: str, pool: ThreadPoolExecutor
) -> None:
    """One of them is the program of the README, as it is there."""
    program = next(block for block in python_blocks("README.md") if "xread" in block)
    program = program.replace('"Name three fruits."', repr(LONG_TEXT)).replace(": 32", ": 4000")
    names: dict[str, Any] = {}
    shown = pool.submit(run_block, program, redis_url, names)
    job: Any = eventually(lambda: names.get("job"), "the program has enqueued its job")
    readers = Readers(pool, redis_url, job.id)
    with two_workers(redis_url, lambda: readers.wait_for_texts(5)):
        for events in readers.results():
            assert_told_once(events, LONG_TEXT)
            attempts = {event.attempt for event in events if isinstance(event, Text)}
            assert attempts == {1, 2}
        assert shown.result(30) == LONG_TEXT + "\n" + LONG_TEXT + "\n"
    assert "".join(text for _, text in names["parts"]) == LONG_TEXT


def test_a_job_that_does_not_stream_is_watched_over_a_change_of_workers(
    redis: Redis, redis_url: str, pool: ThreadPoolExecutor
) -> None:
    job_id = enqueue_chat(redis, chat_body(LONG_TEXT))
    readers = Readers(pool, redis_url, job_id)
    with two_workers(redis_url, lambda: readers.wait_for_texts(5)):
        for events in readers.results():
            assert_told_once(events, LONG_TEXT)


def test_what_is_enqueued_is_answered_and_waited_for(redis: Redis, redis_url: str) -> None:
    chat = enqueue_chat(redis, chat_body("hello"))
    completion = enqueue_completion(redis, {"prompt": "hi"}, job_id="mine")
    assert completion == "mine"
    high = enqueue_chat(redis, chat_body("urgent"), queue=keys.queue_name("fake", "high"))
    with running_worker(worker_settings(redis_url)):
        assert [text_of(wait(redis, id).body or {}) for id in (chat, completion, high)] == [
            "hello",
            "hi",
            "urgent",
        ]
        assert "".join(stream_text(redis, chat)) == "hello"


# Outages ------------------------------------------------------------------------------------


def test_a_server_that_is_killed_and_comes_back_costs_readers_nothing(
    make_server: Callable[..., LocalServer], kill_server: Kill, pool: ThreadPoolExecutor
) -> None:
    server = make_server()
    url = server.start()
    with closing(connect(RedisSettings.load(url=url))) as connection:
        job_id = enqueue_chat(connection, {**chat_body(LONG_TEXT), "stream": True})
        waiting = pool.submit(wait, connection, job_id)
        settings = worker_settings(url, redis={"connect_timeout_seconds": 1.0})
        with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
            readers = Readers(pool, url, job_id)
            readers.wait_for_texts(5)
            kill_server(server)
            eventually(lambda: len(readers.outages) >= 3, "every reader has noticed")
            assert server.start() == url
            worker.hasten()
            for events in readers.results():
                assert_told_once(events, LONG_TEXT)
            assert text_of(waiting.result(30).body or {}) == LONG_TEXT
    assert len(readers.outages) == 3, "each reader tells an outage once"


def test_a_server_that_stays_away_is_given_up_and_the_reader_can_go_on_later(
    make_server: Callable[..., LocalServer], kill_server: Kill
) -> None:
    server = make_server()
    url = server.start()
    brief = Reconnect(first_pause_seconds=0.01, give_up_seconds=0.1)
    with closing(connect(RedisSettings.load(url=url))) as connection:
        hand = HandWorker(connection, keys.DEFAULT_QUEUE)
        job_id = enqueue_chat(connection, chat_body("one two"))
        [claimed] = hand.claim()
        hand.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "})
        reader = StreamReader(connection, job_id, reconnect=brief)
        assert next(reader) == Text(0, TextKind.TEXT, "one ", 0, 1)
        kill_server(server)
        for _ in range(2):
            with pytest.raises(ServerUnavailable, match="go on from the reader's cursor"):
                next(reader)
        with pytest.raises(ServerUnavailable):
            wait(connection, job_id, timeout_seconds=0.1)
        server.start()
        hand.answer(claimed, text="one two")
        assert list(reader) == [Text(0, TextKind.TEXT, "two"), DONE]


def test_a_server_that_refuses_a_reader_is_not_waited_for(redis: Redis, redis_url: str) -> None:
    with (
        Redis.from_url(redis_url, username="nobody", password="wrong") as connection,
        pytest.raises(AuthenticationError),
    ):
        next(StreamReader(connection, "job"))


# Programs -----------------------------------------------------------------------------------


def test_a_program_goes_on_where_another_one_stopped(redis: Redis, redis_url: str) -> None:
    hand = HandWorker(redis, keys.DEFAULT_QUEUE)
    job_id = enqueue_chat(redis, chat_body("one two three"))
    [claimed] = hand.claim()
    hand.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "}, {"i": 1, "a": 1, "t": "two "})
    reader = StreamReader(redis, job_id)
    next(reader)
    hand.answer(claimed, text="one two three")
    program = (
        "import sys\n"
        "from redis import Redis\n"
        "from queue_service.client import StreamReader\n"
        "url, job_id, cursor = sys.argv[1:]\n"
        "for event in StreamReader(Redis.from_url(url), job_id, after=cursor): print(event)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, redis_url, job_id, reader.cursor],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [Text(0, TextKind.TEXT, "two ", 1, 1), Text(0, TextKind.TEXT, "three"), DONE]
    assert done.stdout.splitlines() == list(map(str, expected))


def test_a_task_that_is_cancelled_while_it_reads_loses_nothing(
    redis: Redis, redis_url: str
) -> None:
    hand = HandWorker(redis, keys.DEFAULT_QUEUE)
    job_id = enqueue_chat(redis, chat_body("one two"))
    [claimed] = hand.claim()

    async def read() -> list[Event]:
        async with AsyncRedis.from_url(redis_url) as connection:
            reader = AsyncStreamReader(connection, job_id)
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(reader), 0.05)
            hand.stream(claimed, 1, {"i": 0, "a": 1, "t": "one "})
            events = [await anext(reader)]
            hand.answer(claimed, text="one two")
            return events + [event async for event in reader]

    assert asyncio.run(read()) == [
        Text(0, TextKind.TEXT, "one ", 0, 1),
        Text(0, TextKind.TEXT, "two"),
        DONE,
    ]


def test_one_event_loop_reads_many_jobs_at_once(redis: Redis, redis_url: str) -> None:
    texts = [f"answer {i}" for i in range(20)]
    job_ids = [enqueue_chat(redis, {**chat_body(text), "stream": True}) for text in texts]

    async def read_all() -> tuple[list[str], list[str]]:
        async with AsyncRedis.from_url(redis_url) as connection:

            async def read(job_id: str) -> str:
                return "".join([text async for text in async_stream_text(connection, job_id)])

            waits = [async_wait(connection, job_id) for job_id in job_ids]
            read_texts = await asyncio.gather(*map(read, job_ids))
            results = await asyncio.gather(*waits)
            return read_texts, [text_of(result.body or {}) for result in results]

    with running_worker(worker_settings(redis_url)):
        assert asyncio.run(read_all()) == (texts, texts)


def test_the_cursor_is_a_text_that_json_can_keep(redis: Redis) -> None:
    hand = HandWorker(redis, keys.DEFAULT_QUEUE)
    job_id = enqueue_chat(redis, chat_body("x" * 5000))
    [claimed] = hand.claim()
    hand.stream(claimed, 1, {"i": 0, "a": 1, "t": "x" * 5000})
    reader = StreamReader(redis, job_id)
    next(reader)
    assert json.loads(json.dumps(reader.cursor)) == reader.cursor
    assert len(reader.cursor) < 200, "it holds the text's digest, not the text"
