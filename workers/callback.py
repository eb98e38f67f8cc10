"""Runs one callback in a process of its own: ``python -m workers.callback``, request on stdin."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import redis

from queue_service.errors import QsvcError
from queue_service.results import read_job
from queue_service.rqcompat import SafeJob


class JobFailed(QsvcError):
    """Given to a failure callback as the job's exception: how the job failed."""


def run(request: dict[str, Any]) -> None:
    """Call the function that the worker's own settings name, as RQ would call it."""
    module, _, name = request["name"].rpartition(".")
    function = getattr(importlib.import_module(module), name)
    with redis.Redis.from_url(request["redis_url"]) as connection:
        job = SafeJob.fetch(request["job_id"], connection=connection)
        result = read_job(connection, request["job_id"])
        if request["kind"] == "finished":
            function(job, connection, result.body)
        elif request["kind"] == "failed":
            message = str((result.error or {}).get("message", "the job failed"))
            function(job, connection, JobFailed, JobFailed(message), None)
        else:
            function(job, connection)


if __name__ == "__main__":
    run(json.loads(sys.stdin.read()))
