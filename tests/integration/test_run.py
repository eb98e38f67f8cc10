"""`qsvc run` with the fake engine: killed, stopped, changed, doubled, and run to its end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from queue_service.batches import Batch, Status
from queue_service.errors import (
    BatchFileError,
    ConfigurationError,
    ModelUnavailable,
    ServerUnavailable,
)
from queue_service.settings import (
    PathSettings,
    RetentionSettings,
    SubmitSettings,
    WorkerSettings,
)
from tests.cli_helpers import (
    FAKE_QSVC,
    assert_nothing_left_behind,
    attempts,
    chat_line,
    chat_lines,
    content_of,
    custom_ids_of,
    num_lines,
    read_output,
    run_qsvc,
    run_servers,
    start_qsvc,
    wait_until,
    write_lines,
)
from tests.fake_qsvc import fake_child
from workers.local_run import LocalRun, RunOptions, Summary

Update = Callable[[Batch, int], None]

NO_MODEL = """
import sys
from queue_service.errors import ModelUnavailable
from workers.child import run_child

def load(settings):
    raise ModelUnavailable("no such model")

sys.exit(run_child(load))
"""


@pytest.fixture(autouse=True)
def no_leftovers(redis_server: object) -> Any:
    """Every run, however it ends, leaves neither worker nor server behind."""
    yield
    assert_nothing_left_behind(cache_folder())


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the engine takes 20 ms, so that a run can be caught half-way."""
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.02")


def cache_folder() -> Path:
    return PathSettings.load().cache_folder


def run(
    file: Path,
    output: Path,
    *,
    errors: Path | None = None,
    on_update: Callable[[LocalRun, Batch, int], None] = lambda run, batch, num_written: None,
    notes: list[str] | None = None,
    child: tuple[str, ...] | None = None,
    stopped: bool = False,
    unordered: bool = False,
    strict: bool = False,
    is_fresh: bool = False,
    trace: Path | None = None,
) -> Summary:
    """Run a file in this process, with the fake engine in the worker child."""
    options = RunOptions(
        file=str(file),
        output=output,
        errors=errors,
        model="fake",
        unordered=unordered,
        strict=strict,
        is_fresh=is_fresh,
        slot="cpu:0",
        trace=trace,
    )
    local = LocalRun(
        options,
        worker=WorkerSettings.load(),
        submit=SubmitSettings.load(),
        retention=RetentionSettings.load(),
        cache_folder=cache_folder(),
        on_update=lambda now: on_update(local, now.batch, now.num_written or 0),
        on_note=(notes if notes is not None else []).append,
        child=child or fake_child(),
    )
    if stopped:
        local.stop()
    return local.run()


def stop_at(num_lines: int) -> Callable[[LocalRun, Batch, int], None]:
    """Stop a run once when so many lines are written."""
    asked: list[bool] = []

    def on_update(local: LocalRun, batch: Batch, num_written: int) -> None:
        if num_written >= num_lines and not asked:
            asked.append(True)
            local.stop()

    return on_update


# To the end -----------------------------------------------------------------------------------


def test_a_run_answers_every_line_and_running_it_again_does_nothing(tmp_path: Path) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(250)), tmp_path / "out.jsonl"
    updates: list[tuple[Batch, int]] = []
    summary = run(file, out, on_update=lambda _, batch, written: updates.append((batch, written)))
    lines = read_output(out)
    assert custom_ids_of(lines) == [f"c{i}" for i in range(1, 251)]
    assert [content_of(line) for line in lines] == [f"prompt {i}" for i in range(1, 251)]
    assert not summary.was_stopped
    assert (summary.num_written, summary.num_done) == (250, 250)
    assert summary.batch.status is Status.COMPLETED
    assert summary.completion_tokens == sum(len(f"prompt {i}") for i in range(1, 251))
    assert updates[-1][1] == 250
    assert any("250 jobs in" in line for line in summary.lines())

    before, started = out.read_bytes(), time.monotonic()
    again = run(file, out, child=("/nothing/to/start",))
    assert time.monotonic() - started < 5
    assert (again.num_done, again.num_written) == (0, 250)
    assert any("nothing was left to do" in line for line in again.lines())
    assert out.read_bytes() == before


