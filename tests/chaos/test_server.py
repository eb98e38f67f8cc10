"""The server dies, forgets, fills up or is far away: workers wait, go on, and deliver once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis import Redis, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError
from rq import Worker

from queue_service import keys
from queue_service.broker import Broker, Claimed
from queue_service.connection import connect
from queue_service.errors import ServerUnavailable
from queue_service.local_server import LocalServer
from queue_service.results import read_job
from queue_service.settings import RedisSettings
from queue_service.submission import wait_for_disk
from tests.chaos.proxy import Proxy
from tests.chaos.rig import LEASE_SECONDS, QUEUE, Rig, paused, wait_seconds
from tests.harness import enqueue_chat, eventually, running_worker, worker_settings


def test_results_wait_for_a_server_that_was_killed(
    rig: Rig, kill_server: Callable[[LocalServer], None]
) -> None:
    work = rig.submit(28, num_tokens=150, stream=True)
    options: dict[str, Any] = {"slots": 8, "claim_ahead": 0}
    workers = [rig.start_worker(name, **options) for name in ("a", "b")]
    for name in ("a", "b"):
        rig.wait_for_holding(name, 8)
    kill_server(rig.server)
    wait_seconds(LEASE_SECONDS + 1)  # every row has ended by then, and every lease
    rig.server.start()
    rig.settle("kill -9 of the server, back after 3 s, results waiting")
    assert [worker.num_starts for worker in workers] == [1, 1]
    assert rig.attempts(work) == [1] * 32


@pytest.mark.slow
def test_a_server_may_be_killed_again_and_again(
    rig: Rig, kill_server: Callable[[LocalServer], None]
) -> None:
    rig.submit(96, num_tokens=150, stream=True)
    options: dict[str, Any] = {"slots": 8, "claim_ahead": 0}
    workers = [rig.start_worker(name, **options) for name in ("a", "b")]
    for down_seconds in (0.2, 0.5, 1.0, 2.0):
        for name in ("a", "b"):
            rig.wait_for_holding(name, 1)
        kill_server(rig.server)
        wait_seconds(down_seconds)
        rig.server.start()
    rig.settle("kill -9 of the server, four times", seconds=60)
    assert [worker.num_starts for worker in workers] == [1, 1]


@pytest.mark.slow
def test_a_server_that_hangs_loses_and_doubles_nothing(rig: Rig) -> None:
    rig.submit(60, num_tokens=150, stream=True)
    options: dict[str, Any] = {"slots": 8, "claim_ahead": 0}
    workers = [rig.start_worker(name, **options) for name in ("a", "b")]
    assert rig.server.pid is not None
    for hung_seconds in (1, 3):
        for name in ("a", "b"):
            rig.wait_for_holding(name, 1)
        with paused(rig.server.pid):
            wait_seconds(hung_seconds)  # calls are given up after 2 s, and may be carried out
    rig.settle("SIGSTOP of the server for 1 s and 3 s", seconds=60)
    assert [worker.num_starts for worker in workers] == [1, 1]


@pytest.mark.slow
def test_a_worker_that_dies_while_the_server_is_away_is_taken_over_by_its_next(
    rig: Rig, kill_server: Callable[[LocalServer], None]
) -> None:
    rig.submit(12, num_tokens=300, stream=True)
    rig.start_worker("a")
    rig.wait_for_holding("a", 16)
    pid = rig.child_pid("a")
    assert wait_for_disk(rig.connection)  # else the jobs may be queued as before when it is back
    kill_server(rig.server)
    os.kill(pid, signal.SIGKILL)
    killed_at = time.time()
    wait_seconds(1)  # too long for the supervisor to hand the jobs back
    rig.server.start()
    rig.settle("kill -9 of a worker while the server is away", killed_at=killed_at)


def test_a_suspect_runs_although_the_server_was_away_when_its_turn_came(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = enqueue_chat(redis, "suspect")
    redis.hset(keys.rq_job(job.id), "qsvc_deaths", 1)
    run_alone, calls = Broker.run_alone, []

    def away_at_first(broker: Broker, claimed: Claimed) -> None:
        calls.append(claimed)
        if len(calls) == 1:
            raise RedisConnectionError("away")
        run_alone(broker, claimed)

    monkeypatch.setattr(Broker, "run_alone", away_at_first)
    with running_worker(worker_settings(redis_url, crash_retries=1)):
        eventually(lambda: read_job(redis, job.id).body, "the suspect has its answer")
    assert len(calls) == 2


def test_workers_of_a_server_that_was_wiped_register_again_and_serve_what_comes(rig: Rig) -> None:
    gone = rig.submit(12, num_tokens=300)
    options: dict[str, Any] = {"slots": 8, "claim_ahead": 0}
    workers = [rig.start_worker(name, **options) for name in ("a", "b")]
    for name in ("a", "b"):
        rig.wait_for_holding(name, 8)
    rig.forget(gone)
    rig.connection.flushall()
    eventually(lambda: _worker_names(rig) == {"a", "b"}, "both workers are listed again")
    eventually(lambda: rig.connection.exists(keys.model_card("fake")), "the model's card")
    rig.submit(12)
    rig.settle("FLUSHALL under two workers, then new work")
    assert [worker.num_starts for worker in workers] == [1, 1]
    assert not rig.connection.exists(*map(keys.rq_job, gone.texts))


def _worker_names(rig: Rig) -> set[str]:
    return {str(worker.name) for worker in Worker.all(connection=rig.connection)}


def test_a_full_server_refuses_new_work_but_takes_results_and_heartbeats(rig: Rig) -> None:
    work = rig.submit(16, num_tokens=400)
    worker = rig.start_worker("a", slots=16, claim_ahead=0)
    held = rig.wait_for_holding("a", 16)
    used_bytes = int(rig.connection.info("memory")["used_memory"])
    rig.connection.config_set("maxmemory", used_bytes // 2)
    with pytest.raises(OutOfMemoryError):
        rig.connection.set("more", "x" * 1000)
    wait_seconds(LEASE_SECONDS + 1)
    leases: Any = rig.connection.zrange(keys.rq_started(QUEUE), 0, 0, withscores=True)
    assert leases[0][1] >= rig.connection.time()[0]
    eventually(lambda: _all_finished(rig, held), "what runs ends")
    wait_seconds(1)
    assert rig.attempts(work).count(0) == 4
    rig.connection.config_set("maxmemory", 0)
    rig.settle("server out of memory, for some seconds")
    assert worker.num_starts == 1
    assert rig.attempts(work) == [1] * 20


def _all_finished(rig: Rig, job_ids: set[str]) -> bool:
    return all(rig.field(job_id, "status") == "finished" for job_id in job_ids)


def test_a_worker_that_starts_on_a_full_server_serves_once_there_is_room(rig: Rig) -> None:
    rig.submit(12)
    rig.connection.config_set("maxmemory", 1)
    rig.start_worker("a")
    wait_seconds(2)
    rig.connection.config_set("maxmemory", 0)
    rig.settle("server out of memory while a worker starts")


def test_a_slow_network_costs_no_lease(rig: Rig, tmp_path: Path) -> None:
    work = rig.submit(76)  # enough that some are left when the second worker is up
    proxy = Proxy(tmp_path / "proxy.sock", rig.socket_path, latency_seconds=(0.05, 0.2))
    options: dict[str, Any] = {"slots": 8, "claim_ahead": 8, "lease_seconds": 5, "beat_seconds": 1}
    with proxy.serving():
        rig.start_worker("far", url=proxy.url, **options)
        rig.wait_for_holding("far", 1)
        rig.start_worker("near", command=rig.child(step_seconds=0.05), **options)
        rig.settle("50 to 200 ms of latency each way to one of two workers")
        assert rig.answered_by(work) == {"far", "near"}
        assert rig.attempts(work) == [1] * 80
        rig.close_workers()


@pytest.mark.slow
def test_a_network_that_breaks_connections_at_random_loses_and_doubles_nothing(
    rig: Rig, tmp_path: Path
) -> None:
    proxy = Proxy(tmp_path / "proxy.sock", rig.socket_path, break_probability=0.02)
    with proxy.serving():
        rig.start_worker("a", url=proxy.url, slots=8, claim_ahead=0)
        rig.start_worker("b", url=proxy.url, slots=8, claim_ahead=0)
        _submit_until_it_works(rig, proxy)
        rig.settle("connections broken at random (2 % of chunks)", seconds=60)
        assert proxy.num_broken > 10
        proxy.break_probability = 0
        rig.close_workers()


def _submit_until_it_works(rig: Rig, proxy: Proxy) -> None:
    while True:
        try:
            with closing(connect(RedisSettings.load(url=proxy.url))) as connection:
                rig.submit(96, num_plain=0, stream=True, connection=connection)
            return
        except (RedisError, ServerUnavailable):
            continue  # a person would try again: the same file adds what is missing
