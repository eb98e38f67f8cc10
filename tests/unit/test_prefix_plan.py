"""Which lines of a file begin alike, and where in a chat that beginning ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from queue_service import prefix_plan
from queue_service.prefix_plan import (
    LENGTHS,
    Cut,
    Lines,
    Mark,
    PrefixPlan,
    cut_after,
    plan_prefixes,
    prompt_text,
    prompt_text_of_line,
)
from tests.request_helpers import common_chars

LONG, OTHER = "a" * 700, "b" * 1500


def read_texts(*texts: str) -> Callable[[], Lines]:
    lines = [json.dumps({"prompt": text}).encode() for text in texts]
    return lambda: iter(list(enumerate(lines, 1)))


def marks(plan: PrefixPlan, count: int) -> list[int | None]:
    found = [plan.mark(index) for index in range(count)]
    return [None if mark is None else mark.chars for mark in found]


def turn(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def test_lines_that_begin_alike_get_the_length_of_what_they_share() -> None:
    texts = (LONG + "one", OTHER + "one", "short", LONG + "two", OTHER + "two", "c" * 600)
    plan = plan_prefixes(read_texts(*texts))
    assert marks(plan, 6) == [700, 1500, None, 700, 1500, None]
    assert plan.mark(0) == plan.mark(3)
    assert plan.mark(0) != plan.mark(1)
    assert (plan.num_groups, plan.num_lines) == (2, 4)
    assert plan.tokens_saved == (700 + 1500) // 4
    assert [(group.num_lines, group.first_line) for group in plan.groups()] == [(2, 2), (2, 1)]


def test_a_line_that_shares_less_has_a_mark_of_its_own() -> None:
    plan = plan_prefixes(read_texts(OTHER + "one", OTHER + "two", OTHER[:900] + "three" * 100))
    assert marks(plan, 3) == [1500, 1500, 900]
    assert plan.num_groups == 2


def test_a_beginning_below_the_least_length_is_none() -> None:
    text = "a" * (LENGTHS[0] - 1)
    plan = plan_prefixes(read_texts(text + "one" * 9, text + "two" * 9))
    assert marks(plan, 2) == [None, None]
    assert plan.summary() == "no lines were found that begin alike"


def test_the_same_file_has_the_same_marks_again() -> None:
    texts = [LONG + str(number) for number in range(9)]
    plans = [plan_prefixes(read_texts(*texts)) for _ in range(2)]
    assert [plans[0].mark(i) for i in range(9)] == [plans[1].mark(i) for i in range(9)]


def test_a_file_is_read_once_where_its_first_texts_tell_all() -> None:
    read, count = read_texts(*(LONG + str(number) for number in range(9))), 0

    def counted() -> Lines:
        nonlocal count
        count += 1
        return read()

    assert plan_prefixes(counted).num_lines == 9
    assert count == 1


def test_texts_that_find_no_room_are_compared_in_a_second_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_plan, "_MOST_TEXT_BYTES", 2000)
    unique = [str(number) * 600 for number in range(5)]
    plan = plan_prefixes(read_texts(*unique, LONG + "one", LONG + "two"))
    assert marks(plan, 7) == [None] * 5 + [700, 700]


def test_what_finds_no_room_at_all_is_known_to_the_next_lower_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_plan, "_MOST_TEXT_BYTES", 0)
    plan = plan_prefixes(read_texts(LONG + "one", LONG + "two"))
    assert marks(plan, 2) == [512, 512]
    assert plan.mark(0) == plan.mark(1)


def test_groups_beyond_the_most_have_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_plan, "_MOST_GROUPS", 1)
    plan = plan_prefixes(read_texts(*(text + end for end in "xy" for text in (LONG, "c" * 700))))
    assert marks(plan, 4) == [700, None, 700, None]


def test_a_file_that_ends_sooner_when_it_is_read_again_does_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_plan, "_MOST_TEXT_BYTES", 2000)
    unique = [str(number) * 600 for number in range(5)]
    readings = iter([read_texts(*unique, LONG + "one", LONG + "two")(), iter(())])
    plan = plan_prefixes(lambda: next(readings))
    assert plan.mark(5) is None
    assert plan.num_groups == plan.num_lines == plan.tokens_saved == 0


def test_bad_lines_and_lines_of_several_prompts_have_no_text() -> None:
    for raw in (
        None,
        b"not json" * 100,
        b"[]" + b" " * 600,
        json.dumps({"body": [LONG]}).encode(),
        json.dumps({"messages": [LONG]}).encode(),
        json.dumps({"messages": [{"content": LONG}]}).encode(),
        json.dumps({"messages": [turn("user", [{"text": 1}]), turn("user", LONG)]}).encode(),
        json.dumps({"messages": [turn("user", {"text": LONG})]}).encode(),
        json.dumps({"messages": {"role": LONG}}).encode(),
        json.dumps({"prompt": [LONG, LONG]}).encode(),
        json.dumps({"prompt": [1] * 600}).encode(),
    ):
        assert prompt_text_of_line(raw) == ""


def test_a_line_of_a_batch_and_its_bare_body_have_the_same_text() -> None:
    body = {"messages": [turn("system", LONG), turn("user", "hello")]}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    assert prompt_text_of_line(json.dumps(line).encode()) == prompt_text(body)
    assert LONG in prompt_text(body)


def test_text_parts_are_the_text_that_they_are_joined_to() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    joined = {"messages": [turn("developer", "hello")]}
    assert prompt_text({"messages": [turn("system", parts)]}) == prompt_text(joined)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"date": "today"}},
        {"reasoning_effort": "high"},
    ],
)
def test_what_a_template_may_write_first_stands_first(fields: dict[str, Any]) -> None:
    body = {"messages": [turn("user", "hello")]}
    text = prompt_text({**body, **fields})
    assert text.endswith(prompt_text(body))
    assert text != prompt_text(body)
    assert cut_after({**body, **fields}, len(text) - len(prompt_text(body))) is None


def test_tools_that_are_not_to_be_used_are_not_rendered() -> None:
    body = {"messages": [turn("user", "hello")]}
    assert prompt_text({**body, "tools": [{}], "tool_choice": "none"}) == prompt_text(body)


def common_cut(one: dict[str, Any], other: dict[str, Any]) -> Cut | None:
    chars = common_chars([prompt_text(one), prompt_text(other)])
    cut = cut_after(one, chars)
    assert cut == cut_after(other, chars)
    return cut


@pytest.mark.parametrize(
    ("one", "other", "cut"),
    [
        ([turn("user", "abcd")], [turn("user", "abxy")], Cut(0, "content", 2)),
        ([turn("user", "ab")], [turn("user", "abxy")], Cut(0, "content", 2)),
        ([turn("user", "a")], [turn("user", "b")], Cut(0, "content", 0)),
        ([turn("user", "a")], [turn("system", "a")], None),
        (
            [turn("system", "s"), turn("user", "a")],
            [turn("system", "s"), turn("user", "b")],
            Cut(1, "content", 0),
        ),
        (
            [turn("system", "s"), turn("user", "a")],
            [turn("system", "s"), turn("assistant", "a")],
            Cut(0, "content", 1),
        ),
        (
            [turn("user", "s"), turn("assistant", "a", reasoning="thought")],
            [turn("user", "s"), turn("assistant", "a", reasoning_content="think")],
            Cut(1, "reasoning_content", 2),
        ),
        (
            [turn("user", "s"), turn("assistant", "a", tool_calls=[1]), turn("user", "b")],
            [turn("user", "s"), turn("assistant", "a", tool_calls=[2]), turn("user", "b")],
            Cut(1, "content", 1),
        ),
        (
            [turn("user", "s"), turn("tool", "a", tool_call_id="1"), turn("user", "b")],
            [turn("user", "s"), turn("tool", "a", tool_call_id="2"), turn("user", "b")],
            Cut(1, "content", 1),
        ),
        ([turn("user", "s")], [turn("user", "s")], Cut(0, "content", 1)),
    ],
)
def test_a_beginning_ends_in_the_turn_where_two_chats_part(
    one: list[Any], other: list[Any], cut: Cut | None
) -> None:
    assert common_cut({"messages": one}, {"messages": other}) == cut


def test_a_mark_is_read_back_and_what_is_none_is_not() -> None:
    mark = Mark("0123456789abcdef", 700)
    assert Mark.parse(str(mark)) == mark
    for text in (None, "", "x", "0123456789abcdef", "0123456789abcdef:", "0123456789abcdef:0"):
        assert Mark.parse(text) is None
    for text in ("0123456789ABCDEF:7", "0123456789abcdef:-7", "0123456789abcdef:9999999999"):
        assert Mark.parse(text) is None
