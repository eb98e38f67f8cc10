"""Any JSON body survives the queue; any other bytes are refused and nothing worse."""

from __future__ import annotations

import contextlib
import json
import pickle
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_service.errors import RequestError
from queue_service.payload import (
    Encoding,
    decode_call,
    decode_value,
    encode_call,
    encode_value,
    inflate,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
ANY_TEXT = st.text(st.characters())
NUMBERS = st.integers(-(2**1022), 2**1022) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXT
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=12
)
on_a_busy_machine = settings(deadline=None)
BODIES = st.dictionaries(TEXT, VALUES)


def refused_or_read(read: Callable[[bytes], object], data: bytes) -> None:
    with contextlib.suppress(RequestError):
        read(data)


@on_a_busy_machine
@given(TEXT, BODIES)
def test_a_body_is_read_back_as_it_was_written(function: str, body: dict[str, object]) -> None:
    call = decode_call(encode_call(function, body))
    assert (call.function, call.args, call.kwargs) == (function, (body,), {})


@on_a_busy_machine
@given(VALUES, st.sampled_from(Encoding))
def test_a_value_is_read_back_as_it_was_written(value: object, encoding: Encoding) -> None:
    assert decode_value(encode_value(value, encoding)) == value


@on_a_busy_machine
@given(BODIES, st.integers(2, 5))
def test_every_pickle_protocol_reads_as_pickle_reads_it(
    body: dict[str, object], protocol: int
) -> None:
    data = pickle.dumps(("f", None, (body,), body), protocol=protocol)
    call = decode_call(zlib.compress(data))
    assert (call.args, call.kwargs) == ((body,), body)


@on_a_busy_machine
@given(st.dictionaries(ANY_TEXT, ANY_TEXT))
def test_what_is_written_is_valid_utf8(body: dict[str, str]) -> None:
    call = decode_call(encode_call("f", body))
    json.dumps(call.args, ensure_ascii=False).encode()
    inflate(encode_call("f", body), 1 << 20).decode()
    json.dumps(decode_value(pickle.dumps(body)), ensure_ascii=False).encode()


@on_a_busy_machine
@given(st.binary(max_size=200))
@pytest.mark.parametrize("prefix", [b"", b"\x80\x05", b"x\x9c", b'["f",null,['])
def test_random_bytes_are_refused_and_nothing_worse(prefix: bytes, data: bytes) -> None:
    refused_or_read(decode_call, prefix + data)
    refused_or_read(decode_call, zlib.compress(prefix + data))
    refused_or_read(decode_value, prefix + data)


@on_a_busy_machine
@given(BODIES, st.data())
def test_a_damaged_payload_is_refused_and_nothing_worse(
    body: dict[str, object], data: st.DataObject
) -> None:
    for whole in (pickle.dumps(("f", None, (body,), {})), encode_call("f", body)):
        damaged = bytearray(whole)
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        refused_or_read(decode_call, bytes(damaged))
        refused_or_read(decode_call, whole[: data.draw(st.integers(0, len(whole)))])
