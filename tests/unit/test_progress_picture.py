"""How a batch comes on: the picture on a terminal of any width, and the lines elsewhere."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from cli.progress import Picture, Progress, plain_line
from queue_service.batches import Status
from queue_service.follow import Standing
from queue_service.pace import Rates
from tests.unit.test_pace import BATCH

HALF = replace(
    BATCH, completed=40, failed=2, prompt_tokens=1000, cached_tokens=620, completion_tokens=900
)
RATES = Rates(118.4, 96.2, 0.5, 116)


def drawn(standing: Standing, rates: Rates = RATES, *, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(Picture(standing, rates))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_picture_tells_how_far_how_fast_and_how_long() -> None:
    bar, details = drawn(Standing(HALF, 32, 38), width=100)
    assert bar.startswith("━━━━")
    assert bar.endswith("42/100  42%  1:56 left")
    assert details == (
        "32 running  2 failed  26 waiting  118 tok/s (96 on average)  62% of prompts cached"
    )


def test_what_is_not_known_is_not_shown() -> None:
    bar, details = drawn(Standing(replace(BATCH, total=5), 0, 0), Rates())
    assert bar.endswith("0/5  0%")
    assert details == "0 running  5 waiting"
    [bar, _] = drawn(Standing(replace(BATCH, is_submitted=False), 1, 0), Rates())
    assert bar.endswith("0/100 so far")


@given(
    st.integers(1, 120),
    st.integers(0, 10**7),
    st.integers(0, 10**7),
    st.integers(0, 10**6),
    st.none() | st.floats(0, 1e7),
    st.booleans(),
)
def test_the_picture_is_two_rows_and_never_wider_than_the_terminal(
    width: int, completed: int, left: int, running: int, rate: float | None, is_submitted: bool
) -> None:
    batch = replace(
        HALF, total=completed + 2 + left, completed=completed, is_submitted=is_submitted
    )
    lines = drawn(Standing(batch, running, None), Rates(rate, rate, rate, rate), width=width)
    assert len(lines) == 2
    assert all(cell_len(line) <= width for line in lines)


def test_a_line_for_a_log_begins_as_it_always_did() -> None:
    line = plain_line(Standing(HALF, 32, 38), RATES)
    assert line == (
        "42 of 100 done, 38 written, 118 tok/s (96 on average), 2 failed, 32 running, 26 waiting, "
        "62% of prompts cached, 1:56 left"
    )
    assert plain_line(Standing(BATCH, 0, None), Rates()) == (
        "0 of 100 done, 0 tok/s, 0 running, 100 waiting"
    )


def shown_lines(*moments: float) -> list[str]:
    """What is written to a file when a batch is looked at in these moments."""
    now = [0.0]
    console = Console(file=io.StringIO(), width=20)
    with Progress(is_shown=True, console=console, clock=lambda: now[0]) as progress:
        for moment in moments:
            now[0] = moment
            progress.update(Standing(HALF, 1, 1))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_log_gets_a_line_now_and_then_and_fewer_of_a_long_run() -> None:
    assert len(shown_lines(0, 1, 4.9)) == 1
    assert len(shown_lines(0, 4.9, 5.1)) == 2
    assert len(shown_lines(*range(60))) == 12
    hour = len(shown_lines(*range(3600)))
    assert 60 < hour < 120


def test_a_note_is_text_and_nothing_else() -> None:
    console = Console(file=io.StringIO(), width=200)
    with Progress(is_shown=True, console=console) as progress:
        progress.note("[red]waiting[/] :smile: \x1b[2J\nsecond line")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "[red]waiting[/] :smile: \\x1b[2J\nsecond line\n"


def test_nothing_is_shown_where_nothing_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(is_shown=False) as progress:
        progress.note("a note")
        progress.update(Standing(replace(HALF, status=Status.COMPLETED), 0, 1))
    assert capsys.readouterr() == ("", "")
