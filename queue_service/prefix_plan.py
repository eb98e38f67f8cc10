"""Finds which lines of a batch file begin alike, before any of them is queued.

A line's *prompt text* stands for what its prompt will be: roles and contents in their order. Its
beginning is hashed at a few lengths. The longest of them whose hash another line has too makes the
line one of a group; what all texts with that hash have in common is the group's beginning.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, Self

from pydantic_core import from_json, to_json

from queue_service.beginnings import common_length

# Lines that part between two of these are one group, with what all of them share.
LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
CHARS_PER_TOKEN: Final = 4

_GROUP_DIGITS: Final = 16
_MARK = re.compile(rf"([0-9a-f]{{{_GROUP_DIGITS}}}):([1-9][0-9]{{0,8}})")
_MOST_GROUPS: Final = 100_000
_MOST_CHARS: Final = 2**20
# Of groups beyond this, what is common is known to the next lower of the lengths.
_MOST_TEXT_BYTES: Final = 8 * 2**20
_ENTRY_BYTES: Final = 150
_FIELD_END, _TURN_END = "\x1f", "\x1e"
_HEAD_FIELDS: Final = ("chat_template_kwargs", "reasoning_effort")
_EXTRA_FIELDS: Final = ("tool_calls", "name", "tool_call_id")

Body = Mapping[str, Any]
Lines = Iterable[tuple[int, bytes | None]]


@dataclass(frozen=True, slots=True)
class Mark:
    """What a line has in common with others.

    Attributes:
        group: a digest of the beginning of its prompt text that they share.
        chars: the length of that beginning.
    """

    group: str
    chars: int

    def __str__(self) -> str:
        return f"{self.group}:{self.chars}"

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """Read what str() makes of a mark; None where it is no mark."""
        found = _MARK.fullmatch(text) if text is not None else None
        return None if found is None else cls(found[1], int(found[2]))


@dataclass(frozen=True, slots=True)
class Group:
    """Lines with one mark.

    Attributes:
        num_lines: they may have it in common with lines of longer marks, too.
        first_line: the number of the first of them in the file.
    """

    mark: Mark
    num_lines: int
    first_line: int

    @property
    def saved_chars(self) -> int:
        """Characters that need no computing when the first of the lines has done it for all."""
        return (self.num_lines - 1) * self.mark.chars


@dataclass(frozen=True, slots=True)
class Cut:
    """A place in a chat, before which it is like others.

    Attributes:
        message: its index.
        field: `content` or `reasoning_content`.
        offset: characters of the field that come before.
    """

    message: int
    field: str
    offset: int


class PrefixPlan:
    """The marks of a file's lines: a few bytes for each line and each group."""

    def __init__(self) -> None:
        self._group_of = array("I")  # for each line one more than its group's number, 0 for none
        self._digests = array("Q")
        self._chars = array("I")
        self._num_lines = array("I")
        self._first_lines = array("Q")

    def mark(self, index: int) -> Mark | None:
        """Return the mark of a line, counted from 0 without blank ones; None for none."""
        group = self._group_of[index] if index < len(self._group_of) else 0
        return self._mark(group - 1) if group and self._num_lines[group - 1] else None

    @property
    def num_lines(self) -> int:
        """How many lines have a mark."""
        return sum(self._num_lines)

    @property
    def num_groups(self) -> int:
        """How many marks there are."""
        return sum(1 for count in self._num_lines if count)

    @property
    def tokens_saved(self) -> int:
        """About how many tokens need no computing, at four characters each."""
        pairs = zip(self._num_lines, self._chars, strict=True)
        return sum((lines - 1) * chars for lines, chars in pairs if lines) // CHARS_PER_TOKEN

    def groups(self) -> Iterator[Group]:
        """Yield the groups, no two with the same mark."""
        for index, num_lines in enumerate(self._num_lines):
            if num_lines:
                yield Group(self._mark(index), num_lines, self._first_lines[index])

    def summary(self) -> str:
        """Return what was found, in a sentence."""
        if not self.num_groups:
            return "no lines were found that begin alike"
        groups = "1 group" if self.num_groups == 1 else f"{self.num_groups:,} groups"
        return (
            f"{self.num_lines:,} of {len(self._group_of):,} lines begin like others, in {groups}:"
            f" about {self.tokens_saved:,} tokens need not be computed again"
        )

    def to_object(self) -> dict[str, int]:
        """Return the figures for ``--json``."""
        return {
            "groups": self.num_groups,
            "lines": self.num_lines,
            "tokens_saved": self.tokens_saved,
        }

    def _mark(self, index: int) -> Mark:
        return Mark(f"{self._digests[index]:0{_GROUP_DIGITS}x}", self._chars[index])


