"""What a worker has done since it started, counted where the server accepts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from queue_service.broker import Ending, Outcome


@dataclass(slots=True)
class Totals:
    """Counts of jobs and tokens. A job counts when its end was accepted, so that these are the sums
    of the results.

    Attributes:
        finished: jobs with an answer.
        failed: jobs with an error.
        stopped: jobs that somebody stopped.
        retried: ends after which a job went back to its queue.
        refused: ends that came too late, or of jobs that were cancelled or deleted.
        lost: jobs that were taken from this worker while they ran.
        prompt_tokens: of the finished jobs, as ``usage`` has them.
        cached_tokens: those of them that were not computed again.
        completion_tokens: of the finished jobs.
    """

    finished: int = 0
    failed: int = 0
    stopped: int = 0
    retried: int = 0
    refused: int = 0
    lost: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def count(self, outcome: Outcome) -> None:
        """Count a job that has ended."""
        match outcome.ending:
            case Ending.FINISHED:
                self.finished += 1
            case Ending.FAILED:
                self.failed += 1
            case Ending.STOPPED:
                self.stopped += 1
        self.prompt_tokens += outcome.prompt_tokens
        self.cached_tokens += outcome.cached_tokens
        self.completion_tokens += outcome.completion_tokens

    def figures(self) -> Mapping[str, str]:
        """Return all of them for the worker's card."""
        return {name: str(count) for name, count in asdict(self).items()}
