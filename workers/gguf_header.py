"""What a GGUF file says of itself, read without its weights."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_MAGIC = b"GGUF"
_FORMATS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
_TEXT, _LIST = 8, 9
# A list's length, or a text's, that no file has.
_MOST_ITEMS = 1 << 24
# Source: the list of `ggml_type` in ggml.h.
FLOAT32, FLOAT16, Q4_0, Q4_1, Q8_0, BFLOAT16 = 0, 1, 2, 3, 8, 30


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The fields of a file, and of each tensor its kind and how many weights it has."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, int]]


def read_header(path: Path) -> GgufHeader:
    """Read the header of a file.

    Raises:
        ValueError: it is no GGUF file of version 2 or 3, or it is cut off.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ValueError("it is no GGUF file")
        version = _number(file, "I")
        if version not in (2, 3):
            raise ValueError(f"it is GGUF of version {version}")
        num_tensors, num_fields = _number(file, "Q"), _number(file, "Q")
        fields = {_text(file): _value(file, _number(file, "I")) for _ in range(num_fields)}
        tensors = {}
        for _ in range(num_tensors):
            name = _text(file)
            sides = [_number(file, "Q") for _ in range(_number(file, "I"))]
            tensors[name] = (_number(file, "I"), math.prod(sides))
            _number(file, "Q")  # where it begins
    return GgufHeader(fields, tensors)


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind == _LIST:
        kind, count = _number(file, "I"), _number(file, "Q")
        if count > _MOST_ITEMS:
            raise ValueError("it is damaged")
        return [_value(file, kind) for _ in range(count)]
    if kind not in _FORMATS:
        raise ValueError(f"it has a field of type {kind}")
    return _number(file, _FORMATS[kind])


def _text(file: BinaryIO) -> str:
    length = _number(file, "Q")
    if length > _MOST_ITEMS:
        raise ValueError("it is damaged")
    return _read(file, length).decode("utf-8", "replace")


def _number(file: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", _read(file, struct.calcsize(f"<{form}")))[0]


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise ValueError("it is cut off")
    return data