def test_the_command_reports_bad_lines_and_prints_json_alone(tmp_path: Path) -> None:
    lines: list[Any] = [*chat_lines(2), "{", chat_line("refused", "refuse me")]
    text = write_lines(tmp_path / "in.jsonl", [*lines, chat_line("long", "x" * 5000)]).read_bytes()
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    arguments = ["run", "-", "-o", str(out), "--errors", str(errors), "--json", "--model", "fake"]
    done = run_qsvc(*arguments, program=FAKE_QSVC, stdin=text)
    assert done.returncode == 1, done.stderr
    shown = json.loads(done.stdout)
    assert done.stderr == ""
    assert shown["batch"]["status"] == "completed"
    assert shown["batch"]["request_counts"]["completed"] == 2
    assert shown["batch"]["request_counts"]["failed"] == 3
    assert shown["lines_written"] == 5
    assert not shown["stopped"]
    assert shown["run"]["jobs"] == 5
    assert custom_ids_of(read_output(out)) == ["c1", "c2"]
    assert [line["error"]["code"] for line in read_output(errors)] == [
        "invalid_json_line",
        "invalid_request",
        "context_length_exceeded",
    ]


def test_the_summary_names_some_lines_that_failed_and_says_how_many_did(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", [*chat_lines(1), *["{"] * 5])
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    arguments = ["run", file, "-o", out, "--errors", errors, "--model", "fake"]
    done = run_qsvc(*arguments, program=FAKE_QSVC)
    assert done.returncode == 1, done.stderr
    shown = done.stderr.splitlines()
    assert [line.split(":")[0] for line in shown if "invalid_json_line" in line] == [
        "  line 2",
        "  line 3",
        "  line 4",
    ]
    assert shown[-3:] == ["  and 2 more", f"results: {out}", f"failed lines: {errors}"]


def test_a_lost_output_is_written_again_without_running_anything(tmp_path: Path) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(40)), tmp_path / "out.jsonl"
    run(file, out)
    before = out.read_bytes()
    out.unlink()
    assert run(file, out).num_done == 0
    assert out.read_bytes() == before
    assert set(attempts(cache_folder()).values()) == {1}


# Killed and stopped ---------------------------------------------------------------------------


@pytest.mark.parametrize("server_dies", [False, True])
def test_a_run_killed_half_way_goes_on_and_repeats_nothing_that_was_written(
    slow_steps: None, tmp_path: Path, server_dies: bool
) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(300)), tmp_path / "out.jsonl"
    with start_qsvc("run", file, "-o", out, "--model", "fake") as process:
        wait_until(lambda: num_lines(out) >= 120 or process.poll() is not None, "120 lines")
        os.killpg(process.pid, signal.SIGKILL)
        [server] = run_servers(cache_folder())
        if server_dies and server.pid is not None:
            os.kill(server.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    written = out.read_bytes()
    num_written = written.count(b"\n")
    assert 120 <= num_written < 300

    done = run_qsvc("run", file, "-o", out, "--model", "fake", program=FAKE_QSVC)
    assert done.returncode == 0, done.stderr
    assert "300 jobs: 300 completed, 0 failed" in done.stderr
    lines = read_output(out)
    assert custom_ids_of(lines) == [f"c{i}" for i in range(1, 301)]
    assert [content_of(line) for line in lines] == [f"prompt {i}" for i in range(1, 301)]
    assert out.read_bytes().startswith(written[: written.rindex(b"\n") + 1])
    claims = attempts(cache_folder())
    assert {claims[line] for line in range(1, num_written + 1)} == {1}
    assert max(claims.values()) == 2


def test_ctrl_c_ends_in_good_order_and_says_how_to_go_on(slow_steps: None, tmp_path: Path) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(300)), tmp_path / "out.jsonl"
    with start_qsvc("run", file, "-o", out, "--model", "fake") as process:
        wait_until(lambda: num_lines(out) >= 60 or process.poll() is not None, "60 lines")
        # As a terminal does it: to everything in the foreground.
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in said
    stopped_at = num_lines(out)
    assert f"stopped with {stopped_at} of 300 results" in said
    assert "run the same command to go on" in said
    assert_nothing_left_behind(cache_folder())

    summary = run(file, out)
    assert summary.num_done == 300 - stopped_at
    assert custom_ids_of(read_output(out)) == [f"c{i}" for i in range(1, 301)]
    assert set(attempts(cache_folder()).values()) == {1}, (
        "a running line was not given the time to finish"
    )


