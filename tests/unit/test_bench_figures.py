"""A benchmark's figures are exact, also of a few jobs."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queue_service.broker import Ending, Outcome
from queue_service.responses import Choice, FinishReason
from tests.bench_samples import ended_job, failed_job, run_at, run_of
from tests.harness import make_claimed, make_request
from workers.bench_figures import Spread, best_run, most_at_once, percentile
from workers.ended_job import EndedJob
from workers.requests import Generated, Refused, RunTimes

NUMBERS = st.lists(st.floats(0, 1e6), min_size=2, max_size=40)


@pytest.mark.parametrize(
    ("values", "part", "expected"),
    [
        ([7.0], 0.5, 7.0),
        ([7.0], 0.95, 7.0),
        ([1.0, 3.0], 0.5, 2.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.95, 4.8),
        ([float(i) for i in range(101)], 0.95, 95.0),
        ([1.0, 2.0], 0.0, 1.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_percentiles_of_a_few_values(values: list[float], part: float, expected: float) -> None:
    assert percentile(values, part) == pytest.approx(expected, abs=1e-12)


@given(NUMBERS)
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    twentieths = statistics.quantiles(values, n=20, method="inclusive")
    assert percentile(values, 0.5) == pytest.approx(statistics.median(values))
    assert percentile(values, 0.95) == pytest.approx(twentieths[18])
    assert min(values) <= percentile(values, 0.95) <= max(values)


@pytest.mark.parametrize(("values", "part"), [([], 0.5), ([1.0], 1.1), ([1.0], -0.1)])
def test_there_is_no_percentile_of_nothing(values: list[float], part: float) -> None:
    with pytest.raises(ValueError, match="no percentile"):
        percentile(values, part)


def test_a_spread_leaves_out_what_is_not_known() -> None:
    assert Spread.of([None, 2.0, 1.0]) == Spread(1.5, pytest.approx(1.95))
    assert Spread.of([None]) is None


def test_the_times_of_a_job_begin_with_its_place_in_the_batch() -> None:
    job = ended_job(claimed_at=0.0, admitted=3.0, first_token=4.0, ended=10.0, tokens=4)
    assert job.first_token_seconds == 1.0
    assert job.seconds == 7.0
    assert job.between_tokens_seconds == 2.0


def test_there_is_no_time_between_the_tokens_of_one_token_or_of_several_answers() -> None:
    assert ended_job(tokens=1).between_tokens_seconds is None
    assert ended_job(num_choices=2).between_tokens_seconds is None
    assert failed_job().between_tokens_seconds is None


def test_rates_are_over_the_time_from_the_first_claim_to_the_last_token() -> None:
    run = run_of(
        2,
        ended_job(claimed_at=100.0, admitted=101.0, first_token=102.0, ended=104.0, tokens=6),
        ended_job(
            claimed_at=101.0, admitted=104.0, first_token=106.0, ended=110.0, tokens=14,
            prompt_tokens=30, cached_tokens=20, peak_bytes=300, peak_kv_bytes=30,
        ),
        restarts=1,
    )  # fmt: skip
    assert run.seconds == 10.0
    assert run.jobs_per_second == 0.2
    assert run.tokens_per_second == 2.0
    assert run.computed_prompt_tokens_per_second == 2.0
    assert run.cached_share == 0.5
    assert run.job == Spread(4.5, pytest.approx(5.85))
    assert run.most_rows == 1
    assert (run.peak_bytes, run.peak_kv_bytes, run.restarts) == (300, 30, 1)


def test_a_job_that_failed_counts_as_failed_and_has_no_times() -> None:
    run = run_of(2, ended_job(), failed_job("too long"), failed_job("too hot"))
    assert (run.jobs, run.failed, run.failure) == (1, 2, "too long")
    assert run.job == Spread(4.0, 4.0)


def test_cores_are_processor_time_over_time_and_unknown_where_a_worker_died() -> None:
    jobs = [ended_job(ended=5.0, processor_seconds=s) for s in (2.0, 6.0)]
    assert run_of(2, *jobs).cores == 1.2
    assert run_of(2, *jobs, restarts=1).cores == 0.0


def test_a_run_of_failures_alone_has_figures() -> None:
    run = run_of(1, failed_job())
    assert (run.seconds, run.tokens_per_second, run.job, run.most_rows) == (0.0, 0.0, None, 0)
    assert run.cached_share == 0.0


def test_rows_at_once_are_counted_by_overlap() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(0, 2), (1, 3), (2, 4)]) == 2  # one ends where another begins
    assert most_at_once([(0, 9), (1, 9), (2, 9), (3, 4)]) == 4


def test_the_best_run_has_the_fewest_rows_of_those_that_are_as_good() -> None:
    runs = [run_at(1, 10), run_at(8, 96), run_at(16, 100), run_at(32, 90)]
    assert best_run(runs) is runs[1]
    assert best_run(runs[2:]) is runs[2]
    assert best_run([run_of(1, failed_job())]) is None
    assert best_run([]) is None


# What the worker child tells ------------------------------------------------------------------


def outcome(ending: Ending, **fields: object) -> Outcome:
    values = {"payload": b"", "error": None, "keep_seconds": 1, "ended_at": 0.0, **fields}
    return Outcome(ending=ending, **values)  # type: ignore[arg-type]


def test_a_job_is_told_as_json_and_read_back() -> None:
    claimed = make_claimed(job_id="b-1", execution_id="e")
    choices = [Choice("hi", FinishReason.STOP, completion_tokens=2)]
    result = Generated(
        make_request("hi", claimed=claimed), choices, 3, RunTimes(1.0, 1.5, 2.0, 4.0)
    )
    written = outcome(Ending.FINISHED, prompt_tokens=5, completion_tokens=2, cached_tokens=3)
    job = EndedJob.of(result, written, peak_bytes=7, peak_kv_bytes=6, processor_seconds=1.5)
    event = json.loads(json.dumps({"event": "job", **job.to_event()}))
    assert EndedJob.from_event(event) == job
    assert (job.new_tokens, job.first_token_seconds, job.between_tokens_seconds) == (2, 0.5, 2.0)


def test_a_job_without_an_answer_is_told_with_its_reason() -> None:
    refused = Refused(make_claimed(job_id="b-1", execution_id="e"), ValueError("no"))
    error = {"message": "no such thing", "code": "x"}
    job = EndedJob.of(
        refused,
        outcome(Ending.FAILED, error=error),
        peak_bytes=0,
        peak_kv_bytes=0,
        processor_seconds=0,
    )
    assert EndedJob.from_event(json.loads(json.dumps(job.to_event()))) == job
    assert (job.times, job.error, job.seconds) == (None, "no such thing", None)
