"""What every chaos test is made of: a private server, workers, work, and checks that always hold.

A test submits work, does harm, and calls ``Rig.settle``. Lines about what happened go to the file
that QSVC_CHAOS_REPORT names, one JSON object for each settled test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from redis import Redis, RedisError

from queue_service import keys
from queue_service.batch_file import open_batch
from queue_service.batches import Batches
from queue_service.connection import connect
from queue_service.local_server import LocalServer
from queue_service.results import JobResult, read_job
from queue_service.settings import RedisSettings
from queue_service.streams import text_of
from queue_service.submission import SubmitOptions, submit_file, wait_for_disk
from tests.chaos.mortal import Point
from tests.cli_helpers import chat_line, write_lines
from tests.harness import SupervisedWorker, enqueue_chat, eventually, worker_settings
from workers.child_settings import ChildSettings

LEASE_SECONDS = 2
BEAT_SECONDS = 0.5
REAP_SECONDS = 0.5
STEP_SECONDS = 0.01
TOKENS = 60

QUEUE = keys.queue_name("fake")

_ROOT = Path(__file__).parents[2]
_WATCH_SECONDS = 0.05
# An expired lease counts a second longer than it says: RQ keeps whole seconds.
TAKEOVER_SECONDS = LEASE_SECONDS + REAP_SECONDS + 1


@dataclass(frozen=True, slots=True)
class Work:
    """A batch and some plain jobs beside it.

    Attributes:
        texts: the right answer of each job, by job id; lines of the batch come first.
        num_lines: how many of them are lines of the batch.
        has_streams: the lines' text goes to their streams.
    """

    batch_id: str
    texts: Mapping[str, str]
    num_lines: int
    has_streams: bool

    @property
    def job_ids(self) -> list[str]:
        """Every job, in the order of submission."""
        return list(self.texts)


class ProcessWorker:
    """A supervisor that is a process, and its child: both can be killed together."""

    def __init__(self, settings: ChildSettings, command: Sequence[str], log_path: Path) -> None:
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.supervise", *command],
                stdin=subprocess.PIPE,
                stderr=log,
                cwd=_ROOT,
                text=True,
            )
        assert self._process.stdin is not None
        with self._process.stdin as settings_line:
            settings_line.write(settings.to_json() + "\n")

    def kill(self, child_pid: int) -> None:
        """Kill -9 both at once; neither sees the other die."""
        os.kill(child_pid, signal.SIGSTOP)
        self._process.kill()
        os.kill(child_pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End both, if they live; the child gives its jobs back when its supervisor is gone."""
        self._process.kill()
        self._process.wait()


