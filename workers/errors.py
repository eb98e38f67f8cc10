"""How a job can fail that is no fault of its request; the class decides what becomes of it."""

from __future__ import annotations

from queue_service.errors import QsvcError


class TimedOut(QsvcError):
    """The job ran longer than it said it may."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"the job ran longer than its timeout of {seconds} seconds")


class Stopped(QsvcError):
    """Somebody sent a stop command for the job."""

    def __init__(self) -> None:
        super().__init__("the job was stopped by a stop command")


class TransientError(QsvcError):
    """The job is not at fault and may well succeed later: it goes back to the queue."""


class WorkerLost(QsvcError):
    """Workers were lost while running the job, more often than is allowed."""

    def __init__(self, deaths: int) -> None:
        super().__init__(
            f"{deaths} workers in a row died while running this job, before it generated "
            "anything; it is not tried again"
        )


class InvalidLogits(QsvcError):
    """The model gave no usable numbers for a row."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(
            f"no token could be chosen after {num_tokens} tokens of prompt and answer: the model "
            "gave no finite number for any that is allowed; try a wider dtype (--dtype float32 or "
            "bfloat16)"
        )


class InvalidAnswer(QsvcError):
    """An answer that should follow a constraint does not."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the answer does not follow its constraint: {reason}")


class InsufficientMemory(QsvcError):
    """A row needs more memory for its keys and values than the worker has for all rows."""

    def __init__(self, num_tokens: int, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"{num_tokens} tokens need {needed_bytes / 1e6:,.0f} MB of KV memory and this worker "
            f"has {budget_bytes / 1e6:,.0f} MB (--kv-memory); shorten the prompt, set a smaller "
            "max_tokens, or give the worker more"
        )
