"""The demo model under kills: every answer is that of an undisturbed run, little is done twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rq.suspension import resume, suspend

from queue_service import keys
from queue_service.local_server import LocalServer
from queue_service.settings import PathSettings
from tests.cli_helpers import (
    QSVC,
    assert_nothing_left_behind,
    chat_line,
    custom_ids_of,
    read_output,
    run_qsvc,
    run_servers,
    start_qsvc,
    write_lines,
)
from tests.kill_rig import QUEUE, WORKERS, KillEvery, KillRig, Outcome
from tests.kinds import KINDS, difference, jobs_of_every_kind, make_model

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

_TOKENS = 48
_JOBS = jobs_of_every_kind(len(KINDS), tokens=_TOKENS)
_PROGRESS_SECONDS = 0.5
# What a busy machine may put between a token and the moment when Redis has it.
_LATE_SECONDS = 1.0
# In which a run loads the model and generates something.
_START_SECONDS = 15.0

MakeServer = Callable[..., LocalServer]
MakeRig = Callable[..., KillRig]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "demo")


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("undisturbed")
    with KillRig(LocalServer(folder / "server"), folder, model, {"slots": 4}) as rig:
        outcome = rig.run(_JOBS)
    assert len(outcome.answers) == len(_JOBS)
    return outcome


@pytest.fixture
def make_rig(model: Path, make_server: MakeServer, tmp_path: Path) -> Iterator[MakeRig]:
    with contextlib.ExitStack() as stack:

        def make(**worker: Any) -> KillRig:
            ours = {"slots": 4, "progress_interval_seconds": _PROGRESS_SECONDS, **worker}
            rig = KillRig(make_server(), tmp_path / "rig", model, ours)
            return stack.enter_context(rig)

        yield make


def check(outcome: Outcome, undisturbed: Outcome) -> None:
    """Every answer is there, the same, once, and was streamed as it is."""
    assert outcome.differences(undisturbed) == {}
    assert len(outcome.answers) == len(_JOBS)
    assert outcome.num_dead_letters == 0
    assert (outcome.wrong_streams, outcome.num_restarted_streams) == ([], 0)


def num_late(outcome: Outcome, lost: Mapping[str, float]) -> int:
    """Return how many tokens executions made too late to be saved, given when each was lost."""
    late = _PROGRESS_SECONDS + _LATE_SECONDS
    return sum(
        moment > at - late
        for execution_id, at in lost.items()
        for moment in outcome.noted.moments.get(execution_id, ())
    )


def test_jobs_of_killed_workers_go_on_where_they_stopped(
    make_rig: MakeRig, undisturbed: Outcome
) -> None:
    rig = make_rig()
    kill = KillEvery(rig, seconds=3, times=2)
    charged: dict[str, int] = {}

    def disturb(seconds: float) -> bool:
        for job in _JOBS:
            deaths: Any = rig.connection.hget(keys.rq_job(job.job_id), "qsvc_deaths")
            charged[job.job_id] = max(charged.get(job.job_id, 0), int(deaths or 0))
        return kill(seconds)

    outcome = rig.run(_JOBS, disturb)
    check(outcome, undisturbed)
    assert len(outcome.deaths) == 2
    # Only what had come no further: without a token, or with none that was saved yet.
    fruitless = {
        job_id: sum(
            min(outcome.noted.moments.get(execution_id, [death.at])) > death.at - 3
            for death in outcome.deaths
            for execution_id, lost_id in death.lost.items()
            if lost_id == job_id
        )
        for job_id in charged
    }
    assert all(charged[job_id] <= fruitless[job_id] for job_id in charged)
    lost = {execution_id: death.at for death in outcome.deaths for execution_id in death.lost}
    assert 0 <= outcome.tokens_twice(undisturbed) <= num_late(outcome, lost)
    assert all(death.put_back_seconds < 5 for death in outcome.deaths)
    leftovers: Any = rig.connection.keys("qsvc:progress:*")
    assert leftovers == []


def test_a_server_that_is_killed_and_comes_back_changes_no_answer(
    make_rig: MakeRig, undisturbed: Outcome, kill_server: Callable[[LocalServer], None]
) -> None:
    rig = make_rig()
    kills: list[float] = []

    def disturb(seconds: float) -> bool:
        is_time = len(kills) < 2 and seconds > 2 + 5 * len(kills)
        if is_time:
            kill_server(rig.server)
            time.sleep(1.0)
            rig.server.start()
            kills.append(seconds)
        return is_time

    outcome = rig.run(_JOBS, disturb)
    check(outcome, undisturbed)
    assert kills
    assert outcome.tokens_twice(undisturbed) == 0


def test_jobs_of_a_worker_that_is_told_to_stop_go_on_elsewhere(
    make_rig: MakeRig, undisturbed: Outcome
) -> None:
    rig = make_rig(grace_seconds=1)
    given_back: list[str] = []
    stopped: list[str] = []

    def disturb(seconds: float) -> bool:
        if not stopped and seconds > 2:
            suspend(rig.connection)
            held = rig.look()
            stopped.append(max(WORKERS, key=lambda worker: len(held[worker])))
            rig.supervisor(stopped[0]).stop()
        if stopped and not given_back and not rig.is_up(stopped[0]):
            waiting: Any = rig.connection.lrange(keys.rq_queue(QUEUE), 0, -1)
            assert waiting, "it had more to do than a second's work"
            given_back.extend(job_id.decode() for job_id in waiting)
            resume(rig.connection)
        return False

    outcome = rig.run(_JOBS, disturb)
    check(outcome, undisturbed)
    assert given_back
    # All that it had was saved; the engine makes a step or two more until it hears of it.
    assert 0 <= outcome.tokens_twice(undisturbed) <= 3 * len(given_back)


# qsvc run ---------------------------------------------------------------------------------------


def _lines(count: int, tokens: int) -> list[dict[str, Any]]:
    """Return lines of every kind; those of `qsvc run` do not stream."""
    lines = []
    for job in jobs_of_every_kind(count, tokens=tokens):
        body = {name: value for name, value in job.body.items() if name != "stream"}
        content = body.pop("messages")[0]["content"]
        lines.append(chat_line(job.job_id, content, **body))
    return lines


def _descendants(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-Ao", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    pairs = [line.split() for line in listed.splitlines()]
    parents = {int(child): int(parent) for child, parent in pairs}
    found = [pid]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def _kill_everything(process: subprocess.Popen[str]) -> None:
    """Kill -9 the command, its worker and its server, which nobody is left to tell."""
    pids = _descendants(process.pid)
    pids += [server.pid for server in run_servers(PathSettings.load().cache_folder) if server.pid]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none sees another die
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    process.communicate(timeout=30)


def _answers(path: Path) -> dict[str, Any]:
    return {line["custom_id"]: line["response"]["body"] for line in read_output(path)}


@pytest.mark.parametrize(
    ("num_lines", "tokens", "kills"),
    [
        (8, 32, 4),
        (64, 64, 20),
    ],
)
def test_a_run_that_is_killed_with_all_its_processes_goes_on(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_lines: int,
    tokens: int,
    kills: int,
) -> None:
    monkeypatch.setenv("QSVC_WORKER_BLAS_THREADS", "1")
    lines = _lines(num_lines, tokens)
    file = write_lines(tmp_path / "in.jsonl", lines)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    command = ("run", file, "--model", model, "--slots", "8", "-o")
    other_folder = {"QSVC_CACHE_FOLDER": str(tmp_path / "other-cache")}
    began = time.monotonic()
    done = run_qsvc(*command, whole, env=other_folder, seconds=1500)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr

    source, num_killed = random.Random(num_lines), 0
    while num_killed < kills:
        with start_qsvc(*command, out, program=QSVC) as process:
            # From before the worker is up to after it has answered some.
            wait = source.uniform(0.5, max(_START_SECONDS, 2 * seconds / kills))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait)
            if process.poll() is not None:
                assert process.returncode == 0, process.communicate()
                break
            _kill_everything(process)
        num_killed += 1
    assert num_killed > kills // 2
    done = run_qsvc(*command, out, seconds=1500)
    assert done.returncode == 0, done.stderr
    assert custom_ids_of(read_output(out)) == [line["custom_id"] for line in lines]
    expected, found = _answers(whole), _answers(out)
    assert {i: d for i in expected if (d := difference(expected[i], found[i]))} == {}
    assert_nothing_left_behind(PathSettings.load().cache_folder)
