"""What a person does with a store of checkpoints: look at it, check it, make it smaller, move it.

Workers may use the store meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from shutil import copyfileobj
from typing import IO, Any

from queue_service.errors import ConfigurationError
from workers.checkpoints.folders import (
    MODEL_FILE,
    NAMESPACE_FILE,
    NAMESPACE_NAME,
    SEGMENT_NAME,
    CacheRoot,
    SegmentFolder,
)
from workers.checkpoints.index import Entry
from workers.checkpoints.segment_file import (
    TEMPORARY_FOLDER,
    BadSegment,
    read_header,
    read_segment,
    segment_path,
)

_MEMBER = re.compile(rf"({NAMESPACE_NAME})/({SEGMENT_NAME}|{re.escape(NAMESPACE_FILE)})")
_MAX_FACTS_BYTES = 1 << 24
_MAX_NAME_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """One namespace of a store.

    Attributes:
        model: what the model was called first; None where nobody said it, as after an import.
        facts: what it stands for; None where its file is gone or damaged.
        num_tokens: of all segments; prompts that begin alike share them.
        used_at: when one was last used or stored, in seconds since 1970; None: there is none.
    """

    namespace: str
    model: str | None
    facts: Any
    num_segments: int
    num_tokens: int
    num_bytes: int
    used_at: float | None


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One segment of a store.

    Attributes:
        digest: of all tokens up to its end, in hex.
        start: how many tokens stand before it.
        used_at: when it was last used or stored, in seconds since 1970.
        is_reachable: whether all that it follows is there.
    """

    namespace: str
    digest: str
    start: int
    end: int
    num_bytes: int
    cost_seconds: float
    used_at: float
    is_reachable: bool


@dataclass(frozen=True, slots=True)
class Bad:
    """A file that is not what it should be."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a check of all files found.

    Attributes:
        num_removed: how many of the bad ones were deleted.
    """

    num_good: int
    bad: tuple[Bad, ...]
    num_removed: int


