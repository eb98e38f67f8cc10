"""One choice of an answer as its tokens come: text, log-probabilities, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from queue_service.responses import Choice, FinishReason, Logprob, TokenLogprob
from workers.answer_forms import AnswerSplitter, Piece, PieceKind
from workers.engine import Token
from workers.text import Decoder, TextPipeline


class AnswerDecoder(Decoder, Protocol):
    """What is asked of a tokenizer here."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; those of all tokens joined are the text's."""


class ChoiceBuilder:
    """Turns the tokens of one choice into the choice; a pure function of them.

    Args:
        splitter: finds reasoning and tool calls in the text.
        stop_ids: tokens that end the choice, without a text of their own.
        stop_strings: text that ends it and is no part of it.
        token_limit: completion tokens after which it ends.
        echo: text that it begins with.
    """

    def __init__(
        self,
        decoder: AnswerDecoder,
        splitter: AnswerSplitter,
        *,
        stop_ids: frozenset[int],
        stop_strings: tuple[str, ...],
        token_limit: int,
        echo: str = "",
    ) -> None:
        self._decoder = decoder
        self._splitter = splitter
        self._text = TextPipeline(
            decoder,
            eos_token_ids=stop_ids,
            stop_strings=stop_strings,
            token_limit=token_limit,
            skip_special_tokens=not splitter.reads_markers,
        )
        self._echo = echo
        self._num_reasoning_tokens = 0
        self._logprobs: list[TokenLogprob] = []

    @property
    def has_ended(self) -> bool:
        """Whether the last token was the last."""
        return self._text.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Completion tokens so far."""
        return self._text.num_tokens

    def begin(self) -> list[Piece]:
        """Return what is certain before any token."""
        return [Piece(self._echo)] if self._echo else []

    def push(self, token: Token) -> list[Piece]:
        """Take the next token and return what became certain with it."""
        num_before = self._text.num_tokens
        is_reasoning = self._splitter.in_reasoning
        text = self._text.push(token.token_id)
        if self._text.num_tokens > num_before:
            self._num_reasoning_tokens += is_reasoning
            if token.logprobs is not None:
                self._logprobs.append(self._described(token))
        if not self.has_ended:
            return self._splitter.push(text)
        pieces = self._splitter.push(text + self._text.finish())
        return pieces + self._splitter.finish(is_cut=self._text.is_cut)

    def choice(self) -> Choice:
        """Return the choice, which has ended."""
        finish_reason = self._text.finish_reason
        assert finish_reason is not None
        calls = tuple(self._splitter.tool_calls)
        if calls and finish_reason is FinishReason.STOP:
            finish_reason = FinishReason.TOOL_CALLS
        return Choice(
            text=self._echo + self._splitter.text(PieceKind.TEXT),
            finish_reason=finish_reason,
            completion_tokens=self._text.num_tokens,
            reasoning=self._splitter.text(PieceKind.REASONING),
            reasoning_tokens=self._num_reasoning_tokens,
            tool_calls=calls,
            logprobs=tuple(self._logprobs) if self._logprobs else None,
            is_cut=self._text.is_cut,
        )

    def _described(self, token: Token) -> TokenLogprob:
        assert token.logprobs is not None
        own = self._logprob(token.token_id, token.logprobs.logprob)
        found = TokenLogprob(own)
        top = tuple(self._logprob(i, value) for i, value in token.logprobs.top)
        return replace(found, top=top) if top else found

    def _logprob(self, token_id: int, logprob: float) -> Logprob:
        return Logprob(self._decoder.token_bytes(token_id), logprob)


def text_of(pieces: Sequence[Piece]) -> str:
    """Return the joined text of the pieces that are text."""
    return "".join(piece.text for piece in pieces if piece.kind is PieceKind.TEXT)
