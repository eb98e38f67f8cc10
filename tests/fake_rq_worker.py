"""A worker for RQ's command line with the fake engine: ``rq worker -w tests.fake_rq_worker.…``."""

from __future__ import annotations

from tests import fake_worker
from workers.rq_cli import QsvcWorker


class FakeQsvcWorker(QsvcWorker):
    load_model = staticmethod(fake_worker.load)
