"""Workers that only seem dead, or whose clock is wrong: their late results are refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from queue_service.batches import Batches, Status
from queue_service.sweeper import Sweeper
from tests.chaos.proxy import Proxy
from tests.chaos.rig import LEASE_SECONDS, Rig, paused, wait_seconds
from tests.harness import eventually


def test_a_worker_that_was_held_still_past_its_lease_delivers_nothing(rig: Rig) -> None:
    work = rig.submit(12, num_tokens=400)
    rig.start_worker("zombie")
    rig.wait_for_holding("zombie", 16)
    pid = rig.child_pid("zombie")
    rig.start_worker("heir", command=rig.child(step_seconds=0.005))
    rig.child_pid("heir")
    killed_at = time.time()
    with paused(pid):
        eventually(lambda: rig.held_by("heir") == set(work.texts), "the heir holds every job")
    rig.settle("SIGSTOP of a worker past its lease, SIGCONT", killed_at=killed_at)
    assert rig.attempts(work) == [2] * 16
    assert rig.answered_by(work) == {"heir"}


def test_the_results_of_a_worker_that_missed_its_heartbeats_are_refused(rig: Rig) -> None:
    work = rig.submit(12, num_tokens=800)
    # It works on and delivers, but has let its leases end; the heir is slower still.
    rig.start_worker("zombie", command=rig.child(is_mute=True), reap_seconds=60)
    rig.wait_for_holding("zombie", 16)
    rig.start_worker("heir", command=rig.child(step_seconds=0.02))
    eventually(lambda: rig.held_by("heir") == set(work.texts), "the heir holds every job")
    eventually(lambda: not rig.held_by("zombie"), "the zombie has delivered")
    assert rig.held_by("heir") == set(work.texts)
    rig.settle("a worker that sends no heartbeats")
    assert rig.answered_by(work) == {"heir"}


@pytest.mark.slow
def test_a_worker_that_was_cut_off_past_its_lease_delivers_nothing(
    rig: Rig, tmp_path: Path
) -> None:
    work = rig.submit(12, num_tokens=400)
    proxy = Proxy(tmp_path / "proxy.sock", rig.socket_path)
    with proxy.serving():
        zombie = rig.start_worker("zombie", url=proxy.url)
        rig.wait_for_holding("zombie", 16)
        rig.start_worker("heir", command=rig.child(step_seconds=0.02))
        rig.child_pid("heir")
        killed_at = time.time()
        proxy.break_probability = 1
        eventually(lambda: rig.held_by("heir") == set(work.texts), "the heir holds every job")
        wait_seconds(LEASE_SECONDS)  # the zombie's results wait
        proxy.break_probability = 0
        rig.settle("a worker cut off past its lease, with results", killed_at=killed_at)
        assert rig.answered_by(work) == {"heir"}
        assert zombie.num_starts == 1
        rig.close_workers()


@pytest.mark.parametrize("wrong_by", [3600, pytest.param(-3600, marks=pytest.mark.slow)])
def test_a_worker_whose_clock_is_wrong_takes_nothing_from_others_and_keeps_its_own(
    rig: Rig, wrong_by: int
) -> None:
    work = rig.submit(12, num_tokens=400)
    options: dict[str, Any] = {"slots": 8, "claim_ahead": 0}
    rig.start_worker("right", **options)
    rig.wait_for_holding("right", 8)
    rig.start_worker("wrong", command=rig.child(clock_wrong_by_seconds=wrong_by), **options)
    rig.wait_for_holding("wrong", 8)
    wait_seconds(LEASE_SECONDS + 1)
    rig.settle(f"a worker's clock wrong by {wrong_by / 3600:+g} h")
    assert rig.attempts(work) == [1] * 16
    assert rig.answered_by(work) == {"right", "wrong"}


def test_a_clock_that_is_ahead_expires_no_batch(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    work = rig.submit(4, num_plain=0, expires_in_seconds=1800)
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 3600)
    Sweeper(rig.connection).sweep_now()
    monkeypatch.undo()
    assert Batches(rig.connection).get(work.batch_id).status is Status.IN_PROGRESS
    rig.start_worker("a", command=rig.child(step_seconds=0))
    rig.settle("a clock that is ahead of a batch's expiry")
