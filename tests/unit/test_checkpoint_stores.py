"""What every store of checkpoints does, whatever it keeps them in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import IDENTITY, OTHER_IDENTITY, assert_is_of, keep, segments
from workers.checkpoints.directory import DirectoryStore
from workers.checkpoints.index import Match
from workers.checkpoints.records import BLOCK_TOKENS, Identity
from workers.checkpoints.store import CheckpointStore, MemoryStore

LARGE = 1 << 30
MakeStore = Callable[..., CheckpointStore]


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "directory"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> MakeStore:
    def make(budget_bytes: int = LARGE, identity: Identity = IDENTITY) -> CheckpointStore:
        if request.param == "memory":
            return MemoryStore(identity, budget_bytes, clock=clock)
        return DirectoryStore(tmp_path, identity, budget_bytes, clock=clock)

    return make


@pytest.fixture
def store(make_store: MakeStore) -> CheckpointStore:
    return make_store()


PROMPT = [token * 7 % 5000 for token in range(1500)]


def test_an_empty_store_has_nothing_for_anybody(store: CheckpointStore) -> None:
    assert store.match(PROMPT) == Match()
    assert store.match([]).length == 0
    assert store.covers(PROMPT) == 0
    assert store.read(store.match(PROMPT)).length == 0


def test_what_was_put_comes_back_bit_for_bit(store: CheckpointStore) -> None:
    assert keep(store, PROMPT) == 1
    match = store.match([*PROMPT, 1, 2, 3])
    assert match.length == len(PROMPT)
    assert_is_of(store.read(match), PROMPT)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700, 1499])
def test_any_token_of_plain_keys_and_values_is_a_restore_point(
    store: CheckpointStore, length: int
) -> None:
    keep(store, PROMPT, max_bytes=40_000)
    match = store.match([*PROMPT[:length], 6000, 6000])
    assert match.length == length
    assert_is_of(store.read(match), PROMPT[:length])


def test_a_prompt_that_is_stored_as_a_whole_has_one_token_left_to_feed(
    store: CheckpointStore,
) -> None:
    keep(store, PROMPT)
    assert store.match(PROMPT).length == len(PROMPT) - 1


def test_a_state_is_of_use_at_its_end_only(store: CheckpointStore) -> None:
    keep(store, PROMPT[:600], with_state=True)
    keep(store, PROMPT[:1000], with_state=True)
    assert store.match(PROMPT[:600]).length == 0
    assert store.match(PROMPT[:601]).length == 600
    assert store.match(PROMPT[:1000]).length == 600
    match = store.match(PROMPT)
    assert match.length == 1000
    restored = store.read(match)
    assert_is_of(restored, PROMPT[:1000])
    assert_is_of(store.read(store.match(PROMPT[:900])), PROMPT[:600])


def test_a_state_that_begins_inside_another_prompt_is_restored_with_its_keys(
    store: CheckpointStore,
) -> None:
    other = [*PROMPT[:700], *range(6000, 6200)]
    keep(store, PROMPT, with_state=True)
    assert store.covers(other) == 512
    keep(store, other, with_state=True)
    restored = store.read(store.match([*other, 1]))
    assert_is_of(restored, other)
    [first, _] = restored.segments
    assert first.end == 512
    assert not first.layers[-1].tensors


def test_a_longer_one_that_cannot_be_used_hides_no_shorter_one(store: CheckpointStore) -> None:
    for length in (300, 500, 900):
        keep(store, PROMPT[:length], with_state=True)
    keep(store, [*PROMPT[:450], *range(6000, 6500)], with_state=True)
    assert store.match([*PROMPT[:700], 9]).length == 500
    assert store.match([*PROMPT[:480], 9]).length == 300


def test_a_prompt_with_a_common_beginning_is_stored_from_its_last_block_on(
    store: CheckpointStore,
) -> None:
    other = [*PROMPT[:1300], *range(6000, 6100)]
    keep(store, PROMPT)
    assert store.covers(other) == 1280
    keep(store, other)
    assert store.counts()["written_bytes"] > 0
    for prompt in (PROMPT, other):
        assert store.covers(prompt) == len(prompt)
        assert_is_of(store.read(store.match([*prompt, 1])), prompt)


def test_a_prompt_that_goes_on_is_stored_from_its_end_on(store: CheckpointStore) -> None:
    keep(store, PROMPT[:1001])
    assert store.covers(PROMPT) == 1001
    keep(store, PROMPT)
    assert_is_of(store.read(store.match([*PROMPT, 1])), PROMPT)


def test_a_segment_that_is_there_is_not_written_again(store: CheckpointStore) -> None:
    [segment] = segments(PROMPT)
    assert store.put(segment)
    assert store.put(segment) == 0
    assert store.counts()["writes"] == 1


def test_a_segment_whose_beginning_is_not_there_is_refused(store: CheckpointStore) -> None:
    first, second = segments(PROMPT, max_bytes=40_000)[:2]
    assert store.put(second) is None
    assert store.counts() == {"refused_no_parent": 1}
    assert store.put(first)
    assert store.put(second)


def test_another_namespace_sees_nothing(make_store: MakeStore) -> None:
    keep(make_store(), PROMPT)
    other = make_store(identity=OTHER_IDENTITY)
    assert other.match(PROMPT).length == 0
    assert other.covers(PROMPT) == 0


def test_what_is_used_often_outlives_what_is_used_once(make_store: MakeStore, clock: Clock) -> None:
    size = _size_of_one(make_store)
    store = make_store(budget_bytes=4 * size + 70_000, identity=Identity({"budget": 1}))
    identity = Identity({"budget": 1})
    prompts = [[number, *PROMPT[:255]] for number in range(9)]
    for number, prompt in enumerate(prompts):
        clock.now += 1
        keep(store, prompt, identity=identity, width=64)
        if number == 0:
            for _ in range(3):
                store.note_use(store.match([*prompt, 1]))
    assert store.match([*prompts[0], 1]).length == 256
    assert store.match([*prompts[8], 1]).length == 256
    assert store.match([*prompts[1], 1]).length == 0
    assert store.counts()["evictions"] >= 4


def test_what_others_follow_goes_after_them(make_store: MakeStore, clock: Clock) -> None:
    identity = Identity({"budget": 2})
    size = _size_of_one(make_store)
    store = make_store(budget_bytes=4 * size + 70_000, identity=identity)
    chain = PROMPT[: 3 * BLOCK_TOKENS]
    keep(store, chain, identity=identity, width=64, max_bytes=1)
    for number in range(9):
        clock.now += 1
        keep(store, [6000 + number, *PROMPT[:255]], identity=identity, width=64)
        match = store.match([*chain, 1])
        assert match.length % BLOCK_TOKENS == 0
        assert store.read(match).length == match.length
    assert store.match([*chain, 1]).length < len(chain)


def test_one_larger_than_the_budget_is_refused_and_displaces_nothing(
    make_store: MakeStore,
) -> None:
    store = make_store(budget_bytes=150_000)
    keep(store, PROMPT[:256])
    [large] = segments([9, *PROMPT], width=64)
    assert store.put(large) is None
    assert store.counts()["refused_no_room"] == 1
    assert store.match([*PROMPT[:256], 1]).length == 256


def test_what_a_segment_follows_is_not_evicted_for_it(make_store: MakeStore) -> None:
    identity = Identity({"budget": 3})
    size = _size_of_one(make_store)
    store = make_store(budget_bytes=2 * size + 70_000, identity=identity)
    chain = PROMPT[: 4 * BLOCK_TOKENS]
    made = segments(chain, identity=identity, width=64, max_bytes=1)
    assert [bool(store.put(one)) for one in made] == [True, True, False, False]
    assert store.match([*chain, 1]).length == 2 * BLOCK_TOKENS


def test_uses_are_counted(store: CheckpointStore) -> None:
    keep(store, PROMPT)
    store.note_use(store.match(PROMPT[:101]))
    store.note_use(store.match(PROMPT[:201]))
    assert store.counts()["uses"] == 2
    assert store.counts()["used_tokens"] == 300


def test_threads_may_put_and_read_at_once(store: CheckpointStore) -> None:
    prompts = [[*PROMPT[:500], *range(number * 100, number * 100 + 90)] for number in range(12)]
    keep(store, PROMPT[:500])
    failures: list[BaseException] = []

    def work(mine: list[list[int]]) -> None:
        try:
            for prompt in mine:
                keep(store, prompt)
                assert_is_of(store.read(store.match([*prompt, 1])), prompt)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(prompts[at::3],)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def _size_of_one(make_store: MakeStore) -> int:
    """Bytes that a block of the width of these tests takes in a store of this kind."""
    identity = Identity({"budget": 0})
    store = make_store(identity=identity)
    [segment] = segments(PROMPT[:256], identity=identity, width=64)
    size = store.put(segment)
    assert size
    assert np.prod(segment.layers[0].tensors[0].data.shape) == 2 * 256 * 64
    return size
