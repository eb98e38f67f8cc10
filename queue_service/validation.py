"""What the models of a request body share: strict fields, and refusals as plain sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from queue_service.errors import RequestError
from queue_service.json_text import shortened

# pydantic's kinds of error, as the end of a sentence that starts with the field.
_SENTENCES: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "extra_forbidden": "is an unknown field",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be an integer",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "missing": "is required",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "none_required": "is not supported yet",
    "string_too_short": "must not be empty",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
}


class Body(BaseModel):
    """A JSON object with known fields of exact types; it cannot be changed."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


def refuse(
    sentence: str,
    *,
    at: tuple[str | int, ...] = (),
    code: str = "invalid_request",
    **context: Any,
) -> NoReturn:
    """Refuse what is under validation; call it from a pydantic validator.

    Args:
        sentence: goes on after the field's name; may use the names of ``context`` in braces.
        at: where the trouble lies below what is under validation.
        code: that of the RequestError.
    """
    raise PydanticCustomError("refused", sentence, {"at": at, "code": code, **context})


def described(exc: ValidationError) -> list[RequestError]:
    """Return each problem as an error whose sentence names the field."""
    problems = []
    for error in exc.errors(include_url=False, include_input=False):
        context = error.get("ctx", {})
        path = ".".join(shortened(step) for step in (*error["loc"], *context.get("at", ())))
        sentence = error["msg"]
        if error["type"] != "refused":
            sentence = _SENTENCES.get(error["type"], "is not valid")
            sentence = sentence.format_map(
                {
                    name: f"{limit:g}" if isinstance(limit, float) else limit
                    for name, limit in context.items()
                }
            )
        code = context.get("code", "invalid_request")
        problems.append(RequestError(f"'{path}' {sentence}", param=path, code=code))
    return problems