def test_a_second_ctrl_c_does_not_wait_for_running_lines(slow_steps: None, tmp_path: Path) -> None:
    # Each takes 40 seconds: far longer than the grace period.
    lines = [chat_line(f"c{i}", "x" * 2000) for i in range(3)]
    file, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with start_qsvc("run", file, "-o", out, "--model", "fake") as process:
        log = wait_until(lambda: [*cache_folder().glob("runs/*/worker.log")], "a worker log")[0]
        wait_until(lambda: "worker started" in log.read_text(), "a worker")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "worker stopping" in log.read_text(), "a worker that stops")
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert time.monotonic() - started < 8, "it waited for the grace period"
    assert process.returncode == 130, said
    assert "stopped with 0 of 3 results" in said


def test_a_stop_before_anything_started_ends_the_run_at_once(tmp_path: Path) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(5)), tmp_path / "out.jsonl"
    assert run(file, out, stopped=True).was_stopped
    assert run(file, out).num_written == 5


@pytest.mark.parametrize("unordered", [False, True])
def test_a_stopped_run_goes_on_in_both_of_its_files(
    slow_steps: None, tmp_path: Path, unordered: bool
) -> None:
    lines: list[Any] = [line for i in range(1, 201) for line in (*chat_lines(1, start=i), "{")]
    file, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    errors = tmp_path / "errors.jsonl"
    summary = run(file, out, errors=errors, unordered=unordered, on_update=stop_at(40))
    assert summary.was_stopped
    assert summary.num_written == num_lines(out) + num_lines(errors) < 400
    head = out.read_bytes()
    summary = run(file, out, errors=errors, unordered=unordered)
    assert summary.num_written == 400
    assert out.read_bytes().startswith(head)
    wanted = [f"c{i}" for i in range(1, 201)]
    ids = custom_ids_of(read_output(out))
    assert (sorted(ids), len(ids)) == (sorted(wanted), 200)
    assert unordered or ids == wanted
    numbers = [line["error"]["line"] for line in read_output(errors)]
    assert sorted(numbers) == list(range(2, 401, 2))


def test_a_server_that_dies_under_a_run_ends_it_with_a_hint_and_loses_nothing(
    slow_steps: None, tmp_path: Path
) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(250)), tmp_path / "out.jsonl"
    killed: list[int] = []

    def kill_server(local: LocalRun, batch: Batch, num_written: int) -> None:
        [server] = run_servers(cache_folder())
        if num_written >= 30 and not killed and server.pid is not None:
            killed.append(server.pid)
            os.kill(server.pid, signal.SIGKILL)

    started = time.monotonic()
    with pytest.raises(ServerUnavailable, match="run the same command to go on"):
        run(file, out, on_update=kill_server)
    assert time.monotonic() - started < 10, "it waited for the grace period"
    assert_nothing_left_behind(cache_folder())
    written = out.read_bytes()
    assert run(file, out).num_written == 250
    assert out.read_bytes().startswith(written)
    assert custom_ids_of(read_output(out)) == [f"c{i}" for i in range(1, 251)]


