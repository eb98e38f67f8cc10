"""Which stored segments make room for others: leaves first, those of least worth first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from workers.checkpoints.index import Entry, RadixIndex


@dataclass(slots=True)
class _Use:
    """How often a segment was of use, the clock at the last time, and when that was."""

    hits: int
    clock: float
    used_at: float


class Worth:
    """Ranks segments: hits times cost by bytes, above a clock that rises with each eviction.

    Segments of equal rank go in the order of their last use. Times are those of files: seconds.

    Cherkasova: Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching (1998).
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._uses: dict[bytes, _Use] = {}

    def seed(self, found: Mapping[Entry, float]) -> None:
        """Take over segments of an earlier time with their last use: older ones are worth less."""
        highest = max((_density(entry) for entry in found), default=0.0)
        in_order = sorted(found.items(), key=lambda item: item[1])
        for place, (entry, used_at) in enumerate(in_order):
            clock = self._clock + highest * place / len(in_order)
            self._uses[entry.digest] = _Use(1, clock, used_at)
        self._clock += highest

    def add(self, entry: Entry, now: float) -> None:
        """Take in a new segment."""
        self._uses[entry.digest] = _Use(1, self._clock, now)

    def note_use(self, entry: Entry, now: float) -> None:
        """Count a use."""
        use = self._uses.setdefault(entry.digest, _Use(0, self._clock, now))
        use.hits += 1
        use.clock = self._clock
        use.used_at = now

    def used_at(self, entry: Entry) -> float:
        """Return when a segment was last used, or stored."""
        use = self._uses.get(entry.digest)
        return 0.0 if use is None else use.used_at

    def rank(self, entry: Entry) -> tuple[float, float]:
        """Return what to sort by: the lowest goes first."""
        use = self._uses.get(entry.digest)
        if use is None:
            return 0.0, 0.0
        return use.clock + use.hits * _density(entry), use.used_at

    def forget(self, entry: Entry) -> None:
        """Drop a segment that is gone."""
        self._uses.pop(entry.digest, None)

    def evict(self, entry: Entry) -> None:
        """Drop a segment that was evicted: the clock rises to its rank."""
        self._clock = max(self._clock, self.rank(entry)[0])
        self.forget(entry)


def victims(
    indexes: Iterable[RadixIndex], worth: Worth, *, keep: bytes | None = None
) -> Iterator[tuple[RadixIndex, Entry]]:
    """Yield entries in the order in which they should go, each with its index.

    Who asks for the next has removed the last. Those that no prompt reaches go first. Nothing goes
    that another segment follows.

    Args:
        keep: a point that must stay, since something is about to follow it.
    """
    order = count()
    leaves: list[tuple[tuple[float, float], int, RadixIndex, Entry]] = []
    for index in indexes:
        reachable = index.reachable()
        for entry in index.leaves():
            rank = worth.rank(entry) if entry.digest in reachable else (-1.0, 0.0)
            leaves.append((rank, next(order), index, entry))
    heapq.heapify(leaves)
    while leaves:
        _, _, index, entry = heapq.heappop(leaves)
        if keep in entry.points:
            continue
        yield index, entry
        for parent in index.owners(entry.parent):
            if index.is_leaf(parent):
                heapq.heappush(leaves, (worth.rank(parent), next(order), index, parent))


def _density(entry: Entry) -> float:
    return entry.cost_seconds / max(entry.num_bytes, 1)
