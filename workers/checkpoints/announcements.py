"""Says to other processes which prefixes are being computed, so that one does it for all."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from workers.checkpoints.folders import BUSY_FOLDER, TIME_GRAIN_NS, VERSION_FOLDER
from workers.checkpoints.index import as_bytes, common_tokens
from workers.checkpoints.records import Identity

logger = logging.getLogger(__name__)

_SUFFIX = ".tok"
_PART_SUFFIX = ".part"
_TOKEN_BYTES = 4


class Announcement:
    """A prefix that this process computes; it ends with :meth:`done`, or with the process.

    Args:
        path: of its file, None where it could not be written: then nobody waits for it.
        descriptor: of the open file, whose lock says that it holds.
    """

    def __init__(self, board: Announcements, path: Path | None, descriptor: int | None) -> None:
        self._board = board
        self._path = path
        self._descriptor = descriptor

    def done(self) -> None:
        """Take it back: the prefix is stored, or will not be computed. Again: nothing happens."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or self._path is None:
            return
        self._board.forget(self._path)
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(descriptor)


class Announcements:
    """The prefixes of one namespace that are being computed, by any process that shares its root.

    Each is a file of tokens, four bytes each, that its process holds locked: a file that is not
    locked is left of a process that died. Every method may be called by any thread; none raises
    where files cannot be read or written.
    """

    def __init__(self, root: Path, identity: Identity) -> None:
        self._folder = root / VERSION_FOLDER / identity.namespace / BUSY_FOLDER
        self._lock = threading.Lock()
        self._own: set[str] = set()
        self._others: dict[str, bytes] = {}  # the tokens of each, by the file's name
        self._changed_ns: int | None = None

    def announce(self, tokens: Sequence[int]) -> Announcement:
        """Say that a prefix is being computed."""
        path = self._folder / f"{uuid.uuid4().hex}{_SUFFIX}"
        part = path.with_suffix(_PART_SUFFIX)
        descriptor: int | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with open(descriptor, "wb", closefd=False) as file:
                file.write(as_bytes(tokens))
            with self._lock:
                self._own.add(path.name)
            part.rename(path)  # seen by others only now that it is locked and whole
        except OSError as error:
            logger.debug("a prefix cannot be announced: %s", error)
            self.forget(path)
            with contextlib.suppress(OSError):
                part.unlink()
            if descriptor is not None:
                os.close(descriptor)
            return Announcement(self, None, None)
        return Announcement(self, path, descriptor)

    def others(self, tokens: Sequence[int]) -> int:
        """Return how many first tokens of a prompt another process is computing; 0: none."""
        with self._lock:
            try:
                self._refresh()
            except OSError:
                self._others.clear()
                self._changed_ns = None
            if not self._others:
                return 0
            query = as_bytes(tokens)
            while self._others:
                length, name = max(
                    (common_tokens(theirs, query), name) for name, theirs in self._others.items()
                )
                if not length or self._is_live(name):
                    return length
                del self._others[name]
        return 0

    def forget(self, path: Path) -> None:
        """Note that an announcement of our own ends."""
        with self._lock:
            self._own.discard(path.name)

    def _refresh(self) -> None:
        """Read what others announced since the last time."""
        changed_ns = self._folder.stat().st_mtime_ns
        if changed_ns == self._changed_ns:
            return
        names = {name for name in os.listdir(self._folder) if name.endswith(_SUFFIX)} - self._own
        is_old = abs(time.time_ns() - changed_ns) > TIME_GRAIN_NS
        self._changed_ns = changed_ns if is_old else None
        self._others = {name: held for name, held in self._others.items() if name in names}
        for name in names - self._others.keys():
            if not self._is_live(name):
                continue
            with contextlib.suppress(FileNotFoundError):
                tokens = (self._folder / name).read_bytes()
                self._others[name] = tokens[: len(tokens) - len(tokens) % _TOKEN_BYTES]

    def _is_live(self, name: str) -> bool:
        """Whether a process holds an announcement; else its file is deleted."""
        path = self._folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # no locks here, so nobody can wait for anybody
        else:
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        finally:
            os.close(descriptor)
