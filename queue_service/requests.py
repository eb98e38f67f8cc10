"""The bodies of the two endpoints: what a request may say, and what is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from queue_service import tasks
from queue_service.errors import RequestError

MAX_NESTING = 64
MAX_STOP_STRINGS = 4

_CONTAINERS = (dict, list, tuple)
_TOO_DEEP = f"nested deeper than {MAX_NESTING} levels"


class Endpoint(StrEnum):
    """The two urls that a request can be meant for."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"

    @property
    def function(self) -> str:
        """Return the name of the RQ function that runs a request of this endpoint."""
        return tasks.CHAT if self is Endpoint.CHAT else tasks.COMPLETION

    @classmethod
    def of_function(cls, name: str) -> Endpoint | None:
        """Return the endpoint whose requests the RQ function runs; None for any other function."""
        return next((endpoint for endpoint in cls if endpoint.function == name), None)


def _refuse(sentence: str, **context: Any) -> NoReturn:
    """Refuse the field under validation; the sentence goes on after the field's name."""
    raise PydanticCustomError("refused", sentence, context or None)


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        _refuse("must be a string or a list of strings")
    stops = tuple(s for s in strings if s)
    if len(stops) > MAX_STOP_STRINGS:
        _refuse("may hold at most {most} strings", most=MAX_STOP_STRINGS)
    return stops


def _content(value: Any, info: ValidationInfo) -> str | None:
    if isinstance(value, str):
        return value
    if value is None:
        role = info.data.get("role", "assistant")
        calls = info.data.get("tool_calls", True)
        if role == "assistant" and calls:
            return None
        _refuse("is required; only an assistant turn with tool_calls may leave it out")
    if not isinstance(value, list):
        _refuse("must be a string or a list of text parts")
    return "".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        _refuse("must be a string or a list of text parts")
    kind, text = part["type"], part.get("text")
    if kind != "text":
        _refuse("has a part of type {kind}; only text parts are supported", kind=quoted(kind))
    if not isinstance(text, str):
        _refuse("has a text part whose 'text' is not a string")
    return text


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value:
        return {}
    try:
        return load_json(value)
    except ValueError as exc:
        _refuse("must be a JSON object: {reason}", reason=str(exc))


def _messages(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        _refuse("must be a list")
    if not value:
        _refuse("must hold at least one message")
    return value


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not value:
        _refuse("must be a string or a list of token ids")
    if all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    if all(isinstance(item, str | list | tuple) for item in value):
        _refuse("holds several prompts, which is not supported yet: one prompt per line")
    _refuse("must hold token ids only: integers from 0")


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class _Echoed(BaseModel):
    """Part of an earlier answer that a client sends back; keys that we do not read are dropped."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class FunctionCall(_Echoed):
    """The function that an earlier assistant turn called; its arguments are always an object."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)]


class ToolCall(_Echoed):
    """One tool call in the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def template_call(self) -> dict[str, Any]:
        """Return the call as chat templates read it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        call: dict[str, Any] = {"type": self.type, "function": function}
        if self.id is not None:
            call["id"] = self.id
        return call


class Message(_Body):
    """One turn of a chat. ``refusal`` and ``annotations`` of an echoed answer have no effect."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    # Before `content`, whose check looks at it.
    tool_calls: Annotated[tuple[ToolCall, ...] | None, Field(strict=False)] = None
    content: Annotated[str | None, BeforeValidator(_content), Field(validate_default=True)] = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: None = None
    function_call: None = None

    def template_message(self) -> dict[str, Any]:
        """Return the turn as chat templates read it; ``content`` is always a string."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.template_call() for call in self.tool_calls]
        return message


class _SampledRequest(_Body):
    """What both endpoints share. None is "unset": the worker's or the model's default applies."""

    model: Annotated[str | None, Field(min_length=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1, allow_inf_nan=False)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_strings)] = ()
    stream: bool = False

    @property
    def token_limit(self) -> int | None:
        """Return the most tokens to generate; None is "until a stop or the context's end"."""
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return up to four non-empty strings that end the answer."""
        return self.stop


class ChatRequest(_SampledRequest):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[tuple[Message, ...], BeforeValidator(_messages), Field(strict=False)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None

    @property
    def token_limit(self) -> int | None:
        """Return ``max_completion_tokens``, else ``max_tokens``, else None."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the turns as chat templates read them.

        Text parts are joined to one string, ``developer`` is ``system``, and the arguments of
        tool calls are objects.
        """
        return [message.template_message() for message in self.messages]


class CompletionRequest(_SampledRequest):
    """The body of ``/v1/completions``; ``prompt`` is a text or a non-empty tuple of token ids."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)]


Request = ChatRequest | CompletionRequest

_MODELS: Mapping[Endpoint, type[ChatRequest] | type[CompletionRequest]] = {
    Endpoint.CHAT: ChatRequest,
    Endpoint.COMPLETIONS: CompletionRequest,
}
_SUPPORTED_FIELDS = {endpoint: frozenset(model.model_fields) for endpoint, model in _MODELS.items()}

# Accepted with any value: they say nothing about the tokens of the answer.
HARMLESS_FIELDS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "stream_options",
        "user",
    }
)

