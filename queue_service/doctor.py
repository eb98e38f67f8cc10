"""What `qsvc doctor` looks at that needs no model: the server, its workers, versions, the disk."""

from __future__ import annotations

import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from redis import Redis
from redis.exceptions import NoPermissionError

from queue_service import keys
from queue_service.connection import Finding, Level, inspect_server
from queue_service.errors import ServerUnavailable

_NUM_PINGS = 5
# The worker's RQ thread waits for one round trip in each of its turns.
_SLOW_SECONDS = 0.05
_CLOCK_SECONDS = 2.0
_FULL_SHARE = 0.9
_LOW_SHARE = 0.1
_FULL_BYTES = 500_000_000
# RQ's own workers beat about every six minutes, and are listed for eight.
_STOCK_LEASE_SECONDS = 480
_PACKAGE = "qsvc"


class Area(StrEnum):
    """What a finding is about."""

    REDIS = "redis"
    CLOCK = "clock"
    WORKERS = "workers"
    QUEUES = "queues"
    VERSIONS = "versions"
    DISK = "disk"
    DEVICE = "device"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A finding and what it is about."""

    area: Area
    finding: Finding

    @property
    def is_wrong(self) -> bool:
        """Whether a person should do something."""
        return self.finding.level is not Level.INFO

    def to_object(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        finding = self.finding
        return {
            "area": self.area.value,
            "level": finding.level.value,
            "what": finding.what,
            "fix": finding.fix,
        }

    @classmethod
    def from_object(cls, fields: Mapping[str, Any]) -> Diagnosis:
        """Read what ``to_object`` returned."""
        finding = Finding(Level(fields["level"]), fields["what"], fields["fix"])
        return cls(Area(fields["area"]), finding)


class Volume(Protocol):
    """A file system, in bytes."""

    @property
    def total(self) -> int:
        """Its size."""

    @property
    def free(self) -> int:
        """What can be written."""


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """A worker as RQ lists it; ``beat_at`` is None for one whose hash has expired."""

    name: str
    queues: tuple[str, ...] = ()
    beat_at: float | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is one of qsvc's, whose lease is short."""
        return any(map(keys.is_ours, self.queues))

    def is_alive(self, now: float, lease_seconds: float) -> bool:
        """Whether its last heartbeat is no older than its lease."""
        lease = lease_seconds if self.is_ours else _STOCK_LEASE_SECONDS
        return self.beat_at is not None and now - self.beat_at <= lease


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """A queue, its batches' lanes included: jobs that wait, and that run without a lease."""

    num_waiting: int = 0
    num_abandoned: int = 0


def examine_server(
    connection: Redis, *, lease_seconds: float, clock: Callable[[], float] = time.time
) -> list[Diagnosis]:
    """Return everything worth saying about a server, its workers and its queues.

    Args:
        lease_seconds: how long a worker without a heartbeat counts as alive.
        clock: this machine's time, in seconds since 1970.

    Raises:
        redis.RedisError: the server went away.
    """
    pings = [_round_trip_seconds(connection) for _ in range(_NUM_PINGS)]
    found = [*inspect_server(connection), check_latency(statistics.median(pings))]
    with suppress(NoPermissionError):
        info: dict[str, Any] = connection.info()
        found = [_described(info), *found, *check_server_memory(info)]
    diagnoses = [Diagnosis(Area.REDIS, finding) for finding in found]
    before = clock()
    seconds, microseconds = connection.time()
    now = seconds + microseconds / 1e6
    offset_seconds = (before + clock()) / 2 - now
    diagnoses.append(Diagnosis(Area.CLOCK, check_clock(offset_seconds)))
    try:
        workers = _read_workers(connection)
        loads = _read_loads(connection, now)
        is_suspended = bool(connection.exists(f"{keys.RQ}:suspended"))
    except NoPermissionError as error:
        what = f"this user may not look at workers and queues ({error})"
        unseen = Finding(Level.INFO, what, "use the workers' user (docs/acl.md)")
        return [*diagnoses, Diagnosis(Area.WORKERS, unseen)]
    alive = [worker for worker in workers if worker.is_alive(now, lease_seconds)]
    return [
        *diagnoses,
        *(
            Diagnosis(Area.WORKERS, finding)
            for finding in check_workers(workers, alive, now=now, is_suspended=is_suspended)
        ),
        *(Diagnosis(Area.QUEUES, finding) for finding in check_queues(loads, alive)),
    ]


def unreachable(error: ServerUnavailable, *, is_named: bool) -> Diagnosis:
    """Return what to say of a server that cannot be used.

    Args:
        is_named: somebody named it; else it may be that none is wanted.
    """
    what, _, fix = str(error).partition("; ")
    level = Level.REFUSED if is_named else Level.INFO
    return Diagnosis(Area.REDIS, Finding(level, what, fix or None))


