"""Fixtures for every test: an isolated environment and real servers on private Unix sockets."""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from queue_service.connection import connect
from queue_service.errors import ConfigurationError
from queue_service.local_server import LocalServer
from queue_service.settings import RedisSettings
from workers.blas import load_blas

# mlx takes the BLAS that is in the process when mlx is first imported, so before any test module.
if importlib.util.find_spec("mlx"):
    load_blas(None)


@pytest.fixture(autouse=True)
def isolated_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the person who runs the tests, and a cache folder of the test's own."""
    for name in os.environ:
        if name.upper().startswith(("QSVC_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("QSVC_CONFIG", os.devnull)
    monkeypatch.setenv("QSVC_CACHE_FOLDER", str(tmp_path / "qsvc-cache"))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[LocalServer]:
    """One server for the whole run; skips without a server program, except in CI."""
    with tempfile.TemporaryDirectory(prefix="qsvc-test-") as folder:
        server = LocalServer(Path(folder))
        try:
            server.start()
        except ConfigurationError as exc:
            if "CI" in os.environ:
                raise
            pytest.skip(str(exc))
        yield server
        server.stop()


@pytest.fixture
def redis_url(redis_server: LocalServer) -> str:
    """The URL of the shared server, emptied."""
    url = redis_server.start()
    with redis.Redis.from_url(url) as connection:
        connection.flushall()
    return url


@pytest.fixture(name="redis")
def redis_connection(redis_url: str) -> Iterator[redis.Redis]:
    """A connection to the shared server, emptied."""
    connection = connect(RedisSettings.load(url=redis_url))
    yield connection
    connection.close()


@pytest.fixture
def make_server(redis_server: LocalServer) -> Iterator[Callable[..., LocalServer]]:
    """Make servers that a test may kill; not started yet, stopped at the end of the test.

    The optional argument is the folder; the others are those of LocalServer.
    """
    with tempfile.TemporaryDirectory(prefix="qsvc-test-") as parent:
        servers: list[LocalServer] = []

        def make(folder: Path | None = None, **limits: float) -> LocalServer:
            server = LocalServer(folder or Path(parent) / str(len(servers)), **limits)
            servers.append(server)
            return server

        yield make
        for server in servers:
            server.stop()


@pytest.fixture
def kill_server() -> Callable[[LocalServer], None]:
    """Kill -9 a server and wait until its process is gone."""

    def kill(server: LocalServer) -> None:
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while server.is_running:
            time.sleep(0.01)

    return kill
