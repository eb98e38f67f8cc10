"""Any segment survives its file; any other bytes are refused and nothing worse."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.segments import (
    NAMESPACE,
    assert_same,
    is_refused,
    kv_layers,
    make_segment,
    rewrite_header,
    write,
)
from workers.checkpoints.records import Kind, Layer, Segment, Tensor
from workers.checkpoints.segment_file import read_header, read_segment, read_tokens
from workers.checkpoints.segment_header import DTYPES

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=600)
on_a_busy_machine = settings(deadline=None)


@st.composite
def tensors(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]]) -> Tensor:
    name = draw(st.sampled_from(list(DTYPES)))
    dtype, shape = DTYPES[name], draw(shapes)
    num_bytes = dtype.itemsize * int(np.prod(shape, dtype=int))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    # From all alike to noise.
    data = random.integers(0, draw(st.integers(1, 256)), num_bytes, np.uint8)
    data = data & 1 if name == "bool" else data
    return Tensor(name, data.view(dtype).reshape(shape))


@st.composite
def layers(draw: st.DrawFn, num_tokens: int) -> Layer:
    kind = draw(st.sampled_from(Kind))
    sizes = st.integers(0, 5)
    shapes: st.SearchStrategy[tuple[int, ...]] = st.lists(sizes, max_size=5).map(tuple)
    if kind is Kind.DELTA:
        shapes = st.tuples(st.just(1), sizes, st.just(num_tokens), sizes)
    arrays = draw(st.lists(tensors(shapes), max_size=4))
    return Layer(draw(TEXT), kind, tuple(arrays), draw(JSON))


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[int], Segment]:
    before, tokens = draw(TOKENS), draw(TOKENS.filter(bool))
    own = draw(st.lists(layers(len(tokens)), max_size=4))
    repeated = [layer for layer in own for _ in range(draw(st.integers(1, 3)))]
    cost = draw(st.floats(0, 1e6))
    return before, make_segment(repeated, tokens, before, cost_seconds=cost)


@contextmanager
def written(segment: Segment, before: list[int]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield write(Path(folder), segment, before)


@on_a_busy_machine
@given(segments())
def test_a_segment_is_read_back_as_it_was_written(case: tuple[list[int], Segment]) -> None:
    before, segment = case
    with written(segment, before) as path:
        known = np.array(before, "<u4").tobytes()
        assert_same(read_segment(path, NAMESPACE, before=known), segment)
        header = read_header(path)
        assert read_tokens(path, header) == np.array(segment.tokens, "<u4").tobytes()
        assert (header.nbytes, header.is_sliceable) == (segment.nbytes, segment.is_sliceable)


@on_a_busy_machine
@given(segments(), st.data())
def test_any_damage_is_found(case: tuple[list[int], Segment], data: st.DataObject) -> None:
    before, segment = case
    with written(segment, before) as path:
        good = path.read_bytes()
        start = data.draw(st.integers(0, len(good)))
        length = data.draw(st.integers(0, 8))
        bad = good[:start] + data.draw(st.binary(max_size=8)) + good[start + length :]
        path.write_bytes(bad)
        assert is_refused(path) == (bad != good)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where in a JSON value another value may stand."""
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from places(item, (*path, key))


NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 8, 16, 1 << 20, 1 << 31, 1 << 53, 1 << 64, -1, 0.5])
NAMES = st.sampled_from([*DTYPES, *Kind, "00" * 16])


@on_a_busy_machine
@given(st.data(), NUMBERS | NAMES | JSON)
def test_whatever_a_header_says_it_is_read_or_refused(data: st.DataObject, value: Any) -> None:
    segment = make_segment([*kv_layers(2, 3), Layer("A", Kind.STATE, (), {"a": [1]})])

    def change(header: dict[str, Any]) -> Any:
        *path, last = data.draw(st.sampled_from(list(places(header))[1:]))
        place: Any = header
        for key in path:
            place = place[key]
        place[last] = value
        return header

    with written(segment, []) as path:
        rewrite_header(path, change)
        if not is_refused(path):
            assert json.dumps(read_segment(path, NAMESPACE).tokens) == "[1, 2, 3]"


@on_a_busy_machine
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.qkv"
        path.write_bytes(data)
        assert is_refused(path)
