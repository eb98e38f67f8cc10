"""What readers of a stream see, whatever happens to the workers that write it and to themselves.

The entries are those of real publishers, whose executions end at random moments and are followed by
others: ones that go on, ones that begin anew, ones that are only watched.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from queue_service.progress import Progress, join_elements
from queue_service.requests import Endpoint
from queue_service.responses import (
    Choice,
    FinishReason,
    ToolCall,
    Usage,
    completion_body,
    tool_call_text,
)
from queue_service.streams import Restarted, Text, TextKind, Transcript
from tests.harness import make_claimed, make_request
from tests.unit.test_publisher import FakeClock, RecordingBroker
from workers.answer_forms import Piece
from workers.publisher import Publisher
from workers.requests import Generated, PreparedRequest

JOB = "job"
KINDS = tuple(TextKind)
Entry = tuple[bytes, dict[bytes, bytes]]
Shown = Mapping[int, Mapping[TextKind, str]]
# Drawn by a seed: a source that hypothesis draws from number by number is twenty times as slow.
RANDOMS = st.integers(0, 2**32).map(Random)


@dataclass(frozen=True)
class Answer:
    """What a model says: for each choice the pieces that become certain with each token."""

    choices: Sequence[Sequence[Sequence[Piece]]]

    @classmethod
    def draw(cls, random: Random, num_choices: int) -> Answer:
        return cls([cls._draw_choice(random) for _ in range(num_choices)])

    @staticmethod
    def _draw_choice(random: Random) -> list[list[Piece]]:
        num_calls = itertools.count()

        def piece() -> Piece:
            kind, text = random.choice(KINDS), "".join(random.choices("abé😀", k=2))
            if kind is TextKind.TOOL:
                text = tool_call_text(next(num_calls), ToolCall("id", "f", text).to_body())
            return Piece(text, kind)

        # Many tokens have no text of their own: it is held back until a later one.
        counts = [random.choice((0, 0, 1, 1, 2)) for _ in range(random.randint(1, 9))]
        return [[piece() for _ in range(count)] for count in counts]

    def text(self, choice: int, kind: TextKind) -> str:
        tokens = self.choices[choice]
        return "".join(p.text for token in tokens for p in token if p.kind is kind)

    @property
    def texts(self) -> Shown:
        return {
            choice: {kind: text for kind in KINDS if (text := self.text(choice, kind))}
            for choice in range(len(self.choices))
        }


@dataclass
class History:
    """The executions of one job, and its stream.

    Attributes:
        answers: what each attempt says; they differ where the model did.
    """

    random: Random
    num_choices: int
    entries: list[Entry] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)
    broker: RecordingBroker = field(default_factory=RecordingBroker)

    def run(self, *, streams: bool, may_differ: bool = False) -> None:
        """Let several executions follow each other; the last one ends."""
        answer = Answer.draw(self.random, self.num_choices)
        progress: Progress | None = None
        num_attempts = self.random.randint(1, 4)
        for attempt in range(1, num_attempts + 1):
            goes_on = self.random.random() < 0.6
            if not goes_on and may_differ:
                answer = Answer.draw(self.random, self.num_choices)
            self.answers[attempt] = answer
            last = progress if goes_on else None
            progress = self._execute(
                attempt, answer, last, streams=streams, ends=attempt == num_attempts
            )

    def _execute(
        self, attempt: int, answer: Answer, last: Progress | None, *, streams: bool, ends: bool
    ) -> Progress | None:
        """Run one execution, perhaps to the end; return what is left of it."""
        name = f"execution {attempt}"
        claimed = make_claimed(execution_id=name, qsvc_attempt=attempt)
        request = make_request(claimed=claimed, num_choices=self.num_choices, stream=streams)
        request = request.resume(last)
        clock = FakeClock()
        publisher = Publisher(
            self.broker,
            deliver=lambda _: None,
            on_failure=lambda _: None,
            lost=lambda _: None,
            stream_interval_seconds=0.1,
            progress_interval_seconds=1,
            clock=clock,
        )
        if last is not None:
            self.broker.progress[name] = list(self.broker.progress[f"execution {attempt - 1}"])
        at = self._begin(publisher, request, answer)
        steps = sum(map(len, answer.choices)) - sum(at)
        for _ in range(steps if ends else self.random.randint(0, steps)):
            self._disturb(publisher, clock, name)
            choice = self.random.choice(
                [c for c, tokens in enumerate(answer.choices) if at[c] < len(tokens)]
            )
            publisher.advance(name, choice, at[choice], answer.choices[choice][at[choice]])
            at[choice] += 1
        if all(at[c] == len(tokens) for c, tokens in enumerate(answer.choices)):
            publisher.end(Generated(request, []))
        if ends or self.random.random() < 0.5:
            publisher.flush()
        for fields in self.broker.entries.pop(name, []):
            raw = {key.encode(): str(value).encode() for key, value in fields.items()}
            self.entries.append((f"1700-{len(self.entries)}".encode(), raw))
        joined = join_elements(self.broker.progress.get(name, []))
        return Progress.decode(joined, num_top_logprobs=None)

    def _begin(self, publisher: Publisher, request: PreparedRequest, answer: Answer) -> list[int]:
        publisher.begin(request)
        at = []
        for choice, tokens in enumerate(answer.choices):
            ids = request.generated(choice)
            if ids:
                said = list(itertools.chain.from_iterable(tokens[: len(ids)]))
                publisher.resume(request.execution_id, choice, ids, said)
            at.append(len(ids))
        return at

    def _disturb(self, publisher: Publisher, clock: FakeClock, name: str) -> None:
        if self.random.random() < 0.3:
            clock.seconds += self.random.choice((0.0, 1.0))
            publisher.flush()
        if self.random.random() < 0.1:
            publisher.watch([name])  # changes nothing where the text is streamed anyway

    @property
    def final(self) -> Answer:
        return self.answers[max(self.answers)]


def body_of(answer: Answer) -> dict[str, Any]:
    """Return an answer as its result has it."""
    choices = []
    for c, tokens in enumerate(answer.choices):
        pieces = itertools.chain.from_iterable(tokens)
        calls = [json.loads(p.text)["function"] for p in pieces if p.kind is TextKind.TOOL]
        choices.append(
            Choice(
                answer.text(c, TextKind.TEXT),
                FinishReason.STOP,
                len(tokens),
                reasoning=answer.text(c, TextKind.REASONING),
                tool_calls=tuple(ToolCall("id", "f", call["arguments"]) for call in calls),
            )
        )
    return completion_body(
        Endpoint.CHAT,
        job_id=JOB,
        model="m",
        created=0,
        choices=choices,
        usage=Usage(1, 1),
        fingerprint="",
    )


class Screen:
    """An application that shows what it reads; it may be left and opened again at any event."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.shown: defaultdict[int, defaultdict[TextKind, str]] = defaultdict(_no_text)
        self.restarts: list[tuple[int, dict[TextKind, str]]] = []

    def read(self) -> None:
        """Read to the end, with as many readers as it takes."""
        cursor, num_readings = None, 0
        while True:
            transcript = Transcript(JOB, cursor)
            random = self._history.random
            num_events = random.randint(0, 20) if num_readings < 10 else None
            for event in itertools.islice(self._events(transcript), num_events):
                self._show(event)
            if num_events is None:
                return
            cursor = transcript.cursor
            num_readings += 1

    def _events(self, transcript: Transcript) -> Iterator[Text | Restarted]:
        entries, at = self._history.entries, 0
        while at < len(entries):
            yield from transcript.feed(*entries[at])
            assert transcript.last_id == entries[at][0].decode()
            if self._history.random.random() < 0.1:
                # A reply that was lost is asked for again: some of it is delivered twice.
                for entry in entries[max(0, at - 3) : at + 1]:
                    assert list(transcript.feed(*entry)) == []
            at += 1
        yield from transcript.settle(body_of(self._history.final))
        assert list(transcript.settle(body_of(self._history.final))) == []

    def _show(self, event: Text | Restarted) -> None:
        if isinstance(event, Restarted):
            self.restarts.append((event.choice, dict(self.shown.pop(event.choice))))
            return
        assert event.text
        if self.restarts and self.restarts[-1][0] == event.choice:
            self._check_restart(event)
        self.shown[event.choice][event.kind] += event.text

    def _check_restart(self, event: Text) -> None:
        """What is told now does not go on from what was shown."""
        if event.choice in self.shown:
            return
        choice, before = self.restarts[-1]
        answer = self._history.final
        if event.attempt is not None:
            answer = self._history.answers[event.attempt]
        assert not all(answer.text(choice, kind).startswith(t) for kind, t in before.items())


