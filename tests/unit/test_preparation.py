"""From a claimed job to a request that can run, and which jobs can never run."""

from __future__ import annotations

import pickle
import zlib
from typing import Any

import pytest

from queue_service import tasks
from queue_service.broker import Claimed
from queue_service.errors import RequestError
from queue_service.payload import Encoding, encode_call
from queue_service.requests import Endpoint
from tests.fakes import CONTEXT, EOS, VOCABULARY, FakeTokenizer
from tests.harness import chat_body, make_claimed
from workers.preparation import Limits, Preparer, timeout_seconds
from workers.requests import PreparedRequest
from workers.sampling import SamplingDefaults, default_seed
from workers.token_history import TokenHistory


def make_preparer(**limits: int) -> Preparer:
    return Preparer(
        FakeTokenizer(),
        Limits(CONTEXT, VOCABULARY, frozenset({EOS}), **limits),
        model="served-model",
        defaults=SamplingDefaults(temperature=0.6),
    )


def claimed_call(function: str, body: Any, **fields: str) -> Claimed:
    return make_claimed(data=encode_call(function, body), **fields)


def prepare_chat(text: str = "hello", **fields: Any) -> PreparedRequest:
    return make_preparer().prepare(claimed_call(tasks.CHAT, chat_body(text, **fields)))


def refusal(claimed: Claimed, **limits: int) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make_preparer(**limits).prepare(claimed)
    return caught.value


def test_a_chat_is_rendered_and_tokenised() -> None:
    request = prepare_chat("hello", stop=["END", ""], temperature=0.3, top_p=0.5, seed=11)
    assert request.endpoint is Endpoint.CHAT
    assert request.model == "served-model"
    assert bytes(request.prompts[0].ids) == b"hello"
    assert request.stop_strings == ("END",)
    sampling = request.samplings[0]
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.3, 0.5, 11)
    assert not request.stream
    assert request.encoding is Encoding.JSON


@pytest.mark.parametrize("prompt", ["hello", [104, 101, 108, 108, 111]])
def test_a_completion_takes_a_text_or_token_ids(prompt: Any) -> None:
    request = make_preparer().prepare(claimed_call(tasks.COMPLETION, {"prompt": prompt}))
    assert request.endpoint is Endpoint.COMPLETIONS
    assert bytes(request.prompts[0].ids) == b"hello"


def test_the_body_may_be_a_keyword_argument() -> None:
    data = zlib.compress(b'["queue_service.tasks.completion", null, [], {"body": {"prompt": "x"}}]')
    assert make_preparer().prepare(make_claimed(data=data)).prompts[0].ids == (120,)


def test_a_pickled_call_is_answered_in_pickle() -> None:
    data = zlib.compress(pickle.dumps((tasks.CHAT, None, (chat_body("hi"),), {})))
    request = make_preparer().prepare(make_claimed(data=data))
    assert request.encoding is Encoding.PICKLE
    assert bytes(request.prompts[0].ids) == b"hi"


def test_what_a_request_leaves_open_has_defaults() -> None:
    claimed = claimed_call(tasks.CHAT, chat_body("hello"), qsvc_generation="2")
    sampling = make_preparer().prepare(claimed).samplings[0]
    assert (sampling.temperature, sampling.top_p) == (0.6, 1.0)
    assert sampling.seed == default_seed(claimed.job_id, 2, 0)


def test_zero_is_a_temperature_and_a_seed() -> None:
    sampling = prepare_chat(temperature=0, seed=0).samplings[0]
    assert (sampling.temperature, sampling.seed) == (0.0, 0)


def test_a_job_streams_when_its_body_or_its_batch_says_so() -> None:
    assert prepare_chat(stream=True).stream
    marked = claimed_call(tasks.CHAT, chat_body("hello"), qsvc_stream="1")
    assert make_preparer().prepare(marked).stream


@pytest.mark.parametrize(
    ("asked", "limits", "expected"),
    [
        ({}, {}, CONTEXT - 5),
        ({"max_tokens": 7}, {}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 3}, {}, 3),
        ({"max_tokens": 100_000}, {}, CONTEXT - 5),
        ({"max_tokens": 100}, {"ceiling_tokens": 50}, 50),
        ({}, {"ceiling_tokens": 50}, 50),
        ({}, {"default_tokens": 20}, 20),
        ({"max_tokens": 30}, {"default_tokens": 20}, 30),
    ],
)
def test_the_token_limit_is_the_least_of_request_context_and_ceiling(
    asked: dict[str, int], limits: dict[str, int], expected: int
) -> None:
    claimed = claimed_call(tasks.CHAT, chat_body("hello", **asked))
    assert make_preparer(**limits).prepare(claimed).prompts[0].token_limit == expected


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers() -> None:
    error = refusal(claimed_call(tasks.CHAT, chat_body("x" * CONTEXT)))
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert error.message.count(str(CONTEXT)) == 2


