"""Keys and values with eight bits a number: a quarter of the room, and not what was computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from workers.checkpoints.index import Match
from workers.checkpoints.records import Kind, Layer, Segment, Tensor
from workers.checkpoints.store import CheckpointStore, Restored

# Part of the identity of what is kept in this form.
AT_REST: Final = {"bits": 8, "group": "a token of a head", "scale": "float32"}
_LARGEST: Final = 127
_FLOATS: Final = frozenset({"float16", "bfloat16", "float32"})
_MARK: Final = "eight_bit"


@dataclass(frozen=True, slots=True)
class EightBitStore:
    """A store that keeps the keys and values of another one's segments in eight bits.

    What a layer keeps as a whole (a STATE) stays as it is: errors in it would add up.

    Args:
        store: of an identity that has ``AT_REST`` in it.
    """

    store: CheckpointStore

    @property
    def namespace(self) -> str:
        """The namespace whose segments it keeps."""
        return self.store.namespace

    def match(self, tokens: Sequence[int]) -> Match:
        """Return the deepest restore point that leaves a prompt at least one token to feed."""
        return self.store.match(tokens)

    def read(self, match: Match) -> Restored:
        """Return the segments of a match, with numbers of the types that they had."""
        return Restored(tuple(map(widen, self.store.read(match).segments)))

    def put(self, segment: Segment) -> int | None:
        """Keep a segment; returns what the other store does."""
        return self.store.put(narrow(segment))

    def note_use(self, match: Match) -> None:
        """Count the use of a match."""
        self.store.note_use(match)

    def covers(self, tokens: Sequence[int]) -> int:
        """Return from which token on a prompt's segments are worth putting."""
        return self.store.covers(tokens)

    def latest(self, count: int) -> list[list[int]]:
        """Return the prompts that were stored or used last."""
        return self.store.latest(count)

    def counts(self) -> dict[str, int]:
        """Return what has happened so far, by name."""
        return self.store.counts()

    def close(self) -> None:
        """Let go of what is open."""
        self.store.close()


def narrow(segment: Segment) -> Segment:
    """Return a segment whose keys and values are in eight bits, each row with a scale."""
    return replace(segment, layers=tuple(map(_narrow_layer, segment.layers)))


def widen(segment: Segment) -> Segment:
    """Return a segment with the types that it had before ``narrow``."""
    return replace(segment, layers=tuple(map(_widen_layer, segment.layers)))


def _narrow_layer(layer: Layer) -> Layer:
    """Write each array as one of whole numbers and one of scales; any that cannot be stays."""
    if layer.kind is not Kind.DELTA:
        return layer
    tensors: list[Tensor] = []
    dtypes: list[str | None] = []
    for tensor in layer.tensors:
        pair = _narrow_tensor(tensor)
        dtypes.append(tensor.dtype if pair else None)
        tensors += pair or (tensor,)
    return replace(layer, tensors=tuple(tensors), meta={_MARK: dtypes, "meta": layer.meta})


def _narrow_tensor(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    if tensor.dtype not in _FLOATS or not tensor.data.size:
        return None
    numbers = tensor.as_float32()
    scales = np.abs(numbers).max(axis=-1, keepdims=True) / _LARGEST
    if not np.isfinite(scales).all():
        return None
    steps = np.divide(numbers, scales, out=np.zeros_like(numbers), where=scales > 0)
    whole = np.rint(steps).clip(-_LARGEST, _LARGEST).astype(np.int8)
    return Tensor("int8", whole), Tensor("float32", scales.astype(np.float32))


def _widen_layer(layer: Layer) -> Layer:
    if not isinstance(layer.meta, Mapping) or _MARK not in layer.meta:
        return layer
    rest = iter(layer.tensors)
    tensors = []
    for dtype in layer.meta[_MARK]:
        tensor = next(rest)
        if dtype is not None:
            tensor = _from_float32(tensor.data * next(rest).data, dtype)
        tensors.append(tensor)
    return replace(layer, tensors=tuple(tensors), meta=layer.meta["meta"])


def _from_float32(numbers: NDArray[Any], dtype: str) -> Tensor:
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # to the nearest, ties to even
        return Tensor(dtype, (rounded >> 16).astype(np.uint16))
    return Tensor(dtype, np.ascontiguousarray(numbers, dtype))
