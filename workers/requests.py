"""What flows through the worker: a request made ready, and how its generation ended."""

from __future__ import annotations

from dataclasses import dataclass

from queue_service.broker import Claimed
from queue_service.payload import Encoding
from queue_service.requests import Endpoint
from queue_service.responses import FinishReason
from workers.sampling import SamplingPlan


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A claimed job whose body was read, checked, rendered and tokenised.

    Attributes:
        model: the name the answer carries.
        prompt_ids: token ids, at least one, all inside the vocabulary.
        token_limit: the most tokens to generate, at least 1.
        stop_strings: none of them empty.
        stream: the text is wanted in the job's stream as it comes.
        encoding: how the job was serialized, and so how its result is.
    """

    claimed: Claimed
    endpoint: Endpoint
    model: str
    prompt_ids: tuple[int, ...]
    token_limit: int
    sampling: SamplingPlan
    stop_strings: tuple[str, ...]
    stream: bool
    encoding: Encoding

    @property
    def execution_id(self) -> str:
        """The execution that runs this request; the key of its row everywhere."""
        return self.claimed.execution_id


@dataclass(frozen=True, slots=True)
class Generated:
    """A generation that came to its end."""

    request: PreparedRequest
    text: str
    finish_reason: FinishReason
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def claimed(self) -> Claimed:
        """The execution that this ends."""
        return self.request.claimed


@dataclass(frozen=True, slots=True)
class Refused:
    """An execution that ended without an answer; the error's class decides what becomes of it."""

    claimed: Claimed
    error: Exception


Result = Generated | Refused
