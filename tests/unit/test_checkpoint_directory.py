"""What the store on disk does besides what every store does."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoints import IDENTITY, OTHER_IDENTITY, assert_is_of, keep, segments
from workers.checkpoints import directory
from workers.checkpoints.directory import DirectoryStore, default_budget
from workers.checkpoints.folders import MODEL_FILE, NAMESPACE_FILE, VERSION_FOLDER
from workers.checkpoints.records import BLOCK_TOKENS

LARGE = 1 << 30
PROMPT = [token * 7 % 5000 for token in range(1500)]
# About the raw size of one segment of these tests, which is reserved before it is written.
WIDE = 64
BLOCK_BYTES = segments(PROMPT[:BLOCK_TOKENS], width=WIDE)[0].nbytes


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Disk:
    """A file system as it tells of itself."""

    total: int
    free: int


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def open_store(root: Path, clock: Clock) -> Callable[..., DirectoryStore]:
    def make(**options: object) -> DirectoryStore:
        arguments = {"identity": IDENTITY, "budget_bytes": LARGE, "clock": clock, **options}
        return DirectoryStore(root, **arguments)  # type: ignore[arg-type]

    return make


OpenStore = Callable[..., DirectoryStore]


def segment_files(root: Path) -> list[Path]:
    """The segments' files, the oldest first."""
    return sorted(root.glob("v1/*/*.qkv"), key=lambda path: path.stat().st_mtime_ns)


def file_of(root: Path, tokens: list[int]) -> Path:
    digest = segments(tokens)[-1].digest
    return root / VERSION_FOLDER / IDENTITY.namespace / f"{digest.hex()}.qkv"


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def keep_chain(store: DirectoryStore) -> list[list[int]]:
    """Store a prompt as three segments; return the prompts up to the end of each."""
    ends = [PROMPT[:500], PROMPT[:900], PROMPT]
    for prompt in ends:
        assert keep(store, prompt) == 1
    return ends


def test_what_was_stored_is_there_after_a_restart(open_store: OpenStore) -> None:
    keep_chain(open_store())
    store = open_store()
    assert_is_of(store.read(store.match([*PROMPT, 1])), PROMPT)


def test_what_others_store_is_seen_at_the_next_look(open_store: OpenStore) -> None:
    ours, theirs = open_store(), open_store()
    assert ours.match(PROMPT).length == 0
    for prompt in (PROMPT[:500], PROMPT[:900]):
        keep(theirs, prompt)
        assert ours.covers(prompt) == len(prompt)
    keep(ours, PROMPT)
    assert theirs.match([*PROMPT, 1]).length == len(PROMPT)


def test_of_two_that_store_the_same_one_writes(open_store: OpenStore) -> None:
    ours, theirs = open_store(), open_store()
    [segment] = segments(PROMPT)
    assert ours.put(segment)
    assert theirs.put(segment) == 0


def test_a_damaged_segment_is_deleted_and_what_is_before_it_is_used(
    root: Path, open_store: OpenStore
) -> None:
    first, second, _ = keep_chain(open_store())
    damage(file_of(root, second))
    store = open_store()
    match = store.match([*PROMPT, 1])
    assert match.length == len(PROMPT)
    assert_is_of(store.read(match), first)
    assert not file_of(root, second).exists()
    assert store.counts() == {"bad_damaged": 1}
    assert store.match([*PROMPT, 1]).length == len(first)


def test_what_is_lost_can_be_stored_again(root: Path, open_store: OpenStore) -> None:
    store = open_store()
    _, second, _ = keep_chain(store)
    file_of(root, second).unlink()
    assert keep(store, second) == 1
    assert store.match([*PROMPT, 1]).length == len(PROMPT)


def test_what_follows_nothing_makes_way_for_one_of_the_same_end(
    root: Path, open_store: OpenStore
) -> None:
    store, other = open_store(), open_store()
    keep_chain(store)
    match = other.match([*PROMPT, 1])
    file_of(root, PROMPT[:500]).unlink()
    assert keep(store, PROMPT) == 1
    assert other.read(match).length == 0  # its start has changed
    assert other.counts() == {"bad_vanished": 1}
    assert_is_of(other.read(other.match([*PROMPT, 1])), PROMPT)


def test_a_segment_that_was_replaced_since_the_match_is_not_taken_for_the_old_one(
    root: Path, open_store: OpenStore
) -> None:
    store, other = open_store(), open_store()
    keep(store, PROMPT[:512])
    keep(store, PROMPT[:900])
    match = other.match([*PROMPT, 1])
    path = file_of(root, PROMPT[:900])
    path.unlink()
    [whole] = segments(PROMPT[:900])
    assert store.put(whole)
    assert other.read(match).length == 512
    assert other.counts() == {"bad_replaced": 1}
    assert_is_of(other.read(other.match(PROMPT)), PROMPT[:900])


