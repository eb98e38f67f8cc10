"""The bodies that clients read: completions, errors, batch output lines."""

from __future__ import annotations

from typing import Any

import pytest

from queue_service.errors import LineError, RequestError
from queue_service.requests import Endpoint, parse_request
from queue_service.responses import (
    Choice,
    FinishReason,
    Usage,
    completion_body,
    failure_line,
    fingerprint,
    output_line_id,
    success_line,
    unanswered_line,
)
from queue_service.streams import text_of

JOB = "batch_0123456789abcdef01234567-12"


def body(endpoint: Endpoint, text: str = "an answer") -> dict[str, Any]:
    return completion_body(
        endpoint,
        job_id=JOB,
        model="smollm2-135m",
        created=1_700_000_000,
        choices=[Choice(text, FinishReason.LENGTH, completion_tokens=3)],
        usage=Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=5),
        fingerprint="fp_x",
    )


def test_a_chat_answer_has_every_field_that_clients_read() -> None:
    answer = body(Endpoint.CHAT)
    assert answer["id"] == f"chatcmpl-{JOB}"
    assert answer["object"] == "chat.completion"
    assert answer["created"] == 1_700_000_000
    assert answer["model"] == "smollm2-135m"
    assert answer["system_fingerprint"] == "fp_x"
    [choice] = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert choice["message"] == {
        "role": "assistant",
        "content": "an answer",
        "refusal": None,
        "tool_calls": [],
        "reasoning_content": None,
        "reasoning": None,
    }


def test_a_text_answer_has_its_own_shape() -> None:
    answer = body(Endpoint.COMPLETIONS)
    assert answer["id"] == f"cmpl-{JOB}"
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "an answer", "finish_reason": "length", "logprobs": None}
    ]


def test_usage_adds_up_and_counts_cached_tokens_as_prompt_tokens() -> None:
    assert body(Endpoint.CHAT)["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize("text", ["an answer", ""])
def test_the_text_of_an_answer_is_found_in_either_shape(endpoint: Endpoint, text: str) -> None:
    assert text_of(body(endpoint, text)) == text


def test_an_answer_can_be_sent_back_as_an_earlier_turn() -> None:
    message = body(Endpoint.CHAT)["choices"][0]["message"]
    history = [{"role": "user", "content": "q"}, message, {"role": "user", "content": "q2"}]
    parse_request(Endpoint.CHAT, {"messages": history})


def test_the_fingerprint_names_its_parts_and_their_borders() -> None:
    assert fingerprint("a", "b") == fingerprint("a", "b")
    assert len({fingerprint("a", "b"), fingerprint("ab"), fingerprint("b", "a")}) == 3


def test_output_line_ids_tell_batch_and_line() -> None:
    assert output_line_id(JOB) == "batch_req_0123456789abcdef01234567-12"


def test_an_answered_line_has_status_200_and_no_error() -> None:
    answer = body(Endpoint.CHAT)
    assert success_line(JOB, "c1", answer) == {
        "id": output_line_id(JOB),
        "custom_id": "c1",
        "response": {"status_code": 200, "request_id": JOB, "body": answer},
        "error": None,
    }


def test_a_refused_line_tells_code_and_number_in_both_places_that_readers_look_at() -> None:
    refusal = LineError(
        "'max_tokens' must be at least 1", line=12, custom_id="c1", param="max_tokens"
    )
    error = {**refusal.to_error(), "status_code": refusal.status_code, "line": refusal.line}
    line = failure_line(JOB, "c1", error)
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"] == {
        "error": {
            "message": "'max_tokens' must be at least 1",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": "invalid_request",
        }
    }
    assert line["error"] == {
        "code": "invalid_request",
        "message": "'max_tokens' must be at least 1",
        "line": 12,
    }


def test_a_failed_line_keeps_its_status_and_has_no_line_number() -> None:
    failure = RequestError("too busy", code="overloaded", status_code=503, type="server_error")
    line = failure_line(JOB, "c1", {**failure.to_error(), "status_code": failure.status_code})
    assert line["response"]["status_code"] == 503
    assert line["error"] == {"code": "overloaded", "message": "too busy", "line": None}


def test_a_line_that_never_ran_has_no_response() -> None:
    line = unanswered_line(JOB, "c1", "batch_cancelled", "cancelled")
    assert line["response"] is None
    assert line["error"] == {"code": "batch_cancelled", "message": "cancelled", "line": None}
