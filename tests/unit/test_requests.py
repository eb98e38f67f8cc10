"""What a request body may say, what it means, and how a refusal reads."""

from __future__ import annotations

from typing import Any

import pytest

from queue_service import tasks
from queue_service.errors import RequestError
from queue_service.requests import FIELD_USES, Endpoint, parse_request
from tests.request_helpers import (
    USER_TURN,
    chat,
    chat_refusal,
    completion,
    completion_refusal,
    refusal,
)

# Endpoints


def test_each_endpoint_has_its_own_task() -> None:
    assert Endpoint.CHAT.function == tasks.CHAT
    assert Endpoint.COMPLETIONS.function == tasks.COMPLETION
    assert [Endpoint.of_function(e.function) for e in Endpoint] == list(Endpoint)


def test_a_foreign_function_belongs_to_no_endpoint() -> None:
    assert Endpoint.of_function("os.system") is None


# What both endpoints share

UNSET = (
    "model",
    "token_limit",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "num_top_logprobs",
    "constraint",
    "session",
)


def test_fields_that_are_not_given_are_unset() -> None:
    for request in (chat(), completion()):
        for name in UNSET:
            assert getattr(request, name) is None
        assert (request.n, request.stream, request.priority) == (1, False, 0)
        assert (request.stop_strings, request.stop_token_ids, request.logit_bias) == ((), (), ())
        assert request.ignore_eos is False


@pytest.mark.parametrize("endpoint", Endpoint)
def test_null_means_unset_for_every_known_field(endpoint: Endpoint) -> None:
    body = {"prompt": "x"} if endpoint is Endpoint.COMPLETIONS else {"messages": [USER_TURN]}
    nulls = dict.fromkeys(FIELD_USES[endpoint])
    assert parse_request(endpoint, {**nulls, **body}) == parse_request(endpoint, body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "default"),
        ("stream", True),
        ("n", 1),
        ("n", 128),
        ("priority", -(2**31)),
        ("priority", 2**31),
        ("max_tokens", 1),
        ("min_tokens", 0),
        ("min_tokens", 5),
        ("ignore_eos", True),
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 0),
        ("top_p", 1),
        ("top_k", 0),
        ("top_k", 1),
        ("top_k", 1_000_000),
        ("min_p", 0),
        ("min_p", 1),
        ("xtc_probability", 0),
        ("xtc_probability", 1),
        ("xtc_threshold", 0),
        ("xtc_threshold", 0.5),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("frequency_penalty", -2),
        ("frequency_penalty", 2),
        ("presence_penalty", -2),
        ("presence_penalty", 2),
        ("repetition_penalty", 0.001),
        ("repetition_penalty", 10),
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
        ({"n": 0}, "'n' must be at least 1"),
        ({"n": 129}, "'n' must be at most 128"),
        ({"n": True}, "'n' must be an integer"),
        ({"priority": 1.5}, "'priority' must be an integer"),
        ({"priority": 2**31 + 1}, "'priority' must be at most 2147483648"),
        ({"priority": -(2**31) - 1}, "'priority' must be at least -2147483648"),
        ({"min_tokens": -1}, "'min_tokens' must be at least 0"),
        ({"min_tokens": 1.0}, "'min_tokens' must be an integer"),
        ({"ignore_eos": 1}, "'ignore_eos' must be true or false"),
        ({"top_k": -2}, "'top_k' must be at least 1, or 0 or -1 for off"),
        ({"top_k": 40.0}, "'top_k' must be an integer"),
        ({"top_k": True}, "'top_k' must be an integer"),
        ({"min_p": -0.1}, "'min_p' must be at least 0"),
        ({"min_p": 1.1}, "'min_p' must be at most 1"),
        ({"xtc_probability": 1.1}, "'xtc_probability' must be at most 1"),
        ({"xtc_probability": True}, "'xtc_probability' must be a number"),
        ({"xtc_threshold": 0.6}, "'xtc_threshold' must be at most 0.5"),
        ({"frequency_penalty": 2.1}, "'frequency_penalty' must be at most 2"),
        ({"presence_penalty": -2.1}, "'presence_penalty' must be at least -2"),
        ({"presence_penalty": 10**400}, "'presence_penalty' must be a number"),
        ({"repetition_penalty": 0}, "'repetition_penalty' must be greater than 0"),
        ({"repetition_penalty": 10.5}, "'repetition_penalty' must be at most 10"),
        ({"stop_token_ids": 5}, "'stop_token_ids' must be a list"),
        ({"logit_bias": [1]}, "'logit_bias' must be an object of token ids and numbers"),
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
    for error in (chat_refusal(**field), completion_refusal(**field)):
        assert (str(error), error.param) == (sentence, *field)


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert chat(max_tokens=5).token_limit == 5
    assert chat(max_tokens=5, max_completion_tokens=9).token_limit == 9
    assert completion(max_tokens=5).token_limit == 5


