"""The two fields that bind the form of an answer: ``response_format``, ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from queue_service import constraints
from queue_service.constraints import Constraint
from queue_service.errors import RequestError
from queue_service.json_text import load_json
from queue_service.tool_fields import Identifier
from queue_service.validation import Body, refuse


def _schema(value: Any) -> Constraint | None:
    if not isinstance(value, dict):
        refuse("must be an object")
    return _made(constraints.json_schema, value)


def _schema_or_text(value: Any) -> Constraint | None:
    if value is None:
        return None
    if not isinstance(value, str):
        return _schema(value)
    try:
        schema = load_json(value)
    except ValueError as exc:
        refuse("must be a JSON schema: {reason}", reason=str(exc))
    return _schema(schema)


def _regex(value: Any) -> Constraint | None:
    return _made(constraints.regex, _text(value))


def _grammar(value: Any) -> Constraint | None:
    return _made(constraints.grammar, _text(value))


def _choice(value: Any) -> Constraint | None:
    if value is not None and (
        not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value)
    ):
        refuse("must be a list of strings")
    return _made(constraints.choice, value)


def _any_object(value: Any) -> Constraint | None:
    if value is not None and not isinstance(value, bool):
        refuse("must be true or false")
    return constraints.json_object() if value else None


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        refuse("must be a string")
    return value


def _made(make: Callable[[Any], Constraint], value: Any) -> Constraint | None:
    if value is None:
        return None
    try:
        return make(value)
    except RequestError as exc:
        refuse("is refused: {reason}", code=exc.code, reason=exc.message)


class JsonSchemaFormat(Body):
    """A schema that the answer has to follow, ``strict`` or not."""

    name: Identifier
    description: str | None = None
    strict: bool | None = None
    constraint: Annotated[Constraint, BeforeValidator(_schema), Field(alias="schema")]


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            refuse("is required", at=("json_schema",))
        if self.type != "json_schema" and self.json_schema is not None:
            refuse("belongs to the type 'json_schema' only", at=("json_schema",))
        return self

    @property
    def constraint(self) -> Constraint | None:
        """Return what the answer has to follow; None for text."""
        if self.json_schema is not None:
            return self.json_schema.constraint
        return constraints.json_object() if self.type == "json_object" else None


class StructuredOutputs(Body):
    """vLLM's way to ask for a form: one of five."""

    json_schema: Annotated[
        Constraint | None, BeforeValidator(_schema_or_text), Field(alias="json")
    ] = None
    regex: Annotated[Constraint | None, BeforeValidator(_regex)] = None
    choice: Annotated[Constraint | None, BeforeValidator(_choice)] = None
    grammar: Annotated[Constraint | None, BeforeValidator(_grammar)] = None
    json_object: Annotated[Constraint | None, BeforeValidator(_any_object)] = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(constraint is not None for constraint in self._all()) != 1:
            refuse("must hold one of 'json', 'regex', 'choice', 'grammar' and 'json_object'")
        return self

    @property
    def constraint(self) -> Constraint:
        """Return what the answer has to follow."""
        return next(constraint for constraint in self._all() if constraint is not None)

    def _all(self) -> tuple[Constraint | None, ...]:
        return (self.json_schema, self.regex, self.choice, self.grammar, self.json_object)
