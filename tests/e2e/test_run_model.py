"""`qsvc run` with the demo model, killed half-way; and without a model at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from queue_service.settings import PathSettings
from tests.cli_helpers import (
    QSVC,
    assert_nothing_left_behind,
    attempts,
    chat_line,
    content_of,
    custom_ids_of,
    num_lines,
    read_output,
    run_qsvc,
    start_qsvc,
    wait_until,
    write_lines,
)

pytestmark = pytest.mark.model

CITIES = (
    "Paris", "Rome", "Oslo", "Cairo", "Lima", "Delhi", "Tokyo", "Bern",
    "Kyiv", "Quito", "Accra", "Hanoi", "Dublin", "Athens", "Riga", "Seoul",
)  # fmt: skip


def test_a_killed_run_of_the_demo_model_goes_on_and_computes_nothing_twice(tmp_path: Path) -> None:
    lines = [
        chat_line(city, f"Where is {city}? Answer in one sentence.", max_tokens=16, temperature=0)
        for city in CITIES
    ]
    file, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = ("run", file, "-o", out, "--slots", "4")
    with start_qsvc(*command, program=QSVC) as process:
        wait_until(lambda: num_lines(out) >= 7 or process.poll() is not None, "7 lines", seconds=90)
        os.killpg(process.pid, signal.SIGKILL)
    written = out.read_bytes()
    num_written = written.count(b"\n")
    assert 7 <= num_written < 16

    done = run_qsvc(*command, seconds=90)
    assert done.returncode == 0, done.stderr
    assert "16 jobs: 16 completed, 0 failed" in done.stderr
    answers = read_output(out)
    assert custom_ids_of(answers) == list(CITIES)
    assert len({line["id"] for line in answers}) == 16
    assert all(content_of(line).strip() for line in answers)
    assert out.read_bytes().startswith(written[: written.rindex(b"\n") + 1])
    claims = attempts(PathSettings.load().cache_folder)
    assert {claims[line] for line in range(1, num_written + 1)} == {1}
    assert_nothing_left_behind(PathSettings.load().cache_folder)


def test_a_model_that_is_not_there_ends_the_command_with_code_5(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", [chat_line("c1", "hello")])
    missing = tmp_path / "no-such-model"
    done = run_qsvc("run", file, "-o", tmp_path / "out.jsonl", "--model", missing)
    assert done.returncode == 5
    assert str(missing) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert_nothing_left_behind(PathSettings.load().cache_folder)
