"""Whatever bytes a batch file holds, each line that is not blank has exactly one outcome."""

from __future__ import annotations

import io
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from queue_service.batch_file import BatchLine, read_lines
from queue_service.errors import LineError, RequestError
from queue_service.json_text import replace_surrogates
from queue_service.requests import Endpoint, Request, parse_request

MAX_LINE_BYTES = 400

FIELD_NAMES = st.sampled_from(
    ["messages", "prompt", "model", "max_tokens", "temperature", "stop", "seed", "n", "tools", "x"]
)
TURN_NAMES = st.sampled_from(["role", "content", "tool_calls", "name", "type", "text", "function"])
WORDS = st.sampled_from(["user", "assistant", "developer", "text", "POST", *Endpoint])
# Lone surrogates included: st.text() leaves them out.
TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TURN_NAMES | TEXT, inner, max_size=4)
    ),
    max_leaves=12,
)
BODIES = st.dictionaries(FIELD_NAMES | TEXT, VALUES, max_size=5)
ENVELOPES = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.sampled_from(["a", "b", 7]) | VALUES,
        "method": st.just("POST") | VALUES,
        "url": st.sampled_from(list(Endpoint)) | VALUES,
        "body": st.just({"prompt": "hi"}) | BODIES,
        "prompt": TEXT,
    },
)
LINES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"", b" ", b"\r", b"\t", b"\xef\xbb\xbf", b"{}", b"x" * 2 * MAX_LINE_BYTES]),
    (ENVELOPES | BODIES).map(lambda fields: json.dumps(fields).encode()),
)
CONTENTS = st.lists(LINES, max_size=12).map(b"\n".join)


class Chunked(io.RawIOBase):
    """Gives out content in pieces of the sizes that it was told, over and over."""

    def __init__(self, content: bytes, sizes: list[int]) -> None:
        self._content = io.BytesIO(content)
        self._sizes = sizes
        self._reads = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        size = self._sizes[self._reads % len(self._sizes)]
        self._reads += 1
        data = self._content.read(min(size, len(buffer)))
        buffer[: len(data)] = data
        return len(data)


def read(stream: Any) -> list[BatchLine | LineError]:
    return list(read_lines(stream, max_line_bytes=MAX_LINE_BYTES))


def told(items: list[BatchLine | LineError]) -> list[object]:
    """The items as values that can be compared."""
    return [
        (item.line, item.custom_id, item.to_error()) if isinstance(item, LineError) else item
        for item in items
    ]


def outcome_of(endpoint: Endpoint, body: dict[str, Any]) -> Request | RequestError:
    try:
        return parse_request(endpoint, body)
    except RequestError as exc:
        return exc


@given(CONTENTS)
def test_every_line_that_is_not_blank_has_one_outcome_with_its_number(content: bytes) -> None:
    raws = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [number for number, raw in enumerate(raws, 1) if raw.strip(b" \t\r")]
    assert [item.line for item in read(io.BytesIO(content))] == expected


@given(CONTENTS, st.lists(st.integers(1, 70), min_size=1), st.integers(1, 300))
def test_how_the_bytes_arrive_changes_nothing(
    content: bytes, sizes: list[int], buffer_bytes: int
) -> None:
    chunked = io.BufferedReader(Chunked(content, sizes), buffer_bytes)
    assert told(read(chunked)) == told(read(io.BytesIO(content)))


@given(CONTENTS)
def test_good_lines_have_distinct_ids_one_url_and_valid_text(content: bytes) -> None:
    items = read(io.BytesIO(content))
    good = [item for item in items if isinstance(item, BatchLine)]
    assert len({item.custom_id for item in good}) == len(good)
    assert len({item.endpoint for item in good}) <= 1
    for item in items:
        shown = item.to_error() if isinstance(item, LineError) else item.body
        json.dumps([item.custom_id, shown], ensure_ascii=False, allow_nan=False).encode()


@given(st.sampled_from(list(Endpoint)), BODIES)
def test_a_body_is_a_request_or_one_clear_sentence(
    endpoint: Endpoint, body: dict[str, Any]
) -> None:
    outcome = outcome_of(endpoint, body)
    if isinstance(outcome, RequestError):
        # The words for a kind of error that nobody foresaw.
        assert not outcome.message.startswith(f"'{outcome.param}' is not valid")
        outcome.message.encode()
    else:
        assert outcome == parse_request(endpoint, replace_surrogates(body))
