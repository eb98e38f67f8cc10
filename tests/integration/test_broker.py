"""The worker's scripts on a real server: claim, beat, publish, finish, give back, reap, bury."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis
from rq.executions import Execution
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.suspension import resume, suspend

from queue_service import keys
from queue_service.batches import Batches
from queue_service.broker import Beat, Broker, Claimed, Ending, Outcome, Publication, bury_worker
from queue_service.progress import encode_tokens, join_elements
from queue_service.results import read_job
from tests.harness import enqueue_chat, eventually

HIGH, NORMAL = "qsvc:fake:high", "qsvc:fake"
ANSWER = Outcome(
    ending=Ending.FINISHED, payload=b'"yes"', error=None, keep_seconds=600, ended_at=2.0
)


def make_broker(connection: Redis, worker: str = "w1", *, lease_seconds: int = 10) -> Broker:
    return Broker(connection, worker=worker, queues=[HIGH, NORMAL], lease_seconds=lease_seconds)


@pytest.fixture
def broker(redis: Redis) -> Broker:
    return make_broker(redis)


def claim(broker: Broker, count: int = 1) -> list[Claimed]:
    claimed, _ = broker.claim(count, crash_retries=2)
    return claimed


def beat(broker: Broker, running: Sequence[Claimed] = ()) -> Beat:
    return broker.beat(
        running, figures={"rows": "1"}, card=("fake", {"model": "fake"}), keep_seconds=90
    )


def waiting(redis: Redis, queue: str = NORMAL) -> list[str]:
    ids: Any = redis.lrange(keys.rq_queue(queue), 0, -1)
    return [job_id.decode() for job_id in ids]


def field(redis: Redis, job: Job, name: str) -> bytes | None:
    fields: Any = redis.hgetall(keys.rq_job(job.id))
    value: bytes | None = fields.get(name.encode())
    return value


def lose_lease(redis: Redis, claimed: Claimed) -> None:
    """Take a lease away as another worker's reap would."""
    redis.zrem(keys.rq_started(claimed.queue), f"{claimed.job_id}:{claimed.execution_id}")


def end_lease(redis: Redis, claimed: Claimed) -> None:
    """Make a lease look as if its time was over."""
    composite = f"{claimed.job_id}:{claimed.execution_id}"
    redis.zadd(keys.rq_started(claimed.queue), {composite: 1}, xx=True)


def publish(
    broker: Broker, claimed: Claimed, number: int, *words: str, ids: Sequence[int] = ()
) -> bool:
    progress = [encode_tokens(0, ids)] if ids else []
    entries = [["i", str(i), "a", "1", "t", word] for i, word in enumerate(words)]
    [is_ours] = broker.publish([Publication(claimed, number, progress, entries)], keep_seconds=60)
    return is_ours


def stream_fields(redis: Redis, job_id: str) -> list[dict[bytes, bytes]]:
    entries: Any = redis.xrange(keys.stream(job_id))
    return [fields for _, fields in entries]


# Claim --------------------------------------------------------------------------------------


def test_what_comes_next_is_looked_at_and_stays_where_it_is(broker: Broker, redis: Redis) -> None:
    jobs = [enqueue_chat(redis, f"text {n}", queue) for n in range(2) for queue in (NORMAL, HIGH)]
    line_of_batch = enqueue_chat(redis, "planned when it was submitted", HIGH)
    redis.hset(keys.rq_job(line_of_batch.id), "qsvc_batch", "b")
    redis.lpush(keys.rq_queue(HIGH), "gone")
    coming = broker.peek(6)
    expected = [jobs[1], jobs[3], jobs[0], jobs[2]]  # in the order in which they are claimed
    assert [one.job_id for one in coming] == [job.id for job in expected]
    assert [one.fields["data"] for one in coming] == [field(redis, job, "data") for job in expected]
    assert [one.job_id for one in broker.peek(3)] == [jobs[1].id, jobs[3].id]
    claimed = [one.job_id for one in claim(broker, 9)]
    assert [job_id for job_id in claimed if job_id != line_of_batch.id] == [
        job.id for job in expected
    ]


def test_nothing_comes_next_in_an_empty_queue_or_one_of_another_type(
    broker: Broker, redis: Redis
) -> None:
    assert broker.peek(5) == []
    redis.set(keys.rq_queue(HIGH), "no list")
    job = enqueue_chat(redis, "text", NORMAL)
    assert [one.job_id for one in broker.peek(5)] == [job.id]


