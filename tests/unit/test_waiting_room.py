"""The room in front of the engine: who is with it, who waits, and what is noted of both."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from tests.harness import make_claimed, make_request
from workers.begun import BegunFile, BegunNotes, begun_file
from workers.requests import PreparedRequest
from workers.waiting_room import WaitingRoom


class Rig:
    def __init__(self, file: BegunFile, *, most: int, at_once: int = 1) -> None:
        self.file = file
        self.turns: list[list[str]] = []
        notes = BegunNotes.of_file(os.dup(file.number))
        self.room = WaitingRoom(self._submit, notes, most=most, at_once=at_once)

    def _submit(self, requests: Sequence[PreparedRequest]) -> None:
        self.turns.append([request.execution_id for request in requests])

    def add(self, names: str, priority: int = 0) -> None:
        self.room.add(
            [make_request(claimed=make_claimed(name, name), priority=priority) for name in names]
        )

    @property
    def handed_over(self) -> str:
        return "".join(name for turn in self.turns for name in turn)

    @property
    def begun(self) -> set[str]:
        found = self.file.read()
        assert found is not None
        return set(found)


@pytest.fixture
def file() -> Iterator[BegunFile]:
    with begun_file(8) as made:
        assert made is not None
        yield made


def test_few_are_with_the_engine_and_only_they_have_begun(file: BegunFile) -> None:
    rig = Rig(file, most=2)
    rig.add("abcd")
    assert rig.turns == [["a", "b"]]
    assert rig.begun == {"a", "b"}
    rig.room.leave("a")
    assert (rig.handed_over, rig.begun) == ("abc", {"b", "c"})
    for name in "bcd":
        rig.room.leave(name)
    assert (rig.handed_over, rig.begun) == ("abcd", set())


def test_several_are_handed_over_together(file: BegunFile) -> None:
    rig = Rig(file, most=4, at_once=2)
    rig.add("abcdefg")
    rig.room.leave("a")
    rig.room.leave("b")
    assert rig.turns == [["a", "b", "c", "d"], ["e", "f"]]


def test_the_highest_priority_goes_first_and_within_one_who_came_first(file: BegunFile) -> None:
    rig = Rig(file, most=1)
    rig.add("ab")
    rig.add("c", priority=2)
    rig.add("d", priority=-1)
    rig.add("ef", priority=2)
    for name in "acefb":
        rig.room.leave(name)
    assert rig.handed_over == "acefbd"


def test_who_is_dropped_never_begins_and_makes_room(file: BegunFile) -> None:
    rig = Rig(file, most=2)
    rig.add("abcde")
    rig.room.drop(["a", "c", "unknown"])
    assert rig.handed_over == "abd"
    assert rig.begun == {"b", "d"}
    rig.room.leave("a")  # its result was on the way
    assert rig.handed_over == "abd"
