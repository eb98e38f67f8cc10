from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.reasoning import (
    Kind,
    Piece,
    ReasoningFormat,
    ReasoningSplitter,
    ThinkingBudget,
    find_format,
    starts_open,
)

THINK = ReasoningFormat("<think>", "</think>")
HARMONY = find_format("<|channel|>analysis<|message|>")


def splitter(*, is_open: bool = False, interrupt: str | None = None) -> ReasoningSplitter:
    return ReasoningSplitter(THINK, starts_open=is_open, interrupt=interrupt)


def joined(pieces: list[Piece]) -> list[tuple[Kind, str]]:
    return [
        (kind, "".join(piece.text for piece in group))
        for kind, group in groupby(pieces, key=lambda piece: piece.kind)
    ]


def split(
    target: ReasoningSplitter, text: str, cuts: tuple[int, ...] = ()
) -> list[tuple[Kind, str]]:
    bounds = [0, *cuts, len(text)]
    pieces = [piece for start, end in pairwise(bounds) for piece in target.push(text[start:end])]
    return joined(pieces + target.finish())


def reasoning(text: str) -> tuple[Kind, str]:
    return (Kind.REASONING, text)


def content(text: str) -> tuple[Kind, str]:
    return (Kind.CONTENT, text)


# --- formats ---


@pytest.mark.parametrize(
    ("template", "start"),
    [
        ("{{ '<|im_start|>assistant\\n<think>\\n' }}", "<think>"),
        ("{% set content = content.split('</think>')[-1] %}", "<think>"),
        ("... [THINK] ...", "[THINK]"),
        ("<|begin_of_thought|> {thought} <|end_of_thought|>", "<|begin_of_thought|>"),
        ("'<|channel>thought\\n<channel|>'", "<|channel>thought"),
        ("<|start|>assistant<|channel|>final<|message|>", None),
        ("'<|channel|>analysis<|message|>' + thinking", "<|channel|>analysis<|message|>"),
        ("<longcat_think>", "<longcat_think>"),
        ("<|im_start|>{{ role }}", None),
    ],
)
def test_the_template_tells_the_tags(template: str, start: str | None) -> None:
    found = find_format(template)
    assert (found.start if found else None) == start


def test_a_model_without_a_template_tells_its_tags_by_its_vocabulary() -> None:
    assert find_format(None, {"<think>": 1, "</think>": 2}) == find_format("<think>")
    assert find_format(None, {"<think>": 1}) is None
    assert find_format(None) is None
    xtml = find_format(None, {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"})
    assert xtml is not None
    assert xtml.start == "<|open|>think<|sep|>"


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("user: hi\nassistant:", False),
        ("user: hi\nassistant: <think>\n", True),
        ("user: hi\nassistant: <think>", True),
        ("user: hi\nassistant: <think>\n\n</think>\n\n", False),
        ("user: what does <think> mean?\nassistant:", False),
    ],
)
def test_a_prompt_that_ends_with_the_opening_tag_starts_open(prompt: str, is_open: bool) -> None:
    assert starts_open(prompt, THINK) is is_open


def test_a_continued_turn_starts_open_when_its_last_tag_opens() -> None:
    assert starts_open("assistant: <think>\nFirst,", THINK, continues=True)
    assert not starts_open("assistant: <think>\nFirst,</think>The", THINK, continues=True)
    assert not starts_open("assistant: The", THINK, continues=True)


# --- splitting ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("Hello", [content("Hello")]),
        (" \nHello\n", [content(" \nHello\n")]),
        ("  \n", [content("  \n")]),
        ("<think>\na b\n</think>\n\nHi ", [reasoning("a b"), content("Hi ")]),
        ("\n<think>a</think>Hi", [reasoning("a"), content("Hi")]),
        ("<think>\n\n</think>\n\nHi", [content("Hi")]),
        ("<think></think>", []),
        ("<think>never closed\n", [reasoning("never closed")]),
        ("<think>cut in </thi", [reasoning("cut in </thi")]),
        ("<thi", [content("<thi")]),
        ("<thinking>a", [content("<thinking>a")]),
        ("Say <think>x</think> now", [content("Say <think>x</think> now")]),
        ("never opened</think>Hi", [content("never opened</think>Hi")]),
        ("<think>a</think>b <think>c</think>", [reasoning("a"), content("b <think>c</think>")]),
        ("<think>a</think>\n<think>b</think>c", [reasoning("a\nb"), content("c")]),
        ("<think>a <think> b</think>c", [reasoning("a <think> b"), content("c")]),
        ("<think>a</think>\n\n<thin", [reasoning("a"), content("<thin")]),
        ("<think>思考😀</think>答え", [reasoning("思考😀"), content("答え")]),
    ],
)
def test_blocks_at_the_beginning_are_reasoning(text: str, expected: list[tuple[Kind, str]]) -> None:
    assert split(splitter(), text) == expected
    for cut in range(len(text)):
        assert split(splitter(), text, (cut,)) == expected
    assert split(splitter(), text, tuple(range(len(text)))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n</think>\n\nHi", [reasoning("a"), content("Hi")]),
        ("\na", [reasoning("a")]),
        ("<think>\na</think>Hi", [reasoning("a"), content("Hi")]),
        ("</think>Hi", [content("Hi")]),
        ("", []),
        ("<", [reasoning("<")]),
    ],
)
def test_an_answer_that_starts_open_begins_with_reasoning(
    text: str, expected: list[tuple[Kind, str]]
) -> None:
    assert split(splitter(is_open=True), text) == expected
    assert split(splitter(is_open=True), text, tuple(range(len(text)))) == expected


