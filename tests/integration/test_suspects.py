"""Jobs that kill their worker: charged, run alone, and dead-lettered; their neighbours live on."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis
from rq.job import Job

from queue_service import keys
from queue_service.broker import Broker, Claimed, Publication
from queue_service.progress import encode_tokens
from queue_service.results import read_job
from queue_service.streams import text_of
from tests.cli_helpers import HandWorker
from tests.harness import (
    SLOW_STEP_SECONDS,
    child_environment,
    enqueue_chat,
    eventually,
    running_worker,
    supervised_worker,
    worker_settings,
)

QUEUE = keys.DEFAULT_QUEUE
CRASH_RETRIES = 2
POISON = "crash"  # the fake engine's process ends as by a device fault


def status(job: Job) -> str | None:
    found = job.get_status(refresh=True)
    return found.value if found else None


def deaths(redis: Redis, job: Job) -> int:
    return int(redis.hget(keys.rq_job(job.id), "qsvc_deaths") or 0)


def make_broker(redis: Redis, worker: str) -> Broker:
    return Broker(redis, worker=worker, queues=[QUEUE], lease_seconds=60)


def claim(broker: Broker, count: int = 10) -> list[Claimed]:
    claimed, _ = broker.claim(count, crash_retries=CRASH_RETRIES)
    return claimed


def lose_worker(broker: Broker, redis: Redis) -> list[Claimed]:
    """Let every lease end and claim the jobs again."""
    leases: Any = redis.zrange(keys.rq_started(QUEUE), 0, -1)
    for lease in leases:
        redis.zadd(keys.rq_started(QUEUE), {lease: 1})
    broker.reap()
    return claim(broker)


def generate(broker: Broker, claimed: Claimed, number: int, num_tokens: int) -> None:
    """Publish so many tokens of progress."""
    elements = [b"{}", encode_tokens(0, range(num_tokens))]
    publication = Publication(claimed, number, elements, [], is_new=True)
    assert broker.publish([publication], keep_seconds=60) == [True]


# Charges ------------------------------------------------------------------------------------


def test_progress_clears_a_charge_only_beyond_what_was_reached_before(redis: Redis) -> None:
    enqueue_chat(redis, "x")
    broker = make_broker(redis, "w")
    [claimed] = claim(broker)
    generate(broker, claimed, 1, 5)
    charged = []
    for num_tokens in (5, 6, 0):
        [claimed] = lose_worker(broker, redis)
        charged.append(claimed.deaths)
        generate(broker, claimed, 1, num_tokens)
    [claimed] = lose_worker(broker, redis)
    charged.append(claimed.deaths)
    # Five tokens were new; five again were not; six were; none were not.
    assert charged == [0, 1, 0, 1]


def test_in_company_a_job_becomes_a_suspect_and_is_charged_no_further(redis: Redis) -> None:
    for _ in range(3):
        enqueue_chat(redis, "x")
    broker = make_broker(redis, "w")
    claim(broker)
    for expected in (1, 2, 2, 2):
        assert [claimed.deaths for claimed in lose_worker(broker, redis)] == [expected] * 3


def test_a_death_alone_is_charged_to_the_suspect_and_not_to_those_that_wait(redis: Redis) -> None:
    for _ in range(3):
        enqueue_chat(redis, "x")
    broker = make_broker(redis, "w")
    claim(broker)
    lose_worker(broker, redis)
    first, *_ = lose_worker(broker, redis)
    broker.run_alone(first)
    charged = {claimed.job_id: claimed.deaths for claimed in lose_worker(broker, redis)}
    assert charged.pop(first.job_id) == 3
    assert list(charged.values()) == [2, 2]


def test_a_suspect_that_was_given_back_while_alone_does_not_pay_for_the_next_one(
    redis: Redis,
) -> None:
    for _ in range(2):
        enqueue_chat(redis, "x")
    broker = make_broker(redis, "w")
    claim(broker)
    lose_worker(broker, redis)
    first, second = lose_worker(broker, redis)
    broker.run_alone(first)
    broker.requeue([first, second])
    _, second = claim(broker)
    broker.run_alone(second)
    charged = {claimed.job_id: claimed.deaths for claimed in lose_worker(broker, redis)}
    assert charged == {first.job_id: 2, second.job_id: 3}


def test_a_job_deleted_while_it_is_picked_to_run_alone_stays_deleted(redis: Redis) -> None:
    job = enqueue_chat(redis, "x")
    broker = make_broker(redis, "w")
    [claimed] = claim(broker)
    job.delete()
    broker.run_alone(claimed)
    assert not redis.exists(keys.rq_job(job.id))


def test_the_end_of_a_job_and_a_retry_by_a_person_clear_its_record(redis: Redis) -> None:
    job = enqueue_chat(redis, "x")
    broker, hand = make_broker(redis, "w"), HandWorker(redis, QUEUE, name="w")
    claim(broker)
    [claimed] = lose_worker(broker, redis)
    assert claimed.deaths == 1
    hand.fail(claimed)
    assert deaths(redis, job) == 0
    job.requeue()
    [claimed] = claim(broker)
    assert claimed.deaths == 0


# Running alone ------------------------------------------------------------------------------


def test_suspects_run_one_at_a_time_when_nothing_else_runs(redis: Redis, redis_url: str) -> None:
    running = enqueue_chat(redis, "r" * 60)
    settings = worker_settings(redis_url, slots=8, progress_interval_seconds=60)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        eventually(lambda: len(worker.engine.rows) == 1, "a job runs")
        redis.set("rq:suspended", "1")  # or one is claimed before it is a suspect
        suspects = [enqueue_chat(redis, "s" * 20) for _ in range(3)]
        for job in suspects:
            redis.hset(keys.rq_job(job.id), "qsvc_deaths", CRASH_RETRIES)
        redis.delete("rq:suspended")
        eventually(lambda: all(status(job) == "started" for job in suspects), "they are claimed")
        behind = [enqueue_chat(redis, "b" * 20) for _ in range(2)]
        eventually(lambda: all(status(job) == "finished" for job in [*suspects, *behind]), "all")
        steps = worker.engine.batch_sizes
        assert status(running) == "finished"
    alone = 61 + 3 * 21
    assert steps[:alone] == [1] * alone, "a suspect had company"
    assert 2 in steps[alone:]
    assert [deaths(redis, job) for job in suspects] == [0] * 3


def test_a_suspect_that_comes_further_than_before_gets_company(
    redis: Redis, redis_url: str
) -> None:
    suspects = [enqueue_chat(redis, "s" * 400) for _ in range(3)]
    for job in suspects:
        redis.hset(keys.rq_job(job.id), mapping={"qsvc_deaths": CRASH_RETRIES, "qsvc_reached": 3})
    settings = worker_settings(redis_url, slots=8, progress_interval_seconds=0.1)
    with running_worker(settings, step_seconds=SLOW_STEP_SECONDS) as worker:
        eventually(lambda: max(worker.engine.batch_sizes, default=0) == 3, "all of them run")
        alone: Any = [redis.hget(keys.rq_job(job.id), "qsvc_alone") for job in suspects]
        assert alone == [b"1", None, None], "only the first was alone from its start"
        behind = enqueue_chat(redis, "b")
        eventually(lambda: status(behind) == "finished", "others are claimed again")
        assert [status(job) for job in suspects] == ["started"] * 3
        worker.hasten()
        eventually(lambda: all(status(job) == "finished" for job in suspects), "all end")
    assert worker.engine.batch_sizes[:3] == [1, 1, 1]


@pytest.mark.slow
def test_poison_among_cleared_suspects_is_found_and_hurts_none_of_them(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.supervisor._FIRST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr("workers.supervisor._LONGEST_PAUSE_SECONDS", 0.1)
    for name, value in child_environment(step_seconds=SLOW_STEP_SECONDS).items():
        monkeypatch.setenv(name, value)
    texts = [*("i" * 200 for _ in range(3)), POISON, *("j" * 200 for _ in range(3))]
    # Put back in the order of their ids.
    jobs = [enqueue_chat(redis, text, job_id=f"job-{i}") for i, text in enumerate(texts)]
    for job in jobs:
        redis.hset(keys.rq_job(job.id), "qsvc_deaths", CRASH_RETRIES)
    settings = worker_settings(redis_url, slots=8, progress_interval_seconds=0.05)
    with supervised_worker(settings) as supervised:
        ended = lambda: all(read_job(redis, job.id).has_ended for job in jobs)  # noqa: E731
        eventually(ended, "all end", seconds=60)
        # Beside three that were cleared, and then alone.
        assert supervised.num_starts == 3
    assert [status(job) for job in jobs] == [
        "failed" if text == POISON else "finished" for text in texts
    ]


@pytest.mark.parametrize("num_poison", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_poison_among_innocent_jobs_is_dead_lettered_and_hurts_none_of_them(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch, num_poison: int
) -> None:
    monkeypatch.setattr("workers.supervisor._FIRST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr("workers.supervisor._LONGEST_PAUSE_SECONDS", 0.1)
    for name, value in child_environment(step_seconds=SLOW_STEP_SECONDS).items():
        monkeypatch.setenv(name, value)
    texts = [f"innocent {i} " * 3 for i in range(6)]
    innocent = [enqueue_chat(redis, text) for text in texts[:3]]
    poison = [enqueue_chat(redis, POISON) for _ in range(num_poison)]
    innocent += [enqueue_chat(redis, text) for text in texts[3:]]
    # None of them is cleared before its end.
    quiet: dict[str, Any] = {
        "slots": 8,
        "crash_retries": CRASH_RETRIES,
        "progress_interval_seconds": 60,
    }
    with supervised_worker(worker_settings(redis_url, **quiet)) as supervised:
        for job in [*innocent, *poison]:
            ended = lambda job=job: read_job(redis, job.id).has_ended  # noqa: E731
            eventually(ended, f"{job.id} ends", seconds=30)
        # Two deaths in company; then each poison dies once more, alone.
        assert supervised.num_starts == 1 + CRASH_RETRIES + num_poison
    for job in poison:
        error = read_job(redis, job.id).error
        assert error is not None
        assert error["code"] == "worker_lost"
        assert status(job) == "failed"
    for job, text in zip(innocent, texts, strict=True):
        body = read_job(redis, job.id).body
        assert body is not None, f"{job.id} is {status(job)}"
        assert text_of(body) == text
        assert redis.xlen(keys.rq_results(job.id)) == 1
    failed: Any = redis.zrange(keys.rq_failed(QUEUE), 0, -1)
    assert {job_id.decode() for job_id in failed} == {job.id for job in poison}


def test_jobs_that_had_made_progress_are_not_charged_with_a_later_death(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.supervisor._FIRST_PAUSE_SECONDS", 0.1)
    for name, value in child_environment(step_seconds=SLOW_STEP_SECONDS).items():
        monkeypatch.setenv(name, value)
    innocent = [enqueue_chat(redis, "i" * 150) for _ in range(3)]
    settings = worker_settings(redis_url, progress_interval_seconds=0.05)
    with supervised_worker(settings) as supervised:
        eventually(lambda: len(list(redis.scan_iter("qsvc:progress:*"))) == 3, "progress of all")
        enqueue_chat(redis, POISON)
        eventually(lambda: supervised.num_starts == 2, "the worker died once")
        eventually(
            lambda: all(redis.hget(keys.rq_job(j.id), "qsvc_attempt") == b"2" for j in innocent),
            "a takeover",
        )
        assert [deaths(redis, job) for job in innocent] == [0] * 3
