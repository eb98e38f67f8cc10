"""Writes a batch's output lines to a file that grows, and goes on in it after any crash.

The file itself says how far it is: its lines carry the ids of the batch's lines. A last line
without its end was torn by a crash and is cut off; a file with anything else in it is refused.
A failure that was written and whose request was run again since is written again, and so is all
behind it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from redis import Redis

from queue_service import keys
from queue_service.batches import Batches, LineRef
from queue_service.errors import ConfigurationError
from queue_service.responses import output_line_id
from queue_service.results import BatchReader, custom_ids

PAGE_LINES = 200
_SHOWN_FAILURES = 3


class OutputFile:
    """A JSONL file of output lines, appended in groups.

    Args:
        path: made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if str(path) == "-" or path.is_fifo() or path.is_char_device() or path.is_socket():
                raise ConfigurationError(
                    "results go to a file, not to standard output or a pipe: the file says how far "
                    "they are; name one with -o"
                )
            self._file: BinaryIO = path.open("ab+")
        except OSError as exc:
            raise ConfigurationError(f"cannot write {path}: {exc.strerror}") from exc
        _sync_folder(path.parent)

    def written(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each complete line and the offset just behind it; stops at what is no line."""
        self._file.seek(0)
        offset = 0
        for raw in self._file:
            offset += len(raw)
            if not raw.endswith(b"\n"):
                return
            try:
                line = json.loads(raw)
            except ValueError:
                return
            if not isinstance(line, dict):
                return
            yield line, offset

    def is_torn_at(self, offset: int, start: bytes) -> bool:
        """Whether nothing follows but a part of one line that begins with ``start``."""
        self._file.seek(offset)
        rest = self._file.readline()
        return not rest.endswith(b"\n") and start.startswith(rest[: len(start)])

    def truncate(self, size: int) -> None:
        """Cut the file to this many bytes and go on from there."""
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write lines and return when they are on disk."""
        if not lines:
            return
        data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        try:
            self._file.write(data.encode("utf-8", "replace"))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as exc:
            raise ConfigurationError(
                f"cannot write {self.path}: {exc.strerror}; nothing is lost: make room, then run "
                "the same command again"
            ) from exc

    def move_to(self, path: Path) -> None:
        """Go on under another name, in the place of what has it."""
        try:
            self.path.replace(path)
        except OSError as exc:
            raise ConfigurationError(f"cannot write {path}: {exc.strerror}") from exc
        self.path = path
        _sync_folder(path.parent)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LineOrder(Protocol):
    """The lines of a batch in the order in which they are written."""

    def peek(self, count: int) -> list[LineRef]:
        """Return up to ``count`` lines from the current position."""

    def skip(self, count: int) -> None:
        """Move the position behind the first ``count`` lines that ``peek`` returned last."""


class InputOrder:
    """The order of the input file."""

    def __init__(self, connection: Redis, batch_id: str) -> None:
        self._batches = Batches(connection)
        self._batch_id = batch_id
        self._position = 0

    def peek(self, count: int) -> list[LineRef]:
        """Return up to ``count`` lines from the current position."""
        return self._batches.lines(self._batch_id, start=self._position, count=count)

    def skip(self, count: int) -> None:
        """Move the position behind the first ``count`` lines that ``peek`` returned last."""
        self._position += count


class CompletionOrder:
    """The order in which the lines ended."""

    def __init__(self, connection: Redis, batch_id: str) -> None:
        self._connection = connection
        self._batch_id = batch_id
        self._last_id = b"-"
        self._ids: list[bytes] = []

    def peek(self, count: int) -> list[LineRef]:
        """Return up to ``count`` lines from the current position."""
        start = self._last_id if self._last_id == b"-" else b"(" + self._last_id
        done = keys.batch_done(self._batch_id)
        entries: Any = self._connection.xrange(done, min=start, count=count)
        self._ids = [entry_id for entry_id, _ in entries]
        return custom_ids(self._connection, self._batch_id, [int(f[b"l"]) for _, f in entries])

    def skip(self, count: int) -> None:
        """Move the position behind the first ``count`` lines that ``peek`` returned last."""
        if count:
            self._last_id = self._ids[count - 1]


class BatchOutput:
    """Brings a batch's results into its output file, or two when errors have their own.

    Args:
        order: the lines as they come in the file.
        output: takes the lines.
        errors: takes the lines without an answer; None puts them into the output too.
        on_written: told which lines are on disk now, group by group.

    Raises:
        ConfigurationError: both are the same file.
    """

    def __init__(
        self,
        reader: BatchReader,
        order: LineOrder,
        output: OutputFile,
        errors: OutputFile | None = None,
        *,
        on_written: Callable[[Sequence[LineRef]], None] = lambda refs: None,
    ) -> None:
        if errors is not None and errors.path.samefile(output.path):
            raise ConfigurationError(
                f"{output.path} cannot take results and errors as two files; leave the file for "
                "errors out to have both in one"
            )
        self._reader = reader
        self._order = order
        self._output = output
        self._errors = errors
        self._on_written = on_written
        self.num_written = 0
        self.num_failures = 0
        self.first_failures: list[str] = []

    def resume(self) -> int:
        """Find how far the files are, cut off the rest, and return how many lines are there.

        Raises:
            ConfigurationError: a file holds something else than lines of this batch.
        """
        heads = [_Head(file) for file in (self._output, self._errors) if file is not None]
        is_behind = False
        while not is_behind and (refs := self._order.peek(PAGE_LINES)):
            taken = 0
            for ref in refs:
                line_id = output_line_id(self._reader.job_id(ref))
                head = next((h for h in heads if h.line_id == line_id), None)
                if head is None or self._is_outdated(head):
                    is_behind = True
                    break
                head.take()
                taken += 1
            self._order.skip(taken)
            self.num_written += taken
        # A crash between the writes to two files leaves one ahead; its surplus comes again.
        may_be_cut = len(heads) > 1 or any(self._is_outdated(head) for head in heads)
        for head in heads:
            if not head.is_of(self._prefix, may_be_cut=may_be_cut):
                raise ConfigurationError(
                    f"{head.file.path} holds something else than this batch's results in this "
                    "order; move it away, or name another file"
                )
        for head in heads:
            head.file.truncate(head.end)
        return self.num_written

    def advance(self) -> int:
        """Write the lines that have ended and can be written now, up to PAGE_LINES of them.

        Returns:
            How many were written.
        """
        refs = self._order.peek(PAGE_LINES)
        lines = self._reader.read_ended(refs)
        if self._errors is None:
            self._output.append(lines)
        else:
            self._output.append([line for line in lines if line["error"] is None])
            self._errors.append([line for line in lines if line["error"] is not None])
        for ref, line in zip(refs, lines, strict=False):
            if (error := line["error"]) is None:
                continue
            self.num_failures += 1
            if len(self.first_failures) < _SHOWN_FAILURES:
                name = line["custom_id"] or f"line {ref.line}"
                self.first_failures.append(f"{name}: {error['code']}: {error['message']}")
        self._order.skip(len(lines))
        self.num_written += len(lines)
        if lines:
            self._on_written(refs[: len(lines)])
        return len(lines)

    @property
    def _prefix(self) -> str:
        """What the ids of the batch's output lines begin with."""
        return output_line_id(self._reader.job_id(LineRef(0, ""))).removesuffix("0")

    def _is_outdated(self, head: _Head) -> bool:
        """Whether a written line is a failure of this batch whose request was run again since."""
        number = (head.line_id or "").removeprefix(self._prefix)
        if not number.isdecimal() or not head.is_failure:
            return False
        [now] = self._reader.read([LineRef(int(number), "")])
        return now is None or now["error"] is None


class _Head:
    """The next line of a file that may belong to the batch; ``end`` is the offset before it."""

    def __init__(self, file: OutputFile) -> None:
        self.file = file
        self.end = 0
        self._lines = file.written()
        self._step()

    def take(self) -> None:
        """Accept the line and look at the next."""
        self.end = self._next_end
        self._step()

    def _step(self) -> None:
        line, self._next_end = next(self._lines, (None, self.end))
        self.line_id = None if line is None else str(line.get("id"))
        self.is_failure = line is not None and line.get("error") is not None

    def is_of(self, prefix: str, *, may_be_cut: bool) -> bool:
        """Whether what follows may be cut off: a torn line, or whole ones if that is allowed.

        Args:
            prefix: begins the ids of the batch's lines.
        """
        if self.line_id is not None:
            return may_be_cut and self.line_id.startswith(prefix)
        start = json.dumps({"id": prefix}).removesuffix('"}').encode()
        return self.file.is_torn_at(self.end, start)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
