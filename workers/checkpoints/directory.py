"""The store of checkpoints on disk: it outlasts the process, and several processes may share it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from workers.checkpoints.folders import MODEL_FILE, NAMESPACE_FILE, CacheRoot, SegmentFolder
from workers.checkpoints.index import Entry, Match
from workers.checkpoints.records import Identity, Segment
from workers.checkpoints.segment_file import BadSegment, read_header, read_segment, write_segment
from workers.checkpoints.store import Restored, Tally, entry_of, latest_prompts

logger = logging.getLogger(__name__)

_DEFAULT_BUDGET_BYTES = 50_000_000_000
_DEFAULT_SHARE = 0.1
# Of the volume, what stays free for others.
_FREE_SHARE = 0.1
# After something could not be written.
_RETRY_SECONDS = 30.0
# How often at most a file's time is set to that of its last use.
_TOUCH_SECONDS = 60.0
# A file's header and tokens beside its arrays, at most.
_OVERHEAD_BYTES: Final = 1 << 16


class Volume(Protocol):
    """What a file system holds, in bytes."""

    @property
    def total(self) -> int:
        """Its size."""

    @property
    def free(self) -> int:
        """What can be written."""


def default_budget(root: Path, volume: Callable[[Path], Volume] = shutil.disk_usage) -> int:
    """Return the bytes that a store takes where nobody says: a tenth of the volume, 50 GB at most.

    Raises:
        OSError: the file system does not say how large it is.
    """
    there = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    return min(_DEFAULT_BUDGET_BYTES, int(volume(there).total * _DEFAULT_SHARE))


class DirectoryStore:
    """Segments as files under a root that other processes, and other namespaces, share.

    Nothing here is synced to the disk: what a crash of the machine leaves half written is found by
    its checksums, and deleted.

    Args:
        root: is made where it is missing; not again while the store is open, so that an unmounted
            volume is not written beside.
        identity: of the namespace.
        budget_bytes: for the files of all namespaces under the root.
        model: what the model is called, told to whoever looks at the store; None where it has no
            name. The first name stays.
        clock: the time of files, in seconds.
        volume: tells the size of a file system and what is free.
        executor: compresses and decodes on its threads, never one that calls this store.
    """

    def __init__(
        self,
        root: Path,
        identity: Identity,
        budget_bytes: int,
        *,
        model: str | None = None,
        clock: Callable[[], float] = time.time,
        volume: Callable[[Path], Volume] = shutil.disk_usage,
        executor: Executor | None = None,
    ) -> None:
        self.namespace = identity.namespace
        self._model = model
        self._identity = identity.canonical()
        self._budget = budget_bytes
        self._clock = clock
        self._volume = volume
        self._executor = executor
        self._lock = threading.RLock()
        self._tally = Tally()
        self._root = CacheRoot(root, self._delete_bad)
        self._folder = self._root.folder(self.namespace)
        self._is_open = False  # the folder is there, and ours
        self._is_foreign = False  # the folder stands for something else
        self._retry_at: float | None = None
        self._touched: dict[bytes, float] = {}
        with self._writing("open"):
            root.mkdir(parents=True, exist_ok=True)
            self._open()

    def match(self, tokens: Sequence[int]) -> Match:
        """Return the deepest restore point that leaves a prompt at least one token to feed."""
        with self._lock:
            return self._folder.index.match(tokens) if self._is_readable() else Match()

    def covers(self, tokens: Sequence[int]) -> int:
        """Return from which token on a prompt's segments are worth putting."""
        with self._lock:
            return self._folder.index.covers(tokens) if self._is_readable() else 0

    def read(self, match: Match) -> Restored:
        """Return the segments of a match; where one is gone or bad, the most that others hold."""
        segments: dict[Entry, Segment] = {}
        with contextlib.ExitStack() as stack:
            files: dict[Entry, BinaryIO] = {}
            while match.parts:
                if self._read_all(match, segments, files, stack):
                    of_match = (segments[part.entry] for part in match.parts)
                    return Restored.of(match, of_match, self.namespace)
                with self._lock:
                    match = self._folder.index.match_bytes(match.tokens, match.length)
        return Restored()

    def put(self, segment: Segment) -> int | None:
        """Keep a segment: see :meth:`CheckpointStore.put`.

        Raises:
            ValueError: it contradicts itself.
        """
        if self._is_foreign:
            self._tally.add("refused_namespace")
            return None
        if self._retry_at is not None and self._clock() < self._retry_at:
            self._tally.add("refused_not_writable")
            return None
        num_bytes: int | None = None
        with self._writing("write"):
            self._open()
            if not self._is_foreign:
                with self._root.locked():
                    num_bytes = self._put(segment)
        if num_bytes:
            self._tally.add("writes")
            self._tally.add("written_bytes", num_bytes)
        return num_bytes

    def note_use(self, match: Match) -> None:
        """Count the use of a match; the files' times tell other processes, once a minute."""
        self._tally.add("uses")
        self._tally.add("used_tokens", match.length)
        with self._lock:
            now = self._clock()
            for entry in (part.entry for part in match.parts):
                if self._folder.index.get(entry.digest) is None:
                    continue
                self._root.worth.note_use(entry, now)
                if now - self._touched.get(entry.digest, 0.0) >= _TOUCH_SECONDS:
                    self._touched[entry.digest] = now
                    with contextlib.suppress(OSError):
                        os.utime(self._folder.file_of(entry), (now, now))

    def latest(self, count: int) -> list[list[int]]:
        """Return the prompts that were stored or used last, the newest first."""
        with self._lock:
            if not self._is_readable():
                return []
            return latest_prompts(self._folder.index, self._root.worth, count)

    def counts(self) -> dict[str, int]:
        """Return what has happened so far, by name."""
        return self._tally.counts()

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    # Reading --------------------------------------------------------------------------------

    def _is_readable(self) -> bool:
        """Learn what others wrote; False while the folder is not there, or not ours."""
        if not self._is_open:
            return False
        try:
            self._folder.refresh()
        except FileNotFoundError:
            return False
        except OSError:
            self._tally.add("list_errors")  # what is known may still be there
        return True

    def _read_all(
        self,
        match: Match,
        segments: dict[Entry, Segment],
        files: dict[Entry, BinaryIO],
        stack: contextlib.ExitStack,
    ) -> bool:
        """Read what is missing of a match; False where one is of no use and was forgotten."""
        entries = [part.entry for part in match.parts if part.entry not in segments]
        # All first: nothing that is deleted from now on is missed.
        for entry in entries:
            if entry not in files:
                try:
                    files[entry] = stack.enter_context(self._folder.file_of(entry).open("rb"))
                except OSError as error:
                    is_gone = isinstance(error, FileNotFoundError)
                    self._forget(entry, "vanished" if is_gone else "unreadable")
                    return False
        tokens = match.tokens
        for entry in entries:
            file = files[entry]
            try:
                header = read_header(file)
                if (header.start, header.parent) != (entry.start, entry.parent):
                    self._forget(entry, "replaced")  # by one of the same end, as good as it is
                    return False
                segments[entry] = read_segment(
                    file,
                    self.namespace,
                    before=tokens[: 4 * entry.start],
                    executor=self._executor,
                )
            except (BadSegment, OSError) as error:
                self._forget(entry, "damaged" if isinstance(error, BadSegment) else "unreadable")
                logger.warning("a checkpoint is deleted: %s", error)
                with contextlib.suppress(OSError):
                    self._folder.file_of(entry).unlink()
                return False
        return True

    def _forget(self, entry: Entry, reason: str) -> None:
        self._tally.add(f"bad_{reason}")
        with self._lock:
            if self._folder.index.get(entry.digest) is entry:
                self._folder.forget(entry)
                self._folder.read_again()

    def _delete_bad(self, folder: SegmentFolder, bad: BadSegment) -> None:
        self._tally.add("bad_header")
        logger.warning("a checkpoint is deleted: %s", bad)
        with contextlib.suppress(OSError):
            bad.path.unlink()

    # Writing --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Do without what cannot be written, and say so once until it works again."""
        try:
            yield
        except OSError as error:
            self._tally.add(f"{what}_errors")
            if self._retry_at is None:
                logger.warning("checkpoints cannot be stored, and are not: %s", error)
            self._retry_at = self._clock() + _RETRY_SECONDS
        else:
            if self._retry_at is not None:
                logger.info("checkpoints can be stored again")
            self._retry_at = None

    def _open(self) -> None:
        """See that the folder is there and stands for what it should."""
        with self._lock:
            path = self._folder.path
            if self._is_open and path.exists():
                return
            for folder in (self._root.path, self._root.versioned, path):
                with contextlib.suppress(FileExistsError):
                    folder.mkdir()
            facts = path / NAMESPACE_FILE
            _write_once(facts, self._identity)
            self._is_foreign = facts.read_text(encoding="utf-8", errors="replace") != self._identity
            if self._is_foreign:
                logger.warning("checkpoints are not used: %s stands for another model", facts)
                return
            if self._model is not None:
                with contextlib.suppress(OSError):  # what can only be read is of use without it
                    _write_once(path / MODEL_FILE, self._model)
            self._is_open = True
            self._root.remove_leftovers(self._clock())
            self._root.refresh()

    def _put(self, segment: Segment) -> int | None:
        """Keep a segment, under the root's lock."""
        with self._lock:
            self._root.refresh()
            index = self._folder.index
            known = index.get(segment.digest)
            if known is not None:
                if index.tokens_to(segment.digest) is not None:
                    return 0
                # What it follows is gone: it is in the way of one that can be reached.
                self._folder.file_of(known).unlink(missing_ok=True)
                self._folder.forget(known)
            entry = entry_of(segment, index, num_bytes=0)
            if entry is None:
                self._tally.add("refused_no_parent")
                return None
            most_bytes = segment.nbytes + 4 * len(segment.tokens) + _OVERHEAD_BYTES
            if not self._make_room(most_bytes, segment.parent):
                self._tally.add("refused_no_room")
                return None
        _, num_bytes = write_segment(
            self._folder.path,
            segment,
            self.namespace,
            blocks=entry.blocks,
            created=self._clock(),
            origin={"host": socket.gethostname()},
            executor=self._executor,
        )
        if not num_bytes:  # somebody has put it there without a lock; the next look finds it
            return 0
        with self._lock:
            self._folder.add(replace(entry, num_bytes=num_bytes), self._clock())
        return num_bytes

    def _make_room(self, num_bytes: int, keep: bytes) -> bool:
        volume = self._volume(self._root.path)
        spare = volume.free - int(volume.total * _FREE_SHARE)
        budget = min(self._budget, self._root.num_bytes + spare)
        if num_bytes > budget:
            return False
        gone = self._root.evict(self._root.num_bytes + num_bytes - budget, keep=keep)
        for entry in gone:
            self._touched.pop(entry.digest, None)
            self._tally.add("evictions")
            self._tally.add("evicted_bytes", entry.num_bytes)
        return self._root.num_bytes + num_bytes <= budget


def _write_once(path: Path, text: str) -> None:
    """Write a file that is not there yet; others see all of it or nothing."""
    if not path.exists():
        beside = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8", errors="replace")
        beside.replace(path)
