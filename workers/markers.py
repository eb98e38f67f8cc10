"""Find a marker in a text that comes in pieces: what is certain, and what may yet begin one."""

from __future__ import annotations

from collections.abc import Sequence

# What a template puts around blocks. Other Unicode spaces are text.
SPACES = " \t\r\n"


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first marker begins and which it is, None when the text holds none.

    No marker may be part of another: then it does not matter in which pieces the text came.
    """
    found = [(start, marker) for marker in markers if (start := text.find(marker)) >= 0]
    return min(found, default=None)


def num_certain(text: str, markers: Sequence[str]) -> int:
    """Return how many characters of a text without markers stand before one that may begin."""
    longest = max(map(len, markers), default=1)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        end = text[start:]
        if any(marker.startswith(end) for marker in markers):
            return start
    return len(text)
