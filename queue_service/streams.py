"""What a job's stream tells, and what of it a reader has not been shown yet; knows no server.

An entry has the choice's token index ``i`` at which its text begins, and the attempt ``a`` that
wrote it. One of a higher attempt takes the place of what was told from its index on: where a worker
goes on with what another has begun, that is nothing; where it tells the text once more, all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from queue_service.responses import tool_call_text

_CURSOR_VERSION = 1


class TextKind(StrEnum):
    """What a piece of an answer is."""

    TEXT = "text"
    REASONING = "reasoning"
    TOOL = "tool"


class EndReason(StrEnum):
    """How a job ended."""

    DONE = "done"
    ERROR = "error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Text:
    """Text that follows what was shown of its choice and kind.

    Attributes:
        choice: counted from 0 over all answers of the request.
        text: never empty; of the kind TOOL a JSON object for each call, one behind the other.
        first_token: the choice's tokens before its entry; None where the result had the text.
        attempt: the execution that wrote it; None where the result had it.
    """

    choice: int
    kind: TextKind
    text: str
    first_token: int | None = None
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class Restarted:
    """What was shown of a choice, of every kind, does not count: it is told from its start."""

    choice: int


@dataclass(frozen=True, slots=True)
class End:
    """The job ended; the message says why when it was not done."""

    reason: EndReason
    message: str | None = None

    @classmethod
    def of_entry(cls, fields: Mapping[bytes, bytes]) -> End:
        """Read a stream's last entry."""
        message = fields.get(b"message")
        return cls(EndReason(fields[b"e"].decode()), message.decode() if message else None)


Event = Text | Restarted | End

_KINDS = {kind.value.encode(): kind for kind in TextKind}


