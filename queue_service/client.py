"""For application code: enqueue a request, read its text as it is generated, wait for its result.

Everything is there for `redis.Redis` and, beginning with ``Async`` or ``async_``, for
`redis.asyncio.Redis`. What is asked of the server and what the answers mean is decided in one
place, for both; docs/streams.md has examples.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from rq import Queue

from queue_service import keys, tasks
from queue_service.dialogue import AsyncServer, Dialogue, Reconnect, Server, reading, waiting
from queue_service.errors import JobFailed, TextReplaced
from queue_service.results import JobResult
from queue_service.streams import End, EndReason, Event, Restarted, Text, TextKind, Transcript

__all__ = [
    "AsyncStreamReader",
    "End",
    "EndReason",
    "Event",
    "JobResult",
    "Reconnect",
    "Restarted",
    "StreamReader",
    "Text",
    "TextKind",
    "async_stream_text",
    "async_wait",
    "enqueue_chat",
    "enqueue_completion",
    "stream_text",
    "wait",
]

_PATIENT: Final = Reconnect()


# Submit -------------------------------------------------------------------------------------


def enqueue_chat(
    connection: Redis, body: Mapping[str, Any], *, queue: str = keys.DEFAULT_QUEUE, **options: Any
) -> str:
    """Enqueue a body of ``/v1/chat/completions`` and return the job's id.

    Args:
        queue: ``qsvc:default``, which every worker serves, or a model's ``qsvc:<alias>``.
        options: those of RQ's ``Queue.enqueue``, such as ``job_id`` or ``result_ttl``.
    """
    return _enqueue(connection, tasks.CHAT, body, queue, options)


def enqueue_completion(
    connection: Redis, body: Mapping[str, Any], *, queue: str = keys.DEFAULT_QUEUE, **options: Any
) -> str:
    """Enqueue a body of ``/v1/completions`` and return the job's id; else as `enqueue_chat`."""
    return _enqueue(connection, tasks.COMPLETION, body, queue, options)


def _enqueue(
    connection: Redis, function: str, body: Mapping[str, Any], name: str, options: Mapping[str, Any]
) -> str:
    queue = Queue(name, connection=connection, serializer="json")
    return str(queue.enqueue(function, dict(body), **options).id)


# Read ---------------------------------------------------------------------------------------


class _Reader:
    """What is the same for both ways to ask a server."""

    def __init__(
        self,
        server: Server | AsyncServer,
        job_id: str,
        after: str | None,
        clock: Callable[[], float],
    ) -> None:
        self._transcript = Transcript(job_id, after)
        steps = reading(self._transcript, job_id, server.block_seconds, clock)
        self._dialogue: Dialogue[Event] = Dialogue(steps)

    @property
    def cursor(self) -> str:
        """Where another reader goes on: after the last event that was taken."""
        return self._transcript.cursor


