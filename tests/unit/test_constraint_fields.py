"""The fields that bind the form of an answer, and what becomes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from queue_service import constraints
from queue_service.constraints import Constraint
from queue_service.errors import RequestError
from tests.request_helpers import chat, chat_refusal, completion, completion_refusal

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GRAMMAR = 'start: "yes" | "no"'


def schema_format(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text", "json_schema": None}}, None),
        ({"response_format": {"type": "json_object"}}, constraints.json_object()),
        ({"response_format": schema_format()}, constraints.json_schema(SCHEMA)),
        (
            {"response_format": schema_format(strict=False, description="An answer.")},
            constraints.json_schema(SCHEMA),
        ),
        (
            {"response_format": schema_format(strict=None, description=None)},
            constraints.json_schema(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, constraints.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, constraints.json_schema(SCHEMA)),
        ({"structured_outputs": {"regex": "[a-z]+"}}, constraints.regex("[a-z]+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, constraints.choice(["yes", "no"])),
        ({"structured_outputs": {"grammar": GRAMMAR}}, constraints.grammar(GRAMMAR)),
        ({"structured_outputs": {"json_object": True}}, constraints.json_object()),
        (
            {"structured_outputs": {"regex": "a", "json": None, "json_object": False}},
            constraints.regex("a"),
        ),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
            constraints.regex("a"),
        ),
    ],
)
def test_a_request_has_the_constraint_that_it_asks_for(
    fields: dict[str, Any], constraint: Constraint | None
) -> None:
    assert chat(**fields).constraint == constraint
    assert completion(**fields).constraint == constraint


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("json_object", "response_format"),
        ([], "response_format"),
        ({}, "response_format.type"),
        ({"type": "yaml"}, "response_format.type"),
        ({"type": "json_object", "mood": 1}, "response_format.mood"),
        ({"type": "json_object", "json_schema": {}}, "response_format.json_schema.name"),
        (
            {**schema_format(), "type": "json_object"},
            "response_format.json_schema",
        ),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": 7}, "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "response_format.json_schema.name",
        ),
        (schema_format(name="a b"), "response_format.json_schema.name"),
        (schema_format(mood=1), "response_format.json_schema.mood"),
        (schema_format(strict="yes"), "response_format.json_schema.strict"),
        (schema_format("{}"), "response_format.json_schema.schema"),
        (schema_format(None), "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "a"}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_bad_response_format_is_refused_with_its_path(value: Any, param: str) -> None:
    error = chat_refusal(response_format=value)
    assert error.param == param
    assert str(error).startswith(f"'{param}' ")


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("json", "structured_outputs"),
        ({}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"mood": 1}, "structured_outputs.mood"),
        ({"json": 7}, "structured_outputs.json"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[]"}, "structured_outputs.json"),
        ({"json": "null"}, "structured_outputs.json"),
        ({"regex": 7}, "structured_outputs.regex"),
        ({"choice": "yes"}, "structured_outputs.choice"),
        ({"choice": ["yes", 7]}, "structured_outputs.choice"),
        ({"grammar": ["x"]}, "structured_outputs.grammar"),
        ({"json_object": 1}, "structured_outputs.json_object"),
    ],
)
def test_bad_structured_outputs_are_refused_with_their_path(value: Any, param: str) -> None:
    error = completion_refusal(structured_outputs=value)
    assert error.param == param
    assert str(error).startswith(f"'{param}' ")


def test_an_answer_has_one_form_at_most() -> None:
    error = chat_refusal(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert str(error) == "'structured_outputs' cannot be used together with 'response_format'"
    assert error.param == "structured_outputs"


@pytest.mark.parametrize(
    ("name", "fields", "param"),
    [
        (
            "json_schema",
            {"response_format": schema_format()},
            "response_format.json_schema.schema",
        ),
        ("json_schema", {"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ("regex", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ("choice", {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ("grammar", {"structured_outputs": {"grammar": "?"}}, "structured_outputs.grammar"),
    ],
)
def test_a_form_that_cannot_be_enforced_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, name: str, fields: dict[str, Any], param: str
) -> None:
    def too_much(_: Any) -> Constraint:
        raise RequestError("the {keyword} is too much", code="its_code")

    monkeypatch.setattr(constraints, name, too_much)
    error = chat_refusal(**fields)
    assert str(error) == f"'{param}' is refused: the {{keyword}} is too much"
    assert (error.code, error.param, error.status_code) == ("its_code", param, 400)


def test_a_schema_keyword_that_cannot_be_enforced_is_named() -> None:
    error = chat_refusal(response_format=schema_format({"not": {"type": "null"}}))
    assert "'not'" in str(error)
    assert error.param == "response_format.json_schema.schema"


def test_the_reason_of_a_refusal_is_not_endless() -> None:
    error = chat_refusal(structured_outputs={"json": {"x" * 100_000: 1}})
    assert len(str(error)) < 600
