"""The form of an answer: where reasoning and tool calls are in it, and what its tokens must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from queue_service import constraints
from queue_service.constraints import Constraint
from queue_service.errors import RequestError
from queue_service.requests import ChatRequest, CompletionRequest
from queue_service.responses import Choice, ToolCall, tool_call_text
from queue_service.streams import TextKind
from queue_service.tool_fields import ToolChoiceMode
from workers.engine import TokenMatcher
from workers.reasoning import (
    Kind,
    ReasoningFormat,
    ReasoningSplitter,
    ThinkingBudget,
    starts_open,
)
from workers.text import Decoder, IncrementalDetokenizer
from workers.tool_calls import Text, ToolCallSplitter, ToolFormat, ToolSet, tool_grammar

_EVERY_TOKEN = np.uint32(0xFFFFFFFF)


# What a piece of an answer is, as streams name it.
PieceKind = TextKind


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a choice that is certain; a tool call's text is its object in JSON."""

    text: str
    kind: PieceKind = PieceKind.TEXT


class Compiled(Protocol):
    """A constraint made ready for one model."""

    def matcher(self) -> TokenMatcher:
        """Return the state of a new row."""

    def check(self, text: str) -> str | None:
        """Return what is wrong with a finished text, None when nothing is."""


class Compiler(Protocol):
    """Makes constraints ready; may take a while, so never on the engine thread."""

    def compile(self, constraint: Constraint) -> Compiled:
        """Return the constraint for this model; raises RequestError when it has to be refused."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the answer to one request consists of, and what bounds it.

    Attributes:
        reasoning: the model's tags, None where an answer has no reasoning.
        starts_open: the prompt has opened a block of reasoning.
        tools: what the model may call, None for nothing.
        compiled: what the text after any reasoning has to follow.
        thinking_budget: tokens of reasoning after which it is closed.
        closing_ids: the tokens that close it.
        job_id: from which calls without an id of their own get one.
    """

    reasoning: ReasoningFormat | None = None
    starts_open: bool = False
    tool_format: ToolFormat | None = None
    tools: ToolSet | None = None
    compiled: Compiled | None = None
    thinking_budget: int | None = None
    closing_ids: tuple[int, ...] = ()
    job_id: str = ""

    def splitter(self, choice: int) -> AnswerSplitter:
        """Return what splits the text of one choice."""
        calls = None
        if self.tool_format is not None and self.tools is not None:
            calls = ToolCallSplitter(
                self.tool_format, self.tools, job_id=self.job_id, choice=choice
            )
        return AnswerSplitter(self._reasoning_splitter(), calls)

    def matcher(self, decoder: Decoder) -> TokenMatcher | None:
        """Return what the tokens of one choice have to follow, None for nothing."""
        inner = self.compiled.matcher() if self.compiled is not None else None
        budget = None
        if self.thinking_budget is not None and self.reasoning is not None and self.closing_ids:
            budget = ThinkingBudget(self.closing_ids, self.thinking_budget)
        splitter = self._reasoning_splitter()
        if splitter is None or (budget is None and not self.starts_open):
            return inner
        if inner is None and budget is None:
            return None
        return _AfterReasoning(
            inner, budget, splitter, IncrementalDetokenizer(decoder, skip_special_tokens=False)
        )

    def check(self, choice: Choice) -> str | None:
        """Return what is wrong with a choice that should follow a constraint, None for nothing."""
        if self.compiled is None or choice.is_cut or choice.tool_calls:
            return None
        return self.compiled.check(choice.text)

    def _reasoning_splitter(self) -> ReasoningSplitter | None:
        if self.reasoning is None:
            return None
        interrupt = self.tool_format.start if self.tool_format is not None else None
        return ReasoningSplitter(self.reasoning, starts_open=self.starts_open, interrupt=interrupt)


PLAIN_TEXT = AnswerForm()


@dataclass(frozen=True, slots=True)
class AnswerForms:
    """What is known of a model's answers.

    Attributes:
        reasoning: its tags, None when it has none.
        tool_format: how it calls tools, None when it does not.
        compiler: makes constraints ready, None where nothing can be enforced.
        closing_ids: the tokens that close a block of reasoning.
        added_tokens: the model's added tokens with their ids.
    """

    reasoning: ReasoningFormat | None = None
    tool_format: ToolFormat | None = None
    compiler: Compiler | None = None
    closing_ids: tuple[int, ...] = ()
    added_tokens: Mapping[str, int] = field(default_factory=dict)

    def of_chat(self, request: ChatRequest, rendered: str, *, job_id: str) -> AnswerForm:
        """Return the form of the answer to a chat.

        Args:
            rendered: the prompt's text.

        Raises:
            RequestError: the request asks for what this model cannot do.
        """
        tools = self._tools(request)
        constraint = request.constraint
        demanded = self._demanded_calls(request, tools)
        if demanded is not None and constraint is not None:
            raise RequestError(
                "a demanded tool call and a response format exclude each other",
                param="tool_choice",
            )
        if request.thinking_budget is not None and self.reasoning is None:
            raise RequestError("this model does not reason", param="thinking_budget")
        compiled = self._compiled(demanded or constraint)
        if self.reasoning is None and tools is None and compiled is None:
            return PLAIN_TEXT
        return AnswerForm(
            reasoning=self.reasoning,
            starts_open=self.reasoning is not None
            and starts_open(rendered, self.reasoning, continues=request.continue_final_message),
            tool_format=self.tool_format if tools is not None else None,
            tools=tools,
            compiled=compiled,
            thinking_budget=request.thinking_budget,
            closing_ids=self.closing_ids,
            job_id=job_id,
        )

    def of_text(self, request: CompletionRequest) -> AnswerForm:
        """Return the form of the answer to a prompt: text as it comes.

        Raises:
            RequestError: the form that is asked for cannot be enforced.
        """
        compiled = self._compiled(request.constraint)
        return AnswerForm(compiled=compiled) if compiled is not None else PLAIN_TEXT

    def _tools(self, request: ChatRequest) -> ToolSet | None:
        if not request.tools or request.tool_choice.mode is ToolChoiceMode.NONE:
            return None
        if self.tool_format is None:
            raise RequestError("this model calls no tools", param="tools")
        return ToolSet(request.tools_for_template())

    def _demanded_calls(self, request: ChatRequest, tools: ToolSet | None) -> Constraint | None:
        choice = request.tool_choice
        if tools is None or choice.mode is ToolChoiceMode.AUTO:
            return None
        assert self.tool_format is not None
        grammar = tool_grammar(
            self.tool_format,
            tools,
            choice.name,
            parallel=request.parallel_tool_calls,
            tokens=self.added_tokens,
        )
        if grammar is None:
            raise RequestError(
                f"this model's tool calls ({self.tool_format.name}) cannot be demanded; "
                "leave tool_choice at auto",
                param="tool_choice",
            )
        return Constraint(constraints.ConstraintKind.GRAMMAR, grammar)

    def _compiled(self, constraint: Constraint | None) -> Compiled | None:
        if constraint is None:
            return None
        if self.compiler is None:
            raise RequestError(
                "the form of an answer cannot be enforced for this model", param="response_format"
            )
        return self.compiler.compile(constraint)


