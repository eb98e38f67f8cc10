"""Bodies that say as little as they can, read as requests or refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from queue_service.errors import RequestError
from queue_service.requests import ChatRequest, CompletionRequest, Endpoint, parse_request

USER_TURN = {"role": "user", "content": "hello"}


def chat(**fields: Any) -> ChatRequest:
    request = parse_request(Endpoint.CHAT, {"messages": [USER_TURN], **fields})
    assert isinstance(request, ChatRequest)
    return request


def completion(**fields: Any) -> CompletionRequest:
    request = parse_request(Endpoint.COMPLETIONS, {"prompt": "hello", **fields})
    assert isinstance(request, CompletionRequest)
    return request


def refusal(endpoint: Endpoint = Endpoint.CHAT, /, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_request(endpoint, body)
    return caught.value


def chat_refusal(**fields: Any) -> RequestError:
    return refusal(Endpoint.CHAT, **{"messages": [USER_TURN], **fields})


def completion_refusal(**fields: Any) -> RequestError:
    return refusal(Endpoint.COMPLETIONS, **{"prompt": "hello", **fields})


def common_chars(texts: Sequence[str]) -> int:
    """With how many characters all of the texts begin."""
    shortest = min(map(len, texts))
    return next((i for i in range(shortest) if len({text[i] for text in texts}) > 1), shortest)
