"""Shows how a batch comes on: a picture on a terminal, a line now and then elsewhere.

`qsvc run`, `results --follow` and `submit --wait` show the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cli.printable import printable
from cli.terminal import clock_time, fitting, is_live, rate, share
from queue_service.follow import Standing
from queue_service.pace import BatchPace, Rates

_FIRST_LINE_SECONDS: Final = 5.0
_LONGEST_LINE_SECONDS: Final = 60.0
_LEAST_BAR_COLUMNS: Final = 10


@dataclass(frozen=True, slots=True)
class Picture:
    """One moment of a batch, drawn in as many columns as there are."""

    standing: Standing
    rates: Rates

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        right = fitting(self._how_far(), width)
        bar_columns = width - right.cell_len - 1
        grid = Table.grid(padding=(0, 1, 0, 0))
        if bar_columns >= _LEAST_BAR_COLUMNS:
            grid.add_row(self._bar(bar_columns), right)
        else:
            grid.add_row(right)
        yield grid
        yield fitting(self._details(), width)

    def _bar(self, columns: int) -> ProgressBar:
        batch = self.standing.batch
        total = batch.total if batch.is_submitted and batch.total else None
        return ProgressBar(total=total, completed=batch.ended, width=columns, pulse=total is None)

    def _how_far(self) -> list[Text]:
        batch, left = self.standing.batch, self.rates.seconds_left
        of = f"{batch.ended:,}/{batch.total:,}"
        if not batch.is_submitted:
            return [Text(f"{of} so far")]
        done = batch.ended / batch.total if batch.total else 1.0
        parts = [Text(of), Text(share(done), "bold")]
        return parts if left is None else [*parts, Text(f"{clock_time(left)} left", "cyan")]

    def _details(self) -> list[Text]:
        standing, batch = self.standing, self.standing.batch
        parts = [Text(f"{standing.num_running:,} running", "green" if standing.num_running else "")]
        if batch.failed:
            parts.append(Text(f"{batch.failed:,} failed", "red"))
        if batch.cancelled:
            parts.append(Text(f"{batch.cancelled:,} cancelled", "yellow"))
        parts.append(Text(f"{standing.num_waiting:,} waiting"))
        if self.rates.tokens_per_second is not None:
            parts.append(Text(_pace(self.rates), "cyan"))
        if batch.cached_share:
            parts.append(Text(f"{share(batch.cached_share)} of prompts cached"))
        return parts


def plain_line(standing: Standing, rates: Rates) -> str:
    """Return one moment of a batch as a line of a log."""
    batch = standing.batch
    parts = [f"{batch.ended} of {batch.total} done"]
    if standing.num_written is not None:
        parts.append(f"{standing.num_written} written")
    parts.append(_pace(rates))
    if batch.failed:
        parts.append(f"{batch.failed} failed")
    if batch.cancelled:
        parts.append(f"{batch.cancelled} cancelled")
    parts += [f"{standing.num_running} running", f"{standing.num_waiting} waiting"]
    if batch.cached_share:
        parts.append(f"{share(batch.cached_share)} of prompts cached")
    if rates.seconds_left is not None:
        parts.append(f"{clock_time(rates.seconds_left)} left")
    return ", ".join(parts)


def _pace(rates: Rates) -> str:
    average = rates.average_tokens_per_second
    on_average = "" if average is None else f" ({rate(average)} on average)"
    return f"{rate(rates.tokens_per_second or 0)} tok/s{on_average}"


class Progress:
    """Progress on standard error; silent when ``is_shown`` is False.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        is_shown: bool,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True, quiet=not is_shown, highlight=False)
        self._clock = clock
        self._pace = BatchPace()
        self._picture: Picture | None = None
        self._starting = Spinner("dots", "starting")
        self._live: Live | None = None
        if is_shown and is_live(self._console):
            # Standard output is for results, also while the picture is on the same terminal.
            self._live = Live(
                console=self._console,
                get_renderable=lambda: self._picture or self._starting,
                redirect_stdout=False,
            )
        self._first_at: float | None = None
        self._next_line = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.transient = self._picture is None  # nothing came of it
            self._live.stop()

    def note(self, text: str) -> None:
        """Say something once, above the picture."""
        self._console.print(Text(printable(text, keep="\n")), soft_wrap=True)

    def update(self, standing: Standing) -> None:
        """Show a batch as it is now."""
        now = self._clock()
        rates = self._pace.note(now, standing.batch, standing.num_running)
        self._picture = Picture(standing, rates)
        if self._live is None and standing.batch.total and now >= self._next_line:
            self._next_line = now + self._line_seconds(now)
            self.note(plain_line(standing, rates))

    def _line_seconds(self, now: float) -> float:
        """Return when the next line is due: a long run fills no log."""
        if self._first_at is None:
            self._first_at = now
        tenth = (now - self._first_at) / 10
        return min(max(_FIRST_LINE_SECONDS, tenth), _LONGEST_LINE_SECONDS)
