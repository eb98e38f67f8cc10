"""Shows the texts of several jobs as they come: finished lines scroll, open ones stand below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, Self
from zlib import crc32

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.options import print_json
from cli.printable import printable
from cli.terminal import fitting, shortened
from queue_service.batch_tail import LineEvent
from queue_service.batches import Batch
from queue_service.streams import End, EndReason, Event, Restarted, TextKind
from queue_service.streams import Text as Piece

_COLOURS: Final = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")
_MOST_NAME_COLUMNS: Final = 24
# Below the open lines: how far the batch is. Above them there should be something to read.
_OTHER_ROWS: Final = 6


class TailView(Protocol):
    """Shows events, in a block that it is entered for."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, told: LineEvent, batch: Batch | None) -> None:
        """Show what a line tells; the batch is as it was seen last."""

    def note(self, text: str) -> None:
        """Say something once."""


def is_shown(event: Event) -> bool:
    """Whether a person is shown it: of the first choice the text, and how the job ended."""
    match event:
        case Piece(choice=0, kind=TextKind.TEXT) | Restarted(choice=0) | End():
            return True
    return False


def event_object(job_id: str, event: Event) -> dict[str, object]:
    """Return an event for ``--json``."""
    match event:
        case Piece():
            text = {"choice": event.choice, "kind": event.kind.value, "text": event.text}
            return {"event": "text", "job_id": job_id, **text}
        case Restarted(choice):
            return {"event": "restarted", "job_id": job_id, "choice": choice}
        case End(reason, message):
            return {"event": "end", "job_id": job_id, "reason": reason.value, "message": message}


def ending(end: End) -> str:
    """Return how a job ended, for people."""
    return end.reason.value + (f": {end.message}" if end.message else "")


class _Block:
    """A view without a picture of its own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class JsonView(_Block):
    """An object for each event, one a line."""

    def show(self, told: LineEvent, batch: Batch | None) -> None:
        """Show what a line tells; the batch is as it was seen last."""
        of_line = {"line": told.ref.line, "custom_id": told.ref.custom_id}
        print_json({**event_object(told.job_id, told.event), **of_line})

    def note(self, text: str) -> None:
        """Say nothing: the output is for programs."""


class AnswerView(_Block):
    """Whole answers in the order of their ends, each line behind its custom id.

    Args:
        write: takes a line.
        say: takes what is not for standard output.
    """

    def __init__(self, write: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._write = write
        self._say = say
        self._texts: dict[str, list[str]] = {}

    def show(self, told: LineEvent, batch: Batch | None) -> None:
        """Show what a line tells; the batch is as it was seen last."""
        if not is_shown(told.event):
            return
        texts = self._texts.setdefault(told.job_id, [])
        match told.event:
            case Piece(text=text):
                texts.append(text)
            case Restarted():
                texts.clear()
            case End() as end:
                name = printable(told.ref.custom_id or told.job_id)
                text = "".join(self._texts.pop(told.job_id))
                is_done = end.reason is EndReason.DONE
                if text or is_done:
                    for line in text.removesuffix("\n").split("\n"):
                        self._write(f"{name}: {line}")
                if not is_done:
                    self._say(printable(f"{told.job_id} ({name}): {ending(end)}"))

    def note(self, text: str) -> None:
        """Say something once."""
        self._say(text)


@dataclass(slots=True)
class _Open:
    """A job that tells its text: the line that has not ended yet, and whether any was told."""

    name: str
    line: str = ""
    has_text: bool = False


class LiveView:
    """For a terminal: what is complete scrolls by, below it each open line with its job's name."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open: dict[str, _Open] = {}
        self._batch: Batch | None = None
        self._live = Live(
            console=console,
            get_renderable=self._picture,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._open.values():
            if one.line:
                self._print(one.name, Text(printable(one.line, keep="\t")))
        self._open = {}
        self._batch = None
        self._live.stop()

    def note(self, text: str) -> None:
        """Say something once."""
        self._console.print(Text(printable(text), "yellow"))

    def show(self, told: LineEvent, batch: Batch | None) -> None:
        """Show what a line tells; the batch is as it was seen last."""
        self._batch = batch
        if not is_shown(told.event):
            return
        name = told.ref.custom_id or told.job_id
        one = self._open.pop(told.job_id, None) or _Open(name)
        match told.event:
            case Piece(text=text):
                *complete, last = (one.line + text).split("\n")
                for line in complete:
                    self._print(name, Text(printable(line.rstrip("\r"), keep="\t")))
                # The job that told something last stands last.
                self._open[told.job_id] = _Open(name, last, has_text=True)
            case Restarted():
                if one.has_text:
                    self._print(name, Text("begins anew on another worker", "yellow"))
                self._open[told.job_id] = _Open(name)
            case End() as end:
                self._finish(one, end)

    def _finish(self, one: _Open, end: End) -> None:
        if one.line:
            self._print(one.name, Text(printable(one.line, keep="\t")))
        if end.reason is not EndReason.DONE:
            self._print(one.name, Text(printable(ending(end)), "red"))
        elif not one.has_text:
            self._print(one.name, Text("no text", "dim"))

    def _print(self, name: str, text: Text) -> None:
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(self._label(name), text)
        self._console.print(grid)

    def _label(self, name: str) -> Text:
        columns = min(_MOST_NAME_COLUMNS, max(4, self._console.width // 3))
        colour = _COLOURS[crc32(name.encode("utf-8", "replace")) % len(_COLOURS)]
        return Text(shortened(name, columns), colour)

    def _picture(self) -> RenderableType:
        most = max(1, self._console.height - _OTHER_ROWS)
        # Taken at once: another thread draws.
        shown = list(self._open.values())
        lines = [self._open_line(one) for one in shown[-most:]]
        if len(shown) > most:
            lines.append(Text(f"and {len(shown) - most} more", "dim"))
        return Text("\n", no_wrap=True).join([*lines, self._how_far()])

    def _open_line(self, one: _Open) -> Text:
        """Return the end of a line that has not ended, in one row."""
        label = self._label(one.name)
        left = self._console.width - label.cell_len - 2
        text = Text(printable(one.line[-self._console.width :].replace("\t", " ")))
        while text.cell_len > max(1, left):
            text = text[1:]
        return Text.assemble(label, " ", text, ("▏", "dim"))

    def _how_far(self) -> Text:
        batch = self._batch
        if batch is None:
            return Text("waiting for text", "dim")
        failed = f"{batch.failed:,} failed" if batch.failed else ""
        parts = (f"{batch.ended:,}/{batch.total:,} ended", failed)
        return fitting([Text(part, "dim") for part in parts], self._console.width)
