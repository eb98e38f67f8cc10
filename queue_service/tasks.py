"""The function names that application code enqueues; only a qsvc worker runs what they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from queue_service.errors import ConfigurationError

CHAT = "queue_service.tasks.chat"
COMPLETION = "queue_service.tasks.completion"


def chat(body: Mapping[str, Any]) -> NoReturn:
    """Stand for one chat completion: ``queue.enqueue(tasks.chat, body)``.

    Raises:
        ConfigurationError: always; a stock rq worker has no model.
    """
    raise _needs_our_worker(CHAT)


def completion(body: Mapping[str, Any]) -> NoReturn:
    """Stand for one text completion: ``queue.enqueue(tasks.completion, body)``.

    Raises:
        ConfigurationError: always; a stock rq worker has no model.
    """
    raise _needs_our_worker(COMPLETION)


def _needs_our_worker(function: str) -> ConfigurationError:
    return ConfigurationError(
        f"{function} was called by a stock rq worker. Stop that worker, start `qsvc worker` on "
        "the queue and requeue the job."
    )
