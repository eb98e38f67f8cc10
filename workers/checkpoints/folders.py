"""The files of a checkpoint store: a folder for each namespace, all under one root and one budget.

    <root>/v1/evict.lock              locked while a file is added or makes room
    <root>/v1/<namespace>/ns.json     what the namespace stands for
    <root>/v1/<namespace>/model.txt   what somebody called the model, for a person only
    <root>/v1/<namespace>/<end>.qkv   a segment, named by the digest of all tokens up to its end
    <root>/v1/<namespace>/tmp/        files that are being written
    <root>/v1/<namespace>/busy/       what is being computed (see announcements.py)

Segments do not change, and are there as a whole or not at all. So nobody needs a lock to read, and
a folder's time says whether files came or went.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from workers.checkpoints.eviction import Worth, victims
from workers.checkpoints.index import Entry, RadixIndex
from workers.checkpoints.segment_file import (
    SUFFIX,
    TEMPORARY_FOLDER,
    BadSegment,
    read_header,
    read_tokens,
    segment_path,
)

VERSION_FOLDER = "v1"
NAMESPACE_FILE = "ns.json"
MODEL_FILE = "model.txt"
BUSY_FOLDER = "busy"
_LOCK_FILE = "evict.lock"
NAMESPACE_NAME = r"[0-9a-f]{32}"
SEGMENT_NAME = rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}"
_LOCK_SECONDS = 10.0
_LOCK_POLL_SECONDS = 0.005
# A change within this time of another may leave a folder's time as it is.
TIME_GRAIN_NS = 100_000_000
_TEMPORARY_SECONDS = 3600.0
# A file's time is rounded, and the time when it was written is not quite that of its entry.
_OWN_TOUCH_SECONDS = 1.0


class SegmentFolder:
    """One namespace's segments, as far as this process knows; used under its owner's lock.

    Args:
        worth: is told of segments that come and go.
        on_bad: is told of a file that is no segment of this namespace.
    """

    def __init__(
        self, path: Path, worth: Worth, on_bad: Callable[[SegmentFolder, BadSegment], None]
    ) -> None:
        self.path = path
        self.index = RadixIndex(path.name)
        self._worth = worth
        self._on_bad = on_bad
        self._changed_ns: int | None = None  # the folder's time when its names were last read
        self._has_lost = False  # some follow what is gone

    def refresh(self) -> None:
        """Learn which files came and went.

        Raises:
            OSError: the folder cannot be read. When it is gone, its segments are forgotten first.
        """
        try:
            changed_ns = self.path.stat().st_mtime_ns
            if changed_ns == self._changed_ns:
                return
            names = set(os.listdir(self.path))
        except FileNotFoundError:
            self._changed_ns = None
            for entry in list(self.index):
                self.forget(entry)
            raise
        is_old = abs(time.time_ns() - changed_ns) > TIME_GRAIN_NS
        self._changed_ns = changed_ns if is_old else None
        known = {_name(entry.digest): entry for entry in self.index}
        for name in known.keys() - names:
            self.forget(known.pop(name))
        if self._has_lost:
            # One that follows what is gone makes way for one of the same end and name.
            reachable = self.index.reachable()
            for name in [name for name in known if known[name].digest not in reachable]:
                self.forget(known.pop(name))
        found: dict[Entry, float] = {}
        for name in names - known.keys():
            if re.fullmatch(SEGMENT_NAME, name):
                found |= self._read(self.path / name)
        if not known:
            self._worth.seed(found)
        for entry, used_at in found.items():
            if known:
                self._worth.add(entry, used_at)
            self.index.add(entry)
        self._has_lost = not all(self.index.has_point(entry.parent) for entry in found)

    def note_uses_of_others(self) -> None:
        """Count uses that other processes noted in the files' times."""
        for entry in self.index:
            with contextlib.suppress(OSError):
                used_at = self.file_of(entry).stat().st_mtime
                if used_at > self._worth.used_at(entry) + _OWN_TOUCH_SECONDS:
                    self._worth.note_use(entry, used_at)

    def file_of(self, entry: Entry) -> Path:
        """Return where a segment is."""
        return segment_path(self.path, entry.digest)

    def add(self, entry: Entry, now: float) -> None:
        """Take in a segment that was just written."""
        self.index.add(entry)
        self._worth.add(entry, now)

    def forget(self, entry: Entry) -> None:
        """Drop a segment that is gone, or of no use; its file stays where it is."""
        self._has_lost |= not self.index.is_leaf(entry)
        self.index.remove(entry.digest)
        self._worth.forget(entry)

    def read_again(self) -> None:
        """Read the names at the next refresh, whatever the folder's time says."""
        self._changed_ns = None

    def _read(self, path: Path) -> dict[Entry, float]:
        """Return a file's entry with the time of its last use; nothing if it is none, or gone."""
        try:
            with path.open("rb") as file:
                header = read_header(file)
                if (header.namespace, _name(header.digest)) != (self.path.name, path.name):
                    raise BadSegment(path, "its name is another segment's")
                tokens = read_tokens(file, header)
                status = os.fstat(file.fileno())
        except BadSegment as bad:
            self._on_bad(self, bad)
            return {}
        except OSError:
            return {}  # gone meanwhile, or it will be tried again
        entry = Entry(
            start=header.start,
            tokens=tokens,
            parent=header.parent,
            digest=header.digest,
            blocks=header.blocks,
            is_sliceable=header.is_sliceable,
            num_bytes=status.st_size,
            cost_seconds=header.cost_seconds,
        )
        return {entry: status.st_mtime}


