"""The publisher thread: text to job streams, token ids to progress keys, endings to the RQ thread.

The engine thread only appends to buffers here. One pipeline per round writes what has gathered;
while Redis is away the buffers grow, by no more than the rows in flight can generate.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from redis.exceptions import RedisError

from queue_service.broker import Broker, Publication
from queue_service.progress import TokenScores, encode_scores, encode_tokens
from queue_service.trace import Phase
from workers.answer_forms import Piece, PieceKind
from workers.engine import TokenLogprobs
from workers.requests import Generated, PreparedRequest, Refused, Result
from workers.tracing import Tracer

logger = logging.getLogger(__name__)

# How long a running job's stream and progress live without a further write.
KEEP_SECONDS = 86_400


@dataclass(slots=True)
class _Text:
    """Neighbouring pieces of one choice and kind, and the index of the token that they begin at."""

    choice: int
    kind: PieceKind
    first_token: int
    text: str

    def entry(self, attempt: int) -> list[str]:
        """Return the stream entry; the first choice and plain text are left out."""
        entry = ["i", str(self.first_token), "a", str(attempt)]
        if self.choice:
            entry += ["c", str(self.choice)]
        if self.kind is not PieceKind.TEXT:
            entry += ["k", self.kind.value]
        return [*entry, "t", self.text]


@dataclass(slots=True)
class _Texts:
    """Texts in the order in which they begin; a choice goes on in its last one while it can."""

    items: list[_Text] = field(default_factory=list)
    _last: dict[int, _Text] = field(default_factory=dict)

    def append(self, piece: Piece, choice: int, first_token: int) -> None:
        """Add a piece of a choice that begins at a token."""
        last = self._last.get(choice)
        if last is not None and last.kind is piece.kind:
            last.text += piece.text
            return
        self._last[choice] = _Text(choice, piece.kind, first_token, piece.text)
        self.items.append(self._last[choice])

    def copy(self) -> _Texts:
        """Return texts of their own that say the same."""
        items = [replace(text) for text in self.items]
        return _Texts(items, {text.choice: text for text in items})


def _zeros() -> defaultdict[int, int]:
    return defaultdict(int)  # a Counter takes five times as long to make


@dataclass(slots=True)
class _Channel:
    """What one request has produced and how much of it was written.

    Attributes:
        unwritten: what no stream entry holds yet; nothing while nobody wants a stream.
        everything: all there is, for one who begins to watch.
        written_tokens: of each choice, the tokens whose text was taken for a stream entry.
        unsaved_ids: of each choice, the tokens that are not in its progress yet.
        has_header: the progress says whose it is.
        num_taken: tokens that were taken for the progress.
        num_saved: those that are in it.
    """

    request: PreparedRequest
    streaming: bool
    next_progress: float
    unwritten: _Texts = field(default_factory=_Texts)
    everything: _Texts = field(default_factory=_Texts)
    num_tokens: defaultdict[int, int] = field(default_factory=_zeros)
    written_tokens: defaultdict[int, int] = field(default_factory=_zeros)
    unsaved_ids: dict[int, list[int]] = field(default_factory=dict)
    unsaved_scores: dict[int, list[TokenScores]] = field(default_factory=dict)
    has_header: bool = False
    num_taken: int = 0
    num_saved: int = 0
    cached_tokens: int = 0
    number: int = 0
    in_flight: Publication | None = None
    ended: Generated | None = None


class Publisher:
    """Collects what rows produce and writes it to Redis at intervals.

    Args:
        deliver: takes a row's ending, after its text is written; called on the engine's and the
            publisher's thread.
        on_failure: called on the publisher thread with the exception that ended it.
        lost: called with an execution that is not ours any more.
        stream_interval_seconds: text is gathered this long, except a row's first token.
        progress_interval_seconds: token ids are gathered this long.
        tracer: notes when what happened.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        deliver: Callable[[Result], None],
        lost: Callable[[str], None],
        on_failure: Callable[[BaseException], None],
        stream_interval_seconds: float,
        progress_interval_seconds: float,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._deliver = deliver
        self._lost = lost
        self._on_failure = on_failure
        self._stream_interval = stream_interval_seconds
        self._progress_interval = progress_interval_seconds
        self._clock = clock
        self._tracer = tracer or Tracer()
        self._channels: dict[str, _Channel] = {}
        self._lock = threading.Lock()
        # Held while what was collected is written, so that no reply is taken for that of another.
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 5) -> None:
        """Write what is there once more and end the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_seconds)

    # The engine thread ----------------------------------------------------------------------

    def begin(self, request: PreparedRequest) -> None:
        """A row is about to run."""
        due = self._clock() + self._progress_interval
        channel = _Channel(request, streaming=request.stream, next_progress=due)
        if request.resumed is not None:
            channel.has_header = True
            channel.cached_tokens = request.resumed.header.cached_tokens
            channel.num_taken = channel.num_saved = request.resumed.num_tokens
        with self._lock:
            self._channels[request.execution_id] = channel

    def resume(
        self, execution_id: str, choice: int, token_ids: Sequence[int], pieces: Sequence[Piece]
    ) -> None:
        """A choice begins with tokens of an earlier execution, which has written their text."""
        with self._lock:
            channel = self._channels[execution_id]
            channel.num_tokens[choice] = len(token_ids)
            # Without a text yet it begins at 0: an answer before it may have had one.
            channel.written_tokens[choice] = len(token_ids) if pieces else 0
            for piece in pieces:
                channel.everything.append(piece, choice, 0)

    def note_cached(self, execution_id: str, num_tokens: int) -> None:
        """So many tokens of a request's prompts were not computed."""
        with self._lock:
            channel = self._channels.get(execution_id)
            if channel is not None:
                channel.cached_tokens = num_tokens
                channel.has_header = False

    def advance(
        self,
        execution_id: str,
        choice: int,
        token_id: int,
        pieces: Sequence[Piece],
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """A choice has one token more, or none if the id is negative; the pieces became certain."""
        with self._lock:
            channel = self._channels.get(execution_id)
            if channel is None:
                return
            is_first = not channel.everything.items
            if token_id >= 0:
                channel.num_tokens[choice] += 1
                channel.unsaved_ids.setdefault(choice, []).append(token_id)
                if logprobs is not None:
                    scores = (logprobs.logprob, logprobs.top)
                    channel.unsaved_scores.setdefault(choice, []).append(scores)
            for piece in pieces:
                channel.everything.append(piece, choice, 0)
                if channel.streaming:
                    channel.unwritten.append(piece, choice, channel.written_tokens[choice])
        if is_first and pieces and channel.streaming:
            self._wake.set()

    def end(self, generated: Generated) -> None:
        """Every choice of a request came to its end."""
        with self._lock:
            channel = self._channels.get(generated.request.execution_id)
            if channel is None:
                return
            streaming = channel.streaming
            if streaming:
                channel.ended = generated
            else:
                del self._channels[generated.request.execution_id]
        if streaming:
            self._wake.set()
        else:
            self._deliver(generated)

    def fail(self, execution_id: str, error: Exception) -> None:
        """A row came to no ending; its error is delivered and nothing more is written for it."""
        with self._lock:
            channel = self._channels.pop(execution_id, None)
        if channel is not None:
            self._deliver(Refused(channel.request.claimed, error))

    def drop(self, execution_id: str) -> None:
        """A row was removed; nothing more is written for it."""
        with self._lock:
            self._channels.pop(execution_id, None)

    # The RQ thread --------------------------------------------------------------------------

    def watch(self, execution_ids: Iterable[str]) -> None:
        """Stream these from now on; the text so far comes first."""
        with self._lock:
            for execution_id in execution_ids:
                channel = self._channels.get(execution_id)
                if channel is not None and not channel.streaming:
                    channel.streaming = True
                    channel.unwritten = channel.everything.copy()
        self._wake.set()

    def num_saved(self, execution_id: str) -> int:
        """Return how many tokens of an execution, and of those before it, its progress holds."""
        with self._lock:
            channel = self._channels.get(execution_id)
            return 0 if channel is None else channel.num_saved

    def save(self) -> None:
        """Write all that there is, due or not: the executions are about to be given back.

        Raises:
            redis.exceptions.RedisError: the server is away.
        """
        self.flush()  # what is under way, which holds up what came after it
        self.flush(everything=True)

    # The publisher thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write_until_stopped()
        except BaseException as failure:  # the top of the thread: its owner decides
            self._on_failure(failure)

    def _write_until_stopped(self) -> None:
        pause = self._stream_interval
        is_away = False
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            stopping = self._stopping
            try:
                self.flush()
                pause, is_away = self._stream_interval, False
            except RedisError as error:
                pause = min(pause * 2, 1.0)
                if not is_away:
                    logger.warning("text is kept until the server takes it (%s)", error)
                is_away = True
            if stopping:
                return

    def flush(self, *, everything: bool = False) -> None:
        """Write what has gathered; what cannot be written stays and is written next time.

        Args:
            everything: also tokens that are not due yet.

        Raises:
            redis.exceptions.RedisError: the server is away; nothing is lost.
        """
        with self._writing:
            now = self._clock()
            with self._lock:
                publications = [
                    publication
                    for channel in self._channels.values()
                    if (publication := self._collect(channel, now, everything=everything))
                ]
            self._deliver_ended()  # what needs no write does not wait for one
            if publications:
                kept = self._broker.publish(publications, keep_seconds=KEEP_SECONDS)
                for publication, is_ours in zip(publications, kept, strict=True):
                    if publication.number == 1 and publication.entries:
                        execution_id = publication.claimed.execution_id
                        self._tracer.span(execution_id, Phase.STREAM_FIRST_WRITE, now)
                    self._written(publication.claimed.execution_id, is_ours=is_ours)
            self._deliver_ended()

    def _collect(self, channel: _Channel, now: float, *, everything: bool) -> Publication | None:
        if channel.in_flight is not None:
            return channel.in_flight
        entries: list[list[str]] = []
        if channel.unwritten.items:
            attempt = channel.request.claimed.attempt
            entries = [text.entry(attempt) for text in channel.unwritten.items]
            # Not of the other choices: what they hold back begins where their last text ended.
            for choice in {text.choice for text in channel.unwritten.items}:
                channel.written_tokens[choice] = channel.num_tokens[choice]
            channel.unwritten = _Texts()
        progress: list[bytes] = []
        # Also with the last text: whoever goes on after a death tells what follows it, once.
        is_due = (everything or now >= channel.next_progress) and channel.ended is None
        if channel.unsaved_ids and (entries or is_due):
            progress = self._take_progress(channel)
            channel.next_progress = now + self._progress_interval
        if not entries and not progress:
            return None
        channel.number += 1
        is_new = channel.number == 1 and channel.request.resumed is None
        channel.in_flight = Publication(
            channel.request.claimed, channel.number, progress, entries, is_new=is_new
        )
        return channel.in_flight

    @staticmethod
    def _take_progress(channel: _Channel) -> list[bytes]:
        elements = []
        if not channel.has_header:
            header = channel.request.progress_header(cached_tokens=channel.cached_tokens)
            elements.append(header.encode())
            channel.has_header = True
        channel.num_taken += sum(map(len, channel.unsaved_ids.values()))
        elements += [encode_tokens(choice, ids) for choice, ids in channel.unsaved_ids.items()]
        elements += [encode_scores(choice, s) for choice, s in channel.unsaved_scores.items()]
        channel.unsaved_ids, channel.unsaved_scores = {}, {}
        return elements

    def _written(self, execution_id: str, *, is_ours: bool) -> None:
        with self._lock:
            channel = self._channels.get(execution_id)
            if channel is None:
                return
            channel.in_flight = None
            channel.num_saved = channel.num_taken
            if not is_ours:
                del self._channels[execution_id]
        if not is_ours:
            self._lost(execution_id)

    def _deliver_ended(self) -> None:
        with self._lock:
            done = [
                channel.ended
                for channel in self._channels.values()
                if channel.ended is not None
                and not channel.unwritten.items
                and channel.in_flight is None
            ]
            for generated in done:
                del self._channels[generated.request.execution_id]
        for generated in done:
            self._deliver(generated)