@dataclass(frozen=True, slots=True)
class Removed:
    """What was deleted."""

    num_segments: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of an archive's members.

    Attributes:
        num_present: they were in the store.
        num_without_room: the store would have grown beyond its budget.
        num_without_parent: what they follow is in neither.
        bad: names in the archive, and why they were left out.
    """

    num_added: int
    num_present: int
    num_without_room: int
    num_without_parent: int
    bad: tuple[tuple[str, str], ...]


def stats(root: Path) -> list[NamespaceStats]:
    """Return the namespaces of a store; [] where there is none."""
    return [
        NamespaceStats(
            namespace=folder.path.name,
            model=_model(folder.path),
            facts=_facts(folder.path),
            num_segments=len(folder.index),
            num_tokens=sum(entry.num_tokens for entry in folder.index),
            num_bytes=folder.index.num_bytes,
            used_at=max(map(opened.worth.used_at, folder.index), default=None),
        )
        for opened, folders in [_open(root)]
        for folder in folders
    ]


def entries(root: Path) -> list[EntryInfo]:
    """Return the segments of a store, those last used first; [] where there is none."""
    opened, folders = _open(root)
    found = []
    for folder in folders:
        reachable = folder.index.reachable()
        found += [
            EntryInfo(
                namespace=folder.path.name,
                digest=entry.digest.hex(),
                start=entry.start,
                end=entry.end,
                num_bytes=entry.num_bytes,
                cost_seconds=entry.cost_seconds,
                used_at=opened.worth.used_at(entry),
                is_reachable=entry.digest in reachable,
            )
            for entry in folder.index
        ]
    return sorted(found, key=lambda entry: entry.used_at, reverse=True)


def verify(
    root: Path, *, remove: bool = False, on_file: Callable[[Path], None] | None = None
) -> Report:
    """Read every file of a store and compare all that can be compared.

    Args:
        remove: delete what is bad.
        on_file: is told of each file before it is read.
    """
    bad: list[Bad] = []
    num_good = 0
    _, folders = _open(root, lambda _, error: bad.append(Bad(error.path, error.reason)))
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            _check_facts(folder.path / NAMESPACE_FILE, bad)
        for entry in folder.index:
            path = folder.file_of(entry)
            if on_file is not None:
                on_file(path)
            try:
                before = folder.index.tokens_to(entry.parent)
                read_segment(path, folder.path.name, before=before)
            except FileNotFoundError:
                continue  # evicted meanwhile
            except BadSegment as error:
                bad.append(Bad(path, error.reason))
            except OSError as error:
                bad.append(Bad(path, str(error)))
            else:
                num_good += 1
    num_removed = 0
    for one in bad if remove else ():
        with contextlib.suppress(OSError):
            one.path.unlink()
            num_removed += 1
    return Report(num_good, tuple(bad), num_removed)


def prune(root: Path, *, to_bytes: int | None = None, unused_since: float | None = None) -> Removed:
    """Delete segments, never one that another follows.

    Args:
        to_bytes: those of least worth, until the store takes no more than so much.
        unused_since: those not used since a time, in seconds since 1970.

    Raises:
        OSError: a file cannot be deleted, or the store is not free for long.
    """
    opened, _ = _open(root)
    gone: list[Entry] = []
    with contextlib.suppress(FileNotFoundError), opened.locked():
        folders = opened.refresh()
        if unused_since is not None:
            for folder in folders:
                gone += _prune_unused(opened, folder, unused_since)
        if to_bytes is not None:
            gone += opened.evict(opened.num_bytes - to_bytes)
    return Removed(len(gone), sum(entry.num_bytes for entry in gone))


def export(root: Path, archive: Path) -> int:
    """Write all segments into a tar archive; return how many.

    Raises:
        ConfigurationError: the archive cannot be written.
    """
    _, folders = _open(root)
    count = 0
    part = archive.with_name(f"{archive.name}.part")
    try:
        with part.open("wb") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                for folder in folders:
                    # What others follow comes before them.
                    in_order = sorted(folder.index, key=lambda entry: entry.start)
                    _append(tar, folder.path / NAMESPACE_FILE)
                    count += sum(_append(tar, folder.file_of(entry)) for entry in in_order)
            file.flush()
            os.fsync(file.fileno())
        part.replace(archive)
    except OSError as exc:
        part.unlink(missing_ok=True)
        raise ConfigurationError(f"{archive} cannot be written: {exc}") from exc
    return count


def import_(root: Path, archive: Path, *, budget_bytes: int) -> Imported:
    """Add the segments of an archive to a store, each once it is verified; nothing makes room.

    Args:
        budget_bytes: what the store may take.

    Raises:
        ConfigurationError: the archive is none or cannot be read, or the store cannot be written.
    """
    importer = _Importer(root, budget_bytes)
    try:
        with _opened(archive) as tar:
            importer.opened.versioned.mkdir(parents=True, exist_ok=True)
            for member in tar:
                importer.take(tar, member)
    except (OSError, tarfile.TarError, EOFError) as exc:
        raise ConfigurationError(f"{archive} cannot be imported: {exc}") from exc
    return importer.result()


def _opened(archive: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(archive)
    except (tarfile.TarError, EOFError) as exc:
        raise ConfigurationError(f"{archive} is no archive of `qsvc cache export`") from exc


class _Importer:
    """Takes members of an archive, whose names and content a stranger may have made."""

    def __init__(self, root: Path, budget_bytes: int) -> None:
        self.opened = CacheRoot(root, lambda _, bad: None)
        self._budget = budget_bytes
        self._counts = dict.fromkeys(("added", "present", "without_room", "without_parent"), 0)
        self._bad: list[tuple[str, str]] = []

    def result(self) -> Imported:
        return Imported(
            **{f"num_{name}": count for name, count in self._counts.items()}, bad=tuple(self._bad)
        )

    def take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Add one member, or note why not. Its name is taken apart, never used as a path."""
        match = _MEMBER.fullmatch(member.name)
        content = tar.extractfile(member) if match and member.isfile() else None
        if match is None or content is None:
            self._bad.append((member.name, "it is no file of a store"))
            return
        if member.size > self._budget:
            self._counts["without_room"] += 1
            return
        folder = self.opened.folder(match[1])
        folder.path.mkdir(exist_ok=True)
        with content, _beside(folder.path) as (file, path):
            copyfileobj(content, file)
            file.flush()
            if match[2] == NAMESPACE_FILE:
                self._take_facts(folder, path)
                return
            try:
                kept = self._take_segment(folder, path, match[2])
            except BadSegment as error:
                self._bad.append((member.name, error.reason))
            else:
                self._counts[kept] += 1

    def _take_facts(self, folder: SegmentFolder, path: Path) -> None:
        bad: list[Bad] = []
        if _check_facts(path, bad, folder.path.name):
            with contextlib.suppress(FileExistsError):
                os.link(path, folder.path / NAMESPACE_FILE)
        self._bad += [(f"{folder.path.name}/{NAMESPACE_FILE}", one.reason) for one in bad]

    def _take_segment(self, folder: SegmentFolder, path: Path, name: str) -> str:
        header = read_header(path)
        target = segment_path(folder.path, header.digest)
        if (header.namespace, target.name) != (folder.path.name, name):
            raise BadSegment(path, "its name is another segment's")
        self.opened.refresh()
        if header.digest in folder.index:
            return "present"
        before = folder.index.tokens_to(header.parent)
        if before is None:
            return "without_parent"
        read_segment(path, folder.path.name, before=before)
        with self.opened.locked():
            self.opened.refresh()
            if self.opened.num_bytes + path.stat().st_size > self._budget:
                return "without_room"
            with contextlib.suppress(FileExistsError):
                os.link(path, target)
            folder.read_again()
            folder.refresh()
        return "added"