class StreamReader(_Reader, Iterator[Event]):
    """Reads a job's text from its start, or from a cursor, to its end.

    It yields each text once and in its order, for every choice and kind, whatever workers and
    connections are lost meanwhile; `End` comes last. Of a job that does not stream by itself it
    asks for the text, which begins to come within a heartbeat of its worker. At the end it yields
    what the result holds beyond the text seen. It may be left and gone on with.

    Args:
        connection: any; its answers may be bytes or texts.
        after: the `cursor` of a reader of the same job, perhaps of another process.
        clock: seconds, monotonic.

    Raises, while it is read:
        JobNotFound: the server knows no such job, or it was deleted.
        ServerUnavailable: the server stayed away; a new reader goes on from the cursor.
        redis.exceptions.RedisError: the server refuses us.

    Raises:
        ValueError: ``after`` is no cursor of this job.
    """

    def __init__(
        self,
        connection: Redis,
        job_id: str,
        *,
        after: str | None = None,
        reconnect: Reconnect = _PATIENT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = Server(connection, reconnect, clock)
        super().__init__(self._server, job_id, after, clock)

    def __next__(self) -> Event:
        event = self._server.next_item(self._dialogue)
        if event is None:
            raise StopIteration
        return event


class AsyncStreamReader(_Reader, AsyncIterator[Event]):
    """`StreamReader` for asyncio: ``async for event in AsyncStreamReader(connection, job_id)``."""

    def __init__(
        self,
        connection: AsyncRedis,
        job_id: str,
        *,
        after: str | None = None,
        reconnect: Reconnect = _PATIENT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = AsyncServer(connection, reconnect, clock)
        super().__init__(self._server, job_id, after, clock)

    async def __anext__(self) -> Event:
        event = await self._server.next_item(self._dialogue)
        if event is None:
            raise StopAsyncIteration
        return event


def stream_text(connection: Redis, job_id: str, *, choice: int = 0) -> Iterator[str]:
    """Yield the text of one choice as it is generated, without reasoning and tool calls.

    Raises:
        JobFailed: the job ended without an answer.
        TextReplaced: another worker gives another answer than the text that was yielded.
        JobNotFound, ServerUnavailable: see `StreamReader`.
    """
    texts = _PlainText(job_id, choice)
    for event in StreamReader(connection, job_id):
        if text := texts.take(event):
            yield text


async def async_stream_text(
    connection: AsyncRedis, job_id: str, *, choice: int = 0
) -> AsyncIterator[str]:
    """`stream_text` for asyncio."""
    texts = _PlainText(job_id, choice)
    async for event in AsyncStreamReader(connection, job_id):
        if text := texts.take(event):
            yield text


def wait(
    connection: Redis,
    job_id: str,
    *,
    timeout_seconds: float | None = None,
    reconnect: Reconnect = _PATIENT,
) -> JobResult:
    """Return a job's result when it has ended, with its answer in ``body`` or its ``error``.

    Raises:
        TimeoutError: Python's own; the job had not ended after ``timeout_seconds``.
        JobNotFound, ServerUnavailable: see `StreamReader`.
    """
    server = Server(connection, _limited(reconnect, timeout_seconds), time.monotonic)
    steps = waiting(job_id, server.block_seconds, timeout_seconds, time.monotonic)
    return _found(server.next_item(Dialogue(steps)))


async def async_wait(
    connection: AsyncRedis,
    job_id: str,
    *,
    timeout_seconds: float | None = None,
    reconnect: Reconnect = _PATIENT,
) -> JobResult:
    """`wait` for asyncio."""
    server = AsyncServer(connection, _limited(reconnect, timeout_seconds), time.monotonic)
    steps = waiting(job_id, server.block_seconds, timeout_seconds, time.monotonic)
    return _found(await server.next_item(Dialogue(steps)))


class _PlainText:
    """The text of one choice; other kinds of text and other choices are left out."""

    def __init__(self, job_id: str, choice: int) -> None:
        self._job_id = job_id
        self._choice = choice
        self._has_text = False

    def take(self, event: Event) -> str:
        """Return the event's part of the text, perhaps nothing."""
        match event:
            case End(reason, message):
                if reason is not EndReason.DONE:
                    said = f": {message}" if message else ""
                    raise JobFailed(f"{self._job_id} ended without an answer ({reason}){said}")
            case Restarted(self._choice) if self._has_text:
                raise TextReplaced(
                    f"another worker gives another answer to {self._job_id}; read it anew"
                )
            case Text(self._choice, TextKind.TEXT, text):
                self._has_text = True
                return text
        return ""


def _limited(reconnect: Reconnect, timeout_seconds: float | None) -> Reconnect:
    limits = [s for s in (reconnect.give_up_seconds, timeout_seconds) if s is not None]
    return replace(reconnect, give_up_seconds=min(limits, default=None))


def _found(result: JobResult | None) -> JobResult:
    assert result is not None
    return result
