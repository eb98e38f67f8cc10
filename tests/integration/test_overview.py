"""What `qsvc top` shows, read from a real server with workers, without any, and with dead ones."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from queue_service import keys
from queue_service.batch_file import BatchFile
from queue_service.batches import Batches
from queue_service.connection import connect
from queue_service.local_server import LocalServer
from queue_service.overview import Observer, Overview, QueueView
from queue_service.settings import RedisSettings
from queue_service.submission import SubmitOptions, submit_file
from tests.cli_helpers import HandWorker, chat_lines
from tests.harness import (
    LONG_TEXT,
    SLOW_STEP_SECONDS,
    enqueue_chat,
    eventually,
    running_worker,
    worker_settings,
)

FAKE = keys.queue_name("fake")
LEASE_SECONDS = 10


def observer(connection: Redis, clock: Callable[[], float] | None = None) -> Observer:
    clocks = {} if clock is None else {"clock": clock}
    return Observer(connection, lease_seconds=LEASE_SECONDS, **clocks)


def submit(connection: Redis, num_lines: int, *, queue: str = FAKE, key: str = "") -> str:
    text = "\n".join(json.dumps(line) for line in chat_lines(num_lines))
    file = BatchFile(io.BytesIO(text.encode()), "lines")
    options = SubmitOptions(queue=queue, model="a model", key=key)
    return submit_file(connection, file, options).batch.id


def queue_of(overview: Overview, name: str) -> QueueView:
    [found] = [queue for queue in overview.queues if queue.name == name]
    return found


def list_worker(redis: Redis, name: str, *, seconds_ago: float | None, queue: str = FAKE) -> None:
    """List a worker as one that beat last so long ago; None: its registration has expired."""
    key = keys.rq_worker(name)
    redis.sadd(f"{keys.RQ}:workers", key)
    if seconds_ago is not None:
        beat = datetime.now(UTC) - timedelta(seconds=seconds_ago)
        fields = {"queues": queue, "state": "busy", "last_heartbeat": beat.isoformat()}
        redis.hset(key, mapping=fields)


def test_an_empty_server_has_nothing_to_show(redis: Redis) -> None:
    overview = observer(redis).look()
    assert overview.at > 1_700_000_000
    assert overview == Overview(overview.at, workers=[], queues=[], batches=[], longest=[])
    assert json.loads(json.dumps(overview.to_object()))["workers"] == []


def test_workers_of_two_models_what_they_run_and_who_waits(redis: Redis, redis_url: str) -> None:
    one = worker_settings(redis_url, name="one", alias="first", slots=2, claim_ahead=0)
    two = worker_settings(redis_url, name="two", alias="second", slots=2, claim_ahead=0)
    with (
        running_worker(one, step_seconds=SLOW_STEP_SECONDS) as first,
        running_worker(two, step_seconds=SLOW_STEP_SECONDS) as second,
    ):
        jobs = [enqueue_chat(redis, LONG_TEXT, keys.queue_name("first")) for _ in range(4)]
        look = observer(redis).look
        eventually(
            lambda: queue_of(look(), keys.queue_name("first")).num_waiting == 2, "two that wait"
        )
        overview = eventually(
            lambda: (found := look()).workers and found.workers[0].rows == 2 and found, "a beat"
        )
        assert isinstance(overview, Overview)
        assert [worker.name for worker in overview.workers] == ["one", "two"]
        assert [worker.is_alive for worker in overview.workers] == [True, True]
        assert [worker.rows for worker in overview.workers] == [2, 0]
        assert {worker.model for worker in overview.workers} == {"fake"}
        queue = queue_of(overview, keys.queue_name("first"))
        assert (queue.num_waiting, queue.num_running, queue.is_served) == (2, 2, True)
        assert queue_of(overview, keys.DEFAULT_QUEUE).is_empty
        assert [job.worker for job in overview.longest] == ["one", "one"]
        assert {job.job_id for job in overview.longest} == {job.id for job in jobs[:2]}
        assert all(0 <= job.seconds < 60 for job in overview.longest)
        assert LONG_TEXT[:9] not in json.dumps(overview.to_object())
        first.hasten()
        second.hasten()
        done = eventually(
            lambda: (found := look()).workers[0].finished == 4 and found, "four that finished"
        )
        assert isinstance(done, Overview)
        assert done.workers[0].completion_tokens == 4 * len(LONG_TEXT)
        assert done.longest == []


def test_rates_come_from_the_counters_between_two_looks(redis: Redis) -> None:
    now = [0.0]
    watching = observer(redis, lambda: now[0])
    list_worker(redis, "one", seconds_ago=0)
    card = {"rows": 4, "completion_tokens": 1000, "prompt_tokens": 5000, "finished": 10}
    redis.hset(keys.worker_card("one"), mapping={**card, "prefix_hits": 3, "prefix_misses": 1})
    [worker] = watching.look().workers
    assert worker.tokens_per_second is None, "nothing is known by one look"
    assert worker.hit_share == 0.75
    now[0] = 5
    redis.hset(keys.worker_card("one"), mapping={"completion_tokens": 1500, "prompt_tokens": 5050})
    [worker] = watching.look().workers
    assert worker.tokens_per_second == pytest.approx(100)
    assert worker.prompt_tokens_per_second == pytest.approx(10)

    redis.hset(keys.worker_card("one"), "rows", 0)
    now[0] = 60
    assert watching.look().workers[0].tokens_per_second == 0, "it has nothing to do"


def test_a_worker_without_a_beat_is_dead(redis: Redis) -> None:
    list_worker(redis, "late", seconds_ago=LEASE_SECONDS + 5)
    list_worker(redis, "expired", seconds_ago=None)
    list_worker(redis, "lives", seconds_ago=1)
    list_worker(redis, "somebody else's", seconds_ago=1, queue="mails")
    workers = {worker.name: worker for worker in observer(redis).look().workers}
    assert {name: worker.is_alive for name, worker in workers.items()} == {
        "late": False,
        "expired": False,
        "lives": True,
    }
    assert workers["expired"].beat_seconds is None
    assert workers["late"].beat_seconds == pytest.approx(LEASE_SECONDS + 5, abs=3)


def test_a_queue_that_only_a_dead_worker_serves_is_not_served(redis: Redis) -> None:
    list_worker(redis, "late", seconds_ago=LEASE_SECONDS + 5)
    enqueue_chat(redis, "hello", FAKE)
    queue = queue_of(observer(redis).look(), FAKE)
    assert (queue.num_waiting, queue.is_served) == (1, False)


def test_queues_of_other_applications_are_not_shown(redis: Redis) -> None:
    enqueue_chat(redis, "hello", "mails")
    assert observer(redis).look().queues == []


def test_open_batches_come_with_their_pace(redis: Redis) -> None:
    now = [0.0]
    watching = observer(redis, lambda: now[0])
    batch_id, done_id = submit(redis, 20), submit(redis, 1, queue="qsvc:other")
    HandWorker(redis, "qsvc:other").answer_all()
    worker = HandWorker(redis, FAKE)
    claimed = worker.claim(12)
    worker.answer(*claimed[:4])
    [first] = watching.look().batches
    assert first.batch.id == batch_id != done_id
    assert (first.batch.ended, first.num_running, first.num_waiting) == (4, 8, 8)
    assert first.rates.seconds_left is None
    now[0] = 8
    worker.answer(*claimed[4:8])
    [second] = watching.look().batches
    assert second.rates.lines_per_second == pytest.approx(0.5)
    assert second.rates.tokens_per_second == pytest.approx(12 / 8)
    assert second.rates.seconds_left == pytest.approx(24)
    queue = queue_of(watching.look(), FAKE)
    assert (queue.num_waiting, queue.num_running) == (8, 4), "lanes are counted in their queue"
    worker.answer(*claimed[8:])
    worker.answer_all()
    assert watching.look().batches == []


def test_a_batch_among_many_ended_ones_is_found(redis: Redis) -> None:
    now = [0.0]
    watching = observer(redis, lambda: now[0])
    old = submit(redis, 2)
    redis.zadd(keys.batches(), {old: 1})
    for number in range(620):
        redis.hset(keys.batch(f"batch_{number}"), "status", "completed")
        redis.zadd(keys.batches(), {f"batch_{number}": 1000 + number})
    assert [view.batch.id for view in watching.look().batches] == [old]
    assert [view.batch.id for view in watching.look().batches] == [old]
    Batches(redis).cancel(old)
    assert watching.look().batches == []
    Batches(redis).retry_failed(old)
    now[0] = 31
    assert [view.batch.id for view in watching.look().batches] == [old]


def test_the_longest_running_come_first(redis: Redis) -> None:
    for number in range(15):
        enqueue_chat(redis, "hello", FAKE, job_id=f"job{number}")
    HandWorker(redis, FAKE).claim()
    for number in range(15):
        started = datetime.now(UTC) - timedelta(seconds=100 * number)
        redis.hset(keys.rq_job(f"job{number}"), "started_at", started.isoformat())
    longest = observer(redis).look().longest
    assert [job.job_id for job in longest] == [f"job{number}" for number in range(14, 4, -1)]
    assert longest[0].seconds == pytest.approx(1400, abs=5)
    assert longest[0].worker == "hand"


def test_what_others_wrote_wrongly_is_left_out(redis: Redis) -> None:
    good = submit(redis, 1)
    redis.sadd(f"{keys.RQ}:workers", b"rq:worker:\xff\x1b[2J", "rq:worker:list")
    redis.lpush(keys.rq_worker("list"), "no hash")
    redis.set(keys.worker_card("list"), "no hash")
    redis.hset(keys.worker_card("\ufffd\x1b[2J"), "rows", "many")
    redis.zadd(keys.batches(), {"batch_text": 5e9, "batch_half": 5e9, "batch_odd": 5e9})
    redis.set(keys.batch("batch_text"), "no hash")
    redis.hset(keys.batch("batch_half"), mapping={"status": "in_progress"})
    redis.hset(keys.batch("batch_odd"), mapping={"status": "who knows"})
    redis.sadd(f"{keys.RQ}:queues", "rq:queue:qsvc:wrong")
    redis.set(keys.rq_queue("qsvc:wrong"), "no list")
    redis.set(keys.rq_started(FAKE), "no sorted set")
    overview = observer(redis).look()
    assert [view.batch.id for view in overview.batches] == [good]
    assert not any(worker.is_alive for worker in overview.workers)
    assert [queue.name for queue in overview.queues] == [FAKE]


def test_suspended_workers_are_noticed(redis: Redis) -> None:
    redis.set(f"{keys.RQ}:suspended", 1)
    assert observer(redis).look().is_suspended


def test_a_server_that_was_away_is_looked_at_again(
    make_server: Callable[..., LocalServer], kill_server: Callable[[LocalServer], None]
) -> None:
    server = make_server()
    with connect(RedisSettings.load(url=server.start())) as connection:
        watching = observer(connection)
        batch_id = submit(connection, 3)
        assert [view.batch.id for view in watching.look().batches] == [batch_id]
        connection.execute_command("WAITAOF", 1, 0, 4000)
        kill_server(server)
        with pytest.raises(RedisConnectionError):
            watching.look()
        server.start()

        def again() -> Any:
            try:
                return watching.look().batches
            except RedisConnectionError:
                return None

        [view] = eventually(again, "the batch, from the server's disk")
        assert view.batch.id == batch_id