def test_a_segment_that_vanished_since_the_match_shortens_it(
    root: Path, open_store: OpenStore
) -> None:
    store = open_store()
    first, second, _ = keep_chain(store)
    match = store.match([*PROMPT, 1])
    file_of(root, second).unlink()
    assert_is_of(store.read(match), first)
    assert store.counts()["bad_vanished"] == 1


def test_without_the_first_segment_nothing_is_restored(root: Path, open_store: OpenStore) -> None:
    store = open_store()
    first, *_ = keep_chain(store)
    match = store.match([*PROMPT, 1])
    damage(file_of(root, first))
    assert store.read(match).segments == ()


def test_a_state_that_is_damaged_leaves_the_restore_point_before_it(
    root: Path, open_store: OpenStore
) -> None:
    store = open_store()
    for length in (500, 900):
        keep(store, PROMPT[:length], with_state=True)
    match = store.match(PROMPT)
    damage(file_of(root, PROMPT[:900]))
    assert_is_of(store.read(match), PROMPT[:500])


def test_a_file_that_is_no_segment_is_deleted_when_it_is_seen(
    root: Path, open_store: OpenStore
) -> None:
    keep_chain(open_store())
    folder = root / VERSION_FOLDER / IDENTITY.namespace
    stray = [folder / f"{'0' * 32}.qkv", folder / f"{'1' * 32}.qkv"]
    stray[0].write_bytes(b"no segment")
    shutil.copy(file_of(root, PROMPT), stray[1])
    store = open_store()
    assert store.match([*PROMPT, 1]).length == len(PROMPT)
    assert [path for path in stray if path.exists()] == []
    assert store.counts() == {"bad_header": 2}


def test_files_of_others_are_left_alone(root: Path, open_store: OpenStore) -> None:
    store = open_store()
    notes = [root / "notes.txt", root / VERSION_FOLDER / IDENTITY.namespace / "notes.qkv.txt"]
    for path in notes:
        path.write_text("mine")
    keep_chain(store)
    assert all(path.exists() for path in notes)


