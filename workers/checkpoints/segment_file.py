"""A segment as one file that is written once and trusted only where every bit is proved."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from queue_service.errors import QsvcError
from workers.checkpoints.index import blocks_in
from workers.checkpoints.planes import (
    MAX_PLANE_BYTES,
    MAX_RATIO,
    PLANE_BYTES,
    Frame,
    compress,
    decode,
    decompress,
    encode,
    scratch,
)
from workers.checkpoints.records import Layer, Segment, Tensor, prefix_digests
from workers.checkpoints.segment_header import (
    DTYPES,
    PREFIX_BYTES,
    SUFFIX_BYTES,
    Group,
    Header,
    StoredFrame,
    TensorLayout,
    layers_of,
    parse_header,
    tensor_order,
)

SUFFIX: Final = ".qkv"
TEMPORARY_FOLDER: Final = "tmp"

_MAGIC = b"QKVSEG1\n"
_END = b"QKVEND1\n"
_MAX_HEADER_BYTES = 1 << 22
# Of most files, this is the header and the tokens.
_FIRST_READ_BYTES = 1 << 14
_MAX_NBYTES = 1 << 33
_TOKEN_BYTES = 4
# Of rows in memory; at least as wide as a number.
_ALIGNMENT = 64
_U32_PAIR = struct.Struct("<II")

_NO_ORIGIN: Mapping[str, Any] = MappingProxyType({})

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class BadSegment(QsvcError):
    """A file is no segment, or damaged, or of another namespace: it is of no use to anybody.

    Args:
        path: the file.
        reason: what is wrong, for a person.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is not used, and can be deleted: {reason}")
        self.path = path
        self.reason = reason


def segment_path(folder: Path, digest: bytes) -> Path:
    """Return where the segment that ends at a digest is kept in its namespace's folder."""
    return folder / f"{digest.hex()}{SUFFIX}"


def write_segment(
    folder: Path,
    segment: Segment,
    namespace: str,
    *,
    blocks: Sequence[bytes],
    created: float,
    origin: Mapping[str, Any] = _NO_ORIGIN,
    executor: Executor | None = None,
) -> tuple[Path, int]:
    """Write a segment, unless it is there: beside it first, so that nobody sees a part of it.

    Args:
        folder: the namespace's; it is made where it is missing.
        blocks: the digests up to each multiple of ``BLOCK_TOKENS`` inside the segment.
        created: now, in seconds since 1970.
        origin: who writes it, as JSON, for a person.
        executor: compresses on its threads; never the one that this call runs on.

    Returns:
        the file, and its length; 0 where it was there.

    Raises:
        OSError: it cannot be written; nothing is left of it.
        ValueError: the segment is none: its arrays or digests contradict what it says.
    """
    path = segment_path(folder, segment.digest)
    if path.exists():
        return path, 0
    chunks = _encode_segment(segment, namespace, blocks, created, origin, executor)
    temporary_folder = folder / TEMPORARY_FOLDER
    temporary_folder.mkdir(parents=True, exist_ok=True)
    prefix = f"{segment.digest.hex()}.{socket.gethostname()}.{os.getpid()}."
    descriptor, temporary = tempfile.mkstemp(prefix=prefix, dir=temporary_folder)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(chunks)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return path, sum(map(len, chunks))


def read_header(source: Path | BinaryIO) -> Header:
    """Return the header of a file that has the length and the end it should have.

    Args:
        source: a path, or a file that is open: it may be deleted meanwhile.

    Raises:
        BadSegment: it does not, or its header is damaged or of another version.
        OSError: it cannot be read, or is gone.
    """
    with _opened(source) as file:
        return _read_header(file)


def read_tokens(source: Path | BinaryIO, header: Header) -> bytes:
    """Return a segment's tokens, four bytes each.

    Raises:
        BadSegment: they are damaged, or begin a prompt and have another digest.
        OSError: they cannot be read.
    """
    with _opened(source) as file:
        return _read_tokens(file, header)


