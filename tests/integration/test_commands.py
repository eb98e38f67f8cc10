"""The qsvc command against a real server and workers with the fake engine."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cli.main import COMMANDS, main
from queue_service import keys
from queue_service.batches import Batches, Status
from queue_service.connection import connect
from queue_service.local_server import LocalServer
from queue_service.results import read_job
from queue_service.settings import RedisSettings
from tests.cli_helpers import (
    FAKE_QSVC,
    QSVC,
    HandWorker,
    assert_nothing_left_behind,
    chat_line,
    chat_lines,
    content_of,
    custom_ids_of,
    read_output,
    run_qsvc,
    start_qsvc,
    wait_until,
    write_lines,
)
from tests.screen import terminal

STEP_SECONDS = 0.01
NOWHERE = "unix:///nowhere/at-all.sock"
Qsvc = Callable[..., subprocess.CompletedProcess[str]]
InProcess = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Service:
    """A server with one worker of four rows that serves the model alias ``fake``."""

    url: str
    redis: Redis
    cache_folder: Path


@pytest.fixture(scope="module")
def service(
    redis_server: LocalServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    url = redis_server.start()
    connection = connect(RedisSettings.load(url=url))
    connection.flushall()
    folder = tmp_path_factory.mktemp("cache")
    env = {
        "QSVC_CONFIG": os.devnull,
        "QSVC_CACHE_FOLDER": str(folder),
        "QSVC_WORKER_CLAIM_AHEAD": "2",
        "FAKE_STEP_SECONDS": str(STEP_SECONDS),
    }
    worker = start_qsvc("worker", "--model", "fake", "--slots", "4", "--redis", url, env=env)
    try:
        wait_until(lambda: connection.exists(keys.model_card("fake")), "a worker")
        yield Service(url, connection, folder)
        worker.send_signal(signal.SIGTERM)
        _, said = worker.communicate(timeout=20)
        assert worker.returncode == 0, said
        assert_nothing_left_behind(folder)
    finally:
        worker.kill()
        worker.communicate()
        connection.close()


@pytest.fixture
def qsvc(service: Service, monkeypatch: pytest.MonkeyPatch) -> Qsvc:
    """The real command, pointed at the service by the environment."""
    monkeypatch.setenv("QSVC_REDIS_URL", service.url)
    return run_qsvc


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    """Run a command without a process of its own; return exit code, stdout and stderr."""

    def run(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["qsvc", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        output = capsys.readouterr()
        return caught.value.code, output.out, output.err

    return run


def submit(qsvc: Qsvc, path: Path, *options: str) -> str:
    done = qsvc("submit", path, "--model", "fake", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, "more than the batch's id on standard output"
    return done.stdout.strip()


# One batch from start to end ------------------------------------------------------------------


def test_a_file_goes_from_submit_to_results(qsvc: Qsvc, tmp_path: Path) -> None:
    path, out = write_lines(tmp_path / "in.jsonl", chat_lines(30)), tmp_path / "out.jsonl"
    batch_id = submit(qsvc, path)
    done = qsvc("results", batch_id, "-o", out, "--follow")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "30 of 30 lines" in done.stderr
    lines = read_output(out)
    assert custom_ids_of(lines) == [f"c{i}" for i in range(1, 31)]
    assert [content_of(line) for line in lines] == [f"prompt {i}" for i in range(1, 31)]

    again = qsvc("submit", path, "--model", "fake", "--json")
    shown = json.loads(again.stdout)
    assert shown["id"] == batch_id
    assert not shown["is_new"]
    assert shown["status"] == "completed"
    assert shown["request_counts"]["completed"] == 30


def test_a_fresh_run_or_another_key_is_another_batch(
    qsvc: Qsvc, in_process: InProcess, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(1))

    def batch_id(*options: str) -> str:
        code, out, _ = in_process("submit", path, "--model", "fake", *options)
        assert code == 0
        return out

    ids = [batch_id(*options) for options in ([], ["--new"], ["--key", "k"])]
    assert len(set(ids)) == 3
    assert batch_id("--key", "k") == ids[2]


def test_a_dry_run_shows_bad_lines_and_what_lines_share_and_needs_no_server(
    in_process: InProcess, tmp_path: Path
) -> None:
    lines: list[Any] = [chat_line(f"c{i}", "Be terse. " * 60 + str(i)) for i in range(3)]
    path = write_lines(tmp_path / "in.jsonl", [*lines, "not json"])
    code, out, _ = in_process("submit", path, "--dry-run", "--redis", NOWHERE)
    assert code == 1
    assert "line 4: invalid_json_line" in out
    assert "4 lines, 1 of them bad; nothing was queued" in out
    assert "3 of 4 lines begin like others, in 1 group" in out
    assert "3 lines, the first of them line 1, share 60" in out
    code, out, _ = in_process("submit", path, "--dry-run", "--no-plan", "--json")
    told = json.loads(out)
    [error] = told.pop("first_errors")
    assert error.startswith("line 4: invalid_json_line: ")
    assert (code, told) == (1, {"lines": 4, "bad_lines": 1, "plan": None})
    code, out, _ = in_process("submit", write_lines(path, lines), "--dry-run", "--json")
    assert (code, json.loads(out)["bad_lines"], json.loads(out)["first_errors"]) == (0, 0, [])


def test_a_submit_says_how_many_lines_begin_alike(qsvc: Qsvc, tmp_path: Path) -> None:
    lines = [chat_line(f"c{i}", "Be brief. " * 60 + str(i)) for i in range(3)]
    path = write_lines(tmp_path / "in.jsonl", lines)
    assert "3 of 3 lines begin like others" in qsvc("submit", path, "--model", "fake").stderr
    said = qsvc("submit", path, "--model", "fake", "--new", "--no-plan").stderr
    assert "begin like others" not in said


def test_standard_input_and_compressed_files_are_the_same_batch(qsvc: Qsvc, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(2, max_tokens=2))
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    batch_id = submit(qsvc, packed)
    done = qsvc("submit", "-", "--model", "fake", stdin=path.read_bytes())
    assert done.stdout.strip() == batch_id
    assert "submitted before" in done.stderr


def test_bad_lines_are_reported_beside_the_good_ones_and_the_exit_code_says_so(
    qsvc: Qsvc, tmp_path: Path
) -> None:
    too_long = chat_line("too-long", "x" * 5000)
    lines: list[Any] = [chat_line("good", "hi"), "{", chat_line("refused", "refuse me"), too_long]
    batch_id = submit(qsvc, write_lines(tmp_path / "in.jsonl", lines))
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    done = qsvc("results", batch_id, "-o", out, "--errors", errors, "--follow")
    assert done.returncode == 1
    assert "4 of 4 lines" in done.stderr
    assert "3 failed" in done.stderr
    assert custom_ids_of(read_output(out)) == ["good"]
    refused = read_output(errors)
    assert [line["error"]["code"] for line in refused] == [
        "invalid_json_line",
        "invalid_request",
        "context_length_exceeded",
    ]
    assert refused[0]["error"]["line"] == 2
    assert "the template says no" in refused[1]["error"]["message"]
    assert [line["response"]["status_code"] for line in refused] == [400, 400, 400]


def test_a_strict_submit_of_a_bad_file_ends_with_code_2_and_queues_nothing(
    service: Service, qsvc: Qsvc, tmp_path: Path
) -> None:
    before = service.redis.zcard(keys.batches())
    path = write_lines(tmp_path / "in.jsonl", [chat_line("good", "hi"), "{"])
    done = qsvc("submit", path, "--model", "fake", "--strict")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "line 2: invalid_json_line" in done.stderr
    assert service.redis.zcard(keys.batches()) == before


def test_results_of_a_batch_that_runs_can_be_taken_and_completed_later(
    service: Service, qsvc: Qsvc, in_process: InProcess, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    # Served by nobody but this test.
    path = write_lines(tmp_path / "in.jsonl", chat_lines(4))
    _, said, hint = in_process("submit", path, "--alias", "by-hand")
    assert "no worker serves qsvc:by-hand" in hint
    command = ("results", said.strip(), "-o", out)
    worker = HandWorker(service.redis, "qsvc:by-hand")
    worker.answer(*worker.claim(2))
    code, _, said = in_process(*command)
    assert code == 0
    assert "2 of 4 lines" in said
    assert "--follow" in said
    head = out.read_bytes()
    worker.answer_all()
    assert in_process(*command)[0] == 0
    assert out.read_bytes().startswith(head)
    assert len(read_output(out)) == 4

    out.write_text("something else\n")
    code, _, said = in_process(*command)
    assert code == 2
    assert "--overwrite" in said
    assert out.read_text() == "something else\n"
    assert in_process(*command, "--overwrite")[0] == 0
    assert len(read_output(out)) == 4


def test_a_submit_killed_half_way_is_completed_by_the_next(
    service: Service, qsvc: Qsvc, in_process: InProcess, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(6000))
    batches = Batches(service.redis)
    known = service.redis.zcard(keys.batches())
    with start_qsvc("submit", path, "--alias", "killed", program=QSVC) as process:
        wait_until(lambda: service.redis.zcard(keys.batches()) > known, "a batch")
        [batch] = batches.newest(1)
        wait_until(lambda: batches.get(batch.id).total >= 400, "400 lines")
        process.kill()
    half = batches.get(batch.id)
    assert 400 <= half.total < 6000
    assert "submit still runs or was interrupted" in in_process("status", batch.id)[1]
    code, out, _ = in_process("submit", path, "--alias", "killed")
    assert (code, out) == (0, f"{batch.id}\n")
    whole = batches.get(batch.id)
    assert whole.is_submitted
    assert whole.total == 6000
    worker = HandWorker(service.redis, "qsvc:killed")
    claims = [claimed.job_id for page in iter(worker.claim, []) for claimed in page]
    assert claims == [f"{batch.id}-{line}" for line in range(1, 6001)]


def test_status_shows_batches_and_jobs_to_people_and_programs(
    service: Service, qsvc: Qsvc, in_process: InProcess, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", [*chat_lines(2), "{"])
    code, out, _ = in_process("submit", path, "--alias", "shown")
    batch_id = out.strip()
    worker = HandWorker(service.redis, "qsvc:shown")
    worker.fail(*worker.claim(1))

    shown = json.loads(qsvc("status", batch_id, "--json").stdout)
    assert shown["object"] == "batch"
    assert shown["status"] == "in_progress"
    counts = shown["request_counts"]
    assert (counts["total"], counts["completed"], counts["failed"]) == (3, 0, 2)
    code, out, _ = in_process("status", batch_id)
    assert code == 0
    assert f"{batch_id}  in_progress  2 of 3" in out

    code, out, _ = in_process("status", f"{batch_id}-1", "--json")
    job = json.loads(out)
    assert (job["id"], job["object"], job["status"]) == (f"{batch_id}-1", "job", "failed")
    assert job["error"]["code"] == "internal_error"
    code, out, _ = in_process("status", f"{batch_id}-1")
    assert "failed (internal_error: it failed: internal_error)" in out
    code, out, _ = in_process("status", f"{batch_id}-2")
    assert out == f"{batch_id}-2  queued\n"


def test_a_line_that_a_batch_does_not_have_is_told_with_how_many_it_has(
    qsvc: Qsvc, in_process: InProcess, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", ["", *chat_lines(2)])
    batch_id = in_process("submit", path, "--alias", "counted")[1].strip()
    assert in_process("status", f"{batch_id}-3")[0] == 0, "numbers count blank lines"
    for line in ("4", "0", "x"):
        code, _, err = in_process("status", f"{batch_id}-{line}")
        assert code == 4
        assert err == f"qsvc: no job '{batch_id}-{line}': {batch_id} has 2 lines\n"
    assert "it may have expired" in in_process("status", f"{batch_id}-1")[2]


def test_results_of_a_line_say_which_batch_to_name(in_process: InProcess, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    code, _, err = in_process("results", "batch_0a-3", "-o", out, "--redis", NOWHERE)
    assert code == 2
    assert "results takes a batch's id, here batch_0a;" in err
    assert not out.exists()


@pytest.mark.parametrize(("stdin", "is_deleted"), [("n\n", False), ("", False), ("Y\n", True)])
def test_a_batch_is_deleted_when_somebody_says_so(
    service: Service,
    qsvc: Qsvc,
    in_process: InProcess,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stdin: str,
    is_deleted: bool,
) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(2))
    batch_id = in_process("submit", path, "--alias", "deleted", "--new")[1].strip()
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    code, out, err = in_process("delete", batch_id)
    assert err.startswith("delete 2 lines and their results? [y/N]: ")
    if is_deleted:
        assert (code, out) == (0, f"{batch_id} deleted\n")
    else:
        assert (code, out) == (1, "")
        assert f"{batch_id} is not deleted; with --yes it is" in err
        assert in_process("delete", batch_id, "--yes")[:2] == (0, f"{batch_id} deleted\n")
    assert in_process("status", batch_id)[0] == 4


def test_ctrl_c_at_the_question_is_no_answer(
    qsvc: Qsvc, in_process: InProcess, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(2))
    batch_id = in_process("submit", path, "--alias", "kept")[1].strip()
    with terminal(*QSVC, "delete", batch_id) as shown:
        shown.wait_for(lambda screen: "[y/N]" in screen.text, "the question")
        shown.interrupt()
        assert shown.end() == 130
    assert in_process("status", batch_id)[0] == 0


# A running job --------------------------------------------------------------------------------


def test_tail_prints_the_text_of_a_running_job_before_its_end(
    service: Service, qsvc: Qsvc, tmp_path: Path
) -> None:
    text = "".join(f"word{i} " for i in range(70))  # about 5 seconds of steps
    batch_id = submit(qsvc, write_lines(tmp_path / "in.jsonl", [chat_line("c1", text)]))
    job_id = f"{batch_id}-1"
    with start_qsvc("tail", job_id, program=QSVC) as tail:
        assert tail.stdout is not None
        assert tail.stderr is not None
        first = tail.stdout.read(5)
        status = read_job(service.redis, job_id).status
        assert first == "word0"
        assert status == "started", "the text came only with the end"
        assert first + tail.stdout.read() == text + "\n"
        assert tail.stderr.read() == ""
    assert tail.returncode == 0

    done = qsvc("tail", job_id)
    assert (done.returncode, done.stdout, done.stderr) == (0, text + "\n", "")


def test_tail_of_a_job_that_failed_says_why(
    service: Service, qsvc: Qsvc, in_process: InProcess, tmp_path: Path
) -> None:
    batch_id = submit(qsvc, write_lines(tmp_path / "in.jsonl", [chat_line("c1", "refuse me")]))
    code, out, err = in_process("tail", f"{batch_id}-1")
    assert code == 1
    assert out.strip() == ""
    assert "the template says no" in err


def test_cancel_ends_queued_and_running_lines_and_keeps_finished_ones(
    service: Service, qsvc: Qsvc, in_process: InProcess, tmp_path: Path
) -> None:
    # Two that end at once, then more long ones than the worker takes.
    lines = [*chat_lines(2, max_tokens=1), *(chat_line(f"l{i}", "x" * 900) for i in range(20))]
    batch_id = submit(qsvc, write_lines(tmp_path / "in.jsonl", lines))
    batches = Batches(service.redis)

    def is_half_done() -> bool:
        running = service.redis.hget(keys.rq_job(f"{batch_id}-4"), "status")
        return batches.get(batch_id).completed == 2 and running == b"started"

    wait_until(is_half_done, "two ended lines and some that run")
    done = qsvc("cancel", batch_id)
    assert (done.returncode, done.stdout) == (0, "20 lines cancelled\n")
    batch = batches.get(batch_id)
    assert batch.status is Status.CANCELLED
    assert (batch.completed, batch.failed, batch.cancelled) == (2, 0, 20)

    # The worker lets go of the running ones: its rows serve the next job.
    wait_until(lambda: worker_rows(service) == 0, "rows that were let go", seconds=8)

    out = tmp_path / "out.jsonl"
    done = qsvc("results", batch_id, "-o", out)
    assert done.returncode == 1
    lines = read_output(out)
    assert [content_of(line) for line in lines[:2]] == ["p", "p"]
    assert {line["error"]["code"] for line in lines[2:]} == {"batch_cancelled"}
    assert [line["response"] for line in lines[2:]] == [None] * 20
    assert in_process("tail", f"{batch_id}-5")[0] == 1

    assert in_process("cancel", batch_id)[1] == "0 lines cancelled\n"
    assert batches.get(batch_id) == batch


def worker_rows(service: Service) -> int | None:
    """Rows that the worker said it has at its last beat."""
    for name in service.redis.scan_iter(keys.worker_card("*")):
        rows = service.redis.hget(name, "rows")
        return None if rows is None else int(rows)
    return None


def test_cancel_of_a_job_says_whether_it_came_in_time(
    service: Service, in_process: InProcess, qsvc: Qsvc, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(2))
    _, out, _ = in_process("submit", path, "--alias", "one-by-one")
    job_id = f"{out.strip()}-1"
    assert in_process("cancel", job_id)[:2] == (0, "cancelled\n")
    assert in_process("cancel", job_id)[:2] == (0, "it had ended already\n")


# Workers --------------------------------------------------------------------------------------


def test_a_burst_worker_ends_when_the_queue_is_empty(
    service: Service, qsvc: Qsvc, in_process: InProcess, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(50))
    batch_id = in_process("submit", path, "--alias", "burst")[1].strip()
    done = qsvc("worker", "--model", "m", "--alias", "burst", "--burst", program=FAKE_QSVC)
    assert done.returncode == 0, done.stderr
    assert "queues qsvc:burst:high, qsvc:burst, qsvc:burst:low" in done.stderr
    assert Batches(service.redis).get(batch_id).completed == 50


def test_a_second_worker_on_a_taken_slot_is_refused(service: Service, qsvc: Qsvc) -> None:
    env = {"QSVC_CACHE_FOLDER": str(service.cache_folder)}
    done = qsvc("worker", "--model", "fake", program=FAKE_QSVC, env=env)
    assert done.returncode == 2
    assert "another worker" in done.stderr
    assert "--device-slot" in done.stderr


def test_a_worker_without_a_model_is_refused(in_process: InProcess, qsvc: Qsvc) -> None:
    code, _, err = in_process("worker")
    assert code == 2
    assert "--model" in err


# Errors and settings --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["submit", "status", "results", "tail", "cancel", "worker"])
def test_a_server_that_is_not_there_ends_every_command_with_code_3(
    in_process: InProcess, tmp_path: Path, command: str
) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(1))
    arguments: dict[str, list[str | Path]] = {
        "submit": [path],
        "results": ["batch_x", "-o", tmp_path / "out.jsonl"],
        "worker": ["--model", "fake"],
    }
    code, out, err = in_process(command, *arguments.get(command, ["batch_x"]), "--redis", NOWHERE)
    assert code == 3
    assert out == ""
    assert NOWHERE in err
    assert "name another with --redis or QSVC_REDIS_URL" in err
    assert ("qsvc run" in err) is (command == "submit"), "it reads no server"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "batch_unknown"],
        ["status", "batch_unknown-1"],
        ["results", "batch_unknown", "-o", "out.jsonl"],
        ["cancel", "batch_unknown"],
        ["cancel", "no-such-job"],
        ["tail", "no-such-job"],
    ],
    ids=" ".join,
)
def test_an_unknown_batch_or_job_ends_with_code_4(
    in_process: InProcess,
    qsvc: Qsvc,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = in_process(*arguments)
    assert code == 4
    assert out == ""
    assert arguments[1] in err
    assert list(tmp_path.glob("out*")) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["status"],
        ["status", "--no-such-option", "x"],
        ["results", "batch_x"],
        ["submit", "no-such-file.jsonl"],
        ["submit", "empty.jsonl"],
        ["submit", "empty.jsonl", "--priority", "highest"],
        ["status", "batch_x", "--redis", "http://127.0.0.1"],
        ["worker", "--model", "m", "--slots", "0"],
        ["worker", "--model", "m", "--device-slot", "tpu:0"],
        ["batches", "--newest", "0"],
        ["submit", "empty.jsonl", "--expires-in", "0"],
        ["run", "empty.jsonl", "-o", "no-such-folder/out.jsonl"],
        ["run", "no-such-file.jsonl", "-o", "out.jsonl"],
    ],
    ids=" ".join,
)
def test_bad_usage_ends_with_code_2_and_one_message(
    in_process: InProcess,
    qsvc: Qsvc,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    code, out, err = in_process(*arguments)
    assert code == 2
    assert out == ""
    assert err.strip()
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["worker", "--kv-memory", "lots"], "--kv-memory lots: is no size such as 500MB or 8GB"),
        (["fit", "m", "--kv-memory", "8 gi"], "--kv-memory '8 gi': is no size such as 500MB"),
        (["worker", "--device-slot", "foo"], "--device-slot foo: is no device slot such as gpu:0"),
        (["worker", "--model", ""], "--model '': must not be empty"),
        (["worker", "--queue", ""], "--queue '': must not be empty"),
        (["worker", "--slots", "0"], "--slots 0: should be greater than 0"),
        (["status", "x", "--redis", "localhost:6399"], "--redis: must start with redis://"),
    ],
    ids=str,
)
def test_a_mistake_in_an_option_is_told_with_its_name_and_what_is_wanted(
    in_process: InProcess, arguments: list[str], told: str
) -> None:
    code, out, err = in_process(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"qsvc: {told}")


@pytest.mark.parametrize(
    ("given", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("12h", 43_200), ("1d", 86_400)]
)
def test_the_time_of_a_batch_is_in_seconds_or_has_a_unit(
    service: Service, qsvc: Qsvc, in_process: InProcess, tmp_path: Path, given: str, seconds: int
) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(1))
    options = ("--alias", "in-time", "--new", "--expires-in", given)
    batch = Batches(service.redis).get(in_process("submit", path, *options)[1].strip())
    assert batch.timestamps["expires_at"] - batch.timestamps["created_at"] == seconds


@pytest.mark.parametrize("given", ["0", "0d", "1 d", "soon", "-5", "1.5h", ""])
def test_a_time_that_is_none_is_told_with_what_is_one(
    in_process: InProcess, tmp_path: Path, given: str
) -> None:
    path = write_lines(tmp_path / "in.jsonl", chat_lines(1))
    code, _, err = in_process("submit", path, "--expires-in", given, "--redis", NOWHERE)
    assert code == 2
    assert f"{given!r} is no time such as 3600 (seconds), 90m, 12h or 2d" in err


def test_a_mistyped_command_is_told_with_the_one_that_was_meant(in_process: InProcess) -> None:
    for mistyped, meant in (("rum", "run"), ("sumbit", "submit"), ("result", "results")):
        code, _, err = in_process(mistyped, "file.jsonl")
        assert code == 2
        assert f"No such command {mistyped!r}. Did you mean {meant!r}?" in err
    assert "Did you mean" not in in_process("frobnicate")[2]


def test_the_server_comes_from_the_flag_else_the_environment_else_the_file(
    service: Service,
    in_process: InProcess,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[redis]\nurl = "unix:///nowhere/config-file.sock"\n')
    monkeypatch.setenv("QSVC_CONFIG", str(config))
    code, _, err = in_process("status", "batch_x")
    assert (code, "config-file.sock" in err) == (3, True)

    monkeypatch.setenv("QSVC_REDIS_URL", "unix:///nowhere/environment.sock")
    code, _, err = in_process("status", "batch_x")
    assert (code, "environment.sock" in err) == (3, True)

    code, _, err = in_process("status", "batch_x", "--redis", "unix:///nowhere/flag.sock")
    assert (code, "flag.sock" in err) == (3, True)

    assert in_process("status", "batch_x", "--redis", service.url)[0] == 4
    monkeypatch.setenv("QSVC_REDIS_URL", service.url)
    assert in_process("status", "batch_x")[0] == 4


def test_a_mistake_in_the_config_file_is_named(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[redis]\nurll = "redis://localhost"\n')
    monkeypatch.setenv("QSVC_CONFIG", str(config))
    code, _, err = in_process("status", "batch_x")
    assert code == 2
    assert "urll" in err
    assert "did you mean url?" in err


def test_a_password_in_the_url_is_not_shown(in_process: InProcess) -> None:
    url = "redis://user:s3cret@127.0.0.1:1/0"
    code, _, err = in_process("status", "batch_x", "--redis", url)
    assert code == 3
    assert "s3cret" not in err


def test_a_mistyped_variable_is_told_of_and_changes_nothing(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSVC_REDIS_ULR", "redis://127.0.0.1:2/0")
    code, _, err = in_process("status", "batch_x", "--redis", "redis://127.0.0.1:1/0")
    assert code == 3
    assert "QSVC_REDIS_ULR is no setting; did you mean QSVC_REDIS_URL?" in err


def test_every_command_explains_itself(in_process: InProcess) -> None:
    _, out, _ = in_process("--help")
    for name in COMMANDS:
        assert f"\n  {name} " in out
        code, text, _ = in_process(name, "--help")
        assert code == 0
        assert "Usage:" in text


def test_output_that_nobody_reads_any_more_ends_the_command_quietly(
    service: Service, qsvc: Qsvc, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", [chat_line("c1", "x" * 900)])
    batch_id = submit(qsvc, path, "--stream")
    with start_qsvc("tail", f"{batch_id}-1", program=QSVC) as tail:
        assert tail.stdout is not None
        assert tail.stderr is not None
        assert tail.stdout.read(1) == "x"
        tail.stdout.close()
        assert tail.stderr.read() == ""
    Batches(service.redis).cancel(batch_id)
    assert tail.returncode == 1
