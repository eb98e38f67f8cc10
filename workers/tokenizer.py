"""Text to token ids and back, and chat messages to text, for the model being served."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from queue_service.errors import RequestError
from queue_service.json_text import MAX_REASON_CHARS, shortened
from workers.literal_tokens import LiteralTokens, pieces, unescaped

# Settings of the renderer itself: a request that could set them would swap the template or
# get something else than text.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)

# A template is a program of the model's, run on the request's values: the ways in which one fails.
_TEMPLATE_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TemplateError,
    TypeError,
    ValueError,
)


# How SentencePiece writes the space before a word, and a byte that has no token of its own.
_WORD_START = "\u2581"
# What a template writes around a turn or a part of it; not words or spaces of the vocabulary.
_MARKER = re.compile(r"[^\w\s].*[^\w\s]", re.DOTALL)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for their own byte, the other bytes for the characters from
    256 on, in order. Source: Radford et al., GPT-2's encoder, 2019.
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in own)
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_characters()


class Tokenizer:
    """A Hugging Face tokenizer, narrowed to what serving needs; safe to share between threads.

    Args:
        hf: the tokenizer; it belongs to this object from here on.
        eos_token_ids: ids that end an answer, besides the tokenizer's own.
        apply_chat_template: renders instead of ``hf.apply_chat_template``, same arguments; for
            models whose template is code.
    """

    def __init__(
        self,
        hf: PreTrainedTokenizerBase,
        *,
        eos_token_ids: Iterable[int] = (),
        apply_chat_template: Callable[..., Any] | None = None,
    ) -> None:
        self._hf = hf
        own_template = hf.apply_chat_template if hf.chat_template else None
        self._apply_chat_template = apply_chat_template or own_template
        own_eos = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.bos_token_id: int | None = hf.bos_token_id
        self.eos_token_ids: frozenset[int] = frozenset((*eos_token_ids, *own_eos))
        self.vocab_size: int = len(hf)
        self._added_ids = frozenset(hf.added_tokens_decoder)
        special = {
            i: token.content for i, token in hf.added_tokens_decoder.items() if token.special
        }
        self._special_ids = frozenset(special)
        self._literals = LiteralTokens(special.values(), self._template_markers())
        self._is_byte_level = "ByteLevel" in repr(getattr(hf.backend_tokenizer, "decoder", None))
        # The first call switches off the truncation and padding that a tokenizer.json may bring.
        # That changes the Rust object, for which some versions must have it alone ("Already
        # borrowed" in another thread); every later call only reads it.
        self.encode("", add_special_tokens=False)

    @property
    def chat_template(self) -> str | None:
        """The model's template as text; None when it has none or it is code."""
        template = self._hf.chat_template
        if isinstance(template, Mapping):
            template = template.get("default")
        return template if isinstance(template, str) else None

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Every token with its id."""
        return dict(self._hf.get_vocab())

    @property
    def added_vocabulary(self) -> Mapping[str, int]:
        """The tokens that are matched in text before any other, with their ids."""
        return dict(self._hf.get_added_vocab())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of ``text``; ``add_special_tokens`` puts the model's BOS in front.

        A special token written out in ``text`` becomes that token. Lone surrogates become
        U+FFFD. Bytes that a byte-level vocabulary lacks are left out.
        """
        ids: list[int] = self._hf.encode(
            _without_lone_surrogates(text), add_special_tokens=add_special_tokens, verbose=False
        )
        return ids

    def encode_chat(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered chat, which brings its own special tokens.

        One BOS is kept where template and text both wrote one. The name of a token that stands in
        a message is no token, unless the chat was rendered with ``parse_special_tokens``.
        """
        first, *others = pieces(rendered) or ("",)
        ids = self.encode(first, add_special_tokens=False)
        for piece in others:
            ids += self._encode_inside(piece)
        doubled = self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if doubled else ids

    def _encode_inside(self, text: str) -> list[int]:
        """Return the token ids of a text that stands behind another.

        SentencePiece writes a space before the first word of a text; behind a line's end it does
        not.
        """
        line_end = self.encode("\n", add_special_tokens=False)
        ids = self.encode("\n" + text, add_special_tokens=False)
        if ids[: len(line_end)] == line_end:
            return ids[len(line_end) :]
        return self.encode(text, add_special_tokens=False)

    def decode_chat(self, ids: Sequence[int]) -> str:
        """Return the text of a chat's ids, special tokens written out.

        Nothing where one is written out as plain text too: the text would not tell which is which.
        """
        text = self.decode(ids, skip_special_tokens=False)
        num_special = sum(1 for token_id in ids if token_id in self._special_ids)
        return text if self._literals.count(text) == num_special else ""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``, spaces untouched; ids without a token give nothing.

        An incomplete character at either end comes out as U+FFFD.
        """
        text = self._hf.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; those of all tokens joined are the text's.

        A token of its own meaning, such as an end of sequence, stands for its name; an id without
        a token for nothing.
        """
        token = self._hf.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return b""
        if token_id in self._added_ids:
            return token.encode("utf-8", "replace")
        if self._is_byte_level:
            known = _BYTE_OF_CHARACTER
            return b"".join(
                bytes([known[c]]) if c in known else c.encode("utf-8", "replace") for c in token
            )
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(byte[1], 16)])
        return token.replace(_WORD_START, " ").encode("utf-8", "replace")

    def to_json(self) -> str | None:
        """Return the whole tokenizer as the text of a tokenizer.json; None if it is other code."""
        if not isinstance(self._hf, PreTrainedTokenizerFast):
            return None
        return str(self._hf.backend_tokenizer.to_str())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        parse_special_tokens: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt text of ``messages``, as the model's chat template writes it.

        It is for ``encode_chat``, which takes the marks out that it may hold.

        Args:
            messages: at least one ``{"role", "content", ...}``.
            add_generation_prompt: open the assistant's turn at the end.
            continue_final_message: leave the last message open for the model to go on with;
                excludes ``add_generation_prompt``.
            parse_special_tokens: let names of tokens in messages be tokens.
            template_kwargs: what the template may read: ``tools``, ``enable_thinking``, ...

        Raises:
            RequestError: the model has no template, the template refuses these messages (its own
                text is the message), or a keyword is not the template's to read.
        """
        for name in sorted(_RESERVED_TEMPLATE_KWARGS & template_kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs.{name} cannot be set by a request",
                param=f"chat_template_kwargs.{name}",
            )
        if self._apply_chat_template is None:
            raise RequestError(
                "this model has no chat template: send a prompt to /v1/completions instead",
                param="messages",
            )
        if parse_special_tokens:
            turns = [dict(message) for message in messages]
        else:
            turns = self._literals.marked_messages(messages)
            template_kwargs = self._literals.marked(template_kwargs)
        try:
            rendered = self._apply_chat_template(
                turns,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_kwargs,
            )
        except _TEMPLATE_FAILURES as exc:
            # Some of transformers' messages quote the whole chat.
            reason = shortened(str(exc) or type(exc).__name__, MAX_REASON_CHARS)
            raise RequestError(f"the chat template: {reason}", param="messages") from exc
        return unescaped(str(rendered))

    def _template_markers(self) -> set[str]:
        """Return the names of tokens that the template writes, other than words and spaces."""
        template = self.chat_template or ""
        names = {token.content for token in self._hf.added_tokens_decoder.values()}
        return {name for name in names if name in template and _MARKER.fullmatch(name)}


def _without_lone_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