def test_text_is_held_only_while_it_may_be_part_of_a_tag() -> None:
    target = splitter()
    assert target.push("<think>ab c</th") == [Piece(Kind.REASONING, "ab c")]
    assert target.push("in") == []
    assert target.push("g") == [Piece(Kind.REASONING, "</thing")]
    assert target.push(" \n") == []
    assert target.push("d</think>") == [Piece(Kind.REASONING, " \nd")]
    assert target.push("x<th") == [Piece(Kind.CONTENT, "x<th")]


def test_in_reasoning_holds_from_the_opening_tag_to_the_closing_one() -> None:
    target = splitter()
    seen = []
    for text in ("<think>", "a", "</th", "ink>", "b"):
        target.push(text)
        seen.append(target.in_reasoning)
    assert seen == [True, True, True, False, False]
    assert splitter(is_open=True).in_reasoning


def test_a_tool_call_ends_reasoning_that_was_not_closed() -> None:
    text = "<think>call it\n<tool_call>{}</tool_call>"
    expected = [reasoning("call it"), content("<tool_call>{}</tool_call>")]
    for cut in range(len(text)):
        assert split(splitter(interrupt="<tool_call>"), text, (cut,)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            [reasoning("Hm."), content("Hi")],
        ),
        ("<|channel|>final<|message|>Hi", [content("Hi")]),
        ("<|channel|>fi", [content("<|channel|>fi")]),
    ],
)
def test_channels_are_a_format_too(text: str, expected: list[tuple[Kind, str]]) -> None:
    assert HARMONY is not None
    for cut in range(len(text)):
        assert split(ReasoningSplitter(HARMONY, starts_open=False), text, (cut,)) == expected


TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool>", "<", "</thi", "nk>", " ", "\n", "a", "é😀"]),
    max_size=12,
).map("".join)


@given(text=TEXTS, data=st.data(), is_open=st.booleans())
def test_pieces_joined_are_the_split_of_the_whole_text(
    text: str, data: st.DataObject, is_open: bool
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted).map(tuple))
    whole = split(splitter(is_open=is_open, interrupt="<tool>"), text)
    assert split(splitter(is_open=is_open, interrupt="<tool>"), text, cuts) == whole


# --- budget ---


def ids(budget: ThinkingBudget, flags: list[bool]) -> list[int | None]:
    return [budget.next_id(in_reasoning=flag) for flag in flags]


def test_the_closing_ids_are_forced_after_the_budget_and_once() -> None:
    budget = ThinkingBudget((7, 8), 2)
    assert ids(budget, [True] * 3) == [None, None, 7]
    assert not budget.is_spent
    assert ids(budget, [False, True, True]) == [8, None, None]
    assert budget.is_spent


def test_only_reasoning_tokens_spend_the_budget() -> None:
    budget = ThinkingBudget((7,), 1)
    assert ids(budget, [False, False, True, False, True]) == [None, None, None, None, 7]


def test_a_budget_of_zero_closes_the_block_at_once() -> None:
    assert ids(ThinkingBudget((7,), 0), [False, True, True]) == [None, 7, None]


def test_a_block_that_closes_in_time_is_left_alone() -> None:
    assert ids(ThinkingBudget((7,), 3), [True, True, False, False]) == [None] * 4


@pytest.mark.parametrize(("end_ids", "budget"), [((), 1), ((7,), -1)])
def test_a_budget_that_cannot_close_is_an_error(end_ids: tuple[int, ...], budget: int) -> None:
    with pytest.raises(ValueError, match=r"budget|ids"):
        ThinkingBudget(end_ids, budget)
