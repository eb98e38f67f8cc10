"""How fast counts rise, and how long what is left will take; knows neither server nor clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from queue_service.batches import Batch

RECENT_SECONDS: Final = 10.0
# Of lines, which are few, so that what is left does not jump with each of them.
_LINES_SECONDS: Final = 60.0
_SAMPLES_A_WINDOW: Final = 20
# What a shorter time, or fewer lines, tell of the pace is chance.
_LEAST_SECONDS: Final = 1.0
_LEAST_LINES: Final = 3


class Meter:
    """Measures how fast a count rises. One that falls has begun anew, and so does its meter.

    Args:
        window_seconds: how far back `recent` looks at least.
    """

    def __init__(self, window_seconds: float = RECENT_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._samples: deque[tuple[float, float]] = deque()
        self._first: tuple[float, float] | None = None
        self._rose_at: float | None = None

    def note(self, moment: float, count: float) -> None:
        """Take the count at a moment, in seconds of any clock that does not go back."""
        samples = self._samples
        if samples and count < samples[-1][1]:
            samples.clear()
            self._first = self._rose_at = None
        if self._first is None:
            self._first = (moment, count)
        elif count > samples[-1][1]:
            self._rose_at = moment
        if len(samples) > 1 and (self._is_flat(count) or self._is_crowded(moment)):
            samples.pop()
        samples.append((moment, count))
        while len(samples) > 2 and self._is_behind(samples[1], moment, count):
            samples.popleft()

    def _is_flat(self, count: float) -> bool:
        """Whether a plateau goes on: where it began and ends is all that is kept of one."""
        return self._samples[-2][1] == self._samples[-1][1] == count

    def _is_crowded(self, moment: float) -> bool:
        return moment - self._samples[-2][0] < self._window_seconds / _SAMPLES_A_WINDOW

    def _is_behind(self, sample: tuple[float, float], moment: float, count: float) -> bool:
        return moment - sample[0] >= self._window_seconds and sample[1] < count

    @property
    def recent(self) -> float | None:
        """The rise a second over the window; None while too little was seen.

        Jobs end in bursts. A window in which the count did not rise is longer: it reaches back to
        before the last rise, so that a pause slows the rate down and does not end it.
        """
        return _slope(self._samples[0], self._samples[-1]) if self._has_risen else None

    @property
    def average(self) -> float | None:
        """The rise a second since the first count; None while too little was seen."""
        return _slope(self._first, self._samples[-1]) if self._first and self._has_risen else None

    @property
    def risen(self) -> float:
        """How far the count has risen since the first one."""
        return self._samples[-1][1] - self._first[1] if self._first else 0.0

    @property
    def rose_at(self) -> float | None:
        """The moment at which the count was seen to have risen last; None: it has not."""
        return self._rose_at

    @property
    def is_resting(self) -> bool:
        """Whether the count has not risen within the window."""
        if not self._samples:
            return True
        since = self._samples[-1][0] - self._window_seconds
        return self._rose_at is None or self._rose_at < since

    @property
    def _has_risen(self) -> bool:
        return self._rose_at is not None


def _slope(start: tuple[float, float], end: tuple[float, float]) -> float | None:
    seconds = end[0] - start[0]
    return (end[1] - start[1]) / seconds if seconds >= _LEAST_SECONDS else None


@dataclass(frozen=True, slots=True)
class Rates:
    """How a batch comes on; None is what is not known yet.

    Attributes:
        tokens_per_second: generated, about the last ten seconds. A line's tokens count at its end.
        average_tokens_per_second: the same since the batch was first looked at and ran.
        lines_per_second: lines that ended, about the last minute.
        seconds_left: until the last line has ended, if they go on to end as they did.
    """

    tokens_per_second: float | None = None
    average_tokens_per_second: float | None = None
    lines_per_second: float | None = None
    seconds_left: float | None = None


class BatchPace:
    """Measures how one batch comes on, from the first moment at which lines of it ran."""

    def __init__(self) -> None:
        self._tokens = Meter()
        self._lines = Meter(_LINES_SECONDS)
        self._idle: tuple[float, Batch] | None = None
        self._is_running = False
        self._ends_at: float | None = None

    def note(self, moment: float, batch: Batch, num_running: int) -> Rates:
        """Take a batch as it is at a moment; return what is known of its pace now.

        Args:
            moment: in seconds of any clock that does not go back.
            num_running: lines that workers hold.
        """
        if not self._is_running and not self._begins(moment, batch, num_running):
            return Rates()
        self._measure(moment, batch)
        return Rates(
            tokens_per_second=self._tokens.recent,
            average_tokens_per_second=self._tokens.average,
            lines_per_second=self._lines.recent,
            seconds_left=self._seconds_left(moment, batch),
        )

    def _begins(self, moment: float, batch: Batch, num_running: int) -> bool:
        """Whether lines run, or ran since the last look; loading a model is no part of the pace."""
        has_ended = self._idle is not None and batch.ended > self._idle[1].ended
        if self._idle is not None and has_ended:
            self._measure(*self._idle)
        self._idle = (moment, batch)
        self._is_running = num_running > 0 or has_ended
        return self._is_running

    def _measure(self, moment: float, batch: Batch) -> None:
        self._tokens.note(moment, batch.completion_tokens)
        self._lines.note(moment, batch.ended)

    def _seconds_left(self, moment: float, batch: Batch) -> float | None:
        rate = self._lines.recent
        if not batch.is_submitted or batch.status.is_final:
            return None
        if not rate or self._lines.risen < _LEAST_LINES:
            return None
        left = (batch.total - batch.ended) / rate
        # Between two ends the time passes; only when it is over the guess was wrong.
        if self._lines.rose_at == moment or self._ends_at is None or self._ends_at <= moment:
            self._ends_at = moment + left
        return self._ends_at - moment
