"""Token ids to text: a pure function of the ids, so that a replay gives the same text again.

Three parts, each usable alone: ids become text in `IncrementalDetokenizer`, `StopMatcher` cuts
the text at a stop string, and `TextPipeline` joins them and says why generation ended.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from queue_service.responses import FinishReason

REPLACEMENT: Final = "\ufffd"

# What an unfinished character (at most 3 bytes) can still turn back: one U+FFFD where bytes are
# joined before decoding; with byte-fallback tokens one for each of its bytes, and for each byte of
# the finished character before it (at most 4), of which one character is out already.
_MAX_HELD_CHARACTERS: Final = 6
# Kept when a window full of undecodable bytes is cut anywhere: the held characters may take 18
# bytes, and UTF-8 is back in step 3 bytes after any cut. A token of the window is 1 byte or more.
_KEPT_TOKENS: Final = 24
_MAX_WINDOW_TOKENS: Final = 32


class Decoder(Protocol):
    """What is asked of a tokenizer."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        ...


class TextPipeline:
    """The text of one choice, token by token, until it ends.

    Chunks joined are always `text`. With a byte-level tokenizer and no stop string, the text of a
    choice that ended is ``decoder.decode(ids)`` of its ids without the end-of-sequence token.

    Args:
        decoder: the model's tokenizer.
        eos_token_ids: ids that end the text, without a text of their own.
        stop_strings: text that ends the text and is no part of it; see `StopMatcher`.
        token_limit: completion tokens after which generation ends, at least 1.
        skip_special_tokens: leave them out of the text.

    Attributes:
        finish_reason: None while generation goes on. A stop at the limit is a stop.
        num_tokens: completion tokens. An end-of-sequence token is not counted, the tokens of a
            stop string are.

    Raises:
        ValueError: the limit is below 1, or a stop string is empty.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        eos_token_ids: frozenset[int],
        stop_strings: tuple[str, ...],
        token_limit: int,
        skip_special_tokens: bool = True,
    ) -> None:
        if token_limit < 1:
            raise ValueError(f"token_limit must be at least 1, not {token_limit}")
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self._eos_token_ids = eos_token_ids
        self._token_limit = token_limit
        self._detokenizer = IncrementalDetokenizer(decoder, skip_special_tokens=skip_special_tokens)
        self._stops = StopMatcher(stop_strings)
        self._chunks: list[str] = []
        self._is_flushed = False

    @property
    def is_cut(self) -> bool:
        """Whether the text ended where the model did not end it: at its limit or a stop string."""
        return self.finish_reason is FinishReason.LENGTH or self._stops.matched is not None

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._chunks)

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that became certain with it, "" if none.

        The token that ends generation returns all that was held back too.

        Raises:
            RuntimeError: the text has ended.
        """
        if self.finish_reason is not None or self._is_flushed:
            raise RuntimeError("the text has ended; a token cannot follow")
        if token_id in self._eos_token_ids:
            self.finish_reason = FinishReason.STOP
            return self.finish()
        self.num_tokens += 1
        chunk = self._record(self._stops.push(self._detokenizer.push(token_id)))
        if self.num_tokens == self._token_limit:
            self.finish_reason = FinishReason.LENGTH
            chunk += self.finish()
        if self._stops.matched is not None:
            self.finish_reason = FinishReason.STOP
        return chunk

    def finish(self) -> str:
        """End the text where it stands and return what was held back, "" if nothing was.

        For a choice that ends for another reason than its tokens; `finish_reason` stays None then.
        A character that was never finished becomes U+FFFD.
        """
        self._is_flushed = True
        return self._record(self._stops.push(self._detokenizer.finish()) + self._stops.finish())

    def replay(self, token_ids: Iterable[int]) -> str:
        """Push ids generated before, and return their text; the next push goes on after them."""
        return "".join([self.push(token_id) for token_id in token_ids])

    def _record(self, chunk: str) -> str:
        if chunk:
            self._chunks.append(chunk)
        return chunk