def read_segment(
    source: Path | BinaryIO,
    namespace: str,
    *,
    before: bytes | None = None,
    max_nbytes: int = _MAX_NBYTES,
    executor: Executor | None = None,
) -> Segment:
    """Return the segment in a file, all of it verified.

    Args:
        source: a path, or a file that is open: it may be deleted meanwhile.
        namespace: of which it must be.
        before: the tokens before it, four bytes each, where they are known: the segment must
            follow them. Without them its digests are compared only where it begins a prompt.
        max_nbytes: what its arrays may take.
        executor: decodes on its threads; never the one that this call runs on.

    Raises:
        BadSegment: anything is wrong with it.
        OSError: it cannot be read, or is gone.
    """
    with _opened(source) as file:
        header = _read_header(file)
        if header.namespace != namespace:
            raise BadSegment(file.path, f"it belongs to {header.namespace}, not to {namespace}")
        if header.nbytes > min(max_nbytes, header.payload_bytes * MAX_RATIO):
            raise BadSegment(file.path, f"its arrays would take {header.nbytes:,} bytes")
        tokens = _read_tokens(file, header)
        with _bad_if_invalid(file.path):
            if before is not None:
                check_chain(header, before, tokens)
            tensors = _read_tensors(file, header, executor)
        return Segment(
            start=header.start,
            tokens=tuple(np.frombuffer(tokens, "<u4").tolist()),
            parent=header.parent,
            digest=header.digest,
            layers=tuple(
                Layer(layer.cls, layer.kind, arrays, layer.meta)
                for layer, arrays in zip(header.layers, tensors, strict=True)
            ),
            cost_seconds=header.cost_seconds,
        )


def check_chain(header: Header, before: bytes, tokens: bytes) -> None:
    """Compare all of a header's digests with the tokens that they are of.

    Args:
        before: the tokens before the segment, four bytes each.
        tokens: those of the segment.

    Raises:
        ValueError: one differs: the tokens are others than those of the arrays.
    """
    if len(before) != header.start * _TOKEN_BYTES:
        raise ValueError(f"it follows {header.start} tokens, not {len(before) // _TOKEN_BYTES}")
    ends = (header.start, *blocks_in(header.start, header.end), header.end)
    digests = prefix_digests(header.namespace, array("I", before + tokens), ends)
    if digests != [header.parent, *header.blocks, header.digest]:
        raise ValueError("its digests are not those of its tokens")


def _encode_segment(
    segment: Segment,
    namespace: str,
    blocks: Sequence[bytes],
    created: float,
    origin: Mapping[str, Any],
    executor: Executor | None,
) -> list[bytes | memoryview]:
    """Return what a segment's file consists of, in its order."""
    tokens = array("I", segment.tokens).tobytes()
    tokens_frame = compress(tokens)
    layers = layers_of(segment)
    rows = [
        _Row.of([segment.layers[at].tensors[i] for i, at in run])
        for _, run in groupby(
            tensor_order(layers), key=lambda key: (key[0], layers[key[1]].tensors[key[0]].dtype)
        )
    ]
    pieces = [(row, start) for row in rows for start in row.starts()]
    encoded = iter(_run(lambda job: job[0].encode(job[1]), pieces, executor))
    frames = [[frame for _ in row.starts() for frame in next(encoded)] for row in rows]
    header = Header(
        namespace=namespace,
        start=segment.start,
        num_tokens=len(segment.tokens),
        parent=segment.parent,
        digest=segment.digest,
        blocks=tuple(blocks),
        layers=layers,
        tokens_frame=_stored(tokens_frame),
        groups=tuple(row.group(map(_stored, own)) for row, own in zip(rows, frames, strict=True)),
        cost_seconds=segment.cost_seconds,
        origin=origin,
        created=created,
    )
    text = header.to_json()
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text):,} bytes is too long")
    header = parse_header(text)
    if not header.start:
        check_chain(header, b"", tokens)
    payload = [tokens_frame.data, *(frame.data for own in frames for frame in own)]
    prefix = _MAGIC + _U32_PAIR.pack(len(text), crc32(text))
    return [prefix, text, *payload, _END]


