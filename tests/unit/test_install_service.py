"""scripts/install_service: what it writes, what it runs, and what it refuses."""

from __future__ import annotations

import os
import plistlib
import pwd
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from cli.main import COMMANDS, cli
from queue_service.connection import Finding, Level, check_server, connect
from queue_service.errors import ConfigurationError
from queue_service.local_server import server_program
from queue_service.settings import RedisSettings, WorkerSettings
from scripts.services import Manager, ServerFiles, Service, check_secret_file, write_file
from tests.harness import eventually
from workers.exits import EXIT_CONFIGURATION

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "install_service"
CONFIG = '[redis]\nurl = "redis://me:hunter2@127.0.0.1:1/0"\n[worker]\ngrace_seconds = 30.5\n'
# Plays launchctl and systemctl: notes how it is called; a file stands for the running service.
MANAGER = """\
#!/bin/sh
echo "$(basename $0) $*" >> "{folder}/calls"
case "$*" in
  *is-active*) test -e "{folder}/running" ;;
  *print*) test -e "{folder}/running" && echo "state = running" ;;
  *restart*|bootstrap*) if [ -e "{folder}/broken" ]; then echo "no bus" >&2; exit 1; fi
    touch "{folder}/running" ;;
  *disable*|bootout*) rm -f "{folder}/running" ;;
esac
"""