# Another file, another run ----------------------------------------------------------------------


def test_a_changed_file_is_refused_until_a_fresh_run_is_asked_for(
    slow_steps: None, tmp_path: Path
) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(200)), tmp_path / "out.jsonl"
    assert run(file, out, on_update=stop_at(30)).was_stopped
    before = out.read_bytes()
    write_lines(file, chat_lines(20, start=501))
    with pytest.raises(ConfigurationError) as caught:
        run(file, out)
    message = str(caught.value)
    assert str(out) in message
    assert "--new" in message
    assert out.read_bytes() == before

    notes: list[str] = []
    summary = run(file, out, is_fresh=True, notes=notes)
    assert summary.num_done == summary.batch.total == 20
    assert custom_ids_of(read_output(out)) == [f"c{i}" for i in range(501, 521)]
    assert any("an earlier run of 200 lines is given up" in note for note in notes)
    assert len(attempts(cache_folder())) == 20, "the rest of the earlier run was kept"


def test_a_fresh_run_answers_the_same_file_again(tmp_path: Path) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(10)), tmp_path / "out.jsonl"
    first = run(file, out)
    first_ids = [line["id"] for line in read_output(out)]
    second = run(file, out, is_fresh=True)
    assert second.num_done == 10
    assert second.batch.id != first.batch.id
    assert custom_ids_of(read_output(out)) == [f"c{i}" for i in range(1, 11)]
    assert not set(first_ids) & {line["id"] for line in read_output(out)}
    third = run(file, out)
    assert third.batch.id == second.batch.id
    assert third.num_done == 0


def test_a_run_beside_another_of_the_same_or_on_the_same_device_is_refused(
    slow_steps: None, tmp_path: Path
) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(60)), tmp_path / "out.jsonl"
    refusals: list[str] = []

    def run_others(local: LocalRun, batch: Batch, num_written: int) -> None:
        if refusals:
            return
        for other in (out, tmp_path / "other.jsonl"):
            with pytest.raises(ConfigurationError) as caught:
                run(file, other)
            refusals.append(str(caught.value))

    assert run(file, out, on_update=run_others).num_written == 60
    same, device = refusals
    assert f"another qsvc run (pid {os.getpid()})" in same
    assert f"another worker (pid {os.getpid()}) runs on cpu:0" in device
    assert "--device-slot" in device


# What cannot work -------------------------------------------------------------------------------


def test_a_model_that_cannot_be_loaded_ends_the_run(tmp_path: Path) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(5)), tmp_path / "out.jsonl"
    with pytest.raises(ModelUnavailable, match="no such model"):
        run(file, out, child=(sys.executable, "-c", NO_MODEL))
    assert_nothing_left_behind(cache_folder())
    assert read_output(out) == []
    assert run(file, out).num_written == 5


def test_a_fresh_run_that_cannot_begin_leaves_the_results_of_the_one_before(
    tmp_path: Path,
) -> None:
    file, out, errors = (tmp_path / f"{name}.jsonl" for name in ("in", "out", "errors"))
    write_lines(file, [*chat_lines(3), "{"])
    run(file, out, errors=errors)
    before = out.read_bytes(), errors.read_bytes()
    with pytest.raises(ModelUnavailable):
        run(file, out, errors=errors, is_fresh=True, child=(sys.executable, "-c", NO_MODEL))
    with pytest.raises(BatchFileError):
        run(file, out, errors=errors, is_fresh=True, strict=True)
    assert (out.read_bytes(), errors.read_bytes()) == before
    # What a killed one has left is in nobody's way, and does not stay.
    (tmp_path / ".out.jsonl.qsvc-new").write_text("torn")
    run(file, out, errors=errors, is_fresh=True)
    assert (num_lines(out), num_lines(errors)) == (3, 1)
    assert out.read_bytes() != before[0]
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out.jsonl"]
    assert not list(tmp_path.glob(".*"))


