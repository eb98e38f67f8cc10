"""What two sequences have in common at their beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two sequences of one type begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
