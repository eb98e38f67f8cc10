"""Prefixes that several prompts share, kept in memory so that each is computed once."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from queue_service.beginnings import common_length


@dataclass(slots=True, eq=False)
class Prefix:
    """What a runner holds after some tokens.

    Attributes:
        state: as the runner's `add_with` takes it.
        num_users: rows that will begin with it or do; it is kept for them.
    """

    tokens: tuple[int, ...]
    state: Any
    num_bytes: int
    num_users: int = 0


class PrefixStore:
    """Prefixes under a budget of bytes; the one longest unused goes first.

    Args:
        budget_bytes: for all prefixes together.
        is_sliceable: whether a part of a prefix can be used, from its first token on.
    """

    def __init__(self, budget_bytes: int, *, is_sliceable: bool) -> None:
        self._budget = budget_bytes
        self._is_sliceable = is_sliceable
        self._prefixes: list[Prefix] = []  # the one longest unused first

    def __contains__(self, prefix: Prefix) -> bool:
        return prefix in self._prefixes

    @property
    def num_bytes(self) -> int:
        """Bytes that all prefixes take."""
        return sum(prefix.num_bytes for prefix in self._prefixes)

    def best(self, tokens: Sequence[int]) -> tuple[Prefix | None, int]:
        """Return the prefix of which a prompt can use most, and how many tokens of it.

        At least one token of the prompt is left to feed.
        """
        best, length = None, 0
        for prefix in self._prefixes:
            shared = min(common_length(prefix.tokens, tokens), len(tokens) - 1)
            if not self._is_sliceable and shared < len(prefix.tokens):
                continue
            if shared > length:
                best, length = prefix, shared
        return best, length

    def make_room(self, num_bytes: int) -> bool:
        """Forget prefixes that no row uses until one of so many bytes fits; tell whether."""
        unused = [prefix for prefix in self._prefixes if not prefix.num_users]
        free = self._budget - self.num_bytes
        if free + sum(prefix.num_bytes for prefix in unused) < num_bytes:
            return False
        for prefix in unused:
            if free >= num_bytes:
                break
            self._prefixes.remove(prefix)
            free += prefix.num_bytes
        return True

    def add(self, prefix: Prefix) -> None:
        """Keep a prefix for which there is room."""
        self._prefixes.append(prefix)

    def touch(self, prefix: Prefix) -> None:
        """Note that a prefix was of use."""
        if prefix in self._prefixes:
            self._prefixes.remove(prefix)
            self._prefixes.append(prefix)

    def clear(self) -> None:
        """Forget all."""
        self._prefixes.clear()


class SeenPrompts:
    """The prompts of late, to see what comes for the second time.

    Args:
        max_bytes: of all prompts together, four bytes a token; the oldest go first.
    """

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_age: deque[bytes] = deque()
        self._sorted: list[bytes] = []

    def note(self, tokens: Sequence[int]) -> int:
        """Remember a prompt; return with how many tokens of it an earlier one begins."""
        prompt = array("I", tokens).tobytes()
        place = bisect_left(self._sorted, prompt)
        # In the order of bytes, what begins most alike stands beside it.
        beside = self._sorted[max(place - 1, 0) : place + 1]
        longest = max((common_length(other, prompt) for other in beside), default=0)
        if prompt not in beside:
            self._sorted.insert(place, prompt)
            self._by_age.append(prompt)
            self._num_bytes += len(prompt)
        while self._num_bytes > self._max_bytes:
            oldest = self._by_age.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
            self._num_bytes -= len(oldest)
        return longest // array("I").itemsize
