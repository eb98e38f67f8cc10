"""`qsvc bench` with the fake engine: whole, stopped, killed before, refused, and out of memory."""

from __future__ import annotations

import json
import os
import signal
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from queue_service.batch_file import open_batch
from queue_service.errors import ConfigurationError, ModelUnavailable, QsvcError
from queue_service.local_server import LocalServer
from queue_service.settings import PathSettings, WorkerSettings
from tests.cli_helpers import (
    FAKE_QSVC,
    chat_line,
    chat_lines,
    processes,
    run_qsvc,
    start_qsvc,
    wait_until,
    write_lines,
)
from tests.fake_qsvc import fake_child
from workers.bench import Bench, BenchReport
from workers.bench_jobs import jobs_of_file
from workers.supervisor import device_slot_lock

FAKE_LOOK = (sys.executable, "-m", "tests.fake_look")


@pytest.fixture(autouse=True)
def no_leftovers(redis_server: object) -> Iterator[None]:
    """Every benchmark, however it ends, leaves no process and no folder behind."""
    yield
    folder = cache_folder()
    wait_until(lambda: not processes(str(folder)), "processes left behind", seconds=15)
    assert list(folder.glob("bench*")) == []
    assert not (folder / "checkpoints").exists()


def cache_folder() -> Path:
    return PathSettings.load().cache_folder


def make_bench(
    file: Path,
    *rows: int,
    count: int = 100,
    model: str = "fake",
    kv_memory: int | None = None,
    on_begin: Callable[[int], None] = lambda rows: None,
    on_note: Callable[[str], None] = lambda text: None,
    child: tuple[str, ...] | None = None,
) -> Bench:
    with open_batch(file) as opened:
        jobs = jobs_of_file(opened, count)
    return Bench(
        jobs,
        rows,
        worker=WorkerSettings.load(model=model, kv_memory=kv_memory),
        slot="cpu:0",
        cache_folder=cache_folder(),
        on_begin=on_begin,
        on_update=lambda standing: None,
        on_note=on_note,
        look_program=FAKE_LOOK,
        child=child or fake_child(),
    )


def measure(file: Path, *rows: int, kv_memory: int | None = None) -> BenchReport:
    report = make_bench(file, *rows, kv_memory=kv_memory).run()
    assert report is not None
    return report


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", chat_lines(9, max_tokens=5))


# To the end -----------------------------------------------------------------------------------


def test_the_same_jobs_run_once_for_each_row_count(file: Path) -> None:
    begun: list[int] = []
    report = make_bench(file, 4, 1, count=6, on_begin=begun.append).run()
    assert report is not None
    assert begun == [1, 4]
    assert [run.rows for run in report.runs] == [1, 4]
    for run in report.runs:
        assert (run.jobs, run.failed, run.restarts) == (6, 0, 0)
        assert run.completion_tokens == 6 * 5
        assert run.prompt_tokens == 6 * len("prompt 1")
        assert run.job is not None
        assert run.first_token is not None
        assert run.between_tokens is not None
        assert 0 < run.job.p50 <= run.job.p95 <= run.seconds
        assert run.peak_bytes == 123_000_000
    assert (report.was_stopped, report.failure, report.skipped) == (False, None, [])


def test_the_command_prints_a_table_and_writes_figures_and_a_picture(
    file: Path, tmp_path: Path
) -> None:
    figures, picture = tmp_path / "out.json", tmp_path / "out.svg"
    command = ("bench", file, "--model", "fake", "--rows", "1,2", "--jobs", "4")
    outputs = ("--json", figures, "--svg", picture)
    done = run_qsvc(*command, *outputs, program=FAKE_QSVC)
    assert done.returncode == 0, done.stderr
    assert "generated tokens/s" in done.stdout
    assert "4 of " in done.stdout
    told = json.loads(figures.read_text())
    assert [(run["rows"], run["jobs"]) for run in told["runs"]] == [(1, 4), (2, 4)]
    assert told["best_rows"] in (1, 2)
    ET.parse(picture)


def test_notes_name_no_file_that_is_gone_at_the_end(tmp_path: Path) -> None:
    alike = write_lines(
        tmp_path / "in.jsonl", [chat_line(f"c{i}", "Be terse. " * 60 + str(i)) for i in range(3)]
    )
    notes: list[str] = []
    make_bench(alike, 1, on_note=notes.append).run()
    [plan] = notes
    assert "3 of 3 lines begin like others" in plan


def test_figures_on_standard_output_are_json_alone(file: Path) -> None:
    command = ("bench", file, "--model", "fake", "--rows", "2", "--jobs", "2", "--json", "-")
    done = run_qsvc(*command, program=FAKE_QSVC)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["jobs"] == 2


def test_failed_jobs_are_told_and_end_the_command_with_1(tmp_path: Path) -> None:
    lines = [*chat_lines(2), {"messages": [{"role": "user", "content": "refuse me"}]}]
    file = write_lines(tmp_path / "in.jsonl", lines)
    done = run_qsvc("bench", file, "--model", "fake", "--rows", "2", program=FAKE_QSVC)
    assert done.returncode == 1
    assert "1 jobs failed, such as: the template says no" in done.stdout


# What does not fit ----------------------------------------------------------------------------


