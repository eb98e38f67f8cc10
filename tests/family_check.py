"""Runs a tiny model of a family as the engine would, at length, and measures how far it is off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from tests.families import Family
from workers.packed import PackedRunner
from workers.padded import PaddedRunner
from workers.runner import NotExtractable, PromptChunk, Runner
from workers.self_test import Batching, choose_runner

# Ragged; all but the first pass the windows, the last outgrows its slot of 128 columns.
LENGTHS = {"a": 5, "b": 37, "c": 70, "d": 118}
NUM_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Alone:
    """What mlx-lm gives for one prompt, greedily: tokens, and (tokens, vocabulary) of log p."""

    prompt: list[int]
    tokens: list[int]
    log_probabilities: mx.array

    @classmethod
    def run(cls, model: Any, prompt: list[int]) -> Alone:
        """Generate with mlx-lm's own caches, the prompt in one piece."""
        caches = make_prompt_cache(model)
        model(mx.array([prompt[:-1]]), cache=caches)
        fed, rows = prompt[-1], []
        tokens: list[int] = []
        for _ in range(NUM_TOKENS):
            rows.append(_log_probabilities(model(mx.array([[fed]]), cache=caches)[:, -1])[0])
            best: Any = mx.argmax(rows[-1]).item()
            fed = int(best)
            tokens.append(fed)
        return cls(prompt, tokens, mx.stack(rows))


@dataclass(slots=True)
class _Row:
    alone: Alone
    num_prefilled: int = 0
    num_decoded: int = 0


@dataclass(slots=True)
class _Drive:
    """Feeds rows to a runner, always the tokens of `Alone`, and keeps the worst difference.

    Attributes:
        moved: copies of rows that were taken out, and how far each was.
        refusal: why one could not be.
    """

    runner: Runner
    rows: dict[str, _Row] = field(default_factory=dict)
    difference: float = 0.0
    moved: dict[str, tuple[Any, _Row]] = field(default_factory=dict)
    refusal: str = ""

    def add(self, row_id: str, alone: Alone) -> None:
        self.runner.add({row_id: len(alone.prompt)})
        self.rows[row_id] = _Row(alone)

    def insert(self, row_id: str, state: Any, like: _Row) -> None:
        rows = {row_id: max(len(like.alone.prompt), state.num_tokens)}
        self.runner.add_with(rows, state, state.num_tokens, shared=0)
        self.rows[row_id] = replace(like)

    def take_out(self, row_id: str) -> None:
        try:
            self.moved[row_id] = self.runner.extract(row_id), replace(self.rows[row_id])
        except NotExtractable as error:
            self.refusal = str(error)

    def drop(self, row_id: str) -> None:
        self.runner.drop(row_id)
        del self.rows[row_id]

    def prefill(self, **counts: int) -> None:
        """Take in so many more tokens of each row's prompt; its last token is left to decode."""
        chunks = []
        for row_id, count in counts.items():
            row = self.rows[row_id]
            stop = min(row.num_prefilled + count, len(row.alone.prompt) - 1)
            chunks.append(PromptChunk(row_id, row.alone.prompt[row.num_prefilled : stop]))
            row.num_prefilled = stop
        mx.eval(self.runner.prefill(chunks))

    def decode(self, row_ids: Iterable[str], times: int = 1) -> None:
        """Decode rows together; one that has all its tokens leaves."""
        for _ in range(times):
            waiting = [row_id for row_id in row_ids if row_id in self.rows]
            if not waiting:
                return
            order = self.runner.arrange(waiting)
            logits = self.runner.decode(order, mx.array([self._next(r) for r in order]))
            for row_id, found in zip(order, _log_probabilities(logits), strict=True):
                row = self.rows[row_id]
                off = mx.abs(found - row.alone.log_probabilities[row.num_decoded])
                worst: Any = mx.max(mx.where(mx.isnan(off), mx.inf, off)).item()
                self.difference = max(self.difference, float(worst))
                row.num_decoded += 1
                if row.num_decoded == NUM_TOKENS:
                    self.drop(row_id)

    def _next(self, row_id: str) -> int:
        row = self.rows[row_id]
        return row.alone.tokens[row.num_decoded - 1] if row.num_decoded else row.alone.prompt[-1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the engine makes of a model.

    Attributes:
        caches: the classes of mlx-lm's caches for it.
        batching: the way that is chosen at load.
        difference: max |Δ log p|, rows that join and leave at different times against each alone.
        moved_difference: the same for rows taken out and put into another runner; None if refused.
        refusal: why they could not be taken out.
    """

    caches: Sequence[str]
    batching: Batching
    difference: float
    moved_difference: float | None
    refusal: str = ""


def examine(family: Family) -> Outcome:
    """Build a family's model, choose a way to run it and try that way at length."""
    model: Any = family.build()
    caches = sorted({_name(cache) for cache in make_prompt_cache(model)})
    alone = {
        name: Alone.run(model, [(7 * i + 11 * length) % 120 + 3 for i in range(length)])
        for name, length in LENGTHS.items()
    }
    batching, runner = choose_runner(model)
    drive = _Drive(runner)
    _run(drive, alone)
    moved = None if drive.refusal else _resume(_Drive(fresh_runner(model, batching)), drive, alone)
    return Outcome(caches, batching, drive.difference, moved, drive.refusal)


def fresh_runner(model: Any, batching: Batching) -> Runner:
    if batching is Batching.PACKED:
        return PackedRunner(model)
    return PaddedRunner(model, batched=batching is Batching.ONE_ROW_PREFILL)


def _run(drive: _Drive, alone: dict[str, Alone]) -> None:
    """Run the four rows; take one out within its prompt and one in the middle of its answer."""
    drive.add("a", alone["a"])
    drive.add("b", alone["b"])
    drive.prefill(a=3, b=20)
    drive.prefill(a=99, b=99)
    drive.decode("ab", 3)
    drive.add("c", alone["c"])
    drive.prefill(c=29)
    drive.decode("ab")
    drive.add("d", alone["d"])
    drive.prefill(c=99, d=50)
    drive.decode("abc", 4)
    drive.prefill(d=14)
    drive.take_out("d")
    drive.decode("ac")  # the others wait
    drive.prefill(d=99)
    drive.decode("abcd", 4)
    drive.drop("b")
    drive.take_out("c")
    drive.decode("acd", NUM_TOKENS)


def _resume(drive: _Drive, source: _Drive, alone: dict[str, Alone]) -> float:
    """Finish the rows that were taken out beside a new one; return the worst difference."""
    drive.add("b", alone["b"])
    drive.prefill(b=99)
    drive.decode("b", 2)
    for row_id, (state, row) in source.moved.items():
        drive.insert(row_id, state, row)
    drive.decode("bc", 2)
    drive.prefill(d=99)
    drive.decode("bcd", NUM_TOKENS)
    return drive.difference


def _name(cache: Any) -> str:
    inner = getattr(cache, "caches", None)
    name = type(cache).__name__
    return f"{name}[{', '.join(_name(one) for one in inner)}]" if inner else name


def _log_probabilities(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
