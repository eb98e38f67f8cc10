"""The token ids of a chat, and after which of them its keys and values are worth keeping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from queue_service.errors import RequestError
from queue_service.prefix_plan import Cut, Mark, cut_after
from queue_service.requests import ChatRequest
from workers.cache_boundary import CacheBoundary, ChatEncoder
from workers.known_beginnings import KnownBeginnings
from workers.token_history import TokenHistory

# Less is computed again as fast as it is read.
LEAST_PLANNED_TOKENS: Final = 128
OTHER_TEXTS: Final = ("x", "\n\nx")  # where a template keeps leading space, it may join tokens


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
    keeps what stands before its last message. One that is marked as beginning like others keeps
    that. Safe between threads.

    Args:
        history: the ids of turns that are kept; None where nothing is, and chats are just encoded.
    """

    def __init__(self, encoder: ChatEncoder, history: TokenHistory | None = None) -> None:
        self._encoder = encoder
        self._history = history
        self._boundary = CacheBoundary(encoder)
        self._beginnings = KnownBeginnings()

    def encode(
        self,
        request: ChatRequest,
        rendered: str,
        rendering: Mapping[str, Any],
        *,
        body: Mapping[str, Any] | None = None,
        mark: Mark | None = None,
    ) -> ChatPrompt:
        """Return the tokens of a chat.

        Args:
            rendered: its text.
            rendering: the keywords it was rendered with, without those of the last turn.
            body: what the request was read from.
            mark: what its prompt text has in common with others, if anybody said so.
        """
        prompt = self._encode(request, rendered, rendering)
        if self._history is None or mark is None or body is None:
            return prompt
        length = self._planned_length(mark, body, request, prompt.ids, rendering)
        if length < LEAST_PLANNED_TOKENS or length in prompt.keep:
            return prompt
        return replace(prompt, keep=(*prompt.keep, length))

    def _encode(
        self, request: ChatRequest, rendered: str, rendering: Mapping[str, Any]
    ) -> ChatPrompt:
        canonical = self._encoder.encode_chat(rendered)
        if self._history is None or request.session is None:
            return ChatPrompt(canonical)
        messages = request.template_messages()
        goes_on = request.session_id or any(m.get("role") == "assistant" for m in messages)
        if not goes_on:
            assert request.prompt_cache_key is not None
            key, before_last = request.prompt_cache_key, Cut(len(messages) - 1, "content", 0)
            length = self._length(f"key:{key}", before_last, messages, canonical, rendering)
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

    def _planned_length(
        self,
        mark: Mark,
        body: Mapping[str, Any],
        request: ChatRequest,
        ids: Sequence[int],
        rendering: Mapping[str, Any],
    ) -> int:
        cut = cut_after(body, mark.chars)
        if cut is None:
            return 0
        messages = request.template_messages()
        return self._length(f"group:{mark.group}", cut, messages, ids, rendering)

    def _length(
        self,
        key: str,
        cut: Cut,
        messages: Sequence[Mapping[str, Any]],
        ids: Sequence[int],
        rendering: Mapping[str, Any],
    ) -> int:
        """Return how many tokens stand before a place of a chat; the same for all of one key."""

        def others() -> Iterator[list[int]]:
            for text in OTHER_TEXTS:
                changed = _with_other_text(messages, cut, text)
                other = self._encoder.render_chat(changed, add_generation_prompt=True, **rendering)
                yield self._encoder.encode_chat(other)

        try:
            return self._beginnings.length(key, ids, others)
        except RequestError:  # a template that refuses what nobody asked for
            return 0


def _with_other_text(
    messages: Sequence[Mapping[str, Any]], cut: Cut, text: str
) -> list[Mapping[str, Any]]:
    """Return a chat with the same turns that says something else from a place on."""
    changed = list(messages[: cut.message])
    for message in messages[cut.message :]:
        other = {**message, "content": text}
        if message is messages[cut.message]:
            other[cut.field] = message.get(cut.field, "")[: cut.offset] + text
        changed.append(other)
    return changed
