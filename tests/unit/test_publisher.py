"""The publisher: what it gathers, in which order it writes, and what an outage does to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import redis

from queue_service.broker import Broker, Publication
from queue_service.progress import Progress, join_elements
from queue_service.responses import Choice, FinishReason
from tests.harness import eventually, make_claimed, make_request
from workers.answer_forms import Piece, PieceKind
from workers.engine import TokenLogprobs
from workers.errors import TransientError
from workers.publisher import Publisher
from workers.requests import Generated, PreparedRequest, Refused, Result

STREAM_SECONDS = 0.1
PROGRESS_SECONDS = 0.5


class FakeClock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def _never(failure: BaseException) -> None:
    raise AssertionError("the publisher's thread ended") from failure


class RecordingBroker(Broker):
    """Applies publications as the script does: each number once, only for its own executions."""

    def __init__(self) -> None:
        self.entries: dict[str, list[dict[str, str]]] = {}
        self.progress: dict[str, list[bytes]] = {}
        self.sent: list[Publication] = []
        self.lost: set[str] = set()
        self.is_away = False
        self.loses_replies = False
        self._numbers: dict[str, int] = {}

    def publish(self, publications: Sequence[Publication], *, keep_seconds: int) -> list[bool]:
        if self.is_away:
            raise redis.ConnectionError("away")
        kept = [self._apply(publication) for publication in publications]
        if self.loses_replies:
            raise redis.ConnectionError("lost the reply")
        return kept

    def _apply(self, publication: Publication) -> bool:
        self.sent.append(publication)
        execution_id = publication.claimed.execution_id
        if execution_id in self.lost:
            return False
        if publication.number > self._numbers.get(execution_id, 0):
            self._numbers[execution_id] = publication.number
            if publication.is_new:
                self.progress.pop(execution_id, None)
            self.progress.setdefault(execution_id, []).extend(publication.progress)
            for flat in publication.entries:
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                self.entries.setdefault(execution_id, []).append(fields)
        return True

    def text(self, execution_id: str = "execution") -> str:
        return "".join(fields["t"] for fields in self.entries.get(execution_id, []))

    def token_ids(self, execution_id: str = "execution") -> list[int]:
        return list(self.decoded(execution_id).tokens[0])

    def decoded(self, execution_id: str = "execution") -> Progress:
        joined = join_elements(self.progress[execution_id])
        progress = Progress.decode(joined, num_top_logprobs=None)
        assert progress is not None
        return progress


class Desk:
    """A publisher with a clock that stands still, and what it has handed on."""

    def __init__(self) -> None:
        self.broker = RecordingBroker()
        self.clock = FakeClock()
        self.delivered: list[Result] = []
        self.lost: list[str] = []
        self.publisher = Publisher(
            self.broker,
            deliver=self.delivered.append,
            on_failure=_never,
            lost=self.lost.append,
            stream_interval_seconds=STREAM_SECONDS,
            progress_interval_seconds=PROGRESS_SECONDS,
            clock=self.clock,
        )

    def begin(self, execution_id: str = "execution", *, stream: bool = True) -> PreparedRequest:
        claimed = make_claimed(execution_id=execution_id, qsvc_attempt=3)
        request = make_request(claimed=claimed, stream=stream)
        self.publisher.begin(request)
        return request

    def advance(self, words: str, execution_id: str = "execution") -> None:
        for character in words:
            self.publisher.advance(execution_id, 0, ord(character), [Piece(character)])

    def end(self, request: PreparedRequest, text: str, last_text: str = "") -> Generated:
        if last_text:
            self.publisher.advance(request.execution_id, 0, ord("."), [Piece(last_text)])
        generated = Generated(request, [Choice(text, FinishReason.STOP, len(text))])
        self.publisher.end(generated)
        return generated

    def flush_later(self) -> None:
        """Write after the progress interval has passed."""
        self.clock.seconds += PROGRESS_SECONDS
        self.publisher.flush()


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_text_between_two_writes_is_one_entry_with_its_first_token_and_attempt(desk: Desk) -> None:
    desk.begin()
    desk.advance("Hello")
    desk.publisher.flush()
    desk.advance(", world")
    desk.publisher.flush()
    assert desk.broker.entries["execution"] == [
        {"i": "0", "a": "3", "t": "Hello"},
        {"i": "5", "a": "3", "t": ", world"},
    ]


def test_tokens_without_a_text_of_their_own_are_counted_in_the_next_index(desk: Desk) -> None:
    desk.begin()
    desk.publisher.advance("execution", 0, 1, [Piece("a")])
    desk.publisher.flush()
    desk.publisher.advance("execution", 0, 2, [])
    desk.publisher.flush()
    desk.publisher.advance("execution", 0, 3, [Piece("bc")])
    desk.publisher.flush()
    desk.publisher.advance("execution", 0, 4, [Piece("d")])
    desk.publisher.flush()
    indexes = [fields["i"] for fields in desk.broker.entries["execution"]]
    assert indexes == ["0", "1", "3"]


def test_nothing_is_sent_when_nothing_has_gathered(desk: Desk) -> None:
    desk.begin()
    desk.flush_later()
    assert desk.broker.sent == []


def test_token_ids_follow_a_header_that_says_whose_they_are(desk: Desk) -> None:
    request = desk.begin(stream=False)
    desk.advance("ab")
    desk.flush_later()
    desk.advance("c")
    desk.flush_later()
    assert desk.broker.decoded().header == request.progress_header(cached_tokens=0)
    assert desk.broker.decoded().header.seed == 7
    assert desk.broker.token_ids() == [97, 98, 99]
    assert desk.broker.text() == ""


def test_each_choice_has_its_tokens_and_scores(desk: Desk) -> None:
    desk.begin(stream=False)
    scored = TokenLogprobs(-0.5, ((3, -0.25), (4, -2.0)))
    desk.publisher.advance("execution", 1, 5, [], scored)
    desk.publisher.advance("execution", 0, 6, [], scored)
    desk.flush_later()
    joined = join_elements(desk.broker.progress["execution"])
    progress = Progress.decode(joined, num_top_logprobs=2)
    assert progress is not None
    assert progress.tokens == {1: (5,), 0: (6,)}
    assert progress.scores[1] == ((-0.5, ((3, -0.25), (4, -2.0))),)


def test_what_was_cached_is_told_when_it_is_known(desk: Desk) -> None:
    desk.begin(stream=False)
    desk.advance("a")
    desk.flush_later()
    desk.publisher.note_cached("execution", 40)
    desk.advance("b")
    desk.flush_later()
    assert desk.broker.decoded().header.cached_tokens == 40
    assert desk.broker.token_ids() == [97, 98]


def test_a_request_that_goes_on_writes_what_is_new(desk: Desk) -> None:
    first = desk.begin("first")
    desk.advance("ab", "first")
    desk.publisher.flush()
    claimed = make_claimed(execution_id="second", qsvc_attempt=4)
    request = replace(first, claimed=claimed).resume(desk.broker.decoded("first"))
    assert request.resumed is not None
    desk.broker.progress["second"] = desk.broker.progress["first"]  # as a claim does
    desk.publisher.begin(request)
    desk.publisher.resume("second", 0, [97, 98], [Piece("ab")])
    desk.advance("c", "second")
    desk.publisher.flush()
    assert desk.broker.entries["second"] == [{"i": "2", "a": "4", "t": "c"}]
    assert desk.broker.token_ids("second") == [97, 98, 99]


def test_a_choice_begins_at_its_first_token_whatever_others_wrote_meanwhile(desk: Desk) -> None:
    desk.begin()
    desk.publisher.advance("execution", 1, 1, [])  # held back
    desk.advance("a")
    desk.publisher.flush()
    desk.publisher.advance("execution", 1, 2, [Piece("bc")])
    desk.flush_later()
    assert desk.broker.entries["execution"] == [
        {"i": "0", "a": "3", "t": "a"},
        {"i": "0", "a": "3", "c": "1", "t": "bc"},
    ]


def test_a_choice_that_goes_on_without_a_text_yet_begins_at_its_first_token(desk: Desk) -> None:
    first = desk.begin("first")
    desk.publisher.advance("first", 0, 97, [])
    desk.flush_later()
    claimed = make_claimed(execution_id="second", qsvc_attempt=4)
    request = replace(first, claimed=claimed).resume(desk.broker.decoded("first"))
    desk.publisher.begin(request)
    desk.publisher.resume("second", 0, [97], [])
    desk.advance("b", "second")
    desk.publisher.flush()
    assert desk.broker.entries["second"] == [{"i": "0", "a": "4", "t": "b"}]


def test_one_who_watches_what_goes_on_gets_it_from_its_start(desk: Desk) -> None:
    first = desk.begin("first", stream=False)
    desk.advance("ab", "first")
    desk.flush_later()
    claimed = make_claimed(execution_id="second", qsvc_attempt=4)
    request = replace(first, claimed=claimed).resume(desk.broker.decoded("first"))
    desk.publisher.begin(request)
    desk.publisher.resume("second", 0, [97, 98], [Piece("ab")])
    desk.publisher.watch(["second"])
    desk.publisher.flush()
    assert desk.broker.entries["second"] == [{"i": "0", "a": "4", "t": "ab"}]


def test_another_prompt_does_not_go_on_with_these_tokens(desk: Desk) -> None:
    first = desk.begin("first")
    desk.advance("ab", "first")
    desk.publisher.flush()
    progress = desk.broker.decoded("first")
    others = [
        replace(first, prompts=(replace(first.prompts[0], ids=(1, 2)),)),
        replace(first, model_digest="another"),
        replace(first, samplings=(replace(first.samplings[0], seed=8),)),
        replace(first, prompts=(replace(first.prompts[0], token_limit=1),)),
    ]
    assert [other.resume(progress).resumed for other in others] == [None] * 4


def test_token_ids_wait_for_the_interval_unless_text_is_written(desk: Desk) -> None:
    desk.begin("plain", stream=False)
    desk.begin("streaming")
    desk.advance("a", "plain")
    desk.advance("b", "streaming")
    desk.publisher.flush()
    assert "plain" not in desk.broker.progress
    assert desk.broker.token_ids("streaming") == [98]
    desk.flush_later()
    assert desk.broker.token_ids("plain") == [97]


def test_it_is_known_how_many_tokens_are_saved(desk: Desk) -> None:
    desk.begin(stream=False)
    desk.advance("ab")
    assert desk.publisher.num_saved("execution") == 0
    desk.flush_later()
    desk.advance("c")
    assert desk.publisher.num_saved("execution") == 2
    claimed = make_claimed(execution_id="second", qsvc_attempt=4)
    request = replace(make_request(), claimed=claimed).resume(desk.broker.decoded())
    desk.publisher.begin(request)
    assert desk.publisher.num_saved("second") == 2
    desk.advance("c", "second")
    desk.flush_later()
    assert desk.publisher.num_saved("second") == 3
    assert desk.publisher.num_saved("unknown") == 0


def test_all_tokens_are_saved_before_a_job_is_given_back(desk: Desk) -> None:
    desk.begin(stream=False)
    desk.begin("streaming")
    desk.advance("ab")
    desk.advance("c", "streaming")
    desk.broker.loses_replies = True
    with pytest.raises(redis.ConnectionError):
        desk.publisher.flush()
    desk.broker.loses_replies = False
    desk.advance("de", "streaming")
    desk.publisher.save()
    assert bytes(desk.broker.token_ids()).decode() == "ab"
    assert bytes(desk.broker.token_ids("streaming")).decode() == "cde"


def test_a_write_whose_reply_was_lost_is_sent_again_and_applied_once(desk: Desk) -> None:
    desk.begin()
    desk.advance("one ")
    desk.broker.loses_replies = True
    for _ in range(3):
        with pytest.raises(redis.ConnectionError):
            desk.publisher.flush()
        desk.advance("x")
    desk.broker.loses_replies = False
    desk.publisher.flush()
    desk.publisher.flush()
    first, *again, last = desk.broker.sent
    assert all(publication == first for publication in again)
    assert last.number == first.number + 1
    assert desk.broker.entries["execution"] == [
        {"i": "0", "a": "3", "t": "one "},
        {"i": "4", "a": "3", "t": "xxx"},
    ]
    assert bytes(desk.broker.token_ids()).decode() == "one xxx"


def test_text_gathers_while_the_server_is_away(desk: Desk) -> None:
    request = desk.begin()
    desk.broker.is_away = True
    for word in ("a", "b", "c"):
        desk.advance(word)
        with pytest.raises(redis.ConnectionError):
            desk.publisher.flush()
    desk.end(request, "abc")
    assert desk.delivered == []
    desk.broker.is_away = False
    desk.publisher.flush()
    desk.publisher.flush()
    assert desk.broker.text() == "abc"
    assert len(desk.delivered) == 1


def test_the_end_is_delivered_after_the_last_text_was_written(desk: Desk) -> None:
    request = desk.begin()
    desk.advance("to be")
    generated = desk.end(request, "to be, or", ", or")
    assert desk.delivered == []
    desk.publisher.flush()
    assert desk.broker.text() == "to be, or"
    assert desk.delivered == [generated]


def test_choices_and_kinds_have_entries_of_their_own(desk: Desk) -> None:
    desk.begin()
    publisher = desk.publisher
    publisher.advance("execution", 0, 1, [Piece("think", PieceKind.REASONING)])
    publisher.advance("execution", 1, 2, [Piece("other")])
    publisher.advance("execution", 0, 3, [Piece("ing", PieceKind.REASONING), Piece("so")])
    desk.flush_later()
    publisher.advance("execution", 1, 4, [Piece(" choice")])
    publisher.advance("execution", 0, 5, [Piece(", yes")])
    desk.flush_later()
    assert desk.broker.entries["execution"] == [
        {"i": "0", "a": "3", "k": "reasoning", "t": "thinking"},
        {"i": "0", "a": "3", "c": "1", "t": "other"},
        {"i": "0", "a": "3", "t": "so"},
        {"i": "1", "a": "3", "c": "1", "t": " choice"},
        {"i": "2", "a": "3", "t": ", yes"},
    ]
    assert desk.broker.decoded().tokens == {0: (1, 3, 5), 1: (2, 4)}


def test_a_row_that_failed_is_delivered_at_once_and_writes_no_more(desk: Desk) -> None:
    request = desk.begin()
    desk.advance("half")
    error = TransientError("the row is lost")
    desk.publisher.fail(request.execution_id, error)
    desk.advance("an answer")
    desk.flush_later()
    assert desk.delivered == [Refused(request.claimed, error)]
    assert desk.broker.entries == {}


def test_the_end_of_a_row_that_does_not_stream_is_delivered_at_once(desk: Desk) -> None:
    request = desk.begin(stream=False)
    desk.advance("ab")
    generated = desk.end(request, "ab")
    assert desk.delivered == [generated]
    desk.flush_later()
    assert desk.broker.sent == []


def test_the_last_text_comes_with_its_tokens(desk: Desk) -> None:
    request = desk.begin()
    desk.advance("to be")
    desk.end(request, "to be, or", ", or")
    desk.publisher.flush()
    # Its worker may die now: the next one tells nothing twice.
    assert bytes(desk.broker.token_ids()).decode() == "to be."
    assert desk.broker.text() == "to be, or"


def test_an_empty_answer_is_delivered(desk: Desk) -> None:
    generated = desk.end(desk.begin(), "")
    desk.publisher.flush()
    assert desk.delivered == [generated]


def test_a_watched_row_streams_from_its_beginning_once(desk: Desk) -> None:
    desk.begin(stream=False)
    desk.advance("before ")
    desk.flush_later()
    assert desk.broker.entries == {}
    for word in ("then ", "later"):
        desk.publisher.watch(["execution", "unknown"])
        desk.advance(word)
        desk.publisher.flush()
    assert desk.broker.entries["execution"] == [
        {"i": "0", "a": "3", "t": "before then "},
        {"i": "12", "a": "3", "t": "later"},
    ]
    assert bytes(desk.broker.token_ids()).decode() == "before then later"


def test_nothing_more_is_written_or_delivered_for_a_dropped_row(desk: Desk) -> None:
    request = desk.begin()
    desk.begin("neighbour")
    desk.advance("gone")
    desk.publisher.drop("execution")
    desk.advance("late")
    desk.advance("here", "neighbour")
    desk.end(request, "gone")
    desk.publisher.flush()
    assert desk.broker.entries.keys() == {"neighbour"}
    assert desk.delivered == []


def test_a_row_dropped_while_its_write_is_under_way_stays_dropped(desk: Desk) -> None:
    desk.begin()
    desk.advance("text")
    desk.broker.is_away = True
    with pytest.raises(redis.ConnectionError):
        desk.publisher.flush()
    desk.publisher.drop("execution")
    desk.broker.is_away = False
    desk.publisher.flush()
    assert desk.broker.sent == []


def test_an_execution_that_is_not_ours_any_more_is_reported_and_forgotten(desk: Desk) -> None:
    request = desk.begin()
    desk.begin("ours")
    desk.broker.lost.add("execution")
    desk.advance("a")
    desk.advance("b", "ours")
    desk.publisher.flush()
    assert desk.lost == ["execution"]
    desk.advance("c")
    desk.end(request, "ac")
    desk.publisher.flush()
    assert len(desk.broker.sent) == 2
    assert desk.delivered == []
    assert desk.broker.text("ours") == "b"


class PatientDesk:
    """A running publisher that by itself writes once an hour."""

    def __init__(self) -> None:
        self.broker = RecordingBroker()
        self.delivered = threading.Event()
        self.publisher = Publisher(
            self.broker,
            deliver=lambda generated: self.delivered.set(),
            on_failure=_never,
            lost=lambda execution_id: None,
            stream_interval_seconds=3600,
            progress_interval_seconds=3600,
        )


@pytest.fixture
def patient_desk() -> Iterator[PatientDesk]:
    desk = PatientDesk()
    desk.publisher.start()
    yield desk
    desk.publisher.stop()


def test_a_rows_first_text_is_written_at_once(patient_desk: PatientDesk) -> None:
    publisher, broker = patient_desk.publisher, patient_desk.broker
    publisher.begin(make_request(stream=True))
    publisher.advance("execution", 0, 1, [])
    publisher.advance("execution", 0, 2, [Piece("first")])
    eventually(lambda: broker.text() == "first", "the first text")
    publisher.advance("execution", 0, 3, [Piece(" second")])
    publisher.stop()
    assert [fields["t"] for fields in broker.entries["execution"]] == ["first", " second"]


def test_an_end_does_not_wait_for_the_interval(patient_desk: PatientDesk) -> None:
    request = make_request(stream=True)
    patient_desk.publisher.begin(request)
    generated = Generated(request, [Choice("held", FinishReason.LENGTH, completion_tokens=1)])
    patient_desk.publisher.advance(request.execution_id, 0, 1, [Piece("held")])
    patient_desk.publisher.end(generated)
    assert patient_desk.delivered.wait(5)
    assert patient_desk.broker.text() == "held"


def test_the_thread_survives_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    broker = RecordingBroker()
    broker.is_away = True
    publisher = Publisher(
        broker,
        deliver=lambda generated: None,
        on_failure=_never,
        lost=lambda execution_id: None,
        stream_interval_seconds=0.01,
        progress_interval_seconds=0.01,
    )
    publisher.start()
    publisher.begin(make_request(stream=True))
    publisher.advance("execution", 0, 1, [Piece("kept")])
    eventually(lambda: "until the server takes it" in caplog.text, "a warning")
    broker.is_away = False
    eventually(lambda: broker.text() == "kept", "the text after the outage")
    publisher.stop()


def test_an_error_of_our_own_ends_the_thread_with_a_word() -> None:
    class Broken(RecordingBroker):
        def publish(self, publications: Sequence[Publication], *, keep_seconds: int) -> list[bool]:
            raise LookupError("a fault of ours")

    failures: list[BaseException] = []
    publisher = Publisher(
        Broken(),
        deliver=lambda generated: None,
        on_failure=failures.append,
        lost=lambda execution_id: None,
        stream_interval_seconds=0.01,
        progress_interval_seconds=0.01,
    )
    publisher.start()
    publisher.begin(make_request(stream=True))
    publisher.advance("execution", 0, 1, [Piece("text")])
    eventually(lambda: failures, "the failure")
    assert isinstance(failures[0], LookupError)