def test_stop_is_one_string_or_up_to_four_and_empty_ones_are_ignored() -> None:
    assert chat(stop="END").stop_strings == ("END",)
    assert chat(stop="").stop_strings == ()
    assert chat(stop=["a", "", "b", "c", "d"]).stop_strings == ("a", "b", "c", "d")


@pytest.mark.parametrize("value", [0, -1])
def test_zero_and_minus_one_turn_top_k_off(value: int) -> None:
    assert chat(top_k=value).top_k == 0


def test_min_tokens_may_not_exceed_the_token_limit() -> None:
    assert chat(min_tokens=5, max_tokens=5).min_tokens == 5
    assert chat(min_tokens=5, max_tokens=4, max_completion_tokens=6).min_tokens == 5
    error = chat_refusal(min_tokens=5, max_tokens=6, max_completion_tokens=4)
    assert (str(error), error.param) == (
        "'min_tokens' must be at most the token limit, 4",
        "min_tokens",
    )
    assert completion_refusal(min_tokens=2, max_tokens=1).param == "min_tokens"


def test_stop_token_ids_keep_their_order() -> None:
    assert chat(stop_token_ids=[7, 0, 7]).stop_token_ids == (7, 0, 7)


@pytest.mark.parametrize("token_id", [-1, "5", 1.0, True, None])
def test_a_stop_token_id_is_an_integer_from_zero(token_id: Any) -> None:
    assert chat_refusal(stop_token_ids=[1, token_id]).param == "stop_token_ids.1"


def test_logit_bias_is_sorted_by_token_id() -> None:
    request = chat(logit_bias={"50": -100, "7": 0.5, "0": 100})
    assert request.logit_bias == ((0, 100.0), (7, 0.5), (50, -100.0))
    assert chat(logit_bias={}) == chat()


@pytest.mark.parametrize("key", ["-1", "1.0", "x", "", "05", "\u0665", " 5", "5\n", "9" * 5_000])
def test_a_key_of_logit_bias_is_a_decimal_token_id(key: str) -> None:
    error = chat_refusal(logit_bias={"1": 0, key: 1})
    assert "is no token id" in str(error)
    assert error.param is not None
    assert error.param.startswith("logit_bias.")
    assert len(error.param) < 100


@pytest.mark.parametrize("bias", [100.5, -101, "5", True, None, [], float("nan"), 10**400])
def test_a_logit_bias_is_a_number_within_a_hundred(bias: Any) -> None:
    assert chat_refusal(logit_bias={"7": bias}).param == "logit_bias.7"


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({"session_id": "a", "prompt_cache_key": "b"}, "a"),
        ({"prompt_cache_key": "b"}, "b"),
        ({"session_id": 7, "prompt_cache_key": "b"}, "b"),
        ({"session_id": "", "prompt_cache_key": "b"}, "b"),
        ({"session_id": {"a": 1}, "prompt_cache_key": []}, None),
        ({"session_id": 7}, None),
        ({"prompt_cache_key": ""}, None),
    ],
)
def test_a_session_is_the_first_name_that_is_a_string(
    fields: dict[str, Any], session: str | None
) -> None:
    assert chat(**fields).session == session
    assert completion(**fields).session == session


def test_a_request_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        chat().seed = 1


# Chat only


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_a_chat_asks_for_logprobs_and_how_many(fields: dict[str, Any], wanted: int | None) -> None:
    assert chat(**fields).num_top_logprobs == wanted


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"top_logprobs": 5}, "'top_logprobs' needs 'logprobs' to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "'top_logprobs' must be at most 20"),
        ({"logprobs": True, "top_logprobs": -1}, "'top_logprobs' must be at least 0"),
        ({"logprobs": 0}, "'logprobs' must be true or false"),
        ({"logprobs": 5}, "'logprobs' must be true or false"),
    ],
)
def test_other_logprobs_of_a_chat_are_refused(fields: dict[str, Any], sentence: str) -> None:
    assert str(chat_refusal(**fields)) == sentence


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high"])
def test_a_reasoning_effort_is_kept(effort: str) -> None:
    assert chat(reasoning_effort=effort).reasoning_effort == effort
    assert chat().reasoning_effort is None


