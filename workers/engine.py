"""The seam between the worker and whatever generates tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from workers.sampling import SamplingPlan


class TokenMatcher(Protocol):
    """Says which tokens may come next in one row, and follows the tokens that came."""

    def fill(self, mask_row: npt.NDArray[np.uint32]) -> None:
        """Set the bits of the allowed token ids: bit ``id % 32`` of word ``id // 32``."""

    def accept(self, token_id: int) -> None:
        """Take the next token; raises when it was not allowed."""


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What changes a row's logits before its token is drawn.

    Attributes:
        bias: what is added to the logits of single tokens, at most one entry an id.
        repetition_penalty: logits of tokens in the prompt or the answer are divided by it, or
            multiplied where they are negative; 1 changes nothing.
        frequency_penalty: taken off a token's logit for each time that it is in the answer.
        presence_penalty: taken off once for a token that is in the answer.
        min_tokens: until the answer has so many, no token of ``stop_ids`` is drawn.
    """

    bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far matter."""
        return bool(self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty)


NO_RULES = LogitRules()


@dataclass(frozen=True, slots=True, eq=False)
class RowRequest:
    """One sequence to generate.

    Attributes:
        row_id: its key everywhere in the engine.
        prompt_ids: token ids, at least one, all inside the vocabulary.
        token_limit: the most tokens to generate, at least 1.
        stop_ids: a row that generates one of these has ended with it.
        matcher: what the tokens must follow; the row's own.
        num_top_logprobs: log-probabilities wanted beside the token's own; None for none at all.
        priority: among the rows that wait for room, higher goes first.
        keep: after so many tokens of the prompt its keys and values are kept for later prompts.
        keeps_answer: so are those of prompt and answer, for a chat that goes on.
        is_sibling: another choice of the request, added before, has the same prompt.
        generated_ids: tokens of the answer that an earlier row has generated, fewer than the
            limit: the row goes on after them as if it had generated them itself.
    """

    row_id: str
    prompt_ids: tuple[int, ...]
    token_limit: int
    sampling: SamplingPlan
    stop_ids: frozenset[int] = frozenset()
    rules: LogitRules = NO_RULES
    matcher: TokenMatcher | None = None
    num_top_logprobs: int | None = None
    priority: int = 0
    keep: tuple[int, ...] = ()
    keeps_answer: bool = False
    is_sibling: bool = False
    generated_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token, and the likeliest tokens at its place, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Token:
    """One token that a row of the batch generated."""

    row_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """A row that took its place, with so many tokens of its prompt from what others computed."""

    row_id: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A row whose keys and values are kept: those of prompt and answer but for its last token."""

    row_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A row that left the batch without an ending; the error's class says what becomes of it."""

    row_id: str
    error: Exception


Event = Begun | Token | Kept | Failed


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step did.

    Attributes:
        began: seconds of the monotonic clock.
        chunks: rows whose prompts it took in, and how many tokens of each.
        decoded: rows that have a token more with it.
    """

    began: float
    chunks: Sequence[tuple[str, int]]
    decoded: Sequence[str]


class Engine(Protocol):
    """Generates tokens for many rows at once. Every method is called on the engine thread.

    Attributes:
        on_step: told what each step did, if anybody wants to know.
    """

    on_step: Callable[[StepWork], None] | None

    def add(self, requests: Iterable[RowRequest]) -> None:
        """Take requests in; they join the batch as rows when there is room for them."""

    def expect(self, prompts: Iterable[Sequence[int]]) -> None:
        """Note prompts that are about to come: what rows have in common with them is kept."""

    def remove(self, row_ids: Iterable[str]) -> None:
        """Forget rows wherever they are; unknown ids are ignored."""

    def step(self) -> list[Event]:
        """Do one bounded piece of work; return what happened, at most one token a row.

        A row that generated one of its stop ids or reached its limit leaves the batch.
        """

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @property
    def num_rows(self) -> int:
        """Rows waiting, being prefilled or decoded."""

    @property
    def peak_bytes(self) -> int:
        """The most memory that the model and its rows took."""

    @property
    def kv_bytes(self) -> int:
        """What the keys and values of its rows take now."""
