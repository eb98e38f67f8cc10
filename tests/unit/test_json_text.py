"""JSON that others wrote, and text that is no Unicode."""

from __future__ import annotations

import json
from typing import Any

import pytest

from queue_service.json_text import load_json, replace_surrogates
from tests.request_helpers import USER_TURN, chat, chat_refusal, refusal


def test_a_lone_surrogate_becomes_a_replacement_character() -> None:
    messages = [{"role": "user", "content": "a\ud800b"}]
    request = chat(messages=messages, stop="\udfff", model="m\udc00")
    assert request.template_messages()[0]["content"] == "a\ufffdb"
    assert request.stop_strings == ("\ufffd",)
    assert request.model == "m\ufffd"
    assert messages == [{"role": "user", "content": "a\ud800b"}]


def test_a_surrogate_in_a_field_name_is_no_crash() -> None:
    assert chat_refusal(**{"x\ud800": 1}).param == "x\ufffd"
    assert refusal(messages=[{**USER_TURN, "y\ud800": 1}]).param == "messages.0.y\ufffd"


def test_a_pair_of_surrogates_is_the_character_they_mean() -> None:
    assert replace_surrogates(["\ud83d\ude00", {"k\ud800": 1}]) == ["\U0001f600", {"k\ufffd": 1}]


def test_a_value_without_surrogates_is_not_copied() -> None:
    value = {"a": ["ä", "\U0001f600", 1, None]}
    assert replace_surrogates(value) is value


@pytest.mark.parametrize("leaf", ["x", "\ud800"])
def test_a_body_nested_too_deep_is_refused(leaf: str) -> None:
    value: Any = leaf
    for _ in range(63):
        value = [value]
    assert chat(metadata=value) == chat()
    assert "deeper than 64" in str(chat_refusal(metadata=[value]))


def test_a_deep_body_with_a_surrogate_first_is_refused_too() -> None:
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    assert "deeper than 64" in str(chat_refusal(user="\ud800", metadata=deep))


def test_json_is_read_as_it_stands() -> None:
    value = {"a": [1, 2.5, None, True, "ä\u2028"]}
    assert load_json(json.dumps(value)) == value
    assert load_json(json.dumps(value, ensure_ascii=False)) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "at character 2"),
        ("", "not valid JSON"),
        ("NaN", "NaN is no JSON number"),
        ("[-Infinity]", "-Infinity is no JSON number"),
        ("1e999", "1e999 is out of range"),
        ("1" * 5000, "too many digits"),
        ("[" * 65 + "]" * 65, "deeper than 64"),
        ("[" * 100_000, "deeper than 64"),
    ],
)
def test_what_is_no_json_says_why(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_json(text)
