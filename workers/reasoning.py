"""Reasoning apart from the answer: which tags a model thinks in, and a text split at them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from workers.markers import SPACES, find_first, num_certain

# Between two blocks that follow one another.
_BLOCK_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around a model's reasoning.

    Attributes:
        start: what opens a block, not empty.
        end: what closes it, not empty.
        answer: a header that a model writes instead, when it answers without reasoning; "" for
            most models, which write nothing.
        tokens: vocabulary entries that together tell that a model knows the format.
    """

    start: str
    end: str
    answer: str = ""
    tokens: tuple[str, ...] = ()

    @property
    def closing_text(self) -> str:
        """Return what closes a block from outside, with the line breaks that models expect."""
        return f"\n{self.end}\n\n"


def _tags(start: str, end: str) -> ReasoningFormat:
    return ReasoningFormat(start, end, tokens=(start, end))


# The first four and the last are those of mlx-lm's tokenizer_utils.
_FORMATS = (
    _tags("<think>", "</think>"),
    _tags("<longcat_think>", "</longcat_think>"),
    _tags("<|think:start|>", "<|think:end|>"),
    ReasoningFormat("<|channel>thought", "<channel|>", tokens=("<|channel>", "<channel|>")),
    _tags("[THINK]", "[/THINK]"),
    _tags("<|begin_of_thought|>", "<|end_of_thought|>"),
    _tags("<|START_THINKING|>", "<|END_THINKING|>"),
    _tags("<seed:think>", "</seed:think>"),
    ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        answer="<|channel|>final<|message|>",
        tokens=("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
    ),
    ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    ),
)


def find_format(
    chat_template: str | None, vocabulary: Container[str] = ()
) -> ReasoningFormat | None:
    """Return the tags that the template writes or reads, else those in the vocabulary.

    A format does not mean that the model always reasons, only how it looks when it does.
    """
    if chat_template is not None:
        for known in _FORMATS:
            if known.start in chat_template or known.end in chat_template:
                return known
    for known in _FORMATS:
        if all(token in vocabulary for token in known.tokens):
            return known
    return None


def starts_open(rendered_prompt: str, format: ReasoningFormat, *, continues: bool = False) -> bool:
    """Return whether the answer begins inside a block that the prompt opened.

    Args:
        continues: the prompt ends inside an assistant turn that the model goes on with. Else only
            the very end counts, so that a tag in a user's message opens nothing.
    """
    if continues:
        return rendered_prompt.rfind(format.start) > rendered_prompt.rfind(format.end)
    return rendered_prompt.rstrip(SPACES).endswith(format.start)


