"""A worker child with the fake engine that may die at a named point, once.

``python -m tests.chaos.mortal --step-seconds 0.01 --die-at mid_decode --nth 20 --marker FILE``;
with ``--mute`` it sends no heartbeats.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import workers.child
from queue_service.broker import Beat, Broker, Claimed, Outcome, Publication, Trade, Wanted
from tests.fakes import FakeEngine, FakeTokenizer, fake_info, fake_parts
from workers.child import ServedModel, run_child
from workers.child_settings import ChildSettings
from workers.engine import Event, RowRequest


class Point(StrEnum):
    """Where a child can be made to die."""

    AFTER_CLAIM = "after_claim"
    MID_PREFILL = "mid_prefill"
    MID_DECODE = "mid_decode"
    MID_PUBLISH = "mid_publish"
    BEFORE_FINISH = "before_finish"
    AFTER_FINISH = "after_finish"
    BEFORE_REAP = "before_reap"
    AFTER_REAP = "after_reap"


class Fuse:
    """Kills the process the nth time that its point is reached.

    Args:
        point: None never kills.
        marker: made just before the kill; while it is there nothing is killed.
    """

    def __init__(self, point: Point | None, nth: int, marker: Path) -> None:
        self._point = point
        self._nth = nth
        self._marker = marker
        self._count = 0

    def reach(self, point: Point) -> None:
        """Say that a point was reached."""
        if point is not self._point:
            return
        self._count += 1
        if self._count >= self._nth and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class MortalBroker(Broker):
    """A broker that reaches points."""

    def __init__(self, fuse: Fuse, is_mute: bool, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fuse = fuse
        self._is_mute = is_mute

    def beat(self, running: Sequence[Claimed], **options: Any) -> Beat:
        if self._is_mute:
            return Beat(registered=True, suspended=False, lost={}, watched=frozenset())
        return super().beat(running, **options)

    def trade(
        self, outcomes: Sequence[tuple[Claimed, Outcome]], wanted: Wanted | None = None
    ) -> Trade:
        if outcomes:
            self._fuse.reach(Point.BEFORE_FINISH)
        trade = super().trade(outcomes, wanted)
        if trade.replies:
            self._fuse.reach(Point.AFTER_FINISH)
        if trade.claimed:
            self._fuse.reach(Point.AFTER_CLAIM)
        return trade

    def publish(self, publications: Sequence[Publication], *, keep_seconds: int) -> list[bool]:
        kept = super().publish(publications, keep_seconds=keep_seconds)
        self._fuse.reach(Point.MID_PUBLISH)
        return kept

    def reap(self, *, everything: bool = False) -> list[str]:
        self._fuse.reach(Point.BEFORE_REAP)
        job_ids = super().reap(everything=everything)
        if job_ids:
            self._fuse.reach(Point.AFTER_REAP)
        return job_ids


class MortalEngine(FakeEngine):
    """A fake engine that reaches points."""

    def __init__(self, fuse: Fuse, **options: Any) -> None:
        super().__init__(**options)
        self._fuse = fuse

    def add(self, requests: Iterable[RowRequest]) -> None:
        super().add(requests)
        self._fuse.reach(Point.MID_PREFILL)

    def step(self) -> list[Event]:
        tokens = super().step()
        self._fuse.reach(Point.MID_DECODE)
        return tokens


def main(arguments: Sequence[str]) -> int:
    """Run one child; return its exit code."""
    parser = argparse.ArgumentParser(prog="mortal")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--mute", action="store_true")
    parser.add_argument("--die-at", type=Point)
    parser.add_argument("--nth", type=int, default=1)
    parser.add_argument("--marker", type=Path, default=Path("never"))
    asked = parser.parse_args(arguments)
    fuse = Fuse(asked.die_at, asked.nth, asked.marker)
    broker = functools.partial(MortalBroker, fuse, asked.mute)
    # The child looks it up when it wires the worker.
    workers.child.Broker = broker  # type: ignore[attr-defined, assignment]

    def load(settings: ChildSettings) -> ServedModel:
        engine = MortalEngine(fuse, max_rows=settings.worker.slots, step_seconds=asked.step_seconds)
        return ServedModel(fake_parts(engine), FakeTokenizer(), fake_info(), "fake")

    return run_child(load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
