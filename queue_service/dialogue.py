"""Asks a server about one job, in two ways: blocking and with asyncio.

The questions come from generators that do no I/O, so that both ways have them in common.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from queue_service import keys
from queue_service.errors import ServerUnavailable
from queue_service.results import (
    JobResult,
    job_commands,
    job_not_found,
    job_result,
    refusal_command,
    send_all,
)
from queue_service.streams import End, EndReason, Event, Transcript

_BLOCK_SECONDS = 1.0
_PAGE_ENTRIES = 1000
# How long a reader counts as interested without saying so again.
_WATCH_SECONDS = 30
_WATCH_AGAIN_SECONDS = 10

_Item = TypeVar("_Item")
_Steps = Generator["Ask | _Item", Any, None]
Entries = Sequence[tuple[bytes, Mapping[bytes, bytes]]]


@dataclass(frozen=True, slots=True)
class Reconnect:
    """How a server that went away is waited for.

    Attributes:
        first_pause_seconds: before the first try; each pause is twice as long as the last.
        most_pause_seconds: the longest pause.
        give_up_seconds: after so long without an answer an error is raised; None never does.
        on_outage: told once each time that the server goes away.
    """

    first_pause_seconds: float = 0.1
    most_pause_seconds: float = 2.0
    give_up_seconds: float | None = 300.0
    on_outage: Callable[[RedisError], None] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.first_pause_seconds <= self.most_pause_seconds:
            raise ValueError("pauses must be positive, and the longest the longest")


@dataclass(frozen=True, slots=True)
class Ask:
    """Commands to send in one round trip; each may be sent twice.

    Attributes:
        pause_seconds: waited for before, so that one answer tells what several would.
    """

    commands: Sequence[tuple[str | int, ...]]
    pause_seconds: float = 0.0


class Dialogue(Generic[_Item]):
    """Steps of a generator that does no I/O itself: questions that wait for replies, and items."""

    def __init__(self, steps: _Steps[_Item]) -> None:
        self._steps = steps
        self._ask: Ask | None = None
        self._replies: Sequence[Any] | None = None

    def step(self) -> Ask | _Item | None:
        """Return the open question, or the next item; None at the end."""
        if self._ask is not None and self._replies is None:
            return self._ask
        replies, self._replies, self._ask = self._replies, None, None
        try:
            step = self._steps.send(replies)
        except StopIteration:
            return None
        if isinstance(step, Ask):
            self._ask = step
        return step

    def answer(self, replies: Sequence[Any]) -> None:
        """Take the replies to the open question."""
        self._replies = replies


def reading(
    transcript: Transcript, job_id: str, block_seconds: float, clock: Callable[[], float]
) -> _Steps[Event]:
    """Yield a job's events to its end."""
    result = yield from _job(job_id)
    watch_at = clock()
    while True:
        is_open = result is not None and not result.has_ended
        commands: list[tuple[str | int, ...]] = []
        if is_open and clock() >= watch_at:
            commands.append(("SET", keys.watch(job_id), "1", "EX", _WATCH_SECONDS))
            watch_at = clock() + _WATCH_AGAIN_SECONDS
        block = ("BLOCK", max(1, int(block_seconds * 1000))) if is_open else ()
        commands.append(_xread(keys.stream(job_id), transcript.last_id, *block))
        *_, reply = yield Ask(commands)
        entries = _entries(reply)
        for entry_id, fields in entries:
            if b"e" in fields:
                if is_open:
                    result = yield from _job(job_id)
                yield from _ending(transcript, result)
                yield End.of_entry(fields)
                return
            yield from transcript.feed(entry_id, fields)
        if entries:
            continue
        if result is None:
            raise job_not_found(job_id)
        if result.has_ended:
            # It ended without a stream, or its stream has expired: the result holds the text.
            yield from _ending(transcript, result)
            yield end_of(result)
            return
        result = yield from _job(job_id)


def _ending(transcript: Transcript, result: JobResult | None) -> Iterator[Event]:
    """Yield what the answer holds beyond the text seen.

    One who watches is told the text only from the worker's next beat on: it may end before. A job
    that asked to be deleted at its end has no result.
    """
    if result is not None and result.body is not None:
        yield from transcript.settle(result.body)


def end_of(result: JobResult) -> End:
    """Return how a job ended that has."""
    if result.body is not None:
        return End(EndReason.DONE)
    if result.status == "canceled":
        return End(EndReason.CANCELLED)
    error = result.error or {}
    return End(EndReason.ERROR, str(error.get("message") or f"the job is {result.status}"))


def waiting(
    job_id: str, block_seconds: float, timeout_seconds: float | None, clock: Callable[[], float]
) -> _Steps[JobResult]:
    """Yield a job's result when it has ended."""
    deadline = None if timeout_seconds is None else clock() + timeout_seconds
    last_id = "0-0"  # of its results, the newest of which is its end
    while True:
        result = yield from _job(job_id)
        if result is None:
            raise job_not_found(job_id)
        if result.has_ended:
            yield result
            return
        left = block_seconds if deadline is None else min(block_seconds, deadline - clock())
        if left <= 0:
            raise TimeoutError(f"{job_id} is {result.status} after {timeout_seconds:g} s")
        block = max(1, int(left * 1000))
        [reply] = yield Ask([_xread(keys.rq_results(job_id), last_id, "BLOCK", block)])
        if entries := _entries(reply):
            last_id = entries[-1][0].decode()


