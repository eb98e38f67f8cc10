"""Stock RQ tools that reap without a lock, all the time, while workers come and go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.rig import Rig, wait_seconds

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
    first = rig.start_process("a", slots=32)
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
    assert {rig.field(job_id, "meta")[:9] for job_id in work.texts} <= {'{"batch":', ""}