@pytest.mark.parametrize("effort", ["hihg", "HIGH", "", 1, True, ["low"]])
def test_a_misspelt_reasoning_effort_is_refused(effort: Any) -> None:
    error = chat_refusal(reasoning_effort=effort)
    assert str(error) == ("'reasoning_effort' must be 'none', 'minimal', 'low', 'medium' or 'high'")
    assert error.param == "reasoning_effort"


def test_a_thinking_budget_is_a_number_of_tokens() -> None:
    assert chat().thinking_budget is None
    assert chat(thinking_budget=0).thinking_budget == 0
    assert chat_refusal(thinking_budget=-1).param == "thinking_budget"
    assert chat_refusal(thinking_budget=1.5).param == "thinking_budget"


def test_template_arguments_are_any_object() -> None:
    arguments = {"enable_thinking": False, "depth": {"a": [1, None]}}
    assert chat(chat_template_kwargs=arguments).chat_template_kwargs == arguments
    assert chat().chat_template_kwargs == {}
    assert chat_refusal(chat_template_kwargs=["x"]).param == "chat_template_kwargs"


def test_template_arguments_may_not_nest_without_end() -> None:
    deep: Any = {}
    for _ in range(70):
        deep = {"a": deep}
    assert "deeper than 64" in str(chat_refusal(chat_template_kwargs=deep))


ASSISTANT_TURN = {"role": "assistant", "content": "Once"}


def test_an_answer_can_go_on_from_the_last_turn() -> None:
    request = chat(messages=[USER_TURN, ASSISTANT_TURN], continue_final_message=True)
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    assert (chat().continue_final_message, chat().add_generation_prompt) == (False, True)
    assert chat(add_generation_prompt=False).add_generation_prompt is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [ASSISTANT_TURN, USER_TURN]}, "continue_final_message"),
        (
            {"messages": [USER_TURN, ASSISTANT_TURN], "add_generation_prompt": True},
            "add_generation_prompt",
        ),
    ],
)
def test_only_an_assistants_last_turn_can_be_continued(fields: dict[str, Any], param: str) -> None:
    error = chat_refusal(continue_final_message=True, **fields)
    assert error.param == param
    assert str(error).startswith(f"'{param}' ")


# Completions only


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Once upon", ("Once upon",)),
        ("", ("",)),
        (["a", "", "b"], ("a", "", "b")),
        ([5, 0, 9], ((5, 0, 9),)),
        ([[5, 0], [9]], ((5, 0), (9,))),
    ],
)
def test_a_prompt_is_one_or_more_texts_or_lists_of_token_ids(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        ([], "prompt", "a text, a list of token ids"),
        (7, "prompt", "a text, a list of token ids"),
        ({}, "prompt", "a text, a list of token ids"),
        ([1, -1], "prompt", "integers from 0"),
        ([1, True], "prompt", "integers from 0"),
        ([1, 2.0], "prompt", "integers from 0"),
        ([1, "a"], "prompt", "integers from 0"),
        (["a", [1]], "prompt", "integers from 0"),
        ([[1], []], "prompt.1", "at least one"),
        ([[1], [2, "a"]], "prompt.1", "integers from 0"),
        (None, "prompt", "is required"),
    ],
)
def test_any_other_prompt_is_refused(prompt: Any, param: str, words: str) -> None:
    error = refusal(Endpoint.COMPLETIONS, prompt=prompt)
    assert words in str(error)
    assert error.param == param


def test_a_completion_may_echo_its_prompt() -> None:
    assert completion(echo=True).echo is True
    assert completion().echo is False
    assert completion_refusal(echo="yes").param == "echo"


@pytest.mark.parametrize("count", [None, 0, 5])
def test_a_completion_asks_for_logprobs_by_their_number(count: int | None) -> None:
    assert completion(logprobs=count).num_top_logprobs == count


@pytest.mark.parametrize("count", [-1, 6, True, False, 1.0])
def test_other_logprobs_of_a_completion_are_refused(count: Any) -> None:
    assert completion_refusal(logprobs=count).param == "logprobs"


