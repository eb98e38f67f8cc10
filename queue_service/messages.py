"""The turns of a chat: what they may hold, and how chat templates read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from queue_service.json_text import load_json, quoted
from queue_service.validation import Body, refuse


def _content(value: Any, info: ValidationInfo) -> str | None:
    if isinstance(value, str):
        return value
    if value is None:
        role = info.data.get("role", "assistant")
        calls = info.data.get("tool_calls", True)
        if role == "assistant" and calls:
            return None
        refuse("is required; only an assistant turn with tool_calls may leave it out")
    if not isinstance(value, list):
        refuse("must be a string or a list of text parts")
    return "".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        refuse("must be a string or a list of text parts")
    kind, text = part["type"], part.get("text")
    if kind != "text":
        refuse("has a part of type {kind}; only text parts are supported", kind=quoted(kind))
    if not isinstance(text, str):
        refuse("has a text part whose 'text' is not a string")
    return text


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value:
        return {}
    try:
        return load_json(value)
    except ValueError as exc:
        refuse("must be a JSON object: {reason}", reason=str(exc))


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


class Message(Body):
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
