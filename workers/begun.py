"""Which executions have begun: notes that a supervisor reads when their process is dead.

They are in memory that both processes map, so a note costs no system call, and one that was made is
there whatever ends the process a moment later.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


_RECORD_BYTES = 32  # an execution's id
_EMPTY = bytes(_RECORD_BYTES)
# The first record says whether one had no room.
_FIRST = _RECORD_BYTES
_OVERFLOW = b"\1"
_MOST_PREPARING = 64


class BegunNotes:
    """The child's side. Any thread may call it.

    Args:
        memory: None notes nothing.
    """

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._memory = memory
        size = 0 if memory is None else len(memory)
        self._free = list(range(_FIRST, size, _RECORD_BYTES))
        self._places: dict[str, int] = {}

    @classmethod
    def of_file(cls, file_number: int | None) -> BegunNotes:
        """Return notes in a file that the supervisor has opened; None notes nothing."""
        if file_number is None:
            return cls()
        memory = mmap.mmap(file_number, os.fstat(file_number).st_size)
        os.close(file_number)
        return cls(memory)

    def begin(self, execution_id: str) -> None:
        """Note one that is not noted, before anything is done that could end the process."""
        if self._memory is None:
            return
        if not self._free:
            self._memory[: len(_OVERFLOW)] = _OVERFLOW
            return
        place = self._free.pop()
        self._places[execution_id] = place
        self._memory[place : place + _RECORD_BYTES] = execution_id.encode().ljust(
            _RECORD_BYTES, b"\0"
        )

    def end(self, execution_id: str) -> None:
        """Forget one that has ended, or that waits; nothing happens when it is not noted."""
        place = self._places.pop(execution_id, None)
        if place is None or self._memory is None:
            return
        self._memory[place : place + _RECORD_BYTES] = _EMPTY
        self._free.append(place)


class BegunFile:
    """The supervisor's side: a file of its own for one child.

    Attributes:
        number: of the open file, which the child inherits.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def read(self) -> frozenset[str] | None:
        """Return the executions that had begun and not ended; None when nobody can tell."""
        data = os.pread(self.number, os.fstat(self.number).st_size, 0)
        if data.startswith(_OVERFLOW):
            return None
        records = (data[i : i + _RECORD_BYTES] for i in range(_FIRST, len(data), _RECORD_BYTES))
        return frozenset(record.rstrip(b"\0").decode() for record in records if record != _EMPTY)


@contextmanager
def begun_file(most_with_engine: int) -> Iterator[BegunFile | None]:
    """Make a file without a name for the notes of one child; None when there is no room for it.

    Args:
        most_with_engine: jobs that the engine has at a time; some more are being prepared.
    """
    num_records = 1 + most_with_engine + _MOST_PREPARING
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile(buffering=0))
            # Written, not only made as long: a disk that is full later would end the child.
            file.write(bytes(num_records * _RECORD_BYTES))
        except OSError as error:
            logger.warning("no notes of what has begun: every job pays for a death (%s)", error)
            yield None
            return
        yield BegunFile(file.fileno())
