"""The engine thread: rows that join, leave, stop, are cancelled, and an engine that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from queue_service.progress import Progress
from queue_service.responses import FinishReason
from tests.fakes import EOS, FakeEngine, fake_parts
from tests.harness import LONG_TEXT, eventually, make_claimed, make_request
from workers.answer import text_of
from workers.answer_forms import PLAIN_TEXT, AnswerForm, Piece
from workers.engine import Begun, Event, TokenLogprobs
from workers.errors import TransientError
from workers.generation import NO_TOKEN, EngineParts, GenerationThread
from workers.requests import Generated, PreparedRequest, RunTimes
from workers.text import TextPipeline


class RecordingSink:
    """Keeps what the thread produced, by execution."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.texts: dict[str, str] = {}
        self.token_ids: dict[str, list[int]] = {}
        self.ended: dict[str, Generated] = {}
        self.failed: dict[str, Exception] = {}
        self.dropped: list[str] = []
        self.resumed: dict[tuple[str, int], tuple[list[int], str]] = {}
        self.cached: dict[str, int] = {}

    def begin(self, request: PreparedRequest) -> None:
        self.begun.append(request.execution_id)
        self.texts[request.execution_id] = ""
        self.token_ids[request.execution_id] = []

    def resume(
        self, execution_id: str, choice: int, token_ids: Sequence[int], pieces: Sequence[Piece]
    ) -> None:
        self.resumed[execution_id, choice] = (list(token_ids), text_of(pieces))

    def note_cached(self, execution_id: str, num_tokens: int) -> None:
        self.cached[execution_id] = num_tokens

    def advance(
        self,
        execution_id: str,
        choice: int,
        token_id: int,
        pieces: Sequence[Piece],
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        name = execution_id if choice == 0 else f"{execution_id}/{choice}"
        self.texts[name] = self.texts.get(name, "") + text_of(pieces)
        if token_id != NO_TOKEN:
            self.token_ids.setdefault(name, []).append(token_id)

    def end(self, generated: Generated) -> None:
        self.ended[generated.request.execution_id] = generated

    def fail(self, execution_id: str, error: Exception) -> None:
        self.failed[execution_id] = error

    def drop(self, execution_id: str) -> None:
        self.dropped.append(execution_id)


class Bench:
    """A generation thread with the fake engine, a millisecond a step."""

    def __init__(self, max_rows: int) -> None:
        self.sink = RecordingSink()
        self.failures: list[BaseException] = []
        self.engine = FakeEngine(max_rows=max_rows, step_seconds=0.001)
        self.thread = GenerationThread(
            self._make_parts, self.sink, on_failure=self.failures.append, max_rows=max_rows
        )
        self.thread.start()

    def submit(self, name: str, text: str, **options: int | tuple[str, ...]) -> None:
        claimed = make_claimed(job_id=name, execution_id=name)
        self.thread.submit([make_request(text, claimed=claimed, **options)])  # type: ignore[arg-type]

    def submit_resumed(
        self,
        name: str,
        text: str,
        tokens: Mapping[int, Sequence[int]],
        form: AnswerForm = PLAIN_TEXT,
        **options: Any,
    ) -> None:
        """Submit a request of which an earlier execution has generated some tokens."""
        request = make_request(text, claimed=make_claimed(execution_id=name), **options)
        header = request.progress_header(cached_tokens=9)
        generated = {choice: tuple(ids) for choice, ids in tokens.items()}
        request = replace(request, form=form).resume(Progress(header, generated, {}))
        assert request.resumed is not None
        self.thread.submit([request])

    def wait_for_tokens(self, name: str) -> None:
        eventually(lambda: self.sink.token_ids.get(name), f"tokens of {name}")

    def wait_for_end(self, name: str) -> Generated:
        generated = eventually(lambda: self.sink.ended.get(name), f"the end of {name}")
        assert generated is not None
        return generated

    def _make_parts(self) -> EngineParts:
        return fake_parts(self.engine)


@pytest.fixture
def make_bench() -> Iterator[Callable[[int], Bench]]:
    benches: list[Bench] = []

    def make(max_rows: int) -> Bench:
        benches.append(Bench(max_rows))
        return benches[-1]

    yield make
    for bench in benches:
        bench.thread.stop()


@pytest.fixture
def bench(make_bench: Callable[[int], Bench]) -> Bench:
    return make_bench(8)


def test_a_row_is_its_tokens_and_its_text(bench: Bench) -> None:
    bench.submit("a", "grüße")
    generated = bench.wait_for_end("a")
    assert (generated.choices[0].text, generated.choices[0].finish_reason) == (
        "grüße",
        FinishReason.STOP,
    )
    assert generated.choices[0].completion_tokens == len("grüße".encode())
    assert bench.sink.token_ids["a"] == [*"grüße".encode(), EOS]
    assert bench.sink.texts["a"] == "grüße"


def test_a_row_joins_a_running_batch_and_leaves_it(bench: Bench) -> None:
    bench.submit("long", LONG_TEXT)
    bench.wait_for_tokens("long")
    bench.submit("short", "bee")
    bench.wait_for_end("short")
    eventually(lambda: bench.engine.batch_sizes[-1] == 1, "the long row alone again")
    assert [size for size, _ in groupby(bench.engine.batch_sizes)] == [1, 2, 1]
    assert "long" not in bench.sink.ended


def test_rows_beyond_the_limit_wait_for_their_turn(make_bench: Callable[[int], Bench]) -> None:
    bench = make_bench(2)
    names = [f"row-{i}" for i in range(5)]
    for name in names:
        bench.submit(name, "some text")
    for name in names:
        assert bench.wait_for_end(name).choices[0].text == "some text"
    assert bench.sink.begun == names
    assert max(bench.engine.batch_sizes) == 2
    assert bench.thread.num_rows == 0


def test_a_request_of_higher_priority_goes_before_those_that_wait(
    make_bench: Callable[[int], Bench],
) -> None:
    bench = make_bench(1)
    bench.submit("running", LONG_TEXT)
    bench.wait_for_tokens("running")
    bench.submit("first", "a")
    bench.submit("urgent", "b", priority=5)
    bench.submit("second", "c")
    bench.thread.cancel(["running"])
    bench.wait_for_end("second")
    assert bench.sink.begun == ["running", "urgent", "first", "second"]


def test_choices_of_a_request_end_together(bench: Bench) -> None:
    bench.submit("a", "abc", num_choices=3)
    generated = bench.wait_for_end("a")
    assert [choice.text for choice in generated.choices] == ["abc"] * 3
    assert bench.sink.token_ids["a/2"] == [*b"abc", EOS]
    assert bench.thread.num_rows == 0


def test_a_failed_choice_fails_its_request_and_frees_the_others(bench: Bench) -> None:
    bench.submit("neighbour", "n" * 50)
    bench.submit("lost", "lost", num_choices=2)
    assert bench.wait_for_end("neighbour").choices[0].text == "n" * 50
    assert "lost" in bench.sink.failed
    assert not bench.engine.has_work


def test_a_stop_string_ends_a_row_and_frees_it(make_bench: Callable[[int], Bench]) -> None:
    bench = make_bench(1)
    bench.submit("a", f"hello STOP {LONG_TEXT}", stop_strings=("STOP",))
    bench.submit("b", "next")
    generated = bench.wait_for_end("a")
    assert (generated.choices[0].text, generated.choices[0].finish_reason) == (
        "hello ",
        FinishReason.STOP,
    )
    assert generated.choices[0].completion_tokens == len("hello STOP")
    assert bench.sink.texts["a"] == "hello "
    assert bench.wait_for_end("b").choices[0].text == "next"
    assert set(bench.engine.batch_sizes) == {1}


def test_text_held_back_for_a_stop_string_comes_with_the_end(bench: Bench) -> None:
    bench.submit("a", "abcST", stop_strings=("STOP",))
    assert bench.wait_for_end("a").choices[0].text == "abcST"
    assert bench.sink.texts["a"] == "abcST"


def test_the_token_limit_ends_a_row(bench: Bench) -> None:
    bench.submit("a", "abcdef", token_limit=3)
    generated = bench.wait_for_end("a")
    assert (generated.choices[0].text, generated.choices[0].finish_reason) == (
        "abc",
        FinishReason.LENGTH,
    )
    assert generated.choices[0].completion_tokens == 3


def test_a_cancelled_running_row_is_dropped_and_its_neighbour_goes_on(bench: Bench) -> None:
    bench.submit("cancelled", LONG_TEXT)
    bench.submit("neighbour", "n" * 200)
    bench.wait_for_tokens("cancelled")
    bench.thread.cancel(["cancelled", "unknown"])
    eventually(lambda: "cancelled" in bench.sink.dropped, "the drop")
    num_tokens = len(bench.sink.token_ids["cancelled"])
    assert bench.wait_for_end("neighbour").choices[0].text == "n" * 200
    assert len(bench.sink.token_ids["cancelled"]) == num_tokens
    assert "cancelled" not in bench.sink.ended
    assert not bench.engine.has_work


def test_a_cancelled_waiting_row_never_begins(make_bench: Callable[[int], Bench]) -> None:
    bench = make_bench(1)
    bench.submit("running", LONG_TEXT)
    bench.submit("cancelled", "c")
    bench.submit("after", "a")
    bench.wait_for_tokens("running")
    bench.thread.cancel(["cancelled"])
    eventually(lambda: bench.sink.dropped == ["cancelled"], "the drop")
    bench.thread.cancel(["running"])
    bench.wait_for_end("after")
    assert bench.sink.begun == ["running", "after"]


def test_the_engines_failure_is_reported_and_ends_the_thread(bench: Bench) -> None:
    bench.submit("neighbour", LONG_TEXT)
    bench.submit("poison", "fault")
    eventually(lambda: bench.failures, "the report of the failure")
    [failure] = bench.failures
    assert isinstance(failure, RuntimeError)
    assert bench.sink.ended == {}


def test_a_row_that_fails_in_the_engine_is_reported_and_its_neighbour_goes_on(bench: Bench) -> None:
    bench.submit("neighbour", "n" * 50)
    bench.submit("lost", "lost")
    assert bench.wait_for_end("neighbour").choices[0].text == "n" * 50
    assert isinstance(bench.sink.failed["lost"], TransientError)
    assert "lost" not in bench.sink.ended
    assert bench.thread.num_rows == 0
    assert bench.failures == []


def test_a_row_whose_text_cannot_be_made_fails_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def push(pipeline: TextPipeline, token_id: int) -> str:
        if token_id == ord("!"):
            raise ValueError("no such piece")
        return original(pipeline, token_id)

    original = TextPipeline.push
    monkeypatch.setattr(TextPipeline, "push", push)
    bench.submit("neighbour", "n" * 50)
    bench.submit("broken", "ab!c")
    assert bench.wait_for_end("neighbour").choices[0].text == "n" * 50
    assert str(bench.sink.failed["broken"]) == "no such piece"
    assert not bench.engine.has_work
    assert bench.failures == []


def test_a_model_that_cannot_be_loaded_is_reported() -> None:
    failures: list[BaseException] = []

    def fail() -> EngineParts:
        raise MemoryError("too large")

    thread = GenerationThread(fail, RecordingSink(), on_failure=failures.append, max_rows=1)
    thread.start()
    eventually(lambda: failures, "the report of the failure")
    assert isinstance(failures[0], MemoryError)
    thread.stop()


def test_the_thread_counts_steps_and_rests_when_there_is_nothing_to_do(bench: Bench) -> None:
    bench.submit("a", "abc")
    bench.wait_for_end("a")
    eventually(lambda: bench.thread.steps == 4, "three tokens and the end of the sequence")
    bench.submit("b", "d")
    bench.wait_for_end("b")
    eventually(lambda: bench.thread.steps == 6, "one token and the end of the sequence")


# Going on with what an earlier execution generated ------------------------------------------


class Stubborn:
    """A constraint that refuses whatever an earlier execution made of it."""

    def matcher(self) -> Stubborn:
        return self

    def check(self, text: str) -> str | None:
        return None

    def fill(self, mask_row: Any) -> None: ...

    def accept(self, token_id: int) -> None:
        raise ValueError("not allowed")


class Letters(Stubborn):
    """A constraint that knows no end token."""

    def accept(self, token_id: int) -> None:
        if token_id == EOS:
            raise ValueError("not allowed")


def test_a_request_goes_on_after_its_tokens_and_nothing_is_told_twice(bench: Bench) -> None:
    bench.submit_resumed("a", "grüße", {0: b"gr"})
    generated = bench.wait_for_end("a")
    assert generated.choices[0].text == "grüße"
    assert generated.choices[0].completion_tokens == len("grüße".encode())
    assert generated.cached_tokens == 9
    assert bench.sink.resumed == {("a", 0): (list(b"gr"), "gr")}
    assert bench.sink.texts["a"] == "üße"
    assert bench.sink.token_ids["a"] == [*"üße".encode(), EOS]


def test_each_choice_goes_on_by_itself(bench: Bench) -> None:
    bench.submit_resumed("a", "abcd", {1: b"abc"}, num_choices=2)
    generated = bench.wait_for_end("a")
    assert [choice.text for choice in generated.choices] == ["abcd", "abcd"]
    assert (bench.sink.texts["a"], bench.sink.texts["a/1"]) == ("abcd", "d")


def test_a_choice_that_had_ended_stays_ended_and_tells_nothing_more(bench: Bench) -> None:
    lost = {0: [*b"abST", EOS], 1: b"ab"}
    bench.submit_resumed("a", "abST", lost, num_choices=2, stop_strings=("STOP",))
    generated = bench.wait_for_end("a")
    assert [choice.text for choice in generated.choices] == ["abST", "abST"]
    assert [choice.completion_tokens for choice in generated.choices] == [4, 4]
    assert bench.sink.resumed["a", 0] == ([*b"abST", EOS], "abST")
    assert bench.sink.token_ids["a"] == []
    assert bench.sink.texts["a/1"] == "ST"
    assert set(bench.engine.batch_sizes) == {1}


def test_a_constraint_does_not_see_the_token_that_ended_a_choice(bench: Bench) -> None:
    lost = {0: [*b"ab", EOS]}
    bench.submit_resumed("a", "ab", lost, form=AnswerForm(compiled=Letters()))
    assert bench.wait_for_end("a").choices[0].text == "ab"
    assert bench.sink.token_ids["a"] == []


def test_a_stop_string_is_found_across_the_border(bench: Bench) -> None:
    bench.submit_resumed("a", "one stop two", {0: b"one st"}, stop_strings=("stop",))
    assert bench.wait_for_end("a").choices[0].text == "one "


def test_a_request_lost_after_its_last_token_just_ends(bench: Bench) -> None:
    bench.submit_resumed("a", "abcdef", {0: b"abc"}, token_limit=3)
    generated = bench.wait_for_end("a")
    assert (generated.choices[0].text, generated.choices[0].finish_reason) == (
        "abc",
        FinishReason.LENGTH,
    )
    assert bench.engine.batch_sizes == []


def test_tokens_that_no_longer_fit_the_request_are_generated_again(bench: Bench) -> None:
    bench.submit_resumed("a", "abc", {0: b"ab"}, form=AnswerForm(compiled=Stubborn()))
    generated = bench.wait_for_end("a")
    assert generated.choices[0].text == "abc"
    assert bench.sink.texts["a"] == "abc"


class CrowdedEngine(FakeEngine):
    """Has no place for a row in its first two steps."""

    num_steps = 0

    def step(self) -> list[Event]:
        self.num_steps += 1
        if self.num_steps <= 2:
            return []
        took_place: list[Event] = []
        if self.num_steps == 3:
            took_place = [Begun(row_id, 0) for row_id in self.rows]
        return [*took_place, *super().step()]


def test_times_tell_the_wait_for_a_place_from_the_work_on_the_prompt() -> None:
    engine, sink = CrowdedEngine(), RecordingSink()
    thread = GenerationThread(
        lambda: fake_parts(engine),
        sink,
        on_failure=lambda _: None,
        max_rows=8,
        clock=lambda: float(engine.num_steps),
    )
    thread.start()
    thread.submit([make_request("ab", claimed=make_claimed(execution_id="e"))])
    generated = eventually(lambda: sink.ended.get("e"), "the end")
    thread.stop()
    assert generated is not None
    # Its place, and its first token with it, came in the third step; "b" and the end took two.
    assert generated.times == RunTimes(began=0, admitted=2, first_token=3, ended=5)
