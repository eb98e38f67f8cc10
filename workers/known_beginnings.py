"""Remembers after how many tokens prompts part that are said to begin alike."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Final

from queue_service.beginnings import common_length

# What comes after the common part changes how its last characters become tokens.
_MOST_TOKENS_LESS: Final = 16


class KnownBeginnings:
    """The tokens that the prompts of each key begin with, those longest unused forgotten first.

    A key is a claim by others, and a prompt that does not begin as those before it is looked at
    anew. Safe between threads.

    Args:
        max_tokens: of all beginnings together, four bytes each.
    """

    def __init__(self, max_tokens: int = 4 << 20) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = Lock()

    def length(
        self, key: str, ids: Sequence[int], others: Callable[[], Iterable[Sequence[int]]]
    ) -> int:
        """Return how many tokens of a prompt stand before the place where those of a key part.

        Args:
            others: the tokens of prompts that part from this one there; asked for only where the
                prompt does not begin as those before it.
        """
        known = self._find(key)
        if known is not None:
            length = common_length(known, array("I", ids[: len(known)]))
            if length == len(known):
                return length
            if 0 < len(known) - length <= _MOST_TOKENS_LESS < length:
                self._keep(key, known[:length])
                return length
        length = len(ids)
        for other in others():
            length = min(length, common_length(ids, other))
        self._keep(key, array("I", ids[:length]))
        return length

    def _find(self, key: str) -> array[int] | None:
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
            return known

    def _keep(self, key: str, ids: array[int]) -> None:
        with self._lock:
            self._num_tokens += len(ids) - len(self._known.pop(key, ()))
            self._known[key] = ids
            while self._num_tokens > self._max_tokens:
                _, forgotten = self._known.popitem(last=False)
                self._num_tokens -= len(forgotten)
