"""Connecting to real servers, and which of them are refused."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from queue_service.connection import (
    Finding,
    Level,
    check_server,
    connect,
    inspect_server,
    unavailable,
)
from queue_service.errors import ConfigurationError, ServerUnavailable
from queue_service.local_server import LocalServer
from queue_service.settings import RedisSettings

MakeServer = Callable[..., LocalServer]


@pytest.fixture
def server_url(make_server: MakeServer) -> str:
    """The URL of a server that the test may configure as it likes."""
    return make_server().start()


def connected(url: str, **settings: Any) -> redis.Redis:
    return connect(RedisSettings.load(url=url, **settings))


def levels(findings: list[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


def test_answers_are_bytes_and_come_from_the_named_database(server_url: str) -> None:
    with connected(f"{server_url}?db=3") as connection:
        connection.set("key", "value")
        assert connection.get("key") == b"value"
        assert connection.info("keyspace").keys() == {"db3"}


def test_a_restarted_server_is_found_again(
    make_server: MakeServer, kill_server: Callable[[LocalServer], None]
) -> None:
    server = make_server()
    with connected(server.start()) as connection:
        connection.set("key", "value")
        kill_server(server)
        with pytest.raises(redis.ConnectionError):
            connection.get("key")
        server.start()
        assert connection.ping()


def test_a_user_of_an_acl_may_connect_with_the_password_in_the_url(server_url: str) -> None:
    with connected(server_url) as admin:
        admin.acl_setuser("app", enabled=True, passwords=["+se/cret"], commands=["+ping", "+get"])
    path = server_url.removeprefix("unix://")
    with connected(f"unix://app:se%2Fcret@{path}") as connection:
        assert connection.ping()


@pytest.mark.parametrize("userinfo", ["", "default:hunter2@"])
def test_a_wrong_or_missing_password_is_reported_without_showing_one(
    server_url: str, userinfo: str
) -> None:
    with connected(server_url) as admin:
        admin.config_set("requirepass", "right")
        path = server_url.removeprefix("unix://")
        with pytest.raises(ServerUnavailable, match="check the user and the password") as caught:
            connected(f"unix://{userinfo}{path}")
        admin.config_set("requirepass", "")
    assert path in str(caught.value)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_server_that_is_not_there_is_named_with_what_to_do() -> None:
    password = "-".join(["no", "body", "knows"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        # Bound but not listening: refused for sure.
        with pytest.raises(ServerUnavailable) as caught:
            connected(f"redis://me:{password}@127.0.0.1:{port}/0")
    assert f"redis://me:***@127.0.0.1:{port}/0 cannot be reached" in str(caught.value)
    assert "start one, or name another with --redis or QSVC_REDIS_URL" in str(caught.value)
    assert "default" not in str(caught.value)
    assert password not in "".join(traceback.format_exception(caught.value))


def test_a_socket_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerUnavailable, match=r"nowhere\.sock cannot be reached"):
        connected(f"unix://{tmp_path}/nowhere.sock")


def test_a_server_that_hangs_is_given_up_after_the_socket_timeout(make_server: MakeServer) -> None:
    server = make_server()
    url = server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(ServerUnavailable, match="did not answer in time"):
        connected(url, socket_timeout_seconds=0.1)
    os.kill(server.pid, signal.SIGCONT)


def test_a_command_that_takes_too_long_is_not_sent_twice(server_url: str) -> None:
    impatient = connected(server_url, socket_timeout_seconds=0.5)
    with connected(server_url) as observer, impatient:
        before = observer.info("stats")["total_connections_received"]
        with pytest.raises(redis.TimeoutError):
            impatient.blpop(["nothing"], 0)
        # A timeout ends the connection, so sending again would have taken another one.
        assert observer.info("stats")["total_connections_received"] == before


@pytest.mark.parametrize(
    ("query", "message"), [("?nope=1", "nope"), ("?socket_timeout=soon", "socket_timeout")]
)
def test_a_wrong_option_in_the_url_is_a_configuration_error(
    server_url: str, query: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        connected(server_url + query)


def test_a_database_that_does_not_exist_is_reported(server_url: str) -> None:
    with pytest.raises(ServerUnavailable, match="DB index is out of range"):
        connected(f"{server_url}?db=99")


def test_a_loading_server_is_reported_as_such() -> None:
    error = unavailable(RedisSettings.load(), redis.BusyLoadingError("loading"))
    assert "still loading" in str(error)


def test_an_address_that_nobody_named_is_told_to_be_the_default() -> None:
    error = unavailable(RedisSettings.load(), redis.ConnectionError("refused"))
    assert "redis://127.0.0.1:6379/0 is the default, since none was named, and cannot" in str(error)
    assert "name another with --redis or QSVC_REDIS_URL" in str(error)


def test_our_own_server_has_nothing_to_warn_about(redis: redis.Redis) -> None:
    assert redis.dbsize() == 0
    assert check_server(redis) == [Finding(Level.INFO, "an accepted job is on disk")]


def test_a_server_that_may_evict_is_refused_with_the_fix(server_url: str) -> None:
    with connected(server_url) as connection:
        connection.config_set("maxmemory", 100_000_000)
        assert levels(check_server(connection)) == [Level.INFO]
        for policy in ("allkeys-lru", "volatile-ttl"):
            connection.config_set("maxmemory-policy", policy)
            with pytest.raises(ConfigurationError, match=rf"{policy}\); set .* noeviction"):
                check_server(connection)


def test_an_evicting_policy_without_a_memory_limit_is_a_warning(server_url: str) -> None:
    with connected(server_url) as connection:
        connection.config_set("maxmemory-policy", "allkeys-lru")
        assert levels(check_server(connection)) == [Level.WARNING, Level.INFO]


@pytest.mark.parametrize(
    ("config", "level", "words"),
    [
        ({"appendonly": "no", "save": ""}, Level.WARNING, "keeps nothing on disk"),
        ({"appendonly": "no", "save": "3600 1"}, Level.WARNING, "only takes snapshots"),
        ({"appendfsync": "no"}, Level.WARNING, "crash of the machine"),
        ({"appendfsync": "always"}, Level.INFO, "is on disk"),
    ],
)
def test_what_a_crash_would_lose_is_said(
    server_url: str, config: dict[str, str], level: Level, words: str
) -> None:
    with connected(server_url) as connection:
        for name, value in config.items():
            connection.config_set(name, value)
        [finding] = check_server(connection)
        assert finding.level is level
        assert words in finding.what


def test_a_user_who_may_not_read_the_configuration_is_served_from_info(server_url: str) -> None:
    with connected(server_url) as admin:
        admin.config_set("maxmemory", 100_000_000)
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.acl_setuser("app", enabled=True, nopass=True, commands=["+ping", "+info"])
        admin.acl_setuser("shy", enabled=True, nopass=True, commands=["+ping"])
    path = server_url.removeprefix("unix://")
    with connected(f"unix://app:x@{path}") as connection:
        assert levels(inspect_server(connection)) == [Level.REFUSED, Level.INFO]
        with connected(server_url) as admin:
            admin.config_set("appendonly", "no")
        assert levels(inspect_server(connection)) == [Level.REFUSED, Level.WARNING]
    with connected(f"unix://shy:x@{path}") as connection:
        [finding] = check_server(connection)
        assert finding.level is Level.WARNING
        assert "INFO" in finding.what


class OlderServer(redis.Redis):
    """A server that says that it is an old one, in cluster mode."""

    def info(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().info(), "redis_version": self.version, "cluster_enabled": 1}

    version: str | float


@pytest.mark.parametrize(("version", "too_old"), [("6.0.16", True), (6.1, True), ("6.2.0", False)])
def test_an_old_server_and_one_in_cluster_mode_are_refused_with_every_reason(
    server_url: str, version: str | float, too_old: bool
) -> None:
    with OlderServer.from_url(server_url) as connection:
        connection.version = version
        with pytest.raises(ConfigurationError, match="cluster-enabled no") as caught:
            check_server(connection)
        assert ("use Redis 6.2 or newer" in str(caught.value)) is too_old


def test_before_waitaof_an_accepted_job_is_on_disk_within_a_second(server_url: str) -> None:
    with OlderServer.from_url(server_url) as connection:
        connection.version = "7.0.15"
        assert "within a second" in inspect_server(connection)[-1].what
