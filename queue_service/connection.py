"""Connects to a Redis server and checks that it is one that keeps every job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import redis
from redis.backoff import ConstantBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from queue_service.errors import ConfigurationError, ServerUnavailable
from queue_service.sentinel_url import SentinelUrl
from queue_service.settings import RedisSettings, redact_url

OLDEST_VERSION = (6, 2)
WAITAOF_VERSION = (7, 2)


class Level(StrEnum):
    """How much a finding about the server matters."""

    REFUSED = "refused"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about the server that a person should know; ``fix`` is None when nothing is."""

    level: Level
    what: str
    fix: str | None = None


def connect(settings: RedisSettings) -> redis.Redis:
    """Return a connection that has answered a ping; answers are bytes.

    It connects by itself again, and a command whose connection broke is sent a second time. A
    command that took too long is not, since the server may be busy with it. Blocking commands
    must block for less than ``socket_timeout_seconds``.

    Raises:
        ConfigurationError: the URL cannot be used.
        ServerUnavailable: the server cannot be reached, is loading or refuses us.
    """
    try:
        connection = open_url(
            settings.url,
            decode_responses=False,
            socket_connect_timeout=settings.connect_timeout_seconds,
            socket_timeout=settings.socket_timeout_seconds,
            health_check_interval=15,
            retry=_retry(),
        )
        connection.ping()
    except redis.RedisError as exc:
        raise unavailable(settings, exc) from exc
    except (ValueError, TypeError, OSError) as exc:
        # A wrong option in the URL's query: unknown, of a wrong type, a certificate not there.
        raise ConfigurationError(
            f"the Redis URL {redact_url(settings.url)} cannot be used: {exc}"
        ) from exc
    return connection


def open_url(url: str, **options: Any) -> redis.Redis:
    """Return a client for a URL of any kind; nothing has been sent yet.

    With sentinels every new connection asks them where the server is, so it follows a failover.

    Args:
        options: redis-py's, for what the URL does not say.

    Raises:
        ValueError, TypeError: an option in the URL's query is unknown or of a wrong type.
    """
    if not SentinelUrl.matches(url):
        return redis.Redis.from_url(url, **options)
    named = SentinelUrl.parse(url)
    options = {**options, **parse_url(named.server_url)}  # type: ignore[no-untyped-call]
    del options["host"]
    timeouts = {name: value for name, value in options.items() if name.startswith("socket_")}
    # A sentinel that is away is one of several: the next one is asked soon.
    sentinel_options = {**timeouts, **named.sentinel_login, "retry": _retry()}
    sentinel: Any = Sentinel(named.sentinels, sentinel_kwargs=sentinel_options, **options)  # type: ignore[no-untyped-call]
    client: redis.Redis = sentinel.master_for(named.service)
    return client


def _retry() -> Retry:
    return Retry(ConstantBackoff(0.05), 1, supported_errors=(redis.ConnectionError,))


def unavailable(settings: RedisSettings, error: redis.RedisError) -> ServerUnavailable:
    """Return what to tell a person when the server of these settings failed with an error."""
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        what = f"refuses us ({error})"
        fix = "check the user and the password in the URL, and what the user's ACL allows"
    elif isinstance(error, redis.BusyLoadingError):
        what = "is still loading its data"
        fix = "try again in a moment"
    elif isinstance(error, redis.TimeoutError):
        what = "did not answer in time"
        fix = "check the host, the network and the server's load, or set longer timeouts"
    elif isinstance(error, redis.ConnectionError):
        what = f"cannot be reached ({error})"
        fix = "start one, or name another with --redis or QSVC_REDIS_URL"
        if "url" not in settings.model_fields_set:
            what = f"is the default, since none was named, and {what}"
    else:
        what = f"answered with an error ({error})"
        fix = "check the URL and the server's log"
    return ServerUnavailable(f"the Redis server at {redact_url(settings.url)} {what}; {fix}")


