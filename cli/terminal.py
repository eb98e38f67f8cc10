"""What every command knows of terminals: what may be written to one, what fits, how it is left."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Final, Self

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from cli.printable import printable

_SEPARATOR: Final = "  "
UNKNOWN: Final = "-"


def is_live(console: Console) -> bool:
    """Whether a picture on this console can be drawn over: a terminal that moves its cursor.

    Variables that only ask for colours, as in a build's log, do not make it one.
    """
    return console.is_interactive and not console.is_dumb_terminal and console.file.isatty()


def fitting(parts: Iterable[Text], width: int) -> Text:
    """Return the first of these parts that fit, side by side; the very first one is cut to fit."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for part in parts:
        if not part.plain:
            continue
        if not line.plain:
            line.append_text(part)
            line.truncate(max(1, width), overflow="ellipsis")
        elif line.cell_len + len(_SEPARATOR) + part.cell_len <= width:
            line.append(_SEPARATOR).append_text(part)
        else:
            break
    return line


def shortened(text: str, width: int) -> str:
    """Return a printable text in so many columns; what is too long loses its middle.

    The ends tell ids and names apart.
    """
    text = printable(text)
    if cell_len(text) <= width:
        return text
    if width <= 1:
        return "…"[: max(0, width)]
    head: list[str] = []
    tail: list[str] = []
    left = width - 1
    for end, characters in _alternating(text):
        size = cell_len(characters)
        if size > left:
            break
        left -= size
        (head if end == 0 else tail).append(characters)
    return "".join(head) + "…" + "".join(reversed(tail))


def _alternating(text: str) -> Iterator[tuple[int, str]]:
    """Yield characters from the text's two ends in turn: 0 and the next from its start, 1 …"""
    start, end = 0, len(text)
    while start < end:
        yield 0, text[start]
        start += 1
        if start < end:
            end -= 1
            yield 1, text[end]


def clock_time(seconds: float) -> str:
    """Return a length of time as ``0:09``, ``12:05`` or ``3:20:11``; days as ``2d 3:20``."""
    minutes, whole_seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def rate(value: float | None) -> str:
    """Return a number a second, with a digit behind the point where it is small."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def share(value: float | None) -> str:
    """Return a part of one in per cent. Only what is all of it is 100%."""
    if value is None:
        return UNKNOWN
    return f"{min(99, round(100 * value)) if value < 1 else 100}%"


@contextlib.contextmanager
def ending_with(
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGHUP),
) -> Iterator[None]:
    """End the block with `SystemExit` when one of these comes, so that the terminal is left tidy.

    The exit code is the one that a shell gives to a process that died of the signal.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = {wanted: signal.signal(wanted, leave) for wanted in signals}
    try:
        yield
    finally:
        for wanted, handler in before.items():
            signal.signal(wanted, handler)


class Keyboard:
    """Standard input key by key, and not shown, for the length of a block; nothing elsewhere."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        if self._file is not None:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None and self._before is not None:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    def is_pressed(self, key: str, *, within_seconds: float) -> bool:
        """Wait for a time; return True at once when a key was pressed meanwhile."""
        deadline = time.monotonic() + within_seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._file is None:
                time.sleep(left)
            elif select.select([self._file], [], [], left)[0]:
                pressed = os.read(self._file, 1024)
                if not pressed:  # the terminal is gone
                    self._file = None
                elif key.encode() in pressed:
                    return True
        return False
