"""What a request body may say, what it means, and how a refusal reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from queue_service import tasks
from queue_service.errors import RequestError
from queue_service.requests import (
    ChatRequest,
    CompletionRequest,
    Endpoint,
    load_json,
    parse_request,
    replace_surrogates,
)

USER_TURN = {"role": "user", "content": "hello"}


def chat(**fields: Any) -> ChatRequest:
    request = parse_request(Endpoint.CHAT, {"messages": [USER_TURN], **fields})
    assert isinstance(request, ChatRequest)
    return request


def completion(**fields: Any) -> CompletionRequest:
    request = parse_request(Endpoint.COMPLETIONS, {"prompt": "hello", **fields})
    assert isinstance(request, CompletionRequest)
    return request


def refusal(endpoint: Endpoint = Endpoint.CHAT, /, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_request(endpoint, body)
    return caught.value


def chat_refusal(**fields: Any) -> RequestError:
    return refusal(Endpoint.CHAT, **{"messages": [USER_TURN], **fields})


def turn_refusal(**turn: Any) -> RequestError:
    return refusal(messages=[turn])


def call_turn(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


# Endpoints


def test_each_endpoint_has_its_own_task() -> None:
    assert Endpoint.CHAT.function == tasks.CHAT
    assert Endpoint.COMPLETIONS.function == tasks.COMPLETION
    assert [Endpoint.of_function(e.function) for e in Endpoint] == list(Endpoint)


def test_a_foreign_function_belongs_to_no_endpoint() -> None:
    assert Endpoint.of_function("os.system") is None


# Sampling fields


def test_fields_that_are_not_given_are_unset() -> None:
    request = chat()
    assert (request.model, request.token_limit, request.temperature) == (None, None, None)
    assert (request.top_p, request.seed, request.stop_strings) == (None, None, ())
    assert request.stream is False


def test_null_means_unset_for_every_field() -> None:
    names = ("model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed")
    assert chat(**dict.fromkeys((*names, "stop", "stream"))) == chat()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 0),
        ("top_p", 1),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("max_tokens", 1),
        ("model", "default"),
        ("stream", True),
    ],
)
def test_values_at_the_edge_of_their_range_are_kept(name: str, value: Any) -> None:
    assert getattr(chat(**{name: value}), name) == value
    assert getattr(completion(**{name: value}), name) == value


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("10", "an integer"),
        (1.5, "an integer"),
        (2.0, "an integer"),
        (True, "an integer"),
        (0, "at least 1"),
        (-1, "at least 1"),
    ],
)
def test_a_token_limit_is_a_positive_integer(name: str, value: Any, words: str) -> None:
    error = chat_refusal(**{name: value})
    assert str(error) == f"'{name}' must be {words}"
    assert (error.code, error.param, error.status_code) == ("invalid_request", name, 400)


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ({"temperature": 2.01}, "'temperature' must be at most 2"),
        ({"temperature": -0.1}, "'temperature' must be at least 0"),
        ({"temperature": "1"}, "'temperature' must be a number"),
        ({"temperature": True}, "'temperature' must be a number"),
        ({"temperature": float("nan")}, "'temperature' must be a finite number"),
        ({"top_p": 1.5}, "'top_p' must be at most 1"),
        ({"seed": 2**63}, "'seed' must be at most 9223372036854775807"),
        ({"seed": 1.0}, "'seed' must be an integer"),
        ({"stream": "yes"}, "'stream' must be true or false"),
        ({"stream": 1}, "'stream' must be true or false"),
        ({"model": 7}, "'model' must be a string"),
        ({"model": ""}, "'model' must not be empty"),
        ({"stop": 7}, "'stop' must be a string or a list of strings"),
        ({"stop": ["a", 7]}, "'stop' must be a string or a list of strings"),
        ({"stop": list("abcde")}, "'stop' may hold at most 4 strings"),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence(field: dict[str, Any], sentence: str) -> None:
    error = chat_refusal(**field)
    assert (str(error), error.param) == (sentence, *field)


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert chat(max_tokens=5).token_limit == 5
    assert chat(max_tokens=5, max_completion_tokens=9).token_limit == 9
    assert completion(max_tokens=5).token_limit == 5


def test_stop_is_one_string_or_up_to_four_and_empty_ones_are_ignored() -> None:
    assert chat(stop="END").stop_strings == ("END",)
    assert chat(stop="").stop_strings == ()
    assert chat(stop=["a", "", "b", "c", "d"]).stop_strings == ("a", "b", "c", "d")


def test_a_request_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        chat().seed = 1


# Messages


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


# Prompts


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [("Once upon", "Once upon"), ("", ""), ([5, 0, 9], (5, 0, 9))],
)
def test_a_prompt_is_a_text_or_token_ids(prompt: Any, kept: Any) -> None:
    assert completion(prompt=prompt).prompt == kept


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (["a", "b"], "one prompt per line"),
        ([[1], [2]], "one prompt per line"),
        ([], "a string or a list of token ids"),
        (7, "a string or a list of token ids"),
        ({}, "a string or a list of token ids"),
        ([1, -1], "integers from 0"),
        ([1, True], "integers from 0"),
        ([1, 2.0], "integers from 0"),
        ([1, "a"], "integers from 0"),
        (None, "is required"),
    ],
)
def test_any_other_prompt_is_refused(prompt: Any, words: str) -> None:
    error = refusal(Endpoint.COMPLETIONS, prompt=prompt)
    assert words in str(error)
    assert error.param == "prompt"


# Fields that are not ours


@pytest.mark.parametrize(
    "name",
    [
        "user",
        "store",
        "service_tier",
        "metadata",
        "safety_identifier",
        "stream_options",
        "session_id",
        "prompt_cache_key",
    ],
)
@pytest.mark.parametrize("value", [None, 7, "x", {"a": [1]}])
def test_harmless_fields_are_accepted_and_change_nothing(name: str, value: Any) -> None:
    assert chat(**{name: value}) == chat()
    assert completion(**{name: value}) == completion()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1),
        ("frequency_penalty", 0),
        ("frequency_penalty", 0.0),
        ("presence_penalty", 0),
        ("repetition_penalty", 1.0),
        ("logit_bias", {}),
        ("logprobs", False),
        ("top_logprobs", 0),
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("top_k", 0),
        ("top_k", -1),
        ("min_p", 0),
        ("echo", False),
        ("best_of", 1),
        ("suffix", None),
        ("parallel_tool_calls", True),
        ("reasoning_effort", None),
        ("chat_template_kwargs", {}),
        ("continue_final_message", False),
        ("add_generation_prompt", True),
        ("stop_token_ids", []),
        ("ignore_eos", False),
        ("min_tokens", 0),
        ("priority", 0),
        ("xtc_probability", 0.0),
    ],
)
def test_an_unsupported_field_may_carry_the_value_that_changes_nothing(
    name: str, value: Any
) -> None:
    assert chat(**{name: value}) == chat()
    assert completion(**{name: None}) == completion()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": -100}),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 5),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("top_k", 40),
        ("min_p", 0.05),
        ("echo", True),
        ("best_of", 3),
        ("suffix", "the end"),
        ("reasoning_effort", "low"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
        ("stop_token_ids", [2]),
        ("ignore_eos", True),
        ("min_tokens", 3),
        ("priority", 1),
        ("xtc_probability", 0.5),
    ],
)
def test_an_unsupported_field_that_would_change_the_answer_is_refused_by_name(
    name: str, value: Any
) -> None:
    error = chat_refusal(**{name: value})
    assert str(error) == f"'{name}' is not supported yet"
    assert (error.code, error.param) == ("invalid_request", name)


def test_an_unknown_field_is_refused_by_name_even_when_it_is_null() -> None:
    error = chat_refusal(temprature=0.5)
    assert (str(error), error.param) == ("unknown field 'temprature'", "temprature")
    assert str(chat_refusal(temprature=None)) == "unknown field 'temprature'"


def test_the_field_of_the_other_endpoint_is_unknown() -> None:
    assert str(chat_refusal(prompt="x")) == "unknown field 'prompt'"
    error = refusal(Endpoint.COMPLETIONS, prompt="x", messages=[USER_TURN])
    assert str(error) == "unknown field 'messages'"


def test_a_long_field_name_is_cut_in_the_message() -> None:
    error = chat_refusal(**{"x" * 10_000: 1})
    assert len(str(error)) < 120
    assert error.param is not None
    assert len(error.param) == 80


def test_the_first_problem_is_told_and_the_others_are_counted() -> None:
    error = chat_refusal(temprature=1, max_tokens=0, seed="x")
    assert str(error) == "unknown field 'temprature' (and 2 more)"
    assert error.param == "temprature"


def test_a_refusal_speaks_no_library_jargon() -> None:
    error = refusal(messages=[{"role": "user", "content": {"a": 1}}, 7], stop={}, seed=[])
    for jargon in ("pydantic", "http", "Input", "input", "type="):
        assert jargon not in str(error)


@pytest.mark.parametrize("body", [None, [], "x", 7])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(RequestError, match="must be an object") as caught:
        parse_request(Endpoint.CHAT, body)
    assert caught.value.param is None


# Text that is no Unicode


def test_a_lone_surrogate_becomes_a_replacement_character() -> None:
    messages = [{"role": "user", "content": "a\ud800b"}]
    request = chat(messages=messages, stop="\udfff", model="m\udc00")
    assert request.template_messages()[0]["content"] == "a\ufffdb"
    assert request.stop_strings == ("\ufffd",)
    assert request.model == "m\ufffd"
    assert messages == [{"role": "user", "content": "a\ud800b"}]


def test_a_surrogate_in_a_field_name_is_no_crash() -> None:
    assert chat_refusal(**{"x\ud800": 1}).param == "x\ufffd"
    assert turn_refusal(role="user", content="x", **{"y\ud800": 1}).param == "messages.0.y\ufffd"


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


# JSON


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
