"""The stable part of a prompt, measured with templates of the forms that public models have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_templates import (
    ALWAYS_RAISES,
    ALWAYS_THINKS,
    EMPTY_THOUGHT_BEFORE_TEXTS,
    GEMMA,
    MISTRAL,
    QWEN3,
    SMOLLM2,
    chat_tokenizer,
)
from workers.cache_boundary import CacheBoundary, snapshot_at
from workers.token_history import TokenHistory

Message = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
    }
]
TEMPLATES = (SMOLLM2, QWEN3, GEMMA, ALWAYS_THINKS, EMPTY_THOUGHT_BEFORE_TEXTS, MISTRAL)
WITH_TOOLS = {QWEN3, EMPTY_THOUGHT_BEFORE_TEXTS, MISTRAL}
WITH_SYSTEM = {SMOLLM2, QWEN3, ALWAYS_THINKS, EMPTY_THOUGHT_BEFORE_TEXTS}
HELLO: list[Message] = [{"role": "user", "content": "hello"}]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def tool_call(**fields: Any) -> Message:
    call = {
        "type": "function",
        "id": "abcdefghi",
        "function": {"name": "weather", "arguments": {"city": "x"}},
    }
    return assistant("", tool_calls=[call], **fields)


def tool_result(content: str) -> Message:
    return {"role": "tool", "tool_call_id": "abcdefghi", "content": content}


class CountingEncoder:
    """A tokenizer that counts the chats it renders."""

    def __init__(self, template: str) -> None:
        self.tokenizer = chat_tokenizer(template)
        self.num_renders = 0

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        self.num_renders += 1
        return self.tokenizer.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **template_kwargs
        )

    def encode_chat(self, rendered: str) -> list[int]:
        return self.tokenizer.encode_chat(rendered)


@dataclass
class Chats:
    """One template with a boundary that lives as long as the chats."""

    template: str
    encoder: CountingEncoder = field(init=False)
    boundary: CacheBoundary = field(init=False)

    def __post_init__(self) -> None:
        self.encoder = CountingEncoder(self.template)
        self.boundary = CacheBoundary(self.encoder)

    def ids(self, messages: Sequence[Message], **rendering: Any) -> list[int]:
        tokenizer = self.encoder.tokenizer
        return tokenizer.encode_chat(tokenizer.render_chat(messages, **rendering))

    def stable_length(
        self, messages: Sequence[Message], *, actual: list[int] | None = None, **rendering: Any
    ) -> int:
        canonical = self.ids(messages, **rendering)
        kwargs = {name: value for name, value in rendering.items() if name != "tools"}
        return self.boundary.stable_length(
            messages,
            canonical=canonical,
            actual=canonical if actual is None else actual,
            tools=rendering.get("tools"),
            template_kwargs=kwargs,
        )

    def stable_text(self, messages: Sequence[Message], **rendering: Any) -> str:
        ids = self.ids(messages, **rendering)[: self.stable_length(messages, **rendering)]
        return self.encoder.tokenizer.decode(ids, skip_special_tokens=False)

    def shared(
        self, messages: Sequence[Message], following: Sequence[Message], **rendering: Any
    ) -> int:
        """Return the real common prefix with the prompt that has ``following`` after it."""
        now = self.ids(messages, **rendering)
        then = self.ids([*messages, *following], **rendering)
        pairs = zip(now, then, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(now))


def test_the_primer_of_chatml_is_stable_but_for_its_line_break() -> None:
    assert Chats(SMOLLM2).stable_text(HELLO).endswith("hello<|im_end|>\n<|im_start|>assistant")


def test_an_empty_thought_for_the_new_answer_alone_is_not_stable() -> None:
    chats = Chats(QWEN3)
    stable = chats.stable_text(HELLO, enable_thinking=False)
    assert stable == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant"


def test_the_open_thought_of_an_answer_is_not_stable() -> None:
    stable = Chats(ALWAYS_THINKS).stable_text(HELLO)
    assert stable == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant"


def test_a_primer_before_trimmed_answers_is_stable_to_its_end() -> None:
    chats = Chats(GEMMA)
    assert chats.stable_text(HELLO).endswith("<start_of_turn>model\n")
    assert chats.stable_length(HELLO) == len(chats.ids(HELLO))


def test_the_boundary_is_safe_for_a_tool_call_where_there_are_tools() -> None:
    chats = Chats(EMPTY_THOUGHT_BEFORE_TEXTS)
    assert chats.stable_text(HELLO).endswith("<think>\n\n</think>")
    with_tools = chats.stable_text(HELLO, tools=TOOLS)
    assert with_tools == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert chats.stable_length(HELLO, tools=TOOLS) == chats.shared(
        HELLO, [tool_call(), tool_result("x")]
    )


def test_no_tools_means_no_tool_call() -> None:
    chats = Chats(EMPTY_THOUGHT_BEFORE_TEXTS)
    assert chats.stable_length(HELLO, tools=[]) == chats.stable_length(HELLO)


def test_tools_that_move_to_the_next_question_end_the_stable_part() -> None:
    chats = Chats(MISTRAL)
    messages = [user("hello"), assistant("hello"), user("and then")]
    assert chats.stable_text(messages, tools=TOOLS) == "<bos>[INST] hello[/INST] hello</s>"
    assert chats.stable_length(messages) == len(chats.ids(messages))


def test_reasoning_that_the_next_question_drops_is_not_stable() -> None:
    chats = Chats(QWEN3)
    messages = [user("hello"), tool_call(reasoning_content="the fox"), tool_result("x")]
    stable = chats.stable_text(messages, tools=TOOLS)
    assert stable.endswith("hello<|im_end|>\n<|im_start|>assistant\n")


def test_ids_of_the_history_are_cut_by_the_length_of_the_primer() -> None:
    chats = Chats(QWEN3)
    canonical = chats.ids(HELLO, enable_thinking=False)
    primer = len(canonical) - chats.stable_length(HELLO, enable_thinking=False)
    assert primer > 1
    actual = [0] * 5 + canonical
    assert chats.stable_length(HELLO, enable_thinking=False, actual=actual) == len(actual) - primer
    assert chats.stable_length(HELLO, enable_thinking=False, actual=[0]) == 0


def test_a_resolved_prompt_shares_its_stable_part_with_the_next_turn() -> None:
    chats = Chats(QWEN3)
    tokenizer = chats.encoder.tokenizer
    history = TokenHistory(tokenizer)
    spelled: list[int] = []
    for token_id in tokenizer.encode_chat(tokenizer.render_chat(HELLO)):
        letters = tokenizer.decode([token_id])
        one_by_one = [i for c in letters for i in tokenizer.encode(c, add_special_tokens=False)]
        spelled += one_by_one or [token_id]
    history.remember(spelled)

    def resolve(messages: list[Message]) -> list[int]:
        rendered = tokenizer.render_chat(messages, enable_thinking=False)
        return list(history.resolve(rendered, tokenizer.encode_chat(rendered)))

    now = [*HELLO, assistant("the fox"), user("and then")]
    actual = resolve(now)
    assert actual[: len(spelled)] == spelled
    length = chats.stable_length(now, enable_thinking=False, actual=actual)
    following = resolve([*now, assistant("well"), user("x")])
    assert length > len(spelled)
    assert following[:length] == actual[:length]


def test_a_known_primer_is_not_measured_again() -> None:
    chats = Chats(QWEN3)
    first = chats.stable_text(HELLO, enable_thinking=False)
    num_renders = chats.encoder.num_renders
    assert num_renders > 0
    assert chats.stable_text(HELLO, enable_thinking=False) == first
    other = chats.stable_text([user("how are you?")], enable_thinking=False)
    assert other == "<|im_start|>user\nhow are you?<|im_end|>\n<|im_start|>assistant"
    assert chats.encoder.num_renders == num_renders


@pytest.mark.parametrize(
    "rendering",
    [
        {"enable_thinking": False},
        {"tools": TOOLS},
        {"reasoning_effort": "high"},
        {"preserve_thinking": True},
    ],
)
def test_what_the_template_may_read_is_measured_on_its_own(rendering: dict[str, Any]) -> None:
    chats = Chats(QWEN3)
    chats.stable_length(HELLO)
    num_renders = chats.encoder.num_renders
    chats.stable_length(HELLO, **rendering)
    assert chats.encoder.num_renders > num_renders
    num_renders = chats.encoder.num_renders
    chats.stable_length(HELLO, **rendering)
    assert chats.encoder.num_renders == num_renders


def test_a_known_primer_is_not_used_for_a_prompt_with_another_end() -> None:
    # The template looks into the text, which no keyword tells.
    chats = Chats(
        "{% for m in messages %}{{ m.role + ' ' + m.content | trim + '<|im_end|>' }}{% endfor %}"
        "{{ '<think></think><think>' if '/think' in messages[0].content else '</think>' }}"
    )
    for messages, primer in [
        ([user("hello")], 1),
        ([user("hello /think")], 3),
        ([user("hello")], 1),
    ]:
        assert chats.stable_length(messages) == len(chats.ids(messages)) - primer


@pytest.mark.parametrize(
    "call",
    [
        tool_call(reasoning_content="the fox"),
        tool_call() | {"content": "<think>\nthe fox\n</think>\n\nthen"},
    ],
)
def test_the_primer_of_a_plain_question_is_not_used_after_reasoning(call: Message) -> None:
    chats = Chats(QWEN3)
    plain = [*HELLO, tool_call() | {"content": "then"}, tool_result("x")]
    for messages in (HELLO, plain):
        chats.stable_length(messages, tools=TOOLS)
    reasoned = [*HELLO, call, tool_result("x")]
    following = [assistant("well"), user("x")]
    assert chats.stable_length(reasoned, tools=TOOLS) <= chats.shared(
        reasoned, following, tools=TOOLS
    )


def long_primer(num_tokens: int) -> str:
    """Return a template whose primer has so many tokens that no old turn has."""
    return (
        "{% for m in messages %}{{ m.role + ' ' + m.content | trim + '<|im_end|>' }}{% endfor %}"
        f"{{{{ '<think>' * {num_tokens} }}}}"
    )


@pytest.mark.parametrize(("num_tokens", "is_remembered"), [(64, True), (65, False)])
def test_a_primer_of_more_than_64_tokens_is_not_remembered(
    num_tokens: int, is_remembered: bool
) -> None:
    chats = Chats(long_primer(num_tokens))
    length = chats.stable_length(HELLO)
    assert length == len(chats.ids(HELLO)) - num_tokens
    num_renders = chats.encoder.num_renders
    assert chats.stable_length(HELLO) == length
    assert (chats.encoder.num_renders == num_renders) is is_remembered


def test_a_template_that_raises_makes_the_whole_prompt_the_boundary() -> None:
    encoder = CountingEncoder(ALWAYS_RAISES)
    boundary = CacheBoundary(encoder)
    for num_renders in (1, 2):
        assert boundary.stable_length(HELLO, canonical=[1, 2, 3], actual=[1, 2, 4, 5]) == 4
        # Not remembered: it is tried again.
        assert encoder.num_renders == num_renders


def test_a_template_that_refuses_only_the_next_turn_does_so_too() -> None:
    chats = Chats(
        "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
        "{{ messages[0].content }}<think>"
    )
    assert chats.stable_length(HELLO) == len(chats.ids(HELLO))


def test_a_refusal_is_forgotten_once_the_template_accepts() -> None:
    chats = Chats(GEMMA)
    odd = [*HELLO, assistant("well")]
    assert chats.stable_length(odd) == len(chats.ids(odd))
    assert chats.stable_length(HELLO) == chats.shared(HELLO, [assistant("x"), user("x")])


def test_any_error_of_a_template_that_is_code_is_contained() -> None:
    class Broken(CountingEncoder):
        def encode_chat(self, rendered: str) -> list[int]:
            raise OSError("no such file")

    assert CacheBoundary(Broken(SMOLLM2)).stable_length(HELLO, canonical=[1], actual=[1, 2]) == 2


def test_many_kinds_of_prompts_are_not_all_remembered() -> None:
    chats = Chats(long_primer(1))
    for number in range(300):
        chats.stable_length(HELLO, date=number)
    num_renders = chats.encoder.num_renders
    chats.stable_length(HELLO, date=299)
    assert chats.encoder.num_renders == num_renders
    chats.stable_length(HELLO, date=0)
    assert chats.encoder.num_renders > num_renders


def test_many_threads_measure_at_once() -> None:
    chats = Chats(QWEN3)

    def work(number: int) -> tuple[int, int]:
        messages = [user("hello " * (number % 7))]
        rendering: dict[str, Any] = {"enable_thinking": number % 2 == 0}
        ids = chats.ids(messages, **rendering)
        return len(ids) - chats.stable_length(messages, **rendering), number % 2

    with ThreadPoolExecutor(4) as pool:
        primers = set(pool.map(work, range(60)))
    assert len(primers) == 2


@pytest.mark.parametrize(
    ("prompt_length", "restored_tokens", "stable_length", "expected"),
    [
        (255, 0, 255, None),
        (256, 0, 256, None),
        (257, 0, 257, 256),
        (1000, 0, 996, 996),
        (1000, 0, 1000, 999),
        (1000, 0, 255, None),
        (1000, 0, 256, 256),
        (1000, 0, 0, None),
        (1000, 995, 996, 996),
        (1000, 996, 996, None),
        (1000, 999, 996, None),
    ],
)
def test_a_snapshot_is_long_enough_new_and_leaves_a_token(
    prompt_length: int, restored_tokens: int, stable_length: int, expected: int | None
) -> None:
    assert snapshot_at(prompt_length, restored_tokens, stable_length) == expected


@given(st.integers(1, 2000), st.integers(0, 2000), st.integers(0, 2000))
def test_a_snapshot_never_reaches_beyond_the_stable_part(
    prompt_length: int, restored_tokens: int, stable_length: int
) -> None:
    length = snapshot_at(prompt_length, restored_tokens, stable_length)
    if length is not None:
        assert max(256, restored_tokens + 1) <= length <= min(stable_length, prompt_length - 1)


def test_the_same_prompt_again_needs_no_second_snapshot() -> None:
    first = snapshot_at(1000, 0, 996)
    assert first is not None
    assert snapshot_at(1000, first, 996) is None


# Words, line breaks and spaces that the tokenizer merges, and any other text.
TEXTS = st.one_of(
    st.lists(
        st.sampled_from(
            [
                *(" ", "\n", "\n\n", "\t", "x", ":", "the", "hello", " fox", "assistant", "1", "é"),
                *("<think>", "</think>", "<think>\nx\n</think>\n\n"),
            ]
        ),
        max_size=6,
    ).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
REASONING: st.SearchStrategy[dict[str, str]] = st.one_of(
    st.just({}), TEXTS.map(lambda text: {"reasoning_content": text})
)


@st.composite
def answered_turns(draw: st.DrawFn, *, tools: bool) -> list[Message]:
    """A question and its answer, with a tool call between them perhaps."""
    calls = [tool_call(**draw(REASONING)), tool_result(draw(TEXTS))]
    middle = calls if tools and draw(st.booleans()) else []
    return [user(draw(TEXTS)), *middle, assistant(draw(TEXTS), **draw(REASONING))]


@st.composite
def chats_with_a_reply(draw: st.DrawFn) -> tuple[str, list[Message], list[Message], dict[str, Any]]:
    """A template, a chat, what follows it, and the keywords of both renderings."""
    template = draw(st.sampled_from(TEMPLATES))
    tools = template in WITH_TOOLS and draw(st.booleans())
    rendering: dict[str, Any] = {"tools": TOOLS} if tools else {}
    for name in ("enable_thinking", "preserve_thinking"):
        if (value := draw(st.sampled_from([None, True, False]))) is not None:
            rendering[name] = value
    system = [{"role": "system", "content": draw(TEXTS)}] if template in WITH_SYSTEM else []
    turns = draw(st.lists(answered_turns(tools=tools), max_size=2))
    messages = [*system[: draw(st.integers(0, 1))], *chain.from_iterable(turns), user(draw(TEXTS))]
    if tools and draw(st.booleans()):
        messages += [tool_call(**draw(REASONING)), tool_result(draw(TEXTS))]
    if tools and draw(st.booleans()):
        following = [tool_call(**draw(REASONING)), tool_result(draw(TEXTS))]
    else:
        following = [assistant(draw(TEXTS), **draw(REASONING)), user(draw(TEXTS))]
    return template, messages, following, rendering


@cache
def shared_chats(template: str) -> Chats:
    """One boundary for all examples, so that its memory is tried too."""
    return Chats(template)


@settings(deadline=None)
@given(chats_with_a_reply())
def test_the_next_turn_shares_the_stable_part_whatever_the_reply(
    chat: tuple[str, list[Message], list[Message], dict[str, Any]],
) -> None:
    template, messages, following, rendering = chat
    chats = shared_chats(template)
    shared = chats.shared(messages, following, **rendering)
    assert chats.stable_length(messages, **rendering) <= shared


@settings(deadline=None)
@given(chats_with_a_reply())
def test_a_plain_reply_shares_hardly_more_than_the_stable_part(
    chat: tuple[str, list[Message], list[Message], dict[str, Any]],
) -> None:
    template, messages, _, rendering = chat
    chats = shared_chats(template)
    shared = chats.shared(messages, [assistant("x"), user("x")], **rendering)
    assert shared - chats.stable_length(messages, **rendering) <= 5
