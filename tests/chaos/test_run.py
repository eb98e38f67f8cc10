"""`qsvc run` and everything under it, killed in every combination and run again."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from queue_service.settings import PathSettings
from tests.chaos.rig import Problems, Report
from tests.cli_helpers import (
    FAKE_QSVC,
    assert_nothing_left_behind,
    chat_line,
    content_of,
    num_lines,
    read_output,
    run_qsvc,
    run_servers,
    start_qsvc,
    wait_until,
    write_lines,
)

_JOBS = 200


@pytest.mark.slow
def test_a_run_and_its_server_may_be_killed_again_and_again(
    report: Report, redis_server: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.02")
    monkeypatch.setenv("QSVC_WORKER_SLOTS", "8")
    texts = {f"c{i}": f"prompt {i} of {_JOBS}" for i in range(_JOBS)}
    file = write_lines(tmp_path / "in.jsonl", [chat_line(*item) for item in texts.items()])
    out = tmp_path / "out.jsonl"
    command = ("run", file, "-o", out, "--model", "fake")
    written = [b""]
    for kills in (_kill_server, _kill_everything, _kill_command, _kill_everything):
        with start_qsvc(*command) as process:
            wanted = num_lines(out) + 30
            wait_until(lambda wanted=wanted: num_lines(out) >= wanted, "30 lines more")  # type: ignore[misc]
            kills(process)
            process.communicate(timeout=30)
        assert process.returncode != 0
        written.append(out.read_bytes())
    done = run_qsvc(*command, program=FAKE_QSVC)
    assert done.returncode == 0, done.stderr
    answers: dict[str, list[str]] = {}
    for line in read_output(out):
        answers.setdefault(line["custom_id"], []).append(content_of(line))
    final = out.read_bytes()
    problems = Problems(
        lost=[name for name in texts if name not in answers],
        doubled=[name for name, contents in answers.items() if len(contents) > 1],
        # The end of a file may be a line that was torn; the next run cuts it off.
        changed=[f"after kill {i}" for i, head in enumerate(written) if not _goes_on(head, final)],
        wrong=[name for name, contents in answers.items() if contents[-1] != texts.get(name)],
    )
    report.add("kill -9 of qsvc run, its server, both, four times", jobs=_JOBS, problems=problems)
    problems.check()
    assert list(answers) == list(texts)
    assert_nothing_left_behind(PathSettings.load().cache_folder)


def _goes_on(head: bytes, final: bytes) -> bool:
    return final.startswith(head[: head.rfind(b"\n") + 1])


def _kill_server(process: subprocess.Popen[str]) -> None:
    [server] = run_servers(PathSettings.load().cache_folder)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)


def _kill_command(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def _kill_everything(process: subprocess.Popen[str]) -> None:
    _kill_command(process)
    _kill_server(process)
