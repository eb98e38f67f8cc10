"""What a person and a program read of a benchmark."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from cli.bench_report import best_line, report_lines, report_object, report_table
from tests.bench_samples import ended_job, failed_job, report_of, run_at, run_of
from tests.fake_look import fake_look
from workers.bench import BenchReport, Skipped
from workers.bench_figures import RunFigures
from workers.bench_look import Look

QUICK = run_at(1, 10, wait=1.0)
WIDE = run_at(8, 60, wait=2.5)


def head_of(report: BenchReport) -> str:
    return "\n".join(line.plain for line in report_lines(report)[0])


def foot_of(report: BenchReport) -> str:
    return "\n".join(line.plain for line in report_lines(report)[1])


def table_of(*runs: RunFigures) -> str:
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured:
        console.print(report_table(runs))
    return captured.get()


def row_of(table: str, label: str) -> list[str]:
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    [cells] = [row[1:] for row in rows if row[0] == label]
    return cells


def test_the_table_has_a_column_for_each_row_count() -> None:
    table = table_of(QUICK, WIDE)
    assert row_of(table, "rows") == ["1", "8"]
    assert row_of(table, "generated tokens/s") == ["10.0", "60.0"]
    assert row_of(table, "whole job, p50 / p95") == ["1.00 s / 1.00 s", "2.50 s / 2.50 s"]
    assert row_of(table, "worker restarts") == ["0", "0"]


def test_what_is_not_known_is_a_dash() -> None:
    assert row_of(table_of(run_of(1, failed_job())), "first token, p50 / p95") == ["-"]


def test_the_head_says_what_was_measured_where() -> None:
    head = head_of(report_of([QUICK], source="jobs.jsonl"))
    for part in (
        "fake: echo",
        "float32",
        "4 of jobs.jsonl",
        "the CPU (a fake), 2 cores",
        "libfake.so",
        "qsvc 0.1.0",
        "8.0 GB of memory",
    ):
        assert part in head
    assert "busy" not in head


def test_a_busy_machine_is_told() -> None:
    report = report_of([QUICK])
    report.look = fake_look(load=1.5)
    assert "1.5 processes wanted one of 2 cores" in head_of(report)


def test_runs_from_which_other_work_took_unequal_shares_are_not_to_be_compared() -> None:
    whole, half = (run_of(1, ended_job(processor_seconds=s)) for s in (6.0, 3.0))
    report = report_of([whole, half])
    assert "the worker had 0.60 to 1.20 cores" in foot_of(report)
    assert "cores" not in foot_of(report_of([half, half]))
    report.look = replace(report.look, machine=replace(report.look.machine, kind="gpu"))
    assert "cores" not in foot_of(report)


def test_a_name_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in head_of(report_of([QUICK], source="\x1b[2Jjobs.jsonl"))


def test_the_best_row_count_is_named_with_its_price() -> None:
    assert best_line([QUICK, WIDE]) == (
        "best for throughput: 8 rows, 60.0 tokens/s, 6.0 times 1 row; at the median a job takes "
        "2.50 s instead of 1.00 s, its first token 2.40 s instead of 900 ms"
    )


def test_fewer_rows_are_best_where_more_give_little() -> None:
    text = best_line([run_at(8, 99), run_at(16, 100)])
    assert text is not None
    assert text.startswith("best for throughput: 8 rows, 99.0 tokens/s (within 5% of 16 rows")


def test_one_run_is_no_choice() -> None:
    assert best_line([WIDE]) is None
    assert best_line([]) is None


def test_doubts_are_told() -> None:
    report = report_of(
        [run_of(1, ended_job(), failed_job("no room"), restarts=1), run_of(8, ended_job())]
    )
    report.skipped.append(Skipped(64, "4 jobs fill no more than 4 rows"))
    report.failure = "the server went away"
    report.was_stopped = True
    foot = foot_of(report)
    for part in (
        "64 rows were not run: 4 jobs fill",
        "1 row: 1 jobs failed, such as: no room",
        "1 row: the worker died 1 times",
        "8 rows: no more than 1 were filled at once",
        "ended by a fault: the server went away",
        "stopped: ",
    ):
        assert part in foot


def test_the_object_has_every_figure_and_says_the_best() -> None:
    report = report_of([QUICK, WIDE])
    report.skipped.append(Skipped(64, "no"))
    told = json.loads(json.dumps(report_object(report)))
    assert told["best_rows"] == 8
    assert (told["stopped"], told["failure"], told["jobs"], told["source"]) == (
        False,
        None,
        4,
        "jobs.jsonl",
    )
    assert told["skipped"] == [{"rows": 64, "reason": "no"}]
    assert told["runs"][1]["tokens_per_second"] == 60.0
    assert told["runs"][1]["job"] == {"p50": 2.5, "p95": 2.5}
    assert "row_bytes" not in told["model"]
    assert told["machine"]["cores"] == 2


def test_what_was_seen_is_read_back() -> None:
    seen = fake_look()
    assert Look.from_object(json.loads(json.dumps(seen.to_object()))) == seen
    assert [seen.model.bytes_of_row(n) for n in (1, 128, 129, 9999)] == [
        1_000_000,
        1_000_000,
        2_000_000,
        2_000_000,
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 ms"),
        (0.00512, "5.12 ms"),
        (0.0456, "45.6 ms"),
        (0.7294, "729 ms"),
        (0.9996, "1.00 s"),
        (9.99, "9.99 s"),
        (9.996, "10.0 s"),
        (99.96, "100 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    run = run_of(1, ended_job(admitted=10.0, first_token=10.0, ended=10.0 + seconds, tokens=1))
    assert row_of(table_of(run), "whole job, p50 / p95") == [f"{text} / {text}"]