class AnswerSplitter:
    """Splits the text of one choice into content, reasoning and tool calls, as it comes."""

    def __init__(self, reasoning: ReasoningSplitter | None, calls: ToolCallSplitter | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._texts: dict[PieceKind, list[str]] = {}
        self.tool_calls: list[ToolCall] = []

    @property
    def reads_markers(self) -> bool:
        """Whether special tokens may mark parts of the text, and so must be in it."""
        return self._reasoning is not None or self._calls is not None

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token is one of reasoning."""
        return self._reasoning is not None and self._reasoning.in_reasoning

    def text(self, kind: PieceKind) -> str:
        """Return everything of a kind so far."""
        return "".join(self._texts.get(kind, ()))

    def push(self, text: str) -> list[Piece]:
        """Take more text and return what became certain."""
        if self._reasoning is None:
            return self._content(text)
        pieces: list[Piece] = []
        for part in self._reasoning.push(text):
            pieces += self._part(part.kind, part.text)
        return pieces

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """End the text and return what was held back.

        Args:
            is_cut: something else than the model ended it.
        """
        pieces: list[Piece] = []
        for part in self._reasoning.finish() if self._reasoning is not None else ():
            pieces += self._part(part.kind, part.text)
        if self._calls is not None:
            pieces += self._described(self._calls.finish(is_cut=is_cut))
        return pieces

    def _part(self, kind: Kind, text: str) -> list[Piece]:
        if kind is Kind.CONTENT:
            return self._content(text)
        return [self._recorded(Piece(text, PieceKind.REASONING))]

    def _content(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._calls is None:
            return [self._recorded(Piece(text))]
        return self._described(self._calls.push(text))

    def _described(self, parts: Sequence[object]) -> list[Piece]:
        pieces = []
        for part in parts:
            if isinstance(part, Text):
                pieces.append(self._recorded(Piece(part.text)))
                continue
            call = ToolCall(part.id, part.name, part.arguments_json)  # type: ignore[attr-defined]
            told = tool_call_text(len(self.tool_calls), call.to_body())
            self.tool_calls.append(call)
            pieces.append(self._recorded(Piece(told, PieceKind.TOOL)))
        return pieces

    def _recorded(self, piece: Piece) -> Piece:
        self._texts.setdefault(piece.kind, []).append(piece.text)
        return piece


class _AfterReasoning:
    """Leaves reasoning free, closes it when its budget is spent, and then lets a matcher decide."""

    def __init__(
        self,
        inner: TokenMatcher | None,
        budget: ThinkingBudget | None,
        splitter: ReasoningSplitter,
        detokenizer: IncrementalDetokenizer,
    ) -> None:
        self._inner = inner
        self._budget = budget
        self._splitter = splitter
        self._detokenizer = detokenizer
        self._is_asked = False
        self._forced: int | None = None

    def fill(self, mask_row: npt.NDArray[np.uint32]) -> None:
        """Set the bits of the allowed token ids."""
        forced = self._next_forced()
        if forced is not None:
            mask_row[:] = 0
            mask_row[forced // 32] = np.uint32(1 << forced % 32)
        elif self._inner is None or self._splitter.in_reasoning:
            mask_row[:] = _EVERY_TOKEN
        else:
            self._inner.fill(mask_row)

    def accept(self, token_id: int) -> None:
        """Take the next token."""
        self._next_forced()
        self._is_asked = False
        was_reasoning = self._splitter.in_reasoning or self._forced is not None
        self._splitter.push(self._detokenizer.push(token_id))
        if self._inner is not None and not was_reasoning:
            self._inner.accept(token_id)

    def _next_forced(self) -> int | None:
        """Ask the budget once a token; it counts the questions."""
        if not self._is_asked:
            self._is_asked = True
            self._forced = None
            if self._budget is not None:
                self._forced = self._budget.next_id(in_reasoning=self._splitter.in_reasoning)
        return self._forced