def plan_prefixes(read: Callable[[], Lines]) -> PrefixPlan:
    """Find the lines that begin alike.

    Memory: 10 to 150 bytes a line, and 8 MB of texts.

    Args:
        read: gives number and bytes of each line that is not blank; called once, or twice where
            the texts in memory were too many to tell all in the first reading.
    """
    planner = _Planner()
    for line, raw in read():
        planner.note(line, prompt_text_of_line(raw))
    planner.find_groups()
    if planner.needs_second_reading:
        for _, raw in read():
            planner.note_again(raw)
    return planner.plan()


def prompt_text_of_line(raw: bytes | None) -> str:
    """Return the prompt text of a batch file's line; empty if it is short, or no request."""
    if raw is None or len(raw) < LENGTHS[0]:
        return ""  # so short a text has nothing to share
    try:
        fields = from_json(raw)
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    body = fields.get("body", fields)
    return prompt_text(body) if isinstance(body, dict) else ""


def prompt_text(body: Body) -> str:
    """Return the text that stands for a prompt; empty where there is none, or several."""
    messages = body.get("messages")
    if isinstance(messages, list):
        try:
            return _head(body) + "".join([part for m in messages for part in _turn(m)])
        except (AttributeError, LookupError, TypeError, ValueError):
            return ""  # it is no request, as others will say
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else ""


def cut_after(body: Body, chars: int) -> Cut | None:
    """Return where so many characters of a chat's prompt text end; None before its first turn.

    A place between two contents counts as the end of the first one.

    Args:
        body: of a request that was checked.
    """
    cut: Cut | None = None
    rest = chars - len(_head(body))
    for index, message in enumerate(body["messages"]):
        if rest <= 0:
            break
        role, _, reasoning, _, content, _, extra, _ = _turn(message)
        rest -= len(role) + 1
        if rest <= 0:  # the roles part, or one of the turns has no reasoning
            break
        if rest <= len(reasoning):
            return Cut(index, "reasoning_content", rest)
        rest = max(0, rest - len(reasoning) - 1)
        if rest <= len(content):
            return Cut(index, "content", rest)
        cut = Cut(index, "content", len(content))
        rest -= len(content) + 1 + len(extra) + 1
    return cut


