"""Traces: what they say, how they are written, and that nothing is kept of anybody else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.trace_command import waterfall
from queue_service.broker import Ending, Outcome
from queue_service.trace import Event, Phase, Trace, chrome_trace
from tests.harness import make_claimed
from workers.engine import StepWork
from workers.tracing import Tracer

FINISHED, FAILED, STOPPED = (
    Outcome(ending, b"", None, keep_seconds=60, ended_at=0.0) for ending in Ending
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def begin(tracer: Tracer, clock: Clock, execution_id: str = "e", **fields: str) -> None:
    claimed = make_claimed("j", execution_id, enqueued_at="1970-01-01T00:00:05Z", **fields)
    tracer.begin(replace(claimed, started_at=7.0, claimed_at=clock.now))


def phases(trace: Trace) -> list[tuple[str, float, float]]:
    return [(e.phase, round(e.start_ms, 6), round(e.duration_ms, 6)) for e in trace.events]


def test_phases_follow_one_another_without_gaps(clock: Clock) -> None:
    tracer = Tracer("w", clock=clock)
    begin(tracer, clock, qsvc_trace="1", qsvc_attempt="2")
    for phase, seconds in (
        (Phase.REQUEST_WAIT, 0.1),
        (Phase.REQUEST_PREPARE, 0.2),
        (Phase.ENGINE_REQUEST_WAIT, 0.3),
    ):
        clock.wait(seconds)
        tracer.until_now("e", phase)
    clock.wait(0.4)
    began = clock.now
    clock.wait(1.0)
    tracer.mark("e", Phase.CACHE_RESTORE, tokens=12)
    tracer.note_step(StepWork(began, [("e/0", 30), ("other/0", 3)], ["third/0"]))
    tracer.mark("e", Phase.FIRST_TOKEN)
    clock.wait(0.5)
    trace = tracer.finish("e", FINISHED)
    assert trace is not None
    assert phases(trace) == [
        ("queue.wait", 0, 2000),
        ("request.wait", 2000, 100),
        ("request.prepare", 2100, 200),
        ("engine.request_wait", 2300, 300),
        ("engine.admission_wait", 2600, 400),
        ("prefill.chunk", 3000, 1000),
        ("cache.restore", 4000, 0),
        ("token_zero", 4000, 0),
        ("result.write", 4000, 500),
    ]
    chunk = trace.events[5]
    assert chunk.attributes == {"work": 1, "prompt_tokens": 33, "rows": 1, "tokens": 30}
    assert (trace.job_id, trace.worker, trace.attempt, trace.outcome) == ("j", "w", 2, "finished")
    assert (trace.total_ms, trace.began_at) == (pytest.approx(4500), 5.0)


def test_shared_steps_have_one_work_for_all_and_later_ones_are_told_as_one(clock: Clock) -> None:
    tracer = Tracer("w", every=1, clock=clock)
    for name in ("a", "b"):
        begin(tracer, clock, name)
    for _ in range(20):
        began = clock.now
        clock.wait(0.25)
        tracer.note_step(StepWork(began, [], ["a/0", "b/0"]))
    first, second = tracer.finish("a", FINISHED), tracer.finish("b", FAILED)
    assert first is not None
    assert second is not None
    works = [e.attributes["work"] for e in first.events if e.phase == Phase.DECODE_STEP]
    assert works == list(range(1, 9))
    assert works == [e.attributes["work"] for e in second.events if e.phase == Phase.DECODE_STEP]
    [rest] = [e for e in first.events if e.phase == Phase.DECODE_STEPS]
    assert (rest.attributes["steps"], rest.duration_ms) == (12, pytest.approx(3000))
    # What each unique work took is no more than the time that went by.
    assert sum(e.duration_ms for e in first.events if e.phase == Phase.DECODE_STEP) <= 5000


def test_only_jobs_that_ask_or_are_drawn_are_kept_and_each_ends_once(clock: Clock) -> None:
    tracer = Tracer("w", clock=clock)
    begin(tracer, clock)
    tracer.until_now("e", Phase.REQUEST_WAIT)
    tracer.mark("e", Phase.FIRST_TOKEN)
    tracer.span("e", Phase.STREAM_FIRST_WRITE, clock.now)
    tracer.note_step(StepWork(clock.now, [("e/0", 1)], ["e/0"]))
    assert tracer.finish("e", FINISHED) is None
    begin(tracer, clock, qsvc_trace="1")
    assert tracer.finish("e", STOPPED) is not None
    tracer.mark("e", Phase.FIRST_TOKEN)
    assert tracer.finish("e", FINISHED) is None
    sampled = Tracer("w", every=3, clock=clock)
    for number in range(9):
        begin(sampled, clock, str(number))
    kept = [number for number in range(9) if sampled.finish(str(number), FINISHED) is not None]
    assert kept == [2, 5, 8]


def test_traces_that_never_end_do_not_pile_up(clock: Clock) -> None:
    tracer = Tracer("w", every=1, clock=clock)
    for number in range(3000):
        begin(tracer, clock, str(number))
    ended = sum(tracer.finish(str(number), FINISHED) is not None for number in range(3000))
    assert ended == 1024


NUMBERS = st.floats(0, 1e9, allow_nan=False)
EVENTS = st.builds(
    Event,
    st.sampled_from([phase.value for phase in Phase]),
    NUMBERS,
    NUMBERS,
    st.dictionaries(st.text(max_size=5), st.integers(0, 9) | st.text(max_size=3), max_size=2),
)
TRACES = st.builds(
    Trace,
    job_id=st.text(max_size=9),
    execution_id=st.text(max_size=3),
    worker=st.sampled_from(["a", "b"]),
    attempt=st.integers(1, 9),
    started_at_ms=NUMBERS,
    began_at=NUMBERS,
    outcome=st.sampled_from(["finished", "failed"]),
    total_ms=NUMBERS,
    events=st.lists(EVENTS, max_size=5).map(tuple),
)


@given(TRACES, st.integers(1, 300))
def test_any_trace_survives_json_and_is_drawn(trace: Trace, width: int) -> None:
    read = Trace.from_json(trace.to_json())
    assert (read.job_id, read.outcome, len(read.events)) == (
        trace.job_id, trace.outcome, len(trace.events),
    )  # fmt: skip
    assert Trace.from_json(read.to_json()) == read
    assert len(waterfall(trace, width)) == 1 + len(trace.events)


@given(st.lists(TRACES, max_size=3))
def test_a_viewer_gets_every_event_in_its_place(traces: list[Trace]) -> None:
    made = json.loads(json.dumps(chrome_trace(traces)))["traceEvents"]
    shown = [event for event in made if event["ph"] in "Xi"]
    assert len(shown) == sum(len(trace.events) for trace in traces)
    assert {event["tid"] for event in shown} <= set(range(1, len(traces) + 1))
    assert sum(event["name"] == "process_name" for event in made) == len(
        {trace.worker for trace in traces}
    )


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"version": 2}', '{"version": 1, "events": [5]}', b"\xff"]
)
def test_what_is_no_trace_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"trace|JSON|utf-8"):
        Trace.from_json(text)


def test_a_waterfall_shows_when_and_how_long() -> None:
    events = (
        Event("queue.wait", 0, 50),
        Event("prefill.chunk", 50, 50, {"tokens": 7}),
        Event("token_zero", 100),
    )
    trace = Trace("job", "e", "w", 1, 0, 0, "finished", 100, events)
    head, *lines = waterfall(trace, 60)
    assert head == "job  finished  attempt 1  100.0 ms  worker w"
    bars = [line[line.index("ms", 25) :].count("█") for line in lines]
    assert bars[0] == bars[1] > 5
    assert bars[2] == 0
    assert lines[1].endswith("tokens=7")
