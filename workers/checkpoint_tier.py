"""Between the engine's prefixes in memory and the checkpoints that outlast the process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from workers.checkpoints.cutting import segments_of
from workers.checkpoints.index import Match
from workers.checkpoints.records import Layer, Segment
from workers.checkpoints.store import CheckpointStore
from workers.kv_records import join_layers
from workers.prefixes import Prefix, PrefixStore
from workers.runner import NotExtractable, Runner

logger = logging.getLogger(__name__)

_READERS: Final = 2
# Shorter prefixes cost more to store, and to restore, than they save.
_LEAST_STORED: Final = 128
_LEAST_RESTORED: Final = 64


class SegmentWriter(Protocol):
    """Writes segments to a store, now or later."""

    def put(self, segments: Sequence[Segment]) -> None:
        """Take the segments of one prefix; returns at once, and may drop them."""

    def close(self) -> None:
        """Write what waits and end."""


@dataclass(slots=True)
class TierFigures:
    """What the tier did since the start.

    Attributes:
        restored_tokens: tokens of prefixes that were read and handed to rows.
        restores_rejected: reads of which nothing could be used.
        restore_seconds: from the order to read to the arrays being there.
    """

    restores: int = 0
    restored_tokens: int = 0
    restores_rejected: int = 0
    restore_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read: the layers after so many tokens; 0 when nothing can be used."""

    length: int
    layers: tuple[Layer, ...]


class Restore:
    """A prefix that is being read; rows with the same one share it.

    Attributes:
        read: what the reading thread gives.
        is_taken: `prefix` was called.
    """

    def __init__(
        self, tier: CheckpointTier, match: Match, tokens: tuple[int, ...], read: Future[_Read]
    ) -> None:
        self._tier = tier
        self._match = match
        self._tokens = tokens
        self.read = read
        self._prefix: Prefix | None = None
        self.is_taken = False

    @property
    def is_done(self) -> bool:
        """Whether `prefix` would not wait."""
        return self.read.done()

    def prefix(self, memory: PrefixStore) -> Prefix | None:
        """Return what was read, None if nothing can be used; it is kept where there is room."""
        if not self.is_taken:
            self.is_taken = True
            self._prefix = self._tier.make(self._match, self._tokens, self.read.result())
            if self._prefix is not None and memory.make_room(self._prefix.num_bytes):
                memory.add(self._prefix)
        return self._prefix


@dataclass(slots=True)
class CheckpointTier:
    """Reads and writes the prefixes of one engine. Used on its thread; the work is done on others.

    Args:
        store: where checkpoints are.
        writer: writes them.
        runner: makes states of layers and layers of states.
    """

    store: CheckpointStore
    writer: SegmentWriter
    runner: Runner
    clock: Callable[[], float] = time.monotonic
    figures: TierFigures = field(default_factory=TierFigures)
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_READERS, thread_name_prefix="restore")
    )
    _reading: dict[tuple[bytes, int], Restore] = field(default_factory=dict)
    _unusable: set[bytes] = field(default_factory=set)

    @property
    def least_tokens(self) -> int:
        """A prefix of fewer is not stored."""
        return _LEAST_STORED

    def match(self, tokens: Sequence[int]) -> Match | None:
        """Return what is stored of the beginning of a prompt, None if it is not worth reading."""
        match = self.store.match(tokens)
        if match.length < _LEAST_RESTORED or match.parts[-1].entry.digest in self._unusable:
            return None
        return match

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether a prefix is stored, or too short for that."""
        return len(tokens) < _LEAST_STORED or self.store.covers(tokens) == len(tokens)

    def restore(self, match: Match, tokens: Sequence[int]) -> Restore:
        """Begin to read; whoever wants the same gets the same."""
        key = (match.parts[-1].entry.digest, match.length)
        known = self._reading.get(key)
        if known is not None and not known.is_taken:
            return known
        self._reading = {key: one for key, one in self._reading.items() if not one.is_taken}
        began = self.clock()
        read = self._pool.submit(self._load, match)
        read.add_done_callback(lambda _: self._note_seconds(self.clock() - began))
        restore = Restore(self, match, tuple(tokens[: match.length]), read)
        self._reading[key] = restore
        return restore

    def wait(self, timeout_seconds: float) -> None:
        """Wait until a read is done, or the time is over."""
        reads = [restore.read for restore in self._reading.values() if not restore.is_taken]
        wait(reads, timeout=timeout_seconds, return_when=FIRST_COMPLETED)

    def _load(self, match: Match) -> _Read:
        """Read a match; on a thread of the pool."""
        restored = self.store.read(match)
        if restored.length < _LEAST_RESTORED:
            return _Read(0, ())
        return _Read(restored.length, join_layers(restored.segments))

    def make(self, match: Match, tokens: tuple[int, ...], read: _Read) -> Prefix | None:
        """Return the prefix of what was read; on the engine thread, since arrays belong to it."""
        length = read.length
        state: Any = None
        if length:
            try:
                state = self.runner.from_layers(read.layers, length)
            except ValueError as error:  # of another model, under our model's name
                logger.warning("a checkpoint does not fit the model: %s", error)
                self._unusable.add(match.parts[-1].entry.digest)
        if state is None:
            self.figures.restores_rejected += 1
            return None
        self.store.note_use(match)
        self.figures.restores += 1
        self.figures.restored_tokens += length
        return Prefix(tokens[:length], state, self.runner.row_bytes(length))

    def save(self, prefix: Prefix, num_tokens: int, seconds_per_token: float) -> None:
        """Let the first tokens of a prefix be written, as far as they are not stored yet.

        Args:
            seconds_per_token: what it took to compute one.
        """
        tokens = prefix.tokens[:num_tokens]
        start = self.store.covers(tokens)
        if start == len(tokens):
            return
        try:
            layers = self.runner.to_layers(prefix.state, start, num_tokens)
        except NotExtractable as error:
            logger.warning("a prefix cannot be stored: %s", error)
            return
        cost_seconds = seconds_per_token * (num_tokens - start)
        self.writer.put(segments_of(self.store.namespace, tokens, start, layers, cost_seconds))

    def close(self) -> None:
        """Write what waits and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.writer.close()

    def _note_seconds(self, seconds: float) -> None:
        self.figures.restore_seconds += seconds
