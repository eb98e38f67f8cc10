"""Fixtures of the chaos tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from queue_service.local_server import LocalServer
from tests.chaos.rig import Report, Rig
from tests.harness import child_environment


@pytest.fixture(scope="session")
def report() -> Report:
    """Takes a line for each test; its path is read before a test's environment is isolated."""
    name = os.environ.get("QSVC_CHAOS_REPORT")
    return Report(Path(name) if name else None)


@pytest.fixture
def rig(
    report: Report,
    make_server: Callable[..., LocalServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Rig]:
    """A server of the test's own, and everything that a chaos test does with it."""
    for name, value in child_environment().items():
        monkeypatch.setenv(name, value)
    rig = Rig(make_server(), tmp_path, report)
    yield rig
    rig.close()
