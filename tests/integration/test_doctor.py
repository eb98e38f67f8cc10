"""`qsvc doctor` beside real servers with planted faults: each is named, with what to do."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

import cli.doctor_command
from cli.main import main
from queue_service import keys
from queue_service.connection import Level, connect
from queue_service.doctor import Area, Diagnosis, examine_server
from queue_service.local_server import LocalServer
from queue_service.settings import RedisSettings
from tests.chaos.proxy import Proxy
from tests.cli_helpers import run_qsvc
from tests.harness import enqueue_chat, eventually, running_worker, worker_settings

LEASE_SECONDS = 10.0
GIANT = {
    "model_type": "llama",
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}

Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def server(make_server: Callable[..., LocalServer]) -> Iterator[Redis]:
    """A server that the test may spoil."""
    with closing(connect(RedisSettings.load(url=make_server().start()))) as connection:
        yield connection


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Run the command in this process without MLX; return its exit code and its JSON."""

    def run(*args: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(cli.doctor_command, "has_worker_packages", lambda: False)
        monkeypatch.setattr(sys, "argv", ["qsvc", "doctor", "--json", *args])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, json.loads(capsys.readouterr().out)

    return run


def giant(folder: Path) -> Path:
    """A model of 405 billion parameters, as far as its configuration goes."""
    (folder / "config.json").write_text(json.dumps(GIANT))
    return folder


def wrong(found: list[Diagnosis]) -> list[tuple[Area, str, str]]:
    return [(one.area, one.finding.what, one.finding.fix or "") for one in found if one.is_wrong]


def only_fault(connection: Redis, **options: Any) -> tuple[Area, str, str]:
    [fault] = wrong(examine_server(connection, lease_seconds=LEASE_SECONDS, **options))
    return fault


def faults_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in report["findings"] if one["level"] != "info"]


def test_a_good_server_has_no_fault(server: Redis) -> None:
    found = examine_server(server, lease_seconds=LEASE_SECONDS)
    assert wrong(found) == []
    assert {one.area for one in found} == {Area.REDIS, Area.CLOCK, Area.WORKERS}


def test_a_server_that_evicts_is_named(server: Redis) -> None:
    server.config_set("maxmemory", "1gb")
    server.config_set("maxmemory-policy", "allkeys-lru")
    area, what, fix = only_fault(server)
    assert (area, fix) == (Area.REDIS, "set maxmemory-policy noeviction")
    assert "may evict jobs" in what


def test_a_server_that_keeps_nothing_is_named(server: Redis) -> None:
    server.config_set("appendonly", "no")
    area, what, fix = only_fault(server)
    assert (area, fix) == (Area.REDIS, "set appendonly yes")
    assert "keeps nothing on disk" in what


def test_an_old_server_is_named(server: Redis, tmp_path: Path) -> None:
    version = f"redis_version:{server.info('server')['redis_version']}\r".encode()

    def older(chunk: bytes) -> bytes:
        return chunk.replace(version, b"redis_version:5.0.9\r".rjust(len(version)))

    path = server.connection_pool.connection_kwargs["path"]
    proxy = Proxy(tmp_path / "old.sock", Path(path), change=older)
    with proxy.serving(), closing(connect(RedisSettings.load(url=proxy.url))) as connection:
        area, what, fix = only_fault(connection)
    assert (area, what) == (Area.REDIS, "it is Redis 5.0.9")
    assert "6.2 or newer" in fix


def test_a_wrong_clock_is_named(server: Redis) -> None:
    area, what, fix = only_fault(server, clock=lambda: time.time() - 300)
    assert area is Area.CLOCK
    assert "300 s behind the server's" in what
    assert "timedatectl" in fix


def test_a_worker_that_died_and_its_queue_are_named(server: Redis) -> None:
    url = f"unix://{server.connection_pool.connection_kwargs['path']}"
    with running_worker(worker_settings(url, name="w")) as worker:
        eventually(lambda: server.exists(keys.rq_worker("w")), "the worker's registration")
        assert wrong(examine_server(server, lease_seconds=LEASE_SECONDS)) == []
        listed = server.hgetall(keys.rq_worker("w"))
        worker.request_stop()
        worker.join()
    # As it would be had the process been killed a minute ago.
    server.hset(keys.rq_worker("w"), mapping=listed)
    server.hset(keys.rq_worker("w"), "last_heartbeat", "2024-01-01T00:00:00.000000Z")
    server.sadd(f"{keys.RQ}:workers", keys.rq_worker("w"))
    enqueue_chat(server, "hello")
    stale, abandoned = wrong(examine_server(server, lease_seconds=LEASE_SECONDS))
    assert (stale[0], "w is listed and does not live" in stale[1]) == (Area.WORKERS, True)
    assert stale[2]
    assert (abandoned[0], abandoned[2]) == (Area.QUEUES, "start one: qsvc worker --model MODEL")
    assert server.sismember(f"{keys.RQ}:workers", keys.rq_worker("w"))  # it only looks


