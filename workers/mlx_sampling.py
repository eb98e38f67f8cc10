"""Draws tokens on the device by `SamplingPlan`s: greedy, or Gumbel-max with the plan's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from workers.sampling import SamplingPlan, sampling_keys

# Nearly every nucleus is smaller than this; sorting a whole vocabulary takes many times longer.
_NUM_PRESELECTED: Final = 1024
# Below it the division overflows float32; at it a gap of 1e-4 between two tokens decides already.
_MIN_TEMPERATURE: Final = 1e-6


def greedy(logits: mx.array) -> mx.array:
    """Return the likeliest token of each row: (rows, vocabulary) to (rows,), uint32."""
    return mx.argmax(logits, axis=-1)


def draw(logits: mx.array, plans: Sequence[SamplingPlan], positions: Sequence[int]) -> mx.array:
    """Draw one token for each row.

    A row's token depends on its own logits, plan and position alone, not on its neighbours.
    Computes nothing yet, but waits for the logits when a row has a nucleus in a large vocabulary.

    Args:
        logits: (rows, vocabulary), logits or log-probabilities.
        plans: how each row is drawn.
        positions: completion tokens that each row has already.

    Returns:
        (rows,), uint32.
    """
    tokens = greedy(logits)
    drawn = [row for row, plan in enumerate(plans) if not plan.is_greedy]
    if not drawn:
        return tokens
    if len(drawn) == len(plans):
        return _draw(logits, plans, positions)
    rows = mx.array(drawn)
    tokens[rows] = _draw(logits[rows], [plans[r] for r in drawn], [positions[r] for r in drawn])
    return tokens


def _draw(logits: mx.array, plans: Sequence[SamplingPlan], positions: Sequence[int]) -> mx.array:
    temperatures = mx.array([max(plan.temperature, _MIN_TEMPERATURE) for plan in plans])
    logits = logits.astype(mx.float32)
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperatures[:, None]
    cut = [row for row, plan in enumerate(plans) if plan.top_p < 1]
    if cut:
        rows = mx.array(cut)
        floors = mx.full((len(plans), 1), -mx.inf)
        floors[rows] = _nucleus_floors(scaled[rows], mx.array([plans[r].top_p for r in cut]))
        scaled = mx.where(scaled >= floors, scaled, -mx.inf)
    keys = mx.array(sampling_keys([plan.seed for plan in plans], positions))
    # Always of shape (vocabulary,): mlx draws other noise, from the same key, for another shape.
    noise = mx.vmap(lambda key: mx.random.gumbel(logits.shape[1:], key=key))(keys)
    return mx.argmax(scaled + noise, axis=-1)


def _nucleus_floors(scaled: mx.array, top_p: mx.array) -> mx.array:
    """Return the log-probability of each nucleus's last token, (rows, 1).

    Tokens as likely as that one are all in, so the nucleus does not depend on their order.
    """
    log_total = mx.logsumexp(scaled, axis=-1, keepdims=True)
    if scaled.shape[-1] > _NUM_PRESELECTED:
        likeliest = mx.sort(mx.topk(scaled, _NUM_PRESELECTED), axis=-1)[:, ::-1]
        held = mx.exp(likeliest - log_total).sum(axis=-1)
        if mx.all(held >= top_p).item():
            return _floors_of_sorted(likeliest, log_total, top_p)
    return _floors_of_sorted(mx.sort(scaled, axis=-1)[:, ::-1], log_total, top_p)


def _floors_of_sorted(likeliest: mx.array, log_total: mx.array, top_p: mx.array) -> mx.array:
    mass_before = mx.cumsum(mx.exp(likeliest - log_total), axis=-1, inclusive=False)
    num_kept = mx.maximum((mass_before < top_p[:, None]).sum(axis=-1, keepdims=True), 1)
    return mx.take_along_axis(likeliest, num_kept - 1, axis=-1)
