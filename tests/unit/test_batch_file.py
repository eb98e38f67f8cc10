"""Batch files: what a line may look like, how a bad one is reported, where a file comes from."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from queue_service import batch_file
from queue_service.batch_file import (
    BatchLine,
    digest_file,
    open_batch,
    read_batch,
    read_lines,
)
from queue_service.errors import BatchFileError, LineError
from queue_service.requests import Endpoint

CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION_BODY: dict[str, Any] = {"prompt": "hi"}
EXAMPLES = Path(__file__).parents[2] / "examples" / "jobs.jsonl"


def line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    """A good chat line with some of its fields changed; None takes a field out."""
    fields = {
        "custom_id": custom_id,
        "method": "POST",
        "url": Endpoint.CHAT.value,
        "body": CHAT_BODY,
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


def read(content: bytes, **limits: Any) -> list[BatchLine | LineError]:
    return list(read_lines(io.BytesIO(content), **limits))


def error_of(*lines: Any) -> LineError:
    """Return the error of the last line; the lines before it are good."""
    *good, last = read(jsonl(*lines))
    assert all(isinstance(item, BatchLine) for item in good)
    assert isinstance(last, LineError)
    return last


def codes(items: list[BatchLine | LineError]) -> list[str | None]:
    return [item.code if isinstance(item, LineError) else None for item in items]


# Good lines


def test_a_line_is_read_as_it_stands() -> None:
    body = {**CHAT_BODY, "max_tokens": 5, "user": "u1", "n": 1}
    assert read(jsonl(line("a", body=body), line("b"))) == [
        BatchLine(1, "a", Endpoint.CHAT, body),
        BatchLine(2, "b", Endpoint.CHAT, CHAT_BODY),
    ]


def test_a_bare_body_gets_its_id_from_its_line_and_its_url_from_its_fields() -> None:
    assert read(b"\n" + jsonl(CHAT_BODY)) == [BatchLine(2, "line-2", Endpoint.CHAT, CHAT_BODY)]
    assert read(jsonl(COMPLETION_BODY)) == [
        BatchLine(1, "line-1", Endpoint.COMPLETIONS, COMPLETION_BODY)
    ]


def test_an_integer_id_is_read_as_a_string() -> None:
    (item,) = read(jsonl(line(17)))
    assert isinstance(item, BatchLine)
    assert item.custom_id == "17"


@pytest.mark.parametrize("custom_id", ["x", "ä" * 512])
def test_an_id_has_up_to_512_characters(custom_id: str) -> None:
    assert codes(read(jsonl(line(custom_id)))) == [None]


def test_harmless_fields_beside_the_body_are_accepted() -> None:
    assert codes(read(jsonl(line(metadata={"label": 3})))) == [None]


def test_blank_lines_are_skipped_but_counted() -> None:
    content = b"\n  \r\n" + jsonl(line("a")) + b"\n\t\n" + jsonl(line("b"))
    assert [item.line for item in read(content)] == [3, 6]


@pytest.mark.parametrize(
    "content",
    [
        jsonl(line("a"), line("b")).replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + jsonl(line("a"), line("b")),
        jsonl(line("a"), line("b")).removesuffix(b"\n"),
    ],
    ids=["crlf", "byte order mark", "no last newline"],
)
def test_line_ends_and_a_byte_order_mark_make_no_difference(content: bytes) -> None:
    assert read(content) == read(jsonl(line("a"), line("b")))


def test_an_unusual_separator_inside_a_string_is_no_line_break() -> None:
    body = {"prompt": "one\u2028two\u2029three\x85four"}
    text = json.dumps(body, ensure_ascii=False)
    assert read(text.encode()) == [BatchLine(1, "line-1", Endpoint.COMPLETIONS, body)]


def test_a_lone_surrogate_is_replaced_in_the_id_and_the_body() -> None:
    (item,) = read(jsonl(line("a\ud800", body={**CHAT_BODY, "user": "\udc00"})))
    assert isinstance(item, BatchLine)
    assert item.custom_id == "a\ufffd"
    assert item.body["user"] == "\ufffd"


def test_the_example_file_is_good() -> None:
    with open_batch(EXAMPLES) as file:
        items = list(read_batch(file))
    assert codes(items) == [None] * 24
    assert len({item.custom_id for item in items}) == 24


# Bad lines


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"prompt": "hi"', "not valid JSON"),
        (b'{"prompt": "hi"} {"prompt": "hi"}', "not valid JSON: Extra data at character 18"),
        (b"[1, 2]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"prompt": "hi", "temperature": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "hi", "temperature": -Infinity}', "-Infinity is no JSON number"),
        (b'{"prompt": "hi", "temperature": 1e999}', "out of range"),
        (b'{"prompt": "\xff"}', "not valid UTF-8 at byte 13"),
        (b'{"prompt": "\xed\xa0\x80"}', "not valid UTF-8"),
        (b"\xff\xfe{\x00}\x00", "not valid UTF-8 at byte 1"),
        (b'{"prompt": "hi", "metadata": ' + b"[" * 64 + b"]" * 64 + b"}", "deeper than 64"),
        (b'{"prompt": ' + b"[" * 100_000, "deeper than 64"),
        (b'{"prompt": "a\x0bb"}', "not valid JSON"),
        (b"\x0c", "not valid JSON"),
    ],
)
def test_a_torn_line_is_an_error(raw: bytes, words: str) -> None:
    (item,) = read(raw + b"\n")
    assert isinstance(item, LineError)
    assert (item.code, item.line, item.custom_id, item.param) == (
        "invalid_json_line",
        1,
        None,
        None,
    )
    assert words in item.message


def test_a_line_that_is_too_long_is_refused_and_the_next_one_is_read() -> None:
    long = {**COMPLETION_BODY, "user": "x" * 2_000_000}
    items = read(jsonl(COMPLETION_BODY, long, COMPLETION_BODY), max_line_bytes=100)
    assert codes(items) == [None, "invalid_json_line", None]
    assert [item.line for item in items] == [1, 2, 3]
    assert "too long" in str(items[1])


def test_the_longest_line_may_be_the_last_one() -> None:
    raw = jsonl(COMPLETION_BODY)
    assert codes(read(raw, max_line_bytes=len(raw))) == [None]
    assert codes(read(raw, max_line_bytes=len(raw) - 1)) == ["invalid_json_line"]
    assert codes(read(raw[:-1], max_line_bytes=len(raw) - 2)) == ["invalid_json_line"]


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_a_missing_field_is_named(name: str) -> None:
    error = error_of(line(**{name: None}))
    assert (error.code, error.param) == ("missing_field", name)
    assert error.message == f"'{name}' is missing"
    assert error.custom_id == (None if name == "custom_id" else "a")


def test_an_object_without_any_of_our_fields_has_no_id() -> None:
    assert error_of({"text": "hi"}).code == "missing_field"


@pytest.mark.parametrize("custom_id", ["", "x" * 513, True, 1.5, ["a"], 10**600])
def test_a_bad_id_is_refused(custom_id: Any) -> None:
    error = error_of(line(custom_id))
    assert (error.code, error.param, error.custom_id) == ("invalid_request", "custom_id", None)


def test_a_repeated_id_names_both_lines() -> None:
    error = error_of(line("a"), line("b"), line("a"))
    assert (error.code, error.line, error.param) == ("duplicate_custom_id", 3, "custom_id")
    assert "line 3" in error.message
    assert "line 1" in error.message
    assert error.custom_id == "a"


def test_the_id_of_a_refused_line_is_used_up() -> None:
    items = read(jsonl(line("a", method="GET"), line("a"), line("a")))
    assert codes(items) == ["invalid_request", "duplicate_custom_id", "duplicate_custom_id"]
    assert "line 1" in str(items[2])


def test_an_integer_id_and_the_same_string_are_one_id() -> None:
    assert error_of(line(7), line("7")).code == "duplicate_custom_id"


def test_an_id_may_equal_no_bare_line_before_it() -> None:
    assert error_of(CHAT_BODY, line("line-1")).code == "duplicate_custom_id"


def test_two_files_may_use_the_same_ids() -> None:
    content = jsonl(line("a"))
    assert codes(read(content)) == codes(read(content)) == [None]


def test_the_first_good_line_decides_the_url() -> None:
    items = read(
        jsonl(
            line("a", body={}),
            line("b", url=Endpoint.COMPLETIONS, body=COMPLETION_BODY),
            line("c"),
            COMPLETION_BODY,
            CHAT_BODY,
        )
    )
    assert codes(items) == ["invalid_request", None, "url_mismatch", None, "url_mismatch"]
    error = items[2]
    assert isinstance(error, LineError)
    assert error.param == "url"
    assert Endpoint.CHAT in error.message
    assert Endpoint.COMPLETIONS in error.message


def test_an_unknown_url_is_refused_with_the_known_ones() -> None:
    error = error_of(line(url="/v1/embeddings"))
    assert (error.code, error.param) == ("invalid_request", "url")
    assert error.message == "'url' must be '/v1/chat/completions' or '/v1/completions'"


@pytest.mark.parametrize("url", [7, ["/v1/completions"], {}])
def test_a_url_of_another_type_is_refused(url: Any) -> None:
    assert error_of(line(url=url)).param == "url"


@pytest.mark.parametrize("method", ["GET", "post", 1])
def test_only_post_is_a_method(method: Any) -> None:
    error = error_of(line(method=method))
    assert (error.code, error.param) == ("invalid_request", "method")


@pytest.mark.parametrize("body", [[], "x", 7, False])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    error = error_of(line(body=body))
    assert (error.code, error.param) == ("invalid_request", "body")


def test_a_field_beside_the_body_is_refused_by_name() -> None:
    error = error_of(line(temperature=0))
    assert (error.message, error.param) == (
        "unknown field 'temperature' beside 'body'",
        "temperature",
    )


def test_a_bad_request_keeps_its_reason_and_its_path() -> None:
    error = error_of(line("b", body={**CHAT_BODY, "max_tokens": "10"}))
    assert (error.code, error.param) == ("invalid_request", "max_tokens")
    assert error.message == "'max_tokens' must be an integer"
    assert (error.line, error.custom_id, error.status_code) == (1, "b", 400)


@pytest.mark.parametrize(
    "item", [line(body={**CHAT_BODY, "stream": True}), {**CHAT_BODY, "stream": True}]
)
def test_streaming_is_refused_in_a_file(item: dict[str, Any]) -> None:
    error = error_of(item)
    assert (error.code, error.param) == ("invalid_request", "stream")


def test_a_stream_field_that_is_off_is_accepted() -> None:
    assert codes(read(jsonl({**CHAT_BODY, "stream": False}))) == [None]


def test_lines_beyond_the_limit_are_refused_and_keep_their_ids() -> None:
    content = jsonl(line("a"), line("b", method="GET")) + b"\n" + jsonl(line("c"), line("d"))
    items = read(content, max_lines=2)
    assert codes(items) == [None, "invalid_request", "too_many_tasks", "too_many_tasks"]
    error = items[2]
    assert isinstance(error, LineError)
    assert (error.line, error.custom_id) == (4, "c")
    assert "more than 2 requests" in error.message


@pytest.mark.parametrize("room_chars", [0, 300, 2**22])
def test_an_id_used_twice_is_found_wherever_the_ids_are_kept(
    monkeypatch: pytest.MonkeyPatch, room_chars: int
) -> None:
    monkeypatch.setattr(batch_file, "_FIRST_IDS_CHARS", room_chars)
    items = read(jsonl(*(line(name) for name in "abcdeaebf")))
    errors = {item.line: item.message for item in items if isinstance(item, LineError)}
    assert sorted(errors) == [6, 7, 8]
    for number, first in ((6, 1), (7, 5), (8, 2)):
        assert errors[number].endswith(f"was used on line {first}")


# Memory


def test_memory_does_not_grow_with_the_file() -> None:
    def lines() -> Iterator[bytes]:
        for i in range(5_000):
            yield b'{"custom_id": "%08d", "user": "%s"}\n' % (i, b"x" * 500)

    class Endless(io.RawIOBase):
        def __init__(self) -> None:
            self._lines = lines()

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any, /) -> int:
            data = next(self._lines, b"")
            buffer[: len(data)] = data
            return len(data)

    tracemalloc.start()
    try:
        kept = sum(1 for _ in read_lines(io.BufferedReader(Endless())))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept == 5_000
    assert peak_bytes < 1_500_000


# Files


CONTENT = jsonl(*(line(f"id-{i}") for i in range(200)))


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("jobs.jsonl", CONTENT),
        ("jobs.jsonl.gz", gzip.compress(CONTENT)),
        ("jobs.jsonl.zst", zstd(CONTENT)),
        ("zipped-by-content", gzip.compress(CONTENT)),
        ("zstd-by-content", zstd(CONTENT)),
        ("two-parts.gz", gzip.compress(CONTENT[:5000]) + gzip.compress(CONTENT[5000:])),
        ("two-parts.zst", zstd(CONTENT[:5000]) + zstd(CONTENT[5000:])),
        ("skippable.zst", b"\x50\x2a\x4d\x18\x02\x00\x00\x00ab" + zstd(CONTENT)),
    ],
)
def test_a_file_is_digested_and_read_however_it_is_stored(
    tmp_path: Path, name: str, stored: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(stored)
    with open_batch(path) as file:
        assert digest_file(file) == hashlib.blake2b(CONTENT, digest_size=32).hexdigest()
        assert list(read_batch(file)) == read(CONTENT)
        assert digest_file(file) == hashlib.blake2b(CONTENT, digest_size=32).hexdigest()


def test_highly_compressed_text_is_read_whole(tmp_path: Path) -> None:
    content = b" " * 50_000_000 + b"\n" + jsonl(line())
    path = tmp_path / "jobs.zst"
    path.write_bytes(zstandard.ZstdCompressor(level=19).compress(content))
    with open_batch(str(path)) as file:
        assert [item.line for item in read_batch(file)] == [1, 2]


def test_standard_input_can_be_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(CONTENT))))
    with open_batch("-") as file:
        assert digest_file(file) == hashlib.blake2b(CONTENT, digest_size=32).hexdigest()
        assert list(read_batch(file)) == read(CONTENT)


def test_a_pipe_can_be_read_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(CONTENT,))
    writer.start()
    with open_batch(pipe) as file:
        writer.join()
        digest_file(file)
        assert list(read_batch(file)) == read(CONTENT)


def test_both_passes_read_the_same_file_when_its_name_is_taken(tmp_path: Path) -> None:
    path, other = tmp_path / "jobs.jsonl", tmp_path / "other.jsonl"
    path.write_bytes(CONTENT)
    other.write_bytes(jsonl(line("other")))
    with open_batch(path) as file:
        before = digest_file(file)
        other.replace(path)
        assert digest_file(file) == before


def test_a_missing_file_is_named() -> None:
    with pytest.raises(BatchFileError, match=r"cannot read no/such\.jsonl: No such file"):
        open_batch("no/such.jsonl")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="Is a directory"):
        open_batch(tmp_path)


def test_an_impossible_path_is_refused() -> None:
    with pytest.raises(BatchFileError, match="null byte"):
        open_batch("jobs\0.jsonl")


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("plain.gz", CONTENT),
        ("plain.zst", CONTENT),
        ("cut.gz", gzip.compress(CONTENT)[:-20]),
        ("cut.zst", zstd(CONTENT)[:-3]),
        ("damaged.gz", gzip.compress(CONTENT)[:40] + b"\xff" * 40),
        ("damaged.zst", zstd(CONTENT)[:40] + b"\xff" * 40),
        ("tail.gz", gzip.compress(CONTENT) + b"tail"),
        ("tail.zst", zstd(CONTENT) + b"tail"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_compression_is_refused_before_a_line_is_used(
    tmp_path: Path, name: str, stored: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(stored)
    with open_batch(path) as file, pytest.raises(BatchFileError, match=f"cannot read .*{name}: "):
        digest_file(file)


@pytest.mark.parametrize("content", [b"", b"\n \r\n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_file_without_a_line_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(content)
    with open_batch(path) as file, pytest.raises(BatchFileError, match="no request") as caught:
        list(read_batch(file))
    assert caught.value.code == "empty_file"


def test_a_file_of_bad_lines_only_is_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(b"{\n")
    with open_batch(path) as file:
        assert codes(list(read_batch(file))) == ["invalid_json_line"]


@pytest.mark.parametrize("content", [b'[\n {"a": 1}\n]\n', b'\n\n [{"a": 1}, {"a": 2}]', b"[]"])
def test_a_json_list_is_refused_with_what_makes_lines_of_it(content: bytes) -> None:
    with pytest.raises(BatchFileError, match=r"requests is one JSON list.*jq") as caught:
        list(read_batch(batch_file.BatchFile(io.BytesIO(content), "requests")))
    assert caught.value.code == "json_document"
