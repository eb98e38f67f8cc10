"""Jobs and runs of a benchmark that never took place."""

from __future__ import annotations

from collections.abc import Sequence

from tests.fake_look import fake_look
from workers.bench import BenchReport
from workers.bench_figures import RunFigures
from workers.ended_job import EndedJob
from workers.requests import RunTimes


def ended_job(
    *,
    admitted: float = 1.0,
    first_token: float = 2.0,
    ended: float = 5.0,
    claimed_at: float = 0.0,
    tokens: int = 4,
    prompt_tokens: int = 10,
    cached_tokens: int = 0,
    num_choices: int = 1,
    peak_bytes: int = 100,
    peak_kv_bytes: int = 10,
    processor_seconds: float = 5.0,
) -> EndedJob:
    """A job that was answered."""
    return EndedJob(
        job_id="batch_1-1",
        claimed_at=claimed_at,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=tokens,
        new_tokens=tokens,
        num_choices=num_choices,
        times=RunTimes(claimed_at, admitted, first_token, ended),
        error=None,
        peak_bytes=peak_bytes,
        peak_kv_bytes=peak_kv_bytes,
        processor_seconds=processor_seconds,
    )


def failed_job(error: str = "it is too long") -> EndedJob:
    """A job that was refused."""
    return EndedJob("batch_1-2", 0.5, 0, 0, 0, 0, 0, None, error, 90, 9, 1.0)


def run_of(rows: int, *jobs: EndedJob, restarts: int = 0) -> RunFigures:
    return RunFigures.of(rows, jobs or [ended_job()], restarts=restarts)


def run_at(rows: int, tokens_per_second: float, *, wait: float = 1.0) -> RunFigures:
    """A run of one job of ten seconds with such a rate."""
    tokens = int(10 * tokens_per_second)
    return run_of(rows, ended_job(admitted=10 - wait, first_token=9.9, ended=10.0, tokens=tokens))


def report_of(runs: Sequence[RunFigures], *, source: str = "jobs.jsonl") -> BenchReport:
    return BenchReport(fake_look(), source, num_jobs=4, runs=list(runs))
