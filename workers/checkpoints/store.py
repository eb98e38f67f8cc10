"""Where checkpoints are kept: what every store does, and the one that keeps them in memory."""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.checkpoints.cutting import first_tokens
from workers.checkpoints.eviction import Worth, victims
from workers.checkpoints.index import Entry, Match, RadixIndex, as_bytes, blocks_in
from workers.checkpoints.records import Identity, Segment, prefix_digests


@dataclass(frozen=True, slots=True)
class Restored:
    """What was read of a match.

    Attributes:
        segments: one after the other from the first token on; of each, just what is used. A layer
            of a STATE has arrays in the last one only.
    """

    segments: tuple[Segment, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of the prompt that are restored; 0: nothing was."""
        return self.segments[-1].end if self.segments else 0

    @classmethod
    def of(cls, match: Match, segments: Iterable[Segment], namespace: str) -> Restored:
        """Return the segments of a match, cut to what is used of them."""
        parts = match.parts
        ends = [part.entry.start + part.num_tokens for part in parts]
        digests = prefix_digests(namespace, array("I", match.tokens), ends)
        return cls(
            tuple(
                first_tokens(segment, part.num_tokens, digest)
                for segment, part, digest in zip(segments, parts, digests, strict=True)
            )
        )


class CheckpointStore(Protocol):
    """Segments of one namespace. Every method may be called by any thread.

    A store is a cache: it may lose everything, and what it gives is what was put. No method raises
    for what it reads, or because the place where it keeps things is gone or full.
    """

    @property
    def namespace(self) -> str:
        """The namespace whose segments it keeps."""

    def match(self, tokens: Sequence[int]) -> Match:
        """Return the deepest restore point that leaves a prompt at least one token to feed."""

    def read(self, match: Match) -> Restored:
        """Return the segments of a match; where one is gone or bad, the most that others hold."""

    def put(self, segment: Segment) -> int | None:
        """Keep a segment.

        Returns:
            the bytes that were written; 0 where it is kept already; None where it cannot be kept:
            what it follows is not here, it is larger than the budget, or there is no room.
        """

    def note_use(self, match: Match) -> None:
        """Count the use of a match, once what was read of it runs in the model."""

    def covers(self, tokens: Sequence[int]) -> int:
        """Return from which token on a prompt's segments are worth putting.

        All of the tokens when nothing is missing to restore the whole; else a place where a
        segment may begin, with everything before it kept.
        """

    def latest(self, count: int) -> list[list[int]]:
        """Return the prompts, as far as they are kept, that were stored or used last: newest first.

        Of prompts that begin alike only the whole ones.
        """

    def counts(self) -> dict[str, int]:
        """Return what has happened so far, by name; what has not is left out."""

    def close(self) -> None:
        """Let go of what is open; nothing is lost."""


class Tally:
    """Counts what happens in a store. The names:

    ``uses``, ``used_tokens``: matches that a model took over.
    ``writes``, ``written_bytes``: segments put.
    ``evictions``, ``evicted_bytes``: segments that made room.
    ``bad_<reason>``: segments that could not be read.
    ``refused_<reason>``: segments that were not kept.
    ``<reason>_errors``: what could not be done, such as ``write_errors``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Count something."""
        with self._lock:
            self._counts[name] += count

    def counts(self) -> dict[str, int]:
        """Return all counts."""
        with self._lock:
            return dict(self._counts)


class MemoryStore:
    """Segments in memory; it is gone with the process.

    Args:
        budget_bytes: for the arrays of all segments together.
        clock: the time in seconds.
    """

    def __init__(
        self, identity: Identity, budget_bytes: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.namespace = identity.namespace
        self._budget = budget_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._index = RadixIndex(self.namespace)
        self._segments: dict[bytes, Segment] = {}
        self._worth = Worth()
        self._tally = Tally()

    def match(self, tokens: Sequence[int]) -> Match:
        """Return the deepest restore point that leaves a prompt at least one token to feed."""
        with self._lock:
            return self._index.match(tokens)

    def read(self, match: Match) -> Restored:
        """Return the segments of a match; where one is gone, the most that others hold."""
        with self._lock:
            if any(part.entry.digest not in self._segments for part in match.parts):
                self._tally.add("bad_vanished")
                match = self._index.match_bytes(match.tokens, match.length)
            segments = [self._segments[part.entry.digest] for part in match.parts]
        return Restored.of(match, segments, self.namespace)

    def put(self, segment: Segment) -> int | None:
        """Keep a segment: see :meth:`CheckpointStore.put`."""
        with self._lock:
            if segment.digest in self._index:
                return 0
            entry = entry_of(segment, self._index, num_bytes=segment.nbytes)
            if entry is None:
                self._tally.add("refused_no_parent")
                return None
            if not self._make_room(entry):
                self._tally.add("refused_no_room")
                return None
            self._index.add(entry)
            self._worth.add(entry, self._clock())
            self._segments[entry.digest] = segment
        self._tally.add("writes")
        self._tally.add("written_bytes", entry.num_bytes)
        return entry.num_bytes

    def note_use(self, match: Match) -> None:
        """Count the use of a match."""
        with self._lock:
            now = self._clock()
            for part in match.parts:
                if part.entry.digest in self._index:
                    self._worth.note_use(part.entry, now)
        self._tally.add("uses")
        self._tally.add("used_tokens", match.length)

    def covers(self, tokens: Sequence[int]) -> int:
        """Return from which token on a prompt's segments are worth putting."""
        with self._lock:
            return self._index.covers(tokens)

    def latest(self, count: int) -> list[list[int]]:
        """Return the prompts that were stored or used last, the newest first."""
        with self._lock:
            return latest_prompts(self._index, self._worth, count)

    def counts(self) -> dict[str, int]:
        """Return what has happened so far, by name."""
        return self._tally.counts()

    def close(self) -> None:
        """Do nothing: there is nothing open."""

    def _make_room(self, entry: Entry) -> bool:
        if entry.num_bytes > self._budget:
            return False
        needed = self._index.num_bytes + entry.num_bytes - self._budget
        for _, victim in victims([self._index], self._worth, keep=entry.parent):
            if needed <= 0:
                break
            self._index.remove(victim.digest)
            del self._segments[victim.digest]
            self._worth.evict(victim)
            self._tally.add("evictions")
            self._tally.add("evicted_bytes", victim.num_bytes)
            needed -= victim.num_bytes
        return needed <= 0


def latest_prompts(index: RadixIndex, worth: Worth, count: int) -> list[list[int]]:
    """Return the tokens up to the ends that nothing follows, those used last first."""
    leaves = sorted(index.leaves(), key=worth.used_at, reverse=True)
    prompts = []
    for entry in leaves[:count]:
        tokens = index.tokens_to(entry.digest)
        if tokens is not None:  # else what it follows is gone
            prompts.append(list(array("I", tokens)))
    return prompts


def entry_of(segment: Segment, index: RadixIndex, num_bytes: int) -> Entry | None:
    """Return the entry of a segment, None when what it follows is not in the index."""
    before = index.tokens_to(segment.parent)
    if before is None or len(before) != 4 * segment.start:
        return None
    tokens = as_bytes(segment.tokens)
    blocks = blocks_in(segment.start, segment.end)
    return Entry(
        start=segment.start,
        tokens=tokens,
        parent=segment.parent,
        digest=segment.digest,
        blocks=tuple(prefix_digests(index.namespace, array("I", before + tokens), blocks)),
        is_sliceable=segment.is_sliceable,
        num_bytes=num_bytes,
        cost_seconds=segment.cost_seconds,
    )
