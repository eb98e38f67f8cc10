"""The store of checkpoints when processes die or share it, and when the disk is full or gone."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.store_process import TOKENS, WIDTH, identity, prompt
from tests.checkpoints import assert_is_of, segments
from tests.cli_helpers import ROOT
from workers.checkpoints import maintenance
from workers.checkpoints.directory import DirectoryStore

LARGE = 1 << 30
SEGMENT_BYTES = segments(prompt(0), width=WIDTH)[0].nbytes


class StoreProcess:
    """Forks writers on command, one at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.store_process"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.child = 0

    def start(self, root: Path, *, model: str, first: int, count: int, budget: int = LARGE) -> None:
        """Let a child store prompts."""
        assert self._process.stdin is not None
        command = {"root": str(root), "model": model, "first": first, "count": count}
        self._process.stdin.write(json.dumps({**command, "budget": budget}) + "\n")
        self._process.stdin.flush()
        self.child = int(self.line("child "))

    def line(self, beginning: str) -> str:
        """Return the rest of the next line that begins so."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line.removeprefix(beginning).strip()
        raise AssertionError(f"the process ended before {beginning!r}")

    def kill(self) -> None:
        """Kill -9 the child and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)
        self.line(f"done {self.child}")

    def close(self) -> None:
        with self._process:
            self._process.kill()


@pytest.fixture
def process() -> Iterator[StoreProcess]:
    started = StoreProcess()
    yield started
    started.close()


@pytest.fixture
def other_process() -> Iterator[StoreProcess]:
    started = StoreProcess()
    yield started
    started.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few segments; skips where none may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = f"size={6 * SEGMENT_BYTES}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def files_under(root: Path) -> dict[str, int]:
    """The sizes of all that is there, what is being written included."""
    sizes = {}
    for path in [*root.glob("v1/*/*.qkv"), *root.glob("v1/*/tmp/*")]:
        with contextlib.suppress(FileNotFoundError):
            sizes[path.name] = path.stat().st_size
    return sizes


def temporary_files(root: Path) -> list[Path]:
    return list(root.glob("v1/*/tmp/*"))


def restore(store: DirectoryStore, number: int) -> int:
    """Restore a prompt as far as it is there, see that it is right, and return how far."""
    tokens = prompt(number)
    restored = store.read(store.match([*tokens, 1]))
    assert_is_of(restored, tokens[: restored.length], width=WIDTH)
    return restored.length


@pytest.mark.timeout(300)
def test_a_writer_that_is_killed_leaves_no_file_that_is_seen_and_bad(
    tmp_path: Path, process: StoreProcess
) -> None:
    source = random.Random(0)
    num_cut_short = 0
    for kill in range(50):
        process.start(tmp_path, model="a", first=kill * 10, count=10)
        for _ in range(source.randrange(3)):
            process.line("stored ")
        if kill % 2:  # in the middle of a write
            known = set(temporary_files(tmp_path))
            deadline = time.monotonic() + 10
            while set(temporary_files(tmp_path)) <= known and time.monotonic() < deadline:
                pass
        process.kill()
        num_cut_short += len(temporary_files(tmp_path)) > num_cut_short
    assert num_cut_short
    store = DirectoryStore(tmp_path, identity("a"), LARGE)
    report = maintenance.verify(tmp_path)
    assert report.bad == ()
    assert report.num_good >= 50
    assert store.counts() == {}
    assert max(restore(store, number) for number in range(0, 500, 10)) == TOKENS


def test_what_one_process_evicts_another_restores_right_or_not_at_all(
    tmp_path: Path, process: StoreProcess
) -> None:
    budget = 6 * SEGMENT_BYTES
    process.start(tmp_path, model="a", first=0, count=150, budget=budget)
    store = DirectoryStore(tmp_path, identity("a"), budget)
    is_done = threading.Event()

    def read_to_the_end() -> None:
        process.line("counts ")
        is_done.set()

    thread = threading.Thread(target=read_to_the_end)
    thread.start()
    num_restored = 0
    while not is_done.is_set():
        for number in range(150):
            num_restored += restore(store, number) > 0
            if is_done.is_set():
                break
    thread.join()
    process.line("done ")
    assert num_restored > 0
    counts = store.counts()
    assert not counts.keys() & {"bad_damaged", "bad_header", "bad_unreadable"}
    assert maintenance.verify(tmp_path).bad == ()


def test_a_cap_holds_for_two_processes_and_across_restarts(
    tmp_path: Path, process: StoreProcess, other_process: StoreProcess
) -> None:
    cap = 8 * SEGMENT_BYTES
    highest, is_done = 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not is_done.is_set():
            files = files_under(tmp_path)
            if files == files_under(tmp_path):  # else some went while others came
                highest = max(highest, sum(files.values()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for turn in range(3):
            for one, model in ((process, "a"), (other_process, "b")):
                one.start(tmp_path, model=model, first=turn * 20, count=20, budget=cap)
            for one in (process, other_process):
                counts = json.loads(one.line("counts "))
                one.line("done ")
                assert counts["writes"] > 0
                assert not counts.keys() & {"write_errors", "bad_damaged", "bad_header"}
    finally:
        is_done.set()
        thread.join()
    assert cap // 2 < highest <= cap
    assert maintenance.verify(tmp_path).bad == ()
    assert {one.num_segments > 0 for one in maintenance.stats(tmp_path)} == {True}


def test_a_full_disk_costs_checkpoints_and_nothing_else(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Boundless:
        total, free = LARGE, LARGE

    now = 1000.0
    # It believes that there is room, so that the disk itself has to say no.
    store = DirectoryStore(
        small_disk, identity("a"), LARGE, clock=lambda: now, volume=lambda _: Boundless
    )
    kept, refused = [], 0
    for number in range(0, 60, 5):
        now += 31
        results = [
            store.put(one) for one in segments(prompt(number), identity=identity("a"), width=WIDTH)
        ]
        kept += [number] * all(results)
        refused += not all(results)
    assert kept
    assert refused
    assert store.counts()["write_errors"] == refused
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert temporary_files(small_disk) == []
    assert maintenance.verify(small_disk).bad == ()
    for number in kept:
        assert restore(store, number) == TOKENS
    maintenance.prune(small_disk, to_bytes=0)
    now += 31
    [segment] = segments(prompt(99), identity=identity("a"), width=WIDTH)
    assert store.put(segment)


def test_on_a_small_disk_a_tenth_stays_free(small_disk: Path) -> None:
    store = DirectoryStore(small_disk, identity("a"), LARGE)
    for number in range(0, 60, 5):
        [segment] = segments(prompt(number), identity=identity("a"), width=WIDTH)
        assert store.put(segment)
        usage = shutil.disk_usage(small_disk)
        assert usage.free >= usage.total // 10
    assert store.counts()["evictions"] > 0
    assert "write_errors" not in store.counts()


def test_a_disk_that_may_only_be_read_is_read(small_disk: Path) -> None:
    [segment] = segments(prompt(0), identity=identity("a"), width=WIDTH)
    assert DirectoryStore(small_disk, identity("a"), LARGE).put(segment)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    now = 1000.0
    store = DirectoryStore(small_disk, identity("a"), LARGE, clock=lambda: now)
    assert restore(store, 0) == TOKENS
    store.note_use(store.match(prompt(0)))
    [other] = segments(prompt(5), identity=identity("a"), width=WIDTH)
    assert store.put(other) is None
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    now += 31
    assert store.put(other)
    assert [restore(store, number) for number in (0, 5)] == [TOKENS, TOKENS]