def test_one_claim_takes_from_several_queues_in_their_order(redis: Redis, broker: Broker) -> None:
    normal = [enqueue_chat(redis, "n", NORMAL) for _ in range(2)]
    high = [enqueue_chat(redis, "h", HIGH) for _ in range(2)]
    claimed, looked = broker.claim(3, crash_retries=2)
    assert [c.job_id for c in claimed] == [high[0].id, high[1].id, normal[0].id]
    assert [c.queue for c in claimed] == [HIGH, HIGH, NORMAL]
    assert looked == 3
    assert waiting(redis) == [normal[1].id]


def test_a_claimed_job_looks_started_to_stock_rq(redis: Redis, broker: Broker) -> None:
    job = enqueue_chat(redis, "hello", NORMAL)
    [claimed] = claim(broker)
    assert (job.get_status(), field(redis, job, "worker_name")) == ("started", b"w1")
    assert job.id in StartedJobRegistry(NORMAL, connection=redis).get_job_ids()
    [execution] = job.get_executions()
    assert isinstance(execution, Execution)
    assert execution.id == claimed.execution_id


def test_an_executions_keys_get_a_time_to_live_with_the_first_beat_and_end_with_it(
    redis: Redis, broker: Broker
) -> None:
    job = enqueue_chat(redis, "hello", NORMAL)
    [claimed] = claim(broker)
    composite = f"{job.id}:{claimed.execution_id}"
    both = (f"rq:execution:{composite}", f"rq:executions:{job.id}")
    assert [redis.ttl(key) for key in both] == [-1, -1]
    beat(broker, [claimed])
    assert all(redis.ttl(key) > 0 for key in both)
    assert broker.finish([(claimed, ANSWER)]) == ["ok"]
    assert redis.exists(*both) == 0


def test_a_plain_jobs_prompt_leaves_its_description(redis: Redis, broker: Broker) -> None:
    job = enqueue_chat(redis, "my secret", NORMAL)
    assert b"my secret" in (field(redis, job, "description") or b"")
    claim(broker)
    assert field(redis, job, "description") == b"qsvc request"


def test_canceled_deleted_and_doubly_pushed_ids_are_dropped_by_a_claim(
    redis: Redis, broker: Broker
) -> None:
    canceled, deleted, good = [enqueue_chat(redis, "x", NORMAL) for _ in range(3)]
    canceled.cancel()
    deleted.delete()
    redis.rpush(keys.rq_queue(NORMAL), canceled.id, deleted.id, good.id)
    claimed, looked = broker.claim(10, crash_retries=2)
    assert [c.job_id for c in claimed] == [good.id]
    assert looked == 4
    assert waiting(redis) == []


def test_nothing_is_claimed_while_workers_are_suspended(redis: Redis, broker: Broker) -> None:
    enqueue_chat(redis, "x", NORMAL)
    suspend(redis)
    assert claim(broker) == []
    assert beat(broker).suspended
    resume(redis)
    assert len(claim(broker)) == 1
    assert not beat(broker).suspended


def test_a_server_that_forgot_the_scripts_is_told_them_again(redis: Redis, broker: Broker) -> None:
    enqueue_chat(redis, "x", NORMAL)
    assert len(claim(broker)) == 1
    redis.script_flush()
    enqueue_chat(redis, "x", NORMAL)
    assert len(claim(broker)) == 1


# Publish ------------------------------------------------------------------------------------


def test_text_and_token_ids_are_written_together(redis: Redis, broker: Broker) -> None:
    enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    assert publish(broker, claimed, 1, "Hel", ids=[72, 101])
    assert publish(broker, claimed, 2, "lo", ids=[108, 111])
    assert [f[b"t"] for f in stream_fields(redis, claimed.job_id)] == [b"Hel", b"lo"]
    elements: Any = redis.lrange(keys.progress(claimed.job_id, claimed.execution_id), 0, -1)
    assert elements == [encode_tokens(0, [72, 101]), encode_tokens(0, [108, 111])]
    assert redis.ttl(keys.stream(claimed.job_id)) in range(1, 61)
    assert redis.ttl(keys.progress(claimed.job_id, claimed.execution_id)) in range(1, 61)


