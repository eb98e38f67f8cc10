"""The codec: numbers as planes of bytes, each a zstd frame that proves what it holds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

import numpy as np
import zstandard
from numpy.typing import NDArray

# Longer planes fall out of the cache of a core, shorter ones cost a call each.
PLANE_BYTES: Final = 1 << 19
# What a reader accepts.
MAX_PLANE_BYTES: Final = 1 << 20

_SAMPLE_RUNS, _SAMPLE_RUN_BYTES = 16, 1024
# Of eight bits a byte. A plane that is closer to noise is not worth the time.
_WORTHWHILE_ENTROPY = 7.5
# A block of up to 128 KiB takes four bytes at least.
MAX_RATIO: Final = 1 << 15
_BLOCK_BYTES = 1 << 17
_RAW_BLOCK_HEADER_BYTES = 3
_CHECKSUM_BYTES = 4
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

# Matches within keys and values are accidents, and cost more than the Huffman code of what they
# replace: a hash that finds hardly any is the fastest and the smallest.
_TUNED = zstandard.ZstdCompressionParameters.from_level(
    1, window_log=17, hash_log=6, min_match=7, write_checksum=True, write_content_size=True
)
# Raw blocks and a checksum. With a window as wide as the plane the frame has one form only.
_STORED = zstandard.ZstdCompressionParameters.from_level(
    -10000, window_log=27, write_checksum=True, write_content_size=True
)


class BadFrame(ValueError):
    """A frame does not hold what it should; the message says in what way."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A zstd frame with its content's size and checksum.

    Attributes:
        data: the frame.
        crc: CRC-32 of ``data``; None when all is stored as it is, in raw blocks. Of such a frame
            each bit is known or under the checksum. Others have bits that decide nothing.
    """

    data: bytes | memoryview
    crc: int | None


def compress(data: bytes | NDArray[np.uint8]) -> Frame:
    """Return bytes as a frame: compressed where a sample says that it is worth the time."""
    plane = np.frombuffer(data, np.uint8)
    if _entropy(_sample(plane)) < _WORTHWHILE_ENTROPY:
        frame = _tools.tuned.compress(plane.data)
        if len(frame) < _stored_length(len(plane)):
            return Frame(frame, crc32(frame))
    frame = _tools.stored.compress(plane.data)
    return Frame(frame, None if _is_stored(frame, len(plane)) else crc32(frame))


def decompress(frame: Frame, num_bytes: int) -> bytes:
    """Return the content of a frame.

    Raises:
        BadFrame: it is damaged, or holds another number of bytes.
    """
    data = frame.data
    if num_bytes > len(data) * MAX_RATIO:
        raise BadFrame(f"a frame of {len(data)} bytes cannot hold {num_bytes}")
    if frame.crc is None:
        if not _is_stored(data, num_bytes):
            raise BadFrame("a frame of stored bytes does not have their form")
    elif crc32(data) != frame.crc:
        raise BadFrame("the CRC of a frame is wrong")
    try:
        facts = zstandard.get_frame_parameters(data)
        if facts.content_size != num_bytes or not facts.has_checksum:
            raise BadFrame(f"a frame does not say that it holds {num_bytes} bytes, with a checksum")
        content = _tools.decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise BadFrame(str(exc)) from exc
    if len(content) != num_bytes:
        raise BadFrame(f"a frame holds {len(content)} bytes instead of {num_bytes}")
    return content


def encode(parts: Sequence[NDArray[Any]], num_planes: int) -> list[Frame]:
    """Return the numbers of some arrays, one after the other, as planes; the lowest byte first.

    Args:
        parts: unsigned integers of one size, in one dimension each.
        num_planes: their size, or 1 for all bytes in their order.
    """
    if num_planes == 1:
        parts = [part.view(np.uint8) for part in parts]
    length = sum(map(len, parts))
    planes = [_tools.scratch(f"plane{i}", length, np.uint8) for i in range(num_planes)]
    done = 0
    for part in parts:
        _split(part, [plane[done : done + len(part)] for plane in planes])
        done += len(part)
    return [compress(plane) for plane in planes]


def decode(frames: Sequence[Frame], out: NDArray[Any]) -> None:
    """Fill ``out`` with the numbers whose planes the frames are.

    Args:
        frames: as many as a number has bytes, or one.
        out: unsigned integers in one dimension, contiguous.

    Raises:
        BadFrame: a frame is damaged or of another length; ``out`` holds anything then.
    """
    if len(frames) == 1:
        out = out.view(np.uint8)
    _merge([np.frombuffer(decompress(frame, len(out)), np.uint8) for frame in frames], out)


def scratch(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory that holds anything, and is the calling thread's until its next call."""
    return _tools.scratch("bytes", num_bytes, np.uint8)


