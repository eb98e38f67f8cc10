"""Segments of made-up numbers for tests of their files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

from workers.checkpoints.index import blocks_in
from workers.checkpoints.records import Kind, Layer, Segment, Tensor, prefix_digests
from workers.checkpoints.segment_file import BadSegment, read_segment, write_segment
from workers.checkpoints.segment_header import DTYPES

NAMESPACE = "0123456789abcdef" * 2
OTHER_NAMESPACE = "fedcba9876543210" * 2


def numbers(dtype: str, shape: Sequence[int], seed: int = 0) -> Tensor:
    """Return numbers with the statistics of keys and values, as far as the type has them."""
    random = np.random.default_rng(seed)
    size = int(np.prod(shape, dtype=int))
    normal = random.normal(0, 2, size)
    if dtype == "bfloat16":
        data = (normal.astype("<f4").view("<u4") >> 16).astype("<u2")
    elif dtype == "bool":
        data = normal > 0
    elif DTYPES[dtype].kind in "fc":
        data = normal.astype(DTYPES[dtype])
    else:
        data = np.frombuffer(random.bytes(size * DTYPES[dtype].itemsize), DTYPES[dtype])
    return Tensor(dtype, data.reshape(shape))


def make_segment(
    layers: Sequence[Layer],
    tokens: Sequence[int] = (1, 2, 3),
    before: Sequence[int] = (),
    *,
    namespace: str = NAMESPACE,
    cost_seconds: float = 0.0,
) -> Segment:
    start, end = len(before), len(before) + len(tokens)
    parent, digest = prefix_digests(namespace, [*before, *tokens], [start, end])
    return Segment(start, tuple(tokens), parent, digest, tuple(layers), cost_seconds)


def kv_layers(
    num_layers: int, num_tokens: int, *, dtype: str = "bfloat16", heads: int = 1, width: int = 8
) -> list[Layer]:
    shape = (1, heads, num_tokens, width)
    return [
        Layer("KVCache", Kind.DELTA, tuple(numbers(dtype, shape, 2 * i + j) for j in (0, 1)))
        for i in range(num_layers)
    ]


def write(
    folder: Path,
    segment: Segment,
    before: Sequence[int] = (),
    *,
    namespace: str = NAMESPACE,
    **options: Any,
) -> Path:
    ends = blocks_in(segment.start, segment.end)
    blocks = prefix_digests(namespace, [*before, *segment.tokens], ends)
    options = {"created": 1.0, **options}
    return write_segment(folder, segment, namespace, blocks=blocks, **options)[0]


def assert_same(one: Segment, other: Segment) -> None:
    """Compare two segments bit for bit."""
    assert [facts(layer) for layer in one.layers] == [facts(layer) for layer in other.layers]
    for a, b in zip(tensors(one), tensors(other), strict=True):
        assert a.data.dtype == b.data.dtype
        assert a.data.tobytes() == b.data.tobytes()
    for name in ("start", "tokens", "parent", "digest", "cost_seconds"):
        assert getattr(one, name) == getattr(other, name)


def tensors(segment: Segment) -> list[Tensor]:
    return [tensor for layer in segment.layers for tensor in layer.tensors]


def facts(layer: Layer) -> object:
    shapes = [(tensor.dtype, tensor.data.shape) for tensor in layer.tensors]
    return layer.cls, layer.kind, shapes, json.dumps(layer.meta, sort_keys=True)


def is_refused(source: Path | BinaryIO) -> bool:
    """Return whether reading raises BadSegment, and nothing else."""
    try:
        read_segment(source, NAMESPACE)
    except BadSegment:
        return True
    return False


@contextmanager
def changed(file: BinaryIO, at: int, data: bytes) -> Iterator[None]:
    """Overwrite a part of a file for as long as the block takes."""
    old = os.pread(file.fileno(), len(data), at)
    os.pwrite(file.fileno(), data, at)
    yield
    os.pwrite(file.fileno(), old, at)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write a header that its CRC fits, as somebody who means harm would."""
    data = path.read_bytes()
    [length] = struct.unpack_from("<I", data, 8)
    header = json.loads(data[16 : 16 + length])
    value = change(header)
    text = json.dumps(header if value is None else value).encode()
    prefix = data[:8] + struct.pack("<II", len(text), crc32(text))
    path.write_bytes(prefix + text + data[16 + length :])
