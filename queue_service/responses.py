"""The bodies and lines that clients read: completions, errors, batch output lines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from queue_service.requests import Endpoint


class FinishReason(StrEnum):
    """Why a choice ended: a stop string or end-of-sequence token, or the token limit."""

    STOP = "stop"
    LENGTH = "length"


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
    text: str,
    finish_reason: FinishReason,
    usage: Usage,
    fingerprint: str,
) -> dict[str, Any]:
    """Return the answer to one request in the shape of its endpoint.

    Args:
        created: seconds since the epoch.
        fingerprint: names what could change the output: weights, dtype, versions.
    """
    if endpoint is Endpoint.CHAT:
        kind, prefix = "chat.completion", "chatcmpl-"
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": finish_reason.value,
            "message": {
                "role": "assistant",
                "content": text,
                "refusal": None,
                "tool_calls": [],
                "reasoning_content": None,
                "reasoning": None,
            },
            "logprobs": None,
        }
    else:
        kind, prefix = "text_completion", "cmpl-"
        choice = {
            "index": 0,
            "text": text,
            "finish_reason": finish_reason.value,
            "logprobs": None,
        }
    return {
        "id": prefix + job_id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": [choice],
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
