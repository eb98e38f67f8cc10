"""A worker child with the fake engine: ``python -m tests.fake_worker``."""

from __future__ import annotations

import os
import sys

from tests.fakes import FakeEngine, FakeTokenizer, fake_info, fake_parts
from workers.child import ServedModel, run_child
from workers.child_settings import ChildSettings


def load(settings: ChildSettings) -> ServedModel:
    engine = FakeEngine(
        max_rows=settings.worker.slots,
        step_seconds=float(os.environ.get("FAKE_STEP_SECONDS", "0")),
    )
    return ServedModel(
        parts=fake_parts(engine),
        encoder=FakeTokenizer(),
        info=fake_info(settings.worker.model or "fake"),
        versions="fake",
    )


if __name__ == "__main__":
    sys.exit(run_child(load))
