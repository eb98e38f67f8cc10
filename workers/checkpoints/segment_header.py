"""What the header of a segment's file says, read as if a stranger had written it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from workers.checkpoints.index import blocks_in
from workers.checkpoints.planes import MAX_PLANE_BYTES
from workers.checkpoints.records import FORMAT_VERSION, Kind, Segment, canonical_json

# MLX's names of types, and how numpy holds each.
DTYPES: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {
        name: np.dtype(numpy_name)
        for name, numpy_name in (
            ("bool", "?"),
            ("uint8", "<u1"),
            ("uint16", "<u2"),
            ("uint32", "<u4"),
            ("uint64", "<u8"),
            ("int8", "<i1"),
            ("int16", "<i2"),
            ("int32", "<i4"),
            ("int64", "<i8"),
            ("float16", "<f2"),
            ("bfloat16", "<u2"),
            ("float32", "<f4"),
            ("float64", "<f8"),
            ("complex64", "<c8"),
        )
    }
)

# Magic, length and CRC of the header.
PREFIX_BYTES: Final = 16
# The magic at the end.
SUFFIX_BYTES: Final = 8
MAX_TOKENS: Final = 1 << 22
_MAX_TENSORS = 1 << 16
_MAX_DIMENSIONS = 16
_MAX_INTEGER = 1 << 53
_MAX_U32 = (1 << 32) - 1
_HEX_DIGEST = re.compile("[0-9a-f]{32}")
_FIELDS = frozenset(
    [
        "version",
        "namespace",
        "start",
        "n",
        "parent",
        "digest",
        "blocks",
        "layers",
        "tokens",
        "groups",
        "payload",
        "cost_seconds",
        "origin",
        "created",
    ]
)
_LAYER_FIELDS = frozenset({"repeat", "cls", "kind", "tensors", "meta"})
_GROUP_FIELDS = frozenset({"tensors", "piece", "planes", "frames"})


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The type and the shape of an array.

    Attributes:
        dtype: a name of DTYPES.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """A layer without its numbers."""

    cls: str
    kind: Kind
    tensors: tuple[TensorLayout, ...]
    meta: Any


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """Where the payload continues: the length of a frame, and its CRC unless all is stored."""

    num_bytes: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class Group:
    """Arrays of one type that are encoded as one row of numbers, in pieces.

    Attributes:
        num_tensors: how many, in the order of ``tensor_order``.
        piece: numbers in each piece but the last, which has the rest.
        num_planes: frames of each piece.
        frames: the planes of the first piece, of the second, ...
    """

    num_tensors: int
    piece: int
    num_planes: int
    frames: tuple[StoredFrame, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """All that a segment's file says of it without its payload.

    Attributes:
        blocks: the digests up to each multiple of ``BLOCK_TOKENS`` inside the segment.
        origin: who wrote it, for a person.
        created: when, in seconds since 1970.
        payload_start: where the payload begins in the file; 0 while there is none.
    """

    namespace: str
    start: int
    num_tokens: int
    parent: bytes
    digest: bytes
    blocks: tuple[bytes, ...]
    layers: tuple[LayerLayout, ...]
    tokens_frame: StoredFrame
    groups: tuple[Group, ...]
    cost_seconds: float
    origin: Mapping[str, Any]
    created: float
    payload_start: int = 0

    @property
    def end(self) -> int:
        """How many tokens a prompt has up to the segment's end."""
        return self.start + self.num_tokens

    @property
    def is_sliceable(self) -> bool:
        """Whether a part of the segment, from its first token on, can be used."""
        return all(layer.kind is Kind.DELTA for layer in self.layers)

    @property
    def payload_bytes(self) -> int:
        """The length of all frames."""
        frames = (frame.num_bytes for group in self.groups for frame in group.frames)
        return self.tokens_frame.num_bytes + sum(frames)

    @property
    def num_bytes(self) -> int:
        """The length of the file."""
        return self.payload_start + self.payload_bytes + SUFFIX_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the segment's arrays."""
        return sum(
            tensor.size * DTYPES[tensor.dtype].itemsize
            for layer in self.layers
            for tensor in layer.tensors
        )

    def to_json(self) -> bytes:
        """Return what ``parse_header`` reads."""
        fields = {
            "version": FORMAT_VERSION,
            "namespace": self.namespace,
            "start": self.start,
            "n": self.num_tokens,
            "parent": self.parent.hex(),
            "digest": self.digest.hex(),
            "blocks": [digest.hex() for digest in self.blocks],
            "layers": [
                {"repeat": len(list(run)), **json.loads(layer)}
                for layer, run in groupby(map(_layer_json, self.layers))
            ],
            "tokens": [self.tokens_frame.num_bytes, self.tokens_frame.crc],
            "groups": [
                {
                    "tensors": group.num_tensors,
                    "piece": group.piece,
                    "planes": group.num_planes,
                    "frames": [[frame.num_bytes, frame.crc] for frame in group.frames],
                }
                for group in self.groups
            ],
            "payload": self.payload_bytes,
            "cost_seconds": self.cost_seconds,
            "origin": dict(self.origin),
            "created": self.created,
        }
        return canonical_json(fields).encode()


