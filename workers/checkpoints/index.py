"""Which stored segments a prompt can begin with: a radix tree of their tokens, and no files."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from workers.checkpoints.records import BLOCK_TOKENS, prefix_digests

_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What is known of a stored segment without its arrays.

    Attributes:
        start: how many tokens stand before it.
        tokens: those of the segment, four bytes each.
        parent: the digest of the tokens before it.
        digest: the digest of all tokens up to its end.
        blocks: the digests up to each multiple of ``BLOCK_TOKENS`` inside it.
        is_sliceable: whether a part of it, from its first token on, can be used.
        num_bytes: what it takes where it is stored.
        cost_seconds: what it took to compute.
    """

    start: int
    tokens: bytes
    parent: bytes
    digest: bytes
    blocks: tuple[bytes, ...]
    is_sliceable: bool
    num_bytes: int
    cost_seconds: float

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) % _TOKEN_BYTES:
            raise ValueError("an entry has whole tokens, and at least one")
        if len(self.blocks) != len(blocks_in(self.start, self.end)):
            raise ValueError("an entry has a digest for every block that ends inside it")

    @property
    def num_tokens(self) -> int:
        """Tokens of the segment."""
        return len(self.tokens) // _TOKEN_BYTES

    @property
    def end(self) -> int:
        """How many tokens a prompt has up to its end."""
        return self.start + self.num_tokens

    @property
    def points(self) -> tuple[bytes, ...]:
        """The digests at which another segment may begin: inside it and at its end."""
        return (*self.blocks, self.digest)

    def tokens_to(self, point: bytes) -> bytes:
        """Return the tokens up to one of its points."""
        ends = (*blocks_in(self.start, self.end), self.end)
        end = ends[self.points.index(point)]
        return self.tokens[: (end - self.start) * _TOKEN_BYTES]


@dataclass(frozen=True, slots=True)
class Part:
    """An entry and how many of its tokens are used, from the first on."""

    entry: Entry
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt can begin with: parts that follow one another. Nothing: no parts."""

    parts: tuple[Part, ...] = ()

    @property
    def length(self) -> int:
        """How many tokens of the prompt it has."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def tokens(self) -> bytes:
        """Those tokens, four bytes each."""
        used = (part.entry.tokens[: part.num_tokens * _TOKEN_BYTES] for part in self.parts)
        return b"".join(used)


def as_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as four bytes each, the lowest first."""
    return array("I", tokens).tobytes()


def blocks_in(start: int, end: int) -> range:
    """Return the multiples of ``BLOCK_TOKENS`` inside a segment, neither its start nor its end."""
    return range(start - start % BLOCK_TOKENS + BLOCK_TOKENS, end, BLOCK_TOKENS)


class RadixIndex:
    """The segments of one namespace, found by the tokens of a prompt.

    Segments hang at points: digests of all tokens up to a place where one may begin. A prompt
    passes each place with one digest only, so it does not matter who cut its segments, or where.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        [self._root] = prefix_digests(namespace, (), [0])
        self._entries: dict[bytes, Entry] = {}
        self._siblings: dict[bytes, _Siblings] = {}  # by the point at which they begin
        self._owners: dict[bytes, list[Entry]] = {}  # of each point but the root
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return self._num_bytes

    def get(self, digest: bytes) -> Entry | None:
        """Return the entry that ends at a digest, None when there is none."""
        return self._entries.get(digest)

    def add(self, entry: Entry) -> None:
        """Add an entry; one of the same digest makes room for it."""
        self.remove(entry.digest)
        siblings = self._siblings.get(entry.parent)
        if siblings is not None and (twin := siblings.get(entry.tokens)) is not None:
            self.remove(twin.digest)  # one of the two digests is wrong
        self._entries[entry.digest] = entry
        self._siblings.setdefault(entry.parent, _Siblings()).add(entry)
        for point in entry.points:
            self._owners.setdefault(point, []).append(entry)
        self._num_bytes += entry.num_bytes

    def remove(self, digest: bytes) -> Entry | None:
        """Forget and return an entry, None when it is not there; what follows it stays."""
        entry = self._entries.pop(digest, None)
        if entry is None:
            return None
        siblings = self._siblings[entry.parent]
        siblings.remove(entry)
        if not siblings:
            del self._siblings[entry.parent]
        for point in entry.points:
            owners = self._owners[point]
            owners.remove(entry)
            if not owners:
                del self._owners[point]
        self._num_bytes -= entry.num_bytes
        return entry

    def match(self, tokens: Sequence[int]) -> Match:
        """Return the deepest restore point that leaves a prompt at least one token to feed."""
        return self.match_bytes(as_bytes(tokens), len(tokens) - 1)

    def match_bytes(self, query: bytes, limit: int) -> Match:
        """Return the deepest restore point among the first tokens of a prompt.

        Args:
            query: the prompt's tokens, four bytes each.
            limit: the most tokens that may be restored.
        """
        return self._walk(query, limit).match

    def covers(self, tokens: Sequence[int]) -> int:
        """Return how many first tokens need not be stored: a segment may begin there.

        All of them when nothing is missing to restore the whole.
        """
        walk = self._walk(as_bytes(tokens), len(tokens))
        return len(tokens) if walk.length == len(tokens) else walk.last_point(len(tokens))

    def has_point(self, digest: bytes) -> bool:
        """Whether a segment could begin at a digest."""
        return digest == self._root or digest in self._owners

    def tokens_to(self, point: bytes) -> bytes | None:
        """Return all tokens up to a point, None when it cannot be reached from the root."""
        nexts: dict[bytes, tuple[bytes, bytes]] = {}  # by point: the tokens after it, their end
        waiting = [point]
        while waiting and self._root not in nexts:
            place = waiting.pop()
            for entry in self._owners.get(place, ()):
                if entry.parent not in nexts:
                    nexts[entry.parent] = (entry.tokens_to(place), place)
                    waiting.append(entry.parent)
        parts = []
        at = self._root
        while at != point:
            if at not in nexts:
                return None
            tokens, at = nexts[at]
            parts.append(tokens)
        return b"".join(parts)

    def owners(self, point: bytes) -> list[Entry]:
        """Return the entries that hold a point, inside or at their end."""
        return list(self._owners.get(point, ()))

    def is_leaf(self, entry: Entry) -> bool:
        """Whether nothing follows an entry."""
        return not any(point in self._siblings for point in entry.points)

    def leaves(self) -> list[Entry]:
        """Return the entries that nothing follows."""
        return [entry for entry in self._entries.values() if self.is_leaf(entry)]

    def reachable(self) -> set[bytes]:
        """Return the digests of the entries that a prompt can get to."""
        found: set[bytes] = set()
        waiting = [self._root]
        while waiting:
            siblings = self._siblings.get(waiting.pop(), ())
            for entry in siblings:
                if entry.digest not in found:
                    found.add(entry.digest)
                    waiting += entry.points
        return found

    def _walk(self, query: bytes, limit: int) -> _Walk:
        walk = _Walk()
        waiting = [(0, self._root)]
        while waiting:
            start, point = heapq.heappop(waiting)
            siblings = self._siblings.get(point)
            if siblings is None:
                continue
            end = min(limit, start + siblings.num_tokens)
            rest = query[start * _TOKEN_BYTES : end * _TOKEN_BYTES]
            reached: list[tuple[int, bytes, Entry]] = []
            entry, shared, whole = siblings.along(rest)
            if shared:
                if entry.is_sliceable:
                    walk.offer(entry, start + shared)
                inside = blocks_in(start, entry.end)
                reached += [
                    (place, digest, entry)
                    for place, digest in zip(inside, entry.blocks, strict=True)
                    if place <= start + shared
                ]
            for other in whole:
                walk.offer(other, other.end)
                reached.append((other.end, other.digest, other))
            for place, digest, by in reached:
                if walk.reach(place, by):
                    heapq.heappush(waiting, (place, digest))
        return walk


