"""The tools of a chat: the functions that the model may call, and which it has to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from queue_service.validation import Body, refuse

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _identifier(value: str) -> str:
    if not _NAME.fullmatch(value):
        refuse("must be 1 to 64 letters, digits, underscores or hyphens")
    return value


Identifier = Annotated[str, AfterValidator(_identifier)]


class FunctionTool(Body):
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: Identifier
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """One entry of ``tools``."""

    type: Literal["function"]
    function: FunctionTool

    def template_tool(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form; what the client left out is left out here."""
        return self.model_dump(exclude_none=True)


class ToolChoiceMode(StrEnum):
    """Whether the answer may, must or must not call tools; NAMED is one certain function."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What ``tool_choice`` asks for; ``name`` is the function's when the mode is NAMED."""

    mode: ToolChoiceMode
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.name is not None) != (self.mode is ToolChoiceMode.NAMED):
            raise ValueError("a tool choice has a name when its mode is NAMED, and only then")


def _distinct(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in seen:
            refuse(
                "is '{name}' for the second time; names of tools must differ",
                at=(index, "function", "name"),
                name=name,
            )
        seen.add(name)
    return tools


Tools = Annotated[tuple[Tool, ...], Field(strict=False), AfterValidator(_distinct)]


AUTO = ToolChoice(ToolChoiceMode.AUTO)
_NONE = ToolChoice(ToolChoiceMode.NONE)


def _tool_choice(value: Any, info: ValidationInfo) -> ToolChoice:
    choice = value if isinstance(value, ToolChoice) else _parsed_choice(value)
    tools: tuple[Tool, ...] | None = info.data.get("tools")
    if tools is None:  # refused already
        return choice
    if choice.mode is ToolChoiceMode.AUTO and not tools:
        return _NONE
    if choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED) and not tools:
        refuse("asks for a tool call, but there are no 'tools'")
    if choice.name is not None and choice.name not in {tool.function.name for tool in tools}:
        refuse("is not the name of one of the 'tools'", at=("function", "name"))
    return choice


def _parsed_choice(value: Any) -> ToolChoice:
    if value in ("none", "auto", "required"):
        return ToolChoice(ToolChoiceMode(value))
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or value != {"type": "function", "function": {"name": name}}:
        refuse("must be 'none', 'auto', 'required' or an object that names one function")
    return ToolChoice(ToolChoiceMode.NAMED, name)


# For a field after one called `tools`, which it is checked against; without tools, auto is none.
ToolChoiceField = Annotated[ToolChoice, BeforeValidator(_tool_choice), Field(validate_default=True)]
