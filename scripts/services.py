"""What scripts/install_service writes: a service as a launchd job and as a systemd unit."""

from __future__ import annotations

import os
import plistlib
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from cli.main import EXIT_CODES
from queue_service.errors import ConfigurationError

NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
# How long a service may take to end beyond a worker's grace period: jobs are given back, callbacks
# end, checkpoints are written.
STOP_MARGIN_SECONDS = 20
# Between two tries. Long enough for a server or a network to come, after a boot as well.
RETRY_SECONDS = 10
# A fault that comes back until a person does something: a wrong setting, a refused server.
FINAL_EXIT_CODES = (EXIT_CODES[ConfigurationError],)


class Manager(StrEnum):
    """What starts services: macOS's or Linux's."""

    LAUNCHD = "launchd"
    SYSTEMD = "systemd"


@dataclass(frozen=True, slots=True)
class Service:
    """A program that is to run always.

    Attributes:
        name: such as ``worker``; lower case letters, digits and hyphens.
        program: absolute path and arguments; never a secret, since everybody may read it.
        stop_seconds: how long it may take to end by itself.
        log_folder: where launchd puts its output; systemd has a journal.
        environment: no secrets either.
        user: who it runs as, for a service of the whole machine; None for one of our own.
        home: that user's home folder.

    Raises:
        ConfigurationError: a name or a word that the formats could not carry as it is.
    """

    name: str
    program: tuple[str, ...]
    stop_seconds: int
    log_folder: Path
    home: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"{self.name!r} cannot name a service: use lower case letters, digits and hyphens,"
                " 40 at most, a letter first"
            )
        words = [*self.program, *self.environment.values(), str(self.log_folder), str(self.home)]
        for word in words:
            # systemd replaces variables in the program's words, and no quoting keeps it from that
            # everywhere; the others end a line or a string.
            if re.search(r"[\x00-\x1f\x7f$]", word):
                raise ConfigurationError(
                    f"{word!r} cannot be part of a service: it holds $ or a control character"
                )
        if not Path(self.program[0]).is_absolute():
            raise ConfigurationError(f"{self.program[0]} is no absolute path")

    @property
    def label(self) -> str:
        """Its name for launchd."""
        return f"qsvc.{self.name}"

    @property
    def unit(self) -> str:
        """Its name for systemd."""
        return f"qsvc-{self.name}.service"

    def render(self, manager: Manager) -> bytes:
        """Return the content of its file."""
        if manager is Manager.LAUNCHD:
            return _plist(self)
        return _unit(self).encode()

    def path(self, manager: Manager) -> Path:
        """Return where that file belongs."""
        if manager is Manager.LAUNCHD:
            root = Path("/") if self.user else self.home
            folder = "LaunchDaemons" if self.user else "LaunchAgents"
            return root / "Library" / folder / f"{self.label}.plist"
        if self.user:
            return Path("/etc/systemd/system") / self.unit
        return self.home / ".config" / "systemd" / "user" / self.unit


def _plist(service: Service) -> bytes:
    log = str(service.log_folder / f"{service.name}.log")
    values: dict[str, object] = {
        "Label": service.label,
        "ProgramArguments": list(service.program),
        "EnvironmentVariables": {"HOME": str(service.home), **service.environment},
        "WorkingDirectory": str(service.home),
        "RunAtLoad": True,
        # Also after a crash, and while the server is away; not when it was told to end. launchd
        # cannot tell one exit code from another, so a wrong setting is tried again too.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RETRY_SECONDS,
        # From SIGTERM to SIGKILL; launchd's own 20 seconds would cut the grace period short.
        "ExitTimeOut": service.stop_seconds,
        # As an application: others get less of the processors and the disk.
        "ProcessType": "Interactive",
        "StandardOutPath": log,
        "StandardErrorPath": log,
        "Umask": 0o077,
    }
    if service.user:
        values["UserName"] = service.user
    return plistlib.dumps(values, sort_keys=False)


