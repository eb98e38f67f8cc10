"""Stock RQ tools that reap without a lock, all the time, while workers come and go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rq.job import Job
from rq.registry import StartedJobRegistry

from queue_service import keys
from queue_service.rqcompat import SafeJob
from tests.chaos.rig import LEASE_SECONDS, QUEUE, Rig, wait_seconds
from tests.harness import eventually

_RQ = Path(sys.executable).with_name("rq")
_SAFE = {
    "RQ_JOB_CLASS": "queue_service.rqcompat.SafeJob",
    "RQ_QUEUE_CLASS": "queue_service.rqcompat.SafeQueue",
}


@pytest.fixture
def watch_with_rq_info(rig: Rig) -> Iterator[Callable[..., list[subprocess.Popen[bytes]]]]:
    """Start ``rq info`` in a loop, several times over; they are ended with the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(count: int, **environment: str) -> list[subprocess.Popen[bytes]]:
        for _ in range(count):
            processes.append(
                subprocess.Popen(
                    [_RQ, "info", "--url", rig.url, "--interval", "0.1"],
                    env={**os.environ, **environment},
                    stdout=subprocess.DEVNULL,
                )
            )
        return processes

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("classes", "environment"),
    [("our", _SAFE), pytest.param("stock", {}, marks=pytest.mark.slow)],
)
def test_rq_info_may_reap_while_a_worker_is_killed(
    rig: Rig,
    watch_with_rq_info: Callable[..., list[subprocess.Popen[bytes]]],
    classes: str,
    environment: dict[str, str],
) -> None:
    work = rig.submit(28, num_tokens=400)
    # It must not have done everything before it is killed.
    first = rig.start_process("a", slots=32, command=rig.child(step_seconds=0.05))
    held = rig.wait_for_holding("a", 32)
    loops = watch_with_rq_info(3, **environment)
    rig.start_worker("b", slots=32, command=rig.child(step_seconds=0.005))
    rig.child_pid("b")
    wait_seconds(1)  # the loops have begun
    first.kill(rig.child_pid("a"))
    killed_at = time.time()
    rig.settle(
        f"three rq info loops ({classes} classes) while a worker is killed", killed_at=killed_at
    )
    assert [loop.poll() for loop in loops] == [None] * 3
    assert held == set(work.texts)


@pytest.mark.parametrize("job_class", [SafeJob, pytest.param(Job, marks=pytest.mark.slow)])
def test_a_tool_that_saw_jobs_run_and_not_end_does_not_run_them_again(
    rig: Rig, job_class: type[Job]
) -> None:
    work = rig.submit(12, num_plain=0, num_tokens=200)
    first = rig.start_process("a")
    rig.wait_for_holding("a", 12)
    first.kill(rig.child_pid("a"))
    wait_seconds(LEASE_SECONDS + 1)
    looked_at: list[str] = []

    def look_away_for_long(job: Job, *_: Any) -> None:
        looked_at.append(job.id)
        if len(looked_at) == len(work.texts):
            rig.start_worker("b", command=rig.child(step_seconds=0))
            eventually(lambda: not rig.num_open(), "every job ends elsewhere")

    registry = StartedJobRegistry(QUEUE, connection=rig.connection, job_class=job_class)
    registry.cleanup(exception_handlers=[look_away_for_long])
    assert sorted(looked_at) == sorted(work.texts)
    rig.settle("a tool puts jobs back that have ended meanwhile")
    assert rig.attempts(work) == [2] * 12


def test_a_job_that_tools_put_back_twice_is_held_once(rig: Rig) -> None:
    work = rig.submit(12, num_plain=0, num_tokens=500)
    first = rig.start_process("a")
    rig.wait_for_holding("a", 12)
    first.kill(rig.child_pid("a"))
    killed_at = time.time()
    wait_seconds(LEASE_SECONDS + 1)
    registry = StartedJobRegistry(QUEUE, connection=rig.connection, job_class=SafeJob)
    looked_at: list[str] = []

    def let_another_tool_be_first(job: Job, *_: Any) -> None:
        looked_at.append(job.id)
        if len(looked_at) == len(work.texts):
            registry.cleanup()
            rig.start_worker("b", slots=32)
            eventually(lambda: rig.attempts(work) == [2] * 12, "every job runs again")

    registry.cleanup(exception_handlers=[let_another_tool_be_first])
    eventually(lambda: rig.attempts(work) == [3] * 12, "every job is claimed once more")
    assert rig.connection.zcard(keys.rq_started(QUEUE)) == 12
    rig.settle("two tools put the same jobs back", killed_at=killed_at)