def _job(job_id: str) -> Generator[Ask, Any, JobResult | None]:
    """Ask how a job stands; None when the server does not know it."""
    status, entries = yield Ask(job_commands(job_id))
    refusal = None
    if status is None:
        [refusal] = yield Ask([refusal_command(job_id)])
    return job_result(job_id, status, entries, refusal)


def _xread(key: str, last_id: str, *options: str | int) -> tuple[str | int, ...]:
    return ("XREAD", *options, "COUNT", _PAGE_ENTRIES, "STREAMS", key, last_id)


def _entries(reply: Any) -> Entries:
    """Return the entries of the only stream that was read."""
    return next(iter(streams_of(reply).values()), [])


def streams_of(reply: Any) -> Mapping[str, Entries]:
    """Return the entries of each stream, in whichever of its shapes the client library has them."""
    streams = reply.items() if isinstance(reply, Mapping) else (reply or ())
    return {
        key.decode(): found[0] if found and isinstance(found[0], list) else found
        for key, found in streams
    }


# The server ---------------------------------------------------------------------------------


class Outage:
    """What to do when a call failed: how long to pause, and when to give up."""

    def __init__(self, reconnect: Reconnect, clock: Callable[[], float]) -> None:
        self._reconnect = reconnect
        self._clock = clock
        self._since: float | None = None
        self._pause_seconds = reconnect.first_pause_seconds

    def end(self) -> None:
        """The server has answered."""
        self._since, self._pause_seconds = None, self._reconnect.first_pause_seconds

    def next_pause(self, error: RedisError) -> float:
        """Return how many seconds to wait after an error.

        Raises:
            ServerUnavailable: it was waited for long enough.
        """
        now, settings = self._clock(), self._reconnect
        if self._since is None:
            self._since = now
            if settings.on_outage is not None:
                settings.on_outage(error)
        pause = self._pause_seconds
        if settings.give_up_seconds is not None:
            left = self._since + settings.give_up_seconds - now
            if left <= 0:
                self.end()
                raise ServerUnavailable(
                    f"the Redis server did not answer for {settings.give_up_seconds:g} s ({error});"
                    " when it is back, go on from the reader's cursor"
                ) from error
            pause = min(pause, left)
        self._pause_seconds = min(2 * self._pause_seconds, settings.most_pause_seconds)
        return pause


class Server:
    """Asks a server, and waits for it while it is away."""

    def __init__(self, connection: Redis, reconnect: Reconnect, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._outage = Outage(reconnect, clock)
        self.block_seconds = _block_seconds(connection)

    def next_item(self, dialogue: Dialogue[_Item]) -> _Item | None:
        """Carry a dialogue on to its next item; None at its end."""
        while isinstance(step := dialogue.step(), Ask):
            if step.pause_seconds:
                time.sleep(step.pause_seconds)
            try:
                with self._connection.pipeline(transaction=False) as pipeline:
                    replies = send_all(pipeline, step.commands).execute(raise_on_error=False)
                dialogue.answer(_checked(step, replies))
                self._outage.end()
            except (RedisConnectionError, RedisTimeoutError) as error:
                time.sleep(self._outage.next_pause(_temporary(error)))
        return step


class AsyncServer:
    """`Server` for asyncio. A step that is cancelled leaves its question open."""

    def __init__(
        self, connection: AsyncRedis, reconnect: Reconnect, clock: Callable[[], float]
    ) -> None:
        self._connection = connection
        self._outage = Outage(reconnect, clock)
        self.block_seconds = _block_seconds(connection)

    async def next_item(self, dialogue: Dialogue[_Item]) -> _Item | None:
        """Carry a dialogue on to its next item; None at its end."""
        while isinstance(step := dialogue.step(), Ask):
            if step.pause_seconds:
                await asyncio.sleep(step.pause_seconds)
            try:
                async with self._connection.pipeline(transaction=False) as pipeline:
                    replies = await send_all(pipeline, step.commands).execute(raise_on_error=False)
                dialogue.answer(_checked(step, replies))
                self._outage.end()
            except (RedisConnectionError, RedisTimeoutError) as error:
                await asyncio.sleep(self._outage.next_pause(_temporary(error)))
        return step


def _checked(ask: Ask, replies: Sequence[Any]) -> list[Any]:
    """Return replies as bytes; raise the first error among them that matters.

    A server that takes no writes, because it is full or a replica, is no reason not to read: the
    text of a job that does not stream then comes with its result.
    """
    for command, reply in zip(ask.commands, replies, strict=True):
        is_write_refused = isinstance(reply, OutOfMemoryError | ReadOnlyError)
        if isinstance(reply, Exception) and not (is_write_refused and command[0] == "SET"):
            raise reply
    return [_as_bytes(reply) for reply in replies]


def _as_bytes(reply: Any) -> Any:
    match reply:
        case str():
            return reply.encode()
        case Mapping():
            return {_as_bytes(key): _as_bytes(value) for key, value in reply.items()}
        case list() | tuple():
            return type(reply)(map(_as_bytes, reply))
    return reply


def _temporary(error: RedisError) -> RedisError:
    """Return an error that passes by itself; raise one that does not."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        raise error
    return error


def _block_seconds(connection: Redis | AsyncRedis) -> float:
    """Return how long a command may block: well below what the connection waits for an answer."""
    timeout = connection.connection_pool.connection_kwargs.get("socket_timeout")
    return _BLOCK_SECONDS if timeout is None else min(_BLOCK_SECONDS, timeout / 2)