class _Planner:
    """What is known of the lines while a file is read."""

    def __init__(self) -> None:
        self._plan = PrefixPlan()
        self._numbers = array("Q")
        self._hashes = array("Q")  # those of each line, one after the other
        self._num_hashes = bytearray()
        # What is common to all texts with a hash. Since none comes in after one was left out, each
        # was there for all texts of the first reading.
        self._common: dict[int, str] = {}
        self._common_bytes = 0
        self._is_full = False
        self._groups: dict[int, int] = {}  # by hash
        self._unknown: set[int] = set()  # hashes of groups whose common text is to be found yet
        self._next_line = self._next_hash = 0

    def note(self, line: int, text: str) -> None:
        """Take in a line."""
        count = value = start = 0
        for level, end in enumerate(LENGTHS):
            if len(text) < end:
                break
            # Python's hash has a secret of the process in it: nobody can make two alike.
            value = hash((value, text[start:end])) & 0xFFFF_FFFF_FFFF_FFFF
            self._hashes.append(value)
            common = self._common.get(value)
            if common is None:
                if not self._is_full:
                    self._is_full = not self._add(value, text, level)
            elif not text.startswith(common):
                self._shorten(value, text)
            start = end
            count += 1
        self._numbers.append(line)
        self._num_hashes.append(count)

    def find_groups(self) -> None:
        """Give each line that shares a beginning a group."""
        group_of = self._plan._group_of = array("I", bytes(4 * len(self._num_hashes)))
        for level in reversed(range(max(self._num_hashes, default=0))):
            repeated = self._repeated(level)
            if not repeated:
                continue
            for index, value in self._at(level):
                if not group_of[index] and value in repeated:
                    group_of[index] = self._group(value, index)
        self._numbers = array("Q")
        for value in self._common.keys() - self._groups.keys():
            self._remove(value)
        self._unknown = self._groups.keys() - self._common.keys()

    @property
    def needs_second_reading(self) -> bool:
        """Whether there are groups of which the first reading does not tell all."""
        return bool(self._unknown)

    def note_again(self, raw: bytes | None) -> None:
        """Take in the next line once more."""
        if self._next_line == len(self._num_hashes):
            return
        first = self._next_hash
        self._next_hash += self._num_hashes[self._next_line]
        self._next_line += 1
        values = self._hashes[first : self._next_hash]
        if self._unknown.isdisjoint(values):
            return
        text = prompt_text_of_line(raw)
        for level, value in enumerate(values):
            if value not in self._unknown:
                continue
            common = self._common.get(value)
            if common is not None:
                if not text.startswith(common):
                    self._shorten(value, text)
            elif not self._add(value, text, level):
                self._unknown.remove(value)
                self._settle(value, text[: LENGTHS[level]])

    def plan(self) -> PrefixPlan:
        """Return what was found."""
        for value, text in self._common.items():
            self._settle(value, text)
        for group, chars in enumerate(self._plan._chars):
            if not chars:  # the file was not read to its end again
                self._plan._num_lines[group] = 0
        return self._plan

    def _at(self, level: int) -> Iterator[tuple[int, int]]:
        """Yield the index and the hash of each line that is long enough."""
        start = 0
        for index, count in enumerate(self._num_hashes):
            if count > level:
                yield index, self._hashes[start + level]
            start += count

    def _repeated(self, level: int) -> set[int]:
        values = sorted(value for _, value in self._at(level))
        return {one for one, other in pairwise(values) if one == other}

    def _group(self, value: int, index: int) -> int:
        """Count a line in a group; return one more than its number, 0 where it got none."""
        plan = self._plan
        group = self._groups.get(value)
        if group is None:
            group = len(self._groups)
            if group == _MOST_GROUPS:
                return 0
            self._groups[value] = group
            plan._digests.append(0)
            plan._chars.append(0)
            plan._num_lines.append(0)
            plan._first_lines.append(self._numbers[index])
        plan._num_lines[group] += 1
        return group + 1

    def _add(self, value: int, text: str, level: int) -> bool:
        """Begin with a text as what is common; False where there is no room for it."""
        # All that have the next length in common as well are of a group of that length.
        common = text[: LENGTHS[level + 1]] if level + 1 < len(LENGTHS) else text[:_MOST_CHARS]
        self._common_bytes += _num_bytes(common)
        if self._common_bytes > _MOST_TEXT_BYTES:
            self._common_bytes -= _num_bytes(common)
            return False
        self._common[value] = common
        return True

    def _shorten(self, value: int, text: str) -> None:
        common = self._remove(value)
        common = common[: common_length(common, text)]
        self._common_bytes += _num_bytes(common)
        self._common[value] = common

    def _remove(self, value: int) -> str:
        common = self._common.pop(value)
        self._common_bytes -= _num_bytes(common)
        return common

    def _settle(self, value: int, text: str) -> None:
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_GROUP_DIGITS // 2)
        group = self._groups[value]
        self._plan._digests[group] = int.from_bytes(digest.digest())
        self._plan._chars[group] = len(text)


def _head(body: Body) -> str:
    """Return what else a template may write at the beginning of a chat."""
    head = [body.get(name) for name in _HEAD_FIELDS]
    if body.get("tool_choice") != "none":
        head.append(body.get("tools"))
    return to_json(head).decode() + _TURN_END if any(head) else ""


def _turn(message: Body) -> tuple[str, str, str, str, str, str, str, str]:
    """Return role, reasoning, content and the rest, each with what ends it."""
    role, content = message["role"], message.get("content")
    if type(content) is not str:
        content = "".join([part["text"] for part in content]) if content else ""
    reasoning = extra = ""
    if len(message) > 2:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        extras = [message.get(name) for name in _EXTRA_FIELDS]
        extra = to_json(extras).decode() if any(extras) else ""
    if role == "developer":
        role = "system"
    return role, _FIELD_END, reasoning, _FIELD_END, content, _FIELD_END, extra, _TURN_END


def _num_bytes(text: str) -> int:
    return sys.getsizeof(text) + _ENTRY_BYTES