def test_a_prompt_that_leaves_room_for_one_token_runs() -> None:
    assert prepare_chat("x" * (CONTEXT - 1)).prompts[0].token_limit == 1


def test_an_empty_prompt_is_refused() -> None:
    assert refusal(claimed_call(tasks.COMPLETION, {"prompt": ""})).param == "prompt"


@pytest.mark.parametrize("token_id", [VOCABULARY, -1])
def test_a_token_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    error = refusal(claimed_call(tasks.COMPLETION, {"prompt": [1, token_id]}))
    assert error.param == "prompt"


def test_the_last_token_id_of_the_vocabulary_runs() -> None:
    request = make_preparer().prepare(claimed_call(tasks.COMPLETION, {"prompt": [EOS]}))
    assert request.prompts[0].ids == (EOS,)


def test_the_templates_own_words_refuse_a_chat() -> None:
    error = refusal(claimed_call(tasks.CHAT, chat_body("refuse me")))
    assert (error.message, error.param) == ("the template says no", "messages")


def test_an_unknown_field_is_refused_by_name() -> None:
    error = refusal(claimed_call(tasks.CHAT, chat_body("hello", temprature=1)))
    assert error.status_code == 400
    assert "temprature" in error.message


def test_a_function_that_is_not_ours_is_refused() -> None:
    error = refusal(claimed_call("os.system", {"prompt": "true"}))
    assert error.code == "unknown_function"
    assert "os.system" in error.message


def test_a_long_name_of_a_function_is_cut_in_the_message() -> None:
    assert len(refusal(claimed_call("f" * 100_000, {"prompt": "true"})).message) < 300


@pytest.mark.parametrize(
    "call",
    [
        b'["queue_service.tasks.chat", null, [], {}]',
        b'["queue_service.tasks.chat", null, ["hello"], {}]',
        b'["queue_service.tasks.chat", null, [{}, {}], {}]',
        b'["queue_service.tasks.chat", null, [{}], {"body": {}}]',
        b'["queue_service.tasks.chat", null, [{}], {"model": "m"}]',
    ],
)
def test_a_call_with_other_arguments_than_one_body_is_refused(call: bytes) -> None:
    assert refusal(make_claimed(data=call)).code == "invalid_payload"


def test_a_job_without_data_is_refused() -> None:
    assert refusal(make_claimed()).code == "invalid_payload"


@pytest.mark.parametrize(
    ("timeout", "expected"), [("180", None), ("-1", None), ("0", None), ("1", 1), ("600", 600)]
)
def test_rqs_unasked_timeout_is_no_timeout(timeout: str, expected: int | None) -> None:
    assert timeout_seconds(make_claimed(timeout=timeout)) == expected


def test_a_job_without_a_timeout_has_none() -> None:
    assert timeout_seconds(make_claimed()) is None


# --- what a request may ask for ---


def prepare_text(**fields: Any) -> PreparedRequest:
    return make_preparer().prepare(claimed_call(tasks.COMPLETION, fields))


def refused_field(**fields: Any) -> str | None:
    return refusal(claimed_call(tasks.CHAT, chat_body("x", **fields))).param


def test_every_choice_has_a_seed_of_its_own() -> None:
    seeded = prepare_chat(n=3, seed=40).samplings
    assert [plan.seed for plan in seeded] == [40, 41, 42]
    unseeded = prepare_chat(n=3).samplings
    assert [plan.seed for plan in unseeded] == [default_seed("job", 0, i) for i in range(3)]


def test_several_prompts_have_their_choices_one_after_the_other() -> None:
    request = prepare_text(prompt=["ab", "c"], n=2, max_tokens=5)
    rows = request.rows(FakeTokenizer())
    assert [bytes(row.prompt_ids) for row in rows] == [b"ab", b"ab", b"c", b"c"]
    assert len({row.row_id for row in rows}) == 4
    assert request.num_prompt_tokens == 3


def test_samplers_come_from_the_request_and_then_from_the_model() -> None:
    [plan] = prepare_chat(top_k=5, min_p=0.1, xtc_probability=0.5, xtc_threshold=0.2).samplings
    assert (plan.top_k, plan.min_p, plan.xtc_probability, plan.xtc_threshold) == (5, 0.1, 0.5, 0.2)
    assert plan.temperature == 0.6


