"""Remembers with which token ids a text was built, so that a later prompt meets the stored KV."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import eq
from threading import Lock
from typing import Protocol

# What a decoder writes for the bytes of a character that is not complete.
_REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Codec(Protocol):
    """What is asked of a tokenizer here: exact text, special tokens included."""

    def encode_chat(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered chat, or of its end."""

    def decode_chat(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; nothing where it does not tell what is a token."""


@dataclass(frozen=True, slots=True)
class _Entry:
    text: str
    ids: array[int]


class TokenHistory:
    """The token ids that built stored KV caches, found again by their text; safe between threads.

    A model may spell a text with other tokens than the tokenizer would: what it generated need
    not equal ``encode(decode(ids))``. A KV cache fits its own ids only, so a later prompt that
    begins with the same text takes those ids and encodes the rest. Texts and ids only: the KV
    caches are kept elsewhere, and forgetting an entry here costs reuse and nothing else.

    Args:
        max_characters: the most characters (code points) of one text and of all together.
        max_entries: the most texts.
    """

    def __init__(self, codec: Codec, max_characters: int = 2**21, max_entries: int = 16) -> None:
        if max_characters < 1 or max_entries < 1:
            raise ValueError("a token history needs room for one character and one entry")
        self._codec = codec
        self._max_characters = max_characters
        self._max_entries = max_entries
        self._lock = Lock()
        # By text, the oldest first.
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    @property
    def num_characters(self) -> int:
        """The characters of all texts together."""
        with self._lock:
            return self._count_characters()

    def remember(self, ids: Sequence[int]) -> None:
        """Keep a copy of ``ids`` as the newest entry; the ids of the same text go.

        The oldest entries go where the limits ask for it, so after a restart the oldest
        checkpoint is remembered first. Nothing is kept of ids without text, with a text beyond
        the limit, or that end inside a character: a longer checkpoint will have all of it.
        """
        if not ids or self._renewed(ids):
            return
        text = self._codec.decode_chat(ids)
        if not text or text.endswith(_REPLACEMENT_CHARACTER) or len(text) > self._max_characters:
            return
        entry = _Entry(text, array("I", ids))
        with self._lock:
            self._make_newest(entry)
            while (
                len(self._entries) > self._max_entries
                or self._count_characters() > self._max_characters
            ):
                del self._entries[next(iter(self._entries))]

    def resolve(self, rendered: str, canonical: Sequence[int]) -> Sequence[int]:
        """Return ids of ``rendered`` that begin with remembered ones, else ``canonical`` itself.

        Args:
            rendered: the prompt's text, special tokens written out.
            canonical: the ids that the tokenizer gives it.
        """
        entry = self._longest_beginning_of(rendered)
        if entry is None or _begins_with(canonical, entry.ids):
            return canonical
        rest = self._codec.encode_chat(rendered[len(entry.text) :])
        candidate = [*entry.ids, *rest]
        # Some tokenizers write a space before a text or normalise it: the rest of a prompt is
        # then not what they make of it alone.
        if self._codec.decode_chat(candidate) != rendered:
            return canonical
        return candidate

    def _renewed(self, ids: Sequence[int]) -> bool:
        """Return whether these very ids are known, and make them the newest.

        A checkpoint is published more than once, and decoding a long one takes milliseconds.
        """
        with self._lock:
            for entry in self._entries.values():
                if len(entry.ids) == len(ids) and _begins_with(ids, entry.ids):
                    self._make_newest(entry)
                    return True
        return False

    def _make_newest(self, entry: _Entry) -> None:
        self._entries.pop(entry.text, None)
        self._entries[entry.text] = entry

    def _longest_beginning_of(self, rendered: str) -> _Entry | None:
        with self._lock:
            entries = list(self._entries.values())
        fitting: Iterable[_Entry] = (
            entry
            for entry in entries
            if len(entry.text) < len(rendered) and rendered.startswith(entry.text)
        )
        return max(fitting, key=lambda entry: len(entry.text), default=None)

    def _count_characters(self) -> int:
        return sum(len(text) for text in self._entries)


def _begins_with(ids: Sequence[int], beginning: Sequence[int]) -> bool:
    return len(ids) >= len(beginning) and all(map(eq, beginning, ids))
