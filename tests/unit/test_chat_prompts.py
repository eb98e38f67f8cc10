"""What chats become as tokens, and which of their tokens are kept for the prompts after them."""

from __future__ import annotations

from typing import Any

import pytest

from queue_service.requests import ChatRequest, Endpoint, parse_request
from tests.chat_templates import ALWAYS_RAISES, GEMMA, QWEN3, SMOLLM2, chat_tokenizer
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
