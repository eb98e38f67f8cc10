"""Whether this container does its work; exit code 0 says yes. Run by Docker.

Without an argument it asks for the worker: its child answers, so the model is loaded, and the
Redis server has heard of it within its lease. With an argument it asks whether anything answers
at that URL, if only with a demand for a password.
"""

from __future__ import annotations

import contextlib
import sys
import urllib.error
import urllib.request
from datetime import datetime

from prometheus_client.parser import text_string_to_metric_families

from queue_service import keys
from queue_service.connection import connect
from queue_service.errors import QsvcError
from queue_service.settings import RedisSettings, WorkerSettings

_TIMEOUT_SECONDS = 5


def main() -> None:
    """Exit with 0 or with what is wrong."""
    problem = _ask_page(sys.argv[1]) if sys.argv[1:] else _ask_worker()
    sys.exit(problem)


def _ask_page(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return None if error.code == 401 else f"{url} answers {error.code}"
    except OSError as error:
        return f"{url} does not answer: {error}"


def _ask_worker() -> str | None:
    settings = WorkerSettings.load()
    url = f"http://127.0.0.1:{settings.metrics_port}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            text = answer.read().decode()
    except OSError as error:
        return f"the worker's child does not answer, or loads its model still: {error}"
    [name] = [
        sample.labels["name"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "qsvc_worker_info"
    ]
    try:
        with contextlib.closing(connect(RedisSettings.load())) as connection:
            beat = connection.hget(keys.rq_worker(name), "last_heartbeat")
            seconds, _ = connection.time()
    except QsvcError as error:
        return str(error)
    if beat is None:
        return f"the server does not know the worker {name}"
    age_seconds = seconds - datetime.fromisoformat(beat.decode()).timestamp()
    if age_seconds > settings.lease_seconds:
        return f"the last heartbeat of {name} was {age_seconds:.0f} s ago"
    return None


if __name__ == "__main__":
    main()
