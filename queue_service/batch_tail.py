"""Reads the texts of a batch's lines as they come, of all that run at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from redis import Redis

from queue_service import keys
from queue_service.batches import Batch, LineRef, batch_not_found, read_batch_hash
from queue_service.dialogue import Ask, Dialogue, Entries, Reconnect, Server, end_of, streams_of
from queue_service.results import job_commands, job_result, refusal_command
from queue_service.streams import End, EndReason, Event, Transcript

_PAGE_ENTRIES: Final = 500
_BLOCK_SECONDS: Final = 0.5
# Rows write a dozen times a second, each for itself: one answer tells of all of them.
_PAUSE_SECONDS: Final = 0.05
_LOOK_SECONDS: Final = 0.5
_MOST_RUNNING: Final = 20_000
_WATCH_SECONDS: Final = 30
_WATCH_AGAIN_SECONDS: Final = 10


@dataclass(frozen=True, slots=True)
class LineEvent:
    """What a line of a batch has to tell; its `End` comes last."""

    job_id: str
    ref: LineRef
    event: Event


class BatchTail(Iterator[LineEvent]):
    """Yields the events of all lines that run or will, until the batch has ended.

    Each line's text is told once and in its order, from its beginning, whatever workers and
    connections are lost meanwhile; the lines' events are mixed.

    Args:
        from_start: lines that had ended before are told too.
        has_text: False tells each answer at its end only, which costs workers and server less.
        clock: seconds, monotonic.

    Raises, while it is read:
        BatchNotFound: the server knows no such batch, or it was deleted.
        ServerUnavailable: the server stayed away.
        redis.exceptions.RedisError: the server refuses us.
    """

    def __init__(
        self,
        connection: Redis,
        batch_id: str,
        *,
        from_start: bool = False,
        has_text: bool = True,
        reconnect: Reconnect = Reconnect(),  # noqa: B008  # it is frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = Server(connection, reconnect, clock)
        self._reader = _Reader(batch_id, has_text, clock, self._server.block_seconds)
        self._dialogue: Dialogue[LineEvent] = Dialogue(self._reader.steps(from_start=from_start))

    def __next__(self) -> LineEvent:
        event = self._server.next_item(self._dialogue)
        if event is None:
            raise StopIteration
        return event

    @property
    def batch(self) -> Batch | None:
        """The batch as it was seen last; None before the first event was asked for."""
        return self._reader.batch


@dataclass(slots=True)
class _Line:
    """A line that is read: what of it was told, and to where its stream was read."""

    ref: LineRef
    transcript: Transcript
    watch_at: float = 0.0


@dataclass(slots=True)
class _Reader:
    batch_id: str
    has_text: bool
    clock: Callable[[], float]
    block_seconds: float
    batch: Batch | None = None
    lines: dict[str, _Line] = field(default_factory=dict)
    done_id: str = "0-0"

    def steps(self, *, from_start: bool) -> Generator[Ask | LineEvent, Any, None]:
        """Ask the server, without any I/O here, and yield what is new."""
        yield from self._look()
        if not from_start:
            done = keys.batch_done(self.batch_id)
            [entries] = yield Ask([("XREVRANGE", done, "+", "-", "COUNT", 1)])
            self.done_id = entries[0][0].decode() if entries else self.done_id
        look_at = self.clock()
        while True:
            if self.clock() >= look_at:
                yield from self._look()
                yield from self._find_running()
                look_at = self.clock() + _LOOK_SECONDS
            # Before the question: what ended after it is in the answer.
            was_final = self.batch is not None and self.batch.status.is_final
            [reply] = yield self._question(is_open=not was_final)
            streams = streams_of(reply)
            for job_id, line in self.lines.items():
                for entry_id, fields in streams.get(keys.stream(job_id), ()):
                    for event in line.transcript.feed(entry_id, fields):
                        yield LineEvent(job_id, line.ref, event)
            done_entries = streams.get(keys.batch_done(self.batch_id), ())
            yield from self._ends(done_entries)
            if was_final and not done_entries:
                return

    def _look(self) -> Generator[Ask, Any, None]:
        [raw] = yield Ask([("HGETALL", keys.batch(self.batch_id))])
        if not raw:
            raise batch_not_found(self.batch_id)
        self.batch = read_batch_hash(self.batch_id, raw)

    def _find_running(self) -> Generator[Ask, Any, None]:
        """Find lines that have begun, and ask their workers for the text."""
        if not self.has_text or self.batch is None:
            return
        [members] = yield Ask([("ZRANGE", keys.rq_started(self.batch.queue), 0, _MOST_RUNNING - 1)])
        prefix = keys.job_id_prefix(self.batch_id)
        job_ids = [member.decode().rpartition(":")[0] for member in members]
        running = [job_id for job_id in job_ids if job_id.startswith(prefix)]
        new = [job_id for job_id in running if job_id not in self.lines]
        if new:
            metas = yield Ask([("HGET", keys.rq_job(job_id), "meta") for job_id in new])
            for job_id, meta in zip(new, metas, strict=True):
                self.lines[job_id] = self._line(job_id, _custom_id(meta))
        now = self.clock()
        unwatched = [job_id for job_id in running if self.lines[job_id].watch_at <= now]
        for job_id in unwatched:
            self.lines[job_id].watch_at = now + _WATCH_AGAIN_SECONDS
        if unwatched:
            yield Ask([("SET", keys.watch(job), "1", "EX", _WATCH_SECONDS) for job in unwatched])

    def _line(self, job_id: str, custom_id: str) -> _Line:
        number = int(job_id.removeprefix(keys.job_id_prefix(self.batch_id)))
        return _Line(LineRef(number, custom_id), Transcript(job_id))

    def _question(self, *, is_open: bool) -> Ask:
        """Return what asks for everything that is new, and waits for it while more may come."""
        seconds = min(self.block_seconds, _BLOCK_SECONDS)
        block = ("BLOCK", max(1, int(1000 * seconds))) if is_open else ()
        names = [keys.batch_done(self.batch_id), *map(keys.stream, self.lines)]
        read_to = [self.done_id, *(line.transcript.last_id for line in self.lines.values())]
        command = ("XREAD", *block, "COUNT", _PAGE_ENTRIES, "STREAMS", *names, *read_to)
        return Ask([command], pause_seconds=_PAUSE_SECONDS)

    def _ends(self, entries: Entries) -> Generator[Ask | LineEvent, Any, None]:
        """Tell what is left of lines that have ended, and how they did."""
        if not entries:
            return
        outcomes = {int(fields[b"l"]): fields[b"s"] for _, fields in entries}
        job_ids = [keys.job_id(self.batch_id, number) for number in outcomes]
        commands: list[tuple[str | int, ...]] = []
        for job_id in job_ids:
            commands += [*job_commands(job_id), refusal_command(job_id)]
            commands.append(("HGET", keys.rq_job(job_id), "meta"))
        replies = yield Ask(commands)
        for index, (job_id, outcome) in enumerate(zip(job_ids, outcomes.values(), strict=True)):
            yield from self._end(job_id, outcome, replies[4 * index : 4 * index + 4])
        self.done_id = entries[-1][0].decode()

    def _end(self, job_id: str, outcome: bytes, replies: Sequence[Any]) -> Iterator[LineEvent]:
        status, results, refusal, meta = replies
        line = self.lines.pop(job_id, None) or self._line(job_id, _custom_id(refusal or meta))
        result = job_result(job_id, status, results, refusal)
        if result is not None and result.body is not None:
            for event in line.transcript.settle(result.body):
                yield LineEvent(job_id, line.ref, event)
        is_told = result is not None and result.has_ended
        yield LineEvent(job_id, line.ref, end_of(result) if is_told and result else _END[outcome])


# Of lines whose result is gone, or that run again by now.
_END: Final[Mapping[bytes, End]] = {
    b"completed": End(EndReason.DONE),
    b"failed": End(EndReason.ERROR),
    b"cancelled": End(EndReason.CANCELLED),
}


def _custom_id(text: bytes | None) -> str:
    """Return the custom id that a job's meta, or the error of a refused line, has."""
    try:
        fields = json.loads(text or b"{}")
    except ValueError:
        return ""
    return str(fields.get("custom_id") or "") if isinstance(fields, dict) else ""
