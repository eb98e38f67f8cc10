"""Between the arrays of MLX that rows are made of and the plain ones of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from workers.checkpoints.records import Kind, Layer, Segment, Tensor

# Types that numpy lacks, and what stands for their bits.
_UNSIGNED = {"bfloat16": mx.uint16}


def to_tensor(array: mx.array) -> Tensor:
    """Return an evaluated array's numbers, not copied: the array must not change afterwards."""
    name = str(array.dtype).removeprefix("mlx.core.")
    unsigned = _UNSIGNED.get(name)
    raw = array if unsigned is None else array.view(unsigned)
    return Tensor(name, np.array(raw, copy=False))


def to_array(tensor: Tensor) -> mx.array:
    """Return a copy of a tensor's numbers as an array."""
    array = mx.array(tensor.data)
    return array.view(mx.bfloat16) if tensor.dtype in _UNSIGNED else array


def columns_layer(cls: str, arrays: Sequence[mx.array], start: int, stop: int) -> Layer:
    """Return the layer of evaluated arrays with a column for each token, those from start to stop.

    Nothing is copied: the arrays must not change afterwards.
    """
    tensors = [to_tensor(array) for array in arrays]
    return Layer(cls, Kind.DELTA, tuple(Tensor(t.dtype, t.data[:, :, start:stop]) for t in tensors))


def join_layers(segments: Iterable[Segment]) -> tuple[Layer, ...]:
    """Return the layers of consecutive segments as one.

    Raises:
        ValueError: they do not fit each other.
    """
    return tuple(_join(layers) for layers in zip(*(s.layers for s in segments), strict=True))


def _join(layers: Sequence[Layer]) -> Layer:
    last = layers[-1]
    if last.kind is Kind.STATE:
        return last
    joined = []
    for parts in zip(*(layer.tensors for layer in layers), strict=True):
        if len({part.dtype for part in parts}) > 1:
            raise ValueError("segments of one prompt hold different types")
        data = [part.data for part in parts]
        joined.append(
            replace(parts[0], data=data[0] if len(data) == 1 else np.concatenate(data, -2))
        )
    return replace(last, tensors=tuple(joined))


def max_difference(one: Sequence[Layer], other: Sequence[Layer]) -> float:
    """Return the largest difference of two states' numbers, relative to the largest of its array.

    0 is bit for bit; what has other shapes is infinitely different.
    """
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a.tensors, b.tensors, strict=True):
            if x.data.shape != y.data.shape or x.dtype != y.dtype:
                return float("inf")
            left, right = x.as_float32(), y.as_float32()
            if left.size:
                scale = max(float(np.abs(left).max()), 1e-30)
                worst = max(worst, float(np.abs(left - right).max()) / scale)
    return worst


def state_layer(cls: str, state: Any) -> Layer:
    """Return the layer of a cache's whole state: arrays, numbers, names, in lists and tuples.

    Raises:
        TypeError: something else is in it.
    """
    tensors: list[Tensor] = []
    return Layer(cls, Kind.STATE, meta=_flatten(state, tensors), tensors=tuple(tensors))


def to_state(layer: Layer) -> Any:
    """Return the state of which `state_layer` made a layer.

    Raises:
        ValueError: it was made of nothing that a state is.
    """
    return _unflatten(layer.meta, layer.tensors)


def _flatten(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, mx.array):
        tensors.append(to_tensor(value))
        return {"array": len(tensors) - 1}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_flatten(one, tensors) for one in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise TypeError(f"a cache keeps a {type(value).__name__}, which cannot be stored")


def _unflatten(meta: Any, tensors: Sequence[Tensor]) -> Any:
    try:
        ((kind, content),) = meta.items()
        if kind == "array":
            return to_array(tensors[content])
        if kind in ("list", "tuple"):
            items = [_unflatten(one, tensors) for one in content]
            return items if kind == "list" else tuple(items)
        if kind == "value":
            return content
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"not the state of a cache: {error}") from error
    raise ValueError(f"not the state of a cache: {kind}")