class Rig:
    """A server of the test's own, workers on it, and the work they are given.

    Args:
        server: not started yet.
        folder: takes batch files, logs and markers.
        report: takes a line for each settled test.
    """

    def __init__(self, server: LocalServer, folder: Path, report: Report) -> None:
        self.server = server
        self.folder = folder
        self.url = server.start()
        self.connection: Redis = connect(RedisSettings.load(url=self.url))
        self._report = report
        self._works: list[Work] = []
        self._watchers: list[_Watcher] = []
        self._cleanup = contextlib.ExitStack()

    def close(self) -> None:
        """End every worker and watcher."""
        with contextlib.closing(self.connection):
            for watcher in self._watchers:
                watcher.stop()
            self.close_workers()

    def close_workers(self) -> None:
        """End every worker."""
        self._cleanup.close()

    @property
    def socket_path(self) -> Path:
        """The server's Unix socket."""
        return Path(self.url.removeprefix("unix://"))

    # Workers ----------------------------------------------------------------------------------

    def start_worker(
        self, name: str, *, url: str | None = None, command: Sequence[str] = (), **worker: Any
    ) -> SupervisedWorker:
        """Start a worker whose supervisor is a thread of this process.

        Args:
            command: the child, by default one that never dies by itself.
            worker: settings, where they differ from the rig's.
        """
        settings = self._settings(name, url=url, **worker)
        supervised = SupervisedWorker(settings, command=command or self.child())
        supervised.start()
        self._cleanup.callback(_end, supervised)
        return supervised

    def start_process(
        self, name: str, *, command: Sequence[str] = (), **worker: Any
    ) -> ProcessWorker:
        """Start a worker whose supervisor is a process."""
        settings = self._settings(name, url=None, **worker)
        process = ProcessWorker(settings, command or self.child(), self.folder / f"{name}.log")
        self._cleanup.callback(process.stop)
        return process

    def child(
        self,
        *,
        step_seconds: float = STEP_SECONDS,
        die_at: Point | None = None,
        nth: int = 1,
        is_mute: bool = False,
        clock_wrong_by_seconds: int = 0,
    ) -> tuple[str, ...]:
        """Return the command of a worker child."""
        script = (
            "import sys\n"
            "from tests.chaos.clock import set_wrong\n"
            f"if {clock_wrong_by_seconds}: set_wrong({clock_wrong_by_seconds})\n"
            "from tests.chaos.mortal import main\n"
            "sys.exit(main(sys.argv[1:]))"
        )
        harm = [f"--die-at={die_at}", f"--nth={nth}"] if die_at else []
        harm += ["--mute"] if is_mute else []
        return (
            sys.executable,
            "-c",
            script,
            f"--step-seconds={step_seconds}",
            f"--marker={self.marker}",
            *harm,
        )

    @property
    def marker(self) -> Path:
        """Made by a child that dies at its point."""
        return self.folder / "died"

    def wait_for_death(self) -> float:
        """Wait until a child died at its point; return when, in seconds since the epoch."""
        eventually(self.marker.exists, "a child dies at its point")
        return self.marker.stat().st_mtime

    def child_pid(self, name: str) -> int:
        """Return the process id of a worker's child, which has registered."""
        key = keys.rq_worker(name)
        pid: Any = eventually(lambda: self.connection.hget(key, "pid"), f"{name} is registered")
        return int(pid)

    def held_by(self, name: str) -> set[str]:
        """Return the jobs that a worker holds."""
        members: Any = self.connection.smembers(f"{keys.rq_worker(name)}:executions")
        return {member.decode().rsplit(":", 1)[0] for member in members}

    def wait_for_holding(self, name: str, count: int) -> set[str]:
        """Wait until a worker holds at least so many jobs; return them."""
        eventually(lambda: len(self.held_by(name)) >= count, f"{name} holds {count} jobs")
        return self.held_by(name)

    def field(self, job_id: str, name: str) -> str:
        """Return a field of a job's hash, empty when it is not there."""
        value: Any = self.connection.hget(keys.rq_job(job_id), name)
        return (value or b"").decode()

    def answered_by(self, work: Work) -> set[str]:
        """Return the workers whose results were accepted."""
        names = set()
        for job_id in work.texts:
            entries: Any = self.connection.xrange(keys.rq_results(job_id))
            names |= {fields[b"worker_name"].decode() for _, fields in entries}
        return names

    def attempts(self, work: Work) -> list[int]:
        """Return how often each job was claimed."""
        return [int(self.field(job_id, "qsvc_attempt") or 0) for job_id in work.texts]

    def _settings(self, name: str, *, url: str | None, **worker: Any) -> ChildSettings:
        ours = {
            "lease_seconds": LEASE_SECONDS,
            "beat_seconds": BEAT_SECONDS,
            "reap_seconds": REAP_SECONDS,
            "grace_seconds": 1,
            "progress_interval_seconds": 0.1,
            # Whoever kills a worker here is not the job.
            "crash_retries": 50,
        }
        timeouts = {"connect_timeout_seconds": 1.0, "socket_timeout_seconds": 2.0}
        return worker_settings(url or self.url, name=name, redis=timeouts, **{**ours, **worker})

    # Work -------------------------------------------------------------------------------------

    def submit(
        self,
        num_lines: int,
        *,
        num_plain: int = 4,
        num_tokens: int = TOKENS,
        stream: bool = False,
        expires_in_seconds: int | None = None,
        connection: Redis | None = None,
    ) -> Work:
        """Submit a batch and plain jobs; every answer has so many tokens."""
        connection = connection or self.connection
        number = len(self._works)
        texts = [f"line {i} of {number} ".ljust(num_tokens, "x") for i in range(num_lines)]
        path = write_lines(
            self.folder / f"{number}.jsonl",
            [chat_line(f"c{i}", text) for i, text in enumerate(texts)],
        )
        with open_batch(str(path)) as file:
            options = SubmitOptions(
                queue=QUEUE, model="fake", stream=stream, expires_in_seconds=expires_in_seconds
            )
            batch_id = submit_file(connection, file, options).batch.id
        by_job = {keys.job_id(batch_id, i + 1): text for i, text in enumerate(texts)}
        for i in range(num_plain):
            text = f"plain {i} of {number} ".ljust(num_tokens, "y")
            by_job[enqueue_chat(connection, text).id] = text
        wait_for_disk(connection)
        work = Work(batch_id, by_job, num_lines, stream)
        self._works.append(work)
        self._watchers.append(_Watcher(self.url, work))
        return work

    def forget(self, work: Work) -> None:
        """Expect nothing of this work any more: the server has lost it."""
        index = self._works.index(work)
        self._watchers.pop(index).stop()
        self._works.pop(index)

    # Checks -----------------------------------------------------------------------------------

    def settle(self, fault: str, *, killed_at: float | None = None, seconds: float = 40) -> None:
        """Wait for the work's end, report what became of it, and check what always holds.

        Every accepted job has one visible result, the right one, that never changed; every batch
        is final and its counts add up; nothing of an execution is left.

        Args:
            fault: for the report.
            killed_at: seconds since the epoch; then the report says when the last job that had
                been lost was running again.
        """
        deadline = time.monotonic() + seconds
        while self.num_open() and time.monotonic() < deadline:
            time.sleep(0.05)
        problems = self._problems()
        self._report.add(
            fault,
            jobs=len(self._all_texts()),
            problems=problems,
            takeover_seconds=None if killed_at is None else self._last_restart() - killed_at,
        )
        problems.check()
        for work in self._works:
            self._check_batch(work)
        eventually(lambda: not self._leftovers(), f"nothing left: {self._leftovers()}", seconds=6)

    def num_open(self) -> int:
        """Return how many jobs have not ended."""
        return sum(not self._result(job_id).has_ended for job_id in self._all_texts())

    def _all_texts(self) -> dict[str, str]:
        return {job_id: text for work in self._works for job_id, text in work.texts.items()}

    def _result(self, job_id: str) -> JobResult:
        return read_job(self.connection, job_id)

    def _last_restart(self) -> float:
        """Return when the last job that was claimed more than once was claimed last."""
        restarts = [
            datetime.strptime(self.field(job_id, "started_at"), "%Y-%m-%dT%H:%M:%S.%fZ")
            for job_id in self._all_texts()
            if int(self.field(job_id, "qsvc_attempt")) > 1
        ]
        assert restarts, "no job was claimed twice"
        return max(restarts).replace(tzinfo=UTC).timestamp()

    def _problems(self) -> Problems:
        lost, doubled, changed, wrong = [], [], [], []
        first_seen = {k: v for watcher in self._watchers for k, v in watcher.stop().items()}
        for job_id, text in self._all_texts().items():
            entries: Any = self.connection.xrange(keys.rq_results(job_id))
            result = self._result(job_id)
            if not entries or not result.has_ended:
                lost.append(job_id)
                continue
            if len(entries) > 1:
                doubled.append(job_id)
            if first_seen.get(job_id, entries[0]) != entries[0]:
                changed.append(job_id)
            if result.body is None or text_of(result.body) != text:
                wrong.append(job_id)
        return Problems(lost, doubled, changed, wrong)

    def _check_batch(self, work: Work) -> None:
        batch = Batches(self.connection).get(work.batch_id)
        assert batch.status.is_final
        counts = (batch.total, batch.completed, batch.failed, batch.cancelled)
        assert counts == (work.num_lines, work.num_lines, 0, 0)
        done: Any = self.connection.xrange(keys.batch_done(work.batch_id))
        assert sorted(int(fields[b"l"]) for _, fields in done) == list(range(1, batch.total + 1))
        answers = dict(list(work.texts.items())[: work.num_lines])
        assert batch.completion_tokens == sum(map(len, answers.values()))
        if work.has_streams:
            for job_id, text in answers.items():
                assert self._streamed(job_id) == text

    def _streamed(self, job_id: str) -> str:
        """Return the text that the entries of a job's stream make, without help from its result."""
        entries: Any = self.connection.xrange(keys.stream(job_id))
        *texts, (_, last) = entries
        attempt, tokens = 0, b""
        for _, fields in texts:
            if int(fields[b"a"]) > attempt:  # what follows stands in place of what was there
                attempt, tokens = int(fields[b"a"]), tokens[: int(fields[b"i"])]
            assert (int(fields[b"a"]), int(fields[b"i"])) == (attempt, len(tokens))
            tokens += fields[b"t"]
        assert last[b"e"] == b"done"
        return tokens.decode()

    def _leftovers(self) -> list[str]:
        """Return keys that say that something still runs."""
        patterns = ("rq:wip:*", "rq:execution*", "rq:worker:*:executions", "qsvc:progress:*")
        found: list[bytes] = []
        for pattern in patterns:
            matching: Any = self.connection.keys(pattern)
            found += matching
        return [key.decode() for key in found]


