"""Whatever a body holds, it is a request or one refusal that names the field."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from queue_service.errors import RequestError
from queue_service.json_text import load_json
from queue_service.requests import FIELD_USES, Endpoint, FieldUse, Request, parse_request

Place = tuple[str | int, ...]

NUM_EXAMPLES = 200
NUM_EXAMPLES_SLOW = 5_000

# Lone surrogates included: st.text() leaves them out.
TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=12)
IDENTIFIERS = st.text("abcXYZ019_-", min_size=1, max_size=12)
COUNTS = st.integers(0, 2**40)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers() | FINITE | TEXT | IDENTIFIERS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=3)
JUNK = VALUES | st.sampled_from([math.nan, math.inf, -math.inf, -1, 10**400, "", [], {}, True])

CALLS = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": TEXT, "arguments": OBJECTS | OBJECTS.map(json.dumps) | st.just("")}
        )
    },
    optional={"id": TEXT | st.none(), "type": st.just("function")},
)
PARTS = st.fixed_dictionaries({"type": st.just("text"), "text": TEXT})
TURNS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["developer", "system", "user", "assistant", "tool"]),
        "content": TEXT | st.lists(PARTS, max_size=2),
    },
    optional={
        "name": TEXT,
        "tool_calls": st.none() | st.lists(CALLS, max_size=2),
        "tool_call_id": TEXT,
        "reasoning_content": st.none() | TEXT,
        "refusal": st.none(),
    },
)
TOOLS: st.SearchStrategy[list[Any]] = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": IDENTIFIERS},
                optional={
                    "description": st.none() | TEXT,
                    "parameters": st.none() | OBJECTS,
                    "strict": st.none() | st.booleans(),
                },
            ),
        }
    ),
    unique_by=lambda tool: tool["function"]["name"],
    max_size=3,
)
SCHEMAS = st.sampled_from(
    [
        {},
        {"type": "object"},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        {"type": "object", "properties": {"a": {"enum": ["x", None]}}, "required": ["a"]},
    ]
)
FORMATS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    st.fixed_dictionaries(
        {
            "type": st.just("json_schema"),
            "json_schema": st.fixed_dictionaries(
                {"name": IDENTIFIERS, "schema": SCHEMAS},
                optional={"strict": st.booleans(), "description": st.none() | TEXT},
            ),
        }
    ),
)
STRUCTURES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"json": SCHEMAS | SCHEMAS.map(json.dumps)}),
    st.fixed_dictionaries({"regex": st.sampled_from(["a", "[0-9]{2,4}", "(x|y)*z"])}),
    st.fixed_dictionaries({"choice": st.lists(IDENTIFIERS, min_size=1, max_size=4)}),
    st.just({"grammar": 'start: "yes" | "no"'}),
    st.just({"json_object": True}),
)
IDS = st.lists(COUNTS, min_size=1, max_size=4)
PROMPTS = st.one_of(TEXT, IDS, *(st.lists(one, min_size=1, max_size=3) for one in (TEXT, IDS)))

SHARED_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.text(min_size=1, max_size=9),
    "n": st.integers(1, 128),
    "stream": st.booleans(),
    "priority": st.integers(-(2**31), 2**31),
    "session_id": VALUES,
    "prompt_cache_key": VALUES,
    "max_tokens": st.integers(10, 2**40),
    "min_tokens": st.integers(0, 10),
    "stop": TEXT | st.lists(TEXT, max_size=4),
    "stop_token_ids": st.lists(COUNTS, max_size=4),
    "ignore_eos": st.booleans(),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 2**40),
    "min_p": st.floats(0, 1),
    "xtc_probability": st.floats(0, 1),
    "xtc_threshold": st.floats(0, 0.5),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0, 10, exclude_min=True),
    "logit_bias": st.dictionaries(COUNTS.map(str), st.floats(-100, 100), max_size=4),
    "user": VALUES,
    "metadata": VALUES,
}
OWN_FIELDS: dict[Endpoint, dict[str, st.SearchStrategy[Any]]] = {
    Endpoint.CHAT: {
        "max_completion_tokens": st.integers(10, 2**40),
        "logprobs": st.just(True),
        "parallel_tool_calls": st.booleans(),
        "reasoning_effort": st.sampled_from(["none", "minimal", "low", "medium", "high"]),
        "thinking_budget": COUNTS,
        "chat_template_kwargs": OBJECTS,
        "add_generation_prompt": st.booleans(),
        "parse_special_tokens": st.booleans(),
    },
    Endpoint.COMPLETIONS: {"echo": st.booleans(), "logprobs": st.integers(0, 5)},
}


@st.composite
def valid_bodies(draw: st.DrawFn, endpoint: Endpoint) -> dict[str, Any]:
    fields = {**SHARED_FIELDS, **OWN_FIELDS[endpoint]}
    chosen = draw(st.sets(st.sampled_from(sorted(fields))))
    body = {name: draw(st.none() | fields[name]) for name in sorted(chosen)}
    forms = {"response_format": FORMATS, "structured_outputs": STRUCTURES}
    form = draw(st.none() | st.sampled_from(sorted(forms)))
    if form is not None:
        body[form] = draw(forms[form])
    if endpoint is Endpoint.COMPLETIONS:
        body["prompt"] = draw(PROMPTS)
        if draw(st.booleans()):
            body["best_of"] = body.get("n") or 1
        return body
    messages: list[Any] = draw(st.lists(TURNS, min_size=1, max_size=3))
    body["messages"] = messages
    body["tools"] = draw(TOOLS)
    choices: list[Any] = ["none", "auto", None]
    if body["tools"]:
        name = body["tools"][-1]["function"]["name"]
        choices += ["required", {"type": "function", "function": {"name": name}}]
    body["tool_choice"] = draw(st.sampled_from(choices))
    if body.get("logprobs"):
        body["top_logprobs"] = draw(st.none() | st.integers(0, 20))
    if messages[-1]["role"] == "assistant" and not body.get("add_generation_prompt"):
        body["continue_final_message"] = draw(st.booleans())
    return body


@st.composite
def spoiled_bodies(draw: st.DrawFn, endpoint: Endpoint) -> dict[str, Any]:
    """A valid body in which a value, a name or an entry is another one than it should be."""
    body = copy.deepcopy(draw(valid_bodies(endpoint)))
    known = st.sampled_from(sorted(FIELD_USES[endpoint]))
    for _ in range(draw(st.integers(1, 2))):
        paths = list(places(body))
        *path, last = draw(st.sampled_from(paths)) if paths else [draw(known)]
        parent: Any = body
        for step in path:
            parent = parent[step]
        match draw(st.integers(0, 3)):
            case 0:
                parent[last] = draw(JUNK)
            case 1 if paths:
                del parent[last]
            case 2 if isinstance(parent, dict):
                parent[draw(TEXT)] = draw(JUNK)
            case _:
                body[draw(known)] = draw(JUNK)
    return body


def places(value: Any) -> list[Place]:
    if not isinstance(value, dict | list):
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [path for key, below in items for path in ((key,), *((key, *p) for p in places(below)))]


ENDPOINTS = st.sampled_from(Endpoint)
VALID = ENDPOINTS.flatmap(lambda endpoint: st.tuples(st.just(endpoint), valid_bodies(endpoint)))
SPOILED = ENDPOINTS.flatmap(lambda endpoint: st.tuples(st.just(endpoint), spoiled_bodies(endpoint)))


def check_valid(endpoint: Endpoint, body: dict[str, Any]) -> None:
    request = parse_request(endpoint, body)
    assert parse_request(endpoint, load_json(json.dumps(body))) == request
    assert parse_request(endpoint, load_json(json.dumps(body)), is_clean=True) == request


def check_any(endpoint: Endpoint, body: dict[str, Any]) -> None:
    before = copy.deepcopy(body)
    try:
        request = parse_request(endpoint, body)
    except RequestError as error:
        check_refusal(error)
    else:
        assert isinstance(request, Request)
        if is_json(body):
            assert parse_request(endpoint, load_json(json.dumps(body))) == request
    assert repr(body) == repr(before)


def is_json(body: dict[str, Any]) -> bool:
    """Whether no NaN or infinity was put where any value may be."""
    try:
        json.dumps(body, allow_nan=False)
    except ValueError:
        return False
    return True


def check_refusal(error: RequestError) -> None:
    assert error.param is not None
    assert error.message.startswith((f"'{error.param}' ", f"unknown field {error.param!r}"))
    assert error.status_code == 400
    assert len(error.message) < 2_000
    json.dumps(error.to_error(), ensure_ascii=False).encode()


@given(VALID)
@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_valid_body_is_a_request_and_survives_json(case: tuple[Endpoint, Any]) -> None:
    check_valid(*case)


@given(SPOILED)
@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_spoiled_body_is_a_request_or_a_refusal_that_names_the_field(
    case: tuple[Endpoint, Any],
) -> None:
    check_any(*case)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(VALID | SPOILED)
@settings(
    max_examples=NUM_EXAMPLES_SLOW, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
def test_thousands_of_bodies_are_requests_or_refusals(case: tuple[Endpoint, Any]) -> None:
    check_any(*case)


@pytest.mark.parametrize("endpoint", Endpoint)
def test_these_tests_know_every_supported_field(endpoint: Endpoint) -> None:
    supported = {name for name, use in FIELD_USES[endpoint].items() if use is FieldUse.SUPPORTED}
    built = {"response_format", "structured_outputs", "prompt", "best_of", "messages", "tools"}
    built |= {"tool_choice", "top_logprobs", "continue_final_message"}
    assert supported <= {*SHARED_FIELDS, *OWN_FIELDS[endpoint], *built}
