"""Waiting for a server that is away: how long, and until when."""

from __future__ import annotations

import pytest
from redis import ConnectionError as RedisConnectionError

from queue_service.dialogue import Outage, Reconnect
from queue_service.errors import ServerUnavailable

AWAY = RedisConnectionError("away")


class Clock:
    def __init__(self) -> None:
        self.seconds = 50.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_pauses_double_up_to_the_longest_and_begin_anew_after_an_answer(clock: Clock) -> None:
    outage = Outage(Reconnect(0.1, 0.5, give_up_seconds=None), clock)
    assert [outage.next_pause(AWAY) for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    outage.end()
    assert outage.next_pause(AWAY) == 0.1


def test_a_server_is_given_up_when_its_time_is_over_and_not_before(clock: Clock) -> None:
    outage = Outage(Reconnect(4, 60, give_up_seconds=10), clock)
    assert outage.next_pause(AWAY) == 4
    clock.seconds += 4
    assert outage.next_pause(AWAY) == 6, "no pause lasts beyond it"
    clock.seconds += 6
    with pytest.raises(ServerUnavailable, match="did not answer for 10 s"):
        outage.next_pause(AWAY)
    assert outage.next_pause(AWAY) == 4, "who asks again waits again"


def test_an_outage_is_told_once(clock: Clock) -> None:
    told: list[Exception] = []
    outage = Outage(Reconnect(on_outage=told.append), clock)
    for _ in range(3):
        outage.next_pause(AWAY)
    outage.end()
    outage.next_pause(AWAY)
    assert told == [AWAY, AWAY]


@pytest.mark.parametrize(("first", "most"), [(0, 1), (-1, 1), (2, 1)])
def test_pauses_that_cannot_be_are_refused(first: float, most: float) -> None:
    with pytest.raises(ValueError, match="pauses"):
        Reconnect(first, most)
