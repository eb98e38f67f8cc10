"""Turns a result into what is written to Redis for it."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from queue_service.broker import Claimed, Ending, Outcome
from queue_service.errors import QsvcError, RequestError
from queue_service.payload import encode_answer
from queue_service.responses import Usage, completion_body
from queue_service.settings import RetentionSettings
from workers.errors import (
    InsufficientMemory,
    InvalidAnswer,
    InvalidLogits,
    Stopped,
    TimedOut,
    TransientError,
    WorkerLost,
)
from workers.preparation import wants_stream
from workers.requests import Generated, Refused, Result

logger = logging.getLogger(__name__)

_BACKOFF_SECONDS = 5

_CODES: Mapping[type[Exception], tuple[str, int]] = {
    TimedOut: ("timeout", 504),
    Stopped: ("stopped", 499),
    WorkerLost: ("worker_lost", 500),
    TransientError: ("unavailable", 503),
    InvalidLogits: ("invalid_logits", 500),
    InvalidAnswer: ("invalid_answer", 500),
    InsufficientMemory: ("insufficient_memory", 507),
}


class OutcomeWriter:
    """Knows how long things are kept and what an answer looks like.

    Args:
        fingerprint: the ``system_fingerprint`` of every answer.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        retention: RetentionSettings,
        *,
        fingerprint: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._retention = retention
        self._fingerprint = fingerprint
        self._clock = clock

    def outcome(self, result: Result) -> Outcome:
        """Return what to write for a result."""
        if isinstance(result, Refused):
            return self._refused(result)
        try:
            wrong = next(filter(None, map(result.request.form.check, result.choices)), None)
        except Exception as error:  # a checker's fault is that answer's alone
            logger.exception("an answer cannot be checked job=%s", result.claimed.job_id)
            wrong = f"{type(error).__name__} while it was checked"
        if wrong is not None:
            return self._refused(Refused(result.claimed, InvalidAnswer(wrong)))
        return self._answered(result)

    def _answered(self, result: Generated) -> Outcome:
        request, now = result.request, self._clock()
        usage = Usage(
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=sum(choice.completion_tokens for choice in result.choices),
            cached_tokens=result.cached_tokens,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in result.choices),
        )
        body = completion_body(
            request.endpoint,
            job_id=request.claimed.job_id,
            model=request.model,
            created=int(now),
            choices=result.choices,
            usage=usage,
            fingerprint=self._fingerprint,
        )
        return Outcome(
            ending=Ending.FINISHED,
            payload=encode_answer(body, request.encoding),
            error=None,
            keep_seconds=_asked(request.claimed, "result_ttl", self._retention.result_seconds),
            ended_at=now,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            stream_end=("e", "done", "f", result.choices[0].finish_reason.value),
            has_stream=request.stream,
            stream_keep_seconds=self._retention.stream_seconds,
        )

    def _refused(self, result: Refused) -> Outcome:
        error = _error_object(result.error)
        name = f"{type(result.error).__module__}.{type(result.error).__qualname__}"
        text = f"{name}: {result.error}"
        if not isinstance(result.error, QsvcError):
            text = "".join(traceback.format_exception(result.error))
        stopped = isinstance(result.error, Stopped)
        return Outcome(
            ending=Ending.STOPPED if stopped else Ending.FAILED,
            payload=text.encode("utf-8", "replace"),
            error=error,
            keep_seconds=_asked(result.claimed, "failure_ttl", self._retention.failure_seconds),
            ended_at=self._clock(),
            may_retry=not isinstance(
                result.error, RequestError | Stopped | WorkerLost | InsufficientMemory
            ),
            retry_seconds=_BACKOFF_SECONDS if isinstance(result.error, TransientError) else None,
            stream_end=("e", "error", "code", error["code"], "message", error["message"]),
            has_stream=wants_stream(result.claimed),
            stream_keep_seconds=self._retention.stream_seconds,
        )


def _error_object(error: Exception) -> dict[str, Any]:
    if isinstance(error, RequestError):
        return {**error.to_error(), "status_code": error.status_code}
    code, status_code = _CODES.get(type(error), ("internal_error", 500))
    message = str(error) if isinstance(error, QsvcError) else f"{type(error).__name__}: {error}"
    return {
        "message": message,
        "type": "server_error",
        "param": None,
        "code": code,
        "status_code": status_code,
    }


def _asked(claimed: Claimed, field: str, default: int) -> int:
    value = claimed.number(field)
    return default if value is None else value
