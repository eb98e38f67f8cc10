"""`qsvc bench`: the same jobs through a worker and the embedded server, once for each row count.

Each run is a `LocalRun`, as `qsvc run` makes one, in a folder of its own with checkpoints of its
own. So no run finds what another one computed, and nothing of the person's is touched.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from queue_service.doctor import gigabytes
from queue_service.errors import QsvcError
from queue_service.follow import Standing
from queue_service.local_server import LocalServer
from queue_service.settings import (
    CheckpointSettings,
    RetentionSettings,
    SubmitSettings,
    WorkerSettings,
)
from workers.bench_figures import RunFigures
from workers.bench_jobs import BenchJobs
from workers.bench_look import LOOK, Look, read_answer
from workers.ended_job import JOB_EVENT, EndedJob
from workers.local_run import LocalRun, RunOptions
from workers.supervisor import CHILD, DIED_EVENT, device_slot_lock

# A worker that dies more often than this in one run will not come to its end.
_MOST_RESTARTS = 2


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row count that was not run, and why."""

    rows: int
    reason: str


@dataclass(slots=True)
class BenchReport:
    """What a benchmark came to.

    Attributes:
        runs: of the row counts that were run to their end, ascending.
        was_stopped: a person ended it before the last of them.
        failure: what ended it before; None when nothing did.
    """

    look: Look
    source: str
    num_jobs: int
    runs: list[RunFigures] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    was_stopped: bool = False
    failure: str | None = None


