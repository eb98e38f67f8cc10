"""The bodies of the two endpoints: what a request may say, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from queue_service import tasks
from queue_service.constraint_fields import ResponseFormat, StructuredOutputs
from queue_service.constraints import Constraint
from queue_service.errors import RequestError
from queue_service.json_text import quoted, replace_surrogates, shortened
from queue_service.messages import Message
from queue_service.tool_fields import AUTO, ToolChoiceField, Tools
from queue_service.validation import Body, described, refuse

MAX_STOP_STRINGS = 4
MAX_CHOICES = 1024

# No leading zeros, so that two keys are never the same id.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")
_MAX_BIAS = 100


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
        return _ENDPOINTS.get(name)


_ENDPOINTS = {endpoint.function: endpoint for endpoint in Endpoint}


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        refuse("must be a string or a list of strings")
    stops = tuple(s for s in strings if s)
    if len(stops) > MAX_STOP_STRINGS:
        refuse("may hold at most {most} strings", most=MAX_STOP_STRINGS)
    return stops


def _top_k(value: Any) -> Any:
    # Both stand for "off"; True == 1, but that is for the type check to refuse.
    if type(value) is int:
        if value in (0, -1):
            return 0
        if value < 0:
            refuse("must be at least 1, or 0 or -1 for off")
    return value


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        refuse("must be an object of token ids and numbers")
    biases = []
    for key, bias in value.items():
        if not isinstance(key, str) or not _TOKEN_ID.fullmatch(key):
            refuse("is no token id: they are decimal numbers from 0", at=(key,))
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            refuse("must be a number", at=(key,))
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            refuse("must be from -{most} to {most}", at=(key,), most=_MAX_BIAS)
        biases.append((int(key), float(bias)))
    return tuple(sorted(biases))


def _string_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _messages(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        refuse("must be a list")
    if not value:
        refuse("must hold at least one message")
    return value


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not value:
        refuse("must be a text, a list of token ids, or a list of such prompts")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list | tuple) for item in value):
        return tuple(_token_ids(item, index) for index, item in enumerate(value))
    return (_token_ids(value),)


def _token_ids(value: list[Any] | tuple[Any, ...], *at: int) -> tuple[int, ...]:
    if not value or not all(type(token) is int and token >= 0 for token in value):
        refuse("must hold token ids only: integers from 0, at least one", at=at)
    return tuple(value)


_Penalty = Annotated[float | None, Field(ge=-2, le=2, allow_inf_nan=False)]
_Probability = Annotated[float | None, Field(ge=0, le=1, allow_inf_nan=False)]
# Says nothing about the answer, so what is no name is no error.
_Hint = Annotated[str | None, BeforeValidator(_string_or_none)]


class _SampledRequest(Body):
    """What both endpoints share. None is "unset": the worker's or the model's default applies."""

    model: Annotated[str | None, Field(min_length=1)] = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0
    session_id: _Hint = None
    prompt_cache_key: _Hint = None

    max_tokens: Annotated[int | None, Field(ge=1)] = None
    min_tokens: Annotated[int | None, Field(ge=0)] = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_strings)] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()
    ignore_eos: bool = False

    temperature: Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)] = None
    top_p: _Probability = None
    top_k: Annotated[int | None, BeforeValidator(_top_k)] = None
    min_p: _Probability = None
    xtc_probability: _Probability = None
    xtc_threshold: Annotated[float | None, Field(ge=0, le=0.5, allow_inf_nan=False)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    frequency_penalty: _Penalty = None
    presence_penalty: _Penalty = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10, allow_inf_nan=False)] = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_logit_bias)] = ()

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        limit = self.token_limit
        if self.min_tokens is not None and limit is not None and self.min_tokens > limit:
            refuse("must be at most the token limit, {limit}", at=("min_tokens",), limit=str(limit))
        if self.structured_outputs and self.response_format and self.response_format.constraint:
            refuse("cannot be used together with 'response_format'", at=("structured_outputs",))
        return self

    @property
    def token_limit(self) -> int | None:
        """Return the most tokens to generate; None is "until a stop or the context's end"."""
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return up to four non-empty strings that end the answer."""
        return self.stop

    @property
    def constraint(self) -> Constraint | None:
        """Return what the answer's text has to follow; None for free text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.constraint
        return None if self.response_format is None else self.response_format.constraint

    @property
    def session(self) -> str | None:
        """Return ``session_id``, else ``prompt_cache_key``: requests likely to share prefixes.

        A hint and no more: what is no string, or empty, counts as not there.
        """
        return self.session_id or self.prompt_cache_key


class ChatRequest(_SampledRequest):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[tuple[Message, ...], BeforeValidator(_messages), Field(strict=False)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: Tools = ()
    tool_choice: ToolChoiceField = AUTO
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    thinking_budget: Annotated[int | None, Field(ge=0)] = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    parse_special_tokens: bool = False

    @model_validator(mode="before")
    @classmethod
    def _continue_or_open(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if fields.get("continue_final_message") is True:
            return {"add_generation_prompt": False, **fields}
        return fields

    @model_validator(mode="after")
    def _chat_fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            refuse("needs 'logprobs' to be true", at=("top_logprobs",))
        if self.continue_final_message and self.messages[-1].role != "assistant":
            refuse("needs a last message of the assistant", at=("continue_final_message",))
        if self.continue_final_message and self.add_generation_prompt:
            refuse(
                "must be false where 'continue_final_message' is true",
                at=("add_generation_prompt",),
            )
        return self

    @property
    def token_limit(self) -> int | None:
        """Return ``max_completion_tokens``, else ``max_tokens``, else None."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Return how many likeliest tokens to tell beside each token; None: no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the turns as chat templates read them.

        Text parts are joined to one string, ``developer`` is ``system``, and the arguments of
        tool calls are objects.
        """
        return [message.template_message() for message in self.messages]

    def tools_for_template(self) -> list[dict[str, Any]]:
        """Return the tools in OpenAI's form, as chat templates read them."""
        return [tool.template_tool() for tool in self.tools]


