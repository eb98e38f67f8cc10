"""What is written to a terminal: nothing that it obeys, nothing wider than it is."""

from __future__ import annotations

import io
import os
import signal
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from cli.options import print_json
from cli.printable import printable
from cli.terminal import (
    clock_time,
    ending_with,
    fitting,
    is_live,
    rate,
    share,
    shortened,
)
from queue_service.doctor import gigabytes


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\r\nb\x07", "a\\r\\nb\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("gpj.\u202eexe", "gpj.\\u202eexe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("Größe 数 👩\u200d👧", "Größe 数 👩\u200d👧"),
        ("\ud800", "\\ud800"),
        ("\u2028", "\\u2028"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_what_is_to_be_kept_is() -> None:
    assert printable("a\tb\nc\x1b", keep="\t\n") == "a\tb\nc\\x1b"


@given(st.text())
def test_nothing_printable_moves_the_cursor(text: str) -> None:
    shown = printable(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in shown)
    shown.encode()
    assert printable(shown) == shown


@given(st.text(), st.integers(0, 30))
def test_a_shortened_text_fits_and_keeps_what_it_can(text: str, width: int) -> None:
    short = shortened(text, width)
    assert cell_len(short) <= width
    if cell_len(printable(text)) <= width:
        assert short == printable(text)


def test_a_shortened_id_keeps_both_ends() -> None:
    assert shortened("batch_0123456789abcdef-17", 13) == "batch_…def-17"


@given(st.lists(st.text(min_size=0, max_size=12)), st.integers(1, 60))
def test_parts_side_by_side_are_never_wider_than_there_is_room(
    parts: list[str], width: int
) -> None:
    assert fitting([Text(printable(part)) for part in parts], width).cell_len <= width


def test_the_first_parts_are_the_last_to_go() -> None:
    parts = [Text("first"), Text(""), Text("second"), Text("third")]
    assert fitting(parts, 100).plain == "first  second  third"
    assert fitting(parts, 14).plain == "first  second"
    assert fitting(parts, 4).plain == "fir…"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0:00"),
        (9.4, "0:09"),
        (59.6, "1:00"),
        (725, "12:05"),
        (12_011, "3:20:11"),
        (3599.9, "1:00:00"),
        (2 * 86_400 + 3 * 3600 + 1200, "2d 3:20"),
        (-3, "0:00"),
    ],
)
def test_times(seconds: float, shown: str) -> None:
    assert clock_time(seconds) == shown


def test_rates_shares_and_sizes() -> None:
    assert [rate(value) for value in (None, 0, 0.31, 9.96, 118.2, 12_345)] == [
        "-",
        "0",
        "0.3",
        "10.0",
        "118",
        "12,345",
    ]
    assert [share(value) for value in (None, 0, 0.316, 0.999, 1)] == [
        "-",
        "0%",
        "32%",
        "99%",
        "100%",
    ]
    assert [gigabytes(value) for value in (0, 5e6, 1.44e9)] == ["0 MB", "5 MB", "1.4 GB"]


def test_only_a_terminal_is_drawn_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_live(Console(file=io.StringIO()))
    monkeypatch.setenv("FORCE_COLOR", "1")  # a build's log is asked for colours
    assert not is_live(Console(file=io.StringIO()))


def test_json_has_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"id": "\x1b[2J\x9b\x7f\u202eü"})
    assert capsys.readouterr().out == '{"id": "\\u001b[2J\\u009b\\u007f\\u202eü"}\n'


def test_a_signal_ends_the_block_with_the_code_of_a_shell() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, ending_with():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
