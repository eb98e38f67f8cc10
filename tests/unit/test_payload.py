"""What a payload may hold, and how everything else is refused."""

from __future__ import annotations

import copyreg
import json
import os
import pickle
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq.job import Job

from queue_service import tasks
from queue_service.errors import ConfigurationError, RequestError
from queue_service.payload import (
    Call,
    Encoding,
    Limits,
    PlainPickleSerializer,
    PlainSerializer,
    decode_call,
    decode_value,
    encode_call,
    encode_value,
    inflate_text,
)

BODY = {
    "messages": [{"role": "user", "content": "Grüße 🙂"}],
    "max_tokens": 3,
    "temperature": 0.5,
    "seed": 2**63,
    "stop": None,
    "logprobs": False,
}


def pickled(*arguments: Any, protocol: int = pickle.HIGHEST_PROTOCOL, **named: Any) -> bytes:
    return zlib.compress(pickle.dumps((tasks.CHAT, None, arguments, named), protocol=protocol))


def refusal(data: bytes, limits: Limits | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        decode_call(data, limits or Limits())
    assert caught.value.code == "invalid_payload"
    return caught.value.message


def test_an_encoded_call_is_read_back() -> None:
    assert decode_call(encode_call(tasks.CHAT, BODY)) == Call(
        tasks.CHAT, (BODY,), {}, Encoding.JSON
    )


@pytest.mark.parametrize("body", [BODY, {"prompt": "a long prompt " * 100}])
def test_rq_reads_an_encoded_call(body: dict[str, Any]) -> None:
    job = Job("x", connection=Redis())
    job.restore({b"data": encode_call(tasks.CHAT, body)})
    assert json.loads(job.data) == [tasks.CHAT, None, [body], {}]


def test_only_a_long_call_is_compressed() -> None:
    long = encode_call(tasks.CHAT, {"prompt": "a long prompt " * 100})
    assert zlib.decompress(long).startswith(b"[")
    assert encode_call(tasks.CHAT, {"prompt": "short"}).startswith(b"[")


def test_a_long_body_is_read_back_too() -> None:
    body = {"prompt": "a long prompt " * 10_000}
    data = encode_call(tasks.COMPLETION, body)
    assert len(data) < 10_000
    assert decode_call(data).args == (body,)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_of_plain_data_is_read(protocol: int) -> None:
    call = decode_call(pickled(BODY, protocol=protocol, extra=[1, -1, 1.5, 70_000, 2**80, True]))
    assert call == Call(
        tasks.CHAT, (BODY,), {"extra": [1, -1, 1.5, 70_000, 2**80, True]}, Encoding.PICKLE
    )


def test_uncompressed_data_is_read_as_rq_reads_it() -> None:
    assert decode_call(json.dumps([tasks.CHAT, None, [1], {}]).encode()).args == (1,)
    assert decode_call(zlib.decompress(pickled(1))).args == (1,)


def test_tuples_become_lists_and_shared_values_become_copies() -> None:
    shared = [1]
    (read,) = decode_call(
        pickled({"a": shared, "b": shared, "c": ("x", ("y",), (1, 2, 3, 4))})
    ).args
    assert read == {"a": [1], "b": [1], "c": ["x", ["y"], [1, 2, 3, 4]]}
    assert read["a"] is not read["b"]


def test_long_containers_of_a_pickle_are_read_whole() -> None:
    numbers = list(range(2_500))
    named: dict[str, list[int]] = {str(number): [] for number in numbers}
    assert decode_call(pickled(numbers, named)).args == (numbers, named)


def test_lone_surrogates_are_replaced_and_pairs_are_joined() -> None:
    body = {"prompt": "a\ud800b\udc00é", "\udfff": 1}
    expected = {"prompt": "a\ufffdb\ufffdé", "\ufffd": 1}
    assert decode_call(encode_call(tasks.CHAT, body)).args == (expected,)
    assert decode_call(pickled(body)).args == (expected,)
    escaped = rb'["f", null, ["\ud83d\ude42 \ud83d"], {}]'
    assert decode_call(escaped).args == ("🙂 \ufffd",)
    assert encode_value("\ud800é", Encoding.JSON).decode() == '"\ufffdé"'


class Attack:
    """Runs ``call`` when it is unpickled by pickle."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call = call
        self.arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_would_run_a_command_is_refused(protocol: int, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    data = pickled(Attack(os.system, f"touch {trace}"), protocol=protocol)
    message = refusal(data)
    assert "Python object" in message
    assert "serializer='json'" in message
    with pytest.raises(RequestError):
        decode_value(zlib.decompress(data))
    assert not trace.exists()
    pickle.loads(zlib.decompress(data))  # the attack is real
    assert trace.exists()


@pytest.mark.parametrize(
    "value",
    [
        Path,
        print,
        datetime(2026, 1, 1, tzinfo=UTC),
        {1, 2},
        frozenset({1}),
        1j,
        RequestError("x"),
        b"bytes",
        bytearray(b"bytes"),
        {"deep": [("inside", Path("x"))]},
        {1: "integer key"},
        {None: "no key"},
        {("a",): "tuple key"},
        float("inf"),
        float("nan"),
        2**1023,
    ],
    ids=repr,
)
def test_a_pickle_of_anything_else_is_refused(value: object) -> None:
    assert "not plain data" in refusal(pickled(value))
    assert "not plain data" in refusal(pickled(named=value))


def test_a_persistent_id_and_an_extension_code_are_refused() -> None:
    assert "PERSID" in refusal(b"\x80\x02X\x01\x00\x00\x00aQ.")
    code = 0x7FFF_FFF0
    copyreg.add_extension("json", "dumps", code)
    try:
        extension = pickle.dumps(json.dumps, protocol=2)
        pickle.loads(extension)  # fills the cache that lets pickle skip find_class
        assert "EXT4" in refusal(extension)
    finally:
        copyreg.remove_extension("json", "dumps", code)
        copyreg.clear_extension_cache()


def test_a_cycle_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "too deeply" in refusal(pickled(loop))
    ring: dict[str, Any] = {}
    ring["self"] = {"again": ring}
    assert "too deeply" in refusal(pickled(ring))


def test_a_small_pickle_that_unfolds_into_a_huge_value_is_refused() -> None:
    value: list[Any] = ["x"]
    for _ in range(40):
        value = [value, value]
    assert len(pickled(value)) < 1_000
    assert "too large" in refusal(pickled(value))


def test_one_long_string_repeated_is_counted_each_time() -> None:
    text = "x" * 100_000
    assert "too large" in refusal(pickled([text] * 1_000))
    assert "too large" in refusal(pickled([{text: 1}] * 1_000))


def test_a_pickle_that_names_a_high_memo_slot_costs_nothing() -> None:
    assert decode_value(b"\x80\x02Nr\xff\xff\xff\xff.") is None


def test_a_pickle_of_too_many_operations_is_refused() -> None:
    assert "operations" in refusal(b"\x80\x02" + b"]" * 5_000, Limits(num_nodes=1_000))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x05",
        b"\x80\x05.",
        b"\x80\x05K",
        b"\x80\x05h\x07.",
        b"\x80\x05\x94.",
        b"\x80\x05\x85.",
        b"\x80\x05Na.",
        b"\x80\x05NNa.",
        b"\x80\x05t.",
        b"\x80\x05](u.",
        b"\x80\x05}(\x8c\x01au.",
        b"\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x80\x05\xff",
    ],
)
def test_a_broken_pickle_is_refused(data: bytes) -> None:
    assert "broken pickle" in refusal(data)


def test_a_decompression_bomb_is_refused() -> None:
    bomb = zlib.compress(b" " * (50 * 2**20), 9)
    assert len(bomb) < 60_000
    assert "more than 8388608 bytes" in refusal(bomb)
    assert "more than 100 bytes" in refusal(bomb, Limits(num_bytes=100))


def test_uncompressed_data_has_the_same_limit() -> None:
    assert "too large" in refusal(b'["' + b"x" * 101, Limits(num_bytes=100))
    with pytest.raises(RequestError, match="too large"):
        decode_value(b'"' + b"x" * 101, Limits(num_bytes=100))


def test_a_limit_is_reached_exactly() -> None:
    data = encode_call("f", {})
    num_bytes = len(data)
    assert decode_call(data, Limits(num_bytes=num_bytes, depth=3, num_nodes=6)).function == "f"
    refusal(data, Limits(num_bytes=num_bytes - 1))
    refusal(data, Limits(depth=1))
    refusal(data, Limits(num_nodes=5))


def test_cut_off_compressed_data_is_refused() -> None:
    assert "cut off" in refusal(zlib.compress(encode_call("f", BODY))[:-5])


@pytest.mark.parametrize("depth", [65, 2_000, 200_000])
@pytest.mark.parametrize("bracket", ['["f", null, [%s1%s], {}]', "%s%s"])
def test_deeply_nested_json_is_refused(depth: int, bracket: str) -> None:
    assert "too deeply" in refusal((bracket % ("[" * depth, "]" * depth)).encode())


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_json_numbers_that_are_not_finite_are_refused(constant: str) -> None:
    assert "the number" in refusal(f'["f", null, [{{"a": {constant}}}], {{}}]'.encode())


@pytest.mark.parametrize("digits", [400, 5_000])
def test_a_huge_json_integer_is_refused(digits: int) -> None:
    refusal(f'["f", null, [{"9" * digits}], {{}}]'.encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"{", b"\xff\xfe", b'"text"', zlib.compress(b""), b"(lp0\n.", b"cos\nsystem\n."],
)
def test_data_that_is_no_call_is_refused(data: bytes) -> None:
    refusal(data)


@pytest.mark.parametrize(
    "call",
    [
        [],
        {},
        ["f", None, []],
        ["f", None, [], {}, 1],
        ["f", {"an": "instance"}, [], {}],
        [None, None, [], {}],
        ["f", None, {}, {}],
        ["f", None, [], []],
    ],
)
def test_a_call_of_another_shape_is_refused(call: object) -> None:
    assert "function name" in refusal(json.dumps(call).encode())


def test_a_refusal_does_not_repeat_the_prompt() -> None:
    assert "secret" not in refusal(b'["f", null, [{"prompt": "secret", "a": NaN}], {}]')
    assert "secret" not in refusal(b'["f", null, [{"prompt": "secret"')


@pytest.mark.parametrize("encoding", list(Encoding))
def test_a_value_is_read_back_in_either_encoding(encoding: Encoding) -> None:
    data = encode_value(BODY, encoding)
    assert decode_value(data) == BODY
    assert data.startswith(b"\x80") == (encoding is Encoding.PICKLE)


def test_a_sender_that_pickles_reads_our_pickles() -> None:
    assert pickle.loads(encode_value(BODY, Encoding.PICKLE)) == BODY
    assert pickle.loads(PlainPickleSerializer.dumps(BODY)) == BODY
    assert PlainPickleSerializer.loads(PlainSerializer.dumps(BODY)) == BODY


def test_a_value_may_be_larger_than_a_call() -> None:
    value = [0.25] * 300_000
    assert decode_value(encode_value(value, Encoding.JSON)) == value
    with pytest.raises(RequestError, match="too large"):
        PlainSerializer.loads(encode_value(value, Encoding.JSON))


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("value", [{1, 2}, b"bytes", float("nan"), object(), {("a",): 1}])
def test_only_plain_data_is_written(value: object, encoding: Encoding) -> None:
    with pytest.raises(RequestError, match="not plain data"):
        encode_value(value, encoding)


def test_a_cycle_is_not_written() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for encoding in Encoding:
        with pytest.raises(RequestError):
            encode_value(loop, encoding)


def test_a_body_nested_too_deeply_is_not_written() -> None:
    body: dict[str, Any] = {}
    for _ in range(100_000):
        body = {"a": body}
    with pytest.raises(RequestError, match="too deeply"):
        encode_call("f", body)


def test_a_stored_text_is_cut_at_the_limit() -> None:
    assert inflate_text(zlib.compress("é".encode() * 10**7), 5) == "éé\ufffd"
    with pytest.raises(RequestError):
        inflate_text(b"nothing", 5)


@pytest.mark.parametrize("function", [tasks.chat, tasks.completion])
def test_a_stock_worker_is_told_to_step_aside(function: Callable[..., object]) -> None:
    with pytest.raises(ConfigurationError, match="qsvc worker"):
        function({})


def test_the_names_are_those_of_the_functions() -> None:
    named = {f"{task.__module__}.{task.__qualname__}" for task in (tasks.chat, tasks.completion)}
    assert named == {tasks.CHAT, tasks.COMPLETION}
