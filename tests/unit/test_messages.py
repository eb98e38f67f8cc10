"""The turns of a chat, as a body may say them and as templates read them."""

from __future__ import annotations

from typing import Any

import pytest

from queue_service.errors import RequestError
from tests.request_helpers import USER_TURN, chat, refusal


def turn_refusal(**turn: Any) -> RequestError:
    return refusal(messages=[turn])


def call_turn(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "'messages' must hold at least one message"),
        ("hi", "'messages' must be a list"),
        ({}, "'messages' must be a list"),
        (None, "'messages' is required"),
    ],
)
def test_messages_is_a_list_with_something_in_it(messages: Any, sentence: str) -> None:
    error = refusal(messages=messages)
    assert (str(error), error.param) == (sentence, "messages")
    assert str(refusal()) == "'messages' is required"


@pytest.mark.parametrize(
    ("turn", "param", "sentence"),
    [
        ({"content": "x"}, "messages.0.role", "is required"),
        (
            {"role": "robot", "content": "x"},
            "messages.0.role",
            "must be 'developer', 'system', 'user', 'assistant' or 'tool'",
        ),
        (
            {"role": "user", "content": 7},
            "messages.0.content",
            "must be a string or a list of text parts",
        ),
        (
            {"role": "user", "content": ["x"]},
            "messages.0.content",
            "must be a string or a list of text parts",
        ),
        (
            {"role": "user", "content": [{"text": "x"}]},
            "messages.0.content",
            "must be a string or a list of text parts",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": None}]},
            "messages.0.content",
            "has a text part whose 'text' is not a string",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages.0.content",
            "has a part of type 'image_url'; only text parts are supported",
        ),
        ({"role": "user", "content": "x", "mood": 1}, "messages.0.mood", "is an unknown field"),
        (
            {"role": "assistant", "content": "x", "audio": {"id": "a"}},
            "messages.0.audio",
            "is not supported yet",
        ),
    ],
)
def test_a_bad_turn_is_refused_with_its_path(
    turn: dict[str, Any], param: str, sentence: str
) -> None:
    error = turn_refusal(**turn)
    assert (str(error), error.param) == (f"'{param}' {sentence}", param)


def test_a_turn_that_is_no_object_is_refused() -> None:
    assert str(refusal(messages=["hi"])) == "'messages.0' must be an object"


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": None, "tool_call_id": "c1"},
    ],
)
def test_only_an_assistant_turn_with_tool_calls_may_have_no_content(turn: dict[str, Any]) -> None:
    error = turn_refusal(**turn)
    assert error.param == "messages.0.content"
    assert "is required" in str(error)


def test_the_template_gets_strings_and_known_roles() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    request = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts, "name": "ann"},
            {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning_content": "hm"},
        ]
    )
    assert request.template_messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one two", "name": "ann"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"},
    ]


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"city": "Oslo", "unit": null}', {"city": "Oslo", "unit": None}),
        ({"city": "Oslo"}, {"city": "Oslo"}),
        ("", {}),
        ("{}", {}),
        ('{"t": "\\ud83d"}', {"t": "\ufffd"}),
    ],
)
def test_tool_call_arguments_reach_the_template_as_an_object(arguments: Any, parsed: Any) -> None:
    answer = {"role": "tool", "content": "4 C", "tool_call_id": "c1"}
    request = chat(messages=[USER_TURN, call_turn(arguments), answer])
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": parsed}}
    assert request.template_messages()[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4 C", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize("arguments", ["[1]", "not json", "NaN", 7, None, "[" * 100_000])
def test_tool_call_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    error = refusal(messages=[USER_TURN, call_turn(arguments)])
    assert error.param == "messages.1.tool_calls.0.function.arguments"
    assert "must be an object" in str(error) or "must be a JSON object" in str(error)


def test_a_tool_call_keeps_only_what_a_template_reads() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": "{}", "parsed_arguments": None}}
    request = chat(messages=[USER_TURN, {"role": "assistant", "tool_calls": [call]}])
    assert request.template_messages()[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {}}}
    ]
