"""Files of segments: what was written is read back, and anything else is refused."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import zstandard

from tests.segments import (
    NAMESPACE,
    OTHER_NAMESPACE,
    assert_same,
    changed,
    is_refused,
    kv_layers,
    make_segment,
    numbers,
    rewrite_header,
    tensors,
    write,
)
from workers.checkpoints.records import BLOCK_TOKENS, Kind, Layer, Segment, Tensor
from workers.checkpoints.segment_file import (
    TEMPORARY_FOLDER,
    BadSegment,
    read_header,
    read_segment,
    read_tokens,
    segment_path,
    write_segment,
)
from workers.checkpoints.segment_header import DTYPES


@pytest.fixture(scope="module")
def small() -> Segment:
    """A segment with stored and with compressed frames, and both kinds of layers."""
    state = Tensor("float32", np.zeros((2, 40), "<f4"))
    return make_segment(
        [*kv_layers(1, 8), Layer("ArraysCache", Kind.STATE, (state,), {"offset": 8})],
        tokens=[7] * 8,
    )


@pytest.fixture(scope="module")
def large() -> Segment:
    return make_segment(kv_layers(4, 300, heads=2, width=64), tokens=range(300))


def test_a_segment_is_read_back_as_it_was_written(tmp_path: Path, small: Segment) -> None:
    path = write(tmp_path, small)
    assert path == segment_path(tmp_path, small.digest)
    assert_same(read_segment(path, NAMESPACE), small)
    assert list((tmp_path / TEMPORARY_FOLDER).iterdir()) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_is_read_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    shapes = [(), (0,), (3, 0, 2), (1,), (2, 3, 5), (70_001,)]
    arrays = tuple(numbers(dtype, shape, seed) for seed, shape in enumerate(shapes))
    segment = make_segment([Layer("ArraysCache", Kind.STATE, arrays)])
    assert_same(read_segment(write(tmp_path, segment), NAMESPACE), segment)


def test_numbers_that_are_none_keep_their_bits(tmp_path: Path) -> None:
    bits = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 1], "<u4")
    segment = make_segment([Layer("A", Kind.STATE, (Tensor("float32", bits.view("<f4")),))])
    [array] = tensors(read_segment(write(tmp_path, segment), NAMESPACE))
    assert array.data.view("<u4").tolist() == bits.tolist()


def test_layers_that_python_finds_equal_are_told_apart(tmp_path: Path) -> None:
    layers = [Layer("A", Kind.STATE, (), {"value": value}) for value in (1, True, 1.0, None, 1)]
    segment = make_segment(layers)
    assert_same(read_segment(write(tmp_path, segment), NAMESPACE), segment)


def test_a_segment_may_have_no_layers(tmp_path: Path) -> None:
    segment = make_segment([])
    assert_same(read_segment(write(tmp_path, segment), NAMESPACE), segment)


def test_threads_write_and_read_the_same(tmp_path: Path, large: Segment) -> None:
    alone = write(tmp_path / "a", large)
    with ThreadPoolExecutor(3) as executor:
        together = write(tmp_path / "b", large, executor=executor)
        assert alone.read_bytes() == together.read_bytes()
        assert_same(read_segment(together, NAMESPACE, executor=executor), large)


def test_many_pieces_are_put_together(tmp_path: Path) -> None:
    layers = kv_layers(3, 700, dtype="float32", heads=4, width=256)
    segment = make_segment(layers, tokens=range(700))
    path = write(tmp_path, segment)
    assert [len(group.frames) for group in read_header(path).groups] == [20, 20]
    assert_same(read_segment(path, NAMESPACE), segment)


def test_the_header_says_what_the_segment_is(tmp_path: Path) -> None:
    before = list(range(200))
    segment = make_segment(kv_layers(2, 600), range(600), before, cost_seconds=1.5)
    path = write(tmp_path, segment, before, created=5.0, origin={"host": "a"})
    header = read_header(path)
    assert (header.namespace, header.start, header.end) == (NAMESPACE, 200, 800)
    assert (header.parent, header.digest) == (segment.parent, segment.digest)
    assert (header.nbytes, header.num_bytes) == (segment.nbytes, path.stat().st_size)
    assert header.is_sliceable
    assert len(header.blocks) == 3  # 256, 512, 768
    assert header.blocks[0] == make_segment([], range(56), before).digest
    assert (header.cost_seconds, header.created, header.origin) == (1.5, 5.0, {"host": "a"})
    assert read_tokens(path, header) == np.arange(600, dtype="<u4").tobytes()


def test_an_open_file_can_be_read_after_it_was_deleted(tmp_path: Path, small: Segment) -> None:
    path = write(tmp_path, small)
    with path.open("rb") as file:
        path.unlink()
        assert_same(read_segment(file, NAMESPACE), small)


def test_a_missing_file_is_no_bad_segment(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "gone.qkv")


# What is not written


def test_a_segment_that_is_there_is_left_alone(tmp_path: Path, small: Segment) -> None:
    path = write(tmp_path, small)
    path.write_bytes(b"theirs")
    assert write_segment(tmp_path, small, NAMESPACE, blocks=[], created=1.0) == (path, 0)
    assert path.read_bytes() == b"theirs"


def test_a_failed_write_leaves_nothing(
    tmp_path: Path, small: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path, small)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(
            [Layer("A", Kind.STATE, (Tensor("bfloat16", np.zeros(3, "<f4")),))], id="type"
        ),
        pytest.param([Layer("A", Kind.STATE, (Tensor("float8", np.zeros(3, "<u1")),))], id="name"),
        pytest.param([Layer("A", Kind.DELTA, (numbers("uint8", (1, 1, 4, 2)),))], id="tokens"),
        pytest.param([Layer("A", Kind.DELTA, (numbers("uint8", (3,)),))], id="axes"),
    ],
)
def test_arrays_that_are_not_what_they_should_be_are_not_written(
    tmp_path: Path, layers: list[Layer]
) -> None:
    with pytest.raises(ValueError, match=r"type|tokens"):
        write(tmp_path, make_segment(layers))
    assert list(tmp_path.iterdir()) == []


def test_a_segment_without_tokens_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n: not a whole number"):
        write(tmp_path, make_segment([], []))


def test_digests_that_are_not_the_tokens_are_not_written(tmp_path: Path, small: Segment) -> None:
    with pytest.raises(ValueError, match="digests"):
        write_segment(tmp_path, small, OTHER_NAMESPACE, blocks=[], created=1.0)
    with pytest.raises(ValueError, match="digests"):
        write_segment(tmp_path, small, NAMESPACE, blocks=[small.digest], created=1.0)


# What is not read


def test_every_flipped_bit_of_a_small_file_is_found(tmp_path: Path, small: Segment) -> None:
    path = write(tmp_path, small)
    crcs = [frame.crc for group in read_header(path).groups for frame in group.frames]
    assert None in crcs
    assert set(crcs) != {None}
    data = path.read_bytes()
    with path.open("rb+", buffering=0) as file:
        for at, byte in enumerate(data):
            for bit in range(8):
                with changed(file, at, bytes([byte ^ 1 << bit])):
                    assert is_refused(file), (at, bit)
        assert not is_refused(file)


def test_flipped_bits_of_a_large_file_are_found(tmp_path: Path, large: Segment) -> None:
    path = write(tmp_path, large)
    data = path.read_bytes()
    chance = random.Random(1)
    with path.open("rb+", buffering=0) as file:
        for _ in range(300):
            at, bit = chance.randrange(len(data)), chance.randrange(8)
            with changed(file, at, bytes([data[at] ^ 1 << bit])):
                assert is_refused(file), (at, bit)


def test_every_truncation_is_found(tmp_path: Path, small: Segment) -> None:
    path = write(tmp_path, small)
    with path.open("rb+", buffering=0) as file:
        for length in reversed(range(path.stat().st_size)):
            file.truncate(length)
            assert is_refused(file), length
            with pytest.raises(BadSegment):
                read_header(file)


def test_damage_is_found_by_threads_too(tmp_path: Path, large: Segment) -> None:
    path = write(tmp_path, large)
    with ThreadPoolExecutor(3) as executor, path.open("rb+", buffering=0) as file:
        for at in range(2000, path.stat().st_size - 8, 20_000):
            with changed(file, at, b"damage"), pytest.raises(BadSegment):
                read_segment(file, NAMESPACE, executor=executor)
        assert_same(read_segment(file, NAMESPACE, executor=executor), large)


def test_zeros_instead_of_a_part_are_found(tmp_path: Path, large: Segment) -> None:
    path = write(tmp_path, large)
    size = path.stat().st_size
    with path.open("rb+", buffering=0) as file:
        for at in range(0, size, 4096):
            with changed(file, at, bytes(min(4096, size - at))):
                assert is_refused(file), at
        with changed(file, 0, bytes(size)):
            assert is_refused(file)


@pytest.mark.parametrize("more", [b"\0", b"QKVEND1\n", bytes(5000)])
def test_appended_bytes_are_found(tmp_path: Path, small: Segment, more: bytes) -> None:
    path = write(tmp_path, small)
    path.write_bytes(path.read_bytes() + more)
    assert is_refused(path)


def test_a_bad_file_is_named_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "x.qkv"
    path.write_bytes(b"not one of ours, but long enough to be")
    with pytest.raises(BadSegment, match=r"x\.qkv.*does not begin") as caught:
        read_header(path)
    assert caught.value.path == path


def test_a_segment_of_another_namespace_is_refused(tmp_path: Path, small: Segment) -> None:
    path = write(tmp_path, small)
    with pytest.raises(BadSegment, match="belongs to"):
        read_segment(path, OTHER_NAMESPACE)


def test_tokens_that_are_not_those_of_the_digest_are_refused(
    tmp_path: Path, small: Segment
) -> None:
    def say_otherwise(header: dict[str, Any]) -> None:
        header["digest"] = "0" * 32

    path = write(tmp_path, small)
    rewrite_header(path, say_otherwise)
    with pytest.raises(BadSegment, match="digests"):
        read_segment(path, NAMESPACE)


def test_a_segment_that_follows_other_tokens_is_refused(tmp_path: Path) -> None:
    before = list(range(BLOCK_TOKENS))
    path = write(tmp_path, make_segment([], (1, 2), before), before)
    data = np.array(before, "<u4").tobytes()
    assert read_segment(path, NAMESPACE).start == BLOCK_TOKENS
    assert read_segment(path, NAMESPACE, before=data).start == BLOCK_TOKENS
    for other in (b"", data[4:], data[4:] + data[:4]):
        with pytest.raises(BadSegment, match=r"follows|digests"):
            read_segment(path, NAMESPACE, before=other)


def test_a_file_that_would_take_more_memory_than_allowed_is_refused(
    tmp_path: Path, small: Segment
) -> None:
    path = write(tmp_path, small)
    assert_same(read_segment(path, NAMESPACE, max_nbytes=small.nbytes), small)
    with pytest.raises(BadSegment, match="would take"):
        read_segment(path, NAMESPACE, max_nbytes=small.nbytes - 1)


def set_in(*at: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        place: Any = header
        for key in at[:-1]:
            place = place[key]
        place[at[-1]] = value

    return change


TENSOR = ("layers", 0, "tensors", 0)


@pytest.mark.parametrize(
    "change",
    [
        set_in("version", value=2),
        set_in("version", value="1"),
        set_in("more", value=1),
        set_in("start", value=-1),
        set_in("start", value=True),
        set_in("n", value=0),
        set_in("n", value=9),
        set_in("n", value=1 << 40),
        set_in("namespace", value="0" * 31 + "G"),
        set_in("parent", value="0" * 32),
        set_in("digest", value="é" * 32),
        set_in("blocks", value=["0" * 32]),
        set_in("layers", 0, "kind", value="other"),
        set_in("layers", 0, "kind", value=[]),
        set_in("layers", 0, "cls", value=None),
        set_in("layers", 0, "repeat", value=2),
        set_in("layers", 0, "repeat", value=1 << 50),
        set_in(*TENSOR, 0, value="float8"),
        set_in(*TENSOR, 0, value="float32"),
        set_in(*TENSOR, 0, value=["bfloat16"]),
        set_in(*TENSOR, 1, value=[1, 1 << 52, 8, 1 << 52]),
        set_in(*TENSOR, 1, value=[1, 1 << 30, 8, 8]),
        set_in(*TENSOR, 1, value=[1, 2, 8, 8]),
        set_in(*TENSOR, 1, value=[1] * 100),
        set_in(*TENSOR, 1, value=[1, -1, 8, -8]),
        set_in("groups", value=[]),
        set_in("groups", 0, "tensors", value=3),
        set_in("groups", 0, "planes", value=1),
        set_in("groups", 0, "planes", value=4),
        set_in("groups", 0, "piece", value=0),
        set_in("groups", 0, "piece", value=1),
        set_in("groups", 0, "piece", value=1 << 30),
        set_in("groups", 0, "frames", 0, value=[1, None]),
        set_in("groups", 0, "frames", value=[]),
        set_in("groups", 0, "frames", 0, 1, value=1 << 40),
        set_in("tokens", 0, value=1 << 40),
        set_in("tokens", 1, value=None),
        set_in("payload", value=0),
        set_in("cost_seconds", value=float("nan")),
        set_in("cost_seconds", value=10**400),
        set_in("created", value="now"),
        set_in("origin", value=[]),
        lambda header: [header],
        lambda _: 1,
        lambda header: json.loads("[" * 500 + "]" * 500),
    ],
)
def test_a_header_that_means_harm_is_refused_and_takes_no_memory(
    tmp_path: Path, small: Segment, change: Callable[[dict[str, Any]], Any]
) -> None:
    path = write(tmp_path, small)
    rewrite_header(path, change)
    tracemalloc.start()
    try:
        assert is_refused(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":1' + b"0" * 9999])
def test_a_header_that_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.qkv"
    prefix = b"QKVSEG1\n" + struct.pack("<II", len(text), crc32(text))
    path.write_bytes(prefix + text + b"QKVEND1\n")
    with pytest.raises(BadSegment):
        read_header(path)


# The document


def read_by_the_document(data: bytes, before: bytes = b"") -> tuple[dict[str, Any], bytes, list]:
    """Read a file as docs/checkpoint-format.md says, with nothing of ours."""
    assert (data[:8], data[-8:]) == (b"QKVSEG1\n", b"QKVEND1\n")
    length, crc = struct.unpack_from("<II", data, 8)
    text = data[16 : 16 + length]
    assert crc32(text) == crc
    header = json.loads(text)
    assert header["version"] == 1
    assert len(data) == 16 + length + header["payload"] + 8
    at = 16 + length

    def content(frame: list[int]) -> bytes:
        nonlocal at
        part = data[at : at + frame[0]]
        at += frame[0]
        assert frame[1] in (None, crc32(part))
        return zstandard.ZstdDecompressor().decompress(part, allow_extra_data=False)

    tokens = content(header["tokens"])
    namespace = bytes.fromhex(header["namespace"])
    for known, name in ((before, "parent"), (before + tokens, "digest")):
        digest = blake2b(b"qkv1" + namespace + known, digest_size=16)
        assert digest.hexdigest() == header[name]
    layers = [layer for layer in header["layers"] for _ in range(layer["repeat"])]
    order = sorted((i, at) for at, layer in enumerate(layers) for i in range(len(layer["tensors"])))
    arrays: list[list[Any]] = [[] for _ in layers]
    sizes = {"bfloat16": 2, "float32": 4, "uint32": 4, "uint8": 1}
    for group in header["groups"]:
        members, order = order[: group["tensors"]], order[group["tensors"] :]
        planes, row = group["planes"], b""
        for first in range(0, len(group["frames"]), planes):
            frames = [content(frame) for frame in group["frames"][first : first + planes]]
            row += np.stack([np.frombuffer(f, np.uint8) for f in frames], axis=-1).tobytes()
        for i, layer in members:
            dtype, shape = layers[layer]["tensors"][i]
            num_bytes = sizes[dtype] * int(np.prod(shape, dtype=int))
            arrays[layer].append((dtype, shape, row[:num_bytes]))
            row = row[num_bytes:]
        assert row == b""
    assert order == []
    assert at == len(data) - 8
    return header, tokens, arrays


def test_a_reader_written_from_the_document_reads_our_files(tmp_path: Path) -> None:
    before = list(range(100))
    quantised = (numbers("uint32", (1, 2, 700, 16)), numbers("bfloat16", (1, 2, 700, 4)))
    layers = [
        *kv_layers(2, 700, dtype="float32", heads=3, width=64),
        *kv_layers(1, 700),
        Layer("QuantizedKVCache", Kind.DELTA, quantised, {"bits": 4}),
        Layer("ArraysCache", Kind.STATE, (numbers("uint8", (3, 3)), numbers("float32", ()))),
    ]
    segment = make_segment(layers, range(5, 705), before)
    data = write(tmp_path, segment, before).read_bytes()
    header, tokens, arrays = read_by_the_document(data, np.array(before, "<u4").tobytes())
    assert np.frombuffer(tokens, "<u4").tolist() == list(segment.tokens)
    assert len(header["blocks"]) == 3
    assert arrays == [
        [(t.dtype, list(t.data.shape), t.data.tobytes()) for t in layer.tensors] for layer in layers
    ]


def test_the_document_has_every_field_and_type() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoint-format.md").read_text()
    words = set(re.findall(r"`(\w+)`", text))
    fields = (
        "version namespace start n parent digest blocks layers tokens groups payload "
        "cost_seconds origin created repeat cls kind tensors meta piece planes frames"
    )
    assert words >= {*fields.split(), *DTYPES, *Kind}
