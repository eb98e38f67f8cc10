"""A death is charged to the jobs that had begun, and to no other."""

from __future__ import annotations

import sys

from redis import Redis

from queue_service import keys
from queue_service.broker import Broker, Claimed, bury_worker
from tests.harness import enqueue_chat, eventually, supervised_worker, worker_settings

# Holds three jobs, of which one has begun, and dies.
_CHILD = """
import os, signal, sys
from queue_service.broker import Broker
from queue_service.connection import connect
from workers.begun import BegunNotes
from workers.child import Reporter
from workers.child_settings import ChildSettings

settings = ChildSettings.from_json(sys.stdin.readline())
notes = BegunNotes.of_file(settings.begun_file)
broker = Broker(
    connect(settings.redis), worker=settings.name, queues=settings.queues, lease_seconds=60
)
claimed, _ = broker.claim(3, crash_retries=2)
for one in claimed[:2]:
    notes.begin(one.execution_id)
for one in claimed[:1]:
    notes.end(one.execution_id)
Reporter(sys.stdout).progress(3, 1, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def make_broker(redis: Redis, worker: str) -> Broker:
    return Broker(redis, worker=worker, queues=[keys.DEFAULT_QUEUE], lease_seconds=60)


def claim(broker: Broker) -> list[Claimed]:
    claimed, _ = broker.claim(10, crash_retries=2)
    return claimed


def test_a_buried_workers_jobs_pay_only_if_they_had_begun(redis: Redis) -> None:
    jobs = [enqueue_chat(redis, "x") for _ in range(3)]
    first, second, _ = claim(make_broker(redis, "dead"))
    bury_worker(redis, "dead", begun={second.execution_id})
    deaths = {one.job_id: one.deaths for one in claim(make_broker(redis, "next"))}
    assert deaths == {jobs[0].id: 0, jobs[1].id: 1, jobs[2].id: 0}
    assert first.job_id == jobs[0].id


def test_all_pay_where_nobody_knows(redis: Redis) -> None:
    for _ in range(3):
        enqueue_chat(redis, "x")
    claim(make_broker(redis, "dead"))
    bury_worker(redis, "dead")
    assert [one.deaths for one in claim(make_broker(redis, "next"))] == [1, 1, 1]


def test_a_suspect_that_had_not_begun_alone_is_charged_no_further(redis: Redis) -> None:
    job = enqueue_chat(redis, "x")
    broker = make_broker(redis, "dead")
    for _ in range(2):
        claim(broker)
        bury_worker(redis, "dead")
    [suspect] = claim(broker)
    assert suspect.deaths == 2
    broker.run_alone(suspect)
    bury_worker(redis, "dead", begun=())
    [again] = claim(make_broker(redis, "next"))
    assert (again.job_id, again.deaths) == (job.id, 2)


def test_a_supervisor_knows_what_its_dead_child_had_begun(redis: Redis, redis_url: str) -> None:
    jobs = [enqueue_chat(redis, "x") for _ in range(3)]
    settings = worker_settings(redis_url, name="dead")
    with supervised_worker(settings, command=(sys.executable, "-c", _CHILD)) as supervised:
        eventually(lambda: supervised.events, "the child holds jobs")
        supervised.supervisor.stop()
        eventually(lambda: not supervised.is_running, "the child is buried")
    deaths = {one.job_id: one.deaths for one in claim(make_broker(redis, "next"))}
    assert deaths == {jobs[0].id: 0, jobs[1].id: 1, jobs[2].id: 0}
