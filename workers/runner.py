"""The seam between the step loop and the ways to run a model over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from queue_service.errors import QsvcError
from workers.checkpoints.identity import CacheFacts
from workers.checkpoints.records import Layer


class NotBatchable(QsvcError):
    """A model cannot be run in this way."""


class NotExtractable(QsvcError):
    """What a row holds cannot be copied out of the runner."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Consecutive tokens of a row's prompt, those after what the row holds already."""

    row_id: str
    tokens: Sequence[int]


class Runner(Protocol):
    """Holds what a model keeps of each row and runs it forward. Used on one thread.

    Nothing is evaluated unless it says so: the caller decides when to wait for the device.
    """

    def row_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a row of so many tokens takes, padding included."""

    def add(self, rows: Mapping[str, int]) -> None:
        """Make room for rows, each of so many prompt tokens."""

    @property
    def is_sliceable(self) -> bool:
        """Whether what a row holds of its first tokens can be had alone."""

    def shared_tokens(self, length: int) -> int:
        """Return how many of so many first tokens rows can have in common, lying there once."""

    def add_with(self, rows: Mapping[str, int], state: Any, length: int, shared: int) -> None:
        """Make room for rows, each of so many tokens, that begin with ``length`` ones of a state.

        Args:
            shared: so many of them stay where they are, for all rows that begin with this state,
                which the caller keeps and never changes; the others are copied.
        """

    def extract(self, row_id: str, length: int | None = None) -> Any:
        """Return a copy of what a row holds of its first tokens, evaluated, for `add_with`.

        Raises:
            NotExtractable: mlx-lm cannot copy what this model keeps.
        """

    def is_finite(self, state: Any) -> bool:
        """Return whether every number of a state is one; others would spread."""

    def describe_layers(self) -> list[CacheFacts]:
        """Return what each layer keeps of a row: the same where states fit each other."""

    def to_layers(self, state: Any, start: int, stop: int) -> tuple[Layer, ...]:
        """Return a state as plain arrays: of the tokens from start to stop, where each has its own.

        Raises:
            NotExtractable: a layer keeps what cannot be stored.
        """

    def from_layers(self, layers: Sequence[Layer], length: int) -> Any:
        """Return the state after ``length`` tokens that plain arrays hold.

        Raises:
            ValueError: they are of another model or length.
        """

    def drop(self, row_id: str) -> None:
        """Forget a row, if it is known."""

    def shrink(self) -> None:
        """Give back what no row uses."""

    def clear(self) -> None:
        """Forget every row."""

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[mx.array]:
        """Take chunks of prompts in; return what must be evaluated for it to have happened."""

    def arrange(self, row_ids: Sequence[str]) -> list[str]:
        """Seat rows for the next `decode`; return them in the order that its tokens must have."""

    def decode(self, order: Sequence[str], tokens: mx.array) -> mx.array:
        """Feed one token to each row, (rows,) in the order of `arrange`; return their logits.

        Returns:
            (rows, vocabulary), not evaluated.
        """

    @property
    def nbytes(self) -> int:
        """Bytes that rows take, padding included."""

    @property
    def peak_bytes(self) -> int:
        """The most that `nbytes` has been."""
