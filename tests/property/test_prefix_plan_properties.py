"""The plan of any file is what comparing all lines with each other finds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queue_service import prefix_plan
from queue_service.prefix_plan import LENGTHS, PrefixPlan, cut_after, plan_prefixes, prompt_text
from tests.request_helpers import common_chars

# Long enough pieces of few kinds, so that texts often share much.
PIECES = st.tuples(st.sampled_from("abé"), st.sampled_from([170, 512, 900])).map(
    lambda piece: piece[0] * piece[1]
)
TEXTS = st.lists(st.lists(PIECES, max_size=12).map("".join), max_size=10)


def planned(texts: list[str]) -> PrefixPlan:
    lines = [json.dumps({"prompt": text}).encode() for text in texts]
    return plan_prefixes(lambda: list(enumerate(lines, 1)))


def longest_shared_length(texts: list[str], index: int) -> int:
    """The longest of the lengths at which another text begins like this one; 0 for none."""
    shared = [
        length
        for length in LENGTHS
        if length <= len(texts[index])
        and sum(text.startswith(texts[index][:length]) for text in texts) > 1
    ]
    return max(shared, default=0)


@given(TEXTS)
def test_a_mark_is_the_longest_beginning_that_all_with_its_length_share(texts: list[str]) -> None:
    plan = planned(texts)
    for index, text in enumerate(texts):
        mark, length = plan.mark(index), longest_shared_length(texts, index)
        if not length:
            assert mark is None
            continue
        alike = [other for other in texts if other.startswith(text[:length])]
        assert mark is not None
        assert mark.chars == common_chars(alike)
    assert plan.num_lines == sum(plan.mark(i) is not None for i in range(len(texts)))


@given(TEXTS, st.integers(0, 20_000))
def test_with_little_room_a_mark_is_still_a_beginning_that_is_shared(
    texts: list[str], num_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_plan, "_MOST_TEXT_BYTES", num_bytes)
        plan = planned(texts)
    exact = planned(texts)
    beginnings: dict[str, str] = {}
    for index, text in enumerate(texts):
        mark, best = plan.mark(index), exact.mark(index)
        assert (mark is None) == (best is None)
        if mark is None or best is None:
            continue
        assert mark.chars in (best.chars, longest_shared_length(texts, index))
        beginning = text[: mark.chars]
        assert beginnings.setdefault(mark.group, beginning) == beginning
        assert sum(other.startswith(beginning) for other in texts) > 1


WORDS = st.text("ab", max_size=4)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": WORDS},
    optional={"reasoning_content": WORDS, "tool_call_id": WORDS},
)
CHATS = st.lists(TURNS, min_size=1, max_size=4)


@given(CHATS, CHATS)
def test_chats_are_the_same_before_the_place_where_their_texts_part(
    one: list[dict[str, Any]], other: list[dict[str, Any]]
) -> None:
    bodies: list[dict[str, Any]] = [{"messages": one}, {"messages": other}]
    chars = common_chars([prompt_text(body) for body in bodies])
    cut = cut_after(bodies[0], chars)
    assert cut == cut_after(bodies[1], chars)
    if cut is None:
        starts = [(m[0]["role"], m[0].get("reasoning_content", "")[:1]) for m in (one, other)]
        assert starts[0] != starts[1]
        return
    assert [prompt_text({"messages": m[: cut.message]}) for m in (one, other)] == [
        prompt_text({"messages": one[: cut.message]})
    ] * 2
    texts = [messages[cut.message].get(cut.field, "") for messages in (one, other)]
    assert texts[0][: cut.offset] == texts[1][: cut.offset]