def test_a_publication_sent_twice_is_applied_once(redis: Redis, broker: Broker) -> None:
    enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    for _ in range(2):
        assert publish(broker, claimed, 1, "once", ids=[1, 2])
    assert publish(broker, claimed, 2, "twice")
    assert [f[b"t"] for f in stream_fields(redis, claimed.job_id)] == [b"once", b"twice"]
    assert redis.llen(keys.progress(claimed.job_id, claimed.execution_id)) == 1


def test_nothing_is_published_for_a_lost_lease(redis: Redis, broker: Broker) -> None:
    enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    assert publish(broker, claimed, 1, "before", ids=[1])
    lose_lease(redis, claimed)
    assert not publish(broker, claimed, 2, "after", ids=[2])
    assert [f[b"t"] for f in stream_fields(redis, claimed.job_id)] == [b"before"]
    assert redis.llen(keys.progress(claimed.job_id, claimed.execution_id)) == 1


def test_no_text_follows_the_end_of_a_canceled_jobs_stream(redis: Redis, broker: Broker) -> None:
    job = enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    publish(broker, claimed, 1, "before", ids=[1])
    assert Batches(redis).cancel_job(job.id)
    assert not publish(broker, claimed, 2, "after", ids=[2])
    assert stream_fields(redis, job.id)[-1] == {b"e": b"cancelled"}
    assert not redis.exists(keys.progress(claimed.job_id, claimed.execution_id))


# Finish -------------------------------------------------------------------------------------


def test_a_finish_leaves_the_result_and_no_trace_of_the_execution(
    redis: Redis, broker: Broker
) -> None:
    job = enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    publish(broker, claimed, 1, "text", ids=[1])
    assert broker.finish([(claimed, ANSWER)]) == ["ok"]
    assert job.return_value(refresh=True) == "yes"
    assert job.get_status() == "finished"
    assert stream_fields(redis, job.id)[-1] == {b"e": b"done"}
    assert job.get_executions() == []
    left: Any = redis.keys("*")
    assert not [key for key in left if claimed.execution_id.encode() in key]
    assert redis.smembers(f"{keys.rq_worker('w1')}:executions") == set()
    assert field(redis, job, "qsvc_execution") is None
    assert field(redis, job, "retries_left") is None


def test_a_finish_sent_twice_is_accepted_once(redis: Redis, broker: Broker) -> None:
    job = enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    publish(broker, claimed, 1, "text")
    assert [broker.finish([(claimed, ANSWER)]) for _ in range(2)] == [["ok"], ["ok"]]
    assert len(job.results()) == 1
    assert [b"e" in f for f in stream_fields(redis, job.id)] == [False, True]
    assert redis.hget(keys.rq_worker("w1"), "successful_job_count") == b"1"


def test_the_outcome_of_a_lost_lease_leaves_no_trace(redis: Redis, broker: Broker) -> None:
    job = enqueue_chat(redis, "x", NORMAL)
    [first] = claim(broker)
    end_lease(redis, first)
    assert broker.reap() == [job.id]
    [second] = claim(broker)
    assert broker.finish([(first, ANSWER)]) == ["lost"]
    assert job.results() == []
    assert job.get_status(refresh=True) == "started"
    assert broker.finish([(second, ANSWER)]) == ["ok"]


def test_the_outcome_of_a_canceled_or_deleted_job_is_refused(redis: Redis, broker: Broker) -> None:
    canceled, deleted = [enqueue_chat(redis, "x", NORMAL) for _ in range(2)]
    running = claim(broker, 2)
    redis.hset(keys.rq_job(canceled.id), "status", "canceled")
    redis.delete(keys.rq_job(deleted.id))
    assert broker.finish([(c, ANSWER) for c in running]) == ["canceled", "deleted"]
    assert canceled.get_status(refresh=True) == "canceled"
    assert not redis.exists(keys.rq_job(deleted.id))
    assert redis.zcard(keys.rq_started(NORMAL)) == 0