def check_server(connection: redis.Redis) -> list[Finding]:
    """Return what a person should know about a server that can be used.

    Raises:
        ConfigurationError: the server may lose jobs or cannot run RQ; names every reason and fix.
        redis.RedisError: the server went away.
    """
    findings = inspect_server(connection)
    refused = [f"{f.what}; {f.fix}" for f in findings if f.level is Level.REFUSED]
    if refused:
        raise ConfigurationError("this Redis server cannot be used: " + "\n".join(refused))
    return findings


def inspect_server(connection: redis.Redis) -> list[Finding]:
    """Return everything worth saying about the server, what :func:`check_server` refuses too.

    Raises:
        redis.RedisError: the server went away.
    """
    try:
        info: dict[str, Any] = connection.info()
    except redis.exceptions.NoPermissionError:
        return [
            Finding(
                Level.WARNING,
                "this user may not read INFO, so the server is unchecked",
                "allow it with ACL SETUSER <user> +info",
            )
        ]
    version = _version(info)
    return [
        *_check_version(info, version),
        *_check_eviction(info),
        *_check_persistence(connection, info, version),
    ]


def _version(info: dict[str, Any]) -> tuple[int, ...]:
    # redis-py turns a version such as 6.2 into a float.
    return tuple(int(part) for part in re.findall(r"\d+", str(info["redis_version"])))


def _check_version(info: dict[str, Any], version: tuple[int, ...]) -> list[Finding]:
    findings = []
    if version < OLDEST_VERSION:
        findings.append(
            Finding(
                Level.REFUSED,
                f"it is Redis {info['redis_version']}",
                "use Redis 6.2 or newer, or any Valkey",
            )
        )
    if info.get("cluster_enabled"):
        findings.append(
            Finding(
                Level.REFUSED,
                "it runs in cluster mode, in which RQ does not work",
                "use a server with cluster-enabled no",
            )
        )
    return findings


def _check_eviction(info: dict[str, Any]) -> list[Finding]:
    policy, maxmemory_bytes = info["maxmemory_policy"], info["maxmemory"]
    if policy == "noeviction":
        return []
    fix = "set maxmemory-policy noeviction"
    if maxmemory_bytes:
        what = f"it may evict jobs when memory is short (maxmemory-policy {policy})"
        return [Finding(Level.REFUSED, what, fix)]
    what = f"it would evict jobs (maxmemory-policy {policy}) if it had a maxmemory"
    return [Finding(Level.WARNING, what, fix)]


def _check_persistence(
    connection: redis.Redis, info: dict[str, Any], version: tuple[int, ...]
) -> list[Finding]:
    if not info["aof_enabled"]:
        fix = "set appendonly yes"
        match _config(connection, "save"):
            case "":
                what = "it keeps nothing on disk: a restart loses all jobs"
            case None:
                what = "it has no append-only file, and whether it takes snapshots is unknown"
            case _:
                what = "it only takes snapshots: a crash loses the jobs since the last one"
        return [Finding(Level.WARNING, what, fix)]
    policy = _config(connection, "appendfsync")
    if policy == "no":
        what = "a crash of the machine may lose accepted jobs (appendfsync no)"
        return [Finding(Level.WARNING, what, "set appendfsync everysec")]
    if version >= WAITAOF_VERSION or policy == "always":
        return [Finding(Level.INFO, "an accepted job is on disk")]
    if policy == "everysec":
        what = "an accepted job is on disk within a second (appendfsync everysec)"
        return [Finding(Level.INFO, what)]
    what = "when an accepted job is on disk is unknown: this user may not read appendfsync"
    return [Finding(Level.INFO, what)]


def _config(connection: redis.Redis, name: str) -> str | None:
    """Return a server parameter, None where this user may not read it or the server has none."""
    try:
        answer = connection.config_get(name)
    except redis.ResponseError:
        return None
    return answer.get(name)
