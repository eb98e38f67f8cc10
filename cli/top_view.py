"""Draws an overview of a server: tables that take the columns and rows that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from cli.printable import printable
from cli.terminal import UNKNOWN, clock_time, fitting, rate, share, shortened
from queue_service.batches import Status
from queue_service.doctor import gigabytes
from queue_service.overview import BatchView, Overview, QueueView, RunningJob, WorkerView

_GAP: Final = 2
_LEAST_NAME_COLUMNS: Final = 16
_BAR_COLUMNS: Final = 10
_LATE_BEAT_SECONDS: Final = 5.0
_FULL_SHARE: Final = 0.95
# Of a section's rows, so many are shown before another section gets more.
_FAIR_ROWS: Final = 3

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a section.

    Attributes:
        importance: the columns with the lowest go first where the terminal is narrow.
        is_name: takes what is left, and is shortened; others are as wide as what they hold.
    """

    title: str
    importance: int
    is_name: bool = False
    is_left: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table; its rows have a text for each column."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Text]]

    def lines(self, width: int, most_rows: int | None) -> Iterator[Text]:
        """Yield the title, the heads and up to so many rows, none wider than the width."""
        yield fitting([Text(self.title, "bold")], width)
        if not self.rows:
            return
        kept = self._kept(width)
        widths = self._widths(kept, width)
        heads = [Text(self.columns[index].title, "dim") for index in kept]
        yield self._row(heads, kept, widths)
        for row in self.rows[:most_rows]:
            yield self._row([row[index] for index in kept], kept, widths)
        if most_rows is not None and len(self.rows) > most_rows:
            yield fitting([Text(f"and {len(self.rows) - most_rows:,} more", "dim")], width)

    def _natural(self, index: int) -> int:
        cells = [row[index].cell_len for row in self.rows]
        return max([len(self.columns[index].title), *cells])

    def _least(self, index: int) -> int:
        natural = self._natural(index)
        return min(natural, _LEAST_NAME_COLUMNS) if self.columns[index].is_name else natural

    def _kept(self, width: int) -> list[int]:
        kept = [index for index in range(len(self.columns)) if self._natural(index)]
        while len(kept) > 1:
            needed = sum(self._least(index) for index in kept) + _GAP * (len(kept) - 1)
            if needed <= width:
                break
            kept.remove(min(kept, key=lambda index: self.columns[index].importance))
        return kept

    def _widths(self, kept: Sequence[int], width: int) -> list[int]:
        widths = [self._least(index) for index in kept]
        left = width - sum(widths) - _GAP * (len(kept) - 1)
        names = [place for place, index in enumerate(kept) if self.columns[index].is_name]
        for place in sorted(names, key=lambda place: self._natural(kept[place])):
            more = min(self._natural(kept[place]) - widths[place], max(0, left))
            widths[place] += more
            left -= more
        return [max(1, min(one, width)) for one in widths]

    def _row(self, cells: Sequence[Text], kept: Sequence[int], widths: Sequence[int]) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        for place, (cell, index, width) in enumerate(zip(cells, kept, widths, strict=True)):
            if place:
                line.append(" " * _GAP)
            shown = cell
            if cell.cell_len > width:
                shown = Text(shortened(cell.plain, width), cell.style)
            fill = " " * (width - shown.cell_len)
            column = self.columns[index]
            if column.is_name or column.is_left:
                line.append_text(shown).append(fill)
            else:
                line.append(fill).append_text(shown)
        return line


