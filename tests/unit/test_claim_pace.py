"""How many jobs are claimed ahead at which pace."""

from __future__ import annotations

import pytest

from workers.claim_pace import ClaimPace


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def at_pace(a_second: int, usual: int = 8) -> ClaimPace:
    """A pace after one second in which so many jobs were answered, one hundredth at a time."""
    clock = Clock()
    pace = ClaimPace(usual, clock)
    for _ in range(100):
        clock.seconds += 0.01
        pace.note(a_second // 100)
    return pace


@pytest.mark.parametrize(("a_second", "ahead"), [(0, 8), (100, 8), (1000, 100), (9000, 256)])
def test_as_many_as_end_in_a_tenth_of_a_second(a_second: int, ahead: int) -> None:
    assert at_pace(a_second).ahead == pytest.approx(ahead, abs=10)


def test_a_slow_model_claims_as_soon_as_there_is_room_and_gathers_nothing() -> None:
    pace = at_pace(100)
    assert (pace.at_once, pace.is_fast) == (1, False)


def test_rows_that_end_together_are_no_quick_model() -> None:
    clock = Clock()
    pace = ClaimPace(8, clock)
    pace.note(64)
    assert (pace.ahead, pace.at_once, pace.is_fast) == (8, 1, False)


def test_a_quick_one_claims_and_writes_many_at_once() -> None:
    pace = at_pace(2000)
    assert 80 <= pace.at_once <= pace.ahead
    assert pace.is_fast


def test_a_pace_is_forgotten_when_nothing_ends_any_more() -> None:
    clock = Clock()
    pace = ClaimPace(8, clock)
    pace.note(5000)
    assert pace.ahead == 256
    clock.seconds += 1.1
    assert (pace.ahead, pace.at_once, pace.is_fast) == (8, 1, False)


def test_who_wants_none_ahead_gets_none_at_any_pace() -> None:
    pace = at_pace(9000, usual=0)
    assert (pace.ahead, pace.is_fast) == (0, False)