@pytest.mark.parametrize(("keep_seconds", "ttl"), [(600, range(598, 601)), (-1, [-1]), (0, [-2])])
def test_a_result_is_kept_for_as_long_as_asked(
    redis: Redis, broker: Broker, keep_seconds: int, ttl: Sequence[int]
) -> None:
    job = enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    outcome = Outcome(Ending.FINISHED, b'"yes"', None, keep_seconds, ended_at=2.0)
    assert broker.finish([(claimed, outcome)]) == ["ok"]
    assert redis.ttl(keys.rq_job(job.id)) in ttl
    assert redis.ttl(keys.rq_results(job.id)) in ttl


def test_a_failure_is_a_text_for_rq_and_an_error_object_for_us(
    redis: Redis, broker: Broker
) -> None:
    job = enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    error = {"message": "no", "code": "stopped", "status_code": 499}
    outcome = Outcome(Ending.STOPPED, b"Stopped: no", error, 600, ended_at=2.0)
    assert broker.finish([(claimed, outcome)]) == ["ok"]
    assert job.get_status(refresh=True) == "stopped"
    result = job.latest_result()
    assert result is not None
    assert result.exc_string == "Stopped: no"
    entries: Any = redis.xrange(keys.rq_results(job.id))
    [(_, entry)] = entries
    assert json.loads(entry[b"qsvc_error"]) == error
    assert redis.zscore(keys.rq_failed(NORMAL), job.id)


# Beat ---------------------------------------------------------------------------------------


def test_a_beat_renews_leases_and_reports_what_is_lost_and_watched(
    redis: Redis, broker: Broker
) -> None:
    for _ in range(5):
        enqueue_chat(redis, "x", NORMAL)
    kept, reaped, canceled, deleted, seen = claim(broker, 5)
    end_lease(redis, kept)
    lose_lease(redis, reaped)
    redis.hset(keys.rq_job(canceled.job_id), "status", "canceled")
    redis.delete(keys.rq_job(deleted.job_id))
    redis.set(keys.watch(seen.job_id), "1", ex=30)
    answer = beat(broker, [kept, reaped, canceled, deleted, seen])
    assert answer.lost == {
        reaped.execution_id: "started",
        canceled.execution_id: "canceled",
        deleted.execution_id: "deleted",
    }
    assert answer.watched == {seen.execution_id}
    assert broker.reap() == []


def test_a_beat_says_whether_the_worker_is_registered_and_publishes_its_cards(
    redis: Redis, broker: Broker
) -> None:
    assert not beat(broker).registered
    redis.hset(keys.rq_worker("w1"), "birth", "today")
    assert beat(broker).registered
    assert redis.hgetall(keys.model_card("fake")) == {b"model": b"fake"}
    assert redis.hgetall(keys.worker_card("w1")) == {b"rows": b"1"}
    for key in (keys.rq_worker("w1"), keys.model_card("fake"), keys.worker_card("w1")):
        assert redis.ttl(key) in range(88, 91)


# Give back, reap, bury ----------------------------------------------------------------------


def test_jobs_given_back_are_in_front_in_order_and_uncharged(redis: Redis, broker: Broker) -> None:
    high = [enqueue_chat(redis, "x", HIGH) for _ in range(2)]
    normal = [enqueue_chat(redis, "x", NORMAL) for _ in range(4)]
    running = claim(broker, 5)
    publish(broker, running[0], 1, ids=[1])
    assert broker.requeue(running) == 5
    assert waiting(redis, HIGH) == [job.id for job in high]
    assert waiting(redis) == [job.id for job in normal]
    for job in high + normal:
        assert job.get_status(refresh=True) == "queued"
        assert field(redis, job, "qsvc_execution") is None
    assert all(claimed.deaths == 0 for claimed in claim(broker, 6))


def test_the_next_claim_goes_on_with_what_was_generated(redis: Redis, broker: Broker) -> None:
    enqueue_chat(redis, "x", NORMAL)
    [first] = claim(broker)
    publish(broker, first, 1, ids=[1, 2])
    broker.requeue([first])
    [second] = claim(broker)
    publish(broker, second, 1, ids=[3])
    end_lease(redis, second)
    broker.reap()
    [third] = claim(broker)
    handed = [claimed.fields.get("qsvc_progress", b"") for claimed in (first, second, third)]
    elements = [encode_tokens(0, [1, 2]), encode_tokens(0, [3])]
    assert handed == [b"", join_elements(elements[:1]), join_elements(elements)]
    kept: Any = redis.keys("qsvc:progress:*")
    assert kept == [keys.progress(third.job_id, third.execution_id).encode()]
    assert not publish(broker, second, 2, ids=[9])  # a late zombie


