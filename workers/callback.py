"""Runs one callback in a process of its own: ``python -m workers.callback``, request on stdin."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from queue_service.broker import Ending
from queue_service.connection import open_url
from queue_service.errors import QsvcError
from queue_service.results import read_execution
from queue_service.rqcompat import SafeJob


class JobFailed(QsvcError):
    """Given to a failure callback as the job's exception: how the job failed."""


def run(request: dict[str, Any]) -> None:
    """Call the function that the worker's own settings name, as RQ would call it."""
    module, _, name = request["name"].rpartition(".")
    function = getattr(importlib.import_module(module), name)
    with open_url(request["redis_url"]) as connection:
        job = SafeJob.fetch(request["job_id"], connection=connection)
        body, error = read_execution(connection, job.id, request["execution_id"])
        if request["ending"] == Ending.FINISHED:
            function(job, connection, body)
        elif request["ending"] == Ending.FAILED:
            message = str((error or {}).get("message", "the job failed"))
            function(job, connection, JobFailed, JobFailed(message), None)
        else:
            function(job, connection)


if __name__ == "__main__":
    run(json.loads(sys.stdin.read()))
