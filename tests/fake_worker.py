"""A worker child with the fake engine: ``python -m tests.fake_worker``."""

from __future__ import annotations

import os
import sys

from queue_service.settings import WorkerSettings
from tests.fakes import FakeEngine, FakeTokenizer, fake_info, fake_parts
from workers.child import ServedModel, run_child


def load(settings: WorkerSettings) -> ServedModel:
    engine = FakeEngine(
        max_rows=settings.slots,
        step_seconds=float(os.environ.get("FAKE_STEP_SECONDS", "0")),
    )
    return ServedModel(
        parts=fake_parts(engine),
        encoder=FakeTokenizer(),
        info=fake_info(settings.model or "fake"),
        versions="fake",
    )


if __name__ == "__main__":
    sys.exit(run_child(load))
