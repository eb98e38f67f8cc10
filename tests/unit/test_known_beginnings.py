"""How long the common beginning of some prompts is, looked at once for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from queue_service.errors import RequestError
from workers.known_beginnings import KnownBeginnings

COMMON = list(range(300))
OTHERS = [[*COMMON, 7], [*COMMON, 8, 8]]


class Asked:
    """Other prompts; counts how often somebody wants them."""

    def __init__(self, *others: list[int]) -> None:
        self.others = others
        self.times = 0

    def __call__(self) -> Iterator[list[int]]:
        self.times += 1
        return iter(self.others)


def test_prompts_of_a_key_are_compared_with_others_once() -> None:
    known, asked = KnownBeginnings(), Asked(*OTHERS)
    assert [known.length("k", [*COMMON, n, n], asked) for n in (1, 2, 3)] == [300] * 3
    assert asked.times == 1


def test_a_prompt_that_begins_otherwise_is_compared_again() -> None:
    known = KnownBeginnings()
    assert known.length("k", [*COMMON, 1], Asked(*OTHERS)) == 300
    asked = Asked([5] * 200)
    assert known.length("k", [*[5] * 250, 1], asked) == 200
    assert asked.times == 1


def test_a_prompt_that_parts_a_little_sooner_shortens_what_is_known() -> None:
    known, asked = KnownBeginnings(), Asked(*OTHERS)
    known.length("k", [*COMMON, 1], asked)
    assert known.length("k", [*COMMON[:298], 1], asked) == 298
    assert known.length("k", [*COMMON, 1], asked) == 298
    assert asked.times == 1


def test_keys_do_not_mix() -> None:
    known = KnownBeginnings()
    assert known.length("k", [*COMMON, 1], Asked(*OTHERS)) == 300
    assert known.length("l", [*COMMON, 1], Asked(COMMON[:200])) == 200
    assert known.length("k", [*COMMON, 1], Asked()) == 300


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    known = KnownBeginnings(max_tokens=700)
    for key in ("a", "b", "a", "c"):
        known.length(key, [*COMMON, 1], Asked(*OTHERS))
    asked = Asked(*OTHERS)
    known.length("a", [*COMMON, 1], asked)
    assert asked.times == 0
    known.length("b", [*COMMON, 1], asked)
    assert asked.times == 1


def test_a_failure_of_the_others_is_kept_by_nobody() -> None:
    def refuse() -> Iterator[list[int]]:
        raise RequestError("the template refuses")

    known = KnownBeginnings()
    with pytest.raises(RequestError):
        known.length("k", [*COMMON, 1], refuse)
    assert known.length("k", [*COMMON, 1], Asked(*OTHERS)) == 300
