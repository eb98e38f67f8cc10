"""Keeps a token's name that somebody wrote in a message apart from the token that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

# Stands inside a name that is only text. A noncharacter of Unicode: no text of anybody's has it.
BREAK: Final = "\ufdd0"
_ESCAPED_BREAK: Final = json.dumps(BREAK)[1:-1]
_OWN_ROLE: Final = "assistant"


class LiteralTokens:
    """Marks the names of tokens in what a request says, so that they are encoded as text.

    A chat template writes tokens by their names, and puts messages between them. A message that
    holds such a name would open or end a turn. Here the name is broken after its first character
    before the template is rendered, and the rendered text encoded in pieces from break to break,
    none of which holds the name.

    What a model said itself may hold tokens that are not special, such as those around a thought,
    and these are left whole in an assistant's turn.

    Args:
        special: names of tokens with a meaning of their own.
        markers: names of others that a template writes.
    """

    def __init__(self, special: Iterable[str], markers: Iterable[str] = ()) -> None:
        self._special = {name for name in special if len(name) > 1}
        self._of_model = _Names(self._special)
        self._of_others = _Names(self._special | {name for name in markers if len(name) > 1})

    def marked_messages(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return turns of a chat in which no text holds a token's name; roles stay as they are."""
        return [self._marked_message(message) for message in messages]

    def marked(self, value: Any) -> Any:
        """Return a value in which no text holds a token's name: tools, for one."""
        return self._of_others.broken(value)

    def count(self, text: str) -> int:
        """Return how many names of special tokens stand in a text."""
        return self._of_model.count(text)

    def _marked_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        names = self._of_model if message.get("role") == _OWN_ROLE else self._of_others
        return {
            key: value if key == "role" else names.broken(value) for key, value in message.items()
        }


class _Names:
    """A set of names and how to break them."""

    def __init__(self, names: Collection[str]) -> None:
        alternatives = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
        self._first_characters = {name[0] for name in names}
        self._name = re.compile(alternatives)
        # Each place where one begins, also inside another.
        self._beginning = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL)

    def count(self, text: str) -> int:
        return sum(1 for _ in self._name.finditer(text))

    def broken(self, value: Any) -> Any:
        if isinstance(value, str):
            text = value.replace(BREAK, "")
            if any(character in text for character in self._first_characters):
                return self._beginning.sub(rf"\1{BREAK}", text)
            return text
        if isinstance(value, Mapping):
            return {self.broken(key): self.broken(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(item) for item in value]
        return value


def unescaped(rendered: str) -> str:
    """Return a rendered chat in which every break is the character itself."""
    return rendered.replace(_ESCAPED_BREAK, BREAK)


def pieces(rendered: str) -> list[str]:
    """Return the texts between the breaks of a rendered chat, to be encoded each by itself."""
    return [piece for piece in rendered.split(BREAK) if piece]
