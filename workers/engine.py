"""The seam between the worker and whatever generates tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from workers.requests import PreparedRequest


@dataclass(frozen=True, slots=True)
class Token:
    """One token that a row of the batch generated."""

    execution_id: str
    token_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A row that left the batch without an ending; the error's class says what becomes of it."""

    execution_id: str
    error: Exception


class Engine(Protocol):
    """Generates tokens for many rows at once. Every method is called on the engine thread."""

    def add(self, requests: Iterable[PreparedRequest]) -> None:
        """Take requests in; they join the batch as rows when there is room for them."""

    def remove(self, execution_ids: Iterable[str]) -> None:
        """Forget rows wherever they are; unknown ids are ignored."""

    def step(self) -> list[Token | Failed]:
        """Do one bounded piece of work; return the tokens that became known, at most one a row.

        A row that generated an end-of-sequence token or reached its limit leaves the batch.
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