def test_best_of_may_only_repeat_n() -> None:
    assert completion(best_of=1).n == 1
    assert completion(best_of=2, n=2).n == 2
    assert completion_refusal(best_of=2).param == "best_of"
    assert completion_refusal(best_of=1, n=2).param == "best_of"


def test_a_suffix_is_refused_unless_it_is_empty() -> None:
    assert completion(suffix="") == completion()
    assert str(completion_refusal(suffix="the end")) == (
        "'suffix' is not supported by /v1/completions"
    )


# Fields that are not ours


@pytest.mark.parametrize(
    "name",
    ["user", "store", "service_tier", "metadata", "safety_identifier", "stream_options"],
)
@pytest.mark.parametrize("value", [None, 7, "x", {"a": [1]}])
def test_harmless_fields_are_accepted_and_change_nothing(name: str, value: Any) -> None:
    assert chat(**{name: value}) == chat()
    assert completion(**{name: value}) == completion()


@pytest.mark.parametrize(
    ("endpoint", "name", "value"),
    [
        (Endpoint.CHAT, "best_of", 1),
        (Endpoint.CHAT, "echo", False),
        (Endpoint.CHAT, "suffix", ""),
        (Endpoint.CHAT, "functions", []),
        (Endpoint.CHAT, "function_call", "none"),
        (Endpoint.CHAT, "xtc_special_tokens", []),
        (Endpoint.COMPLETIONS, "tools", []),
        (Endpoint.COMPLETIONS, "tool_choice", "auto"),
        (Endpoint.COMPLETIONS, "parallel_tool_calls", True),
        (Endpoint.COMPLETIONS, "top_logprobs", 0),
        (Endpoint.COMPLETIONS, "chat_template_kwargs", {}),
        (Endpoint.COMPLETIONS, "continue_final_message", False),
        (Endpoint.COMPLETIONS, "add_generation_prompt", True),
        (Endpoint.COMPLETIONS, "parse_special_tokens", True),
    ],
)
def test_an_unsupported_field_may_carry_the_value_that_changes_nothing(
    endpoint: Endpoint, name: str, value: Any
) -> None:
    parse = chat if endpoint is Endpoint.CHAT else completion
    assert parse(**{name: value}) == parse()


@pytest.mark.parametrize(
    ("endpoint", "name", "value"),
    [
        (Endpoint.CHAT, "best_of", 3),
        (Endpoint.CHAT, "best_of", True),
        (Endpoint.CHAT, "echo", True),
        (Endpoint.CHAT, "suffix", "the end"),
        (Endpoint.CHAT, "xtc_special_tokens", [5]),
        (Endpoint.COMPLETIONS, "tools", [{"type": "function", "function": {"name": "f"}}]),
        (Endpoint.COMPLETIONS, "tool_choice", "required"),
        (Endpoint.COMPLETIONS, "parallel_tool_calls", 1),
        (Endpoint.COMPLETIONS, "top_logprobs", 5),
        (Endpoint.COMPLETIONS, "reasoning_effort", "low"),
        (Endpoint.COMPLETIONS, "thinking_budget", 0),
        (Endpoint.COMPLETIONS, "chat_template_kwargs", {"enable_thinking": False}),
        (Endpoint.COMPLETIONS, "continue_final_message", True),
        (Endpoint.COMPLETIONS, "add_generation_prompt", False),
        (Endpoint.COMPLETIONS, "parse_special_tokens", False),
    ],
)
def test_an_unsupported_field_that_would_change_the_answer_is_refused_by_name(
    endpoint: Endpoint, name: str, value: Any
) -> None:
    error = (chat_refusal if endpoint is Endpoint.CHAT else completion_refusal)(**{name: value})
    assert str(error) == f"'{name}' is not supported by {endpoint}"
    assert (error.code, error.param) == ("invalid_request", name)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("functions", "tools"),
        ("function_call", "tool_choice"),
        ("guided_json", "structured_outputs"),
        ("guided_regex", "structured_outputs"),
        ("guided_choice", "structured_outputs"),
        ("guided_grammar", "structured_outputs"),
    ],
)
def test_a_field_of_an_old_api_is_refused_with_the_new_one(name: str, instead: str) -> None:
    error = chat_refusal(**{name: [{"name": "f"}]})
    assert str(error) == f"'{name}' is not supported by /v1/chat/completions; use '{instead}'"


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