class Bench:
    """One benchmark.

    Args:
        rows: the row counts.
        slot: the device slot, held from the first to the last run.
        cache_folder: holds the lock of the slot, and the folder of the runs until the end.
        on_begin: told a row count that is about to run.
        on_update: told how a run stands, several times a second.
        on_note: told what a person should know.
        look_program: looks at machine and model, see `workers.bench_look`.
        child: the worker child's program.
    """

    def __init__(
        self,
        jobs: BenchJobs,
        rows: Sequence[int],
        *,
        worker: WorkerSettings,
        slot: str,
        cache_folder: Path,
        on_begin: Callable[[int], None],
        on_update: Callable[[Standing], None],
        on_note: Callable[[str], None],
        look_program: Sequence[str] = LOOK,
        child: tuple[str, ...] = CHILD,
    ) -> None:
        self._jobs = jobs
        self._rows = sorted(set(rows))
        self._worker = worker
        self._slot = slot
        self._cache_folder = cache_folder
        self._folder = cache_folder / f"bench-{slot.replace(':', '-')}"
        self._on_begin = on_begin
        self._on_update = on_update
        self._on_note = on_note
        self._look_program = look_program
        self._child = child
        self._is_stopping = False
        self._looking: subprocess.Popen[str] | None = None
        self._run: LocalRun | None = None

    def stop(self) -> None:
        """End the run that is going on, without waiting for its jobs. Safe in a signal handler."""
        self._is_stopping = True
        if self._looking is not None:
            self._looking.terminate()
        if self._run is not None:
            _end_at_once(self._run)

    def run(self) -> BenchReport | None:
        """Run every row count; return None when stopped before anything was known.

        Raises:
            ConfigurationError: a worker has the slot, the model does not fit, or no server program
                is installed.
            ModelUnavailable: there is no such model, or it cannot be loaded.
            QsvcError: another fault ended the first run.
        """
        with device_slot_lock(self._cache_folder, self._slot), self._own_folder():
            seen = self._look()
            if seen is None:
                return None
            report = BenchReport(seen, self._jobs.source, len(self._jobs))
            ended: list[EndedJob] = []
            for rows in self._rows:
                if self._is_stopping:
                    break
                if (reason := self._unfit(rows, seen, ended)) is not None:
                    report.skipped.append(Skipped(rows, reason))
                    continue
                try:
                    watched = self._run_with(rows)
                except QsvcError as error:
                    if not report.runs:
                        raise
                    report.failure = f"the run with {rows} rows: {error}"
                    break
                if watched is None:
                    break
                ended = watched.ended
                report.runs.append(RunFigures.of(rows, ended, restarts=watched.restarts))
            report.was_stopped = self._is_stopping
            return report

    def _unfit(self, rows: int, seen: Look, ended: Sequence[EndedJob]) -> str | None:
        """Return why a row count cannot be measured here; None when it can, as far as is known.

        Args:
            ended: jobs of an earlier run, by whose lengths this is decided; before the first run
                only what every row takes at least is known.
        """
        if rows > len(self._jobs):
            return f"{len(self._jobs)} jobs fill no more than {len(self._jobs)} rows"
        model = seen.model
        least = [job.prompt_tokens - job.cached_tokens + job.completion_tokens for job in ended]
        longest = sorted(least, reverse=True)[:rows] or [1] * rows
        needed = sum(map(model.bytes_of_row, longest))
        if needed <= model.kv_bytes:
            return None
        return (
            f"the keys and values of {rows} rows take {gigabytes(needed)} or more, and "
            f"{gigabytes(model.kv_bytes)} are there for them"
        )

    def _run_with(self, rows: int) -> _Watch | None:
        """Run all jobs with so many rows; return None when stopped before their end."""
        self._on_begin(rows)
        folder = self._folder / f"rows-{rows}"
        folder.mkdir()
        file = folder / "jobs.jsonl"
        self._jobs.write(file)
        watch = _Watch(lambda: None if self._run is None else _end_at_once(self._run))
        options = RunOptions(
            file=str(file),
            output=folder / "results.jsonl",
            errors=None,
            model=self._worker.model or "",
            unordered=False,
            strict=False,
            is_fresh=False,
            slot=self._slot,
        )
        checkpoints = CheckpointSettings.load()
        run = LocalRun(
            options,
            worker=self._worker.model_copy(update={"slots": rows}),
            submit=SubmitSettings.load(plan=None if checkpoints.enabled else False),
            retention=RetentionSettings.load(),
            cache_folder=folder,
            on_update=self._on_update,
            on_note=self._on_note,
            keeps_log=False,
            checkpoints=checkpoints.model_copy(update={"folder": folder / "checkpoints"}),
            on_event=watch.see,
            child=self._child,
        )
        self._run = run
        if self._is_stopping:
            _end_at_once(run)
        try:
            summary = run.run()
        except QsvcError:
            if words := _last_words(folder):
                self._on_note(f"the worker's log ended with:{words}")
            raise
        finally:
            self._run = None
            if not watch.gave_up:
                shutil.rmtree(folder, ignore_errors=True)
        if watch.gave_up:
            raise QsvcError(f"the worker died {watch.restarts} times{_last_words(folder)}")
        return None if summary.was_stopped else watch

    def _look(self) -> Look | None:
        # Not in the terminal's group: Ctrl-C is for us to pass on.
        with subprocess.Popen(
            self._look_program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            self._looking = process
            if self._is_stopping:
                process.terminate()
            text, _ = process.communicate(json.dumps(self._worker.model_dump(mode="json")))
            self._looking = None
        return None if self._is_stopping else read_answer(text, code=process.returncode)

    @contextlib.contextmanager
    def _own_folder(self) -> Iterator[None]:
        """Have an empty folder, which goes at the end; so does what a killed benchmark left."""
        _clear(self._folder)
        self._folder.mkdir(mode=0o700, parents=True)
        try:
            yield
        finally:
            _clear(self._folder)


class _Watch:
    """Gathers what a run's worker tells.

    Args:
        give_up: ends the run, whose worker dies again and again.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self.ended: list[EndedJob] = []
        self.restarts = 0
        self.gave_up = False

    def see(self, event: Mapping[str, Any]) -> None:
        """Note an event; called on the supervisor's threads."""
        if event["event"] == JOB_EVENT:
            self.ended.append(EndedJob.from_event(event))
        elif event["event"] == DIED_EVENT:
            self.restarts += 1
            if self.restarts > _MOST_RESTARTS and not self.gave_up:
                self.gave_up = True
                self._give_up()


def _end_at_once(run: LocalRun) -> None:
    run.stop()
    run.stop()


def _last_words(folder: Path) -> str:
    """Return the last lines of a run's log, for a message."""
    lines: list[str] = []
    for log in folder.glob("runs/*/worker.log"):
        lines = log.read_text(errors="replace").splitlines()[-5:]
    return "".join(f"\n  {line}" for line in lines)


def _clear(folder: Path) -> None:
    for server in folder.glob("rows-*/runs/*/server"):
        LocalServer(server).stop()
    shutil.rmtree(folder, ignore_errors=True)