def _split(numbers: NDArray[Any], planes: Sequence[NDArray[np.uint8]]) -> None:
    """Split by halves: shifts run several times faster than copies of every n-th byte."""
    if len(planes) == 1:
        np.copyto(planes[0], numbers)
        return
    middle = len(planes) // 2
    half = np.dtype(f"u{middle}")
    for shift, part in ((0, planes[:middle]), (8 * middle, planes[middle:])):
        into = part[0] if middle == 1 else _tools.scratch(f"half{middle}", len(numbers), half)
        np.right_shift(numbers, shift, out=into, casting="unsafe")
        if middle > 1:
            _split(into, part)


def _merge(planes: Sequence[NDArray[np.uint8]], out: NDArray[Any]) -> None:
    if len(planes) == 1:
        np.copyto(out, planes[0])
        return
    middle = len(planes) // 2
    halves: Sequence[NDArray[Any]] = planes
    if middle > 1:
        half = np.dtype(f"u{middle}")
        halves = [_tools.scratch(f"{name}{middle}", len(out), half) for name in ("low", "high")]
        _merge(planes[:middle], halves[0])
        _merge(planes[middle:], halves[1])
    np.left_shift(halves[1], 8 * middle, out=out, dtype=out.dtype)
    np.bitwise_or(out, halves[0], out=out)


def _sample(plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return 16 KiB of a plane in runs from all over it, or all of a short one."""
    if len(plane) <= _SAMPLE_RUNS * _SAMPLE_RUN_BYTES:
        return plane
    run = len(plane) // _SAMPLE_RUNS
    runs = plane[: run * _SAMPLE_RUNS].reshape(_SAMPLE_RUNS, run)
    return np.ascontiguousarray(runs[:, :_SAMPLE_RUN_BYTES]).reshape(-1)


def _entropy(sample: NDArray[np.uint8]) -> float:
    """Return the bits that a byte takes when its neighbours are not known."""
    counts = np.bincount(sample)
    shares = counts[counts > 0] / max(1, len(sample))
    return float(-(shares * np.log2(shares)).sum())


def _is_stored(frame: bytes | memoryview, num_bytes: int) -> bool:
    """Return whether a frame is raw blocks between the one header and a checksum."""
    if len(frame) != _stored_length(num_bytes):
        return False
    header = _stored_header(num_bytes)
    at = len(header)
    if frame[:at] != header:
        return False
    for start in range(0, num_bytes, _BLOCK_BYTES):
        size = min(_BLOCK_BYTES, num_bytes - start)
        block_header = size << 3 | (start + size == num_bytes)
        if frame[at : at + _RAW_BLOCK_HEADER_BYTES] != block_header.to_bytes(3, "little"):
            return False
        at += _RAW_BLOCK_HEADER_BYTES + size
    return True


def _stored_length(num_bytes: int) -> int:
    num_blocks = -(-num_bytes // _BLOCK_BYTES)
    overhead = len(_stored_header(num_bytes)) + _RAW_BLOCK_HEADER_BYTES * num_blocks
    return num_bytes + overhead + _CHECKSUM_BYTES


def _stored_header(num_bytes: int) -> bytes:
    """Return magic, descriptor (a single segment, with checksum) and content size: RFC 8878."""
    if num_bytes < 1 << 8:
        return _ZSTD_MAGIC + b"\x24" + num_bytes.to_bytes(1, "little")
    if num_bytes < (1 << 16) + (1 << 8):
        return _ZSTD_MAGIC + b"\x64" + (num_bytes - (1 << 8)).to_bytes(2, "little")
    return _ZSTD_MAGIC + b"\xa4" + num_bytes.to_bytes(4, "little")


class _Tools(threading.local):
    """What a thread keeps: fresh memory for every plane would cost as much as the work on it."""

    def __init__(self) -> None:
        self.tuned = zstandard.ZstdCompressor(compression_params=_TUNED)
        self.stored = zstandard.ZstdCompressor(compression_params=_STORED)
        self.decompressor = zstandard.ZstdDecompressor()
        self._scratch: dict[str, NDArray[Any]] = {}

    def scratch(self, name: str, length: int, dtype: Any) -> NDArray[Any]:
        """Return an array that holds anything, the same memory for the same name."""
        kept = self._scratch.get(name)
        if kept is None or len(kept) < length:
            kept = self._scratch[name] = np.empty(max(length, PLANE_BYTES), dtype)
        return kept[:length]


_tools: Final = _Tools()