def parse_header(text: bytes) -> Header:
    """Return what a header says.

    Raises:
        ValueError: it is none, or of another version, or does not fit together; says how.
    """
    try:
        value = json.loads(text)
    except RecursionError as exc:
        raise ValueError("the header is nested too deeply") from exc
    if type(value) is dict and value.get("version") != FORMAT_VERSION:
        raise ValueError(f"it is not of version {FORMAT_VERSION}")
    fields = _object(value, _FIELDS)
    num_tokens = _integer(fields["n"], "n", 1, MAX_TOKENS)
    header = Header(
        namespace=_digest(fields["namespace"]).hex(),
        start=_integer(fields["start"], "start"),
        num_tokens=num_tokens,
        parent=_digest(fields["parent"]),
        digest=_digest(fields["digest"]),
        blocks=tuple(_digest(block) for block in _array(fields["blocks"], "blocks")),
        layers=_layers(fields["layers"], num_tokens),
        tokens_frame=_frame(fields["tokens"]),
        groups=tuple(_group(group) for group in _array(fields["groups"], "groups")),
        cost_seconds=_seconds(fields["cost_seconds"], "cost_seconds"),
        origin=fields["origin"],
        created=_seconds(fields["created"], "created"),
        payload_start=PREFIX_BYTES + len(text),
    )
    if type(header.origin) is not dict:
        raise ValueError("the origin is no object")
    if len(header.blocks) != len(blocks_in(header.start, header.end)):
        raise ValueError("there are digests of other blocks than those inside the segment")
    if fields["payload"] != header.payload_bytes:
        raise ValueError("the payload is not as long as its frames")
    return header


def layers_of(segment: Segment) -> tuple[LayerLayout, ...]:
    """Return the layers of a segment without their numbers.

    Raises:
        ValueError: an array is not of the type that it is said to be.
    """
    for tensor in (tensor for layer in segment.layers for tensor in layer.tensors):
        if DTYPES.get(tensor.dtype) != tensor.data.dtype:
            raise ValueError(f"numbers of type {tensor.dtype} cannot be {tensor.data.dtype}")
    return tuple(
        LayerLayout(
            layer.cls,
            Kind(layer.kind),
            tuple(TensorLayout(tensor.dtype, tensor.data.shape) for tensor in layer.tensors),
            layer.meta,
        )
        for layer in segment.layers
    )


def tensor_order(layers: Sequence[LayerLayout]) -> list[tuple[int, int]]:
    """Return (tensor, layer) as the file has them: the first ones of all layers, the second ..."""
    return sorted((i, at) for at, layer in enumerate(layers) for i in range(len(layer.tensors)))


def _layer_json(layer: LayerLayout) -> str:
    """Return a layer as text: to Python, 1 and True are the same, and 1.0."""
    fields = {
        "cls": layer.cls,
        "kind": layer.kind,
        "tensors": [[tensor.dtype, tensor.shape] for tensor in layer.tensors],
        "meta": layer.meta,
    }
    return canonical_json(fields)


def _layers(value: Any, num_tokens: int) -> tuple[LayerLayout, ...]:
    layers: list[LayerLayout] = []
    num_tensors = 0
    for item in _array(value, "layers"):
        fields = _object(item, _LAYER_FIELDS)
        if type(fields["cls"]) is not str:
            raise ValueError("the class of a layer is no text")
        kind = Kind(fields["kind"])
        tensors = tuple(_tensor(tensor) for tensor in _array(fields["tensors"], "tensors"))
        if kind is Kind.DELTA and any(t.shape[-2:-1] != (num_tokens,) for t in tensors):
            raise ValueError("an array of a layer of deltas does not have the segment's tokens")
        repeat = _integer(fields["repeat"], "repeat", 1)
        num_tensors += repeat * max(1, len(tensors))
        if num_tensors > _MAX_TENSORS:
            raise ValueError(f"there are more than {_MAX_TENSORS} arrays")
        layers += [LayerLayout(fields["cls"], kind, tensors, fields["meta"])] * repeat
    return tuple(layers)


def _tensor(value: Any) -> TensorLayout:
    dtype, shape = _pair(value, "an array")
    if type(dtype) is not str or dtype not in DTYPES:
        raise ValueError(f"numbers of an unknown type: {dtype!r}")
    dimensions = _array(shape, "a shape")
    if len(dimensions) > _MAX_DIMENSIONS:
        raise ValueError("an array has too many dimensions")
    layout = TensorLayout(dtype, tuple(_integer(size, "a dimension") for size in dimensions))
    _integer(layout.size, "the size of an array")
    return layout


def _group(value: Any) -> Group:
    fields = _object(value, _GROUP_FIELDS)
    return Group(
        _integer(fields["tensors"], "tensors of a group", 1, _MAX_TENSORS),
        _integer(fields["piece"], "numbers of a piece", 1, MAX_PLANE_BYTES),
        _integer(fields["planes"], "planes", 1, 8),
        tuple(_frame(frame) for frame in _array(fields["frames"], "frames")),
    )


def _frame(value: Any) -> StoredFrame:
    num_bytes, crc = _pair(value, "a frame")
    if crc is not None:
        _integer(crc, "a CRC", 0, _MAX_U32)
    return StoredFrame(_integer(num_bytes, "the length of a frame", 1), crc)


def _object(value: Any, names: frozenset[str]) -> dict[str, Any]:
    if type(value) is not dict or value.keys() != names:
        raise ValueError(f"an object has other fields than {', '.join(sorted(names))}")
    return value


def _array(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{what}: no array in the header")
    return value


def _pair(value: Any, what: str) -> tuple[Any, Any]:
    if type(value) is not list or len(value) != 2:
        raise ValueError(f"{what}: not two values in the header")
    return value[0], value[1]


def _integer(value: Any, what: str, least: int = 0, most: int = _MAX_INTEGER) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what}: not a whole number from {least} to {most}")
    return value


def _seconds(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MAX_INTEGER:
        raise ValueError(f"{what}: no number of seconds")
    return float(value)


def _digest(value: Any) -> bytes:
    if type(value) is not str or not _HEX_DIGEST.fullmatch(value):
        raise ValueError("a digest is not 32 hex digits")
    return bytes.fromhex(value)