def test_a_cancelled_job_leaves_nothing_that_it_generated(redis: Redis, broker: Broker) -> None:
    enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    publish(broker, claimed, 1, ids=[1])
    broker.requeue([claimed])
    assert Batches(redis).cancel_job(claimed.job_id)
    left: Any = redis.keys("qsvc:progress:*")
    assert left == []


def test_a_job_whose_try_failed_by_bad_luck_goes_on_at_the_next(
    redis: Redis, broker: Broker
) -> None:
    job = enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    publish(broker, claimed, 1, ids=[1, 2])
    busy = replace(ANSWER, ending=Ending.FAILED, error={"code": "unavailable"}, retry_seconds=60)
    assert broker.finish([(claimed, busy)]) == ["retry"]
    redis.zadd(keys.rq_scheduled(NORMAL), {job.id: 1})
    broker.schedule()
    [again] = claim(broker)
    assert again.fields["qsvc_progress"] == join_elements([encode_tokens(0, [1, 2])])
    assert broker.finish([(again, ANSWER)]) == ["ok"]
    left: Any = redis.keys("qsvc:progress:*")
    assert left == []


def test_a_job_that_a_person_asked_for_again_begins_anew(redis: Redis, broker: Broker) -> None:
    job = enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    publish(broker, claimed, 1, ids=[1])
    broker.requeue([claimed])
    job.cancel()  # by a stock client, which knows nothing of progress
    assert Batches(redis).retry_jobs([job.id]) == [job.id]
    [again] = claim(broker)
    assert "qsvc_progress" not in again.fields
    left: Any = redis.keys("qsvc:progress:*")
    assert left == []


def test_a_job_that_is_not_ours_any_more_is_not_given_back(redis: Redis, broker: Broker) -> None:
    reaped, canceled = [enqueue_chat(redis, "x", NORMAL) for _ in range(2)]
    running = claim(broker, 2)
    end_lease(redis, running[0])
    broker.reap()
    redis.hset(keys.rq_job(canceled.id), "status", "canceled")
    assert broker.requeue(running) == 0
    assert waiting(redis) == [reaped.id]


def test_only_leases_that_have_ended_are_reaped(redis: Redis, broker: Broker) -> None:
    jobs = [enqueue_chat(redis, "x", NORMAL) for _ in range(3)]
    first, _, third = claim(broker, 3)
    end_lease(redis, first)
    end_lease(redis, third)
    assert sorted(broker.reap()) == sorted([jobs[0].id, jobs[2].id])
    assert broker.reap() == []
    assert broker.reap(everything=True) == [jobs[1].id]
    assert sorted(waiting(redis)) == sorted(job.id for job in jobs)


def test_a_lost_worker_is_charged_to_a_job_unless_it_had_made_progress(
    redis: Redis, broker: Broker
) -> None:
    enqueue_chat(redis, "x", NORMAL)
    for deaths in range(2):
        [claimed] = claim(broker)
        assert claimed.deaths == deaths
        end_lease(redis, claimed)
        broker.reap()
    [claimed] = claim(broker)
    first_write = [b"{}", encode_tokens(0, [1])]
    broker.publish([Publication(claimed, 1, first_write, [])], keep_seconds=60)
    end_lease(redis, claimed)
    broker.reap()
    [claimed] = claim(broker)
    assert (claimed.deaths, claimed.attempt) == (0, 4)


def test_burying_a_worker_hands_its_jobs_back_at_once_and_signs_it_off(
    redis: Redis, broker: Broker
) -> None:
    jobs = [enqueue_chat(redis, "x", NORMAL, job_id=f"b-{i}") for i in range(8, 12)]
    other = make_broker(redis, "w2")
    claim(broker, 3)
    [of_the_other] = claim(other)
    redis.hset(keys.rq_worker("w1"), mapping={"birth": "today", "queues": f"{HIGH},{NORMAL}"})
    beat(broker)
    assert len(bury_worker(redis, "w1")) == 3
    assert waiting(redis) == [job.id for job in jobs[:3]]
    assert beat(other, [of_the_other]).lost == {}
    assert redis.smembers("rq:workers") == {b"rq:worker:w2"}
    assert redis.smembers(f"rq:workers:{NORMAL}") == {b"rq:worker:w2"}
    left: Any = redis.keys("*:worker:w1*")
    assert left == []
    assert bury_worker(redis, "w1") == []


