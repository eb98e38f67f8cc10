"""Notes of what has begun: they outlive their process, and say when they cannot be trusted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from workers.begun import BegunFile, BegunNotes, begun_file

_CHILD = """
import os, signal, sys
from workers.begun import BegunNotes
notes = BegunNotes.of_file(int(sys.argv[1]))
for name in "abc":
    notes.begin(name * 32)
notes.end("b" * 32)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def file() -> Iterator[BegunFile]:
    with begun_file(8) as made:
        assert made is not None
        yield made


def notes_in(file: BegunFile) -> BegunNotes:
    return BegunNotes.of_file(os.dup(file.number))


def test_the_notes_of_a_killed_process_are_read(file: BegunFile) -> None:
    command = [sys.executable, "-c", _CHILD, str(file.number)]
    child = subprocess.run(command, check=False, pass_fds=(file.number,))
    assert child.returncode == -signal.SIGKILL
    assert file.read() == {"a" * 32, "c" * 32}


def test_places_are_used_again(file: BegunFile) -> None:
    notes = notes_in(file)
    for i in range(1000):
        notes.begin(f"{i:032}")
        notes.end(f"{i:032}")
    notes.end("never noted")
    assert file.read() == frozenset()


def test_nobody_can_tell_once_one_had_no_room(file: BegunFile) -> None:
    notes = notes_in(file)
    for i in range(1000):
        notes.begin(f"{i:032}")
    assert file.read() is None


def test_without_a_file_nothing_is_noted() -> None:
    notes = BegunNotes.of_file(None)
    notes.begin("a" * 32)
    notes.end("a" * 32)


def test_there_is_no_file_where_there_is_no_room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with begun_file(8) as made:
        assert made is None