def load_script() -> Any:
    loader = SourceFileLoader("install_service", str(SCRIPT))
    spec = spec_from_loader("install_service", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["install_service"] = module  # where dataclasses look
    loader.exec_module(module)
    return module


INSTALL_SERVICE = load_script()


class Machine:
    """A home folder of its own, and managers that only take notes.

    Attributes:
        home: the user's.
        config: the settings that a service reads by default.
    """

    def __init__(self, folder: Path) -> None:
        self.home = folder / "my home"
        self.home.mkdir()
        self.config = self.home / ".config" / "qsvc" / "config.toml"
        self._notes = folder / "notes"
        self._notes.mkdir()
        self.programs = folder / "bin"
        self.programs.mkdir()
        for name in ("launchctl", "systemctl"):
            program = self.programs / name
            program.write_text(MANAGER.format(folder=self._notes))
            program.chmod(0o755)

    def write_config(self, text: str = CONFIG, mode: int = 0o600) -> None:
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_text(text)
        self.config.chmod(mode)

    def break_manager(self) -> None:
        """Let it refuse to start anything."""
        (self._notes / "broken").touch()

    def take_calls(self) -> list[str]:
        """What the managers were told since the last look, but for questions."""
        path = self._notes / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        return [line for line in lines if "is-active" not in line and " print " not in line]

    def service_file(self, manager: str, name: str) -> Path:
        if manager == "launchd":
            return self.home / "Library" / "LaunchAgents" / f"qsvc.{name}.plist"
        return self.home / ".config" / "systemd" / "user" / f"qsvc-{name}.service"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setenv("HOME", str(made.home))
    monkeypatch.setenv("PATH", str(made.programs), prepend=os.pathsep)
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "SUDO_USER", "HF_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    # Of macOS they would be elsewhere: the tests say where.
    module = INSTALL_SERVICE.platformdirs
    monkeypatch.setattr(module, "user_config_path", lambda app: made.home / ".config" / app)
    monkeypatch.setattr(module, "user_data_path", lambda app: made.home / "data" / app)
    return made


def run(*arguments: str, manager: str) -> Result:
    return CliRunner().invoke(INSTALL_SERVICE.command, [*arguments, "--for", manager])


def done(*arguments: str, manager: str) -> str:
    """Run it, which works; return what it says."""
    result = run(*arguments, manager=manager)
    assert result.exception is None, result.exception
    return result.output


def refused(*arguments: str, manager: str = "systemd") -> str:
    """Run it, which is refused; return why."""
    result = run(*arguments, manager=manager)
    assert isinstance(result.exception, ConfigurationError), result.output
    return str(result.exception)


class Unit:
    """A systemd unit as systemd reads it, as far as ours go."""

    def __init__(self, text: str) -> None:
        self.values: dict[str, list[str]] = {}
        section = ""
        for line in text.splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif line and not line.startswith("#"):
                name, _, value = line.partition("=")
                self.values.setdefault(f"{section}.{name}", []).append(value)

    def one(self, name: str) -> str:
        [value] = self.values[name]
        return value.replace("%%", "%")

    def words(self, name: str) -> list[str]:
        return [
            word.replace("%%", "%")
            for value in self.values.get(name, [])
            for word in shlex.split(value)
        ]


def read(path: Path) -> tuple[list[str], dict[str, str], float]:
    """Program, environment and time to end of a service, whichever manager's its file is."""
    if path.suffix == ".plist":
        values = plistlib.loads(path.read_bytes())
        return values["ProgramArguments"], values["EnvironmentVariables"], values["ExitTimeOut"]
    unit = Unit(path.read_text())
    environment = dict(word.split("=", 1) for word in unit.words("Service.Environment"))
    program = unit.words("Service.ExecStart")
    return program, environment, float(unit.one("Service.TimeoutStopSec"))


def parsed(program: list[str]) -> dict[str, Any]:
    """The options of a service's command, as click reads them."""
    assert Path(program[0]).name == "qsvc"
    assert os.access(program[0], os.X_OK)
    assert program[1] in COMMANDS
    command = cli.get_command(click.Context(cli), program[1])
    assert command is not None
    return command.make_context(program[1], program[2:]).params


both = pytest.mark.parametrize("manager", ["launchd", "systemd"])


# What is written ------------------------------------------------------------------------------


@both
def test_a_worker_runs_the_real_command_with_its_settings_from_a_file(
    machine: Machine, manager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.write_config()
    done("worker", "--model", 'my/model 50% "q"', manager=manager)
    path = machine.service_file(manager, "worker")
    program, environment, stop_seconds = read(path)
    assert parsed(program)["model"] == 'my/model 50% "q"'
    assert environment["QSVC_CONFIG"] == str(machine.config)
    monkeypatch.setenv("QSVC_CONFIG", environment["QSVC_CONFIG"])
    assert stop_seconds >= WorkerSettings.load().grace_seconds + 20 == 50.5
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert "hunter2" not in path.read_text()


@both
def test_the_model_may_stand_in_the_config_file_and_a_folder_is_named_in_full(
    machine: Machine, manager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.write_config('[worker]\nmodel = "a/b"\n')
    done("worker", manager=manager)
    program, _, _ = read(machine.service_file(manager, "worker"))
    assert program[1:] == ["worker"]
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    done("worker", "--model", "model", manager=manager)
    program, _, _ = read(machine.service_file(manager, "worker"))
    assert program[1:] == ["worker", "--model", str(tmp_path / "model")]


def test_a_launch_agent_starts_again_after_a_crash_and_after_a_login(machine: Machine) -> None:
    machine.write_config()
    done("worker", "--model", "m", manager="launchd")
    values = plistlib.loads(machine.service_file("launchd", "worker").read_bytes())
    assert values["Label"] == "qsvc.worker"
    assert values["RunAtLoad"] is True
    assert values["KeepAlive"] == {"SuccessfulExit": False}
    assert values["Umask"] == 0o077
    log = Path(values["StandardErrorPath"])
    assert log.parent == machine.home / "Library" / "Logs" / "qsvc"
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700
    # The worker keeps a Mac awake by itself, while it has something to do.
    assert "caffeinate" not in values["ProgramArguments"]


def test_a_unit_starts_again_but_for_a_setting_that_cannot_work(machine: Machine) -> None:
    machine.write_config()
    done("worker", "--model", "m", manager="systemd")
    unit = Unit(machine.service_file("systemd", "worker").read_text())
    assert unit.one("Service.Restart") == "on-failure"
    assert unit.one("Unit.StartLimitIntervalSec") == "0"
    assert unit.one("Service.KillMode") == "mixed"
    assert unit.one("Install.WantedBy") == "default.target"
    # What the command really ends with when its child says that a setting cannot work.
    child = (sys.executable, "-c", f"raise SystemExit({EXIT_CONFIGURATION})")
    code = (
        "import sys, workers.supervisor as s, cli.worker_command as w, contextlib\n"
        f"s.Supervisor.__init__.__kwdefaults__['command'] = {child!r}\n"
        "w.check_server = lambda connection: None\n"
        "w.server = lambda url: contextlib.nullcontext()\n"
        "from cli.main import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "worker", "--model", "m"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the worker cannot start; see its log" in ended.stderr
    assert [str(ended.returncode)] == unit.words("Service.RestartPreventExitStatus")


def test_systemd_itself_accepts_the_units(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    machine.write_config()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for kind in ("worker", "dashboard", "server"):
        done(kind, *(["--model", "m"] if kind == "worker" else []), manager="systemd")
        path = machine.service_file("systemd", kind)
        verify = ["systemd-analyze", "verify", "--user", str(path)]
        verified = subprocess.run(verify, capture_output=True, text=True, check=False)
        assert (verified.returncode, verified.stderr) == (0, "")


@both
def test_the_dashboard_listens_on_this_machine_and_reads_its_password_from_a_file(
    machine: Machine, manager: str
) -> None:
    machine.write_config()
    secret = machine.home / "password"
    secret.write_text("a secret")
    arguments = ("dashboard", "--port", "9999", "--password-file", str(secret))
    secret.chmod(0o644)
    assert "others may read" in refused(*arguments)
    secret.chmod(0o600)
    done(*arguments, manager=manager)
    path = machine.service_file(manager, "dashboard")
    options = parsed(read(path)[0])
    assert (options["host"], options["port"]) == ("127.0.0.1", 9999)
    assert options["password_file"] == secret
    assert "a secret" not in path.read_text()


@both
def test_what_is_set_for_models_holds_for_the_service_and_nothing_else_of_the_shell(
    machine: Machine, manager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.write_config()
    monkeypatch.setenv("HF_HOME", "/big disk/models")
    monkeypatch.setenv("HF_TOKEN", "a-token")
    monkeypatch.setenv("QSVC_WORKER_GRACE_SECONDS", "1000")
    done("worker", "--model", "m", manager=manager)
    path = machine.service_file(manager, "worker")
    _, environment, stop_seconds = read(path)
    assert environment["HF_HOME"] == "/big disk/models"
    assert stop_seconds < 100
    assert "a-token" not in path.read_text()


def test_services_of_the_machine_run_as_a_user_of_it(tmp_path: Path) -> None:
    service = Service("worker", ("/q",), 30, tmp_path, Path("/home/me"), {}, user="me")
    assert plistlib.loads(service.render(Manager.LAUNCHD))["UserName"] == "me"
    assert service.path(Manager.LAUNCHD) == Path("/Library/LaunchDaemons/qsvc.worker.plist")
    unit = Unit(service.render(Manager.SYSTEMD).decode())
    assert unit.one("Service.User") == "me"
    assert unit.one("Install.WantedBy") == "multi-user.target"
    assert service.path(Manager.SYSTEMD) == Path("/etc/systemd/system/qsvc-worker.service")


# The server -----------------------------------------------------------------------------------


@both
def test_a_server_keeps_every_job_and_its_password_from_others(
    machine: Machine, manager: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done("server", "--port", str(port), manager=manager)
    path = machine.service_file(manager, "server")
    program, _, _ = read(path)
    assert program[0] == server_program()
    conf = Path(program[1])
    assert stat.S_IMODE(conf.stat().st_mode) == 0o600
    assert stat.S_IMODE(conf.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(machine.config.stat().st_mode) == 0o600
    url = tomllib.loads(machine.config.read_text())["redis"]["url"]
    assert url.rpartition("@")[0] not in path.read_text()
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: _answers(port), "the server answers")
        with connect(RedisSettings.load(url=url)) as connection:
            assert check_server(connection) == [Finding(Level.INFO, "an accepted job is on disk")]
            assert connection.config_get("dir")["dir"] == str(conf.parent)
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@both
def test_a_server_that_is_installed_again_keeps_password_data_and_port(
    machine: Machine, manager: str
) -> None:
    done("server", manager=manager)
    files = ServerFiles(machine.home / "data" / "qsvc" / "server", 6379)
    password, text = files.password(), machine.config.read_text()
    assert password
    assert len(password) >= 32
    assert "nothing to do" in done("server", manager=manager)
    assert files.password() == password
    assert machine.config.read_text() == text
    assert "change it there" in refused("server", "--port", "7000", manager=manager)
    assert "stay in" in done("server", "--uninstall", manager=manager)
    assert files.password() == password


def test_a_server_leaves_settings_that_are_there_alone(machine: Machine) -> None:
    machine.write_config()
    assert "valkey.conf" in done("server", manager="systemd")
    assert machine.config.read_text() == CONFIG


# What is done ---------------------------------------------------------------------------------


def test_installing_twice_does_nothing_the_second_time(machine: Machine) -> None:
    machine.write_config()
    done("worker", "--model", "m", manager="systemd")
    assert machine.take_calls() == [
        "systemctl --user daemon-reload",
        "systemctl --user enable qsvc-worker.service",
        "systemctl --user restart qsvc-worker.service",
    ]
    assert "nothing to do" in done("worker", "--model", "m", manager="systemd")
    assert machine.take_calls() == []
    done("worker", "--model", "other", manager="systemd")
    assert "systemctl --user restart qsvc-worker.service" in machine.take_calls()


def test_launchd_is_told_to_forget_the_old_job_before_it_gets_the_new_one(
    machine: Machine,
) -> None:
    machine.write_config()
    done("worker", "--model", "m", manager="launchd")
    machine.take_calls()
    done("worker", "--model", "other", manager="launchd")
    target = f"gui/{os.getuid()}/qsvc.worker"
    path = machine.service_file("launchd", "worker")
    assert machine.take_calls() == [
        f"launchctl bootout {target}",
        f"launchctl enable {target}",
        f"launchctl bootstrap gui/{os.getuid()} {path}",
    ]
    assert "nothing to do" in done("worker", "--model", "other", manager="launchd")


@both
def test_uninstalling_stops_it_and_removes_its_file_and_nothing_else(
    machine: Machine, manager: str
) -> None:
    machine.write_config()
    done("worker", "--model", "m", manager=manager)
    done("worker", "--model", "m", "--name", "two", manager=manager)
    machine.take_calls()
    # Its settings may be gone by then.
    machine.config.unlink()
    done("worker", "--uninstall", manager=manager)
    assert not machine.service_file(manager, "worker").exists()
    assert machine.service_file(manager, "worker-two").exists()
    assert len(machine.take_calls()) in (1, 2)
    assert "not installed" in done("worker", "--uninstall", manager=manager)
    assert machine.take_calls() == []


@both
def test_the_status_tells_what_runs_by_its_exit_code_too(machine: Machine, manager: str) -> None:
    result = run("worker", "--status", manager=manager)
    assert (result.exit_code, result.output) == (1, "worker is not installed\n")
    machine.write_config()
    done("worker", "--model", "m", manager=manager)
    result = run("worker", "--status", manager=manager)
    assert result.exit_code == 0
    assert "worker runs" in result.output
    assert "log" in result.output
    assert machine.take_calls()


@both
def test_printing_changes_nothing(machine: Machine, manager: str) -> None:
    machine.write_config()
    before = sorted(machine.home.rglob("*"))
    for arguments in (("worker", "--model", "m"), ("server",), ("dashboard",)):
        shown = done(*arguments, "--print", manager=manager)
        assert str(machine.service_file(manager, arguments[0])) in shown
    assert sorted(machine.home.rglob("*")) == before
    assert machine.take_calls() == []


@both
def test_a_manager_that_refuses_is_reported_with_its_words(machine: Machine, manager: str) -> None:
    machine.write_config()
    machine.break_manager()
    message = refused("worker", "--model", "m", manager=manager)
    assert "no bus" in message
    assert "ctl" in message


def test_a_mistake_is_one_line_and_exit_code_2(machine: Machine) -> None:
    ended = subprocess.run(
        [sys.executable, SCRIPT, "worker", "--name", "Not good"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("install_service: ")
    assert "Traceback" not in ended.stderr


# What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "A", "a b", "../x", "a/b", "1a", "a\n", "a;b", "x" * 50])
@pytest.mark.parametrize("action", [None, "--uninstall", "--status"])
def test_a_name_that_could_lead_elsewhere_is_refused(
    machine: Machine, name: str, action: str | None
) -> None:
    machine.write_config()
    if not name:
        with pytest.raises(ConfigurationError, match="cannot name a service"):
            Service("", ("/q",), 1, Path("/"), Path("/"))
        return
    arguments = ["worker", "--name", name, "--model", "m", *([action] if action else [])]
    result = run(*arguments, manager="systemd")
    if name == "1a":  # after "worker-" it is one
        assert not isinstance(result.exception, ConfigurationError)
        return
    assert isinstance(result.exception, ConfigurationError)
    assert "cannot name a service" in str(result.exception)
    assert machine.take_calls() == []


@pytest.mark.parametrize("model", ["$HOME/model", "a\nExecStartPre=/bin/evil", "a\x00b", "a\x7f"])
def test_words_that_would_change_their_meaning_are_refused(machine: Machine, model: str) -> None:
    machine.write_config()
    assert "cannot be part of a service" in _message(lambda: _service(model))


def _service(model: str) -> Service:
    return Service("worker", ("/q", "--model", model), 1, Path("/"), Path("/"))


def _message(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make()
    return str(caught.value)


def test_settings_are_checked_before_anything_is_written(machine: Machine) -> None:
    assert "is missing" in refused("worker", "--model", "m")
    machine.write_config(mode=0o640)
    assert "chmod 600" in refused("worker", "--model", "m")
    machine.write_config("[worker]\nslotz = 3\n")
    assert "did you mean slots?" in refused("worker", "--model", "m")
    machine.write_config('[redis]\nurl = "http://host"\n')
    assert "must start with redis://" in refused("worker", "--model", "m")
    machine.write_config()
    assert "name the model" in refused("worker")
    assert not machine.service_file("systemd", "worker").exists()
    assert machine.take_calls() == []


def test_a_secret_file_must_be_a_plain_file_of_its_user(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    check_secret_file(secret, owner=os.getuid())
    link = tmp_path / "link"
    link.symlink_to(secret)
    assert "no plain file" in _message(lambda: check_secret_file(link, owner=os.getuid()))
    other = os.getuid() + 1
    assert "another user" in _message(lambda: check_secret_file(secret, owner=other))
    missing = tmp_path / "missing"
    assert "cannot be read" in _message(lambda: check_secret_file(missing, owner=os.getuid()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--user", "me"), "--user goes with --system"),
        (("--system",), "say who runs it|use sudo"),
        (("--system", "--user", "nobody-of-this-name"), "there is no user|use sudo"),
        (("--system", "--user", "root"), "nothing of qsvc needs root|use sudo"),
    ],
)
def test_who_runs_a_service_is_checked(
    machine: Machine, arguments: tuple[str, ...], message: str
) -> None:
    machine.write_config()
    why = refused("worker", "--model", "m", *arguments)
    assert any(part in why for part in message.split("|"))


def test_a_service_of_the_machine_needs_its_settings_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = pwd.getpwuid(os.getuid())
    somebody = pwd.struct_passwd((me.pw_name, "x", 1000, 1000, "", str(machine.home), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwnam", lambda name: somebody)
    for kind, option in (("worker", "--config"), ("server", "--folder")):
        assert option in refused(kind, "--system", "--user", me.pw_name, "--print")


@both
def test_what_root_makes_for_a_service_of_the_machine_belongs_to_its_user(
    machine: Machine, manager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = str(machine.home)
    somebody = pwd.struct_passwd(("somebody", "x", 4321, 4321, "", home, "/bin/sh"))
    given: dict[Path, int] = {}
    monkeypatch.setattr(pwd, "getpwnam", lambda name: somebody)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: given.update({Path(path): uid}))
    file = tmp_path / "service"
    monkeypatch.setattr(Service, "path", lambda self, manager: file)
    data = tmp_path / "data"
    arguments = ("server", "--system", "--user", "somebody", "--folder", str(data))
    done(*arguments, manager=manager)
    made = {data, data / "valkey.conf"}
    if manager == "launchd":
        made.add(machine.home / "Library" / "Logs" / "qsvc")
        assert plistlib.loads(file.read_bytes())["UserName"] == "somebody"
    else:
        assert Unit(file.read_text()).one("Service.User") == "somebody"
    assert given == dict.fromkeys(made, 4321)
    started = machine.take_calls()
    assert started
    assert not [call for call in started if "--user" in call or "gui/" in call]


# Files ----------------------------------------------------------------------------------------


def test_a_file_is_written_whole_with_its_mode_and_only_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    assert write_file(path, b"one", mode=0o600)
    assert not write_file(path, b"one", mode=0o600)
    assert write_file(path, b"one", mode=0o644)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert write_file(path, b"two", mode=0o644)
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]
