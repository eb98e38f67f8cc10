"""How much of a prompt the next turn will share: where a prefix checkpoint is worth taking."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from types import MappingProxyType
from typing import Any, Protocol

from queue_service.beginnings import common_length

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

# Restoring a shorter prefix saves less than storing it costs.
MIN_SNAPSHOT_TOKENS = 256

# Mistral's templates insist on nine letters and digits.
_CALL_ID = "boundary0"

_NO_TEMPLATE_KWARGS: Mapping[str, Any] = MappingProxyType({})


class ChatEncoder(Protocol):
    """What is asked of a tokenizer here."""

    def render_chat(
        self, messages: Sequence[Message], /, *, add_generation_prompt: bool, **template_kwargs: Any
    ) -> str:
        """Return the prompt text of a chat; raises what the template raises."""

    def encode_chat(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered chat, one BOS where text and template wrote one."""


class CacheBoundary:
    """Finds the tokens of a prompt that will also begin the next turn's; safe between threads.

    A prompt ends with its *primer*: what opens the answer, and perhaps an empty thought. The
    template writes that otherwise, or not at all, once the answer is an old turn. A KV cache
    that cannot be cut shorter (a recurrent or rotating one) is of use to the next turn only if
    it was stored before the primer. A length found wrong costs reuse and nothing else.
    """

    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder
        self._primers = _PrimerMemo()

    def stable_length(
        self,
        messages: Sequence[Message],
        *,
        canonical: Sequence[int],
        actual: Sequence[int],
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, Any] = _NO_TEMPLATE_KWARGS,
    ) -> int:
        """Return how many leading ids of ``actual`` the next turn's prompt will share.

        Renders and encodes the chat once more for each form of reply, unless the length of the
        primer is remembered: ask only if the cache does not hold the prompt already. All of
        ``actual`` where the template refuses a next turn.

        Args:
            messages: the chat as the template reads it.
            canonical: what ``encode_chat`` gives for the rendered prompt.
            actual: the ids that run; they may spell old turns otherwise.
            tools: as they were rendered.
            template_kwargs: as they were rendered, without ``tools``.
        """
        rendering = dict(template_kwargs) if tools is None else {**template_kwargs, "tools": tools}
        kind = _kind_of_prompt(messages, rendering)
        primer_tokens = self._primers.find(kind, canonical)
        if primer_tokens is None:
            try:
                shared = self._shared_with_next_turn(messages, canonical, rendering)
            # The prompt itself is rendered by now. Whatever a template, which may be code, thinks
            # of a turn that nobody has asked for must not fail the request.
            except Exception:
                logger.debug("no cache boundary: the next turn does not render", exc_info=True)
                return len(actual)
            primer_tokens = len(canonical) - shared
            self._primers.keep(kind, canonical[shared:])
        return max(0, len(actual) - primer_tokens)

    def _shared_with_next_turn(
        self, messages: Sequence[Message], canonical: Sequence[int], rendering: Mapping[str, Any]
    ) -> int:
        """Return the number of leading tokens shared with every next turn tried."""
        shared = len(canonical)
        for turn in _next_turns(rendering.get("tools")):
            rendered = self._encoder.render_chat(
                [*messages, *turn], add_generation_prompt=True, **rendering
            )
            shared = common_length(canonical[:shared], self._encoder.encode_chat(rendered))
        return shared


def snapshot_at(prompt_length: int, restored_tokens: int, stable_length: int) -> int | None:
    """Return after how many prompt tokens to store the KV cache; None for no snapshot.

    At least one prompt token is left to run, since a restored prompt needs logits too.

    Args:
        restored_tokens: how many of them came from a stored cache, 0 for none.
        stable_length: how many of them the next turn will share.
    """
    length = min(stable_length, prompt_length - 1)
    return length if length >= MIN_SNAPSHOT_TOKENS and length > restored_tokens else None


class _PrimerMemo:
    """The primer tokens of each kind of prompt, the least lately kept forgotten first.

    They are remembered as ids and must end the prompt they are used for: templates that write
    tools or reasoning into the last turn have tails that belong to one chat.
    """

    MAX_PRIMER_TOKENS = 64
    MAX_KINDS = 256

    def __init__(self) -> None:
        self._lock = Lock()
        self._primers: dict[bytes, tuple[int, ...]] = {}

    def find(self, kind: bytes, prompt_ids: Sequence[int]) -> int | None:
        """Return how many of the ids are the primer; None if not known."""
        with self._lock:
            primer = self._primers.get(kind)
        if primer is None or tuple(prompt_ids[len(prompt_ids) - len(primer) :]) != primer:
            return None
        return len(primer)

    def keep(self, kind: bytes, primer: Sequence[int]) -> None:
        """Remember a primer, unless it is so long that it must be more than that."""
        if len(primer) > self.MAX_PRIMER_TOKENS:
            return
        with self._lock:
            self._primers.pop(kind, None)
            self._primers[kind] = tuple(primer)
            if len(self._primers) > self.MAX_KINDS:
                del self._primers[next(iter(self._primers))]


def _next_turns(tools: Sequence[Tool] | None) -> list[list[Message]]:
    """Return one example of each form that an answer and what follows it take."""
    question: Message = {"role": "user", "content": "x"}
    turns: list[list[Message]] = [
        [{"role": "assistant", "content": text}, question]
        # Where the template keeps leading space, a tokenizer joins it to the end of the primer.
        for text in ("x", "\n\nx")
    ]
    if tools:
        call: Message = {
            "type": "function",
            "id": _CALL_ID,
            "function": {"name": tools[0]["function"]["name"], "arguments": {}},
        }
        # The content is empty and not None, as requests have it for their templates.
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        turns.append([reply, {"role": "tool", "tool_call_id": _CALL_ID, "content": "x"}])
    return turns


def _kind_of_prompt(messages: Sequence[Message], rendering: Mapping[str, Any]) -> bytes:
    """Return a key that is one for prompts which their template should end in one way.

    That depends on its keywords and on the turn that is not finished: templates keep the
    reasoning of a turn with tool calls until a user speaks again.
    """
    last_user = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=-1)
    unfinished = messages[last_user + 1 :]
    description = [
        {name: value for name, value in rendering.items() if name != "tools"},
        bool(rendering.get("tools")),
        sorted({str(message.get("role")) for message in unfinished}),
        sorted({field for message in unfinished for field, value in message.items() if value}),
        any("</think>" in str(message.get("content")) for message in unfinished),
    ]
    text = json.dumps(description, sort_keys=True, default=repr)
    return blake2b(text.encode(), digest_size=16).digest()
