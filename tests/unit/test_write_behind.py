"""The thread that writes checkpoints: what it takes, what it drops, and when it waits."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.checkpoints import IDENTITY, segments
from tests.cli_helpers import wait_until
from workers.checkpoints.records import Segment
from workers.checkpoints.store import MemoryStore
from workers.checkpoints.write_behind import Pace, WriteBehind

PROMPT = [token * 7 % 5000 for token in range(1500)]
CHAIN = segments(PROMPT, max_bytes=1)
LARGE = 1 << 30
SECONDS = 20.0


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class GatedStore(MemoryStore):
    """Writes only while its gate is open, and fails as often as it is told."""

    def __init__(self) -> None:
        super().__init__(IDENTITY, LARGE)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.num_failures = 0
        self.thread_ids: set[int] = set()

    def put(self, segment: Segment) -> int | None:
        self.thread_ids.add(threading.get_native_id())
        self.entered.set()
        assert self.gate.wait(SECONDS)
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("no")
        return super().put(segment)


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()


@pytest.fixture
def make_writer(store: GatedStore) -> Iterator[Callable[..., WriteBehind]]:
    writers: list[WriteBehind] = []

    def make(max_bytes: int = LARGE, **options: object) -> WriteBehind:
        writers.append(WriteBehind(store, max_bytes, **options))  # type: ignore[arg-type]
        return writers[-1]

    yield make
    store.gate.set()
    for writer in writers:
        writer.close()


MakeWriter = Callable[..., WriteBehind]


def test_what_is_put_is_written_in_its_order(store: GatedStore, make_writer: MakeWriter) -> None:
    writer = make_writer()
    assert writer.put(CHAIN) == len(CHAIN)
    assert writer.flush(SECONDS)
    assert store.covers(PROMPT) == len(PROMPT)
    assert writer.counts() == {"written": len(CHAIN)}
    assert threading.get_native_id() not in store.thread_ids


def test_what_does_not_fit_is_dropped_with_all_that_follows_it(
    store: GatedStore, make_writer: MakeWriter
) -> None:
    store.gate.clear()
    writer = make_writer(max_bytes=3 * CHAIN[0].nbytes)
    assert writer.put(CHAIN) == 3
    assert writer.put(CHAIN[4:]) == 0
    store.gate.set()
    assert writer.flush(SECONDS)
    num_dropped = 2 * len(CHAIN) - 3 - 4
    assert writer.counts() == {
        "written": 3,
        "dropped_full": num_dropped,
        "dropped_bytes": sum(one.nbytes for one in [*CHAIN[3:], *CHAIN[4:]]),
    }
    assert store.match(PROMPT).length == 768


def test_what_follows_a_dropped_one_is_not_kept_when_there_is_room_again(
    store: GatedStore, make_writer: MakeWriter
) -> None:
    store.gate.clear()
    writer = make_writer(max_bytes=3 * CHAIN[0].nbytes)
    writer.put(CHAIN[:4])
    store.gate.set()
    assert writer.flush(SECONDS)
    assert writer.put(CHAIN[4:]) == len(CHAIN) - 4
    assert writer.flush(SECONDS)
    assert writer.counts()["refused"] == len(CHAIN) - 4
    assert store.counts()["refused_no_parent"] == len(CHAIN) - 4


def test_a_segment_that_waits_is_not_taken_twice(
    store: GatedStore, make_writer: MakeWriter
) -> None:
    store.gate.clear()
    writer = make_writer()
    writer.put(CHAIN)
    assert writer.has(CHAIN[-1].digest)
    assert writer.put(CHAIN) == len(CHAIN)
    store.gate.set()
    assert writer.flush(SECONDS)
    assert writer.counts() == {"written": len(CHAIN)}
    assert not writer.has(CHAIN[-1].digest)


def test_room_comes_back_as_segments_are_written(
    store: GatedStore, make_writer: MakeWriter
) -> None:
    writer = make_writer(max_bytes=CHAIN[0].nbytes)
    for segment in CHAIN:
        assert writer.put([segment]) == 1
        assert writer.flush(SECONDS)
    assert store.covers(PROMPT) == len(PROMPT)


def test_while_rows_are_decoded_it_keeps_to_its_rate(
    store: GatedStore, make_writer: MakeWriter
) -> None:
    clock = Clock()
    writer = make_writer(is_busy=lambda: True, bytes_per_second=CHAIN[0].nbytes / 2, clock=clock)
    writer.put(CHAIN[:2])
    wait_until(lambda: store.counts().get("writes") == 1, "the first is written")
    assert writer.has(CHAIN[1].digest)
    clock.now += 1.9
    assert store.counts() == {"writes": 1, "written_bytes": CHAIN[0].nbytes}
    clock.now += 0.2
    wait_until(lambda: store.counts()["writes"] == 2, "the second is written")


def test_once_nothing_is_decoded_it_writes_at_once(
    store: GatedStore, make_writer: MakeWriter
) -> None:
    busy = threading.Event()
    busy.set()
    writer = make_writer(is_busy=busy.is_set, bytes_per_second=1.0)
    writer.put(CHAIN)
    wait_until(lambda: store.counts().get("writes") == 1, "the first is written")
    busy.clear()
    wait_until(lambda: store.counts()["writes"] == len(CHAIN), "all are written")


def test_a_flush_does_not_keep_to_the_rate(store: GatedStore, make_writer: MakeWriter) -> None:
    writer = make_writer(is_busy=lambda: True, bytes_per_second=1.0)
    writer.put(CHAIN)
    assert writer.flush(SECONDS)
    assert store.counts()["writes"] == len(CHAIN)


def test_a_flush_gives_up_after_its_time(store: GatedStore, make_writer: MakeWriter) -> None:
    store.gate.clear()
    writer = make_writer()
    writer.put(CHAIN)
    assert not writer.flush(0.01)


def test_no_more_than_a_budget_is_written_in_a_day(
    store: GatedStore, make_writer: MakeWriter
) -> None:
    clock = Clock()
    writer = make_writer(bytes_per_day=2 * CHAIN[0].nbytes, clock=clock)
    writer.put(CHAIN)
    assert writer.flush(SECONDS)
    dropped = CHAIN[2:]
    assert writer.counts() == {
        "written": 2,
        "dropped_daily": len(dropped),
        "dropped_bytes": sum(one.nbytes for one in dropped),
    }
    clock.now += 86_400
    writer.put(CHAIN[2:4])
    assert writer.flush(SECONDS)
    assert writer.counts()["written"] == 4


def test_a_write_that_fails_is_logged_once_and_the_next_is_tried(
    store: GatedStore, make_writer: MakeWriter, caplog: pytest.LogCaptureFixture
) -> None:
    store.num_failures = 3
    writer = make_writer()
    for _ in range(2):
        writer.put(CHAIN[:2])
        assert writer.flush(SECONDS)
    assert writer.counts() == {"failed": 3, "refused": 1}
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    writer.put(CHAIN)
    assert writer.flush(SECONDS)
    assert store.covers(PROMPT) == len(PROMPT)


def test_closing_writes_what_waits_and_takes_no_more(
    store: GatedStore, make_writer: MakeWriter
) -> None:
    writer = make_writer()
    writer.put(CHAIN[:-1])
    writer.close()
    assert store.counts()["writes"] == len(CHAIN) - 1
    assert writer.put(CHAIN[-1:]) == 0
    assert writer.counts()["dropped_at_end"] == 1


def test_closing_does_not_wait_for_a_disk_that_hangs(
    store: GatedStore, make_writer: MakeWriter
) -> None:
    store.gate.clear()
    writer = make_writer()
    writer.put(CHAIN)
    assert store.entered.wait(SECONDS)
    writer.close(0.01)
    assert writer.counts() == {
        "dropped_at_end": len(CHAIN),
        "dropped_bytes": sum(one.nbytes for one in CHAIN),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="there, threads have a niceness")
def test_its_thread_lets_others_go_first(store: GatedStore, make_writer: MakeWriter) -> None:
    writer = make_writer()
    writer.put(CHAIN)
    assert writer.flush(SECONDS)
    [thread_id] = store.thread_ids
    assert os.getpriority(os.PRIO_PROCESS, thread_id) == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19


def test_a_pace_keeps_to_its_rate_and_saves_nothing_up() -> None:
    clock = Clock()
    pace = Pace(100.0, clock)
    assert pace.delay_seconds() == 0
    clock.now += 50
    pace.note(200, began=clock.now - 0.5)
    assert pace.delay_seconds() == pytest.approx(1.5)
    clock.now += 1
    pace.note(100, began=clock.now)
    assert pace.delay_seconds() == pytest.approx(1.5)
    clock.now += 5
    assert pace.delay_seconds() == 0