def _unit(service: Service) -> str:
    environment = "".join(
        f"Environment={_quoted(f'{name}={value}')}\n" for name, value in service.environment.items()
    )
    codes = " ".join(map(str, FINAL_EXIT_CODES))
    program = " ".join(map(_quoted, service.program))
    of_the_machine = ""
    if service.user:
        of_the_machine = f"""
User={service.user}
# Nothing but its own files is written: caches, models, checkpoints lie in the user's home.
ProtectSystem=full
PrivateTmp=yes
ProtectControlGroups=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes"""
    return f"""\
# Made by scripts/install_service; it writes this file again, so change it by `systemctl edit`.
[Unit]
Description=qsvc {service.name}
{"Wants=network-online.target" if service.user else "# A user's services know no network.target:"}
{"After=network-online.target" if service.user else "# one that comes later is waited for."}
# Tried for ever: the server may be away for days.
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={program}
{environment}WorkingDirectory={_escaped(str(service.home))}
UMask=0077
Restart=on-failure
RestartSec={RETRY_SECONDS}
# A setting that cannot work: only a person can help.
RestartPreventExitStatus={codes}
# From SIGTERM to SIGKILL; the worker's grace period and what it does after it.
TimeoutStopSec={service.stop_seconds}
# SIGTERM for the supervisor alone: it tells its child once, and twice would mean "hurry". At the
# end of the time everything is killed.
KillMode=mixed
# A child that the kernel kills for its memory is the supervisor's matter: it hands its jobs back.
OOMPolicy=continue
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
# AF_NETLINK: looking a host up asks the kernel which addresses this machine has.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
# Not MemoryDenyWriteExecute: MLX compiles operations and loads them.{of_the_machine}

[Install]
WantedBy={"multi-user.target" if service.user else "default.target"}
"""


def _escaped(text: str) -> str:
    """Return a path for a setting that takes one; only its specifiers have a meaning there."""
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """Return one word of a command line or one assignment, as systemd reads it."""
    escaped = _escaped(word.replace("\\", "\\\\").replace('"', '\\"'))
    return escaped if re.fullmatch(r"[\w@%+=:,./-]+", escaped) else f'"{escaped}"'


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """The local server's folder: its data, and a configuration with its password.

    Attributes:
        folder: absolute.
        port: on the loopback addresses only.
    """

    folder: Path
    port: int

    @property
    def conf(self) -> Path:
        """The configuration; made once, then its owner's to change."""
        return self.folder / "valkey.conf"

    def render(self, password: str) -> str:
        """Return the configuration.

        Raises:
            ConfigurationError: the folder's path cannot be written there.
        """
        if re.search(r'[\x00-\x1f\x7f"\\]', str(self.folder)):
            raise ConfigurationError(f"{self.folder} holds a quote, a backslash or a control sign")
        return f"""\
# Made once by scripts/install_service, and yours to change. docs/redis.md says why.
bind 127.0.0.1 -::1
port {self.port}
requirepass {password}
dir "{self.folder}"
daemonize no
# Every accepted job is on disk within a second; snapshots would only cost memory.
appendonly yes
appendfsync everysec
save ""
# When it is full it refuses writes and workers wait; any other policy would drop jobs.
maxmemory-policy noeviction
maxmemory 2gb
stream-node-max-bytes 1024
"""

    def password(self) -> str | None:
        """Return the password of the configuration that is there, None without one."""
        return self._read("requirepass")

    def own_port(self) -> int | None:
        """Return the port of the configuration that is there, None without one."""
        text = self._read("port")
        return int(text) if text and text.isdecimal() else None

    def _read(self, directive: str) -> str | None:
        try:
            text = self.conf.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        found = re.search(rf"^{directive} (\S+)$", text, re.MULTILINE)
        return found[1] if found else None


def check_secret_file(path: Path, *, owner: int) -> None:
    """Refuse a file with secrets that others could read or exchange.

    Raises:
        ConfigurationError: it is missing, no plain file, somebody else's, or open to others.
    """
    try:
        found = path.lstat()
    except OSError as exc:
        raise ConfigurationError(f"{path} cannot be read: {exc.strerror}") from exc
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(f"{path} is no plain file")
    if found.st_uid != owner:
        raise ConfigurationError(f"{path} belongs to another user than the service")
    if found.st_mode & 0o077:
        raise ConfigurationError(f"others may read {path}, which may hold a password: chmod 600")


def write_file(path: Path, content: bytes, *, mode: int) -> bool:
    """Write a file whole or not at all; return False where it was as it should be already."""
    is_as_wanted = path.is_file() and path.read_bytes() == content
    if is_as_wanted and stat.S_IMODE(path.stat().st_mode) == mode:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return True
