"""The codec: numbers come back bit for bit, or an error says that they do not."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from workers.checkpoints.planes import (
    MAX_RATIO,
    PLANE_BYTES,
    BadFrame,
    Frame,
    compress,
    decode,
    decompress,
    encode,
)

LENGTHS = [1, 2, 3, 255, 256, 257, 65_535, 65_536, 65_791, 65_792, 131_072, 131_073, 400_000]


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def like_keys(length: int, itemsize: int, seed: int = 0) -> NDArray[Any]:
    """Return the bits of floats around zero: noise, and an exponent that is none."""
    values = np.random.default_rng(seed).normal(0, 2, length)
    if itemsize == 2:
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    return values.astype(f"<f{itemsize}").view(f"<u{itemsize}")


def decoded(frames: Sequence[Frame], like: NDArray[Any]) -> NDArray[Any]:
    out = np.full_like(like, 0x55)
    decode(frames, out)
    return out


@pytest.mark.parametrize("length", LENGTHS)
def test_noise_is_stored_in_a_form_that_is_known_beforehand(length: int) -> None:
    data = noise(length)
    frame = compress(data)
    assert frame.crc is None
    assert len(frame.data) < length + 30
    assert decompress(frame, length) == data
    assert zstandard.ZstdDecompressor().decompress(frame.data) == data


@pytest.mark.parametrize("length", LENGTHS[3:])
def test_what_repeats_is_compressed_and_has_a_crc(length: int) -> None:
    data = bytes(length)
    frame = compress(data)
    assert frame.crc is not None
    assert len(frame.data) < 100
    assert decompress(frame, length) == data


def test_noise_with_a_quiet_part_is_read_back() -> None:
    data = noise(300_000) + bytes(200_000) + noise(20_000)
    assert decompress(compress(data), len(data)) == data


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 7, 1000, 70_001, PLANE_BYTES])
def test_numbers_are_read_back_from_planes_and_unsplit(itemsize: int, length: int) -> None:
    numbers = np.frombuffer(noise(length * itemsize), f"<u{itemsize}")
    for num_planes in {1, itemsize}:
        frames = encode([numbers[: length // 3], numbers[length // 3 :]], num_planes)
        assert len(frames) == num_planes
        assert decoded(frames, numbers).tobytes() == numbers.tobytes()


def test_a_plane_holds_one_byte_of_each_number() -> None:
    numbers = np.array([0x01020304, 0xA1A2A3A4], "<u4")
    planes = [decompress(frame, 2) for frame in encode([numbers], 4)]
    assert planes == [b"\x04\xa4", b"\x03\xa3", b"\x02\xa2", b"\x01\xa1"]
    assert decompress(*encode([numbers], 1), 8) == numbers.tobytes()


@pytest.mark.parametrize(("itemsize", "ratio"), [(2, 1.45), (4, 1.18)])
def test_floats_take_less_room(itemsize: int, ratio: float) -> None:
    numbers = like_keys(PLANE_BYTES, itemsize)
    frames = encode([numbers], itemsize)
    assert numbers.nbytes / sum(len(frame.data) for frame in frames) > ratio
    assert [frame.crc is None for frame in frames] == [True] * (itemsize - 1) + [False]


def test_bfloat16_that_was_widened_takes_no_more_room() -> None:
    numbers = like_keys(PLANE_BYTES, 2)
    wide = numbers.astype("<u4") << 16
    lengths = [
        sum(len(frame.data) for frame in frames)
        for frames in (encode([numbers], 2), encode([wide], 4))
    ]
    assert lengths[1] < lengths[0] + 200


@pytest.mark.parametrize("num_bytes", [100, 131_073])
@pytest.mark.parametrize("is_noise", [True, False])
def test_a_frame_of_another_length_is_refused(num_bytes: int, is_noise: bool) -> None:
    frame = compress(noise(num_bytes) if is_noise else bytes(num_bytes))
    for wrong in (0, num_bytes - 1, num_bytes + 1, 2 * num_bytes):
        with pytest.raises(BadFrame):
            decompress(frame, wrong)


def test_a_frame_cannot_claim_more_than_its_bytes_can_hold() -> None:
    frame = compress(bytes(1000))
    with pytest.raises(BadFrame, match="cannot hold"):
        decompress(frame, len(frame.data) * MAX_RATIO + 1)


@pytest.mark.parametrize("level", [-10_000, 1, 19])
def test_a_frame_without_a_checksum_is_refused(level: int) -> None:
    data = zstandard.ZstdCompressor(level=level, write_checksum=False).compress(bytes(1000))
    with pytest.raises(BadFrame, match="checksum"):
        decompress(with_crc(data), 1000)


def test_a_frame_without_the_size_of_its_content_is_refused() -> None:
    compressor = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False)
    with pytest.raises(BadFrame):
        decompress(with_crc(compressor.compress(bytes(1000))), 1000)


def test_two_frames_are_not_one() -> None:
    frame = compress(bytes(1000))
    with pytest.raises(BadFrame):
        decompress(with_crc(bytes(frame.data) * 2), 1000)
    with pytest.raises(BadFrame):
        decompress(with_crc(bytes(frame.data) + b"\0"), 1000)


@pytest.mark.parametrize("data", [b"", b"\0", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18" + bytes(9)])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    for num_bytes in (0, 1, 5, 9):
        for frame in (Frame(data, None), with_crc(data)):
            with pytest.raises(BadFrame):
                decompress(frame, num_bytes)


@pytest.mark.parametrize("num_bytes", [60, 300])
def test_every_bit_of_a_stored_frame_is_known_or_under_the_checksum(num_bytes: int) -> None:
    frame = compress(noise(num_bytes))
    assert frame.crc is None
    for at in range(8 * len(frame.data)):
        data = bytearray(frame.data)
        data[at // 8] ^= 1 << at % 8
        with pytest.raises(BadFrame):
            decompress(Frame(bytes(data), None), num_bytes)


def test_the_headers_of_all_blocks_of_a_stored_frame_are_known() -> None:
    frame = compress(noise(300_000))
    headers = [9 + i * (131_072 + 3) + byte for i in range(3) for byte in range(3)]
    for at in (*range(9), *headers):
        for bit in range(8):
            data = bytearray(frame.data)
            data[at] ^= 1 << bit
            with pytest.raises(BadFrame, match="form"):
                decompress(Frame(bytes(data), None), 300_000)


def test_a_changed_frame_with_a_crc_that_fits_gives_the_same_or_nothing() -> None:
    content = bytes(like_keys(600, 8).view(np.uint8)[7::8])
    frame = compress(content)
    assert frame.crc is not None
    for at in range(8 * len(frame.data)):
        data = bytearray(frame.data)
        data[at // 8] ^= 1 << at % 8
        try:
            assert decompress(with_crc(bytes(data)), len(content)) == content
        except BadFrame:
            continue


def test_threads_do_not_disturb_one_another() -> None:
    arrays = [like_keys(60_000, (2, 4, 8)[i % 3], seed=i) for i in range(30)]

    def there_and_back(numbers: NDArray[Any]) -> bool:
        frames = encode([numbers], numbers.itemsize)
        return bool((decoded(frames, numbers) == numbers).all())

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(there_and_back, arrays))


def with_crc(data: bytes) -> Frame:
    return Frame(data, crc32(data))
