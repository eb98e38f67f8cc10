"""Shows how a batch comes on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from queue_service.batches import Batch

_LINE_SECONDS = 5.0


class Progress:
    """Progress on standard error; silent when ``is_shown`` is False."""

    def __init__(self, *, is_shown: bool) -> None:
        self._console = Console(stderr=True, quiet=not is_shown, highlight=False)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, note="")
        self._first: tuple[float, Batch] | None = None
        self._next_line = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """Say something once, above the bar."""
        self._console.print(text, soft_wrap=True, markup=False)

    def update(self, batch: Batch, num_written: int) -> None:
        """Show a batch as it is now."""
        now = time.monotonic()
        if self._first is None:
            self._first = (now, batch)
        started, first = self._first
        seconds = max(now - started, 1e-9)
        tokens_per_second = (batch.completion_tokens - first.completion_tokens) / seconds
        total = batch.total if batch.is_submitted else None
        failed = f", {batch.failed} failed" if batch.failed else ""
        note = f"{tokens_per_second:.0f} tok/s{failed}"
        self._bar.update(
            self._task, description="running", completed=batch.ended, total=total, note=note
        )
        if batch.total and not self._console.is_terminal and now >= self._next_line:
            self._next_line = now + _LINE_SECONDS
            self.note(f"{batch.ended} of {batch.total} done, {num_written} written, {note}")
