"""Finds out at load how a model may be batched: some families give wrong tokens in a batch.

mlx-lm batches most families exactly. A few ignore the lengths of rows that are prefilled together
(mamba, jamba), a few are wrong or fail with any second row. Which is which changes with mlx-lm's
versions, so a short run of the model itself decides, not a list of names.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import StrEnum

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator

from queue_service.errors import ModelUnavailable

logger = logging.getLogger(__name__)

# Lengths that differ, so that padding shows; ids that every vocabulary has.
_PROMPTS = tuple(tuple(range(3, 3 + length)) for length in (4, 11))
# Enough for the rows to be in one batch for some steps when the second is prefilled later.
_TOKENS = 4
# Rounding differs between batch sizes by up to 2e-4 in float32 and about 0.1 in 16 bits; the
# families that are wrong are off by 0.1 to 9 in float32.
_TOLERANCE = {mx.float32: 0.02}
_TOLERANCE_16_BIT = 0.5


class Batching(StrEnum):
    """How many rows of a model may share what."""

    FULL = "batched"
    ONE_ROW_PREFILL = "prefilled one row at a time"
    ALONE = "not batched"


def choose_batching(model: Module) -> Batching:
    """Run two short prompts alone and together and return what gave the same.

    Raises:
        ModelUnavailable: the model does not run even alone.
    """
    try:
        alone = [_run(model, [prompt], prefill_rows=1)[0] for prompt in _PROMPTS]
    except Exception as error:  # a model's own code, which may raise anything
        raise ModelUnavailable(
            f"this model family cannot be run here yet: {type(error).__name__}: {error}"
        ) from error
    for batching, prefill_rows in ((Batching.FULL, 2), (Batching.ONE_ROW_PREFILL, 1)):
        try:
            together = _run(model, _PROMPTS, prefill_rows=prefill_rows)
        except Exception as error:  # as above: a family that cannot be batched says so somehow
            logger.info("batching refused by the model mode=%s (%s)", batching, error)
            continue
        if all(_is_same(a, b) for a, b in zip(alone, together, strict=True)):
            return batching
    return Batching.ALONE


# A row: its tokens, and the log-probabilities of each step, shape (vocabulary,).
_Row = list[tuple[int, mx.array]]


def _run(model: Module, prompts: Sequence[Sequence[int]], *, prefill_rows: int) -> list[_Row]:
    """Generate greedily in one batch and return the rows in the order of their prompts."""
    generator = BatchGenerator(
        model, completion_batch_size=len(prompts), prefill_batch_size=prefill_rows
    )
    try:
        uids = generator.insert([list(p) for p in prompts], max_tokens=[_TOKENS] * len(prompts))
        rows: dict[int, _Row] = {uid: [] for uid in uids}
        while responses := generator.next_generated():  # type: ignore[no-untyped-call]
            for response in responses:
                rows[response.uid].append((response.token, response.logprobs))
    finally:
        generator.close()  # type: ignore[no-untyped-call]
    return [rows[uid] for uid in uids]


def _is_same(alone: _Row, together: _Row) -> bool:
    for (token, expected), (other_token, found) in zip(alone, together, strict=True):
        tolerance = _TOLERANCE.get(expected.dtype, _TOLERANCE_16_BIT)
        difference = mx.abs(expected.astype(mx.float32) - found.astype(mx.float32))
        if not bool(mx.max(difference) <= tolerance):  # also for NaN
            return False
        if token != other_token:
            break  # a tie within the tolerance: from here on the rows go different ways
    return True
