"""Draws tokens on the device by a `SamplingPlan`: greedy, or Gumbel-max with the plan's keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from workers.sampling import SamplingPlan, sampling_key

# Nearly every nucleus is smaller than this; sorting a whole vocabulary takes many times longer.
_NUM_PRESELECTED: Final = 1024
# Below it the division overflows float32; at it a gap of 1e-4 between two tokens decides already.
_MIN_TEMPERATURE: Final = 1e-6

RowSampler = Callable[[mx.array], mx.array]


def greedy(logprobs: mx.array) -> mx.array:
    """Return the likeliest token of each row: (rows, vocabulary) to (rows,), uint32."""
    return mx.argmax(logprobs, axis=-1)


def make_row_sampler(plan: SamplingPlan, start_position: int = 0) -> RowSampler:
    """Return the sampler of one row of an mlx-lm batch.

    Greedy rows all get the same function, since mlx-lm samples a batch in one call where the rows
    share a sampler. Another row gets its own: it takes the row's log-probabilities or logits,
    shape (1, vocabulary), and returns its token, shape (1,), uint32. It counts its calls, one per
    completion token in order, and depends on nothing else: the token is that of any other batch.

    Args:
        plan: how to draw.
        start_position: completion tokens the row has already, when it is taken up again.
    """
    if plan.is_greedy:
        return greedy
    position = start_position

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal position
        key = mx.array(sampling_key(plan.seed, position), dtype=mx.uint32)
        position += 1
        return _draw(logprobs[0].astype(mx.float32), plan, key)[None]

    return sample


def _draw(logprobs: mx.array, plan: SamplingPlan, key: mx.array) -> mx.array:
    """Draw one token, a scalar, from one row's float32 log-probabilities, shape (vocabulary,)."""
    scaled = (logprobs - logprobs.max()) / max(plan.temperature, _MIN_TEMPERATURE)
    if plan.top_p < 1:
        scaled = mx.where(scaled >= _nucleus_floor(scaled, plan.top_p), scaled, -mx.inf)
    # Always of shape (vocabulary,): mlx draws other noise, from the same key, for another shape.
    return mx.argmax(scaled + mx.random.gumbel(scaled.shape, key=key))


def _nucleus_floor(scaled: mx.array, top_p: float) -> mx.array:
    """Return the log-probability of the nucleus's last token, a scalar.

    Tokens as likely as that one are all in, so the nucleus does not depend on their order.
    Evaluates the row when the vocabulary is large.
    """
    log_total = mx.logsumexp(scaled)
    if scaled.size > _NUM_PRESELECTED:
        likeliest = mx.sort(mx.topk(scaled, _NUM_PRESELECTED))[::-1]
        if (mx.exp(likeliest - log_total).sum() >= top_p).item():
            return _floor_of_sorted(likeliest, log_total, top_p)
    return _floor_of_sorted(mx.sort(scaled)[::-1], log_total, top_p)


def _floor_of_sorted(likeliest: mx.array, log_total: mx.array, top_p: float) -> mx.array:
    mass_before = mx.cumsum(mx.exp(likeliest - log_total), inclusive=False)
    num_kept = mx.maximum((mass_before < top_p).sum(), 1)
    return likeliest[num_kept - 1]