class CompletionRequest(_SampledRequest):
    """The body of ``/v1/completions``; each prompt is a text or a non-empty tuple of token ids."""

    prompts: Annotated[
        tuple[str | tuple[int, ...], ...], BeforeValidator(_prompts), Field(alias="prompt")
    ]
    echo: bool = False
    best_of: int | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None

    @model_validator(mode="after")
    def _choices_agree(self) -> Self:
        if len(self.prompts) * self.n > MAX_CHOICES:
            refuse(
                "asks for more than {most} answers in one line", at=("prompt",), most=MAX_CHOICES
            )
        if self.best_of is not None and self.best_of != self.n:
            refuse("must be the same as 'n'; nothing else is supported", at=("best_of",))
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """Return how many likeliest tokens to tell beside each token; None: no logprobs at all."""
        return self.logprobs


Request = ChatRequest | CompletionRequest

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

# Fields that an endpoint may know but not support, with the values that change nothing: clients
# send those without being asked. None is neutral everywhere.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "parallel_tool_calls": (True, False),
    "parse_special_tokens": (True,),
    "reasoning_effort": (),
    "suffix": ("",),
    "thinking_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "xtc_special_tokens": ([],),
}
_USE_INSTEAD: Mapping[str, str] = {
    "function_call": "tool_choice",
    "functions": "tools",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
}


class FieldUse(StrEnum):
    """What an endpoint does with a field that it knows."""

    SUPPORTED = "supported"
    IGNORED = "ignored"
    REFUSED = "refused"


_MODELS: Mapping[Endpoint, type[ChatRequest] | type[CompletionRequest]] = {
    Endpoint.CHAT: ChatRequest,
    Endpoint.COMPLETIONS: CompletionRequest,
}


def _uses(model: type[ChatRequest] | type[CompletionRequest]) -> dict[str, FieldUse]:
    supported = [field.alias or name for name, field in model.model_fields.items()]
    return {
        **dict.fromkeys(_NEUTRAL_VALUES, FieldUse.REFUSED),
        **dict.fromkeys(HARMLESS_FIELDS, FieldUse.IGNORED),
        **dict.fromkeys(supported, FieldUse.SUPPORTED),
    }


FIELD_USES: Mapping[Endpoint, Mapping[str, FieldUse]] = {
    endpoint: _uses(model) for endpoint, model in _MODELS.items()
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
    uses = FIELD_USES[endpoint]
    fields: dict[str, Any] = {}
    problems: list[RequestError] = []
    for name, value in body.items():
        use = uses.get(name)
        if use is None:
            problems.append(RequestError(f"unknown field {quoted(name)}", param=shortened(name)))
        elif value is None or use is FieldUse.IGNORED:
            continue
        elif use is FieldUse.SUPPORTED:
            fields[name] = value
        elif not any(_same(value, neutral) for neutral in _NEUTRAL_VALUES[name]):
            problems.append(RequestError(_refusal(endpoint, name), param=name))
    try:
        request = _MODELS[endpoint].model_validate(fields)
    except ValidationError as exc:
        problems += described(exc)
    if problems:
        first = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RequestError(first.message + more, param=first.param, code=first.code)
    return request


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _refusal(endpoint: Endpoint, name: str) -> str:
    refusal = f"'{name}' is not supported by {endpoint}"
    return f"{refusal}; use '{_USE_INSTEAD[name]}'" if name in _USE_INSTEAD else refusal
