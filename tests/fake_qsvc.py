"""The qsvc command with the fake engine in its workers: ``python -m tests.fake_qsvc run …``."""

from __future__ import annotations

import functools
import os
import sys

import workers.bench
import workers.local_run
import workers.supervisor
from cli.main import main


def fake_child() -> tuple[str, ...]:
    """The worker child's program; the folder is there to be found in the list of processes."""
    return (sys.executable, "-m", "tests.fake_worker", os.environ["QSVC_CACHE_FOLDER"])


if __name__ == "__main__":
    # The commands look these up when they run.
    run = functools.partial(workers.local_run.LocalRun, child=fake_child())
    supervisor = functools.partial(workers.supervisor.Supervisor, command=fake_child())
    look = (sys.executable, "-m", "tests.fake_look")
    bench = functools.partial(workers.bench.Bench, child=fake_child(), look_program=look)
    workers.bench.Bench = bench  # type: ignore[assignment, misc]
    workers.local_run.LocalRun = run  # type: ignore[assignment, misc]
    workers.supervisor.Supervisor = supervisor  # type: ignore[assignment, misc]
    main()
