"""`qsvc run`: an embedded server, a worker child and the results file, for one batch file.

All state is in a folder of its own under the cache folder. Killed anywhere, the next run of the
same command finds the server (or its append-only file) and the output, and goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis, RedisError

from queue_service import keys
from queue_service.batch_file import BatchFile, open_batch
from queue_service.batches import Batch, Batches, LineRef
from queue_service.broker import Broker
from queue_service.collector import collected
from queue_service.connection import connect
from queue_service.errors import BatchNotFound, ConfigurationError, ServerUnavailable
from queue_service.follow import Standing, follow
from queue_service.local_server import LocalServer, state_lock
from queue_service.output import BatchOutput, CompletionOrder, InputOrder, OutputFile
from queue_service.prefix_plan import PrefixPlan
from queue_service.results import BatchReader
from queue_service.settings import (
    CheckpointSettings,
    RedisSettings,
    RetentionSettings,
    SubmitSettings,
    WorkerSettings,
)
from queue_service.submission import Feeder, SubmitOptions, batch_id_of, feeding
from queue_service.trace import read_batch_traces, write_chrome_trace
from workers.child_settings import ChildSettings
from workers.logs import FORMAT, TIME_FORMAT
from workers.supervisor import CHILD, Supervisor, device_slot_lock

# A run's server has its own batch and perhaps some that a killed run left.
_MOST_OTHER_BATCHES = 100


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a person asked `qsvc run` for.

    Attributes:
        trace: where the time of each line went is written there, for Perfetto.
    """

    file: str
    output: Path
    errors: Path | None
    model: str
    unordered: bool
    strict: bool
    is_fresh: bool
    slot: str
    trace: Path | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended.

    Attributes:
        seconds: from the moment the model was loaded to the last result.
        num_done: lines that ended in this run.
        completion_tokens: tokens generated in this run.
        peak_bytes: the most memory that the model and its rows took; 0 when nothing ran.
        num_failures: lines that failed and were written in this run.
        first_failures: why the first of them did.
    """

    options: RunOptions
    batch: Batch
    num_written: int
    was_stopped: bool
    num_done: int
    seconds: float
    completion_tokens: int
    peak_bytes: int
    num_failures: int
    first_failures: Sequence[str]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time of this run."""
        return self.completion_tokens / self.seconds if self.seconds > 0 else 0.0

    def to_object(self) -> dict[str, Any]:
        """Return the summary for ``--json``."""
        return {
            "batch": self.batch.to_object(),
            "output": str(self.options.output),
            "lines_written": self.num_written,
            "stopped": self.was_stopped,
            "run": {
                "jobs": self.num_done,
                "seconds": round(self.seconds, 3),
                "completion_tokens": self.completion_tokens,
                "tokens_per_second": round(self.tokens_per_second, 2),
                "peak_bytes": self.peak_bytes,
            },
        }

    def lines(self) -> list[str]:
        """Return the summary for a person."""
        b = self.batch
        if self.was_stopped:
            command = "same command without --new" if self.options.is_fresh else "same command"
            return [
                f"stopped with {self.num_written} of {b.total} results in {self.options.output}; "
                f"nothing is lost: run the {command} to go on",
            ]
        lines = [
            f"{b.total} jobs: {b.completed} completed, {b.failed} failed"
            + (f", {b.cancelled} cancelled" if b.cancelled else ""),
            f"tokens: {b.prompt_tokens} in ({b.cached_tokens} cached), {b.completion_tokens} out",
        ]
        if self.num_done:
            lines.append(
                f"this run: {self.num_done} jobs in {self.seconds:.1f} s, "
                f"{self.tokens_per_second:.1f} tokens/s"
                + (f", {self.peak_bytes / 1e6:,.0f} MB at most" if self.peak_bytes else "")
            )
        else:
            lines.append("nothing was left to do; --new runs the file again")
        lines += [f"  {failure}" for failure in self.first_failures]
        if more := self.num_failures - len(self.first_failures):
            lines.append(f"  and {more} more")
        lines.append(f"results: {self.options.output}")
        if self.options.errors is not None:
            lines.append(f"failed lines: {self.options.errors}")
        return lines


