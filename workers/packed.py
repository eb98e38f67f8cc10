"""Runs a model over packed tokens: each token is a row of the forward pass, none is padding.

mlx-lm's models read a batch as (rows, tokens). Here every token, of whatever sequence, is a row of
one token: (tokens, 1). All layers but attention treat tokens alike, rotary embeddings take an
offset for each row, and attention, which is handed over by the models to one function, finds the
sequence of each token here. So sequences of any lengths share a forward pass and pay only for
their own tokens. Models whose attention does not go through that function, or that keep a state
beside keys and values, raise or give other tokens; `workers.self_test` finds out which do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from workers.checkpoints.identity import CacheFacts
from workers.checkpoints.records import Layer
from workers.kv_blocks import Block, BlockStore, LayerShape, RowKV, capacity_for
from workers.kv_records import columns_layer, to_array
from workers.runner import NotBatchable, PromptChunk

_stock_attention = base.scaled_dot_product_attention
# What checkpoints call the caches of this runner, which keep every token's key and value.
_CLASS = "packed"
# Fewer tokens are copied for each row: attending in two parts costs more.
_LEAST_SHARED = 128
# There mlx computes attention from plain matrix products; on a GPU one kernel does it all.
_ON_CPU = mx.default_device() == mx.Device(mx.cpu)


@dataclass(frozen=True, slots=True)
class _Attention:
    """How a layer attends: to the last tokens only, how scaled, and its sinks, one a head.

    A token that is decoded sees at most ``kept`` tokens: mlx-lm's cache has let go of the others.
    """

    window: int | None
    kept: int | None
    scale: float
    sinks: mx.array | None

    @property
    def window_of_decoded(self) -> int | None:
        """The window of a token that is decoded; the model's may be wider than its cache."""
        limits = [limit for limit in (self.window, self.kept) if limit is not None]
        return min(limits, default=None)


class _Pass(Protocol):
    """One forward pass: where its tokens stand, and what they attend to."""

    offsets: mx.array

    def attend(
        self,
        layer: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        how: _Attention,
    ) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stands for the mask of a pass; each sequence gets its own."""

    window: int | None


@dataclass(frozen=True, slots=True)
class _Keys:
    """Stands for all keys that a layer attends to; holds those of the pass's own tokens."""

    layer: int
    new: mx.array
    window: int | None


