"""Reads a job's text as it is generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis

from queue_service import keys
from queue_service.errors import JobNotFound
from queue_service.results import JobResult, read_job

_BLOCK_MS = 1000
# How long a reader counts as interested without saying so again.
_WATCH_SECONDS = 30
_WATCH_AGAIN_SECONDS = 10


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text that follows what was read before; a restart means that it begins anew."""

    text: str
    restarted: bool = False


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The job ended; ``reason`` is done, error or cancelled."""

    reason: str
    message: str | None = None


def read_text(
    connection: Redis, job_id: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[TextChunk | StreamEnd]:
    """Yield a job's text from its start as it comes, and at last how it ended.

    A job that does not stream yet begins to within a heartbeat of its worker.

    Raises:
        JobNotFound: the server knows no such job.
    """
    result = read_job(connection, job_id)
    last_id, attempt, num_tokens = b"0-0", 0, 0
    text = _Text()
    watch_at = clock()
    while True:
        if not result.has_ended and clock() >= watch_at:
            connection.set(keys.watch(job_id), "1", ex=_WATCH_SECONDS)
            watch_at = clock() + _WATCH_AGAIN_SECONDS
        block = None if result.has_ended else _BLOCK_MS
        replies: Any = connection.xread({keys.stream(job_id): last_id}, block=block)
        for _, entries in replies:
            for entry_id, fields in entries:
                last_id = entry_id
                if b"e" in fields:
                    yield from _rest(connection, job_id, text.shown)
                    yield _end(fields)
                    return
                if fields.get(b"c", b"0") != b"0":
                    continue  # each choice begins anew, or goes on, by itself
                entry_attempt, first = int(fields.get(b"a", 1)), int(fields.get(b"i", 0))
                if entry_attempt > attempt:
                    attempt, num_tokens = entry_attempt, first
                    if first == 0:
                        text.begin_again()
                if entry_attempt < attempt or first < num_tokens:
                    continue
                num_tokens = first
                yield from text.add(fields[b"t"].decode("utf-8", "replace"))
        if replies:
            continue
        if result.has_ended:
            # It ended without a stream, or its stream has expired: the result holds the text.
            yield from _rest(connection, job_id, text.shown)
            yield _end_of(result)
            return
        result = read_job(connection, job_id)


class _Text:
    """What a reader was shown. A worker that takes over may tell all from the start once more."""

    def __init__(self) -> None:
        self.shown = ""
        self._again: str | None = None  # what was told anew, as long as it is nothing new

    def begin_again(self) -> None:
        """What comes now is told from its start."""
        self._again = "" if self.shown else None

    def add(self, text: str) -> Iterator[TextChunk]:
        """Yield what is new of the next piece of text."""
        if self._again is None:
            self.shown += text
            yield TextChunk(text)
            return
        self._again += text
        if self._again.startswith(self.shown):
            rest = self._again[len(self.shown) :]
            self.shown, self._again = self._again, None
            if rest:
                yield TextChunk(rest)
        elif not self.shown.startswith(self._again):
            self.shown, self._again = self._again, None
            yield TextChunk(self.shown, restarted=True)


def _end(fields: Mapping[bytes, bytes]) -> StreamEnd:
    message = fields.get(b"message")
    return StreamEnd(fields[b"e"].decode(), message.decode() if message else None)


def _end_of(result: JobResult) -> StreamEnd:
    if result.body is not None:
        return StreamEnd("done")
    if result.status == "canceled":
        return StreamEnd("cancelled")
    error = result.error or {}
    return StreamEnd("error", str(error.get("message") or f"the job is {result.status}"))


def _rest(connection: Redis, job_id: str, seen: str) -> Iterator[TextChunk]:
    """Yield what the answer holds beyond the text seen.

    A worker that takes a job over streams it only from its next beat on, and may end before.
    """
    try:
        body = read_job(connection, job_id).body
    except JobNotFound:
        return  # it asked to be deleted at its end
    text = seen if body is None else text_of(body)
    if not text.startswith(seen):
        yield TextChunk(text, restarted=True)
    elif text != seen:
        yield TextChunk(text[len(seen) :])


def text_of(body: Mapping[str, Any]) -> str:
    """Return the text of a completion's first choice."""
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return str(text or "")