class LocalRun:
    """One run of `qsvc run`.

    Args:
        on_update: told how the batch stands, several times a second.
        on_note: told what a person should know, once each.
        checkpoints: of the worker; None takes the settings of this machine.
        on_event: told what the worker child reports, with the times of each job that has ended, on
            a thread of its own; None where nobody wants them.
        child: the worker child's program.
        keeps_log: the worker's log outlasts the run, so that people are told where it is.
    """

    def __init__(
        self,
        options: RunOptions,
        *,
        worker: WorkerSettings,
        submit: SubmitSettings,
        retention: RetentionSettings,
        cache_folder: Path,
        on_update: Callable[[Standing], None],
        on_note: Callable[[str], None],
        checkpoints: CheckpointSettings | None = None,
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
        child: tuple[str, ...] = CHILD,
        keeps_log: bool = True,
    ) -> None:
        self._options = options
        self._worker = worker.model_copy(update={"model": options.model})
        self._submit = submit
        self._retention = retention
        self._cache_folder = cache_folder
        self._on_update = on_update
        self._on_note = on_note
        self._checkpoints = checkpoints
        self._on_event = on_event
        self._child = child
        self._keeps_log = keeps_log
        self._stop_level = 0
        self._supervisor: Supervisor | None = None
        self._failure: Exception | None = None
        self._ready_at: float | None = None
        self._peak_bytes = 0
        self._fresh: list[tuple[OutputFile, Path]] = []
        self._alias = worker.alias or keys.alias_for(options.model)
        self._folder = cache_folder / "runs" / _run_digest(options)

    def stop(self) -> None:
        """Stop in good order; asked again, hurry. Safe in a signal handler."""
        self._stop_level += 1
        if self._supervisor is not None:
            self._supervisor.stop()

    def run(self) -> Summary:
        """Run the file to its end, or until stopped.

        Raises:
            ConfigurationError: another run of the same file and output is going on, the output
                holds something else or is the file itself, or no server program is installed.
            BatchFileError: the file is refused as a whole.
            ModelUnavailable: the model cannot be loaded.
            ServerUnavailable: the embedded server died.
        """
        _refuse_same_files(self._options)
        self._folder.mkdir(parents=True, exist_ok=True)
        _prune(self._folder, older_than_seconds=self._retention.result_seconds)
        with contextlib.ExitStack() as stack:
            stack.enter_context(state_lock(self._folder))
            file = stack.enter_context(open_batch(self._options.file))
            server = LocalServer(self._folder / "server")
            redis = RedisSettings.load(url=server.start())
            stack.callback(server.stop)
            connection = stack.enter_context(contextlib.closing(connect(redis)))
            try:
                summary = self._run(connection, redis, file, stack)
                if self._options.trace is not None:
                    self._write_traces(connection, summary.batch.id, self._options.trace)
                return summary
            except RedisError as error:
                raise ServerUnavailable(
                    f"the embedded server went away ({error}); its log is {server.log_path}; "
                    "nothing is lost: run the same command to go on"
                ) from error

    def _run(
        self,
        connection: Redis,
        redis: RedisSettings,
        file: BatchFile,
        stack: contextlib.ExitStack,
    ) -> Summary:
        queue = keys.queue_name(self._alias)
        key = self._key()
        batch_id = batch_id_of(file, queue=queue, key=key)
        output, before = self._open_output(connection, batch_id, stack)
        if before is not None and before.status.is_final and output.num_written >= before.total:
            return self._summary(before, output, before, 0.0)
        self._give_up_others(connection, batch_id)
        # This run owns the server: whoever held a lease is gone.
        Broker(
            connection,
            worker="run",
            queues=keys.queue_names(self._alias),
            lease_seconds=self._worker.lease_seconds,
        ).reap(everything=True)
        is_traced = self._options.trace is not None
        spans = stack.enter_context(collected("qsvc-run", is_wanted=is_traced))
        options = SubmitOptions(
            queue=queue,
            model=self._options.model,
            key=key,
            trace=is_traced,
            strict=self._options.strict,
            submit=self._submit,
            retention=self._retention,
        )
        feeder = Feeder(connection, file, options, spans)
        first = Batches(connection).get(batch_id)
        with self._running_worker(redis), self._feeding(redis, feeder):
            follow(
                connection,
                batch_id,
                output,
                on_update=self._update,
                should_stop=self._must_stop,
            )
            if self._stop_level == 1 and self._failure is None:
                self._on_note(
                    f"stopping: running requests get {self._worker.grace_seconds:.0f} s to finish; "
                    "Ctrl-C again stops at once"
                )
            seconds = time.monotonic() - self._ready_at if self._ready_at else 0.0
        while output.advance():  # what ended while the worker stopped
            pass
        if self._failure is not None:
            raise self._failure
        self._replace_outputs()
        return self._summary(Batches(connection).get(batch_id), output, first, seconds)

    def _write_traces(self, connection: Redis, batch_id: str, path: Path) -> None:
        traces = list(read_batch_traces(connection, batch_id))
        if not traces:
            self._on_note(f"no line ran with --trace in the last day: {path} was not written")
            return
        write_chrome_trace(path, traces)
        self._on_note(f"{len(traces)} traces written to {path}: open it in ui.perfetto.dev")

    def _key(self) -> str:
        """Return what tells this run's batch from an earlier one of the same file."""
        path = self._folder / "key.json"
        if self._options.is_fresh:
            _write_durably(path, json.dumps({"key": secrets.token_hex(8)}))
        try:
            return str(json.loads(path.read_text())["key"])
        except FileNotFoundError:
            return ""

    def _output_paths(self) -> list[Path]:
        return [path for path in (self._options.output, self._options.errors) if path is not None]

    def _path_until_ready(self, path: Path) -> Path:
        """Return where results go first: those of an earlier run are not replaced by none."""
        if not self._options.is_fresh:
            return path
        fresh = path.with_name(f".{path.name}.qsvc-new")
        fresh.unlink(missing_ok=True)  # of a run that was killed
        return fresh

    def _replace_outputs(self) -> None:
        """Put the results of a fresh run in the place of earlier ones, once."""
        while self._fresh:
            file, path = self._fresh.pop()
            file.move_to(path)

    def _drop_fresh(self) -> None:
        for file, _ in self._fresh:
            file.path.unlink(missing_ok=True)

    def _give_up_others(self, connection: Redis, batch_id: str) -> None:
        """Delete what is left of runs that this one replaces, or it would be run as well."""
        batches = Batches(connection)
        for other in batches.newest(_MOST_OTHER_BATCHES):
            if other.id != batch_id and not other.status.is_final:
                self._on_note(
                    f"an earlier run of {other.total} lines is given up, {other.ended} had ended: "
                    "the file has changed, or --new was said"
                )
                batches.delete(other.id)

    def _open_output(
        self, connection: Redis, batch_id: str, stack: contextlib.ExitStack
    ) -> tuple[BatchOutput, Batch | None]:
        try:
            before = Batches(connection).get(batch_id)
        except BatchNotFound:
            before = None
        order = CompletionOrder if self._options.unordered else InputOrder
        files = [
            stack.enter_context(contextlib.closing(OutputFile(self._path_until_ready(path))))
            for path in self._output_paths()
        ]
        if self._options.is_fresh:
            self._fresh = list(zip(files, self._output_paths(), strict=True))
            stack.callback(self._drop_fresh)

        def forget(refs: Sequence[LineRef]) -> None:
            # What is on disk need not fill the server, once the file is too large for both. But
            # traces are read at the end, and go with their jobs.
            batches = Batches(connection)
            if (
                self._options.trace is None
                and batches.get(batch_id).total > self._submit.window_lines
            ):
                batches.forget(batch_id, refs)

        output = BatchOutput(
            BatchReader(connection, batch_id),
            order(connection, batch_id),
            *files,
            on_written=forget,
        )
        try:
            if output.resume() < (before.forgotten if before else 0):
                raise ConfigurationError(
                    f"{self._options.output} has lost lines that this run had written and the "
                    "server has dropped since"
                )
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error}; or, if {self._options.file}, --model, --errors or --unordered has "
                "changed, say --new to replace the results and run it from the start"
            ) from error
        return output, before

    @contextlib.contextmanager
    def _running_worker(self, redis: RedisSettings) -> Iterator[None]:
        log_path = self._folder / "worker.log"
        settings = ChildSettings(
            redis=redis,
            worker=self._worker,
            retention=self._retention,
            alias=self._alias,
            # Process ids come again, in a container the same one each time, and the name of a
            # worker that was killed is refused for a while.
            name=f"run-{os.getpid()}-{secrets.token_hex(3)}",
            burst=False,
            checkpoints=self._checkpoints or CheckpointSettings.load(),
            tells_jobs=self._on_event is not None,
        )

        def on_event(event: Mapping[str, Any]) -> None:
            if event["event"] == "ready" and self._ready_at is None:
                self._ready_at = time.monotonic()
            self._peak_bytes = max(self._peak_bytes, event.get("peak_bytes", 0))
            if self._on_event is not None:
                self._on_event(event)

        supervisor = Supervisor(settings, command=self._child, log_path=log_path, on_event=on_event)
        self._supervisor = supervisor
        if self._stop_level:  # asked to stop before there was a supervisor to tell
            supervisor.stop()

        def supervise() -> None:
            try:
                supervisor.run()
            except Exception as error:  # the top of the thread: the run ends with it
                self._failure = error

        with device_slot_lock(self._cache_folder, self._options.slot), _logged_to(log_path):
            if self._keeps_log:
                self._on_note(f"worker log: {log_path}")
            thread = threading.Thread(target=supervise, name="supervisor")
            thread.start()
            try:
                yield
            except RedisError:
                supervisor.stop()  # once more than below: what runs could not be saved
                raise
            finally:
                if not self._stop_level:
                    supervisor.stop()
                thread.join()

    def _feeding(
        self, redis: RedisSettings, feeder: Feeder
    ) -> contextlib.AbstractContextManager[None]:
        def fail(error: Exception) -> None:
            self._failure = error

        return feeding(
            feeder, redis, on_plan=self._note_plan, on_failure=fail, should_stop=self._must_stop
        )

    def _update(self, now: Standing) -> None:
        if self._ready_at is not None:  # the model can be used
            self._replace_outputs()
        self._on_update(now)

    def _note_plan(self, plan: PrefixPlan) -> None:
        if plan.num_groups:
            self._on_note(plan.summary())

    def _must_stop(self) -> bool:
        return self._stop_level > 0 or self._failure is not None

    def _summary(self, batch: Batch, output: BatchOutput, before: Batch, seconds: float) -> Summary:
        return Summary(
            options=self._options,
            batch=batch,
            num_written=output.num_written,
            was_stopped=not batch.status.is_final or output.num_written < batch.total,
            num_done=batch.ended - before.ended,
            seconds=seconds,
            completion_tokens=batch.completion_tokens - before.completion_tokens,
            peak_bytes=self._peak_bytes,
            num_failures=output.num_failures,
            first_failures=output.first_failures,
        )