@dataclass(frozen=True, slots=True)
class Screenful:
    """An overview as it is shown.

    Attributes:
        server: its URL without a password.
        clock: the time of the picture, for people.
        outage: why the server is away, and since when it has been; None while it is there.
        is_cut: only as much is shown as the terminal has rows.
    """

    overview: Overview
    server: str
    clock: str
    outage: str | None = None
    is_cut: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        height = options.size.height if self.is_cut else None
        yield from self.lines(width, height)

    def lines(self, width: int, height: int | None) -> Iterator[Text]:
        """Yield the picture line by line: no more than ``height`` where that is given."""
        head = list(self._head(width))
        sections = self._sections()
        while height is not None and len(sections) > 1 and _least(head, sections) > height:
            sections.pop()
        most: list[int | None] = [None] * len(sections)
        if height is not None:
            left = height - _frame(head, sections)
            most = list(_shared([len(section.rows) for section in sections], left))
        picture = head
        for section, most_rows in zip(sections, most, strict=True):
            picture = [*picture, Text(), *section.lines(width, most_rows)]
        yield from picture[:height]

    def _head(self, width: int) -> Iterator[Text]:
        view = self.overview
        live = [worker for worker in view.workers if worker.is_alive]
        rates = [w.tokens_per_second for w in live if w.tokens_per_second is not None]
        running = sum(queue.num_running for queue in view.queues)
        waiting = sum(queue.num_waiting for queue in view.queues)
        yield fitting(
            [
                Text("qsvc top", "bold"),
                Text(self.clock),
                Text(f"{len(live)} of {len(view.workers)} workers live"),
                Text(f"{rate(sum(rates) if rates else None)} tok/s", "cyan"),
                Text(f"{running:,} running"),
                Text(f"{waiting:,} waiting"),
                Text(printable(self.server), "dim"),
            ],
            width,
        )
        if self.outage is not None:
            yield fitting([Text(printable(self.outage), "bold red")], width)
        if view.is_suspended:
            yield fitting([Text("all workers are suspended (rq resume)", "bold yellow")], width)

    def _sections(self) -> list[Section]:
        view = self.overview
        queues = [queue for queue in view.queues if not queue.is_empty]
        return [
            Section(
                "Workers" if view.workers else "No workers", _WORKERS, _rows(view.workers, _worker)
            ),
            Section("Queues" if queues else "No jobs", _QUEUES, _rows(queues, _queue)),
            Section(
                "Batches" if view.batches else "No open batches",
                _BATCHES,
                _rows(view.batches, _batch),
            ),
            Section(
                "Longest running" if view.longest else "Nothing runs",
                _JOBS,
                _rows(view.longest, _job),
            ),
        ]


def _frame(head: Sequence[Text], sections: Sequence[Section]) -> int:
    """Return the rows that are none of a section's: heads, titles and what is between."""
    return len(head) + sum(3 if section.rows else 2 for section in sections)


def _least(head: Sequence[Text], sections: Sequence[Section]) -> int:
    """Return the rows with which each section shows one of its own and how many are missing."""
    return _frame(head, sections) + sum(min(2, len(section.rows)) for section in sections)


def _shared(wanted: Sequence[int], rows: int) -> Iterator[int]:
    """Share rows among sections: some for each, then the rest from the first on.

    A section that does not get all it wants tells how many are missing, in a row of its own.
    """
    given = [min(want, _FAIR_ROWS) for want in wanted]
    while sum(given) + _told(given, wanted) > rows and any(given):
        given[max(range(len(given)), key=lambda place: (given[place], place))] -= 1
    for place, want in enumerate(wanted):
        while given[place] < want:
            given[place] += 1
            if sum(given) + _told(given, wanted) > rows:
                given[place] -= 1
                break
    yield from given


def _told(given: Sequence[int], wanted: Sequence[int]) -> int:
    return sum(have < want for have, want in zip(given, wanted, strict=True))


def _rows(items: Iterable[_Item], row: Callable[[_Item], Sequence[Text]]) -> list[Sequence[Text]]:
    return [row(item) for item in items]


_WORKERS: Final = (
    Column("worker", 100, is_name=True),
    Column("model", 60, is_name=True),
    Column("beat", 80, is_left=True),
    Column("rows", 85),
    Column("tok/s", 90),
    Column("prompt tok/s", 30),
    Column("keys+values", 50),
    Column("prefix hits", 40),
    Column("done", 55),
    Column("failed", 65),
)