def _open(
    root: Path, on_bad: Callable[[SegmentFolder, BadSegment], None] = lambda _, bad: None
) -> tuple[CacheRoot, list[SegmentFolder]]:
    """Return a store and its namespaces, none where there is no store."""
    opened = CacheRoot(root, on_bad)
    try:
        return opened, opened.refresh()
    except FileNotFoundError:
        return opened, []


def _facts(folder: Path) -> Any:
    try:
        return json.loads((folder / NAMESPACE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _model(folder: Path) -> str | None:
    try:
        with (folder / MODEL_FILE).open("rb") as file:
            name = file.read(_MAX_NAME_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None
    return name or None


def _check_facts(path: Path, bad: list[Bad], namespace: str | None = None) -> bool:
    """Whether what a namespace stands for has the namespace as its digest."""
    with path.open("rb") as file:
        text = file.read(_MAX_FACTS_BYTES)
    is_good = blake2b(text, digest_size=16).hexdigest() == (namespace or path.parent.name)
    if not is_good:
        bad.append(Bad(path, "it stands for another namespace"))
    return is_good


def _prune_unused(opened: CacheRoot, folder: SegmentFolder, since: float) -> list[Entry]:
    gone: list[Entry] = []
    while old := [e for e in folder.index.leaves() if opened.worth.used_at(e) < since]:
        for entry in old:
            folder.file_of(entry).unlink(missing_ok=True)
            folder.forget(entry)
        gone += old
    return gone


def _append(tar: tarfile.TarFile, path: Path) -> bool:
    """Add a file under its folder's name; False where it was evicted meanwhile."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return False
    with file:
        member = tarfile.TarInfo(f"{path.parent.name}/{path.name}")
        status = os.fstat(file.fileno())
        member.size, member.mtime = status.st_size, int(status.st_mtime)
        tar.addfile(member, file)
    return True


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Open a file in a namespace's folder for what is being written; it is deleted at the end."""
    temporary = folder / TEMPORARY_FOLDER
    temporary.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=temporary, prefix="import.") as file:
        yield file, Path(file.name)
