"""Draws tokens on the device by `SamplingPlan`s: greedy, or Gumbel-max with the plan's keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx

from workers.sampling import SamplingPlan, sampling_keys

# Nearly every nucleus is smaller than this; sorting a whole vocabulary takes many times longer.
_NUM_PRESELECTED: Final = 1024
# Below it the division overflows float32; at it a gap of 1e-4 between two tokens decides already.
_MIN_TEMPERATURE: Final = 1e-6
# The draws of one token beside its noise, far from every position that a token can have.
_XTC_DRAW: Final = 1 << 40


def greedy(logits: mx.array) -> mx.array:
    """Return the likeliest token of each row: (rows, vocabulary) to (rows,), uint32."""
    return mx.argmax(logits, axis=-1)


def draw(
    logits: mx.array,
    plans: Sequence[SamplingPlan],
    positions: Sequence[int],
    *,
    never_excluded: Sequence[int] = (),
) -> mx.array:
    """Draw one token for each row.

    A row's token depends on its own logits, plan and position alone, not on its neighbours.
    Computes nothing yet, but waits for the logits when a row has a nucleus in a large vocabulary.

    Args:
        logits: (rows, vocabulary), logits or log-probabilities.
        plans: how each row is drawn.
        positions: completion tokens that each row has already.
        never_excluded: tokens that XTC leaves in: those that end an answer.

    Returns:
        (rows,), uint32.
    """
    tokens = greedy(logits)
    drawn = [row for row, plan in enumerate(plans) if not plan.is_greedy]
    if not drawn:
        return tokens
    if len(drawn) == len(plans):
        return _draw(logits, plans, positions, never_excluded)
    rows = mx.array(drawn)
    tokens[rows] = _draw(
        logits[rows], [plans[r] for r in drawn], [positions[r] for r in drawn], never_excluded
    )
    return tokens


def _draw(
    logits: mx.array,
    plans: Sequence[SamplingPlan],
    positions: Sequence[int],
    never_excluded: Sequence[int],
) -> mx.array:
    temperatures = mx.array([max(plan.temperature, _MIN_TEMPERATURE) for plan in plans])
    logits = logits.astype(mx.float32)
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperatures[:, None]
    for wants, floors in (
        (lambda plan: plan.top_k > 0, _top_k_floors),
        (lambda plan: plan.min_p > 0, _min_p_floors),
        (lambda plan: plan.top_p < 1, _nucleus_floors),
    ):
        scaled = _cut(scaled, plans, wants, floors)
    scaled = _exclude_top_choices(scaled, plans, positions, never_excluded)
    keys = mx.array(sampling_keys([plan.seed for plan in plans], positions))
    # Always of shape (vocabulary,): mlx draws other noise, from the same key, for another shape.
    noise = mx.vmap(lambda key: mx.random.gumbel(logits.shape[1:], key=key))(keys)
    return mx.argmax(scaled + noise, axis=-1)


def _cut(
    scaled: mx.array,
    plans: Sequence[SamplingPlan],
    wants: Callable[[SamplingPlan], bool],
    floors_of: Callable[[mx.array, Sequence[SamplingPlan]], mx.array],
) -> mx.array:
    """Take out what lies below a row's floor, in the rows whose plan wants one."""
    cut = [row for row, plan in enumerate(plans) if wants(plan)]
    if not cut:
        return scaled
    chosen = [plans[row] for row in cut]
    if len(cut) == len(plans):
        floors = floors_of(scaled, chosen)
    else:
        rows = mx.array(cut)
        floors = mx.full((len(plans), 1), -mx.inf)
        floors[rows] = floors_of(scaled[rows], chosen)
    return mx.where(scaled >= floors, scaled, -mx.inf)


def _top_k_floors(scaled: mx.array, plans: Sequence[SamplingPlan]) -> mx.array:
    """Return the value of each row's k-th likeliest token, (rows, 1); its equals stay in."""
    vocab_size = scaled.shape[-1]
    most = min(max(plan.top_k for plan in plans), vocab_size)
    likeliest = mx.sort(mx.topk(scaled, most), axis=-1)[:, ::-1]
    last = mx.array([min(plan.top_k, vocab_size) - 1 for plan in plans])
    return mx.take_along_axis(likeliest, last[:, None], axis=-1)


def _min_p_floors(scaled: mx.array, plans: Sequence[SamplingPlan]) -> mx.array:
    """Return the value below which a token is too unlikely beside the likeliest, (rows, 1)."""
    return scaled.max(axis=-1, keepdims=True) + mx.log(mx.array([p.min_p for p in plans]))[:, None]


def _nucleus_floors(scaled: mx.array, plans: Sequence[SamplingPlan]) -> mx.array:
    """Return the value of each nucleus's last token, (rows, 1).

    Tokens as likely as that one are all in, so the nucleus does not depend on their order.
    """
    top_p = mx.array([plan.top_p for plan in plans])
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


def _exclude_top_choices(
    scaled: mx.array,
    plans: Sequence[SamplingPlan],
    positions: Sequence[int],
    never_excluded: Sequence[int],
) -> mx.array:
    """Take out the top choices of the rows that draw so this time (XTC), by the row's own key."""
    asked = [row for row, plan in enumerate(plans) if plan.xtc_probability > 0]
    if not asked:
        return scaled
    rows = mx.array(asked)
    chosen = [plans[row] for row in asked]
    keys = sampling_keys([p.seed for p in chosen], [positions[row] + _XTC_DRAW for row in asked])
    chance = mx.vmap(lambda key: mx.random.uniform(key=key))(mx.array(keys))
    applies = chance < mx.array([plan.xtc_probability for plan in chosen])
    some = scaled[rows]
    probabilities = mx.softmax(some, axis=-1)
    thresholds = mx.array([plan.xtc_threshold for plan in chosen])[:, None]
    is_top = (probabilities >= thresholds) & (probabilities > 0)  # what was cut is no choice
    least = mx.where(is_top, probabilities, mx.inf).min(axis=-1, keepdims=True)
    is_out = is_top & (probabilities > least) & applies[:, None]
    if never_excluded:
        is_out[:, mx.array(list(never_excluded))] = False
    scaled[rows] = mx.where(is_out, -mx.inf, some)
    return scaled