class _Walk:
    """Where a prompt gets from the root, and the best place to restore it at."""

    def __init__(self) -> None:
        self._steps: dict[int, Entry] = {}  # by the place to which it leads
        self._last: Entry | None = None
        self.length = 0

    def reach(self, place: int, entry: Entry) -> bool:
        """Note that an entry leads to a place where others may begin; False: one did before."""
        if place in self._steps:
            return False
        self._steps[place] = entry
        return True

    def offer(self, entry: Entry, length: int) -> None:
        """Note a place at which the prompt can be restored."""
        if length > self.length:
            self._last, self.length = entry, length

    def last_point(self, end: int) -> int:
        """Return the deepest place before an end where others may begin; 0: the root."""
        return max((place for place in self._steps if place < end), default=0)

    @property
    def match(self) -> Match:
        """The way to that place."""
        parts = []
        entry, end = self._last, self.length
        while entry is not None:
            parts.append(Part(entry, end - entry.start))
            end = entry.start
            entry = self._steps.get(end)
        return Match(tuple(reversed(parts)))


class _Siblings:
    """Entries that begin at the same point, sorted by their tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0  # none of them has, or had, more
        self._keys: list[bytes] = []
        self._entries: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, tokens: bytes) -> Entry | None:
        return self._entries.get(tokens)

    def add(self, entry: Entry) -> None:
        insort(self._keys, entry.tokens)
        self._entries[entry.tokens] = entry
        self.num_tokens = max(self.num_tokens, entry.num_tokens)

    def remove(self, entry: Entry) -> None:
        del self._keys[bisect_left(self._keys, entry.tokens)]
        del self._entries[entry.tokens]

    def along(self, rest: bytes) -> tuple[Entry, int, list[Entry]]:
        """Return what has most in common with the rest of a prompt.

        The entry that begins most like it, their tokens alike, and the entries that it begins with.
        """
        keys = self._keys
        place = bisect_right(keys, rest)
        best, most = b"", -1
        if place < len(keys):
            best, most = keys[place], common_tokens(keys[place], rest)
        whole = []
        while place:
            key = keys[place - 1]
            shared = common_tokens(key, rest)
            if shared > most:
                best, most = key, shared
            if shared * _TOKEN_BYTES == len(key):
                whole.append(self._entries[key])
                place -= 1
            else:
                # Those between have less in common with it, or begin like this one.
                place = bisect_right(keys, rest[: shared * _TOKEN_BYTES], hi=place - 1)
        return self._entries[best], most, whole


def common_tokens(one: bytes, other: bytes) -> int:
    """Return how many tokens two sequences begin with alike."""
    num_bytes = min(len(one), len(other))
    if one[:num_bytes] == other[:num_bytes]:
        return num_bytes // _TOKEN_BYTES
    count = num_bytes // _TOKEN_BYTES
    differs = np.frombuffer(one, "<u4", count) != np.frombuffer(other, "<u4", count)
    return int(differs.argmax())
