"""Keeps one worker child alive: starts it, watches its engine, hands its jobs back when it dies.

Never imports MLX: a Metal out-of-memory abort cannot be caught in the process it happens in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from queue_service.broker import bury_worker
from queue_service.connection import connect
from queue_service.errors import ConfigurationError, ModelUnavailable, QsvcError
from workers.begun import begun_file
from workers.child_settings import ChildSettings
from workers.exits import EXIT_CONFIGURATION, EXIT_OK

logger = logging.getLogger(__name__)

CHILD = (sys.executable, "-m", "workers.main")
DIED_EVENT = "died"

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
# A child that lived this long had no fault of its start: pauses begin small again.
_HEALTHY_SECONDS = 60.0
_POLL_SECONDS = 0.1


class Supervisor:
    """Runs a worker child and starts it again when it dies.

    Args:
        settings: told to the child through its standard input, since they may hold a password.
        command: the child's program.
        log_path: takes the child's log; None leaves it on standard error.
        on_event: called with every report of the child, on a thread of its own, and with ``died``
            for a child that another one is to replace.
    """

    def __init__(
        self,
        settings: ChildSettings,
        *,
        command: Sequence[str] = CHILD,
        log_path: Path | None = None,
        on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
    ) -> None:
        self._settings = settings
        self._command = list(command)
        self._log_path = log_path
        self._on_event = on_event
        self._stop_level = 0
        self._child: subprocess.Popen[str] | None = None
        self._fatal: QsvcError | None = None
        # Before that, a worker of this name that is listed may be somebody else's.
        self._is_registered = False
        self._begun: frozenset[str] | None = None
        self._stall = _StallWatch(settings.worker.engine_stall_seconds)
        self._awake = _KeepAwake()

    def stop(self) -> None:
        """End the child in good order; asked again, hurry. Safe in a signal handler."""
        self._stop_level += 1
        if self._child is not None:
            self._tell_to_stop(self._child)

    def run(self) -> None:
        """Supervise until stopped, or until the child ends in good order (burst mode).

        Raises:
            ConfigurationError: the child cannot work with these settings.
            ModelUnavailable: the model cannot be loaded.
        """
        pause = _FIRST_PAUSE_SECONDS
        while True:
            started = time.monotonic()
            code = self._run_once()
            if code == EXIT_OK:
                return
            if self._fatal is not None:
                # Nothing to bury: a worker of this name that is listed is somebody else's.
                raise self._fatal
            if code == EXIT_CONFIGURATION:
                raise ConfigurationError("the worker cannot start; see its log")
            if self._is_registered:
                self._bury()
            if self._stop_level:
                return
            if time.monotonic() - started >= _HEALTHY_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            self._on_event({"event": DIED_EVENT, "exit": code})
            logger.warning("worker died exit=%s; the next one starts in %.0f s", code, pause)
            if self._was_stopped_within(pause):
                return
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _run_once(self) -> int:
        self._stall.restart()
        self._is_registered = False
        with begun_file(self._settings.worker.most_with_engine) as begun:
            number = None if begun is None else begun.number
            code = self._watch(self._start(number))
            self._begun = None if begun is None else begun.read()
        return code

    def _start(self, begun_number: int | None) -> subprocess.Popen[str]:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self._log_path.open("ab")) if self._log_path else None
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                pass_fds=() if begun_number is None else (begun_number,),
            )
        assert child.stdin is not None
        settings = dataclasses.replace(self._settings, begun_file=begun_number)
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(settings.to_json() + "\n")
            child.stdin.flush()
        return child

    def _watch(self, child: subprocess.Popen[str]) -> int:
        assert child.stdin is not None
        self._child = child
        reader = threading.Thread(target=self._read_reports, args=(child,), daemon=True)
        reader.start()
        if self._stop_level:  # asked to stop before there was a child to tell
            self._tell_to_stop(child)
        while child.poll() is None:
            if self._stall.has_stalled():
                logger.error("the engine made no progress for too long; the worker is restarted")
                child.kill()
            time.sleep(_POLL_SECONDS)
        reader.join(timeout=2)
        self._awake.want(False)
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        self._child = None
        return child.returncode

    def _tell_to_stop(self, child: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        if self._stop_level > 1 and child.stdin is not None:
            # Two signals in a row may arrive as one; the end of its input says hurry as well.
            child.stdin.close()

    def _read_reports(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                self._read_report(line)

    def _read_report(self, line: str) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or "event" not in event:
            logger.warning("worker said: %s", line.rstrip())  # a library printed it
            return
        if event["event"] == "fatal":
            is_model = event.get("kind") == ModelUnavailable.__name__
            self._fatal = (ModelUnavailable if is_model else ConfigurationError)(event["message"])
        elif event["event"] == "progress":
            self._is_registered = True
            self._stall.see(running=event["running"], steps=event["steps"])
            self._awake.want(event["running"] > 0)
        self._on_event(event)

    def _bury(self) -> None:
        """Hand the dead child's jobs back at once instead of waiting for their leases."""
        try:
            with contextlib.closing(connect(self._settings.redis)) as connection:
                jobs = bury_worker(connection, self._settings.name, begun=self._begun)
            if jobs:
                logger.warning("jobs of the dead worker put back jobs=%d", len(jobs))
        except (RedisError, QsvcError) as error:
            logger.warning("could not put the dead worker's jobs back, leases will (%s)", error)

    def _was_stopped_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._stop_level:
                return True
            time.sleep(_POLL_SECONDS)
        return False


def default_slot() -> str:
    """Return the slot of this machine's usual device, without loading MLX to ask."""
    is_mac = platform.system() == "Darwin" and platform.machine() == "arm64"
    return "gpu:0" if is_mac else "cpu:0"


def default_worker_name(alias: str, slot: str) -> str:
    """Return a name that tells people where the worker runs."""
    host = socket.gethostname().split(".")[0]
    return f"{host}-{alias}-{slot.replace(':', '')}"


class _KeepAwake:
    """Keeps a Mac from sleeping while jobs run; does nothing elsewhere."""

    def __init__(self) -> None:
        self._program = shutil.which("caffeinate") if platform.system() == "Darwin" else None
        self._process: subprocess.Popen[bytes] | None = None

    def want(self, is_wanted: bool) -> None:
        if self._program is None or is_wanted == (self._process is not None):
            return
        if self._process is None:
            # It ends by itself with this process, whatever happens to it.
            self._process = subprocess.Popen([self._program, "-i", "-w", str(os.getpid())])
        else:
            self._process.terminate()
            self._process.wait()
            self._process = None


class _StallWatch:
    """Tells when rows are active and no step was made for too long."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self.restart()

    def restart(self) -> None:
        self._steps = -1
        self._since: float | None = None

    def see(self, *, running: int, steps: int) -> None:
        if steps != self._steps or running == 0:
            self._steps = steps
            self._since = time.monotonic() if running else None

    def has_stalled(self) -> bool:
        since = self._since
        return since is not None and time.monotonic() - since > self._limit_seconds


@contextlib.contextmanager
def device_slot_lock(folder: Path, slot: str) -> Iterator[None]:
    """Hold a device slot of this machine, so that two workers do not share one device.

    Raises:
        ConfigurationError: a worker already holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"slot-{slot.replace(':', '-')}.lock"
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise ConfigurationError(
                f"another worker (pid {holder}) runs on {slot} of this machine; stop it, or "
                "give this one another slot with --device-slot"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
