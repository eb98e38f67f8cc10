"""Two workers on the demo model, jobs of every kind, and a killer: for tests and bench_kill."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis, RedisError

from queue_service import keys
from queue_service.connection import connect
from queue_service.local_server import LocalServer
from queue_service.results import read_job
from queue_service.settings import (
    CheckpointSettings,
    RedisSettings,
    RetentionSettings,
    WorkerSettings,
)
from tests.kinds import (
    COUNTING_CHILD,
    KindOfJob,
    Noted,
    Readers,
    answers_of,
    difference,
    enqueue_jobs,
    read_notes,
)
from workers.child_settings import ChildSettings
from workers.supervisor import Supervisor

ALIAS = "demo"
QUEUE = keys.queue_name(ALIAS)
WORKERS = ("one", "two")

_POLL_SECONDS = 0.02
_READY_SECONDS = 180.0
_PUT_BACK_SECONDS = 30.0
_LOOK_AGAIN_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Death:
    """A kill of a worker child.

    Attributes:
        at: seconds since the epoch.
        lost: the jobs that it held, by execution.
        put_back_seconds: until the last of them was queued again.
    """

    worker: str
    at: float
    lost: Mapping[str, str]
    put_back_seconds: float


@dataclass(slots=True)
class Outcome:
    """What became of a run.

    Attributes:
        answers: by job.
        seconds: from the first submission to the last answer.
        executions: of each job, in their order.
        wrong_streams: jobs whose readers did not see the answer and nothing else.
    """

    answers: Mapping[str, Mapping[str, Any]]
    seconds: float
    noted: Noted
    executions: Mapping[str, Sequence[str]]
    deaths: Sequence[Death]
    num_dead_letters: int
    num_streams: int
    wrong_streams: Sequence[str]
    num_restarted_streams: int

    def differences(self, other: Outcome) -> dict[str, str]:
        """Return what is different from another run of the same jobs, by job."""
        found = {}
        for job_id in self.answers.keys() | other.answers.keys():
            if job_id not in self.answers or job_id not in other.answers:
                found[job_id] = "no answer"
            elif what := difference(self.answers[job_id], other.answers[job_id]):
                found[job_id] = what
        return found

    def tokens_twice(self, undisturbed: Outcome) -> int:
        """Return how many tokens were generated more than once."""
        return self.noted.num_tokens - undisturbed.noted.num_tokens

    @property
    def prefilled_again(self) -> int:
        """Tokens that executions computed to go on: of prompts, and of answers so far."""
        later = [ex for executions in self.executions.values() for ex in executions[1:]]
        return sum(self.noted.prefilled.get(execution_id, 0) for execution_id in later)

    def seconds_to_go_on(self) -> list[list[float]]:
        """Return for each death how long each job that it interrupted waited for its next token."""
        found = []
        for death in self.deaths:
            waited = []
            for execution_id, job_id in death.lost.items():
                if not self.noted.moments.get(execution_id):
                    continue
                executions = self.executions[job_id]
                later = executions[executions.index(execution_id) + 1 :]
                moments = [self.noted.moments[ex][0] for ex in later if ex in self.noted.moments]
                if moments:
                    waited.append(min(moments) - death.at)
            found.append(sorted(waited))
        return found


@dataclass
class KillRig:
    """A server with two supervised workers, each with a child of its own.

    Args:
        server: not started yet.
        folder: takes logs, checkpoints and notes.
        model: a folder.
        worker: settings of the workers, where they differ from the usual ones.
    """

    server: LocalServer
    folder: Path
    model: Path
    worker: Mapping[str, Any] = field(default_factory=dict)

    def __enter__(self) -> KillRig:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.url = self.server.start()
        self.connection: Redis = connect(RedisSettings.load(url=self.url))
        self._executions: dict[str, list[str]] = {}
        self._deaths: list[Death] = []
        self._supervisors: dict[str, tuple[Supervisor, threading.Thread]] = {}
        os.environ["TOKEN_LOG"] = str(self.folder)
        for name in WORKERS:
            supervisor = Supervisor(
                self._settings(name),
                command=COUNTING_CHILD,
                log_path=self.folder / f"{name}.log",
            )
            thread = threading.Thread(target=supervisor.run, name=f"supervisor {name}")
            self._supervisors[name] = supervisor, thread
            thread.start()
        self._await(lambda: all(map(self.is_up, WORKERS)), "two workers", _READY_SECONDS)
        return self

    def __exit__(self, *exc: object) -> None:
        for supervisor, _ in self._supervisors.values():
            supervisor.stop()
            supervisor.stop()
        for _, thread in self._supervisors.values():
            thread.join()
        self.connection.close()
        self.server.stop()

    def _settings(self, name: str) -> ChildSettings:
        usual = {"model": str(self.model), "dtype": "float32", "blas_threads": 1}
        return ChildSettings(
            redis=RedisSettings.load(url=self.url),
            worker=WorkerSettings.load(**{**usual, **self.worker}),
            retention=RetentionSettings.load(),
            alias=ALIAS,
            name=name,
            burst=False,
            checkpoints=CheckpointSettings.load(folder=self.folder / "checkpoints"),
        )

    # Workers ----------------------------------------------------------------------------------

    def is_up(self, name: str) -> bool:
        """Whether a worker is registered."""
        return bool(self.connection.exists(keys.rq_worker(name)))

    def supervisor(self, name: str) -> Supervisor:
        """Return the supervisor of a worker."""
        return self._supervisors[name][0]

    def child_pid(self, name: str) -> int:
        """Return the process id of a worker's child, which is registered."""
        pid: Any = self.connection.hget(keys.rq_worker(name), "pid")
        return int(pid)

    def held_by(self, name: str) -> dict[str, str]:
        """Return the jobs that a worker holds, by execution."""
        members: Any = self.connection.smembers(f"{keys.rq_worker(name)}:executions")
        pairs = [member.decode().rsplit(":", 1) for member in members]
        return {execution_id: job_id for job_id, execution_id in pairs}

    def look(self) -> dict[str, dict[str, str]]:
        """Return what each worker holds, and remember the executions."""
        held = {name: self.held_by(name) for name in WORKERS}
        for executions in held.values():
            for execution_id, job_id in executions.items():
                known = self._executions.setdefault(job_id, [])
                if execution_id not in known:
                    known.append(execution_id)
        return held

    def kill_busier(self) -> Death | None:
        """Kill -9 the child that generates most answers; None when none does."""
        held, begun = self.look(), read_notes(self.folder).moments.keys()
        name = max(WORKERS, key=lambda worker: len(held[worker].keys() & begun))
        if not held[name].keys() & begun:
            return None
        pid = self.child_pid(name)
        os.kill(pid, signal.SIGSTOP)  # so that what it holds is what it loses
        lost = {**held[name], **self.look()[name]}
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        index = f"{keys.rq_worker(name)}:executions"
        until = time.monotonic() + _PUT_BACK_SECONDS
        while self.connection.exists(index) and time.monotonic() < until:
            time.sleep(0.002)
        self._deaths.append(Death(name, at, lost, time.time() - at))
        return self._deaths[-1]

    # Work -------------------------------------------------------------------------------------

    def run(
        self,
        jobs: Sequence[KindOfJob],
        disturb: Callable[[float], bool] = lambda seconds: False,
        *,
        seconds: float = 3600,
    ) -> Outcome:
        """Enqueue jobs and wait until all have ended.

        Args:
            disturb: called all the time with the seconds since the first token.
            seconds: how long that may take.
        """
        readers = Readers(self.url, jobs)
        began = time.time()
        enqueue_jobs(self.connection, jobs, QUEUE)
        first_token: float | None = None
        ended = began
        try:
            waiting = [job.job_id for job in jobs]
            while waiting:
                assert time.time() - began < seconds, f"{len(waiting)} jobs have not ended"
                with contextlib.suppress(RedisError):  # an outage may be the fault that is tried
                    self.look()
                    waiting = [i for i in waiting if not read_job(self.connection, i).has_ended]
                    ended = time.time()
                    if first_token is None and self.connection.keys("qsvc:progress:*"):
                        first_token = ended
                if first_token is not None and waiting:
                    disturb(time.time() - first_token)
                time.sleep(_POLL_SECONDS)
            answers = answers_of(self.connection, jobs)
            wrong_streams = readers.wrong(answers)
        finally:
            readers.stop()
        failed: Any = self.connection.zcard(keys.rq_failed(QUEUE))
        return Outcome(
            answers=answers,
            seconds=ended - began,
            noted=read_notes(self.folder),
            executions=self._executions,
            deaths=self._deaths,
            num_dead_letters=failed,
            num_streams=sum(job.streams for job in jobs),
            wrong_streams=wrong_streams,
            num_restarted_streams=readers.num_restarts,
        )

    def log(self, name: str) -> str:
        """Return what a worker's children have logged."""
        return (self.folder / f"{name}.log").read_text()

    def _await(self, probe: Callable[[], bool], what: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not probe():
            assert time.monotonic() < until, f"not within {seconds:g} s: {what}"
            time.sleep(_POLL_SECONDS)


class KillEvery:
    """Kills the busier worker at intervals, so many times; waits while none has a token yet."""

    def __init__(self, rig: KillRig, *, seconds: float, times: int) -> None:
        self._rig = rig
        self._seconds = seconds
        self._times = times
        self._next = seconds
        self.num_kills = 0

    def __call__(self, seconds: float) -> bool:
        """Kill when it is time; tell whether it was."""
        if self.num_kills == self._times or seconds < self._next:
            return False
        if self._rig.kill_busier() is None:
            self._next = seconds + _LOOK_AGAIN_SECONDS
            return False
        self.num_kills += 1
        self._next = seconds + self._seconds
        return True
