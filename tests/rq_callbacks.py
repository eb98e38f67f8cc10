"""Callbacks that test workers allow; each notes in Redis that it ran, and in which process."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from redis import Redis
from rq.job import Job

NOTES = "test:callbacks"


def note_success(job: Job, connection: Redis, result: Any) -> None:
    _note(job, connection, "success", result)


def note_failure(job: Job, connection: Redis, kind: Any, error: Any, traceback: Any) -> None:
    _note(job, connection, "failure", str(error))


def note_stopped(job: Job, connection: Redis) -> None:
    _note(job, connection, "stopped", None)


def hang(job: Job, connection: Redis, *_: Any) -> None:
    _note(job, connection, "hanging", None)
    time.sleep(600)


def fail(job: Job, connection: Redis, *_: Any) -> None:
    raise ValueError("the callback is broken")


def _note(job: Job, connection: Redis, event: str, detail: Any) -> None:
    note = {"job": job.id, "event": event, "detail": detail, "pid": os.getpid(), "meta": job.meta}
    connection.rpush(NOTES, json.dumps(note))