def test_a_row_count_that_does_not_fit_is_skipped_with_the_numbers(file: Path) -> None:
    report = measure(file, 1, 4, 8, kv_memory=5_000_000)
    assert [run.rows for run in report.runs] == [1, 4]
    [skipped] = report.skipped
    assert skipped.rows == 8
    assert skipped.reason == (
        "the keys and values of 8 rows take 8 MB or more, and 5 MB are there for them"
    )


def test_a_row_count_beyond_the_jobs_is_skipped(file: Path) -> None:
    report = measure(file, 9, 10)
    assert [run.rows for run in report.runs] == [9]
    assert report.skipped[0].reason == "9 jobs fill no more than 9 rows"


def test_a_benchmark_of_which_nothing_fits_ends_with_1(file: Path) -> None:
    command = ("bench", file, "--model", "fake", "--rows", "8", "--kv-memory", "4MB")
    done = run_qsvc(*command, program=FAKE_QSVC)
    assert done.returncode == 1
    assert "8 rows were not run: the keys and values" in done.stdout


# Faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("no-such-file.jsonl",), 2, "cannot read no-such-file.jsonl: No such file"),
        (("{bad}",), 2, "line 2: invalid_json_line"),
        (("{file}", "--model", "missing"), 5, "there is no model missing"),
        (("{file}", "--model", "crash"), 5, "looking at the model ended a process"),
        (("{file}", "--rows", "1,x"), 2, "no list of row counts"),
        (("{file}", "--rows", "0"), 2, "no list of row counts"),
        (("{file}", "--json", "no-such-folder/out.json"), 2, "cannot write no-such-folder"),
        (("{file}", "--svg", "."), 2, "cannot write ."),
        (("--jobs", "500"), 2, "128 built-in prompts, not 500"),
    ],
)
def test_faults_are_told_before_anything_runs(
    file: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, told: str
) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", [*chat_lines(1), "{bad"])
    filled = [one.format(file=file, bad=bad) for one in arguments]
    done = run_qsvc("bench", *filled, program=FAKE_QSVC)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_on_the_device_is_respected(file: Path) -> None:
    with device_slot_lock(cache_folder(), "cpu:0"):
        with pytest.raises(ConfigurationError, match=r"another worker .* runs on cpu:0"):
            measure(file, 1)
        done = run_qsvc("bench", file, "--model", "fake", program=FAKE_QSVC)
        assert done.returncode == 2
        assert "--device-slot" in done.stderr


def test_a_missing_model_is_an_error_of_its_own(file: Path) -> None:
    with pytest.raises(ModelUnavailable, match="there is no model missing"):
        make_bench(file, 1, model="missing").run()


def test_a_worker_that_dies_again_and_again_ends_the_benchmark_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.supervisor._LONGEST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr("workers.supervisor._FIRST_PAUSE_SECONDS", 0.1)
    monkeypatch.setenv("QSVC_WORKER_CRASH_RETRIES", "9")
    line = {"messages": [{"role": "user", "content": "crash"}]}
    file = write_lines(tmp_path / "in.jsonl", [line])
    with pytest.raises(QsvcError, match=r"(?s)the worker died 3 times.*worker died exit=-9"):
        measure(file, 1)


def test_a_run_that_fails_shows_the_end_of_its_workers_log(file: Path) -> None:
    fatal = '{"event": "fatal", "kind": "ModelUnavailable", "message": "no such model"}'
    program = f"import sys; sys.stderr.write('one\\ntwo\\n'); print('{fatal}'); sys.exit(78)"
    notes: list[str] = []
    bench = make_bench(file, 1, on_note=notes.append, child=(sys.executable, "-c", program))
    with pytest.raises(ModelUnavailable, match="no such model"):
        bench.run()
    assert notes == ["the worker's log ended with:\n  one\n  two"]


# Stopped and killed ---------------------------------------------------------------------------


def test_ctrl_c_ends_with_what_was_measured(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.1")
    figures = tmp_path / "out.json"
    many = write_lines(tmp_path / "many.jsonl", chat_lines(40, max_tokens=9))
    command = ("bench", many, "--model", "fake", "--rows", "1,2", "--json", figures)
    with start_qsvc(*command, "--jobs", "40") as process:
        folder = cache_folder() / "bench-cpu-0"
        wait_until((folder / "rows-2").exists, "the second run", seconds=60)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert "stopped: " in output
    assert "Traceback" not in errors
    told = json.loads(figures.read_text())
    assert [run["rows"] for run in told["runs"]] == [1]
    assert told["stopped"] is True


def test_ctrl_c_before_the_first_run_has_nothing_to_report(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LOOK_SECONDS", "60")
    with start_qsvc("bench", file, "--model", "fake") as process:
        wait_until((cache_folder() / "bench-cpu-0").exists, "the start")
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert output == ""
    assert "Traceback" not in errors


def test_what_a_killed_benchmark_left_is_cleared_by_the_next(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.2")
    folder = cache_folder() / "bench-cpu-0"
    with start_qsvc("bench", file, "--model", "fake", "--rows", "1") as process:
        wait_until(lambda: list(folder.glob("rows-1/runs/*/server/server.pid")), "a server")
        os.killpg(process.pid, signal.SIGKILL)
    [server] = folder.glob("rows-1/runs/*/server")
    assert LocalServer(server).is_running
    monkeypatch.delenv("FAKE_STEP_SECONDS")
    assert [run.rows for run in measure(file, 2).runs] == [2]
