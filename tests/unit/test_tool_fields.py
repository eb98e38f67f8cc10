"""The tools of a chat and the choice among them."""

from __future__ import annotations

from typing import Any

import pytest

from queue_service.tool_fields import ToolChoice, ToolChoiceMode
from tests.request_helpers import chat, chat_refusal

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "default": None}}}


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_the_template_gets_tools_as_they_were_given() -> None:
    tools = [
        tool("weather", description="Tells the weather.", parameters=SCHEMA, strict=True),
        tool("a-b_C9"),
    ]
    assert chat(tools=tools).tools_for_template() == tools
    assert chat().tools_for_template() == []
    assert chat(tools=[]) == chat()


def test_null_in_a_tool_is_the_same_as_nothing() -> None:
    nulls: dict[str, Any] = {"description": None, "parameters": None, "strict": None}
    assert chat(tools=[tool(**nulls)]).tools_for_template() == [tool()]


@pytest.mark.parametrize("name", ["x", "x" * 64, "get_weather-2"])
def test_a_tools_name_is_an_identifier(name: str) -> None:
    assert chat(tools=[tool(name)]).tools[0].function.name == name


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "a.b", "ä", "a\n"])
def test_any_other_name_of_a_tool_is_refused(name: str) -> None:
    error = chat_refusal(tools=[tool(name)])
    assert error.param == "tools.0.function.name"
    assert "must be 1 to 64 letters, digits" in str(error)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ({}, "tools"),
        (["f"], "tools.0"),
        ([None], "tools.0"),
        ([{"function": {"name": "f"}}], "tools.0.type"),
        ([{"type": "retrieval"}], "tools.0.type"),
        ([{"type": "function"}], "tools.0.function"),
        ([{"type": "function", "function": "f"}], "tools.0.function"),
        ([{"type": "function", "function": {}}], "tools.0.function.name"),
        ([tool(name=7)], "tools.0.function.name"),
        ([tool(description=7)], "tools.0.function.description"),
        ([tool(parameters=[])], "tools.0.function.parameters"),
        ([tool(parameters="{}")], "tools.0.function.parameters"),
        ([tool(strict="yes")], "tools.0.function.strict"),
        ([tool(mood=1)], "tools.0.function.mood"),
        ([{**tool(), "mood": 1}], "tools.0.mood"),
        ([tool("f"), tool("g"), tool("f")], "tools.2.function.name"),
    ],
)
def test_a_bad_tool_is_refused_with_its_path(tools: Any, param: str) -> None:
    error = chat_refusal(tools=tools)
    assert error.param == param
    assert str(error).startswith(f"'{param}' ")


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, ToolChoice(ToolChoiceMode.NONE)),
        ({"tool_choice": "none"}, ToolChoice(ToolChoiceMode.NONE)),
        ({"tool_choice": "auto"}, ToolChoice(ToolChoiceMode.NONE)),
        ({"tools": [tool()]}, ToolChoice(ToolChoiceMode.AUTO)),
        ({"tools": [tool()], "tool_choice": "auto"}, ToolChoice(ToolChoiceMode.AUTO)),
        ({"tools": [tool()], "tool_choice": "none"}, ToolChoice(ToolChoiceMode.NONE)),
        ({"tools": [tool()], "tool_choice": "required"}, ToolChoice(ToolChoiceMode.REQUIRED)),
        (
            {"tools": [tool("f"), tool("g")], "tool_choice": named("g")},
            ToolChoice(ToolChoiceMode.NAMED, "g"),
        ),
    ],
)
def test_the_tool_choice_is_auto_with_tools_and_none_without(
    fields: dict[str, Any], choice: ToolChoice
) -> None:
    assert chat(**fields).tool_choice == choice


NO_CHOICES: list[Any] = [
    "any",
    7,
    True,
    [],
    {},
    {"type": "function"},
    {"type": "function", "function": "f"},
    {"type": "function", "function": {"name": 7}},
    {"type": "function", "function": {"name": "f", "mood": 1}},
    {**named("f"), "mood": 1},
    {"type": "allowed_tools", "function": {"name": "f"}},
]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "there are no 'tools'"),
        ({"tool_choice": named("f")}, "tool_choice", "there are no 'tools'"),
        (
            {"tools": [tool()], "tool_choice": named("g")},
            "tool_choice.function.name",
            "not the name of one of the 'tools'",
        ),
        *(
            ({"tools": [tool()], "tool_choice": choice}, "tool_choice", "must be 'none', 'auto'")
            for choice in NO_CHOICES
        ),
    ],
)
def test_any_other_tool_choice_is_refused(fields: dict[str, Any], param: str, words: str) -> None:
    error = chat_refusal(**fields)
    assert error.param == param
    assert words in str(error)


def test_bad_tools_are_the_only_problem_of_a_choice_among_them() -> None:
    assert str(chat_refusal(tools=[7], tool_choice=named("f"))) == "'tools.0' must be an object"


def test_tool_calls_are_parallel_unless_forbidden() -> None:
    assert chat(tools=[tool()]).parallel_tool_calls is True
    assert chat(tools=[tool()], parallel_tool_calls=False).parallel_tool_calls is False
    assert chat_refusal(parallel_tool_calls="no").param == "parallel_tool_calls"


@pytest.mark.parametrize(
    ("mode", "name"), [(ToolChoiceMode.NAMED, None), (ToolChoiceMode.AUTO, "f")]
)
def test_a_choice_has_a_name_when_it_is_of_one_function(
    mode: ToolChoiceMode, name: str | None
) -> None:
    with pytest.raises(ValueError, match="only then"):
        ToolChoice(mode, name)