def test_lanes_of_a_batch_count_for_their_queue(server: Redis) -> None:
    for name in ("qsvc:m", keys.lane("qsvc:m", "batch_0a"), keys.lane("qsvc:m", "batch_0b")):
        server.sadd(f"{keys.RQ}:queues", keys.rq_queue(name))
        server.rpush(keys.rq_queue(name), "job")
    _, what, fix = only_fault(server)
    assert "3 jobs wait in qsvc:m" in what
    assert fix.endswith("--alias m")


def test_a_user_who_may_not_look_at_queues_gets_the_rest(server: Redis) -> None:
    server.acl_setuser("app", enabled=True, passwords=["+x"], commands=["+ping", "+time"])
    path = server.connection_pool.connection_kwargs["path"]
    with closing(connect(RedisSettings.load(url=f"unix://app:x@{path}"))) as connection:
        found = examine_server(connection, lease_seconds=LEASE_SECONDS)
    assert [(one.area, one.finding.level) for one in found][-1] == (Area.WORKERS, Level.INFO)
    assert any("may not read INFO" in one.finding.what for one in found)


# The command ------------------------------------------------------------------------------------


def test_all_is_well_without_mlx_and_with_a_good_server(server: Redis, doctor: Doctor) -> None:
    url = f"unix://{server.connection_pool.connection_kwargs['path']}"
    code, report = doctor("--redis", url)
    assert (code, report["ok"], faults_of(report)) == (0, True, [])
    assert set(report["findings"][0]) == {"area", "level", "what", "fix"}
    assert {one["area"] for one in report["findings"]} >= {"redis", "versions", "disk", "device"}


def test_a_model_without_mlx_is_a_fault(server: Redis, doctor: Doctor) -> None:
    url = f"unix://{server.connection_pool.connection_kwargs['path']}"
    code, report = doctor("--redis", url, "--model", "smollm2-135m")
    [fault] = faults_of(report)
    assert (code, fault["area"], fault["fix"]) == (1, "device", "pip install 'qsvc[worker]'")


def test_a_server_that_is_named_and_away_is_a_fault(tmp_path: Path, doctor: Doctor) -> None:
    code, report = doctor("--redis", f"unix://{tmp_path}/nowhere.sock")
    [fault] = faults_of(report)
    assert (code, fault["area"]) == (1, "redis")
    assert "cannot be reached" in fault["what"]
    assert fault["fix"].startswith("start one")


def test_no_server_is_no_fault_where_nobody_named_one(
    monkeypatch: pytest.MonkeyPatch, doctor: Doctor
) -> None:
    nowhere = RedisSettings.model_construct(
        url="unix:///nowhere/at-all.sock",
        connect_timeout_seconds=1.0,
        socket_timeout_seconds=1.0,
        _fields_set=set(),
    )
    monkeypatch.setattr(RedisSettings, "load", lambda **_: nowhere)
    code, report = doctor()
    assert (code, report["ok"]) == (0, True)
    assert "is the default, since none was named" in report["findings"][0]["what"]
    assert "--redis or QSVC_REDIS_URL" in report["findings"][0]["fix"]


def test_a_cache_that_is_no_folder_is_a_fault(
    server: Redis, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QSVC_CACHE_FOLDER", str(tmp_path / "file" / "cache"))
    url = f"unix://{server.connection_pool.connection_kwargs['path']}"
    code, report = doctor("--redis", url)
    [fault] = faults_of(report)
    assert (code, fault["area"]) == (1, "disk")
    assert "QSVC_CACHE_FOLDER" in fault["fix"]


def test_faults_are_told_in_plain_lines_where_no_terminal_is(server: Redis) -> None:
    server.config_set("appendonly", "no")
    url = f"unix://{server.connection_pool.connection_kwargs['path']}"
    done = run_qsvc("doctor", "--redis", url)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("warning redis"))
    assert lines[at + 1].strip() == "-> set appendonly yes"
    assert any(line.startswith("ok      device   MLX runs on") for line in lines)
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (lambda folder: folder / "nowhere", "no such file or folder", "check the name"),
        (lambda folder: "nobody-at-all/no-such-model", "not on this machine", "check the name"),
        (giant, "too large for this machine", "smaller"),
    ],
    ids=["folder that is not there", "unknown name", "too large"],
)
def test_a_model_that_cannot_be_served_is_named(
    server: Redis, tmp_path: Path, make: Callable[[Path], Any], what: str, fix: str
) -> None:
    url = f"unix://{server.connection_pool.connection_kwargs['path']}"
    done = run_qsvc("doctor", "--redis", url, "--model", make(tmp_path), "--json")
    assert done.returncode == 1, done.stderr
    [fault] = faults_of(json.loads(done.stdout))
    assert (fault["area"], fault["level"]) == ("model", "refused")
    assert what in fault["what"]
    assert fix in fault["fix"]


@pytest.mark.model
def test_a_good_model_is_run_and_its_batching_told(server: Redis) -> None:
    url = f"unix://{server.connection_pool.connection_kwargs['path']}"
    done = run_qsvc("doctor", "--redis", url, "--model", "smollm2-135m", "--json", seconds=120)
    assert done.returncode == 0, done.stdout
    found = [one["what"] for one in json.loads(done.stdout)["findings"] if one["area"] == "model"]
    assert "its context has 8,192 tokens" in found[1]
    assert "rows of 8,192 tokens" in found[2]
    assert found[3] == "it runs, and its rows are batched"
