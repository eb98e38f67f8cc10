"""Puts a batch file into the queue, once however often it is done."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redis import Redis
from redis.exceptions import ResponseError
from rq.utils import now, utcformat

from queue_service import keys
from queue_service.batch_file import BatchFile, BatchLine, digest_file, raw_lines, read_batch
from queue_service.batches import Batch, Batches, Status
from queue_service.connection import connect
from queue_service.errors import BatchConflict, BatchFileError, LineError
from queue_service.payload import encode_call, json_bytes
from queue_service.prefix_plan import Mark, PrefixPlan, plan_prefixes
from queue_service.requests import Endpoint
from queue_service.scripts import Arg, Scripts
from queue_service.settings import RedisSettings, RetentionSettings, SubmitSettings

if TYPE_CHECKING:
    from queue_service.spans import Spans

_DISK_TIMEOUT_MS = 4000
_ROOM_POLL_SECONDS = 0.2
_LINES_BETWEEN_STOPS = 1000
_MOST_SHOWN_ERRORS = 20


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """How a file is submitted.

    Attributes:
        queue: where the lines wait.
        model: the model that will answer, for people to read.
        key: tells two submissions of the same content apart.
        stream: every line's text goes to its job's stream as it comes.
        trace: every line's trace is kept, for `qsvc trace`.
        strict: one bad line refuses the whole file before anything is queued.
        expires_in_seconds: lines that have not ended by then are given up.
        metadata: the caller's own words, kept with the batch.
    """

    queue: str
    model: str
    key: str = ""
    stream: bool = False
    trace: bool = False
    strict: bool = False
    expires_in_seconds: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    submit: SubmitSettings = field(default_factory=SubmitSettings.load)
    retention: RetentionSettings = field(default_factory=RetentionSettings.load)


@dataclass(frozen=True, slots=True)
class Submission:
    """What came of a submit; ``is_new`` is False when the same file was submitted before."""

    batch: Batch
    is_new: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """What a submit of a file would find.

    Attributes:
        first_errors: what is wrong with the first bad lines.
        plan: which lines begin alike; None where that is not looked for.
    """

    num_lines: int
    num_errors: int
    first_errors: Sequence[str]
    plan: PrefixPlan | None


def batch_id_of(file: BatchFile, *, queue: str, key: str = "") -> str:
    """Return the id that a file's batch has or would have."""
    return keys.batch_id(digest=digest_file(file), queue=queue, key=key)


def submit_file(
    connection: Redis,
    file: BatchFile,
    options: SubmitOptions,
    *,
    spans: Spans | None = None,
    on_progress: Callable[[int], None] = lambda num_lines: None,
    on_plan: Callable[[PrefixPlan], None] = lambda plan: None,
) -> Submission:
    """Queue every good line of a file and record an error for every bad one.

    Run again with the same file, queue and key it adds what is missing and nothing twice,
    also while another submit of the same file runs.

    Args:
        spans: as for `Feeder`.
        on_progress: told how many lines have been read.
        on_plan: told which lines begin alike, where that was looked for.

    Raises:
        BatchFileError: the file is empty or unreadable, or strict and has a bad line; nothing
            was queued.
        BatchConflict: the key was used for other content; nothing was queued.
    """
    feeder = Feeder(connection, file, options, spans)
    feeder.feed(connection, on_progress=on_progress, on_plan=on_plan)
    return Submission(Batches(connection).get(feeder.batch_id), feeder.is_new)


def preview(file: BatchFile, submit: SubmitSettings, *, strict: bool = False) -> Preview:
    """Read a file as a submit would.

    Raises:
        BatchFileError: the file is empty or unreadable, or strict and has a bad line.
    """
    if strict:
        _refuse_bad_lines(file, submit.max_lines)
    num_lines = num_errors = 0
    first_errors: list[str] = []
    for line in read_batch(file, max_lines=submit.max_lines):
        num_lines += 1
        if isinstance(line, LineError):
            num_errors += 1
            if num_errors <= _MOST_SHOWN_ERRORS:
                first_errors.append(_described(line))
    plan = plan_prefixes(lambda: raw_lines(file)) if submit.plan else None
    return Preview(num_lines, num_errors, first_errors, plan)