@dataclass(frozen=True, slots=True)
class Problems:
    """Jobs that break a promise, by id."""

    lost: Sequence[str]
    doubled: Sequence[str]
    changed: Sequence[str]
    wrong: Sequence[str]

    def check(self) -> None:
        """Fail if there is any."""
        assert not self.lost, f"without a result: {self.lost}"
        assert not self.doubled, f"with more than one result: {self.doubled}"
        assert not self.changed, f"with a result that changed: {self.changed}"
        assert not self.wrong, f"with a wrong answer: {self.wrong}"


class Report:
    """The file that says what became of each test; None writes none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(
        self, fault: str, *, jobs: int, problems: Problems, takeover_seconds: float | None = None
    ) -> None:
        """Add a line."""
        if self._path is None:
            return
        line = {
            "fault": fault,
            "jobs": jobs,
            "lost": len(problems.lost),
            "doubled": len({*problems.doubled, *problems.changed}),
            "wrong": len(problems.wrong),
            "takeover_seconds": takeover_seconds,
        }
        with self._path.open("a") as report:
            report.write(json.dumps(line) + "\n")


class _Watcher:
    """Notes the first result of each job as soon as a reader could see it."""

    def __init__(self, url: str, work: Work) -> None:
        self._connection = connect(RedisSettings.load(url=url, connect_timeout_seconds=0.5))
        self._unseen = list(work.texts)
        self._seen: dict[str, tuple[bytes, Mapping[bytes, bytes]]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher")
        self._thread.start()

    def stop(self) -> Mapping[str, tuple[bytes, Mapping[bytes, bytes]]]:
        """End the thread; return each job's first entry of results."""
        self._stopping.set()
        self._thread.join()
        self._connection.close()
        return self._seen

    def _run(self) -> None:
        while self._unseen and not self._stopping.wait(_WATCH_SECONDS):
            # An outage may be the fault that is tried.
            with contextlib.suppress(RedisError):
                self._look()

    def _look(self) -> None:
        with self._connection.pipeline(transaction=False) as pipeline:
            for job_id in self._unseen:
                pipeline.xrange(keys.rq_results(job_id), count=1)
            replies = pipeline.execute()
        for job_id, entries in zip(list(self._unseen), replies, strict=True):
            if entries:
                self._seen[job_id] = entries[0]
                self._unseen.remove(job_id)


def _end(supervised: SupervisedWorker) -> None:
    supervised.supervisor.stop()
    supervised.supervisor.stop()
    supervised.join()


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """Hold a process still for the length of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_seconds(seconds: float) -> None:
    """Let a fault last."""
    until = time.monotonic() + seconds
    eventually(lambda: time.monotonic() >= until, "time passes", seconds=seconds + 5)


def measure(probe: Callable[[], Any], what: str, *, seconds: float = 15) -> float:
    """Return after how many seconds a probe became true."""
    since = time.monotonic()
    eventually(probe, what, seconds=seconds)
    return time.monotonic() - since