def check_latency(seconds: float) -> Finding:
    """Return whether a round trip to the server takes too long."""
    what = f"a round trip takes {seconds * 1e3:.1f} ms"
    if seconds < _SLOW_SECONDS:
        return Finding(Level.INFO, what)
    fix = "use a server nearer to the workers, or see what keeps it busy (SLOWLOG GET)"
    return Finding(Level.WARNING, what, fix)


def check_server_memory(info: Mapping[str, Any]) -> list[Finding]:
    """Return how full a server is by its INFO, and whether its last writes to disk failed."""
    used, limit = int(info["used_memory"]), int(info["maxmemory"])
    where = "maxmemory"
    if not limit:
        # A container's user or an old server may not see it.
        limit, where = int(info.get("total_system_memory") or 0), "its machine's memory"
    share = f", {used / limit:.0%} of {where} ({gigabytes(limit)})" if limit else ""
    what = f"it holds {gigabytes(used)}{share}"
    found = [Finding(Level.INFO, what)]
    if limit and used >= limit * _FULL_SHARE:
        fix = "delete batches that are done with (qsvc batches, qsvc delete), or give it more"
        found = [Finding(Level.WARNING, what, fix)]
    failures = {
        "aof_last_write_status": "it could not write to its append-only file",
        "rdb_last_bgsave_status": "its last snapshot failed",
    }
    for field, failure in failures.items():
        if info.get(field, "ok") != "ok":
            fix = "see its log, and free its disk: it may refuse every write until then"
            found.append(Finding(Level.REFUSED, failure, fix))
    return found


def check_clock(offset_seconds: float) -> Finding:
    """Return whether this machine's clock is where the server's is.

    Args:
        offset_seconds: above 0 where this machine's is ahead.
    """
    if abs(offset_seconds) < _CLOCK_SECONDS:
        return Finding(Level.INFO, "this machine and the server have the same time")
    way = "ahead of" if offset_seconds > 0 else "behind"
    return Finding(
        Level.WARNING,
        f"this machine's clock is {abs(offset_seconds):,.0f} s {way} the server's: scheduled jobs "
        "run at a wrong time, and results say one",
        "set both by the network (Linux: timedatectl set-ntp true; Mac: sudo sntp -sS "
        "time.apple.com)",
    )


def check_workers(
    workers: Sequence[ListedWorker],
    alive: Sequence[ListedWorker],
    *,
    now: float,
    is_suspended: bool = False,
) -> list[Finding]:
    """Return which workers live, and which are listed only."""
    found = []
    if is_suspended:
        what = "all workers are suspended: none takes a job"
        found.append(Finding(Level.WARNING, what, "rq resume --url URL"))
    names = ", ".join(sorted(worker.name for worker in alive))
    found.append(Finding(Level.INFO, f"{len(alive)} live" + (f": {names}" if names else "")))
    for worker in workers:
        if worker in alive:
            continue
        if worker.beat_at is None:
            since, fix = "its registration has expired", "`rq info` forgets it"
        else:
            since = f"its last heartbeat was {now - worker.beat_at:,.0f} s ago"
            fix = (
                "see its log and whether its machine lives; another worker takes its jobs over, "
                "and the list forgets it by itself"
            )
        what = f"{worker.name} is listed and does not live: {since}"
        found.append(Finding(Level.WARNING, what, fix))
    return found


def check_queues(loads: Mapping[str, QueueLoad], alive: Iterable[ListedWorker]) -> list[Finding]:
    """Return which queues have jobs that no live worker will take."""
    served = {queue for worker in alive for queue in worker.queues}
    found = []
    for queue, load in sorted(loads.items()):
        if not (load.num_waiting or load.num_abandoned):
            continue
        jobs = "1 job waits" if load.num_waiting == 1 else f"{load.num_waiting:,} jobs wait"
        jobs += f" in {queue}"
        if queue in served:
            found.append(Finding(Level.INFO, f"{jobs}, and a live worker serves it"))
            continue
        if load.num_abandoned:
            left = "was" if load.num_abandoned == 1 else "were"
            jobs += f" and {load.num_abandoned:,} {left} left by a worker that was lost"
        if keys.is_ours(queue):
            what = f"{jobs}, and no live worker serves it"
            found.append(Finding(Level.WARNING, what, f"start one: {_command_for(queue)}"))
        else:
            what = f"{jobs}, which is none of qsvc's queues, and no live worker serves it"
            fix = f"a stock rq worker has to serve it, or {_command_for(queue)}"
            found.append(Finding(Level.INFO, what, fix))
    return found


