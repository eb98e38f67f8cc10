"""Between the engine's prefixes in memory and the checkpoints that outlast the process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

from workers.checkpoints.announcements import Announcement, Announcements
from workers.checkpoints.cutting import segments_of
from workers.checkpoints.index import Match
from workers.checkpoints.records import Layer, Segment
from workers.checkpoints.store import CheckpointStore
from workers.kv_records import join_layers, max_difference
from workers.prefixes import Prefix, PrefixStore
from workers.runner import NotExtractable, Runner

logger = logging.getLogger(__name__)

_READERS: Final = 2
# Shorter prefixes cost more to store, and to restore, than they save.
_LEAST_STORED: Final = 128
_LEAST_RESTORED: Final = 64
# Relative to the largest number: what batches of other shapes do to the rounding of 16 bits.
_TOLERANCE: Final = 0.05


class SegmentWriter(Protocol):
    """Writes segments to a store, now or later."""

    def put(self, segments: Sequence[Segment]) -> int:
        """Take the segments of one prefix; returns at once with how many it did not drop."""

    def counts(self) -> dict[str, int]:
        """Return what has happened so far, by name."""

    def close(self) -> None:
        """Write what waits and end."""


@dataclass(slots=True)
class TierFigures:
    """What the tier did since the start.

    Attributes:
        restored_tokens: tokens of prefixes that were read and handed to rows.
        restores_rejected: reads of which nothing could be used.
        restore_seconds: from the order to read to the arrays being there.
        verified: prefixes that were computed again to compare them.
        mismatches: of these, those that differed by more than rounding.
    """

    restores: int = 0
    restored_tokens: int = 0
    restores_rejected: int = 0
    restore_seconds: float = 0.0
    verified: int = 0
    mismatches: int = 0


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
        announcements: what other workers compute for the same folder; None where none can.
        verify_every: of so many prefixes read one is computed again; 0 for none.
    """

    store: CheckpointStore
    writer: SegmentWriter
    runner: Runner
    announcements: Announcements | None = None
    verify_every: int = 0
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

    def others_compute(self, tokens: Sequence[int]) -> int:
        """Return how many first tokens of a prompt another worker is about to store."""
        length = self.announcements.others(tokens) if self.announcements is not None else 0
        return length if length >= _LEAST_STORED else 0

    def announce(self, tokens: Sequence[int]) -> Announcement | None:
        """Say that a prefix is being computed and will be stored."""
        return None if self.announcements is None else self.announcements.announce(tokens)

    def is_due_for_check(self) -> bool:
        """Whether the prefix read last is to be computed again, for comparison."""
        return self.verify_every > 0 and self.figures.restores % self.verify_every == 0

    def check(self, stored: Any, computed: Any, length: int) -> None:
        """Compare a state that was read with the same one computed here."""
        difference = max_difference(
            self.runner.to_layers(stored, 0, length), self.runner.to_layers(computed, 0, length)
        )
        self.figures.verified += 1
        if not difference <= _TOLERANCE:  # also for NaN
            self.figures.mismatches += 1
            logger.error(
                "a checkpoint is not what is computed here tokens=%d difference=%.3g",
                length,
                difference,
            )

    def counts(self) -> dict[str, int]:
        """Return what happened so far, by name: here, in the store, and in the writer."""
        writer = {f"writer_{name}": count for name, count in self.writer.counts().items()}
        own = {name: int(count) for name, count in asdict(self.figures).items()}
        del own["restore_seconds"]
        own["restore_ms"] = int(1e3 * self.figures.restore_seconds)
        return {**own, **self.store.counts(), **writer}

    def close(self) -> None:
        """Write what waits and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.writer.close()

    def _note_seconds(self, seconds: float) -> None:
        self.figures.restore_seconds += seconds
