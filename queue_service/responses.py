"""The bodies and lines that clients read: completions, errors, batch output lines."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from queue_service.requests import Endpoint


class FinishReason(StrEnum):
    """Why a choice ended: a stop string or token, the token limit, or calls of tools."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's bytes and its log-probability, natural logarithm."""

    token: bytes
    logprob: float

    @property
    def text(self) -> str:
        """The bytes as text; a part of a character is U+FFFD."""
        return self.token.decode("utf-8", "replace")

    def to_body(self) -> dict[str, Any]:
        """Return the object of a chat answer."""
        return {"token": self.text, "bytes": list(self.token), "logprob": self.logprob}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A completion token, and the likeliest tokens at its place, likeliest first."""

    token: Logprob
    top: tuple[Logprob, ...] = ()

    def to_body(self) -> dict[str, Any]:
        """Return the object of a chat answer."""
        return {**self.token.to_body(), "top_logprobs": [one.to_body() for one in self.top]}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model asks for; ``arguments`` is JSON text of an object."""

    id: str
    name: str
    arguments: str

    def to_body(self) -> dict[str, Any]:
        """Return the object of a chat answer."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def tool_call_text(index: int, call: Mapping[str, Any]) -> str:
    """Return what a stream tells of a choice's call: its object with its index, as JSON."""
    return json.dumps({"index": index, **call}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to one prompt.

    Attributes:
        text: what is no reasoning and no tool call.
        completion_tokens: all of its tokens, those of reasoning and calls too.
        logprobs: one entry a completion token, None when nobody asked.
        is_cut: the limit or a stop string ended it, not the model.
    """

    text: str
    finish_reason: FinishReason
    completion_tokens: int
    reasoning: str = ""
    reasoning_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    is_cut: bool = False

    def to_body(self, endpoint: Endpoint, index: int) -> dict[str, Any]:
        """Return the choice in the shape of its endpoint."""
        head = {"index": index, "finish_reason": self.finish_reason.value}
        if endpoint is Endpoint.COMPLETIONS:
            return {**head, "text": self.text, "logprobs": self._text_logprobs()}
        logprobs = None
        if self.logprobs is not None:
            content = [one.to_body() for one in self.logprobs]
            logprobs = {"content": content, "refusal": None}
        message = {
            "role": "assistant",
            "content": None if self.tool_calls and not self.text else self.text,
            "refusal": None,
            "tool_calls": [call.to_body() for call in self.tool_calls],
            "reasoning_content": self.reasoning or None,
            "reasoning": self.reasoning or None,
        }
        return {**head, "message": message, "logprobs": logprobs}

    def _text_logprobs(self) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        texts = [one.token.text for one in self.logprobs]
        offsets = [0, *itertools.accumulate(len(text) for text in texts)][: len(texts)]
        return {
            "tokens": texts,
            "token_logprobs": [one.token.logprob for one in self.logprobs],
            "top_logprobs": [
                {like.text: like.logprob for like in one.top} for one in self.logprobs
            ],
            "text_offset": offsets,
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; cached tokens are part of the prompt tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def to_body(self) -> dict[str, Any]:
        """Return the ``usage`` object of a completion."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


def completion_body(
    endpoint: Endpoint,
    *,
    job_id: str,
    model: str,
    created: int,
    choices: Sequence[Choice],
    usage: Usage,
    fingerprint: str,
) -> dict[str, Any]:
    """Return the answer to one request in the shape of its endpoint.

    Args:
        created: seconds since the epoch.
        fingerprint: names what could change the output: weights, dtype, versions.
    """
    kind, prefix = "text_completion", "cmpl-"
    if endpoint is Endpoint.CHAT:
        kind, prefix = "chat.completion", "chatcmpl-"
    return {
        "id": prefix + job_id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": [choice.to_body(endpoint, index) for index, choice in enumerate(choices)],
        "usage": usage.to_body(),
        "system_fingerprint": fingerprint,
    }


def fingerprint(*parts: str) -> str:
    """Return the ``system_fingerprint`` of what is named by the parts."""
    return "fp_" + hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


# Batch output lines: every line has the same keys, null where empty --------------------------


def output_line_id(job_id: str) -> str:
    """Return the id of the output line of a job; it tells which batch and line it belongs to."""
    return f"batch_req_{job_id.removeprefix('batch_')}"


def success_line(job_id: str, custom_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the output line of a request that was answered."""
    return _line(job_id, custom_id, {"status_code": 200, "request_id": job_id, "body": body}, None)


def failure_line(job_id: str, custom_id: str, error: Mapping[str, Any]) -> dict[str, Any]:
    """Return the output line of a request that was refused or failed.

    Args:
        error: an OpenAI error object, with ``status_code`` beside its four keys.
    """
    detail = {key: error.get(key) for key in ("message", "type", "param", "code")}
    response = {
        "status_code": error.get("status_code", 500),
        "request_id": job_id,
        "body": {"error": detail},
    }
    brief = {"code": detail["code"], "message": detail["message"], "line": error.get("line")}
    return _line(job_id, custom_id, response, brief)


def unanswered_line(job_id: str, custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Return the output line of a request that never got an answer (cancelled, expired)."""
    return _line(job_id, custom_id, None, {"code": code, "message": message, "line": None})


def _line(
    job_id: str,
    custom_id: str,
    response: Mapping[str, Any] | None,
    error: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        "id": output_line_id(job_id),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