class _LayerCache:
    """What the models take for the cache of a layer."""

    def __init__(self, layer: int, window: int | None) -> None:
        self._layer = layer
        self._window = window
        self.current: _Pass | None = None

    @property
    def offset(self) -> mx.array:
        """The position of each token, shape (tokens,)."""
        assert self.current is not None
        return self.current.offsets

    def make_mask(
        self, _num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> _Mask:
        return _Mask(window_size or self._window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[_Keys, mx.array]:
        return _Keys(self._layer, keys, self._window), values

    def attend(self, queries: mx.array, keys: _Keys, values: mx.array, how: _Attention) -> mx.array:
        assert self.current is not None
        return self.current.attend(self._layer, queries, keys.new, values, how)


def _attention(
    queries: mx.array,
    keys: mx.array | _Keys,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: mx.array | _Mask | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Stand in for mlx-lm's function of the same place: packed tokens are attended to here."""
    if not isinstance(keys, _Keys):
        result: mx.array = _stock_attention(
            queries,
            keys,
            values,
            cache=cache,
            scale=scale,
            mask=mask,  # type: ignore[arg-type]
            sinks=sinks,
        )
        return result
    if not isinstance(cache, _LayerCache) or not (mask is None or isinstance(mask, _Mask)):
        raise NotBatchable("the model changes the attention mask")
    window = keys.window if mask is None else mask.window
    return cache.attend(queries, keys, values, _Attention(window, keys.window, scale, sinks))


def _take_over_attention(model: Module) -> None:
    """Make the modules of a model call `_attention`; others are served as before."""
    modules: Any = model.modules()  # type: ignore[no-untyped-call]
    for name in {type(module).__module__ for module in modules}:
        module = sys.modules[name]
        if getattr(module, "scaled_dot_product_attention", None) is _stock_attention:
            module.scaled_dot_product_attention = _attention  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive tokens of a prefill that belong to one row: packed tokens start to stop."""

    block: Block
    slot: int
    start: int
    stop: int
    position: int  # of its first token among the row's own

    @property
    def base_tokens(self) -> int:
        """Tokens of the row before its own."""
        return self.block.base_tokens


class _Prefill:
    """The chunks of some rows, each attending to its own row and to what that begins with."""

    def __init__(self, segments: Sequence[_Segment]) -> None:
        self._segments = segments
        positions = [
            s.base_tokens + s.position + i for s in segments for i in range(s.stop - s.start)
        ]
        # Rows that begin alike attend to that together.
        self._by_base: dict[int, list[int]] = {}
        for index, segment in enumerate(segments):
            if segment.block.base is not None:
                self._by_base.setdefault(id(segment.block.base), []).append(index)
        self.offsets = mx.array(positions, dtype=mx.int32)
        self._masks: dict[tuple[int, int | None], mx.array] = {}

    def attend(
        self,
        layer: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        how: _Attention,
    ) -> mx.array:
        # (tokens, heads, 1, width) to (1, heads, tokens, width)
        queries, keys, values = (a.transpose(2, 1, 0, 3) for a in (queries, keys, values))
        outputs: dict[int, mx.array] = {}
        own: list[tuple[mx.array, mx.array]] = []
        for index, segment in enumerate(self._segments):
            start, stop = segment.start, segment.stop
            block, slot, total = segment.block, segment.slot, segment.position + stop - start
            row_keys, row_values = keys[:, :, start:stop], values[:, :, start:stop]
            block.write(layer, slot, segment.position, row_keys, row_values)
            if segment.position:
                row_keys = block.keys[layer][slot : slot + 1, :, :total]
                row_values = block.values[layer][slot : slot + 1, :, :total]
            own.append((row_keys, row_values))
            if block.base is None:
                outputs[index] = mx.fast.scaled_dot_product_attention(
                    queries[:, :, start:stop],
                    row_keys,
                    row_values,
                    scale=how.scale,
                    mask=self._mask(index, how.window),
                    sinks=how.sinks,
                )
        for indices in self._by_base.values():
            base = self._segments[indices[0]].block.base
            assert base is not None
            made = _attend_behind(
                (base.keys[layer], base.values[layer]),
                [
                    _Part(
                        queries[:, :, self._segments[i].start : self._segments[i].stop],
                        *own[i],
                        mask=self._boolean_mask(i, how.window),
                        base_mask=self._base_mask(i, how.window),
                    )
                    for i in indices
                ],
                how,
            )
            outputs.update(zip(indices, made, strict=True))
        joined = [outputs[index] for index in range(len(self._segments))]
        whole = joined[0] if len(joined) == 1 else mx.concatenate(joined, axis=2)
        return whole.transpose(2, 1, 0, 3)

    def _mask(self, index: int, window: int | None) -> mx.array | str:
        segment = self._segments[index]
        total = segment.position + segment.stop - segment.start
        if window is None or total <= window:
            return "causal"
        return self._boolean_mask(index, window)

    def _boolean_mask(self, index: int, window: int | None) -> mx.array:
        """Return which of its own columns each token of a segment sees: (tokens, columns)."""
        if (index, window) not in self._masks:
            segment = self._segments[index]
            self._masks[index, window] = base.create_causal_mask(
                segment.stop - segment.start, segment.position, window_size=window
            )
        return self._masks[index, window]

    def _base_mask(self, index: int, window: int | None) -> mx.array | None:
        """Return which columns of the base each token of a segment sees; None: all."""
        segment = self._segments[index]
        num_before = segment.base_tokens + segment.position
        if window is None or num_before + segment.stop - segment.start <= window:
            return None
        tokens = num_before + mx.arange(segment.stop - segment.start)[:, None]
        return mx.arange(segment.base_tokens) > tokens - window


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring slots of a block that take part: packed tokens start to stop."""

    block: Block
    slot: int
    start: int
    stop: int
    columns: int  # what the longest of them holds, the new token included


@dataclass(slots=True)
class _Decode:
    """One token of each of some rows that lie in blocks."""

    runs: list[_Run]
    writes: list[tuple[Block, mx.array, mx.array, slice]]  # block, slots, columns, packed tokens
    positions: list[int]
    offsets: mx.array = field(init=False)
    _masks: dict[tuple[int, int | None], mx.array | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.offsets = mx.array(self.positions, dtype=mx.int32)

    def attend(
        self,
        layer: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        how: _Attention,
    ) -> mx.array:
        for block, chosen, columns, tokens in self.writes:
            block.keys[layer][chosen, :, columns] = keys[tokens, :, 0]
            block.values[layer][chosen, :, columns] = values[tokens, :, 0]
        outputs = []
        for index, run in enumerate(self.runs):
            slots = slice(run.slot, run.slot + run.stop - run.start)
            window = how.window_of_decoded
            row_keys = run.block.keys[layer][slots, :, : run.columns]
            row_values = run.block.values[layer][slots, :, : run.columns]
            run_queries, mask = queries[run.start : run.stop], self._mask(index, window)
            if run.block.base is None:
                outputs.append(_attend_each(run_queries, row_keys, row_values, mask, how))
                continue
            base = run.block.base
            base_mask = self._base_mask(index, window)
            part = _Part(run_queries, row_keys, row_values, mask, base_mask)
            outputs += _attend_behind((base.keys[layer], base.values[layer]), [part], how)
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)

    def _mask(self, index: int, window: int | None) -> mx.array | None:
        """Return which of their own columns the rows of a run see; None: all."""
        key = (index, window)
        if key not in self._masks:
            run = self.runs[index]
            last = self.offsets[run.start : run.stop, None, None, None] - run.block.base_tokens
            columns = mx.arange(run.columns, dtype=mx.int32)
            mask = columns <= last
            if window is not None:
                mask = mask & (columns > last - window)
            shortest = min(self.positions[run.start : run.stop]) - run.block.base_tokens
            is_full = shortest + 1 == run.columns and not (window and run.columns > window)
            self._masks[key] = None if is_full else mask
        return self._masks[key]

    def _base_mask(self, index: int, window: int | None) -> mx.array | None:
        """Return which columns of their base the rows of a run see; None: all."""
        run = self.runs[index]
        longest = max(self.positions[run.start : run.stop])
        if window is None or longest < window:
            return None
        last = self.offsets[run.start : run.stop, None, None, None]
        return mx.arange(run.block.base_tokens, dtype=mx.int32) > last - window


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries of (rows, heads, tokens, width), and what they see besides the base of their rows.

    Attributes:
        mask: which of the own columns each query sees, None for all; it broadcasts to (rows, key
            heads, tokens, columns).
        base_mask: likewise of the base.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    mask: mx.array | None
    base_mask: mx.array | None


def _attend_behind(
    base: tuple[mx.array, mx.array], parts: Sequence[_Part], how: _Attention
) -> list[mx.array]:
    """Attend to keys and values that all rows begin with, (1, key heads, columns, width), and own.

    The queries of all rows meet the base in one matrix product, and one softmax goes over both
    parts, so the sums are those of plain attention. Source: Juravsky et al., Hydragen, 2024, with
    the scores joined before the softmax rather than after.

    Returns:
        for each part (rows, heads, tokens, width of values).
    """
    base_keys, base_values = base
    num_key_heads, num_columns = base_keys.shape[1:3]
    folded = [_fold(part.queries * how.scale, num_key_heads) for part in parts]
    shapes = [queries.shape for queries in folded]
    together = [_by_head(queries) for queries in folded]
    cuts = [sum(queries.shape[1] for queries in together[:i]) for i in range(1, len(together))]
    queries = mx.concatenate(together, axis=1) if cuts else together[0]
    scores = _split(queries @ base_keys[0].swapaxes(-1, -2), cuts)
    to_base, own_outputs = [], []
    for part, own_queries, base_scores, shape in zip(parts, folded, scores, shapes, strict=True):
        rows, _, group, tokens, _ = shape
        own_keys, own_values = part.keys[:, :, None], part.values[:, :, None]
        seen = _masked(_by_row(base_scores, shape), part.base_mask)
        if tokens == 1:  # the heads that share keys go in as so many queries of one head
            flat = own_queries[:, :, :, 0]
            own_scores = (flat @ part.keys.swapaxes(-1, -2))[:, :, :, None]
        else:
            own_scores = own_queries @ own_keys.swapaxes(-1, -2)
        columns = [seen, _masked(own_scores, part.mask)]
        if how.sinks is not None:
            sinks = how.sinks.reshape(1, num_key_heads, group, 1, 1).astype(seen.dtype)
            columns.append(mx.broadcast_to(sinks, (rows, num_key_heads, group, tokens, 1)))
        weights = mx.softmax(mx.concatenate(columns, axis=-1), axis=-1, precise=True)
        to_base.append(_by_head(weights[..., :num_columns]))
        own_weights = weights[..., num_columns : num_columns + part.keys.shape[2]]
        if tokens == 1:
            own_outputs.append((own_weights[:, :, :, 0] @ part.values)[:, :, :, None])
        else:
            own_outputs.append(own_weights @ own_values)
    joined = mx.concatenate(to_base, axis=1) if cuts else to_base[0]
    outputs = _split(joined @ base_values[0], cuts)
    return [
        (_by_row(output, shape) + own).reshape(shape[0], -1, shape[3], own.shape[-1])
        for output, own, shape in zip(outputs, own_outputs, shapes, strict=True)
    ]


def _split(array: mx.array, cuts: list[int]) -> list[mx.array]:
    return list(mx.split(array, cuts, axis=1)) if cuts else [array]


def _fold(queries: mx.array, num_key_heads: int) -> mx.array:
    """Group the heads that share keys: (rows, key heads, heads of each, tokens, width)."""
    rows, heads, tokens, width = queries.shape
    return queries.reshape(rows, num_key_heads, heads // num_key_heads, tokens, width)


def _by_head(array: mx.array) -> mx.array:
    """Line up what belongs to a key head: (key heads, rows x heads of each x tokens, width)."""
    _, num_key_heads, *_, width = array.shape
    return array.transpose(1, 0, 2, 3, 4).reshape(num_key_heads, -1, width)


def _by_row(array: mx.array, like: tuple[int, ...]) -> mx.array:
    """Undo `_by_head`."""
    rows, num_key_heads, group, tokens, _ = like
    return array.reshape(num_key_heads, rows, group, tokens, -1).transpose(1, 0, 2, 3, 4)


def _masked(scores: mx.array, mask: mx.array | None) -> mx.array:
    """Leave out scores where a mask says so: (rows, key heads, heads of each, tokens, columns)."""
    if mask is None:
        return scores
    if mask.ndim == 4:  # one for all heads of a key head
        mask = mask[:, :, None]
    return mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))


def _attend_each(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None, how: _Attention
) -> mx.array:
    """Attend with one query a row: (rows, heads, 1, width) over (rows, key heads, columns, width).

    On the CPU, the heads that share keys go in as so many queries of one head: fewer and
    larger matrix products, and the same sums.
    """
    num_rows, num_heads, _, width = queries.shape
    num_key_heads = keys.shape[1]
    is_folded = _ON_CPU and how.sinks is None and num_heads > num_key_heads
    if is_folded:
        queries = queries.reshape(num_rows, num_key_heads, num_heads // num_key_heads, width)
    output = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=how.scale, mask=mask, sinks=how.sinks
    )
    return output.reshape(num_rows, num_heads, 1, -1) if is_folded else output


class PackedRunner:
    """Runs rows of a model whose caches hold keys and values only. See `workers.runner.Runner`.

    Args:
        model: evaluated weights; used on the calling thread.
        budget_bytes: what keys and values may take.

    Raises:
        NotBatchable: the model keeps something else.
    """

    def __init__(self, model: Module, *, budget_bytes: int = 1 << 62) -> None:
        self._model: Any = model
        self._caches = [
            _LayerCache(layer, _window(cache))
            for layer, cache in enumerate(make_prompt_cache(model))
        ]
        _take_over_attention(model)
        self.store = BlockStore(_layer_shapes(self._model, self._caches), budget_bytes)

    def row_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a row of so many tokens takes, padding included."""
        return capacity_for(num_tokens) * self.store.bytes_per_token

    def add(self, rows: Mapping[str, int]) -> None:
        """Make room for rows, each of so many prompt tokens."""
        self.store.add(rows)

    def is_finite(self, state: RowKV) -> bool:
        """Return whether every number of a state is one; others would spread."""
        return _all_finite([*state.keys, *state.values])

    def drop(self, row_id: str) -> None:
        """Forget a row."""
        self.store.drop(row_id)

    def shrink(self) -> None:
        """Give back what no row uses."""
        self.store.shrink()

    def clear(self) -> None:
        """Forget every row."""
        self.store.clear()

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[mx.array]:
        """Take chunks of prompts in; return what must be evaluated for it to have happened."""
        segments: list[_Segment] = []
        tokens: list[int] = []
        for chunk in chunks:
            block, slot = self.store.slots[chunk.row_id]
            stop = len(tokens) + len(chunk.tokens)
            segments.append(_Segment(block, slot, len(tokens), stop, block.lengths[slot]))
            tokens.extend(chunk.tokens)
        self._forward(mx.array(tokens, dtype=mx.int32), _Prefill(segments))
        for segment in segments:
            segment.block.lengths[segment.slot] += segment.stop - segment.start
        blocks = {id(segment.block): segment.block for segment in segments}.values()
        return [array for block in blocks for array in (*block.keys, *block.values)]

    def arrange(self, row_ids: Sequence[str]) -> list[str]:
        """Seat rows for the next `decode`; return them in the order that its tokens must have."""
        self.store.grow(row_ids)
        wanted = set(row_ids)
        return [
            owner
            for block in self.store.blocks
            for owner in block.owners
            if owner is not None and owner in wanted
        ]

    def decode(self, order: Sequence[str], tokens: mx.array) -> mx.array:
        """Feed one token to each row, (rows,) in the order of `arrange`; return their logits.

        Returns:
            (rows, vocabulary), not evaluated.
        """
        plan = self._plan_decode(order)
        logits = self._forward(tokens, plan)
        for row_id in order:
            block, slot = self.store.slots[row_id]
            block.lengths[slot] += 1
        return logits[:, 0]

    @property
    def is_sliceable(self) -> bool:
        """Whether what a row holds of its first tokens can be had alone: each has its columns."""
        return True

    def extract(self, row_id: str, length: int | None = None) -> RowKV:
        """Return a copy of what a row holds of its first tokens, evaluated."""
        return self.store.extract(row_id, length)

    def shared_tokens(self, length: int) -> int:
        """Return how many of so many first tokens rows can have in common, lying there once."""
        return length if length >= _LEAST_SHARED else 0

    def add_with(self, rows: Mapping[str, int], state: RowKV, length: int, shared: int) -> None:
        """Make room for rows, each of so many tokens, that begin with ``length`` ones of a state.

        Args:
            shared: so many of them stay where they are, for all rows that begin with this state.
        """
        own = {row_id: num_tokens - shared for row_id, num_tokens in rows.items()}
        self.store.add(own, state.head(shared) if shared else None)
        if length > shared:
            for row_id in rows:
                self.store.load(row_id, state.columns(shared, length))

    def describe_layers(self) -> list[CacheFacts]:
        """Return what each layer keeps of a row: the same where states fit each other."""
        return [
            CacheFacts(
                _CLASS,
                dtypes=(str(shape.dtype),) * 2,
                shapes=((shape.num_heads, shape.key_width), (shape.num_heads, shape.value_width)),
            )
            for shape in self.store.layers
        ]

    def to_layers(self, state: RowKV, start: int, stop: int) -> tuple[Layer, ...]:
        """Return the keys and values of the tokens from start to stop as plain arrays."""
        pairs = zip(state.keys, state.values, strict=True)
        return tuple(columns_layer(_CLASS, pair, start, stop) for pair in pairs)

    def from_layers(self, layers: Sequence[Layer], length: int) -> RowKV:
        """Return the state after ``length`` tokens that plain arrays hold.

        Raises:
            ValueError: they are of another model or length.
        """
        keys, values = [], []
        for shape, layer in zip(self.store.layers, layers, strict=True):
            key, value = (to_array(tensor) for tensor in layer.tensors)
            for array, width in ((key, shape.key_width), (value, shape.value_width)):
                if array.shape != (1, shape.num_heads, length, width) or array.dtype != shape.dtype:
                    raise ValueError(
                        f"{array.dtype} of shape {array.shape} is no key or value here"
                    )
            keys.append(key)
            values.append(value)
        return RowKV(keys, values, length)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, padding and free slots included."""
        return self.store.nbytes

    @property
    def peak_bytes(self) -> int:
        """The most that `nbytes` has been."""
        return self.store.peak_bytes

    def _forward(self, tokens: mx.array, current: _Pass) -> mx.array:
        for cache in self._caches:
            cache.current = current
        try:
            logits: mx.array = self._model(tokens[:, None], cache=self._caches)
        finally:
            for cache in self._caches:
                cache.current = None
        return logits

    def _plan_decode(self, order: Sequence[str]) -> _Decode:
        runs: list[_Run] = []
        writes = []
        positions: list[int] = []
        by_block: dict[int, tuple[Block, list[int]]] = {}
        for row_id in order:
            block, slot = self.store.slots[row_id]
            by_block.setdefault(id(block), (block, []))[1].append(slot)
        for block, slots in by_block.values():
            first = len(positions)
            columns = [block.lengths[slot] for slot in slots]
            start = 0
            for i in range(1, len(slots) + 1):
                if i == len(slots) or slots[i] != slots[i - 1] + 1:
                    longest = max(columns[start:i]) + 1
                    runs.append(_Run(block, slots[start], first + start, first + i, longest))
                    start = i
            positions.extend(block.base_tokens + own for own in columns)
            tokens = slice(first, len(positions))
            writes.append((block, mx.array(slots), mx.array(columns), tokens))
        return _Decode(runs, writes, positions)


def _all_finite(arrays: Sequence[mx.array]) -> bool:
    return bool(mx.all(mx.stack([mx.isfinite(array).all() for array in arrays])).item())


def _window(cache: object) -> int | None:
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache:
        return int(cache.max_size)
    raise NotBatchable(f"the model keeps a {type(cache).__name__}")


def _layer_shapes(model: Any, caches: Sequence[_LayerCache]) -> list[LayerShape]:
    """Run one token through the graph, computing nothing, and see what each layer keeps."""
    probe = _Probe(len(caches))
    for cache in caches:
        cache.current = probe
    model(mx.array([[0]]), cache=caches)
    if None in probe.shapes:
        raise NotBatchable("some layers keep nothing")
    return [shape for shape in probe.shapes if shape is not None]


class _Probe:
    """A pass that notes the shapes that it is given."""

    def __init__(self, num_layers: int) -> None:
        self.offsets = mx.array([0], dtype=mx.int32)
        self.shapes: list[LayerShape | None] = [None] * num_layers

    def attend(
        self,
        layer: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        how: _Attention,
    ) -> mx.array:
        self.shapes[layer] = LayerShape(
            int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]), keys.dtype
        )
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=how.scale, mask=None, sinks=how.sinks
        )
