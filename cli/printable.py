"""What is written to a terminal that comes from elsewhere: shown, and not obeyed."""

from __future__ import annotations

import unicodedata
from typing import Final

# Of the format characters only those that join what an emoji, or a script's letters, consist of.
_JOINERS: Final = "\u200c\u200d"
_UNSAFE_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a text that a terminal shows and does not obey, on one line.

    Control characters, those that turn the direction of writing and halves of surrogate pairs are
    written as ``\x1b``, ``\u202e`` and the like.

    Args:
        keep: of them, those that stay, such as the line feed.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character in keep or not _is_unsafe(character) else _escaped(character)
        for character in text
    )


def _is_unsafe(character: str) -> bool:
    return character not in _JOINERS and unicodedata.category(character) in _UNSAFE_CATEGORIES


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