@dataclass(frozen=True, slots=True)
class _Row:
    """Arrays of one type that are encoded as one row of numbers.

    Attributes:
        arrays: unsigned integers in one dimension.
        piece: numbers in each piece but the last.
    """

    arrays: Sequence[NDArray[Any]]
    piece: int
    num_planes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Row:
        """Return some arrays as a row that is cut into pieces of about the same length."""
        itemsize = tensors[0].data.itemsize
        # Packed weights of less than a byte: their bytes are all alike.
        num_planes = 1 if tensors[0].dtype == "uint32" else itemsize
        arrays = [np.ascontiguousarray(t.data).reshape(-1).view(f"u{itemsize}") for t in tensors]
        length = sum(map(len, arrays))
        most = PLANE_BYTES * num_planes // itemsize
        num_pieces = max(1, -(-length // most))
        return cls(arrays, max(1, -(-length // num_pieces)), num_planes)

    def starts(self) -> range:
        """Return where its pieces begin."""
        return range(0, sum(map(len, self.arrays)), self.piece)

    def encode(self, start: int) -> list[Frame]:
        """Return the frames of the piece that begins at a number."""
        parts = []
        for array_ in self.arrays:
            part = array_[max(0, start) : max(0, start + self.piece)]
            if len(part):
                parts.append(part)
            start -= len(array_)
        return encode(parts, self.num_planes)

    def group(self, frames: Iterable[StoredFrame]) -> Group:
        """Return what the header says of it."""
        return Group(len(self.arrays), self.piece, self.num_planes, tuple(frames))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Frames that lie one after the other, and where their numbers belong."""

    offset: int
    frames: Sequence[StoredFrame]
    out: NDArray[Any]


@dataclass(frozen=True, slots=True)
class _File:
    descriptor: int
    path: Path
    num_bytes: int

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes from anywhere; safe between threads."""
        data = os.pread(self.descriptor, length, offset)
        if len(data) != length:
            raise BadSegment(self.path, "it ends too early")
        return data

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with bytes from anywhere; safe between threads."""
        if os.preadv(self.descriptor, [buffer], offset) != len(buffer):
            raise BadSegment(self.path, "it ends too early")


@contextmanager
def _opened(source: Path | BinaryIO) -> Iterator[_File]:
    if isinstance(source, Path):
        with source.open("rb", buffering=0) as file, _opened(file) as opened:
            yield opened
    else:
        descriptor = source.fileno()
        yield _File(descriptor, Path(str(source.name)), os.fstat(descriptor).st_size)


@contextmanager
def _bad_if_invalid(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as exc:
        raise BadSegment(path, str(exc)) from exc


def _read_header(file: _File) -> Header:
    first = file.read(0, min(file.num_bytes, _FIRST_READ_BYTES))
    if len(first) < PREFIX_BYTES or not first.startswith(_MAGIC):
        raise BadSegment(file.path, "it does not begin as a segment does")
    length, crc = _U32_PAIR.unpack_from(first, len(_MAGIC))
    if length > min(_MAX_HEADER_BYTES, file.num_bytes - PREFIX_BYTES - SUFFIX_BYTES):
        raise BadSegment(file.path, f"its header cannot have {length:,} bytes")
    text = first[PREFIX_BYTES : PREFIX_BYTES + length]
    text += file.read(PREFIX_BYTES + len(text), length - len(text))
    if crc32(text) != crc:
        raise BadSegment(file.path, "the CRC of its header is wrong")
    with _bad_if_invalid(file.path):
        header = parse_header(text)
    if header.num_bytes != file.num_bytes:
        raise BadSegment(file.path, f"it has {file.num_bytes:,} bytes, not {header.num_bytes:,}")
    if file.read(file.num_bytes - SUFFIX_BYTES, SUFFIX_BYTES) != _END:
        raise BadSegment(file.path, "it does not end as a segment does")
    return header


def _read_tokens(file: _File, header: Header) -> bytes:
    stored = header.tokens_frame
    frame = Frame(file.read(header.payload_start, stored.num_bytes), stored.crc)
    with _bad_if_invalid(file.path):
        tokens = decompress(frame, header.num_tokens * _TOKEN_BYTES)
        if not header.start:
            check_chain(header, b"", tokens)
    return tokens


def _read_tensors(
    file: _File, header: Header, executor: Executor | None
) -> list[tuple[Tensor, ...]]:
    """Return the arrays of each layer; ValueError where the payload is not theirs."""
    tensors: list[list[Tensor]] = [[] for _ in header.layers]
    order = iter(tensor_order(header.layers))
    rows = [(group, list(islice(order, group.num_tensors))) for group in header.groups]
    if next(order, None) is not None:
        raise ValueError("some of its arrays are in no group")
    # One allocation: the system gives large ones in large pages.
    memory = np.empty(header.nbytes + _ALIGNMENT * len(rows), np.uint8)
    pieces: list[_Piece] = []
    offset = header.payload_start + header.tokens_frame.num_bytes
    for group, members in rows:
        layouts = [header.layers[at].tensors[i] for i, at in members]
        dtype = _check_group(group, layouts)
        num_bytes = dtype.itemsize * sum(layout.size for layout in layouts)
        row = memory[:num_bytes].view(dtype)
        memory = memory[num_bytes + -num_bytes % _ALIGNMENT :]
        numbers = row.view(f"u{row.itemsize}")
        for start in range(0, len(row), group.piece):
            at = start // group.piece * group.num_planes
            frames = group.frames[at : at + group.num_planes]
            pieces.append(_Piece(offset, frames, numbers[start : start + group.piece]))
            offset += sum(frame.num_bytes for frame in frames)
        for (_, at), layout in zip(members, layouts, strict=True):
            tensors[at].append(Tensor(layout.dtype, row[: layout.size].reshape(layout.shape)))
            row = row[layout.size :]
    _run(lambda piece: _decode_piece(file, piece), pieces, executor)
    return [tuple(arrays) for arrays in tensors]


def _check_group(group: Group, layouts: Sequence[TensorLayout]) -> np.dtype[Any]:
    """Return the type of a group's numbers; ValueError where its frames cannot hold them."""
    dtypes = {layout.dtype for layout in layouts}
    if len(layouts) != group.num_tensors or len(dtypes) != 1:
        raise ValueError("a group has too few arrays, or of several types")
    dtype = DTYPES[dtypes.pop()]
    if group.num_planes not in (1, dtype.itemsize):
        raise ValueError(f"numbers of {dtype.itemsize} bytes are not in {group.num_planes} planes")
    if group.piece * dtype.itemsize // group.num_planes > MAX_PLANE_BYTES:
        raise ValueError("a plane is too long")
    length = sum(layout.size for layout in layouts)
    if len(group.frames) != -(-length // group.piece) * group.num_planes:
        raise ValueError("a group has too few frames, or too many")
    return dtype


def _decode_piece(file: _File, piece: _Piece) -> None:
    data = scratch(sum(frame.num_bytes for frame in piece.frames)).data
    file.read_into(data, piece.offset)
    frames = []
    for frame in piece.frames:
        frames.append(Frame(data[: frame.num_bytes], frame.crc))
        data = data[frame.num_bytes :]
    decode(frames, piece.out)


def _stored(frame: Frame) -> StoredFrame:
    return StoredFrame(len(frame.data), frame.crc)


def _run(
    function: Callable[[_Job], _Result], jobs: Sequence[_Job], executor: Executor | None
) -> list[_Result]:
    """Return the result of each job; if one raises, only after the last one has ended."""
    if executor is None:
        return [function(job) for job in jobs]
    futures = [executor.submit(function, job) for job in jobs]
    wait(futures)
    return [future.result() for future in futures]
