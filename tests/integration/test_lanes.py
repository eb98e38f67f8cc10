"""Lanes: each batch waits in its own, so that a large one shuts nobody out."""

from __future__ import annotations

import io
import json
import threading
from collections import Counter
from typing import Any

import pytest
from redis import Redis
from rq import Queue

from queue_service import keys
from queue_service.batch_file import BatchFile
from queue_service.batches import Batches, Status
from queue_service.broker import Broker, Claimed
from queue_service.settings import SubmitSettings
from queue_service.submission import SubmitOptions, submit_file
from tests.cli_helpers import HandWorker, chat_lines
from tests.harness import enqueue_chat, eventually, running_worker, worker_settings

QUEUE = "qsvc:fake"


def submit(redis: Redis, num_lines: int, *, start: int = 1, **submit_settings: int) -> str:
    """Submit a batch of so many lines; others with another start are other batches."""
    text = "\n".join(json.dumps(line) for line in chat_lines(num_lines, start=start))
    options = SubmitOptions(
        queue=QUEUE, model="fake", submit=SubmitSettings.load(**submit_settings)
    )
    return submit_file(redis, BatchFile(io.BytesIO(text.encode()), "lines"), options).batch.id


def line_of(claimed: Claimed) -> int:
    return int(claimed.job_id.rpartition("-")[2])


def lines_of(batch_id: str, claimed: list[Claimed]) -> list[int]:
    return [line_of(one) for one in claimed if one.batch_id == batch_id]


def lanes(redis: Redis) -> list[bytes]:
    found: Any = redis.lrange(keys.lanes(QUEUE), 0, -1)
    return list(found)


def listed_queues(redis: Redis) -> set[str]:
    return {queue.name for queue in Queue.all(connection=redis)}


def only_batch(redis: Redis) -> str:
    """The id of the batch that a submit elsewhere is about to make."""
    ids: Any = eventually(lambda: redis.zrange(keys.batches(), 0, -1), "the batch")
    [batch_id] = ids
    return str(batch_id.decode())


# Turns --------------------------------------------------------------------------------------


def test_a_large_batch_that_came_first_shuts_out_neither_a_small_one_nor_a_plain_job(
    redis: Redis, redis_url: str
) -> None:
    large, small = submit(redis, 2000), submit(redis, 10, start=5001)
    plain = [enqueue_chat(redis, "plain", QUEUE) for _ in range(3)]
    with running_worker(worker_settings(redis_url, slots=8, claim_ahead=4)):
        eventually(lambda: Batches(redis).get(small).status is Status.COMPLETED, "the small one")
        eventually(lambda: all(job.is_finished for job in plain), "the plain ones")
        ended: Any = redis.xinfo_stream(keys.batch_done(small))
        before: Any = redis.xrange(keys.batch_done(large), max=ended["last-generated-id"])
        # Equal turns, and what was claimed at the same time.
        assert len(before) <= 10 + 2 * (8 + 4)
        eventually(lambda: Batches(redis).get(large).ended >= 100, "the large one goes on")


def test_claims_give_plain_jobs_and_every_batch_equal_turns(redis: Redis) -> None:
    first, second = submit(redis, 100), submit(redis, 100, start=5001)
    plain = [enqueue_chat(redis, "plain", QUEUE) for _ in range(100)]
    hand = HandWorker(redis, QUEUE)
    for _ in range(5):
        turns = Counter(one.batch_id for one in hand.claim(9))
        assert turns == {first: 3, second: 3, None: 3}
    third = submit(redis, 100, start=7001)
    assert Counter(one.batch_id for one in hand.claim(8)) == {
        first: 2,
        second: 2,
        third: 2,
        None: 2,
    }
    assert plain[0].get_status() == "started"


def test_the_lines_of_a_batch_are_claimed_in_their_order(redis: Redis) -> None:
    first, second = submit(redis, 30), submit(redis, 30, start=5001)
    hand = HandWorker(redis, QUEUE)
    claimed = [one for count in (1, 7, 2, 50) for one in hand.claim(count)]
    assert lines_of(first, claimed) == lines_of(second, claimed) == list(range(1, 31))


def test_lines_that_are_given_back_are_claimed_before_those_behind_them(redis: Redis) -> None:
    batch_id = submit(redis, 20)
    hand = HandWorker(redis, QUEUE)
    broker = Broker(redis, worker="hand", queues=[QUEUE], lease_seconds=60)
    assert broker.requeue(hand.claim(5)) == 5
    assert sorted(lines_of(batch_id, hand.claim(10))) == list(range(1, 11))


# A lane's life ------------------------------------------------------------------------------


def test_a_drained_lane_disappears(redis: Redis) -> None:
    batch_id = submit(redis, 3)
    lane = keys.lane(QUEUE, batch_id)
    assert listed_queues(redis) == {QUEUE, lane}
    assert Queue(lane, connection=redis).count == 3
    hand = HandWorker(redis, QUEUE)
    claimed = hand.claim(3)
    assert hand.claim() == []
    assert listed_queues(redis) == {QUEUE}
    assert lanes(redis) == []
    hand.answer(*claimed)
    assert Batches(redis).get(batch_id).status is Status.COMPLETED