def test_rules_of_a_row_come_from_the_request() -> None:
    rules = prepare_chat(
        logit_bias={"7": 2, "3": -100},
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.2,
        min_tokens=4,
    ).rules
    assert rules.bias == ((3, -100.0), (7, 2.0))
    assert (rules.frequency_penalty, rules.presence_penalty) == (0.5, 0.25)
    assert (rules.repetition_penalty, rules.min_tokens) == (1.2, 4)


def test_what_ends_an_answer_can_be_more_or_less_than_its_end() -> None:
    assert prepare_chat().stop_ids == {EOS}
    assert prepare_chat(stop_token_ids=[5]).stop_ids == {EOS, 5}
    assert prepare_chat(stop_token_ids=[5], ignore_eos=True).stop_ids == {5}


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {str(VOCABULARY): 1}), ("stop_token_ids", [VOCABULARY])],
)
def test_a_token_outside_the_vocabulary_is_refused_by_its_field(field: str, value: Any) -> None:
    assert refused_field(**{field: value}) == field


def test_the_prompt_is_echoed_where_it_is_asked_for() -> None:
    assert prepare_text(prompt="ab", echo=True).prompts[0].echo == "ab"
    assert prepare_text(prompt=[97, 98], echo=True).prompts[0].echo == "ab"
    claimed = claimed_call(tasks.COMPLETION, {"prompt": "ab", "echo": True, "logprobs": 1})
    assert refusal(claimed).param == "echo"


def test_a_model_without_tools_refuses_them() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert refused_field(tools=[tool]) == "tools"
    assert prepare_chat(tools=[tool], tool_choice="none").form.tools is None


def test_a_form_that_nobody_can_enforce_is_refused() -> None:
    assert refused_field(response_format={"type": "json_object"}) == "response_format"


def test_a_thinking_budget_needs_a_model_that_thinks() -> None:
    assert refused_field(thinking_budget=5) == "thinking_budget"


def test_priority_reaches_the_rows() -> None:
    assert [row.priority for row in prepare_chat(priority=7).rows(FakeTokenizer())] == [7]


@pytest.mark.parametrize(
    "name", ["add_generation_prompt", "continue_final_message", "parse_special_tokens"]
)
def test_a_field_of_the_request_is_none_of_the_templates(name: str) -> None:
    field = refused_field(chat_template_kwargs={name: True})
    assert field == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("field", "value"), [("ignore_eos", True), ("min_tokens", 4), ("echo", True)]
)
def test_what_contradicts_a_constraint_is_refused(field: str, value: Any) -> None:
    body = {"prompt": "x", "structured_outputs": {"choice": ["a", "b"]}, field: value}
    assert refusal(claimed_call(tasks.COMPLETION, body)).param == field


def test_a_line_may_not_ask_for_answers_without_number() -> None:
    body = {"prompt": ["a"] * 20, "n": 128}
    assert refusal(claimed_call(tasks.COMPLETION, body)).param == "prompt"


def keep_of(function: str, body: Any, mark: str) -> tuple[int, ...]:
    preparer = Preparer(
        FakeTokenizer(),
        Limits(CONTEXT, VOCABULARY, frozenset({EOS})),
        model="served-model",
        history=TokenHistory(FakeTokenizer()),
    )
    return preparer.prepare(claimed_call(function, body, qsvc_prefix=mark)).prompts[0].keep


def test_a_marked_job_keeps_what_its_mark_covers() -> None:
    mark = "0123456789abcdef:150"
    assert keep_of(tasks.COMPLETION, {"prompt": "a" * 200}, mark) == (150,)
    assert keep_of(tasks.COMPLETION, {"prompt": ["a" * 200]}, mark) == (150,)
    [length] = keep_of(tasks.CHAT, chat_body("a" * 200), mark)
    assert 128 <= length <= 150


def test_a_bad_mark_is_ignored() -> None:
    for mark in ("0123456789abcdef:0", "0123456789abcdef:127", "x:150", "150", "\x00"):
        for function, body in (
            (tasks.COMPLETION, {"prompt": "a" * 200}),
            (tasks.CHAT, chat_body("a" * 200)),
        ):
            assert keep_of(function, body, mark) == ()


def test_a_mark_says_nothing_of_token_ids_and_of_several_prompts() -> None:
    for prompt in ([97] * 200, ["a" * 200, "a" * 200]):
        assert keep_of(tasks.COMPLETION, {"prompt": prompt}, "0123456789abcdef:150") == ()
