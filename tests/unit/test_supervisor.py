"""The supervisor with children of a few lines, and no server."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from queue_service.errors import ConfigurationError, ModelUnavailable, QsvcError
from tests.harness import SupervisedWorker, eventually, supervised_worker, worker_settings
from workers.child_settings import ChildSettings
from workers.exits import EXIT_CONFIGURATION, EXIT_FAILED
from workers.supervisor import default_worker_name, device_slot_lock

# A child reports, like the real one, in JSON lines, and ends when its standard input does.
PREAMBLE = """
import json, pathlib, signal, sys, time
def report(event, **fields): print(json.dumps({"event": event, **fields}), flush=True)
settings = json.loads(sys.stdin.readline())
"""
WAIT_FOR_SIGTERM = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
report("ready")
while True: signal.pause()
"""


@pytest.fixture
def settings(tmp_path: Path) -> ChildSettings:
    """Settings with the address of a server that is not there."""
    return worker_settings(f"unix://{tmp_path}/nothing.sock", name="w1", engine_stall_seconds=0.6)


def child(program: str) -> Sequence[str]:
    return (sys.executable, "-S", "-c", PREAMBLE + program)


def reports(supervised: SupervisedWorker, event: str) -> int:
    return sum(seen["event"] == event for seen in supervised.events)


def test_a_child_is_told_its_settings_on_standard_input(settings: ChildSettings) -> None:
    with supervised_worker(settings, command=child('report("told", **settings)')) as supervised:
        supervised.join()
    [told] = supervised.events
    assert (told["name"], told["redis"]["url"]) == ("w1", settings.redis.url)
    assert ChildSettings.from_json(settings.to_json()) == settings


def test_a_child_that_ends_in_good_order_is_not_started_again(settings: ChildSettings) -> None:
    with supervised_worker(settings, command=child('report("ready")')) as supervised:
        supervised.join()
        assert supervised.failure is None
    assert supervised.num_starts == 1


def test_a_child_that_dies_is_started_again_even_while_the_server_is_away(
    settings: ChildSettings, tmp_path: Path
) -> None:
    died = tmp_path / "died"
    program = f"""
report("ready")
if not pathlib.Path({str(died)!r}).exists():
    pathlib.Path({str(died)!r}).touch()
    sys.exit({EXIT_FAILED})
"""
    with supervised_worker(settings, command=child(program)) as supervised:
        supervised.join()
        assert supervised.failure is None
    assert supervised.num_starts == 2


@pytest.mark.parametrize("kind", [ModelUnavailable, ConfigurationError])
def test_a_child_that_cannot_work_with_its_settings_ends_the_supervisor(
    settings: ChildSettings, kind: type[QsvcError]
) -> None:
    program = f"""
report("fatal", message="no such thing", kind={kind.__name__!r})
sys.exit({EXIT_CONFIGURATION})
"""
    with supervised_worker(settings, command=child(program)) as supervised:
        supervised.join()
    assert type(supervised.failure) is kind
    assert str(supervised.failure) == "no such thing"


def test_stopping_lets_the_child_end_in_good_order(settings: ChildSettings) -> None:
    with supervised_worker(settings, command=child(WAIT_FOR_SIGTERM)) as supervised:
        eventually(lambda: supervised.num_starts, "the child")
        supervised.supervisor.stop()
        supervised.join()
    assert supervised.failure is None
    assert supervised.num_starts == 1


def test_every_request_to_stop_reaches_the_child(settings: ChildSettings) -> None:
    program = """
asked = []
def handle(*_):
    asked.append(1)
    report("asked")
    if len(asked) == 2: sys.exit(0)
signal.signal(signal.SIGTERM, handle)
report("ready")
while True: signal.pause()
"""
    with supervised_worker(settings, command=child(program)) as supervised:
        eventually(lambda: supervised.num_starts, "the child")
        supervised.supervisor.stop()
        eventually(lambda: reports(supervised, "asked") == 1, "the first request")
        assert supervised.is_running
        supervised.supervisor.stop()
        supervised.join()
    assert reports(supervised, "asked") == 2


def test_a_stop_between_two_children_starts_none(settings: ChildSettings) -> None:
    program = f'report("ready"); sys.exit({EXIT_FAILED})'
    with supervised_worker(settings, command=child(program)) as supervised:
        eventually(lambda: supervised.num_starts == 2, "the second child")
        supervised.supervisor.stop()
        supervised.join()
    assert supervised.num_starts == 2


def test_an_engine_that_makes_no_progress_is_killed(
    settings: ChildSettings, tmp_path: Path
) -> None:
    hung = tmp_path / "hung"
    program = f"""
report("ready")
if not pathlib.Path({str(hung)!r}).exists():
    pathlib.Path({str(hung)!r}).touch()
    while True:
        report("progress", running=1, steps=5)
        time.sleep(0.05)
"""
    with supervised_worker(settings, command=child(program)) as supervised:
        supervised.join()
    assert supervised.num_starts == 2


def test_an_idle_or_a_working_engine_is_left_alone(settings: ChildSettings) -> None:
    program = """
report("ready")
for i in range(40):
    report("progress", running=0, steps=5)
    time.sleep(0.02)
for i in range(40):
    report("progress", running=1, steps=6 + i)
    time.sleep(0.02)
"""
    with supervised_worker(settings, command=child(program)) as supervised:
        supervised.join()
    assert supervised.num_starts == 1


@pytest.mark.parametrize("line", ["a library says hello", "42", '{"loss": 0.5}'])
def test_a_line_that_is_no_report_is_logged(
    settings: ChildSettings, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    program = f'print({line!r}, flush=True); report("ready")'
    with supervised_worker(settings, command=child(program)) as supervised:
        supervised.join()
    assert supervised.num_starts == 1
    assert f"worker said: {line}" in caplog.text


def test_a_second_worker_on_a_device_slot_is_refused_with_the_holders_pid(tmp_path: Path) -> None:
    with (
        device_slot_lock(tmp_path, "cpu:0"),
        device_slot_lock(tmp_path, "cpu:1"),
        pytest.raises(ConfigurationError, match=r"pid \d+\).*cpu:0"),
        device_slot_lock(tmp_path, "cpu:0"),
    ):
        pass
    with device_slot_lock(tmp_path, "cpu:0"):
        pass


def test_a_workers_default_name_is_one_that_rq_can_use() -> None:
    name = default_worker_name("smollm2-135m", "cpu:0")
    assert name.endswith("-smollm2-135m-cpu0")
    assert ":" not in json.dumps(name)


def test_a_child_that_said_why_it_cannot_work_is_believed_however_it_ends(
    settings: ChildSettings,
) -> None:
    program = """
import os
report("fatal", message="no such model", kind="ModelUnavailable")
os.abort()
"""
    with supervised_worker(settings, command=child(program)) as supervised:
        supervised.join()
    assert isinstance(supervised.failure, ModelUnavailable)
    assert supervised.num_starts <= 1


def test_a_child_that_will_be_replaced_is_told_as_died(settings: ChildSettings) -> None:
    with supervised_worker(settings, command=child("report('ready'); sys.exit(9)")) as worker:
        died = {"event": "died", "exit": 9}
        eventually(lambda: died in worker.events, "the death")


def test_settings_reach_the_child_as_they_are(settings: ChildSettings) -> None:
    assert not settings.tells_jobs
    told = dataclasses.replace(settings, burst=True, begun_file=7, tells_jobs=True)
    assert ChildSettings.from_json(told.to_json()) == told
