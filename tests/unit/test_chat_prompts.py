"""What chats become as tokens, and which of their tokens are kept for the prompts after them."""

from __future__ import annotations

from typing import Any

import pytest

from queue_service.prefix_plan import Mark, prompt_text
from queue_service.requests import ChatRequest, Endpoint, parse_request
from tests.chat_templates import ALWAYS_RAISES, GEMMA, QWEN3, SMOLLM2, chat_tokenizer
from tests.request_helpers import common_chars
from workers.chat_prompts import ChatPrompt, ChatPrompts
from workers.token_history import TokenHistory
from workers.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "You are terse. " * 20}
QUESTION = {"role": "user", "content": "hello"}


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    request = parse_request(Endpoint.CHAT, {"messages": list(messages), **fields})
    assert isinstance(request, ChatRequest)
    return request


def encode(prompts: ChatPrompts, tokenizer: Tokenizer, request: ChatRequest) -> ChatPrompt:
    rendered = tokenizer.render_chat(request.template_messages(), add_generation_prompt=True)
    return prompts.encode(request, rendered, {})


def make(template: str) -> tuple[Tokenizer, TokenHistory, ChatPrompts]:
    tokenizer = chat_tokenizer(template)
    history = TokenHistory(tokenizer)
    return tokenizer, history, ChatPrompts(tokenizer, history)


def test_a_chat_of_no_session_is_just_encoded() -> None:
    tokenizer, _, prompts = make(SMOLLM2)
    request = chat(SYSTEM, QUESTION)
    found = encode(prompts, tokenizer, request)
    rendered = tokenizer.render_chat(request.template_messages(), add_generation_prompt=True)
    assert found == ChatPrompt(tokenizer.encode_chat(rendered))


def test_where_nothing_is_kept_a_session_changes_nothing() -> None:
    tokenizer = chat_tokenizer(SMOLLM2)
    prompts = ChatPrompts(tokenizer)
    plain = encode(prompts, tokenizer, chat(SYSTEM, QUESTION))
    assert encode(prompts, tokenizer, chat(SYSTEM, QUESTION, session_id="s")) == plain


@pytest.mark.parametrize("template", [SMOLLM2, QWEN3, GEMMA])
def test_a_session_keeps_what_its_next_turn_shares_and_its_answer(template: str) -> None:
    tokenizer, _, prompts = make(template)
    found = encode(prompts, tokenizer, chat(QUESTION, session_id="s"))
    assert found.keeps_answer
    turn = [QUESTION, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "go on"}]
    following = encode(prompts, tokenizer, chat(*turn, session_id="s"))
    [stable] = found.keep
    assert 0 < stable <= len(found.ids)
    assert list(following.ids[:stable]) == list(found.ids[:stable])


def test_a_session_goes_on_with_the_tokens_that_built_its_turns() -> None:
    tokenizer, history, prompts = make(SMOLLM2)
    first = encode(prompts, tokenizer, chat(QUESTION, session_id="s"))
    # The model spelled its answer letter by letter.
    spelled = [t for letter in "hello" for t in tokenizer.encode(letter, add_special_tokens=False)]
    assert spelled != tokenizer.encode("hello", add_special_tokens=False)
    history.remember([*first.ids, *spelled])
    turn = [QUESTION, {"role": "assistant", "content": "hello"}, QUESTION]
    following = encode(prompts, tokenizer, chat(*turn, session_id="s"))
    assert list(following.ids[: len(first.ids) + len(spelled)]) == [*first.ids, *spelled]


def test_a_cache_key_keeps_what_stands_before_the_last_message() -> None:
    tokenizer, _, prompts = make(SMOLLM2)
    found = [
        encode(
            prompts,
            tokenizer,
            chat(SYSTEM, {"role": "user", "content": text}, prompt_cache_key="k"),
        )
        for text in ("hello", "what now", "x")
    ]
    lengths = {prompt.keep for prompt in found}
    assert len(lengths) == 1
    [(length,)] = lengths
    assert not any(prompt.keeps_answer for prompt in found)
    assert len({tuple(prompt.ids[:length]) for prompt in found}) == 1
    assert tokenizer.decode(found[0].ids[:length]).count("terse. ") == 20
    assert "hello" not in tokenizer.decode(found[0].ids[:length])


