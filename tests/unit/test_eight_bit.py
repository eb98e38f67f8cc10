"""Checkpoints with eight bits a number: how far they are off, and what stays exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from tests.checkpoints import IDENTITY, segments
from workers.checkpoints.directory import DirectoryStore
from workers.checkpoints.eight_bit import AT_REST, EightBitStore, narrow, widen
from workers.checkpoints.identity import describe
from workers.checkpoints.records import Kind, Layer, Segment, Tensor, prefix_digests

PROMPT = list(range(300))
SHAPE = (1, 2, 300, 4)


def segment_of(*tensors: Tensor, kind: Kind = Kind.DELTA) -> Segment:
    parent, digest = prefix_digests(IDENTITY.namespace, PROMPT, [0, len(PROMPT)])
    layer = Layer("KVCache", kind, tensors, {"own": 1})
    return Segment(0, tuple(PROMPT), parent, digest, (layer,))


def bits_of(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def floats_of(tensor: Tensor) -> NDArray[np.float64]:
    if tensor.dtype == "bfloat16":
        return (tensor.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return tensor.data.astype(np.float64)


FLOATS = arrays(
    np.float32, (1, 2, 3, 4), elements=st.floats(-1000, 1000, width=32, allow_subnormal=False)
)


@given(FLOATS, st.sampled_from(["float32", "float16", "bfloat16"]))
def test_no_number_is_off_by_more_than_half_a_step_of_its_row(
    numbers: NDArray[np.float32], dtype: str
) -> None:
    data = bits_of(numbers) if dtype == "bfloat16" else numbers.astype(dtype)
    before = Tensor(dtype, data)
    [layer] = widen(narrow(segment_of(before))).layers
    [after] = layer.tensors
    assert (after.dtype, after.data.dtype, after.data.shape) == (dtype, data.dtype, data.shape)
    assert (layer.cls, layer.kind, layer.meta) == ("KVCache", Kind.DELTA, {"own": 1})
    exact, found = floats_of(before), floats_of(after)
    steps = np.abs(exact).max(axis=-1, keepdims=True) / 127
    # And what the type itself rounds.
    rounding = {"float32": 2**-22, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    assert (np.abs(exact - found) <= 0.5 * steps + rounding * np.abs(exact) + 1e-7).all()


def test_it_takes_about_a_quarter_and_any_part_of_it_can_be_used(tmp_path: Path) -> None:
    exact = segments(PROMPT, width=64)
    as_floats = [
        Layer("KVCache", Kind.DELTA, tuple(
            Tensor("float32", np.random.default_rng(7).normal(size=(1, 2, 300, 64)).astype("f4"))
            for _ in range(2)
        ))
    ]  # fmt: skip
    whole = Segment(0, tuple(PROMPT), exact[0].parent, exact[-1].digest, tuple(as_floats))
    assert narrow(whole).nbytes < 0.28 * whole.nbytes
    store = EightBitStore(DirectoryStore(tmp_path, IDENTITY, 1 << 30))
    assert store.put(whole)
    prompt = [*PROMPT[:200], 9999]  # leaves it in the middle
    restored = store.read(store.match(prompt))
    assert restored.length == 200
    [part] = restored.segments
    for before, after in zip(whole.layers[0].tensors, part.layers[0].tensors, strict=True):
        assert after.dtype == "float32"
        assert after.data.shape == (1, 2, 200, 64)
        assert np.abs(before.data[:, :, :200] - after.data).max() < 0.05


def test_states_and_what_is_no_number_stay_bit_for_bit() -> None:
    state = segment_of(Tensor("float32", np.ones((3, 5), np.float32)), kind=Kind.STATE)
    assert narrow(state) is not None
    assert narrow(state).layers == state.layers
    packed = Tensor("uint32", np.arange(np.prod(SHAPE), dtype=np.uint32).reshape(SHAPE))
    endless = np.zeros(SHAPE, np.float32)
    endless[0, 0, 0, 0] = np.inf
    before = segment_of(packed, Tensor("float32", endless))
    [layer] = widen(narrow(before)).layers
    for one, other in zip(before.layers[0].tensors, layer.tensors, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one.data, other.data)


def test_rows_of_zeros_are_zeros() -> None:
    before = segment_of(Tensor("float32", np.zeros(SHAPE, np.float32)))
    [layer] = widen(narrow(before)).layers
    assert not layer.tensors[0].data.any()


@pytest.mark.parametrize("at_rest", [None, AT_REST])
def test_what_is_exact_and_what_is_not_never_meet(at_rest: dict[str, object] | None) -> None:
    facts = {"weights": "w", "dtype": "float32", "config": {}, "caches": (), "versions": {}}
    one = describe(**facts, device="cpu", at_rest=at_rest)  # type: ignore[arg-type]
    others = [None, AT_REST]
    others.remove(at_rest)  # type: ignore[arg-type]
    other = describe(**facts, device="cpu", at_rest=others[0])  # type: ignore[arg-type]
    assert one.namespace != other.namespace
    assert ("at_rest" in one.facts) is (at_rest is not None)