def _no_text() -> defaultdict[TextKind, str]:
    return defaultdict(str)


def read_plainly(entries: Sequence[Entry]) -> Shown:
    """Read a stream by the rule of the documents alone."""
    parts: dict[int, list[tuple[int, str, str]]] = defaultdict(list)
    attempts: dict[int, int] = defaultdict(int)
    for _, fields in entries:
        choice, first, attempt = int(fields.get(b"c", 0)), int(fields[b"i"]), int(fields[b"a"])
        if attempt > attempts[choice]:
            attempts[choice] = attempt
            parts[choice] = [part for part in parts[choice] if part[0] < first]
        parts[choice].append((first, fields.get(b"k", b"text").decode(), fields[b"t"].decode()))
    return {
        choice: {
            kind: text
            for kind in KINDS
            if (text := "".join(text for _, name, text in told if name == kind))
        }
        for choice, told in parts.items()
    }


def without_empty(shown: Shown) -> dict[int, dict[TextKind, str]]:
    return {choice: dict(texts) for choice, texts in shown.items() if texts}


@settings(max_examples=300, deadline=None)
@given(RANDOMS, st.integers(1, 3), st.booleans())
def test_each_text_is_shown_once_and_in_order_however_often_it_is_told(
    random: Random, num_choices: int, streams: bool
) -> None:
    history = History(random, num_choices)
    history.run(streams=streams)
    screen = Screen(history)
    screen.read()
    assert without_empty(screen.shown) == without_empty(history.final.texts)
    assert screen.restarts == []


@settings(max_examples=300, deadline=None)
@given(RANDOMS, st.integers(1, 3), st.booleans())
def test_what_is_shown_at_the_end_is_the_result_and_nothing_is_taken_back_that_is_part_of_it(
    random: Random, num_choices: int, streams: bool
) -> None:
    history = History(random, num_choices)
    history.run(streams=streams, may_differ=True)
    screen = Screen(history)
    screen.read()
    assert without_empty(screen.shown) == without_empty(history.final.texts)


@settings(max_examples=300, deadline=None)
@given(RANDOMS, st.integers(1, 3))
def test_the_rule_of_the_documents_gives_the_text_of_a_stream_that_was_asked_for(
    random: Random, num_choices: int
) -> None:
    history = History(random, num_choices)
    history.run(streams=True)
    assert without_empty(read_plainly(history.entries)) == without_empty(history.final.texts)
