"""Figures of a benchmark from the jobs' own times: rates, percentiles, and the best row count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workers.ended_job import EndedJob

# Row counts whose rates differ by less are as good as each other: the smaller one waits less.
_AS_GOOD = 0.95


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value below which a part of these lie, between neighbours in proportion.

    The definition of numpy and of ``statistics.quantiles(method="inclusive")``: 0.5 is the median,
    0 the least and 1 the most of them.

    Raises:
        ValueError: there is none, or ``part`` is not from 0 to 1.
    """
    if not values or not 0 <= part <= 1:
        raise ValueError(f"no percentile {part} of {len(values)} values")
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    if below == len(ordered) - 1:
        return ordered[-1]
    return ordered[below] + (ordered[below + 1] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Spread:
    """How long something took: seconds at the median, and what 95 of 100 do not exceed."""

    p50: float
    p95: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of those that are there; None when none is."""
        known = [value for value in values if value is not None]
        return cls(percentile(known, 0.5), percentile(known, 0.95)) if known else None


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one run with so many rows came to.

    Attributes:
        rows: the limit that the worker had.
        most_rows: jobs that were in the batch at once; fewer where memory or jobs did not suffice.
        jobs: that ended with an answer.
        failed: that ended without one.
        failure: why the first of those did.
        seconds: from the first claim to the last token.
        first_token: from a job's place in the batch to its first token.
        between_tokens: the mean time between the tokens of a job.
        job: from its place in the batch to its last token.
        peak_bytes: the most memory that model and rows took.
        peak_kv_bytes: of that, keys and values of rows.
        restarts: workers that died in it.
        cores: that the worker kept busy on average; fewer where other work took its turns.
    """

    rows: int
    most_rows: int
    jobs: int
    failed: int
    failure: str | None
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token: Spread | None
    between_tokens: Spread | None
    job: Spread | None
    peak_bytes: int
    peak_kv_bytes: int
    restarts: int
    cores: float

    @classmethod
    def of(cls, rows: int, ended: Sequence[EndedJob], *, restarts: int = 0) -> RunFigures:
        """Return the figures of jobs that ended in one run."""
        timed = [(job, job.times) for job in ended if job.times is not None]
        seconds = 0.0
        if timed:
            last = max(times.ended for _, times in timed)
            seconds = last - min(job.claimed_at for job in ended)
        processor_seconds = max((job.processor_seconds for job in ended), default=0.0)
        failures = [job.error for job in ended if job.error is not None]
        return cls(
            rows=rows,
            most_rows=most_at_once([(times.admitted, times.ended) for _, times in timed]),
            jobs=len(ended) - len(failures),
            failed=len(failures),
            failure=failures[0] if failures else None,
            seconds=seconds,
            prompt_tokens=sum(job.prompt_tokens for job in ended),
            cached_tokens=sum(job.cached_tokens for job in ended),
            completion_tokens=sum(job.completion_tokens for job in ended),
            first_token=Spread.of(job.first_token_seconds for job in ended),
            between_tokens=Spread.of(job.between_tokens_seconds for job in ended),
            job=Spread.of(job.seconds for job in ended),
            peak_bytes=max((job.peak_bytes for job in ended), default=0),
            peak_kv_bytes=max((job.peak_kv_bytes for job in ended), default=0),
            restarts=restarts,
            cores=processor_seconds / seconds if seconds > 0 and not restarts else 0.0,
        )

    @property
    def jobs_per_second(self) -> float:
        """Answers over the time of the run."""
        return self._rate(self.jobs)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time of the run."""
        return self._rate(self.completion_tokens)

    @property
    def computed_prompt_tokens_per_second(self) -> float:
        """Prompt tokens that were not there already, over the time of the run."""
        return self._rate(self.prompt_tokens - self.cached_tokens)

    @property
    def cached_share(self) -> float:
        """The part of all prompt tokens that was there already."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def _rate(self, count: int) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0

    def to_object(self) -> dict[str, Any]:
        """Return the figures for ``--json``."""
        return {
            **asdict(self),
            "jobs_per_second": self.jobs_per_second,
            "tokens_per_second": self.tokens_per_second,
            "computed_prompt_tokens_per_second": self.computed_prompt_tokens_per_second,
            "cached_share": self.cached_share,
        }


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """Return how many of these spans of time overlap at most; one that ends makes room first."""
    changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
    most = count = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    return most


def best_run(runs: Sequence[RunFigures]) -> RunFigures | None:
    """Return the run with the fewest rows whose rate is as good as the highest; None of none."""
    useful = [run for run in runs if run.tokens_per_second > 0]
    if not useful:
        return None
    highest = max(run.tokens_per_second for run in useful)
    as_good = [run for run in useful if run.tokens_per_second >= _AS_GOOD * highest]
    return min(as_good, key=lambda run: run.rows)
