"""Prefixes that several prompts share, kept in memory so that each is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True, eq=False)
class Prefix:
    """What a runner holds after some tokens.

    Attributes:
        state: as the runner's `insert` takes it.
        num_waiting: rows that will take it over; it is kept for them.
    """

    tokens: tuple[int, ...]
    state: Any
    num_bytes: int
    num_waiting: int = 0


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
        """Forget prefixes that nobody waits for until one of so many bytes fits; tell whether."""
        unused = [prefix for prefix in self._prefixes if not prefix.num_waiting]
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