class CacheRoot:
    """All namespaces under one root; used under its owner's lock.

    Args:
        path: the root; it need not exist.
        on_bad: is told of a file that is no segment of its folder's namespace.
    """

    def __init__(self, path: Path, on_bad: Callable[[SegmentFolder, BadSegment], None]) -> None:
        self.path = path
        self.worth = Worth()
        self._on_bad = on_bad
        self._folders: dict[str, SegmentFolder] = {}

    @property
    def versioned(self) -> Path:
        """The folder of this format's namespaces."""
        return self.path / VERSION_FOLDER

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments' files."""
        return sum(folder.index.num_bytes for folder in self._folders.values())

    def folder(self, namespace: str) -> SegmentFolder:
        """Return the folder of a namespace; it need not exist."""
        if namespace not in self._folders:
            self._folders[namespace] = SegmentFolder(
                self.versioned / namespace, self.worth, self._on_bad
            )
        return self._folders[namespace]

    def refresh(self) -> list[SegmentFolder]:
        """Learn what came and went in all namespaces, and return their folders.

        Raises:
            OSError: the root cannot be read; FileNotFoundError: it is not there.
        """
        names = {name for name in os.listdir(self.versioned) if re.fullmatch(NAMESPACE_NAME, name)}
        for name in sorted(names | self._folders.keys()):
            with contextlib.suppress(FileNotFoundError):
                self.folder(name).refresh()
        return list(self._folders.values())

    def evict(self, num_bytes: int, *, keep: bytes | None = None) -> list[Entry]:
        """Delete the segments of least worth until so many bytes are free, or none can go.

        Args:
            keep: a point that must stay, since something is about to follow it.

        Raises:
            OSError: a file cannot be deleted.
        """
        if num_bytes <= 0:
            return []
        for folder in self._folders.values():
            folder.note_uses_of_others()
        folders = {folder.index: folder for folder in self._folders.values()}
        gone: list[Entry] = []
        for index, entry in victims(folders, self.worth, keep=keep):
            folders[index].file_of(entry).unlink(missing_ok=True)
            index.remove(entry.digest)
            self.worth.evict(entry)
            gone.append(entry)
            num_bytes -= entry.num_bytes
            if num_bytes <= 0:
                break
        return gone

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes, and threads, from adding and evicting.

        Raises:
            OSError: the lock's file cannot be opened; TimeoutError: another keeps it for long.
        """
        with open(self.versioned / _LOCK_FILE, "ab") as file:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as exc:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{file.name} is locked by another process") from exc
                    time.sleep(_LOCK_POLL_SECONDS)
            yield

    def remove_leftovers(self, now: float) -> None:
        """Delete files that somebody began to write an hour ago."""
        folders = (TEMPORARY_FOLDER, BUSY_FOLDER)
        for path in (p for name in folders for p in self.versioned.glob(f"*/{name}/*")):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > _TEMPORARY_SECONDS:
                    path.unlink()


def _name(digest: bytes) -> str:
    return f"{digest.hex()}{SUFFIX}"