def test_a_worker_that_cannot_be_started_ends_the_run(tmp_path: Path) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(5)), tmp_path / "out.jsonl"
    with pytest.raises(FileNotFoundError, match="not/a/program"):
        run(file, out, child=("/not/a/program",))


@pytest.mark.parametrize(
    ("lines", "message"), [([], "no request"), ([*chat_lines(1), "{"], "line 2: invalid_json")]
)
def test_a_file_that_is_refused_as_a_whole_starts_no_worker(
    tmp_path: Path, lines: list[Any], message: str
) -> None:
    file, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with pytest.raises(BatchFileError, match=message):
        run(file, out, strict=True, child=("/not/a/program",))


def test_a_traced_run_writes_where_the_time_of_every_line_went(tmp_path: Path) -> None:
    file, output = write_lines(tmp_path / "in.jsonl", chat_lines(5)), tmp_path / "out.jsonl"
    traces, notes = tmp_path / "trace.json", list[str]()
    run(file, output, trace=traces, notes=notes)
    events = json.loads(traces.read_text())["traceEvents"]
    assert sum(event["name"] == "queue.wait" for event in events) == 5
    assert any(str(traces) in note and "perfetto" in note for note in notes)
    # A run with nothing left to do has the traces of the one before.
    traces.unlink()
    run(file, output, trace=traces)
    assert json.loads(traces.read_text())["traceEvents"] == events

    other = write_lines(tmp_path / "other.jsonl", chat_lines(2))
    run(other, tmp_path / "other-out.jsonl")
    missing = tmp_path / "missing.json"
    run(other, tmp_path / "other-out.jsonl", trace=missing, notes=notes)
    assert not missing.exists()
    assert "--trace" in notes[-1]


@pytest.mark.parametrize("name", ["in.jsonl", "out.jsonl", "errors.jsonl"])
def test_traces_have_a_file_of_their_own(tmp_path: Path, name: str) -> None:
    file = write_lines(tmp_path / "in.jsonl", chat_lines(1))
    before = file.read_bytes()
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    with pytest.raises(ConfigurationError, match=rf"{name} is .*--trace"):
        run(file, output, errors=errors, trace=tmp_path / name)
    assert file.read_bytes() == before
    with pytest.raises(ConfigurationError, match="No such file"):
        run(file, output, errors=errors, trace=tmp_path / "none" / "trace.json")
    assert num_lines(output) == 1  # the results are there all the same


@pytest.mark.parametrize("is_fresh", [False, True])
def test_the_file_with_the_requests_cannot_take_the_results(tmp_path: Path, is_fresh: bool) -> None:
    file = write_lines(tmp_path / "in.jsonl", chat_lines(2))
    before = file.read_bytes()
    link = tmp_path / "link.jsonl"
    link.symlink_to(file)
    with pytest.raises(ConfigurationError, match="name another for -o"):
        run(file, link, is_fresh=is_fresh)
    with pytest.raises(ConfigurationError, match="name another for --errors"):
        run(file, tmp_path / "out.jsonl", errors=file, is_fresh=is_fresh)
    assert file.read_bytes() == before


# More lines than the server should hold ---------------------------------------------------------


def test_a_file_larger_than_the_window_leaves_the_server_as_its_answers_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSVC_SUBMIT_WINDOW_LINES", "40")
    monkeypatch.setenv("QSVC_SUBMIT_CHUNK_LINES", "10")
    file, out = write_lines(tmp_path / "in.jsonl", chat_lines(300)), tmp_path / "out.jsonl"
    summary = run(file, out)
    assert (summary.batch.completed, summary.batch.total) == (300, 300)
    assert custom_ids_of(read_output(out)) == [f"c{i}" for i in range(1, 301)]
    assert len(attempts(cache_folder())) < 100
    assert run(file, out).num_done == 0

    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigurationError, match="has lost lines"):
        run(file, out)
