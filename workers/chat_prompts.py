"""The token ids of a chat, and after which of them its keys and values are worth keeping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

from queue_service.errors import RequestError
from queue_service.requests import ChatRequest
from workers.cache_boundary import CacheBoundary, ChatEncoder
from workers.prefixes import common_length
from workers.token_history import TokenHistory

_MOST_DECLARED: Final = 256
_OTHER_TEXTS: Final = ("x", "\n\nx")  # where a template keeps leading space, it may join tokens


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat as tokens.

    Attributes:
        keep: lengths after which its keys and values are kept for later prompts.
        keeps_answer: so are those of prompt and answer.
    """

    ids: Sequence[int]
    keep: tuple[int, ...] = ()
    keeps_answer: bool = False


class ChatPrompts:
    """Encodes rendered chats so that each meets what was kept of those before it.

    A chat of a session begins with the ids that built its stored turns, and keeps its own: up to
    what the next turn will share, and its answer. One that only declares a `prompt_cache_key`
    keeps what stands before its last message. Safe between threads.

    Args:
        history: the ids of turns that are kept; None where nothing is, and chats are just encoded.
    """

    def __init__(self, encoder: ChatEncoder, history: TokenHistory | None = None) -> None:
        self._encoder = encoder
        self._history = history
        self._boundary = CacheBoundary(encoder)
        self._declared: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._lock = Lock()

    def encode(
        self, request: ChatRequest, rendered: str, rendering: Mapping[str, Any]
    ) -> ChatPrompt:
        """Return the tokens of a chat.

        Args:
            rendered: its text.
            rendering: the keywords it was rendered with, without those of the last turn.
        """
        canonical = self._encoder.encode_chat(rendered)
        if self._history is None or request.session is None:
            return ChatPrompt(canonical)
        messages = request.template_messages()
        goes_on = request.session_id or any(m.get("role") == "assistant" for m in messages)
        if not goes_on:
            assert request.prompt_cache_key is not None
            length = self._declared_length(request.prompt_cache_key, messages, canonical, rendering)
            return ChatPrompt(canonical, (length,) if length else ())
        ids = self._history.resolve(rendered, canonical)
        stable = self._boundary.stable_length(
            messages,
            canonical=canonical,
            actual=ids,
            tools=rendering.get("tools"),
            template_kwargs={k: v for k, v in rendering.items() if k != "tools"},
        )
        return ChatPrompt(ids, (stable,), keeps_answer=True)

    def _declared_length(
        self,
        key: str,
        messages: Sequence[Mapping[str, Any]],
        ids: Sequence[int],
        rendering: Mapping[str, Any],
    ) -> int:
        """Return how many tokens stand before the last message; the same for all of one key."""
        with self._lock:
            known = self._declared.get(key)
        if known is not None and tuple(ids[: len(known)]) == known:
            return len(known)
        length = len(ids)
        try:
            for text in _OTHER_TEXTS:
                changed = [*messages[:-1], {**messages[-1], "content": text}]
                other = self._encoder.render_chat(changed, add_generation_prompt=True, **rendering)
                length = min(length, common_length(ids, self._encoder.encode_chat(other)))
        except RequestError:  # a template that refuses what nobody asked for
            return 0
        with self._lock:
            self._declared[key] = tuple(ids[:length])
            self._declared.move_to_end(key)
            if len(self._declared) > _MOST_DECLARED:
                self._declared.popitem(last=False)
        return length
