"""Rates and what is left, from counts that rise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queue_service.batches import Batch, Status
from queue_service.pace import RECENT_SECONDS, BatchPace, Meter, Rates

BATCH = Batch(
    id="batch_1",
    status=Status.IN_PROGRESS,
    endpoint="/v1/chat/completions",
    queue="qsvc:fake",
    model="fake",
    total=100,
    completed=0,
    failed=0,
    cancelled=0,
    is_submitted=True,
    prompt_tokens=0,
    completion_tokens=0,
    cached_tokens=0,
    timestamps={},
    metadata={},
    retention_seconds=3600,
    forgotten=0,
)


def metered(*samples: tuple[float, float], window_seconds: float = RECENT_SECONDS) -> Meter:
    meter = Meter(window_seconds)
    for moment, count in samples:
        meter.note(moment, count)
    return meter


def at(lines: int, tokens: int = 0, **fields: object) -> Batch:
    return replace(BATCH, completed=lines, completion_tokens=tokens, **fields)


# Meter ----------------------------------------------------------------------------------------


def test_a_steady_rise_is_the_rate_of_both_kinds() -> None:
    meter = metered(*((second, 7.0 * second) for second in range(60)))
    assert meter.recent == pytest.approx(7.0)
    assert meter.average == pytest.approx(7.0)


def test_nothing_is_known_before_a_second_is_over_and_something_rose() -> None:
    assert metered().recent is None
    assert metered((0, 5)).recent is None
    assert metered((0, 5), (0.5, 9)).recent is None
    idle = metered(*((second, 5) for second in range(60)))
    assert (idle.recent, idle.average) == (None, None)
    assert idle.is_resting


def test_the_recent_rate_forgets_what_is_long_ago_and_the_average_does_not() -> None:
    slow = [(second, float(second)) for second in range(100)]
    fast = [(100.0 + second, 100.0 + 50 * second) for second in range(20)]
    meter = metered(*slow, *fast)
    assert meter.recent == pytest.approx(50, rel=0.1)
    assert meter.average == pytest.approx((100 + 950) / 119)


def test_a_pause_between_bursts_slows_the_rate_and_does_not_end_it() -> None:
    meter = metered((0, 0), (20, 100))
    assert meter.recent == pytest.approx(5)
    meter.note(40, 100)
    assert meter.recent == pytest.approx(2.5)
    assert meter.is_resting
    meter.note(41, 300)
    assert not meter.is_resting
    assert meter.recent is not None
    assert meter.recent > 5


def test_a_count_that_falls_has_begun_anew() -> None:
    meter = metered((0, 0), (10, 1000), (11, 3))
    assert meter.recent is None
    meter.note(21, 23)
    assert meter.recent == pytest.approx(2)
    assert meter.average == pytest.approx(2)
    assert meter.risen == 20


@given(st.lists(st.tuples(st.floats(0.01, 30), st.integers(0, 1000)), min_size=1, max_size=200))
def test_rates_are_never_negative_and_never_above_the_steepest_rise(
    steps: list[tuple[float, int]],
) -> None:
    moment, count = 0.0, 0
    meter = Meter()
    meter.note(moment, count)
    steepest = 0.0
    for seconds, rise in steps:
        moment, count = moment + seconds, count + rise
        steepest = max(steepest, rise / seconds)
        meter.note(moment, count)
        for value in (meter.recent, meter.average):
            assert value is None or 0 < value <= steepest * (1 + 1e-9)
    assert meter.risen == count


@given(st.lists(st.floats(0.001, 0.3), max_size=500))
def test_a_meter_holds_few_samples_however_often_it_is_told(gaps: list[float]) -> None:
    meter, moment = Meter(), 0.0
    for number, gap in enumerate(gaps):
        moment += gap
        meter.note(moment, number)
        assert len(meter._samples) < 60


# A batch --------------------------------------------------------------------------------------


def test_a_pace_begins_when_lines_run_not_while_the_model_loads() -> None:
    pace = BatchPace()
    for second in range(30):
        assert pace.note(second, at(0), 0) == Rates()
    pace.note(30, at(0), 8)
    rates = pace.note(40, at(5, tokens=200), 8)
    assert rates.tokens_per_second == pytest.approx(20)
    assert rates.average_tokens_per_second == pytest.approx(20)
    assert rates.lines_per_second == pytest.approx(0.5)
    assert rates.seconds_left == pytest.approx(95 / 0.5)


def test_lines_that_end_between_two_looks_are_measured_from_the_first_of_them() -> None:
    pace = BatchPace()
    pace.note(0, at(0), 0)
    assert pace.note(2, at(10, tokens=100), 0).tokens_per_second == pytest.approx(50)


def test_what_ended_before_the_first_look_is_no_part_of_the_pace() -> None:
    pace = BatchPace()
    pace.note(0, at(50, tokens=10_000), 8)
    rates = pace.note(10, at(60, tokens=10_100), 8)
    assert rates.average_tokens_per_second == pytest.approx(10)
    assert rates.seconds_left == pytest.approx(40)


def test_time_left_is_not_told_before_some_lines_ended_nor_while_the_file_is_fed() -> None:
    pace = BatchPace()
    pace.note(0, at(0), 8)
    assert pace.note(5, at(2), 8).seconds_left is None
    assert pace.note(6, at(4), 8).seconds_left is not None
    assert pace.note(7, at(5, is_submitted=False), 8).seconds_left is None
    assert pace.note(8, at(100, status=Status.COMPLETED), 0).seconds_left is None


def test_time_left_runs_down_between_two_ends_and_grows_when_it_was_wrong() -> None:
    pace = BatchPace()
    pace.note(0, at(0), 50)
    assert pace.note(20, at(50), 50).seconds_left == pytest.approx(20)
    assert pace.note(35, at(50), 50).seconds_left == pytest.approx(5)
    late = pace.note(45, at(50), 50).seconds_left
    assert late == pytest.approx(45)


@given(
    st.lists(
        st.tuples(st.floats(0.05, 20), st.integers(0, 5), st.integers(0, 500)),
        max_size=100,
    )
)
def test_time_left_is_never_negative(steps: list[tuple[float, int, int]]) -> None:
    pace, moment, lines, tokens = BatchPace(), 0.0, 0, 0
    pace.note(moment, at(0), 1)
    for seconds, ended, generated in steps:
        moment, lines, tokens = moment + seconds, min(100, lines + ended), tokens + generated
        rates = pace.note(moment, at(lines, tokens), 1)
        assert rates.seconds_left is None or rates.seconds_left >= 0
