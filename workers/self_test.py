"""Finds out at load how a model may be run: some families give wrong tokens in a batch.

Which ways are right for a family changes with mlx-lm's versions, so a short run of the model
itself decides, not a list of names: each way runs two short prompts of different lengths together
and must give what mlx-lm gives for each alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from queue_service.errors import ModelUnavailable
from workers.packed import PackedRunner
from workers.padded import PaddedRunner
from workers.runner import PromptChunk, Runner

logger = logging.getLogger(__name__)

# Lengths that differ, so that padding shows; ids that every vocabulary has.
_PROMPTS = tuple(tuple(range(3, 3 + length)) for length in (5, 12))
# Prefill is cut here, so that a chunk that starts within a prompt is tried too.
_CUT = 3
# Enough for the rows to be in one batch for some steps.
_TOKENS = 4
# Rounding differs between batch sizes by up to 2e-4 in float32 and about 0.1 in 16 bits; the
# families that are wrong are off by 0.1 to 9 in float32.
_TOLERANCE = {mx.float32: 0.02}
_TOLERANCE_16_BIT = 0.5

# Wrong in a batch only with more tokens than a test at load can spend: this model picks blocks of
# columns to attend to, and counts those blocks from a row's padding on.
_NEVER_BATCHED = frozenset({"mlx_lm.models.minimax_m3_vl"})


class Batching(StrEnum):
    """What rows of a model may share."""

    PACKED = "batched"
    ONE_ROW_PREFILL = "prefilled one row at a time"
    ALONE = "not batched"


def choose_runner(model: Module, *, kv_bytes: int = 1 << 62) -> tuple[Batching, Runner]:
    """Return the fastest way to run a model that gives its own tokens, and the runner for it.

    Args:
        model: evaluated weights.
        kv_bytes: what the runner may hold for keys and values.

    Raises:
        ModelUnavailable: the model does not run even alone.
    """
    try:
        alone = [_run_alone(model, prompt) for prompt in _PROMPTS]
    except Exception as error:  # a model's own code, which may raise anything
        raise ModelUnavailable(
            f"this model family cannot be run here yet: {type(error).__name__}: {error}"
        ) from error
    ways: Sequence[tuple[Batching, Callable[[], Runner]]] = (
        (Batching.PACKED, lambda: PackedRunner(model, budget_bytes=kv_bytes)),
        (Batching.ONE_ROW_PREFILL, lambda: PaddedRunner(model)),
        (Batching.ALONE, lambda: PaddedRunner(model, batched=False)),
    )
    if type(model).__module__ in _NEVER_BATCHED:
        ways = ways[-1:]
    for batching, make in ways:
        try:
            runner = make()
            together = _run_together(runner)
        except Exception as error:  # as above: a family that cannot be batched says so somehow
            logger.info("refused by the model mode=%s (%s)", batching, error)
            continue
        if all(_is_same(a, b) for a, b in zip(alone, together, strict=True)):
            runner.clear()
            return batching, runner
    raise ModelUnavailable(
        "this model family gives other tokens here than it gives in one piece; it cannot be served"
    )


# A row: its tokens, and the log-probabilities of each step, shape (vocabulary,).
_Row = list[tuple[int, mx.array]]


def _run_alone(model: Any, prompt: Sequence[int]) -> _Row:
    """Generate greedily as mlx-lm does for one prompt."""
    caches = make_prompt_cache(model)
    model(mx.array([prompt[:-1]]), cache=caches)
    token, row = prompt[-1], []
    for _ in range(_TOKENS):
        logits = model(mx.array([[token]]), cache=caches)[0, -1]
        token = _likeliest(logits)
        row.append((token, _log_probabilities(logits)))
    return row


def _run_together(runner: Runner) -> list[_Row]:
    """Generate greedily in one batch and return the rows in the order of their prompts."""
    prompts = {str(index): prompt for index, prompt in enumerate(_PROMPTS)}
    for row_id, prompt in prompts.items():
        runner.add({row_id: len(prompt)})
    for cut in (slice(0, _CUT), slice(_CUT, -1)):
        mx.eval(runner.prefill([PromptChunk(r, prompt[cut]) for r, prompt in prompts.items()]))
    tokens = {row_id: prompt[-1] for row_id, prompt in prompts.items()}
    rows: dict[str, _Row] = {row_id: [] for row_id in prompts}
    for _ in range(_TOKENS):
        order = runner.arrange(list(prompts))
        logits = runner.decode(order, mx.array([tokens[row_id] for row_id in order]))
        for row_id, one in zip(order, logits, strict=True):
            tokens[row_id] = _likeliest(one)
            rows[row_id].append((tokens[row_id], _log_probabilities(one)))
    return list(rows.values())


def _likeliest(logits: mx.array) -> int:
    return int(np.argmax(np.array(logits.astype(mx.float32))))


def _log_probabilities(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits)


def _is_same(alone: _Row, together: _Row) -> bool:
    for (token, expected), (other_token, found) in zip(alone, together, strict=True):
        tolerance = _TOLERANCE.get(expected.dtype, _TOLERANCE_16_BIT)
        difference = mx.abs(expected.astype(mx.float32) - found.astype(mx.float32))
        if not bool(mx.max(difference) <= tolerance):  # also for NaN
            return False
        if token != other_token:
            break  # a tie within the tolerance: from here on the rows go different ways
    return True