def _worker(worker: WorkerView) -> Sequence[Text]:
    kv = share(worker.kv_share)
    budget = f" of {gigabytes(worker.kv_budget_bytes)}" if worker.kv_budget_bytes else ""
    return (
        Text(printable(worker.name), "" if worker.is_alive else "dim"),
        Text(printable(worker.model or UNKNOWN)),
        _beat(worker),
        Text(f"{worker.rows:,}"),
        Text(rate(worker.tokens_per_second), "cyan"),
        Text(rate(worker.prompt_tokens_per_second)),
        Text(f"{kv}{budget}", "yellow" if (worker.kv_share or 0) > _FULL_SHARE else ""),
        Text(share(worker.hit_share)),
        Text(f"{worker.finished:,}"),
        _bad(worker.failed),
    )


def _beat(worker: WorkerView) -> Text:
    if worker.beat_seconds is None:
        return Text("dead", "bold red")
    ago = clock_time(worker.beat_seconds)
    if not worker.is_alive:
        return Text(f"dead {ago}", "bold red")
    if worker.beat_seconds > _LATE_BEAT_SECONDS:
        return Text(f"late {ago}", "yellow")
    return Text(f"{ago} {printable(worker.state)}".rstrip(), "green")


_QUEUES: Final = (
    Column("queue", 100, is_name=True),
    Column("waiting", 90),
    Column("running", 80),
    Column("later", 30),
    Column("failed", 60),
    Column("", 70, is_left=True),
)


def _queue(queue: QueueView) -> Sequence[Text]:
    is_stuck = queue.num_waiting and not queue.is_served
    return (
        Text(printable(queue.name)),
        Text(f"{queue.num_waiting:,}"),
        Text(f"{queue.num_running:,}", "green" if queue.num_running else ""),
        Text(f"{queue.num_scheduled:,}"),
        _bad(queue.num_failed),
        Text("no worker serves it" if is_stuck else "", "bold red"),
    )


_BATCHES: Final = (
    Column("batch", 100, is_name=True),
    Column("model", 30, is_name=True),
    Column("", 40, is_left=True),
    Column("ended", 90),
    Column("running", 60),
    Column("failed", 70),
    Column("tok/s", 65),
    Column("cached", 35),
    Column("left", 80),
    Column("", 20, is_left=True),
)


def _batch(view: BatchView) -> Sequence[Text]:
    batch, rates = view.batch, view.rates
    state = "" if batch.status is Status.IN_PROGRESS else batch.status.value
    left = UNKNOWN if rates.seconds_left is None else clock_time(rates.seconds_left)
    return (
        Text(printable(batch.id)),
        Text(printable(batch.model)),
        _bar(batch.ended / batch.total if batch.total else 0.0),
        Text(f"{batch.ended:,}/{batch.total:,}" + ("" if batch.is_submitted else "+")),
        Text(f"{view.num_running:,}", "green" if view.num_running else ""),
        _bad(batch.failed),
        Text(rate(rates.tokens_per_second), "cyan"),
        Text(share(batch.cached_share)),
        Text(left, "cyan"),
        Text(state, "yellow"),
    )


def _bar(done: float) -> Text:
    filled = int(min(1.0, done) * _BAR_COLUMNS)
    return Text("━" * filled, "green").append("─" * (_BAR_COLUMNS - filled), "dim")


_JOBS: Final = (
    Column("job", 100, is_name=True),
    Column("worker", 80, is_name=True),
    Column("for", 90),
)


def _job(job: RunningJob) -> Sequence[Text]:
    return (
        Text(printable(job.job_id)),
        Text(printable(job.worker or UNKNOWN)),
        Text(clock_time(job.seconds)),
    )


def _bad(count: int) -> Text:
    return Text(f"{count:,}", "red" if count else "")
