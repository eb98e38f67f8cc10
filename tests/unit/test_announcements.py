"""Prefixes that are being computed, as other processes see them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import IDENTITY, OTHER_IDENTITY
from workers.checkpoints.announcements import Announcements
from workers.checkpoints.folders import BUSY_FOLDER, VERSION_FOLDER

PROMPT = list(range(1000))

_CHILD = """
import sys
from pathlib import Path
from tests.checkpoints import IDENTITY
from workers.checkpoints.announcements import Announcements
board = Announcements(Path(sys.argv[1]), IDENTITY)
held = board.announce(range(700))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ours(tmp_path: Path) -> Announcements:
    return Announcements(tmp_path, IDENTITY)


@pytest.fixture
def theirs(tmp_path: Path) -> Announcements:
    """As of another process: a lock is that of an open file."""
    return Announcements(tmp_path, IDENTITY)


def files(root: Path) -> list[Path]:
    return list((root / VERSION_FOLDER / IDENTITY.namespace / BUSY_FOLDER).glob("*"))


def test_nothing_is_announced_where_there_is_no_folder(ours: Announcements) -> None:
    assert ours.others(PROMPT) == 0


def test_others_see_what_they_have_in_common_with_an_announcement(
    ours: Announcements, theirs: Announcements
) -> None:
    held = theirs.announce(PROMPT[:600])
    assert ours.others(PROMPT) == 600
    assert ours.others([*PROMPT[:400], 7]) == 400
    assert ours.others([7]) == 0
    second = theirs.announce(PROMPT[:800])
    assert ours.others(PROMPT) == 800
    second.done()
    assert ours.others(PROMPT) == 600
    held.done()
    held.done()
    assert ours.others(PROMPT) == 0


def test_ones_own_announcements_are_no_others(ours: Announcements, tmp_path: Path) -> None:
    held = ours.announce(PROMPT)
    assert ours.others(PROMPT) == 0
    held.done()
    assert files(tmp_path) == []


def test_another_namespace_sees_none(theirs: Announcements, tmp_path: Path) -> None:
    held = theirs.announce(PROMPT)
    assert Announcements(tmp_path, OTHER_IDENTITY).others(PROMPT) == 0
    held.done()


def test_an_announcement_ends_with_its_process(ours: Announcements, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        assert ours.others(PROMPT) == 700
        child.kill()
        child.wait()
    assert ours.others(PROMPT) == 0
    assert files(tmp_path) == []


def test_of_an_announcement_that_ends_a_shorter_one_is_still_seen(
    ours: Announcements, theirs: Announcements, tmp_path: Path
) -> None:
    held = theirs.announce(PROMPT[:300])
    longer = theirs.announce(PROMPT[:900])
    assert ours.others(PROMPT) == 900
    longer.done()
    assert ours.others(PROMPT) == 300
    held.done()


def test_where_nothing_can_be_written_nothing_is_announced(tmp_path: Path) -> None:
    (tmp_path / VERSION_FOLDER).write_text("in the way")
    board = Announcements(tmp_path, IDENTITY)
    held = board.announce(PROMPT)
    held.done()
    assert board.others(PROMPT) == 0