def check_versions(
    requirements: Iterable[str],
    python: str | None,
    *,
    installed: Callable[[str], str | None],
) -> list[Finding]:
    """Return whether what is installed is what qsvc was tested with.

    Args:
        requirements: of qsvc, as its package's metadata has them.
        python: the versions of Python that it takes, such as ``>=3.11``.
        installed: the version of a package, None when it is not there.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = {"python": (version, python or "")}
    for requirement in requirements:
        rule, _, marker = requirement.partition(";")
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)", rule.strip())
        applies = "sys_platform" not in marker or f"'{sys.platform}'" in marker
        # An extra's packages that are not there are not wanted.
        is_core_or_worker = "extra" not in marker or "'worker'" in marker
        if match and applies and is_core_or_worker and (found := installed(match[1])):
            wanted[match[1]] = (found, match[2].strip())
    wrong = [
        Finding(
            Level.WARNING,
            f"{name} {found} is none of the versions that were tested ({ranges})",
            "use another Python" if name == "python" else f"pip install '{name}{ranges}'",
        )
        for name, (found, ranges) in wanted.items()
        if not _is_within(found, ranges)
    ]
    told = [name for name in ("python", "redis", "rq", "mlx", "mlx-lm") if name in wanted]
    return [Finding(Level.INFO, ", ".join(f"{n} {wanted[n][0]}" for n in told)), *wrong]


def examine_versions() -> list[Finding]:
    """Return what `check_versions` says of this installation."""
    try:
        requirements = metadata.requires(_PACKAGE) or []
        python = metadata.metadata(_PACKAGE)["Requires-Python"]
    except metadata.PackageNotFoundError:
        return [Finding(Level.INFO, "qsvc runs from its sources: versions are unchecked")]
    return check_versions(requirements, python, installed=installed_version)


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, None when there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_folder(
    folder: Path, setting: str, *, volume: Callable[[Path], Volume] = shutil.disk_usage
) -> list[Finding]:
    """Return whether a folder of ours, or the one it will be made in, can be written, and is full.

    Args:
        setting: the environment variable that names another one.
        volume: tells the size of a file system and what is free.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    elsewhere = f"or name another folder with {setting}"
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".qsvc-doctor-"):
            pass
        status = volume(there)
    except OSError as error:
        what = f"{folder} cannot be used: {error.strerror or error}"
        return [
            Finding(Level.REFUSED, what, f"make {there} a folder that you can write, {elsewhere}")
        ]
    what = f"{folder}: {gigabytes(status.free)} of {gigabytes(status.total)} are free"
    if status.free < _FULL_BYTES:
        fix = f"delete files there (qsvc cache prune --to 1GB), {elsewhere}"
        return [Finding(Level.REFUSED, f"{what}: the disk is full", fix)]
    if status.free < status.total * _LOW_SHARE:
        what += ", less than a tenth: no checkpoints are stored there"
        return [Finding(Level.WARNING, what, f"delete files there, {elsewhere}")]
    return [Finding(Level.INFO, what)]


def gigabytes(num_bytes: float) -> str:
    """Return a size for people: in GB, or in MB where that is below one."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"


def _described(info: Mapping[str, Any]) -> Finding:
    name = str(info.get("server_name", "redis"))
    version = info.get(f"{name}_version", info["redis_version"])
    return Finding(Level.INFO, f"it is {name.capitalize()} {version}")


def _round_trip_seconds(connection: Redis) -> float:
    began = time.perf_counter()
    connection.ping()
    return time.perf_counter() - began


def _read_workers(connection: Redis) -> list[ListedWorker]:
    # Not RQ's Worker.all: that takes dead ones off the list while it reads.
    listed: Any = connection.smembers(f"{keys.RQ}:workers")
    workers = []
    for key in sorted(map(_text, listed)):
        queues, beat = map(_text, connection.hmget(key, "queues", "last_heartbeat"))
        workers.append(
            ListedWorker(
                name=key.removeprefix(keys.rq_worker("")),
                queues=tuple(filter(None, queues.split(","))),
                beat_at=datetime.fromisoformat(beat).timestamp() if beat else None,
            )
        )
    return workers


def _read_loads(connection: Redis, now: float) -> dict[str, QueueLoad]:
    listed: Any = connection.smembers(f"{keys.RQ}:queues")
    waiting: dict[str, int] = {}
    for key in map(_text, listed):
        queue = keys.queue_of_list(key)
        length: Any = connection.llen(key)
        waiting[queue] = waiting.get(queue, 0) + length
    return {
        queue: QueueLoad(count, int(connection.zcount(keys.rq_started(queue), "-inf", int(now))))
        for queue, count in waiting.items()
    }


def _text(value: Any) -> str:
    raw: bytes = value or b""
    return raw.decode("utf-8", "replace")


def _command_for(queue: str) -> str:
    """Return the command of a worker that serves a queue."""
    if queue == keys.DEFAULT_QUEUE:
        return "qsvc worker --model MODEL"
    alias = re.fullmatch(rf"{keys.PREFIX}:([\w.-]+)(?::(?:high|low))?", queue)
    option = f"--alias {alias[1]}" if alias else f"--queue {queue}"
    return f"qsvc worker --model MODEL {option}"


def _is_within(version: str, ranges: str) -> bool:
    """Whether a version is in ranges such as ``<0.33,>=0.32.4``; other signs are not understood."""
    found = _numbers(version)
    for part in filter(None, (part.strip() for part in ranges.split(","))):
        bound = _numbers(part)
        is_at_least, is_below = part.startswith(">="), part[0] == "<" and part[1] != "="
        if (is_at_least and found < bound) or (is_below and found >= bound):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