class IncrementalDetokenizer:
    """Decodes a growing list of ids by decoding only a short window at its end.

    The window begins with the tokens of the chunk before, since some tokenizers decode a token
    differently at the start of a text. Text that ends in U+FFFD may be a character whose bytes
    have not all come: up to 6 of them are held back, which is all that an unfinished character can
    account for. What stands before those is garbage for certain and goes out, so a model that
    emits broken bytes for ever costs a constant time and delay per token.

    With a byte-level tokenizer the chunks joined are exactly ``decoder.decode(ids)``. With another
    one this holds for ids that decode without U+FFFD. Special tokens are left out unless asked.
    """

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._decode = functools.partial(decoder.decode, skip_special_tokens=skip_special_tokens)
        self._window: list[int] = []
        self._num_context_tokens = 0
        self._window_text = ""
        self._num_emitted = 0  # characters of the window's text

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that became certain with it, "" if none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._window_text and self._is_silent(token_id):
            self._window.pop()
            return ""
        self._window_text = text
        num_certain = len(text) - min(_num_replacements_at_end(text), _MAX_HELD_CHARACTERS)
        chunk = text[self._num_emitted : num_certain]
        self._num_emitted = max(self._num_emitted, num_certain)
        if chunk and num_certain == len(text):
            self._cut(self._num_context_tokens)
            self._num_context_tokens = len(self._window)
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            self._cut(len(self._window) - _KEPT_TOKENS)
            self._num_context_tokens = 0
        return chunk

    def finish(self) -> str:
        """Return what was held back: a character that was never finished, as U+FFFD."""
        chunk = self._window_text[self._num_emitted :]
        self._num_emitted = len(self._window_text)
        return chunk

    def _is_silent(self, token_id: int) -> bool:
        # Twice, because a lone word-start token of a SentencePiece model decodes to "" at the
        # start of a text, but not the second one.
        return not self._decode((token_id, token_id))

    def _cut(self, num_tokens: int) -> None:
        """Drop the window's first tokens. What was held back stays the end of its text."""
        if not num_tokens:
            return
        num_held = len(self._window_text) - self._num_emitted
        del self._window[:num_tokens]
        self._window_text = self._decode(self._window)
        self._num_emitted = max(0, len(self._window_text) - num_held)


class StopMatcher:
    """Cuts a text at the first stop string, however the text is split into pieces.

    The match that ends first in the text wins, as if characters came one by one: generation can
    end there at once. Of matches that end at the same character the longest wins, so that nothing
    of any stop string is left. Text that may yet turn out to begin a stop string is held back.

    Attributes:
        matched: the stop string that was found, None before that. Later text is dropped.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        if "" in stop_strings:
            raise ValueError("a stop string must not be empty")
        self.matched: str | None = None
        self._stop_strings = stop_strings
        self._first_characters = frozenset(stop[0] for stop in stop_strings)
        self._held = ""

    def push(self, text: str) -> str:
        """Take more text and return what can no longer be part of a stop string."""
        if self.matched is not None or not text:
            return ""
        # No match can begin before the held text: it is the longest end that begins one.
        pending = self._held + text
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stop_strings
            if (start := pending.find(stop)) >= 0
        ]
        if matches:
            _, num_certain, self.matched = min(matches)
            self._held = ""
        else:
            num_certain = self._start_of_held(pending)
            self._held = pending[num_certain:]
        return pending[:num_certain]

    def finish(self) -> str:
        """Return what was held back, "" after a match."""
        held, self._held = self._held, ""
        return held

    def _start_of_held(self, pending: str) -> int:
        for start, character in enumerate(pending):
            if character in self._first_characters:
                end = pending[start:]
                if any(stop.startswith(end) for stop in self._stop_strings):
                    return start
        return len(pending)


def _num_replacements_at_end(text: str) -> int:
    return len(text) - len(text.rstrip(REPLACEMENT))
