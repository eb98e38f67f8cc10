"""Segments for tests: small, with numbers that tell which tokens they are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.checkpoints.cutting import segments_of
from workers.checkpoints.records import Identity, Kind, Layer, Segment, Tensor
from workers.checkpoints.store import CheckpointStore, Restored

IDENTITY = Identity({"model": "tests"})
OTHER_IDENTITY = Identity({"model": "another"})
_HEADS, _WIDTH = 2, 4


def layers(
    tokens: Sequence[int], start: int, *, with_state: bool = False, width: int = _WIDTH
) -> list[Layer]:
    """Two layers of keys and values that depend on every token so far; perhaps one of a state."""
    sums = np.cumsum(np.asarray(tokens, dtype=np.uint64) + np.uint64(1))[start:]
    found = []
    for number in range(2):
        made = [_noise(sums, 2 * number + salt, width) for salt in (0, 1)]
        tensors = tuple(Tensor("bfloat16", data) for data in made)
        found.append(Layer("KVCache", Kind.DELTA, tensors))
    if with_state:
        state = np.full((3, 5), sums[-1] % 65536, dtype=np.float32)
        found.append(Layer("ArraysCache", Kind.STATE, (Tensor("float32", state),), {"n": 1}))
    return found


def _noise(sums: NDArray[np.uint64], salt: int, width: int) -> NDArray[np.uint16]:
    """Numbers that nothing makes shorter, other ones for each sum."""
    place = np.arange(_HEADS * width, dtype=np.uint64).reshape(_HEADS, 1, width)
    mixed = sums[None, :, None] * np.uint64(0x9E3779B97F4A7C15) + place + np.uint64(salt << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.ascontiguousarray((mixed >> np.uint64(40)).astype(np.uint16)[None])


def segments(
    tokens: Sequence[int],
    start: int = 0,
    *,
    identity: Identity = IDENTITY,
    with_state: bool = False,
    cost_seconds: float = 1.0,
    max_bytes: int = 1 << 25,
    width: int = _WIDTH,
) -> list[Segment]:
    """The segments of a prompt from a token on."""
    made = layers(tokens, start, with_state=with_state, width=width)
    return segments_of(identity.namespace, tokens, start, made, cost_seconds, max_bytes)


def keep(store: CheckpointStore, tokens: Sequence[int], **options: Any) -> int:
    """Put what is missing of a prompt into a store, and return how many segments were written."""
    start = store.covers(tokens)
    if start == len(tokens):
        return 0
    written = [store.put(one) for one in segments(tokens, start, **options)]
    assert all(written), written
    return len(written)


def assert_is_of(restored: Restored, tokens: Sequence[int], *, width: int = _WIDTH) -> None:
    """What was restored is bit for bit what was computed of these tokens."""
    assert restored.length == len(tokens)
    assert [token for one in restored.segments for token in one.tokens] == list(tokens)
    if not tokens:
        return
    states = [layer for layer in restored.segments[-1].layers if layer.kind is Kind.STATE]
    expected = layers(tokens, 0, with_state=bool(states), width=width)
    for number, layer in enumerate(expected):
        parts = [one.layers[number] for one in restored.segments]
        assert {part.cls for part in parts} == {layer.cls}
        for at, tensor in enumerate(layer.tensors):
            if layer.kind is Kind.DELTA:
                data = np.concatenate([part.tensors[at].data for part in parts], axis=-2)
            else:
                data = parts[-1].tensors[at].data
            assert data.dtype == tensor.data.dtype
            assert np.array_equal(data, tensor.data)
