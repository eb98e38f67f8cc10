"""Processes die at every place: what they held is taken over, and nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import time

import pytest

from queue_service.errors import QsvcError
from tests.chaos.mortal import Point
from tests.chaos.rig import TAKEOVER_SECONDS, Rig, measure
from tests.harness import eventually

pytestmark = pytest.mark.timeout(120)

_SLOW_POINTS = [
    pytest.param(Point.AFTER_CLAIM, 2, marks=pytest.mark.slow),
    pytest.param(Point.MID_PREFILL, 2, marks=pytest.mark.slow),
    pytest.param(Point.MID_PUBLISH, 4, marks=pytest.mark.slow),
    pytest.param(Point.BEFORE_FINISH, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        (Point.MID_DECODE, 90),
        (Point.AFTER_FINISH, 1),
        *_SLOW_POINTS,
    ],
)
def test_a_child_that_dies_at_any_point_loses_and_doubles_nothing(
    rig: Rig, point: Point, nth: int
) -> None:
    rig.submit(28, stream=True)
    # More are claimed than can run at once, so that some are under way whatever has just ended.
    worker = rig.start_worker(
        "a", slots=16, claim_ahead=8, command=rig.child(die_at=point, nth=nth)
    )
    killed_at = rig.wait_for_death()
    rig.settle(f"kill -9 of a worker, {point.replace('_', ' ')}", killed_at=killed_at)
    assert worker.num_starts == 2


@pytest.mark.slow
@pytest.mark.parametrize("point", [Point.BEFORE_REAP, Point.AFTER_REAP])
def test_a_worker_that_dies_while_it_reaps_leaves_the_reaping_to_the_next(
    rig: Rig, point: Point
) -> None:
    rig.submit(12, num_tokens=300)
    first = rig.start_process("a")
    rig.wait_for_holding("a", 16)
    first.kill(rig.child_pid("a"))
    killed_at = time.time()
    rig.start_worker("b", command=rig.child(die_at=point))
    rig.wait_for_death()
    rig.settle(f"kill -9 of a worker, {point.replace('_', ' ')}", killed_at=killed_at)


def test_what_a_dead_child_held_is_handed_back_within_a_second(rig: Rig) -> None:
    work = rig.submit(32, num_plain=0, num_tokens=120)
    rig.start_worker("a")
    held = rig.wait_for_holding("a", 32)
    rig.connection.set("rq:suspended", "1")  # or the other statuses would pass unseen
    pid = rig.child_pid("a")
    killed_at = time.time()
    os.kill(pid, signal.SIGKILL)
    seconds = measure(
        lambda: all(rig.field(job_id, "status") == "queued" for job_id in held),
        "every job is queued again",
    )
    assert held == set(work.texts)
    assert seconds < 1
    rig.connection.delete("rq:suspended")
    rig.settle("kill -9 of a worker with 32 jobs", killed_at=killed_at)


def test_what_a_dead_machine_held_is_taken_over_when_its_leases_end(rig: Rig) -> None:
    work = rig.submit(32, num_plain=0, num_tokens=600)
    first = rig.start_process("a", slots=32, claim_ahead=0)
    rig.wait_for_holding("a", 32)
    rig.start_worker("b", slots=32, claim_ahead=0, command=rig.child(step_seconds=0.002))
    pid = rig.child_pid("a")
    rig.child_pid("b")
    killed_at = time.time()
    first.kill(pid)
    seconds = measure(lambda: rig.held_by("b") == set(work.texts), "all jobs run again")
    rig.settle("kill -9 of worker and supervisor with 32 jobs", killed_at=killed_at)
    assert rig.attempts(work) == [2] * 32
    assert seconds < TAKEOVER_SECONDS


@pytest.mark.slow
def test_one_of_two_workers_may_die_again_and_again(rig: Rig) -> None:
    work = rig.submit(60, num_tokens=150, stream=True)
    killed = rig.start_worker("a", slots=8)
    # It must not have done everything before "a" has come up three times.
    rig.start_worker("b", slots=8, command=rig.child(step_seconds=0.05))
    for times in range(1, 4):
        eventually(lambda times=times: killed.num_starts == times, f"start {times}")  # type: ignore[misc]
        rig.wait_for_holding("a", 4)
        killed_at = time.time()
        os.kill(rig.child_pid("a"), signal.SIGKILL)
        eventually(lambda: not rig.held_by("a"), "its jobs are handed back")
    rig.settle("kill -9 of one of two workers, three times", killed_at=killed_at, seconds=120)
    assert max(rig.attempts(work)) > 1


@pytest.mark.slow
def test_a_name_belongs_to_one_worker_until_that_one_is_dead(rig: Rig) -> None:
    work = rig.submit(8, num_tokens=900)
    first = rig.start_process("twin")
    held = rig.wait_for_holding("twin", 12)
    second = rig.start_worker("twin")
    eventually(lambda: not second.is_running, "the second supervisor gives up")
    assert isinstance(second.failure, QsvcError)
    assert rig.held_by("twin") == held
    assert rig.attempts(work) == [1] * 12
    first.kill(rig.child_pid("twin"))
    killed_at = time.time()
    rig.start_worker("twin")
    rig.settle("a second worker of the same name", killed_at=killed_at)