def test_a_lease_left_of_an_earlier_execution_takes_the_job_from_nobody(
    redis: Redis, broker: Broker
) -> None:
    job = enqueue_chat(redis, "a", NORMAL)
    [lost] = claim(broker)
    end_lease(redis, lost)
    redis.delete(f"rq:executions:{job.id}")  # it expires, and the lease stays while nobody reaps
    redis.hset(keys.rq_job(job.id), "status", "queued")
    redis.rpush(keys.rq_queue(NORMAL), job.id)
    [running] = claim(broker)
    assert broker.reap() == []
    assert broker.finish([(running, ANSWER)]) == ["ok"]


def test_one_worker_at_a_time_has_the_turn_to_reap(redis: Redis, broker: Broker) -> None:
    other = make_broker(redis, "w2")
    assert broker.may_reap(seconds=0.05)
    assert not other.may_reap(seconds=0.05)
    eventually(lambda: other.may_reap(seconds=0.05), "the turn goes round")


def test_a_released_execution_leaves_the_job_as_it_is(redis: Redis, broker: Broker) -> None:
    job = enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    publish(broker, claimed, 1, ids=[1])
    job.cancel()
    broker.release(claimed)
    assert job.get_status(refresh=True) == "canceled"
    left: Any = redis.keys("*")
    assert not [key for key in left if claimed.execution_id.encode() in key]


# Keys that somebody else changed ----------------------------------------------------------------


def test_a_key_of_the_wrong_type_costs_neither_its_job_nor_the_neighbours_anything(
    redis: Redis, broker: Broker
) -> None:
    jobs = [enqueue_chat(redis, "x", NORMAL) for _ in range(3)]
    running = claim(broker, 3)
    redis.set(keys.rq_results(jobs[1].id), "not a stream")
    redis.set(keys.stream(jobs[1].id), "not a stream")
    assert publish(broker, running[1], 1, "text")
    assert broker.finish([(claimed, ANSWER) for claimed in running]) == ["ok"] * 3
    assert [read_job(redis, job.id).status for job in jobs] == ["finished"] * 3


def test_a_job_whose_outcome_cannot_be_written_does_not_hold_up_the_others(
    redis: Redis, broker: Broker
) -> None:
    jobs = [enqueue_chat(redis, "x", NORMAL) for _ in range(3)]
    running = claim(broker, 3)
    redis.set(keys.rq_job(jobs[1].id), "not a hash")
    first, second, third = broker.finish([(claimed, ANSWER) for claimed in running])
    assert (first, third) == ("ok", "ok")
    assert second.startswith("server error: WRONGTYPE")


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_release_ends_the_stream_of_a_job_that_stock_rq_ended(
    redis: Redis, broker: Broker, is_deleted: bool
) -> None:
    job = enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    publish(broker, claimed, 1, "text")
    if is_deleted:
        job.delete()
    else:
        job.cancel()
    for _ in range(2):
        broker.release(claimed)
    assert [b"e" in fields for fields in stream_fields(redis, job.id)] == [False, True]


def test_a_release_leaves_the_stream_of_a_job_that_goes_on_elsewhere(
    redis: Redis, broker: Broker
) -> None:
    job = enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    publish(broker, claimed, 1, "text")
    end_lease(redis, claimed)
    broker.reap()
    broker.release(claimed)
    assert [b"e" in fields for fields in stream_fields(redis, job.id)] == [False]


def test_a_publication_is_applied_once_also_when_the_server_hung_past_the_lease(
    redis: Redis, broker: Broker
) -> None:
    job = enqueue_chat(redis, "x", NORMAL)
    [claimed] = claim(broker)
    assert publish(broker, claimed, 1, "once")
    # What expired while nobody could reap or beat; its lease is still listed.
    redis.delete(f"rq:execution:{claimed.job_id}:{claimed.execution_id}")
    assert publish(broker, claimed, 1, "once")
    assert [fields[b"t"] for fields in stream_fields(redis, job.id)] == [b"once"]
    assert not redis.exists(f"rq:execution:{claimed.job_id}:{claimed.execution_id}")
