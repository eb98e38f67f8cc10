"""A terminal for tests and pictures: runs a command in it, and knows what is to be seen.

It understands what rich and click write, and fails on anything else, so that a test would notice a
control sequence that came from elsewhere.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.cells import cell_len
from rich.text import Text

from tests.cli_helpers import ROOT

_TOKEN = re.compile(
    r"\x1b\[(?P<private>\??)(?P<numbers>[\d;]*)(?P<command>[A-Za-z])|(?P<plain>[^\x1b])", re.DOTALL
)
_PARTIAL = re.compile(r"\x1b(\[[\d;?]*)?$")
_MOST_SCROLLED = 1000
_MOST_PIECES = 50
_PAUSE_SECONDS = 0.02
_CLOSE_SECONDS = 15.0


@dataclass
class Cell:
    """A character and the attributes that it was written with."""

    text: str = " "
    style: str = ""


@dataclass
class Screen:
    """What a terminal of so many columns and rows shows.

    Attributes:
        scrolled: lines that have left at the top, the last ones.
        is_alternate: the second screen is shown, as full-screen programs do.
        is_cursor_shown: the cursor is not hidden.
    """

    width: int = 80
    height: int = 24
    scrolled: list[list[Cell]] = field(default_factory=list)
    is_alternate: bool = False
    is_cursor_shown: bool = True
    _rows: list[list[Cell]] = field(default_factory=list)
    _other: list[list[Cell]] = field(default_factory=list)
    _row: int = 0
    _column: int = 0
    _style: str = ""
    _rest: str = ""

    def __post_init__(self) -> None:
        self._rows, self._other = self._blank(), self._blank()

    def _blank(self) -> list[list[Cell]]:
        return [self._blank_row() for _ in range(self.height)]

    def _blank_row(self) -> list[Cell]:
        return [Cell() for _ in range(self.width)]

    @property
    def lines(self) -> list[str]:
        """The text of each row, without spaces at its end."""
        return ["".join(cell.text for cell in row).rstrip() for row in self._rows]

    @property
    def text(self) -> str:
        """All rows, without empty ones at the end."""
        return "\n".join(self.lines).rstrip()

    def styled(self, *, with_scrolled: bool = False) -> Text:
        """Return what is shown, with its colours, for `rich` to print."""
        rows = [*self.scrolled, *self._rows] if with_scrolled else self._rows
        lines = []
        for row in rows:
            parts, style = [], ""
            for cell in row:
                if cell.style != style:
                    parts.append(f"\x1b[0m\x1b[{cell.style}m" if cell.style else "\x1b[0m")
                    style = cell.style
                parts.append(cell.text)
            lines.append(Text.from_ansi("".join(parts)))
        while lines and not lines[-1].plain.strip():
            lines.pop()
        return Text("\n").join(lines)

    def feed(self, text: str) -> None:
        """Take what a program writes.

        Raises:
            AssertionError: it is nothing that rich or click write.
        """
        text = self._rest + text
        partial = _PARTIAL.search(text)
        self._rest = partial[0] if partial else ""
        text = text[: len(text) - len(self._rest)]
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            assert token is not None, f"a terminal would obey this: {text[at : at + 20]!r}"
            at = token.end()
            if token["plain"] is not None:
                self._write(token["plain"])
            else:
                self._obey(token["private"], token["numbers"], token["command"])

    def _write(self, character: str) -> None:
        match character:
            case "\n":
                self._line_feed()
            case "\r":
                self._column = 0
            case _:
                assert character.isprintable(), f"not printable: {character!r}"
                self._put(character)

    def _put(self, character: str) -> None:
        columns = cell_len(character)
        if columns == 0:  # joins what is before it
            self._rows[self._row][max(0, self._column - 1)].text += character
            return
        if self._column + columns > self.width:
            self._column = 0
            self._line_feed()
        row = self._rows[self._row]
        row[self._column] = Cell(character, self._style)
        if columns == 2:
            row[self._column + 1] = Cell("", self._style)
        self._column += columns

    def _line_feed(self) -> None:
        if self._row < self.height - 1:
            self._row += 1
            return
        top = self._rows.pop(0)
        if not self.is_alternate:
            self.scrolled = [*self.scrolled, top][-_MOST_SCROLLED:]
        self._rows.append(self._blank_row())

    def _obey(self, private: str, numbers: str, command: str) -> None:
        count = int(numbers or 1) if numbers.isdigit() or not numbers else 1
        match private, command:
            case "", "m":
                self._style = "" if numbers in ("", "0") else f"{self._style};{numbers}".strip(";")
            case "", "A":
                self._row = max(0, self._row - count)
            case "", "K":
                assert numbers == "2", "another way to erase a line"
                self._rows[self._row] = self._blank_row()
            case "", "H":
                self._row = self._column = 0
            case "", "J":
                self._rows = self._blank()
            case "?", "h" | "l":
                self._set(numbers, is_on=command == "h")
            case _:
                raise AssertionError(f"unknown sequence: {private}{numbers}{command}")

    def _set(self, mode: str, *, is_on: bool) -> None:
        match mode:
            case "25":
                self.is_cursor_shown = is_on
            case "1049":
                assert is_on != self.is_alternate
                self.is_alternate = is_on
                self._rows, self._other = self._other, self._rows
                if is_on:
                    self._rows = self._blank()
                self._row = 0
            case _:
                raise AssertionError(f"unknown mode: {mode}")


# A program hears Ctrl-C as it does from a person's terminal, also where the tests run in the
# background of a shell that ignores it.
_HEARING = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execvp(sys.argv[1], sys.argv[1:])",
)


class Terminal:
    """A command that runs in a terminal of its own.

    Args:
        stdout: where its standard output goes; None: to the terminal, as standard error does.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        width: int = 80,
        height: int = 24,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        self.screen = Screen(width, height)
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        for name in ("COLUMNS", "LINES", "CI"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [*_HEARING, *map(str, command)],
            cwd=ROOT,
            env=environment,
            stdin=follower,
            stdout=follower if stdout is None else stdout,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)

    def wait_for(
        self, condition: Callable[[Screen], bool], what: str, *, seconds: float = 30
    ) -> Screen:
        """Read until the screen is as wanted; fails with what is on it."""
        deadline = time.monotonic() + seconds
        while not condition(self.screen):
            is_late = time.monotonic() > deadline
            assert not is_late, f"{what}: not within {seconds:g} s\n{self.screen.text}"
            if not self._read(0.1):
                assert condition(self.screen), f"{what}: it ended before\n{self.screen.text}"
        return self.screen

    def press(self, keys: str) -> None:
        """Type something."""
        os.write(self._leader, keys.encode())

    def interrupt(self) -> None:
        """Do what Ctrl-C does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, seconds: float = 30) -> int:
        """Read to the command's end and return its exit code."""
        deadline = time.monotonic() + seconds
        while self._read(0.1):
            assert time.monotonic() < deadline, f"not ended\n{self.screen.text}"
        return self.process.wait(seconds)

    def close(self) -> None:
        """End a command that still runs: as a person would, so that it leaves nothing behind."""
        if self.process.poll() is None:
            self.interrupt()
            self.interrupt()
            self._drain(_CLOSE_SECONDS)
        self.process.kill()
        self.process.wait()
        os.close(self._leader)

    def _drain(self, seconds: float) -> None:
        """Read to the command's end, or for so long: one that cannot write does not end."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self._leader], [], [], 0.1)[0]:
                try:
                    os.read(self._leader, 65536)
                except OSError:
                    return

    def _read(self, seconds: float) -> bool:
        """Read what is there within a time; False when there will be nothing more.

        A picture is drawn in one go and arrives in pieces, so a short pause is waited for.
        """
        if not select.select([self._leader], [], [], seconds)[0]:
            return self.process.poll() is None
        for _ in range(_MOST_PIECES):
            try:
                data = os.read(self._leader, 65536)
            except OSError:  # Linux says so when nobody has the terminal open any more
                return False
            self.screen.feed(self._decoder.decode(data))
            if not data or not select.select([self._leader], [], [], _PAUSE_SECONDS)[0]:
                return bool(data)
        return True


@contextlib.contextmanager
def terminal(
    *command: str | Path,
    width: int = 80,
    height: int = 24,
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
) -> Iterator[Terminal]:
    """Run a command in a terminal for the length of the block."""
    opened = Terminal([*map(str, command)], width=width, height=height, env=env, stdout=stdout)
    try:
        yield opened
    finally:
        opened.close()
