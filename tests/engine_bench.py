"""A tiny random model, an engine on it that is driven by hand, and what mlx-lm makes of a row."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import qwen3

from tests.reference_engine import ReferenceEngine
from workers.batch_engine import BatchEngine
from workers.checkpoint_tier import CheckpointTier
from workers.checkpoints.records import Segment
from workers.checkpoints.store import CheckpointStore
from workers.engine import Begun, Kept, RowRequest, Token, TokenLogprobs
from workers.memory import MemoryGuard
from workers.pace import PrefillPace
from workers.packed import PackedRunner
from workers.sampling import SamplingPlan
from workers.scheduler import Policy

VOCABULARY = 128
EOS = 0
PLENTY = 1 << 30
GREEDY = SamplingPlan(0.0, 1.0, 0)
NOISY = SamplingPlan(1.0, 0.9, 77)


@cache
def tiny_model() -> Module:
    mx.random.seed(5)  # the same weights in every process
    model = qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            head_dim=8,
            tie_word_embeddings=True,
            rope_theta=10000.0,
        )
    )
    model.update({"model": {"embed_tokens": {"weight": embeddings()}}})
    mx.eval(model)
    return model


def embeddings() -> mx.array:
    mx.random.seed(3)
    return mx.random.normal((VOCABULARY, 32))


def request(
    name: str,
    *,
    row_id: str | None = None,
    length: int = 9,
    limit: int = 6,
    plan: SamplingPlan = GREEDY,
    tokens: Sequence[int] | None = None,
    **options: Any,
) -> RowRequest:
    """Return a request with a prompt that its name and length decide."""
    chosen = random.Random(f"{name} {length}")
    prompt = tokens or [chosen.randrange(1, VOCABULARY) for _ in range(length)]
    return RowRequest(
        row_id=row_id or name,
        prompt_ids=tuple(prompt),
        token_limit=limit,
        sampling=plan,
        stop_ids=frozenset({EOS}),
        **options,
    )


class WriteNow:
    """Writes at once, on the engine's thread."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self.written: list[Segment] = []

    def put(self, segments: Sequence[Segment]) -> int:
        for segment in segments:
            assert self._store.put(segment) is not None
            self.written.append(segment)
        return len(segments)

    def counts(self) -> dict[str, int]:
        return {"written": len(self.written)}

    def close(self) -> None:
        pass


class Bench:
    """An engine driven by hand, and what it said of each row."""

    def __init__(
        self,
        *,
        budget: int = PLENTY,
        max_rows: int = 8,
        chunk: int = 16,
        memory: MemoryGuard | None = None,
        prefix_bytes: int = PLENTY,
        runner: PackedRunner | None = None,
        model: Module | None = None,
        tier: CheckpointTier | None = None,
    ) -> None:
        self.budget = budget
        self.runner = runner or PackedRunner(model or tiny_model(), budget_bytes=budget)
        self.engine = BatchEngine(
            self.runner,
            vocab_size=VOCABULARY,
            eos_token_ids=frozenset({EOS}),
            policy=Policy(kv_budget_bytes=budget, max_rows=max_rows, expected_tokens=8),
            pace=PrefillPace(most_tokens=chunk, first_guess=chunk),
            memory=memory,
            prefix_bytes=prefix_bytes,
            tier=tier,
        )
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.cached: dict[str, int] = {}
        self.kept: dict[str, tuple[int, ...]] = {}
        self.failed: dict[str, Exception] = {}

    def add(self, *requests: RowRequest) -> None:
        self.engine.add(requests)

    def step(self) -> None:
        for event in self.engine.step():
            if isinstance(event, Token):
                self.tokens.setdefault(event.row_id, []).append(event.token_id)
                if event.logprobs is not None:
                    self.logprobs.setdefault(event.row_id, []).append(event.logprobs)
            elif isinstance(event, Begun):
                self.cached[event.row_id] = event.cached_tokens
            elif isinstance(event, Kept):
                self.kept[event.row_id] = event.token_ids
            else:
                self.failed[event.row_id] = event.error

    def run(self) -> dict[str, list[int]]:
        for _ in range(10_000):
            if not self.engine.has_work:
                return self.tokens
            self.step()
        raise AssertionError("the engine does not come to an end")


@cache
def alone(name: str, length: int, limit: int, plan: SamplingPlan) -> list[int]:
    """Return what mlx-lm generates for a request in a batch of its own."""
    engine = ReferenceEngine(
        tiny_model(),
        eos_token_ids=frozenset({EOS}),
        max_rows=1,
        prefill_rows=1,
        prefill_step_tokens=512,
    )
    engine.add([request(name, length=length, limit=limit, plan=plan)])
    tokens = []
    while engine.has_work:
        tokens += [event.token_id for event in engine.step() if isinstance(event, Token)]
    return tokens


def expected(requests: Iterable[RowRequest]) -> dict[str, list[int]]:
    return {
        r.row_id: alone(r.row_id, len(r.prompt_ids), r.token_limit, r.sampling) for r in requests
    }


def budget_for(num_rows: int, num_tokens: int) -> int:
    return num_rows * PackedRunner(tiny_model()).row_bytes(num_tokens)