def test_other_lanes_keep_their_turns_when_one_disappears(redis: Redis) -> None:
    short, long = submit(redis, 1), submit(redis, 10, start=5001)
    hand = HandWorker(redis, QUEUE)
    assert len(hand.claim(4)) == 4
    assert lanes(redis) in ([b"-", long.encode()], [long.encode(), b"-"])
    assert listed_queues(redis) == {QUEUE, keys.lane(QUEUE, long)}
    assert lines_of(long, hand.claim()) == list(range(4, 11))
    assert short not in listed_queues(redis)


def test_a_cancel_removes_the_lane_at_once(redis: Redis) -> None:
    canceled, other = submit(redis, 5), submit(redis, 5, start=5001)
    Batches(redis).cancel(canceled)
    assert listed_queues(redis) == {QUEUE, keys.lane(QUEUE, other)}
    assert canceled.encode() not in lanes(redis)
    assert not redis.exists(keys.rq_queue(keys.lane(QUEUE, canceled)))
    hand = HandWorker(redis, QUEUE)
    assert lines_of(other, hand.claim()) == [1, 2, 3, 4, 5]
    Batches(redis).cancel(other)
    assert hand.claim() == []
    assert lanes(redis) == []


# Windows ------------------------------------------------------------------------------------


def test_a_windowed_submit_feeds_as_the_batch_drains_and_waits_otherwise(redis: Redis) -> None:
    num_lines, window, chunk = 60, 10, 5
    ids: list[str] = []
    feeder = threading.Thread(
        target=lambda: ids.append(submit(redis, num_lines, window_lines=window, chunk_lines=chunk))
    )
    feeder.start()
    batch_id = only_batch(redis)
    batches, hand = Batches(redis), HandWorker(redis, QUEUE)

    def waiting() -> int:
        batch = batches.get(batch_id)
        return batch.total - batch.ended

    for drained in range(0, num_lines, 10):
        if drained < num_lines - 20:
            eventually(lambda: waiting() >= window, "the window is full")
            assert feeder.is_alive()
        # One chunk is sent ahead of the one that fills the window.
        assert waiting() <= window + 2 * chunk
        claimed = eventually(lambda: hand.claim(10), "lines")
        hand.answer(*claimed)
        while len(claimed) < 10:
            more = eventually(lambda claimed=claimed: hand.claim(10 - len(claimed)), "the rest")  # type: ignore[misc]
            hand.answer(*more)
            claimed += more
    feeder.join(15)
    assert not feeder.is_alive()
    batch = batches.get(ids[0])
    assert (batch.status, batch.completed) == (Status.COMPLETED, num_lines)


def test_a_submit_that_waits_for_room_ends_with_a_cancel(redis: Redis) -> None:
    feeder = threading.Thread(target=lambda: submit(redis, 60, window_lines=10, chunk_lines=5))
    feeder.start()
    batch_id = only_batch(redis)
    batches = Batches(redis)
    eventually(lambda: batches.get(batch_id).total >= 10, "the window is full")
    batches.cancel(batch_id)
    feeder.join(15)
    assert not feeder.is_alive()
    batch = batches.get(batch_id)
    assert batch.status is Status.CANCELLED
    assert batch.cancelled == batch.total < 60
    assert HandWorker(redis, QUEUE).claim() == []


# Newer formats ------------------------------------------------------------------------------


def test_jobs_of_a_newer_format_wait_for_a_newer_worker_and_hold_nobody_up(
    redis: Redis, redis_url: str
) -> None:
    with pytest.MonkeyPatch.context() as newer:
        newer.setattr(keys, "FORMAT_VERSION", keys.FORMAT_VERSION + 1)
        batch_id = submit(redis, 5)
    plain = [enqueue_chat(redis, "newer", QUEUE) for _ in range(3)]
    for job in plain:
        redis.hset(keys.rq_job(job.id), "qsvc_v", keys.FORMAT_VERSION + 1)
    known = submit(redis, 3, start=5001)
    behind = enqueue_chat(redis, "behind", QUEUE)
    with running_worker(worker_settings(redis_url, burst=True)) as worker:
        worker.join()  # a burst ends: what it cannot serve is not its work
    assert Batches(redis).get(known).status is Status.COMPLETED
    assert behind.is_finished
    assert [job.get_status() for job in plain] == ["queued"] * 3
    assert Batches(redis).get(batch_id).ended == 0
    assert keys.lane(QUEUE, batch_id) in listed_queues(redis)
    with pytest.MonkeyPatch.context() as newer:
        newer.setattr(keys, "FORMAT_VERSION", keys.FORMAT_VERSION + 1)
        claimed = HandWorker(redis, QUEUE).claim()
    assert lines_of(batch_id, claimed) == [1, 2, 3, 4, 5]
    assert [one.job_id for one in claimed if one.batch_id is None] == [job.id for job in plain]


def test_many_jobs_of_a_newer_format_do_not_hide_another_queue(
    redis: Redis, redis_url: str
) -> None:
    with pytest.MonkeyPatch.context() as newer:
        newer.setattr(keys, "FORMAT_VERSION", keys.FORMAT_VERSION + 1)
        submit(redis, 2500)
    low = enqueue_chat(redis, "low", f"{QUEUE}:low")
    with running_worker(worker_settings(redis_url, burst=True)) as worker:
        worker.join()
    assert low.is_finished