class Feeder:
    """Makes a file's batch and feeds its lines, in two steps so that the second can take long.

    Args:
        file: read from its start by each step.
        spans: with it, each line's tree of spans begins here; None: nobody collects them.

    Raises:
        BatchFileError: as for ``submit_file``.
        BatchConflict: as for ``submit_file``.
    """

    def __init__(
        self,
        connection: Redis,
        file: BatchFile,
        options: SubmitOptions,
        spans: Spans | None = None,
    ) -> None:
        self._file = file
        self._options = options
        self._spans = spans
        self._plan = PrefixPlan()
        self.batch_id = batch_id_of(file, queue=options.queue, key=options.key)
        endpoint = self._endpoint()
        if options.strict:
            _refuse_bad_lines(file, options.submit.max_lines)
        if options.key:  # last: a file that is refused must not take the key from the right one
            _check_key(connection, options, self.batch_id)
        self.is_new = Batches(connection).create(
            self.batch_id,
            endpoint=endpoint,
            queue=options.queue,
            model=options.model,
            retention_seconds=options.retention.result_seconds,
            expires_in_seconds=options.expires_in_seconds,
            metadata=options.metadata,
        )

    def feed(
        self,
        connection: Redis,
        *,
        on_progress: Callable[[int], None] = lambda num_lines: None,
        on_plan: Callable[[PrefixPlan], None] = lambda plan: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Queue the lines that are missing; waits while the server holds enough of them.

        Lines that begin alike are looked for first, so that each is queued with its mark.

        Args:
            on_plan: told what was found; not where nothing is missing, or nobody wants to know.
            should_stop: asked now and then; when it says so, the rest is left for another time.
        """
        if self._options.submit.plan and not self._is_submitted(connection):
            self._plan = plan_prefixes(lambda: self._lines_until(should_stop))
            on_plan(self._plan)
        with ThreadPoolExecutor(1, thread_name_prefix="enqueue") as sender:
            while not self._feed(connection, sender, on_progress, should_stop):
                pass

    def _is_submitted(self, connection: Redis) -> bool:
        return connection.hget(keys.batch(self.batch_id), "submitted") == b"1"

    def _lines_until(self, should_stop: Callable[[], bool]) -> Iterator[tuple[int, bytes | None]]:
        for index, line in enumerate(raw_lines(self._file)):
            if index % _LINES_BETWEEN_STOPS == 0 and should_stop():
                return
            yield line

    def _feed(
        self,
        connection: Redis,
        sender: ThreadPoolExecutor,
        on_progress: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> bool:
        """Read the file once; False when lines are missing that the server had taken before."""
        scripts = Scripts(connection)
        queue = self._options.queue
        script_keys = [
            f"{keys.RQ}:queues",
            keys.rq_queue(queue),
            keys.rq_queue(keys.lane(queue, self.batch_id)),
            keys.lanes(queue),
            keys.batch(self.batch_id),
            keys.batch_lines(self.batch_id),
            keys.batch_errors(self.batch_id),
        ]
        cursor = int(connection.hget(keys.batch(self.batch_id), "cursor") or 0)
        calls: deque[Future[Any]] = deque()
        for num_lines, is_last, args in self._chunks(cursor):
            calls.append(sender.submit(scripts.call, "enqueue", script_keys, args))
            # The server works on one chunk while the next is being made.
            while len(calls) > 1 or (calls and is_last):
                status, waiting = calls.popleft().result()
                if status == b"gap":
                    return False
                if status != b"in_progress" or should_stop():
                    return True  # cancelled meanwhile, or submitted to its end by somebody else
                on_progress(num_lines)
                if not is_last:
                    self._await_room(connection, waiting, should_stop)
        return True

    def _chunks(self, cursor: int) -> Iterator[tuple[int, bool, list[Arg]]]:
        """Yield lines read so far, whether it is the last chunk, and the script's arguments.

        Lines up to the cursor were added before and are left out.
        """
        options = self._options
        lines = read_batch(self._file, max_lines=options.submit.max_lines)
        num_lines = last_line = 0
        # One line ahead, so that the last chunk is known to be the last.
        pending = next(lines, None)
        while pending is not None:
            args: list[Arg] = []
            line_before = last_line
            for _ in range(options.submit.chunk_lines):
                if pending is None:
                    break
                mark = self._plan.mark(num_lines)
                num_lines += 1
                last_line = pending.line
                if pending.line > cursor:
                    args += _line_args(pending, self.batch_id, options, mark, self._spans)
                pending = next(lines, None)
            is_last = pending is None
            if args or is_last:
                head: list[Arg] = [
                    self.batch_id,
                    options.queue,
                    utcformat(now()),
                    f"batch line · {options.model}",
                    keys.FORMAT_VERSION,
                    "1" if options.stream else "0",
                    last_line,
                    "1" if is_last else "0",
                    line_before,
                    "1" if options.trace else "0",
                ]
                yield num_lines, is_last, head + args

    def _endpoint(self) -> Endpoint:
        """Return the endpoint of the first good line; an empty file raises here."""
        for line in read_batch(self._file, max_lines=self._options.submit.max_lines):
            if isinstance(line, BatchLine):
                return line.endpoint
        return Endpoint.CHAT

    def _await_room(self, connection: Redis, waiting: int, should_stop: Callable[[], bool]) -> None:
        if waiting < self._options.submit.window_lines:
            return
        batches = Batches(connection)
        while waiting >= self._options.submit.window_lines and not should_stop():
            time.sleep(_ROOM_POLL_SECONDS)
            batch = batches.get(self.batch_id)
            if batch.status is not Status.IN_PROGRESS:
                return
            waiting = batch.total - batch.ended


@contextlib.contextmanager
def feeding(
    feeder: Feeder,
    redis: RedisSettings,
    *,
    on_plan: Callable[[PrefixPlan], None],
    on_failure: Callable[[Exception], None],
    should_stop: Callable[[], bool],
) -> Iterator[None]:
    """Feed a batch on a thread of its own: a large file takes as long as its answers.

    The end of the block ends it, whatever is left of the file.

    Args:
        on_plan, should_stop: as for `Feeder.feed`; called on that thread.
        on_failure: told, on that thread, what ended it before its time.
    """
    has_ended = threading.Event()

    def feed() -> None:
        try:
            with contextlib.closing(connect(redis)) as connection:
                feeder.feed(
                    connection,
                    on_plan=on_plan,
                    should_stop=lambda: has_ended.is_set() or should_stop(),
                )
        except Exception as error:  # the top of the thread: its owner decides
            on_failure(error)

    thread = threading.Thread(target=feed, name="feeder")
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def wait_for_disk(connection: Redis) -> bool:
    """Wait until all that was written before is on the server's disk; False if unknown.

    The server answers only for what came over the same connection, and a pool has several: so
    one more write goes with the question, behind all that was written before.
    """
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.set(keys.synced(), "1", ex=60)
        pipeline.waitaof(1, 0, _DISK_TIMEOUT_MS)
        _, reply = pipeline.execute(raise_on_error=False)
    # An older server, or one without an append-only file, answers with an error.
    return not isinstance(reply, ResponseError) and bool(reply[0])


def _check_key(connection: Redis, options: SubmitOptions, batch_id: str) -> None:
    """Refuse a key that stands for other content on this queue."""
    name = keys.submit_key(options.queue, options.key)
    keep = options.retention.result_seconds
    connection.set(name, batch_id, nx=True, ex=keep)
    known = connection.get(name)
    if known is not None and known != batch_id.encode():
        raise BatchConflict(
            f"key {options.key!r} was used for a file with other content "
            f"({known.decode() if isinstance(known, bytes) else known}); use another key, or "
            "submit that file again to see its batch"
        )


def _refuse_bad_lines(file: BatchFile, max_lines: int | None) -> None:
    count = 0
    shown: list[str] = []
    for line in read_batch(file, max_lines=max_lines):
        if isinstance(line, LineError):
            count += 1
            if count <= _MOST_SHOWN_ERRORS:
                shown.append(f"  {_described(line)}")
    if not count:
        return
    if count > len(shown):
        shown.append(f"  and {count - len(shown)} more")
    raise BatchFileError(
        f"{file.name}: {count} bad lines, nothing was queued:\n" + "\n".join(shown)
    )


def _described(error: LineError) -> str:
    return f"line {error.line}: {error.code}: {error.message}"


def _line_args(
    line: BatchLine | LineError,
    batch_id: str,
    options: SubmitOptions,
    mark: Mark | None,
    spans: Spans | None,
) -> list[Arg]:
    custom_id = line.custom_id or ""
    if isinstance(line, LineError):
        error = {
            **line.to_error(),
            "status_code": line.status_code,
            "line": line.line,
            "custom_id": line.custom_id,
        }
        return [line.line, custom_id, "", "", json.dumps(error, ensure_ascii=False), ""]
    meta = {"batch": batch_id, "custom_id": custom_id, "model": options.model}
    if spans is not None:
        meta |= spans.create(keys.job_id(batch_id, line.line), options.queue)
    return [
        line.line,
        custom_id,
        json_bytes(meta),
        encode_call(line.endpoint.function, line.body),
        "",
        "" if mark is None else str(mark),
    ]
