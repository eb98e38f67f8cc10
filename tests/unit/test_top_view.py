"""The picture of `qsvc top`, on terminals of any size and with names of any kind."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from cli.top_view import Screenful
from queue_service.overview import BatchView, Overview, QueueView, RunningJob, WorkerView
from queue_service.pace import Rates
from tests.unit.test_pace import BATCH

WORKER = WorkerView(
    name="studio-qwen3-gpu0",
    model="qwen3-0.6b",
    queues=("qsvc:qwen3",),
    state="busy",
    is_alive=True,
    beat_seconds=1.2,
    rows=32,
    kv_bytes=700_000_000,
    kv_budget_bytes=1_400_000_000,
    prefix_hits=3,
    prefix_misses=1,
    finished=1204,
    failed=2,
    prompt_tokens=10,
    cached_tokens=0,
    completion_tokens=20,
    tokens_per_second=118.4,
    prompt_tokens_per_second=950.0,
)
DEAD = replace(WORKER, name="mini", is_alive=False, beat_seconds=75.0, tokens_per_second=0.0)
QUEUE = QueueView("qsvc:qwen3", 3120, 34, 1, 2, is_served=True)
OPEN = BatchView(
    replace(BATCH, completed=48, failed=2, prompt_tokens=100, cached_tokens=62),
    32,
    Rates(118.4, 96.0, 0.5, 100.0),
)
JOB = RunningJob("batch_1-17", "studio-qwen3-gpu0", 754.0)
FULL = Overview(at=0.0, workers=[WORKER, DEAD], queues=[QUEUE], batches=[OPEN], longest=[JOB])


def lines_of(
    overview: Overview, *, width: int = 120, height: int | None = None, outage: str | None = None
) -> list[str]:
    picture = Screenful(overview, "redis://host:6379/0", "12:00:00", outage)
    return [line.plain.rstrip() for line in picture.lines(width, height)]


def line_with(word: str, lines: list[str]) -> str:
    [found] = [line for line in lines if word in line]
    return found


def figures(word: str, lines: list[str]) -> str:
    """The line with the word, one space between its columns."""
    return " ".join(line_with(word, lines).split())


def test_each_thing_has_its_figures() -> None:
    lines = lines_of(FULL)
    assert lines[0] == (
        "qsvc top  12:00:00  1 of 2 workers live  118 tok/s  34 running  3,120 waiting"
        "  redis://host:6379/0"
    )
    assert figures("0:01 busy", lines) == (
        "studio-qwen3-gpu0 qwen3-0.6b 0:01 busy 32 118 950 50% of 1.4 GB 75% 1,204 2"
    )
    assert "dead 1:15" in line_with("mini", lines)
    assert figures("3,120  ", lines) == "qsvc:qwen3 3,120 34 1 2"
    assert figures("50/100", lines) == "batch_1 fake ━━━━━───── 50/100 32 2 118 62% 1:40"
    assert figures("12:34", lines) == "batch_1-17 studio-qwen3-gpu0 12:34"


def test_a_server_with_nothing_says_so() -> None:
    lines = lines_of(Overview(at=0.0))
    assert [line for line in lines[1:] if line] == [
        "No workers",
        "No jobs",
        "No open batches",
        "Nothing runs",
    ]


def test_a_queue_that_nobody_serves_an_outage_and_a_suspension_are_told() -> None:
    stuck = replace(QUEUE, is_served=False)
    lines = lines_of(replace(FULL, queues=[stuck], is_suspended=True), outage="it is away")
    assert "no worker serves it" in line_with("3,120  ", lines)
    assert lines[1] == "it is away"
    assert "suspended" in lines[2]


def test_a_narrow_terminal_loses_what_matters_least_first() -> None:
    heads = [lines_of(FULL, width=width)[3] for width in (120, 80, 60, 40, 20)]
    assert "prompt tok/s" in heads[0]
    assert "prompt tok/s" not in heads[1]
    assert "tok/s" in heads[1]
    assert "beat" in heads[2]
    assert heads[4].split()[0] == "worker"


def test_a_low_terminal_tells_how_many_are_missing() -> None:
    many = replace(FULL, workers=[replace(WORKER, name=f"w{i}") for i in range(40)])
    lines = lines_of(many, height=24)
    assert len(lines) <= 24
    missing = line_with("more", lines)
    shown = sum(line.startswith("w") and "worker" not in line for line in lines)
    assert missing == f"and {40 - shown} more"
    assert "batch_1-17" in "\n".join(lines), "one section took the place of the others"


names = st.text(min_size=1, max_size=80)


@settings(max_examples=50)
@given(names, names, st.integers(1, 200), st.integers(1, 60), st.integers(0, 30))
def test_no_name_and_no_size_breaks_the_picture(
    name: str, model: str, width: int, height: int, count: int
) -> None:
    overview = replace(
        FULL,
        workers=[replace(WORKER, name=name, model=model) for _ in range(count)],
        queues=[replace(QUEUE, name=name)],
        batches=[replace(OPEN, batch=replace(OPEN.batch, id=name, model=model))] * count,
        longest=[replace(JOB, job_id=name, worker=model)] * count,
    )
    lines = lines_of(overview, width=width, height=height)
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)


@pytest.mark.parametrize(
    "name", ["\x1b[2J\x1b]0;title\x07", "[bold red]x[/]", ":smile:", "\u202egpj"]
)
def test_names_are_shown_and_not_obeyed(name: str) -> None:
    overview = replace(FULL, workers=[replace(WORKER, name=name)])
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    console.print(Screenful(overview, "redis://host", "12:00:00"))
    assert isinstance(console.file, io.StringIO)
    written = console.file.getvalue().replace("\x1b[1m", "").replace("\x1b[2m", "")
    written = written.replace("\x1b[0m", "")
    assert "\x1b" not in written
    assert "\u202e" not in written
    shown = {"\x1b[2J\x1b]0;title\x07": "\\x1b[2J\\x1b]0;title\\x07", "\u202egpj": "\\u202egpj"}
    assert shown.get(name, name) in written