class Transcript:
    """Turns a stream's entries into events, each text once, whatever is told or delivered again.

    Args:
        job_id: whose stream it is.
        after: a cursor of another transcript of the same job: what it showed is not shown again.

    Raises:
        ValueError: this is no cursor of that job.
    """

    def __init__(self, job_id: str, after: str | None = None) -> None:
        self._job_id = job_id
        self._read_to = (0, 0)
        self._shown_to = (0, 0)
        self._choices: dict[int, _Choice] = {}
        if after is not None:
            self._resume(after)

    @property
    def last_id(self) -> str:
        """The entry that was fed last.

        The stream is read from its start also after a cursor: what a later worker tells takes the
        place of earlier entries.
        """
        return _id_text(self._read_to)

    @property
    def cursor(self) -> str:
        """Where a later reader goes on: after the last event that was taken from here."""
        shown = {
            str(index): marks
            for index, choice in self._choices.items()
            if (marks := choice.marks())
        }
        fields = {
            "v": _CURSOR_VERSION,
            "job": self._job_id,
            "id": _id_text(max(self._read_to, self._shown_to)),
            "shown": shown,
        }
        return json.dumps(fields, separators=(",", ":"))

    def feed(self, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Iterator[Text | Restarted]:
        """Take an entry and yield what is new with it; it counts as fed when all was taken.

        Entries that were fed before, and kinds of text that are not known, give nothing.
        """
        position = _position(entry_id.decode())
        if position <= self._read_to:
            return
        kind = _KINDS.get(fields.get(b"k", b"text"))
        if kind is not None and b"t" in fields:
            choice = self._choice(int(fields.get(b"c", 0)))
            text = fields[b"t"].decode("utf-8", "replace")
            is_told = choice.tell(
                _Piece(kind, text, int(fields.get(b"i", 0)), int(fields.get(b"a", 1)))
            )
            if is_told and position > self._shown_to:
                yield from choice.news()
        self._read_to = position

    def settle(self, body: Mapping[str, Any]) -> Iterator[Text | Restarted]:
        """Take the answer, which is what counts, and yield what it has beyond what was shown."""
        for index, answer in enumerate(body.get("choices", ())):
            choice = self._choice(index)
            choice.settle(_pieces_of(answer))
            yield from choice.news()

    def _choice(self, index: int) -> _Choice:
        return self._choices.setdefault(index, _Choice(index))

    def _resume(self, cursor: str) -> None:
        try:
            fields = json.loads(cursor)
            if fields["v"] != _CURSOR_VERSION or fields["job"] != self._job_id:
                raise ValueError("of another version or job")
            self._shown_to = _position(fields["id"])
            for index, marks in fields["shown"].items():
                shown = {
                    TextKind(kind): _Shown(None, int(length), str(digest))
                    for kind, (length, digest) in marks.items()
                }
                self._choices[int(index)] = _Choice(int(index), shown)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ValueError(f"no cursor of {self._job_id}: {cursor!r}") from exc


@dataclass(frozen=True, slots=True)
class _Piece:
    kind: TextKind
    text: str
    first_token: int | None = None
    attempt: int | None = None


@dataclass(slots=True)
class _Shown:
    """What a reader was shown of one kind; of what an earlier reader was, a digest is known."""

    text: str | None = ""
    length: int = 0
    digest: str = ""

    def agrees(self, told: str, *, is_all: bool) -> bool:
        """Whether it is what ``told`` begins with, or may be when more is told."""
        if len(told) < self.length and is_all:
            return False
        if self.text is not None:
            return told.startswith(self.text) or self.text.startswith(told)
        return len(told) < self.length or _digest(told[: self.length]) == self.digest

    def extend(self, text: str) -> None:
        """From now on this was shown, of which it was a part."""
        self.text, self.length = text, len(text)

    def mark(self) -> tuple[int, str]:
        """Return what a cursor says of it."""
        return self.length, self.digest if self.text is None else _digest(self.text)


@dataclass(slots=True)
class _Choice:
    """One choice: the pieces that count now, and what was shown.

    Attributes:
        told: the pieces' text of each kind.
        is_in_step: everything told was shown, and nothing else.
        is_settled: the pieces are the result's.
    """

    index: int
    shown: dict[TextKind, _Shown] = field(default_factory=dict)
    pieces: list[_Piece] = field(default_factory=list)
    told: dict[TextKind, str] = field(default_factory=dict)
    attempt: int = 0
    is_in_step: bool = field(init=False)
    is_settled: bool = False

    def __post_init__(self) -> None:
        self.is_in_step = not self.shown

    def tell(self, piece: _Piece) -> bool:
        """Take the next piece, in the place of what earlier attempts told from there on.

        One of an earlier attempt is not taken: False.
        """
        assert piece.attempt is not None
        assert piece.first_token is not None
        if piece.attempt < self.attempt:
            return False
        if piece.attempt > self.attempt:
            self.attempt = piece.attempt
            kept = [p for p in self.pieces if (p.first_token or 0) < piece.first_token]
            if len(kept) < len(self.pieces):
                self._replace(kept)
        self.pieces.append(piece)
        self.told[piece.kind] = self.told.get(piece.kind, "") + piece.text
        return True

    def settle(self, pieces: Sequence[_Piece]) -> None:
        """Take the result's pieces in the place of all."""
        self._replace(pieces)
        self.is_settled = True

    def _replace(self, pieces: Sequence[_Piece]) -> None:
        self.pieces, self.told, self.is_in_step = list(pieces), {}, False
        for piece in pieces:
            self.told[piece.kind] = self.told.get(piece.kind, "") + piece.text

    def news(self) -> Iterator[Text | Restarted]:
        """Yield what was not shown yet; it counts as shown when it is yielded."""
        if self.is_in_step:
            piece = self.pieces[-1]
            yield from self._show(piece, len(self.told[piece.kind]))
            return
        if not all(
            shown.agrees(self.told.get(kind, ""), is_all=self.is_settled)
            for kind, shown in self.shown.items()
        ):
            self.shown = {}
            yield Restarted(self.index)
        if any(len(text) > self._length(kind) for kind, text in self.told.items()):
            ends = dict.fromkeys(TextKind, 0)
            for piece in self.pieces:
                ends[piece.kind] += len(piece.text)
                yield from self._show(piece, ends[piece.kind])
        kinds = self.told.keys() | self.shown.keys()
        self.is_in_step = all(len(self.told.get(k, "")) == self._length(k) for k in kinds)

    def marks(self) -> dict[str, tuple[int, str]]:
        """Return what a cursor says of the choice, by kind."""
        return {kind.value: shown.mark() for kind, shown in self.shown.items()}

    def _show(self, piece: _Piece, end: int) -> Iterator[Text]:
        """Yield what is new of a piece that ends after so many characters of its kind."""
        shown = self.shown.setdefault(piece.kind, _Shown())
        if end <= shown.length:
            return
        num_known = max(0, shown.length - (end - len(piece.text)))
        shown.extend(self.told[piece.kind][:end])
        text = piece.text[num_known:]
        yield Text(self.index, piece.kind, text, piece.first_token, piece.attempt)

    def _length(self, kind: TextKind) -> int:
        return self.shown[kind].length if kind in self.shown else 0


def text_of(body: Mapping[str, Any]) -> str:
    """Return the text of a completion's first choice."""
    return str(_text_of(body["choices"][0]) or "")


def _text_of(answer: Mapping[str, Any]) -> Any:
    return answer["message"]["content"] if "message" in answer else answer["text"]


def _pieces_of(answer: Mapping[str, Any]) -> list[_Piece]:
    """Return what the stream of a finished choice would tell, kind by kind."""
    message = answer.get("message", {})
    calls = enumerate(message.get("tool_calls") or ())
    texts = {
        TextKind.REASONING: message.get("reasoning"),
        TextKind.TEXT: _text_of(answer),
        TextKind.TOOL: "".join(tool_call_text(index, call) for index, call in calls),
    }
    return [_Piece(kind, str(text)) for kind, text in texts.items() if text]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=9).hexdigest()


def _position(entry_id: str) -> tuple[int, int]:
    milliseconds, number = entry_id.split("-")
    return int(milliseconds), int(number)


def _id_text(position: tuple[int, int]) -> str:
    return "{}-{}".format(*position)
