"""Notes what becomes of some jobs, phase by phase; of no other job it keeps anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from queue_service.broker import Claimed, Outcome
from queue_service.trace import Event, Phase, Trace
from workers.engine import StepWork

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from queue_service.spans import Spans

# Further steps of a job are told as one.
_SINGLE_STEPS = 8
# What has no end here was retried, or lost to others.
_MOST_OPEN = 1024


@dataclass(slots=True)
class _Open:
    """A trace that has not ended.

    Attributes:
        is_kept: for `qsvc trace`; others are for a collector only.
        context: the span below which a collector is to show it.
        at: until when all is told, on the monotonic clock.
        has_worked: a step has served the job.
        run: steps that are told as one: the first one's begin, the last one's end, their number.
    """

    claimed: Claimed
    is_kept: bool
    context: Context | None
    waited: float
    at: float
    events: list[tuple[Phase, float, float, dict[str, int | float | str]]] = field(
        default_factory=list
    )
    has_worked: bool = False
    num_steps: int = 0
    run: tuple[float, float, int] | None = None


class Tracer:
    """Traces the jobs that ask for it, and one of so many others.

    Any thread may call it. What is not traced costs a look into a dictionary; what has ended, or
    was never begun, is ignored.

    Args:
        spans: sends traces to a collector, also those of jobs that come with a sampled span to be
            below; None: nobody collects them.
        every: of so many jobs one is traced; 0 for those that ask only.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        worker: str = "",
        every: int = 0,
        spans: Spans | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._spans = spans
        self._every = every
        self._clock = clock
        self._num_claimed = 0
        self._num_works = 0
        self._open: dict[str, _Open] = {}

    def begin(self, claimed: Claimed) -> None:
        """A job was claimed: trace it, if it is to be traced."""
        self._num_claimed += 1
        is_drawn = self._every > 0 and self._num_claimed % self._every == 0
        is_kept = is_drawn or claimed.text("qsvc_trace") == "1"
        context = None if self._spans is None else self._spans.context_in(claimed)
        if not is_kept and (self._spans is None or not self._spans.is_sampled(context)):
            return
        while len(self._open) >= _MOST_OPEN:
            self._open.pop(next(iter(self._open)), None)
        waited = claimed.waited_seconds or 0.0
        one = _Open(claimed, is_kept, context, waited, claimed.claimed_at)
        one.events.append((Phase.QUEUE_WAIT, one.at - waited, one.at, {}))
        self._open[claimed.execution_id] = one

    def until_now(self, execution_id: str, phase: Phase) -> None:
        """A job has been in a phase since all that was told of it before."""
        one = self._open.get(execution_id)
        if one is not None:
            moment = self._clock()
            one.events.append((phase, one.at, moment, {}))
            one.at = moment

    def mark(self, execution_id: str, phase: Phase, **attributes: int | float | str) -> None:
        """Something happened to a job."""
        one = self._open.get(execution_id)
        if one is not None:
            moment = self._clock()
            one.events.append((phase, moment, moment, attributes))

    def span(self, execution_id: str, phase: Phase, began: float) -> None:
        """Something went on since a time, beside other phases of a job."""
        one = self._open.get(execution_id)
        if one is not None:
            one.events.append((phase, began, self._clock(), {}))

    def note_step(self, work: StepWork) -> None:
        """A step of the engine served rows."""
        if not self._open:
            return
        self._num_works += 1
        ended = self._clock()
        together = {
            "work": self._num_works,
            "prompt_tokens": sum(tokens for _, tokens in work.chunks),
            "rows": len(work.decoded),
        }
        for row_id, tokens in work.chunks:
            one = self._served(row_id, work.began, ended)
            if one is not None:
                attributes = {**together, "tokens": tokens}
                one.events.append((Phase.PREFILL_CHUNK, work.began, ended, dict(attributes)))
        for row_id in work.decoded:
            one = self._served(row_id, work.began, ended)
            if one is None:
                continue
            one.num_steps += 1
            if one.num_steps <= _SINGLE_STEPS:
                one.events.append((Phase.DECODE_STEP, work.began, ended, dict(together)))
            else:
                first, _, count = one.run or (work.began, ended, 0)
                one.run = (first, ended, count + 1)

    def finish(
        self, execution_id: str, outcome: Outcome, *, is_retried: bool = False
    ) -> Trace | None:
        """A job's end was accepted: return the trace to keep, once; None where there is none."""
        self.until_now(execution_id, Phase.RESULT_WRITE)
        one = self._open.pop(execution_id, None)
        if one is None:
            return None
        events = list(one.events)
        if one.run is not None:
            first, last, count = one.run
            events.append((Phase.DECODE_STEPS, first, last, {"steps": count}))
        origin = one.claimed.claimed_at - one.waited
        trace = Trace(
            job_id=one.claimed.job_id,
            execution_id=execution_id,
            worker=self._worker,
            attempt=one.claimed.attempt,
            started_at_ms=1e3 * origin,
            began_at=one.claimed.started_at - one.waited,
            outcome="retried" if is_retried else outcome.ending.value,
            total_ms=1e3 * (one.at - origin),
            events=tuple(
                Event(phase, 1e3 * (began - origin), 1e3 * max(0.0, ended - began), attributes)
                for phase, began, ended, attributes in sorted(events, key=lambda event: event[1])
            ),
        )
        if self._spans is not None:
            self._spans.export(one.claimed, trace, one.context, outcome)
        return trace if one.is_kept else None

    def close(self) -> None:
        """Send what a collector has not got yet."""
        if self._spans is not None:
            self._spans.close()

    def _served(self, row_id: str, began: float, ended: float) -> _Open | None:
        one = self._open.get(row_id.rpartition("/")[0])
        if one is None:
            return None
        if not one.has_worked:
            one.has_worked = True
            one.events.append((Phase.ENGINE_ADMISSION_WAIT, one.at, max(one.at, began), {}))
        one.at = ended
        return one
