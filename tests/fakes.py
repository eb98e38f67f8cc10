"""Stand-ins where a test wants speed: an engine that echoes, and its tokenizer of bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from queue_service.errors import RequestError
from workers.engine import Event, Failed, RowRequest, StepWork, Token, TokenLogprobs
from workers.errors import TransientError
from workers.generation import EngineParts
from workers.model_info import ModelInfo

EOS = 256
VOCABULARY = 257
CONTEXT = 4096


class FakeTokenizer:
    """One token a byte."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes([i for i in ids if i != EOS]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id != EOS else b""

    def render_chat(self, messages: list[dict[str, Any]], /, **options: Any) -> str:
        if any(message["content"] == "refuse me" for message in messages):
            raise RequestError("the template says no", param="messages")
        return messages[-1]["content"]

    def encode_chat(self, rendered: str) -> list[int]:
        return self.encode(rendered, add_special_tokens=False)


@dataclass
class _Row:
    request: RowRequest
    position: int = 0

    @property
    def next_id(self) -> int:
        ids = self.request.prompt_ids
        position = self.position % (len(ids) + 1)
        return ids[position] if position < len(ids) else EOS

    def says(self, word: bytes) -> bool:
        return self.request.prompt_ids[: len(word)] == tuple(word)


@dataclass
class FakeEngine:
    """Answers each prompt with itself, one token a step for every row, then EOS, and so on.

    A prompt that says ``crash`` kills the process as a device fault would; one that says
    ``fault`` raises in the step; one that says ``lost`` fails alone, after its first token.
    """

    max_rows: int = 32
    step_seconds: float = 0.0
    rows: dict[str, _Row] = field(default_factory=dict)
    batch_sizes: list[int] = field(default_factory=list)
    on_step: Callable[[StepWork], None] | None = None

    def add(self, requests: Iterable[RowRequest]) -> None:
        for request in requests:
            self.rows[request.row_id] = _Row(request, len(request.generated_ids))

    def expect(self, prompts: Iterable[Sequence[int]]) -> None:
        """Nothing: it keeps no prefixes."""

    def remove(self, row_ids: Iterable[str]) -> None:
        for row_id in row_ids:
            self.rows.pop(row_id, None)

    def step(self) -> list[Event]:
        began = time.monotonic()
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.on_step is not None:
            new = [(i, len(r.request.prompt_ids)) for i, r in self.rows.items() if not r.position]
            self.on_step(StepWork(began, new, list(self.rows)))
        self.batch_sizes.append(len(self.rows))
        events: list[Event] = []
        for row_id, row in list(self.rows.items()):
            if row.says(b"crash"):
                import os

                os.kill(os.getpid(), 9)
            if row.says(b"fault"):
                raise RuntimeError("the device is on fire")
            if row.position == 1 and row.says(b"lost"):
                del self.rows[row_id]
                events.append(Failed(row_id, TransientError("the row is lost")))
                continue
            token_id = row.next_id
            row.position += 1
            events.append(Token(row_id, token_id, _logprobs(row.request, token_id)))
            if token_id in row.request.stop_ids or row.position >= row.request.token_limit:
                del self.rows[row_id]
        return events

    @property
    def has_work(self) -> bool:
        return bool(self.rows)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def peak_bytes(self) -> int:
        return 123_000_000

    @property
    def kv_bytes(self) -> int:
        """What the keys and values of its rows take now; not known."""
        return 0


def _logprobs(request: RowRequest, token_id: int) -> TokenLogprobs | None:
    """The token was certain, and the first ids of the vocabulary come after it."""
    if request.num_top_logprobs is None:
        return None
    return TokenLogprobs(0.0, tuple((i, -1.0 - i) for i in range(request.num_top_logprobs)))


def fake_info(name: str = "fake") -> ModelInfo:
    return ModelInfo(
        name=name,
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        eos_token_ids=frozenset({EOS}),
        dtype="float32",
        device="cpu",
        digest="fake",
    )


def fake_parts(engine: FakeEngine) -> EngineParts:
    return EngineParts(engine, FakeTokenizer())
