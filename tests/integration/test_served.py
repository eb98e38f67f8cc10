"""What is said to people whose batch no worker runs."""

from __future__ import annotations

from pathlib import Path

from redis import Redis
from rq.suspension import resume, suspend

from queue_service import keys
from queue_service.batches import Batch, Batches
from queue_service.follow import Standing
from queue_service.requests import Endpoint
from queue_service.served import ServedWatch, why_unserved
from tests.cli_helpers import chat_lines, run_qsvc, write_lines
from tests.harness import eventually, running_worker, worker_settings

QUEUE = "qsvc:misspelt"


def test_whoever_waits_for_a_queue_is_told_what_live_workers_serve(
    redis: Redis, redis_url: str
) -> None:
    why = why_unserved(redis, QUEUE, "misspelt")
    assert why == f"no worker serves {QUEUE} now; start one: qsvc worker --model misspelt"
    why = why_unserved(redis, keys.DEFAULT_QUEUE, "default")
    assert why is not None
    assert why.endswith("qsvc worker --model …")
    with running_worker(worker_settings(redis_url)):
        eventually(lambda: why_unserved(redis, "qsvc:fake", "fake") is None, "the worker is up")
        assert why_unserved(redis, keys.DEFAULT_QUEUE, "default") is None
        why = why_unserved(redis, QUEUE, "misspelt")
        assert why is not None
        assert "(those that live serve qsvc:default, qsvc:fake, qsvc:fake:high," in why
        suspend(redis)
        why = why_unserved(redis, "qsvc:fake", "fake")
        assert why is not None
        assert "rq resume" in why
        resume(redis)


def test_it_is_told_once_each_time_that_it_becomes_so(
    redis: Redis,
) -> None:
    now, told = [0.0], list[str]()
    watch = ServedWatch(redis, told.append, clock=lambda: now[0])

    def look(batch: Batch, num_running: int = 0) -> int:
        watch.look(Standing(batch, num_running, None))
        return len(told)

    batch_id = keys.batch_id(digest="d", queue=QUEUE, key="")
    Batches(redis).create(
        batch_id, endpoint=Endpoint.CHAT, queue=QUEUE, model="m", retention_seconds=60
    )
    redis.hset(keys.batch(batch_id), "total", 3)
    batch = Batches(redis).get(batch_id)
    assert look(batch) == 1
    for _ in range(3):  # asked at once, and once more later
        now[0] += 4
        assert look(batch) == 1
    now[0] += 10
    assert look(batch, num_running=1) == 1
    now[0] += 10
    assert look(batch) == 2


def test_submit_wait_tells_whom_it_waits_for(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", chat_lines(2))
    options = ("--redis", redis_url, "--model", "misspelt", "--expires-in", "2", "--wait")
    done = run_qsvc("submit", file, *options)
    assert done.returncode == 1
    assert f"no worker serves {QUEUE} now" in done.stderr
    assert "2 cancelled or expired" in done.stderr