def test_a_cache_key_of_a_chat_with_turns_is_a_session() -> None:
    tokenizer, _, prompts = make(SMOLLM2)
    turn = [QUESTION, {"role": "assistant", "content": "hi"}, QUESTION]
    assert encode(prompts, tokenizer, chat(*turn, prompt_cache_key="k")).keeps_answer


def test_a_template_that_refuses_another_last_message_declares_nothing() -> None:
    tokenizer = chat_tokenizer(SMOLLM2)
    request = chat(SYSTEM, QUESTION, prompt_cache_key="k")
    rendered = tokenizer.render_chat(request.template_messages(), add_generation_prompt=True)
    stubborn = ChatPrompts(chat_tokenizer(ALWAYS_RAISES), TokenHistory(tokenizer))
    assert stubborn.encode(request, rendered, {}).keep == ()


NOTES = {"role": "system", "content": "You are terse and kind, and know the town well. " * 30}


def marked(tokenizer: Tokenizer, prompts: ChatPrompts, text: str, chars: int) -> ChatPrompt:
    body = {"messages": [NOTES, {"role": "user", "content": text}]}
    request = chat(*body["messages"])
    rendered = tokenizer.render_chat(request.template_messages(), add_generation_prompt=True)
    mark = Mark("0123456789abcdef", chars)
    return prompts.encode(request, rendered, {}, body=body, mark=mark)


def shared_chars(*texts: str) -> int:
    bodies = [{"messages": [NOTES, {"role": "user", "content": text}]} for text in texts]
    return common_chars([prompt_text(body) for body in bodies])


@pytest.mark.parametrize("template", [SMOLLM2, QWEN3])
def test_chats_of_a_mark_keep_what_they_begin_with_alike(template: str) -> None:
    tokenizer, _, prompts = make(template)
    texts = ["hello there", "hello here", "hello"]
    found = [marked(tokenizer, prompts, text, shared_chars(*texts)) for text in texts]
    [(length,)] = {prompt.keep for prompt in found}
    assert len({tuple(prompt.ids[:length]) for prompt in found}) == 1
    said = tokenizer.decode(found[0].ids[:length], skip_special_tokens=False)
    assert said.count("know the town well") == 30
    assert "there" not in said


def test_a_mark_that_ends_inside_a_message_keeps_its_beginning() -> None:
    tokenizer, _, prompts = make(SMOLLM2)
    [length] = marked(tokenizer, prompts, "hello", 700).keep
    said = tokenizer.decode(marked(tokenizer, prompts, "hello", 700).ids[:length])
    assert 10 <= said.count("know the town well") < 30


def test_a_mark_of_few_tokens_keeps_nothing() -> None:
    tokenizer, _, prompts = make(SMOLLM2)
    for chars in (1, 40):
        assert marked(tokenizer, prompts, "hello", chars).keep == ()


def test_a_mark_that_says_too_much_keeps_no_more_than_the_prompt() -> None:
    tokenizer, _, prompts = make(SMOLLM2)
    found = marked(tokenizer, prompts, "hello", 999_999_999)
    [length] = found.keep
    assert length < len(found.ids)


def test_where_nothing_is_kept_a_mark_changes_nothing() -> None:
    tokenizer = chat_tokenizer(SMOLLM2)
    assert marked(tokenizer, ChatPrompts(tokenizer), "hello", 700).keep == ()


def test_a_session_with_a_mark_keeps_both() -> None:
    tokenizer, _, prompts = make(SMOLLM2)
    body = {"messages": [NOTES, QUESTION]}
    request = chat(NOTES, QUESTION, session_id="s")
    rendered = tokenizer.render_chat(request.template_messages(), add_generation_prompt=True)
    mark = Mark("0123456789abcdef", 1000)
    found = prompts.encode(request, rendered, {}, body=body, mark=mark)
    stable, planned = found.keep
    assert planned < stable
    assert found.keeps_answer


def test_a_template_that_refuses_another_text_keeps_nothing_of_a_mark() -> None:
    tokenizer = chat_tokenizer(SMOLLM2)
    body = {"messages": [NOTES, QUESTION]}
    request = chat(NOTES, QUESTION)
    rendered = tokenizer.render_chat(request.template_messages(), add_generation_prompt=True)
    stubborn = ChatPrompts(chat_tokenizer(ALWAYS_RAISES), TokenHistory(tokenizer))
    mark = Mark("0123456789abcdef", 1000)
    assert stubborn.encode(request, rendered, {}, body=body, mark=mark).keep == ()
