"""Constraints as a request states them: what is refused before anything is queued, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from queue_service.constraints import (
    MAX_CHOICES,
    MAX_SCHEMA_DEPTH,
    MAX_SOURCE_BYTES,
    MAX_SUBSCHEMAS,
    Constraint,
    ConstraintKind,
    choice,
    grammar,
    json_object,
    json_schema,
    regex,
)
from queue_service.errors import RequestError


def refusal(make: Callable[..., Constraint], *args: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(*args)
    assert caught.value.param is None
    return caught.value


def source(schema: dict[str, Any]) -> Any:
    return json.loads(json_schema(schema).source)


def test_a_name_without_end_is_cut_in_the_message() -> None:
    assert len(refusal(json_schema, {"x" * 50_000: 1}).message) <= 500


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_equal_schemas_are_one_constraint_whatever_their_annotations() -> None:
    plain = json_schema({"type": "object", "properties": {"a": {"type": "string"}}})
    noted = json_schema(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$id": "not a uri",
            "title": "T",
            "x-order": 1,
            "type": "object",
            "properties": {"a": {"type": "string", "description": "d", "default": "é"}},
        }
    )
    assert plain == noted
    assert len({plain, noted}) == 1
    assert plain.kind is ConstraintKind.JSON_SCHEMA


def test_the_order_of_properties_is_kept_because_it_is_the_order_of_the_answer() -> None:
    one = json_schema({"properties": {"b": True, "a": True}})
    other = json_schema({"properties": {"a": True, "b": True}})
    assert one != other


def test_a_property_may_have_the_name_of_an_annotation() -> None:
    schema = {"properties": {"title": {"type": "string"}, "x-y": True}, "required": ["title"]}
    assert source(schema) == schema


def test_whole_numbers_are_written_as_such() -> None:
    schema = {"minLength": 2.0, "enum": [1.0, 1.5, -0.0, True]}
    assert json_schema(schema).source == '{"minLength":2,"enum":[1,1.5,0,true]}'


def test_a_format_of_something_that_is_no_string_says_nothing() -> None:
    assert source({"type": "integer", "format": "int32"}) == {"type": "integer"}
    assert source({"type": ["integer", "null"], "format": "int64"}) == {"type": ["integer", "null"]}


@pytest.mark.parametrize(
    "keyword",
    [
        "additionalItems",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "minimun",
        "not",
        "nullable",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
        "x-guidance",
        "$dynamicRef",
        "$recursiveRef",
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_refused_with_its_name_and_place(keyword: str) -> None:
    error = refusal(json_schema, {"properties": {"a/b": {"anyOf": [{keyword: True}]}}})
    assert error.code == "invalid_schema"
    assert repr(keyword) in error.message
    assert f"#/properties/a~1b/anyOf/0/{keyword}" in error.message


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "text"}, "#/type must be one of"),
        ({"type": []}, "#/type must be one of"),
        ({"properties": []}, "#/properties must be an object"),
        ({"properties": {"a": 1}}, "#/properties/a must be a schema"),
        ({"anyOf": []}, "#/anyOf must be a list"),
        ({"anyOf": {}}, "#/anyOf must be a list"),
        ({"items": [{}]}, "prefixItems"),
        ({"enum": []}, "#/enum must be a list"),
        ({"required": "a"}, "#/required must be a list"),
        ({"minLength": -1}, "#/minLength must be a whole number"),
        ({"minLength": True}, "#/minLength must be a whole number"),
        ({"maxItems": 1.5}, "#/maxItems must be a whole number"),
        ({"maxItems": float("inf")}, "#/maxItems must be a whole number"),
        ({"minimum": "3"}, "#/minimum must be a number"),
        ({"exclusiveMinimum": True}, "#/exclusiveMinimum must be a number"),
        ({"multipleOf": 0}, "#/multipleOf must be a number above 0"),
        ({"minimum": float("nan")}, "#/minimum has too many digits"),
        ({"maximum": 10**400}, "#/maximum has too many digits"),
        ({"const": 1e300}, "#/const has too many digits"),
        ({"const": [0.1234567890123456]}, "#/const has too many digits"),
        ({"enum": ["\x00"]}, "#/enum has a control character"),
        ({"properties": {"a\x01": {}}}, "#/properties has a control character"),
        ({"pattern": 1}, "#/pattern must be a string"),
        ({"pattern": "(?=a)"}, "#/pattern has a look-around"),
        ({"pattern": r"(a)\1"}, "#/pattern has a back-reference"),
        ({"patternProperties": {r"\bid": {}}}, "word boundary"),
        ({"type": "string", "format": "binary"}, "the format 'binary' at #/format"),
        ({"format": "idn-email"}, "the format 'idn-email'"),
        ({"$ref": "#/$defs/a"}, "leads to #/$defs/a"),
        ({"$ref": "#/$defs/a", "$defs": {"b": {}}}, "leads to #/$defs/a"),
        ({"$ref": "#/properties", "properties": {}}, "leads to #/properties"),
        ({"$ref": "#anchor"}, "#/$ref must lead to a place in this document"),
        ({"$ref": "http://example.com/s"}, "#/$ref must lead to a place in this document"),
        ({"$defs": {"a": {"$id": "http://example.com/a"}}}, "$id"),
        ({"minProperties": 2}, "minProperties"),
        ({"const": (1,)}, "tuple"),
        ({"const": {1: 2}}, "a name that is not a string"),
        ({"const": "\ud800"}, "lone surrogate"),
        (nested(MAX_SCHEMA_DEPTH), f"more than {MAX_SCHEMA_DEPTH} levels"),
        ({"prefixItems": [{}] * MAX_SUBSCHEMAS}, f"more than {MAX_SUBSCHEMAS} subschemas"),
        ({"enum": [{}] * MAX_SUBSCHEMAS}, f"more than {MAX_SUBSCHEMAS} subschemas"),
        ({"const": "x" * MAX_SOURCE_BYTES}, "bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_schema_is_refused_with_what_is_wrong(schema: dict[str, Any], said: str) -> None:
    error = refusal(json_schema, schema)
    assert error.code == "invalid_schema"
    assert said in error.message


def test_a_schema_too_deep_for_any_recursion_is_refused() -> None:
    assert "levels" in refusal(json_schema, nested(100_000)).message


def test_references_lead_anywhere_in_the_document() -> None:
    schema = {
        "$ref": "#/$defs/a~1b%25",
        "$defs": {
            "a/b%": {"properties": {"self": {"$ref": "#"}, "it": {"$ref": "#/definitions/c"}}}
        },
        "definitions": {"c": {"items": {"$ref": "#/definitions/c"}}},
    }
    assert source(schema) == schema


def test_one_of_is_any_of_when_a_tag_or_the_type_tells_the_options_apart() -> None:
    options = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}]
    definitions = {
        name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
        for name in ("cat", "dog")
    }
    assert source({"oneOf": options, "$defs": definitions}) == {
        "anyOf": options,
        "$defs": definitions,
    }


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"type": "object"}, {"type": "object"}],
        [{"type": "string"}, {}],
        [{"type": "string"}, {"$ref": "#"}],
        [
            {"type": "object", "required": ["k"], "properties": {"k": {"enum": ["a", "b"]}}},
            {"type": "object", "required": ["k"], "properties": {"k": {"const": "b"}}},
        ],
        [
            {"type": "object", "properties": {"k": {"const": "a"}}},
            {"type": "object", "properties": {"k": {"const": "b"}}},
        ],
    ],
    ids=str,
)
def test_one_of_stays_for_the_compiler_to_judge_when_options_may_overlap(options: Any) -> None:
    assert source({"oneOf": options}) == {"oneOf": options}


def test_any_object_is_a_constraint_of_its_own() -> None:
    assert json_object().kind is ConstraintKind.JSON_OBJECT
    assert json.loads(json_object().source) == {"type": "object"}


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("", "not empty"),
        (None, "not empty"),
        (r"a\b", r"(\b)"),
        ("a(?!b)", "look-around"),
        ("(?<=a)b", "look-around"),
        (r"(a)\1", "back-reference"),
        ("\udc00", "lone surrogate"),
        ("a" * (MAX_SOURCE_BYTES + 1), "bytes"),
    ],
)
def test_a_regex_that_cannot_be_enforced_is_refused(pattern: Any, said: str) -> None:
    assert said in refusal(regex, pattern).message


@pytest.mark.parametrize("pattern", [r"[(?=\b]+", r"\\b", r"(?:a|b)", r"(?i)a", r"[]\1]", r"^a$"])
def test_what_only_looks_like_it_is_no_look_around(pattern: str) -> None:
    assert regex(pattern).source == pattern


@pytest.mark.parametrize("pattern", ["[" * 60_000, "[\\" * 30_000, "(?" * 30_000])
def test_reading_a_regex_takes_no_longer_than_it_is_long(pattern: str) -> None:
    assert regex(pattern).kind is ConstraintKind.REGEX


@pytest.mark.parametrize(
    "options",
    [[], "ab", [""], ["a", 1], None, [str(i) for i in range(MAX_CHOICES + 1)], ["x" * 70_000]],
    ids=lambda value: str(value)[:20],
)
def test_choices_that_are_none_or_too_many_are_refused(options: Any) -> None:
    assert refusal(choice, options).code == "invalid_request"


def test_choices_keep_their_order_and_lose_their_doubles() -> None:
    assert json.loads(choice(["b", "a", "b"]).source) == ["b", "a"]


def test_a_grammar_is_refused_when_empty_or_too_large() -> None:
    assert grammar('start: "a"').kind is ConstraintKind.GRAMMAR
    assert refusal(grammar, " \n").code == "invalid_request"
    assert refusal(grammar, "a" * (MAX_SOURCE_BYTES + 1)).code == "invalid_request"