def test_a_namespace_that_stands_for_something_else_is_not_used(
    root: Path, open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    keep_chain(open_store())
    (root / VERSION_FOLDER / IDENTITY.namespace / NAMESPACE_FILE).write_text('{"model":"other"}')
    store = open_store()
    assert store.match(PROMPT).length == 0
    assert store.covers(PROMPT) == 0
    [segment] = segments([9, *PROMPT])
    assert store.put(segment) is None
    assert store.counts() == {"refused_namespace": 1}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_use_sets_the_time_of_the_files_once_a_minute(
    root: Path, open_store: OpenStore, clock: Clock
) -> None:
    store = open_store()
    keep_chain(store)
    match = store.match([*PROMPT[:700], 1])
    for seconds, expected in ((0, 0), (59, 0), (60, 60), (100, 60), (120, 120)):
        began = 1_700_000_000.0
        clock.now = began + seconds
        store.note_use(match)
        used = {file_of(root, PROMPT[:end]).stat().st_mtime for end in (500, 900)}
        assert used == {began + expected}
    assert file_of(root, PROMPT).stat().st_mtime != clock.now


def test_after_a_restart_what_was_used_last_is_kept_longest(
    root: Path, open_store: OpenStore, clock: Clock
) -> None:
    store = open_store()
    prompts = [[number, *PROMPT[: BLOCK_TOKENS - 1]] for number in range(3)]
    for number, prompt in enumerate(prompts):
        keep(store, prompt, width=WIDE)
        os.utime(file_of(root, prompt), (1000.0 + number, 1000.0 + number))
    store.note_use(store.match([*prompts[0], 1]))
    size = sum(path.stat().st_size for path in segment_files(root))
    store = open_store(budget_bytes=size // 3 * 2 + BLOCK_BYTES + 70_000)
    keep(store, [9, *PROMPT[: BLOCK_TOKENS - 1]], width=WIDE)
    assert [store.match([*prompt, 1]).length > 0 for prompt in prompts] == [True, False, True]


def test_uses_that_others_noted_count(root: Path, open_store: OpenStore, clock: Clock) -> None:
    store = open_store()
    prompts = [[number, *PROMPT[: BLOCK_TOKENS - 1]] for number in range(3)]
    for prompt in prompts:
        clock.now += 10
        keep(store, prompt, width=WIDE)
        os.utime(file_of(root, prompt), (clock.now, clock.now))
    clock.now += 100
    other = open_store()
    other.note_use(other.match([*prompts[0], 1]))
    size = sum(path.stat().st_size for path in segment_files(root))
    store._budget = size // 3 * 2 + BLOCK_BYTES + 70_000
    keep(store, [9, *PROMPT[: BLOCK_TOKENS - 1]], width=WIDE)
    assert [store.match([*prompt, 1]).length > 0 for prompt in prompts] == [True, False, True]


def test_the_budget_is_for_all_namespaces_together(root: Path, open_store: OpenStore) -> None:
    budget = 5 * BLOCK_BYTES
    ours = open_store(budget_bytes=budget)
    theirs = open_store(budget_bytes=budget, identity=OTHER_IDENTITY)
    for number in range(12):
        prompt = [number, *PROMPT[: BLOCK_TOKENS - 1]]
        keep(ours, prompt, width=WIDE)
        keep(theirs, prompt, width=WIDE, identity=OTHER_IDENTITY)
        assert sum(path.stat().st_size for path in segment_files(root)) <= budget
    assert ours.match([*prompt, 1]).length == BLOCK_TOKENS
    assert theirs.match([*prompt, 1]).length == BLOCK_TOKENS
    assert ours.counts()["evictions"] > 0


def test_a_tenth_of_the_volume_stays_free(root: Path, open_store: OpenStore) -> None:
    total = 100 * BLOCK_BYTES
    others = 85 * BLOCK_BYTES

    def volume(_: Path) -> Disk:
        used = others + sum(path.stat().st_size for path in segment_files(root))
        return Disk(total, total - used)

    store = open_store(volume=volume)
    for number in range(12):
        keep(store, [number, *PROMPT[: BLOCK_TOKENS - 1]], width=WIDE)
        assert volume(root).free >= total // 10
    assert store.counts()["evictions"] > 0
    others = 95 * BLOCK_BYTES
    [segment] = segments([99, *PROMPT[: BLOCK_TOKENS - 1]], width=WIDE)
    assert store.put(segment) is None
    assert store.counts()["refused_no_room"] == 1


def test_files_that_somebody_began_to_write_an_hour_ago_are_deleted(
    root: Path, open_store: OpenStore, clock: Clock
) -> None:
    open_store()
    temporary = root / VERSION_FOLDER / OTHER_IDENTITY.namespace / "tmp"
    temporary.mkdir(parents=True)
    for name, age in (("old", 3601), ("new", 3599)):
        (temporary / name).write_bytes(b"part")
        os.utime(temporary / name, (clock.now - age, clock.now - age))
    open_store()
    assert [path.name for path in temporary.iterdir()] == ["new"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_what_cannot_be_written_is_said_once_and_tried_again_later(
    open_store: OpenStore,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    caplog.set_level(logging.INFO)
    store = open_store()
    keep(store, PROMPT[:500])
    [segment] = segments(PROMPT, 500)

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_segment", fail)
        for _ in range(3):
            assert store.put(segment) is None
        clock.now += 31
        assert store.put(segment) is None
        clock.now += 29
        assert store.put(segment) is None
    assert store.counts() == {
        "writes": 1,
        "written_bytes": store.counts()["written_bytes"],
        "write_errors": 2,
        "refused_not_writable": 3,
    }
    assert store.match(PROMPT).length == 500
    clock.now += 2
    assert store.put(segment)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.INFO]


def test_a_name_that_cannot_be_written_costs_nothing_but_the_name(
    root: Path, open_store: OpenStore
) -> None:
    keep(open_store(), PROMPT)
    beside = f"{MODEL_FILE}.{socket.gethostname()}.{os.getpid()}"
    (root / VERSION_FOLDER / IDENTITY.namespace / beside).mkdir()
    store = open_store(model="a name")
    assert store.match(PROMPT).length == len(PROMPT) - 1
    assert store.counts().get("open_errors") is None


def test_a_file_where_the_folder_should_be_costs_nothing_but_the_store(
    root: Path, open_store: OpenStore, clock: Clock
) -> None:
    root.write_text("in the way")
    store = open_store()
    [segment] = segments(PROMPT)
    assert store.match(PROMPT).length == 0
    assert store.covers(PROMPT) == 0
    assert store.put(segment) is None
    root.unlink()
    clock.now += 31
    assert store.put(segment)
    assert store.match([*PROMPT, 1]).length == len(PROMPT)


def test_a_root_that_was_deleted_is_begun_anew(root: Path, open_store: OpenStore) -> None:
    store = open_store()
    keep_chain(store)
    match = store.match([*PROMPT, 1])
    shutil.rmtree(root)
    assert store.read(match).length == 0
    assert store.match(PROMPT).length == 0
    keep_chain(store)
    assert_is_of(store.read(store.match([*PROMPT, 1])), PROMPT)


def test_a_volume_that_is_gone_is_not_written_beside(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    volume = tmp_path / "volume"
    store = DirectoryStore(volume / "root", IDENTITY, LARGE, clock=clock)
    keep_chain(store)
    elsewhere = volume.rename(tmp_path / "unmounted")
    [segment] = segments([9, *PROMPT])
    for _ in range(3):
        assert store.put(segment) is None
        clock.now += 31
    assert not volume.exists()
    assert store.match(PROMPT).length == 0
    assert len(caplog.records) == 1
    elsewhere.rename(volume)
    assert store.match([*PROMPT, 1]).length == len(PROMPT)
    assert store.put(segment)


def test_the_budget_where_nobody_says_is_a_tenth_of_the_volume_or_50_gb(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "yet"
    assert default_budget(missing, lambda _: Disk(10**11, 0)) == 10**10
    assert default_budget(missing, lambda _: Disk(10**13, 0)) == 50 * 10**9
    assert default_budget(missing) > 0
