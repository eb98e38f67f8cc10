"""What `qsvc doctor` says of what it was told: each fault with what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from queue_service.connection import Finding, Level
from queue_service.doctor import (
    Area,
    Diagnosis,
    ListedWorker,
    QueueLoad,
    check_clock,
    check_folder,
    check_latency,
    check_queues,
    check_server_memory,
    check_versions,
    check_workers,
)
from queue_service.settings import WorkerSettings
from tests.checkpoints import IDENTITY, keep
from tests.model_shapes import GB, model_shape
from workers.blas import NO_BLAS
from workers.checkpoints.directory import DirectoryStore
from workers.doctor import check_blas, check_checkpoints, check_size, examine_model

OURS = ListedWorker("ours", ("qsvc:m:high", "qsvc:m"), beat_at=1000.0)
STOCK = ListedWorker("stock", ("mail",), beat_at=1000.0)


@dataclass(frozen=True)
class Disk:
    total: int
    free: int


def is_fault(finding: Finding, what: str, fix: str, level: Level = Level.WARNING) -> bool:
    return finding.level is level and what in finding.what and fix in (finding.fix or "")


def one(findings: list[Finding]) -> Finding:
    [finding] = findings
    return finding


# Server ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "way"), [(120.0, "ahead of"), (-120.0, "behind")])
def test_a_wrong_clock_is_named_with_its_way_and_how_to_set_it(offset: float, way: str) -> None:
    assert is_fault(check_clock(offset), f"120 s {way} the server's", "timedatectl")


def test_a_clock_that_is_a_second_off_is_right() -> None:
    assert check_clock(1.0).level is Level.INFO


def test_a_slow_round_trip_is_named() -> None:
    assert is_fault(check_latency(0.08), "80.0 ms", "nearer")
    assert check_latency(0.001).level is Level.INFO


@pytest.mark.parametrize(
    ("info", "what"),
    [
        ({"used_memory": 95, "maxmemory": 100}, "95% of maxmemory"),
        ({"used_memory": 95, "maxmemory": 0, "total_system_memory": 100}, "its machine's memory"),
    ],
)
def test_a_server_that_is_nearly_full_is_named(info: Mapping[str, int], what: str) -> None:
    assert is_fault(one(check_server_memory(info)), what, "qsvc delete")


def test_a_server_with_room_is_all_right() -> None:
    assert one(check_server_memory({"used_memory": 5, "maxmemory": 100})).level is Level.INFO


def test_a_server_that_cannot_write_to_its_disk_is_named() -> None:
    info = {"used_memory": 5, "maxmemory": 100, "aof_last_write_status": "err"}
    _, fault = check_server_memory(info)
    assert is_fault(fault, "append-only file", "free its disk", Level.REFUSED)


# Workers and queues ------------------------------------------------------------------------------


def test_one_of_ours_lives_for_its_lease_and_a_stock_worker_for_minutes() -> None:
    assert OURS.is_alive(1010.0, 10)
    assert not OURS.is_alive(1010.1, 10)
    assert STOCK.is_alive(1400.0, 10)
    assert not STOCK.is_alive(1500.0, 10)


def test_a_worker_that_is_listed_only_is_named() -> None:
    gone = ListedWorker("gone")
    live, stale, expired = check_workers([OURS, STOCK, gone], [STOCK], now=1060.0)
    assert live == Finding(Level.INFO, "1 live: stock")
    assert is_fault(stale, "ours is listed and does not live: its last heartbeat was 60 s", "log")
    assert is_fault(expired, "gone is listed and does not live", "rq info")


def test_suspended_workers_are_named() -> None:
    suspended, _ = check_workers([], [], now=0.0, is_suspended=True)
    assert is_fault(suspended, "suspended", "rq resume")


@pytest.mark.parametrize(
    ("queue", "command"),
    [
        ("qsvc:default", "qsvc worker --model MODEL"),
        ("qsvc:tiny", "qsvc worker --model MODEL --alias tiny"),
        ("qsvc:tiny:low", "qsvc worker --model MODEL --alias tiny"),
        ("qsvc:a:b", "qsvc worker --model MODEL --queue qsvc:a:b"),
    ],
)
def test_jobs_that_no_worker_will_take_are_named_with_the_command_of_one(
    queue: str, command: str
) -> None:
    finding = one(check_queues({queue: QueueLoad(3, 2)}, [OURS]))
    assert is_fault(finding, f"3 jobs wait in {queue} and 2 were left", f"start one: {command}")
    assert (finding.fix or "").endswith(command)
    assert (
        "1 job waits in qsvc:m and 1 was left"
        in one(check_queues({"qsvc:m": QueueLoad(1, 1)}, [])).what
    )


def test_jobs_in_a_queue_that_is_an_applications_own_are_no_fault() -> None:
    finding = one(check_queues({"reports": QueueLoad(1)}, [OURS]))
    what = "1 job waits in reports, which is none of qsvc's queues"
    assert is_fault(finding, what, "a stock rq worker", Level.INFO)
    assert (finding.fix or "").endswith("qsvc worker --model MODEL --queue reports")


def test_queues_that_are_served_or_empty_are_all_right() -> None:
    finding = one(check_queues({"qsvc:m": QueueLoad(3), "qsvc:other": QueueLoad()}, [OURS]))
    assert finding.level is Level.INFO


# Versions ---------------------------------------------------------------------------------------


REQUIREMENTS = (
    "rq<3.1,>=3.0",
    "redis[hiredis]<9,>=6.4",
    f"mlx<0.33,>=0.32.4; (sys_platform == '{sys.platform}') and extra == 'worker'",
    "mlx<0.33,>=0.99; (sys_platform == 'plan9') and extra == 'worker'",
    "ruff>=99; extra == 'dev'",
)


def versions(**installed: str) -> list[Finding]:
    return check_versions(REQUIREMENTS, ">=3.11", installed=installed.get)


def test_versions_within_the_tested_ranges_are_told() -> None:
    told = one(versions(rq="3.0.4", redis="8.1.0", mlx="0.32.4", ruff="0.8"))
    assert told.level is Level.INFO
    assert "redis 8.1.0, rq 3.0.4, mlx 0.32.4" in told.what


@pytest.mark.parametrize(
    ("name", "version", "ranges"),
    [
        ("rq", "3.1.0", "<3.1,>=3.0"),
        ("rq", "2.9.9", "<3.1,>=3.0"),
        ("redis", "9.0.0b1", "<9,>=6.4"),
        ("mlx", "0.33.0", "<0.33,>=0.32.4"),
    ],
)
def test_a_version_outside_is_named_with_the_range(name: str, version: str, ranges: str) -> None:
    _, fault = versions(**{name: version})
    assert is_fault(fault, f"{name} {version}", f"pip install '{name}{ranges}'")


def test_a_python_that_is_too_old_is_named() -> None:
    _, fault = check_versions([], ">=4.0", installed=lambda _: None)
    assert is_fault(fault, "python", "another Python")


# Disk -------------------------------------------------------------------------------------------


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "made" / "yet"
    full = one(check_folder(folder, "QSVC_X", volume=lambda _: Disk(100 * GB, GB // 10)))
    assert is_fault(full, "the disk is full", "QSVC_X", Level.REFUSED)
    low = one(check_folder(folder, "QSVC_X", volume=lambda _: Disk(100 * GB, 9 * GB)))
    assert is_fault(low, "no checkpoints are stored", "QSVC_X")
    free = one(check_folder(folder, "QSVC_X", volume=lambda _: Disk(100 * GB, 50 * GB)))
    assert free.level is Level.INFO
    assert not folder.parent.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    fault = one(check_folder(file / "folder", "QSVC_X"))
    assert is_fault(fault, "cannot be used: Not a directory", "QSVC_X", Level.REFUSED)


def test_no_checkpoints_are_no_fault(tmp_path: Path) -> None:
    assert one(check_checkpoints(tmp_path)).level is Level.INFO


def test_checkpoints_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "v1").touch()
    fault = one(check_checkpoints(tmp_path))
    assert is_fault(fault, "cannot be read", "QSVC_CHECKPOINTS_FOLDER", Level.REFUSED)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    keep(DirectoryStore(tmp_path, IDENTITY, GB), range(700))
    assert one(check_checkpoints(tmp_path)).level is Level.INFO
    damaged = min(tmp_path.glob("v1/*/*.qkv"))
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    fault, _ = check_checkpoints(tmp_path)
    assert is_fault(fault, f"1 checkpoints in {tmp_path} are damaged", "qsvc cache verify --remove")


# Device and model -------------------------------------------------------------------------------


def test_a_missing_blas_is_named_with_what_to_install() -> None:
    assert is_fault(check_blas(NO_BLAS), "no usable OpenBLAS", "pip install ngsolve-openblas")
    assert check_blas("BLAS: /usr/lib/libopenblas.so.0, 1 threads").level is Level.INFO
    assert check_blas(None).level is Level.INFO


def test_a_model_that_is_too_large_is_named() -> None:
    fault = check_size(model_shape(weight_bytes=20 * GB), 16 * GB)
    assert is_fault(fault, "too large for this machine", "smaller", Level.REFUSED)


def test_what_fits_is_told_in_rows_and_tokens() -> None:
    told = check_size(model_shape(), 16 * GB)
    assert told.level is Level.INFO
    assert "95 rows of 1,024 tokens, or 23 rows of 4,096 tokens, or 11 rows of 8,192" in told.what


def test_a_context_that_does_not_fit_whole_is_told() -> None:
    told = check_size(model_shape(context_length=131_072), 16 * GB)
    assert (told.level, "of its 131,072" in told.what) == (Level.INFO, True)
    assert "--kv-memory" in (told.fix or "")


def examined(program: str, **options: Any) -> list[Diagnosis]:
    return examine_model(WorkerSettings.load(), command=(sys.executable, "-c", program), **options)


TELLS_ONE = (
    "import json, os; print(json.dumps({'area': 'model', 'level': 'info', 'what': 'first', "
    "'fix': None}), flush=True);"
)


def test_a_model_that_kills_its_process_is_named_beside_what_was_found_before() -> None:
    first, fault = examined(
        f"{TELLS_ONE} print('no memory', file=__import__('sys').stderr); os.kill(os.getpid(), 9)"
    )
    assert first.finding == Finding(Level.INFO, "first")
    assert (fault.area, fault.is_wrong) == (Area.MODEL, True)
    assert is_fault(fault.finding, "was ended by SIGKILL (no memory)", "smaller", Level.REFUSED)


def test_a_model_that_hangs_is_named() -> None:
    first, fault = examined(f"{TELLS_ONE} import signal; signal.pause()", limit_seconds=1.0)
    assert not first.is_wrong
    assert is_fault(fault.finding, "took more than 1 s", "smaller", Level.REFUSED)


def test_a_line_that_was_cut_is_left_out() -> None:
    [first, fault] = examined(f"{TELLS_ONE} print('{{', end='', flush=True); os._exit(3)")
    assert (first.finding.what, "ended with code 3" in fault.finding.what) == ("first", True)