class Kind(StrEnum):
    """What a piece of the text is."""

    REASONING = "reasoning"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became certain, never empty."""

    kind: Kind
    text: str


class _State(Enum):
    OPENING = auto()  # nothing but spaces yet, at the start or after a block
    REASONING = auto()
    ANSWER = auto()


class ReasoningSplitter:
    """Splits one answer into reasoning and content, however it comes in pieces.

    Reasoning is what stands in blocks at the answer's beginning. A tag after that is content, and
    so is a closing tag that nothing opened. Spaces and line breaks around reasoning and after a
    closing tag are dropped; content without reasoning before it stays as it is. A block that is
    never closed is reasoning to its end.

    Args:
        format: the model's tags. An opening tag that the model repeats is dropped too.
        starts_open: see `starts_open`.
        interrupt: text that ends a block without closing it and begins the content, such as the
            start of a tool call; None when nothing does.
    """

    def __init__(
        self, format: ReasoningFormat, *, starts_open: bool, interrupt: str | None = None
    ) -> None:
        self._format = format
        self._ends = (format.end,) if interrupt is None else (format.end, interrupt)
        self._state = _State.REASONING if starts_open else _State.OPENING
        self._held = ""
        self._had_block = starts_open
        self._has_reasoning = False
        self._is_block_empty = True

    @property
    def in_reasoning(self) -> bool:
        """Return whether a block is open after the text so far.

        A token for which this holds before its text is pushed is a reasoning token: the closing
        tag counts, an opening one does not.
        """
        return self._state is _State.REASONING

    def push(self, text: str) -> list[Piece]:
        """Take more text and return what became certain, nothing while it may be part of a tag."""
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """End the text and return what was held back. Part of a tag is text like any other."""
        held, self._held = self._held, ""
        pieces: list[Piece] = []
        if self._state is _State.REASONING:
            self._add_reasoning(held.strip(SPACES) if self._is_block_empty else held, pieces)
        else:
            self._add_content(held.lstrip(SPACES) if self._had_block else held, pieces)
        return pieces

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take what can be taken in the state we are in; return whether the state changed."""
        if self._state is _State.OPENING:
            return self._open()
        if self._state is _State.REASONING:
            return self._reason(pieces)
        self._add_content(self._held, pieces)
        self._held = ""
        return False

    def _open(self) -> bool:
        text = self._held.lstrip(SPACES)
        if text.startswith(self._format.start):
            self._held = text[len(self._format.start) :]
            self._state = _State.REASONING
            self._had_block = self._is_block_empty = True
            return True
        answer = self._format.answer
        if answer and text.startswith(answer):
            self._held = text[len(answer) :]
        elif self._format.start.startswith(text) or answer.startswith(text):
            return False
        elif self._had_block:
            self._held = text
        self._state = _State.ANSWER
        return True

    def _reason(self, pieces: list[Piece]) -> bool:
        if self._is_block_empty:
            text = self._held.lstrip(SPACES)
            if text.startswith(self._format.start):
                self._held = text[len(self._format.start) :]
                return True
            if self._format.start.startswith(text):
                return False
            self._held = text
        found = find_first(self._held, self._ends)
        if found is None:
            certain = self._held[: num_certain(self._held, self._ends)].rstrip(SPACES)
            self._held = self._held[len(certain) :]
            self._add_reasoning(certain, pieces)
            return False
        start, marker = found
        self._add_reasoning(self._held[:start], pieces)
        if marker == self._format.end:
            self._held = self._held[start + len(marker) :]
            self._state = _State.OPENING
        else:
            self._held = self._held[start:]
            self._state = _State.ANSWER
        return True

    def _add_reasoning(self, text: str, pieces: list[Piece]) -> None:
        text = text.rstrip(SPACES)
        if not text:
            return
        if self._is_block_empty and self._has_reasoning:
            text = _BLOCK_SEPARATOR + text
        self._is_block_empty = False
        self._has_reasoning = True
        pieces.append(Piece(Kind.REASONING, text))

    def _add_content(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(Piece(Kind.CONTENT, text))


class ThinkingBudget:
    """Closes a block of reasoning after a number of tokens, by forcing the ids that close it.

    It is asked before every token, and depends on nothing but the answers it was given, so that a
    replay forces the same tokens. It closes one block; what the model does after that is its own.

    Args:
        end_ids: the token ids of the format's ``closing_text``, at least one.
        budget: reasoning tokens that the model may choose itself, 0 or more.

    Raises:
        ValueError: the budget is negative or there are no ids.
    """

    def __init__(self, end_ids: Sequence[int], budget: int) -> None:
        if budget < 0:
            raise ValueError(f"the budget must be at least 0, not {budget}")
        if not end_ids:
            raise ValueError("there are no ids to close the block with")
        self._num_left = budget
        self._end_ids = tuple(end_ids)
        self._num_forced = 0

    @property
    def is_spent(self) -> bool:
        """Return whether every closing id was given: there is nothing left to ask."""
        return self._num_forced == len(self._end_ids)

    def next_id(self, *, in_reasoning: bool) -> int | None:
        """Return the id that the next token must be, None when the model may choose.

        Args:
            in_reasoning: a block is open before this token; see `ReasoningSplitter`.
        """
        if self.is_spent:
            return None
        if not self._num_forced:
            if not in_reasoning:
                return None
            if self._num_left:
                self._num_left -= 1
                return None
        token_id = self._end_ids[self._num_forced]
        self._num_forced += 1
        return token_id
