"""One choice as its tokens come: kinds of text, reasons to end, log-probabilities, guides."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from queue_service.requests import Endpoint
from queue_service.responses import Choice, FinishReason
from tests.fakes import EOS, FakeTokenizer
from workers.answer import ChoiceBuilder
from workers.answer_forms import PLAIN_TEXT, AnswerForm, PieceKind
from workers.engine import Token, TokenLogprobs, TokenMatcher
from workers.reasoning import find_format
from workers.tool_calls import ToolSet, find_tool_format

THINK = find_format("<think></think>")
HERMES = find_tool_format("<tool_call> tool_call.name", {"<tool_call>": 1, "</tool_call>": 2})
WEATHER = ToolSet(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ]
)
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def builder(form: AnswerForm = PLAIN_TEXT, *, limit: int = 1000, stop: str = "") -> ChoiceBuilder:
    return ChoiceBuilder(
        FakeTokenizer(),
        form.splitter(0),
        stop_ids=frozenset({EOS}),
        stop_strings=(stop,) if stop else (),
        token_limit=limit,
    )


def run(made: ChoiceBuilder, text: str) -> tuple[Choice, dict[PieceKind, str]]:
    """Push the bytes of a text and the end; return the choice and the joined pieces."""
    joined = dict.fromkeys(PieceKind, "")
    for token_id in (*text.encode(), EOS):
        for piece in made.push(Token("row", token_id)):
            joined[piece.kind] += piece.text
        if made.has_ended:
            break
    return made.choice(), joined


def test_text_is_text() -> None:
    choice, pieces = run(builder(), "grüße <think>")
    assert choice == Choice("grüße <think>", FinishReason.STOP, len("grüße <think>".encode()))
    assert pieces[PieceKind.TEXT] == choice.text


def test_reasoning_and_content_are_apart() -> None:
    assert THINK is not None
    choice, pieces = run(builder(AnswerForm(THINK)), "<think>hm, well</think>\n\nSo: 4.")
    assert (choice.reasoning, choice.text) == ("hm, well", "So: 4.")
    assert choice.reasoning_tokens == len("hm, well</think>")
    assert (pieces[PieceKind.REASONING], pieces[PieceKind.TEXT]) == ("hm, well", "So: 4.")


def test_reasoning_that_the_prompt_opened_and_the_limit_cut() -> None:
    made = builder(AnswerForm(THINK, starts_open=True), limit=5)
    choice, _ = run(made, "thinking")
    assert (choice.reasoning, choice.text) == ("think", "")
    assert (choice.finish_reason, choice.reasoning_tokens) == (FinishReason.LENGTH, 5)


def test_calls_of_tools_are_apart_and_say_so() -> None:
    assert HERMES is not None
    form = AnswerForm(tool_format=HERMES, tools=WEATHER, job_id="job")
    choice, pieces = run(builder(form), f"Let me see. {CALL}")
    [call] = choice.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert (choice.text, choice.finish_reason) == ("Let me see.", FinishReason.TOOL_CALLS)
    delta = json.loads(pieces[PieceKind.TOOL])
    assert (delta["index"], delta["id"]) == (0, call.id)
    again, _ = run(builder(form), f"Let me see. {CALL}")
    assert again.tool_calls == choice.tool_calls


def test_a_call_of_an_unknown_tool_stays_in_the_text() -> None:
    form = AnswerForm(tool_format=HERMES, tools=WEATHER)
    wrong = CALL.replace("weather", "whether")
    choice, _ = run(builder(form), wrong)
    assert (choice.text, choice.tool_calls) == (wrong, ())
    assert choice.finish_reason is FinishReason.STOP


def test_a_stop_string_cuts_the_text_before_it_is_read() -> None:
    form = AnswerForm(THINK, tool_format=HERMES, tools=WEATHER)
    choice, _ = run(builder(form, stop="</tool"), f"Well. {CALL}")
    assert choice.finish_reason is FinishReason.STOP
    assert choice.tool_calls == ()
    assert choice.text.startswith("Well. <tool_call>")


@given(st.text(alphabet="ab<>/think \nü", max_size=60), st.booleans())
def test_pieces_join_to_the_choice(text: str, starts_open: bool) -> None:
    form = AnswerForm(THINK, starts_open=starts_open, tool_format=HERMES, tools=WEATHER)
    choice, pieces = run(builder(form), text)
    assert pieces[PieceKind.TEXT] == choice.text
    assert pieces[PieceKind.REASONING] == choice.reasoning


def test_log_probabilities_have_one_entry_a_completion_token() -> None:
    made = builder()
    for token_id in (*b"hi", EOS):
        made.push(Token("row", token_id, TokenLogprobs(-0.5, ((token_id, -0.5), (97, -1.0)))))
    body = made.choice().to_body(Endpoint.CHAT, 0)
    entries = body["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["h", "i"]
    assert [entry["bytes"] for entry in entries] == [[104], [105]]
    assert [one["token"] for one in entries[0]["top_logprobs"]] == ["h", "a"]


class Digits:
    """Allows digits only."""

    def __init__(self) -> None:
        self.accepted = b""

    def fill(self, mask_row: npt.NDArray[np.uint32]) -> None:
        mask_row[:] = 0
        mask_row[1] = 0x03FF0000  # 48 to 57

    def accept(self, token_id: int) -> None:
        assert token_id in b"0123456789"
        self.accepted += bytes([token_id])


class CompiledDigits:
    def matcher(self) -> TokenMatcher:
        return Digits()

    def check(self, text: str) -> str | None:
        return None if text.isdigit() else "it has no digits"


def test_a_whole_answer_is_checked_and_a_cut_one_is_not() -> None:
    form = AnswerForm(compiled=CompiledDigits())
    whole = Choice("12x", FinishReason.STOP, completion_tokens=3)
    assert form.check(whole) == "it has no digits"
    assert form.check(replace(whole, is_cut=True)) is None
    assert PLAIN_TEXT.check(whole) is None


def allowed(matcher: TokenMatcher) -> set[int]:
    mask = np.zeros(9, dtype=np.uint32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), count=257, bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_constraint_begins_after_the_reasoning() -> None:
    form = AnswerForm(THINK, starts_open=True, compiled=CompiledDigits())
    matcher = form.matcher(FakeTokenizer())
    assert matcher is not None
    for token_id in b"free text</think>":
        assert len(allowed(matcher)) == 257
        matcher.accept(token_id)
    assert allowed(matcher) == set(b"0123456789")
    matcher.accept(ord("4"))
    with pytest.raises(AssertionError):
        matcher.accept(ord("x"))


def test_a_constraint_without_reasoning_begins_at_once() -> None:
    matcher = AnswerForm(THINK, compiled=CompiledDigits()).matcher(FakeTokenizer())
    assert matcher is not None
    assert allowed(matcher) == set(b"0123456789")
    assert PLAIN_TEXT.matcher(FakeTokenizer()) is None


def test_reasoning_is_closed_when_its_budget_is_spent() -> None:
    closing = tuple(b"</think>")
    form = AnswerForm(THINK, starts_open=True, thinking_budget=3, closing_ids=closing)
    matcher = form.matcher(FakeTokenizer())
    assert matcher is not None
    tokens = []
    for wanted in b"abcdefghijkl!":
        free = allowed(matcher)
        token_id = wanted if len(free) > 1 else free.pop()
        matcher.accept(token_id)
        tokens.append(token_id)
    assert bytes(tokens) == b"abc</think>l!"