def _run_digest(options: RunOptions) -> str:
    """Return the name of the run's folder: the same file, output and model, the same folder."""
    file = options.file if options.file == "-" else str(Path(options.file).absolute())
    parts = (file, str(options.output.absolute()), options.model)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()


def _refuse_same_files(options: RunOptions) -> None:
    """Raise ConfigurationError where one file would be written over another."""
    file = Path(options.file)
    named = {"-o": options.output, "--errors": options.errors, "--trace": options.trace}
    paths = {flag: path for flag, path in named.items() if path is not None}
    for flag, path in paths.items():
        if _is_same_file(path, file):
            raise ConfigurationError(
                f"{path} is the file with the requests; name another for {flag}"
            )
    for (flag, path), (other, second) in itertools.combinations(paths.items(), 2):
        if _is_same_file(path, second):
            raise ConfigurationError(f"{path} is named for both {flag} and {other}; name two files")


def _is_same_file(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.absolute() == other.absolute()


@contextlib.contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """Put what the supervisor logs beside its child's lines, not across the progress bar."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(FORMAT, TIME_FORMAT))
    supervisor_logger = logging.getLogger("workers.supervisor")
    supervisor_logger.addHandler(handler)
    try:
        yield
    finally:
        supervisor_logger.removeHandler(handler)
        handler.close()


def _prune(own: Path, *, older_than_seconds: int) -> None:
    """Delete the state of runs that nobody came back to for as long as results are kept."""
    oldest = time.time() - older_than_seconds
    for folder in own.parent.iterdir():
        lock = folder / "run.lock"
        if folder == own or not lock.exists() or lock.stat().st_mtime > oldest:
            continue
        with contextlib.suppress(ConfigurationError), state_lock(folder):
            LocalServer(folder / "server").stop()
            shutil.rmtree(folder, ignore_errors=True)


def _write_durably(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