# Fields that are known but not supported, with the values that change nothing: clients send
# those without being asked. None is neutral everywhere.
_UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "priority": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (0, -1),
    "top_logprobs": (0,),
    "xtc_probability": (0,),
    "xtc_special_tokens": ([],),
    "xtc_threshold": (0,),
}

# pydantic's kinds of error, as the end of a sentence that starts with the field.
_SENTENCES: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "extra_forbidden": "is an unknown field",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
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


def parse_request(
    endpoint: Endpoint, body: Mapping[str, Any], *, is_clean: bool = False
) -> Request:
    """Check the body of one request and return it, frozen.

    Null means "unset" for every field. Lone surrogates are replaced by U+FFFD.

    Args:
        is_clean: the body came from a reader that replaced surrogates and bounded the nesting.

    Raises:
        RequestError: the first problem in one sentence, how many more there are, and the
            dotted path of its field in ``param``.
    """
    if not isinstance(body, Mapping):
        raise RequestError("the body of a request must be an object")
    try:
        body = body if is_clean else replace_surrogates(dict(body))
    except ValueError as exc:
        raise RequestError(f"the body of the request is {exc}") from None
    supported = _SUPPORTED_FIELDS[endpoint]
    fields: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    for name, value in body.items():
        if name in supported:
            if value is not None:
                fields[name] = value
        elif name not in HARMLESS_FIELDS:
            _check_unsupported(name, value, problems)
    try:
        request = _MODELS[endpoint].model_validate(fields)
    except ValidationError as exc:
        problems += _described(exc)
    if problems:
        message, param = problems[0]
        if len(problems) > 1:
            message += f" (and {len(problems) - 1} more)"
        raise RequestError(message, param=param)
    return request


def load_json(text: str) -> Any:
    """Return the value of a JSON text, with lone surrogates replaced by U+FFFD.

    Raises:
        ValueError: not JSON (NaN, Infinity and numbers beyond a float are not), or nested
            deeper than MAX_NESTING; the message says which.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as exc:
        raise ValueError(f"not valid JSON: {exc.msg} at character {exc.pos + 1}") from None
    except _NumberError:
        raise
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError:
        raise ValueError("not valid JSON: an integer has too many digits") from None
    # Only an escape can make a lone surrogate, and only that many brackets can nest too deep.
    if "\\u" in text or text.count("{") + text.count("[") > MAX_NESTING:
        return replace_surrogates(value)
    return value


def replace_surrogates(value: Any) -> Any:
    """Return the value itself, or a copy in which U+FFFD stands for each lone surrogate.

    Raises:
        ValueError: nested deeper than MAX_NESTING.
    """
    return value if _encodes(value, MAX_NESTING) else _replaced(value, MAX_NESTING)


def quoted(value: Any) -> str:
    """Return a string in quotes, cut to 80 characters; the type's name for anything else."""
    return repr(shortened(value) if isinstance(value, str) else type(value).__name__)


def shortened(value: Any) -> str:
    """Return the value as text of at most 80 characters, so that no message carries a prompt."""
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_unsupported(name: Any, value: Any, problems: list[tuple[str, str]]) -> None:
    neutral = _UNSUPPORTED_FIELDS.get(name)
    if neutral is None:
        problems.append((f"unknown field {quoted(name)}", shortened(name)))
    elif value is not None and not any(_same(value, default) for default in neutral):
        problems.append((f"'{name}' is not supported yet", name))


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _described(exc: ValidationError) -> list[tuple[str, str]]:
    problems = []
    for error in exc.errors(include_url=False, include_input=False):
        path = ".".join(shortened(step) for step in error["loc"])
        sentence = error["msg"]
        if error["type"] != "refused":
            sentence = _SENTENCES.get(error["type"], "is not valid")
            sentence = sentence.format_map(
                {
                    name: f"{limit:g}" if isinstance(limit, float) else limit
                    for name, limit in error.get("ctx", {}).items()
                }
            )
        problems.append((f"'{path}' {sentence}", path))
    return problems


def _encodes(value: Any, levels: int) -> bool:
    if isinstance(value, str):
        if value.isascii():
            return True
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    if not isinstance(value, _CONTAINERS):
        return True
    if not levels:
        raise ValueError(_TOO_DEEP)
    if isinstance(value, dict):
        for key in value:
            if not _encodes(key, levels):
                return False
        value = value.values()
    for item in value:  # noqa: SIM110 (a loop takes half the time of all())
        if not _encodes(item, levels - 1):
            return False
    return True


def _replaced(value: Any, levels: int) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not isinstance(value, _CONTAINERS):
        return value
    if not levels:
        raise ValueError(_TOO_DEEP)
    if isinstance(value, dict):
        return {_replaced(k, levels): _replaced(v, levels - 1) for k, v in value.items()}
    return [_replaced(item, levels - 1) for item in value]


class _NumberError(ValueError):
    """A number that Python's decoder would take and JSON does not."""


def _refuse_constant(name: str) -> NoReturn:
    raise _NumberError(f"not valid JSON: {name} is no JSON number")


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _NumberError(f"not valid JSON: the number {shortened(text)} is out of range")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float)
