"""What a worker tells Prometheus, beside what its jobs' results say."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis
from rq.job import Job

from queue_service import keys
from queue_service.backlog import Backlog
from queue_service.batch_file import BatchFile
from queue_service.broker import Ending
from queue_service.connection import connect
from queue_service.errors import ConfigurationError
from queue_service.local_server import LocalServer
from queue_service.results import read_job
from queue_service.settings import RedisSettings
from queue_service.submission import SubmitOptions, submit_file
from tests.cli_helpers import chat_lines
from tests.fakes import CONTEXT
from tests.harness import (
    SLOW_STEP_SECONDS,
    answer,
    enqueue_chat,
    eventually,
    make_claimed,
    running_worker,
    worker_settings,
)
from workers.metrics import FIGURES, Metrics
from workers.totals import Totals

HISTOGRAMS = {
    "qsvc_queue_wait_seconds",
    "qsvc_time_to_first_token_seconds",
    "qsvc_time_between_tokens_seconds",
    "qsvc_job_seconds",
    "qsvc_prefill_tokens_per_second",
    "qsvc_decode_tokens_per_second",
}


def scrape(port: int) -> Mapping[str, float]:
    """Return the samples of a worker by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
        text = reply.read().decode()
    return {
        sample.name
        + "".join(f" {value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_the_counters_are_the_sums_of_the_results(redis_url: str, redis: Redis, port: int) -> None:
    texts = ["a", "some words", "some more words of it", "é" * 9]
    jobs = [enqueue_chat(redis, text) for text in texts]
    refused = [enqueue_chat(redis, "x" * CONTEXT) for _ in range(2)]
    settings = worker_settings(redis_url, metrics_port=port)
    with running_worker(settings):
        for job in [*jobs, *refused]:
            eventually(lambda job=job: job.get_status() in ("finished", "failed"), job.id)  # type: ignore[misc]
        seen = scrape(port)
    usages = [usage_of(redis, job) for job in jobs]
    assert [answer(redis, job) for job in jobs] == texts
    assert seen["qsvc_jobs_total finished"] == len(jobs)
    assert seen["qsvc_jobs_total failed"] == len(refused)
    assert seen["qsvc_jobs_total stopped"] == 0
    for counter, field in (("prompt", "prompt_tokens"), ("completion", "completion_tokens")):
        assert seen[f"qsvc_{counter}_tokens_total"] == sum(usage[field] for usage in usages) > 0
    # A refused job waited too, but generated nothing.
    assert seen["qsvc_queue_wait_seconds_count"] == len(jobs) + len(refused)
    assert 0 < seen["qsvc_queue_wait_seconds_sum"] < 60
    for name in ("qsvc_time_to_first_token_seconds", "qsvc_job_seconds"):
        assert seen[f"{name}_count"] == len(jobs)
    assert seen["qsvc_job_seconds_sum"] >= seen["qsvc_time_to_first_token_seconds_sum"] > 0
    assert seen["qsvc_time_between_tokens_seconds_count"] == len(jobs) - 1  # one has one token


def usage_of(redis: Redis, job: Job) -> Mapping[str, int]:
    body = read_job(redis, job.id).body
    assert body is not None
    usage = body["usage"]
    assert isinstance(usage, Mapping)
    return usage


def test_running_rows_show_and_a_lost_lease_is_counted(
    redis_url: str, redis: Redis, port: int
) -> None:
    job = enqueue_chat(redis, "word " * 200)
    with running_worker(
        worker_settings(redis_url, metrics_port=port), step_seconds=SLOW_STEP_SECONDS
    ):
        eventually(lambda: scrape(port)["qsvc_rows"] == 1, "a row runs")
        assert scrape(port)["qsvc_leases_lost_total"] == 0
        job.delete()
        eventually(lambda: scrape(port)["qsvc_leases_lost_total"] == 1, "the lease is lost")
        eventually(lambda: scrape(port)["qsvc_rows"] == 0, "the row has left")
        assert scrape(port)["qsvc_jobs_total finished"] == 0


def test_a_port_that_is_taken_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{number} .*metrics_port"):
            Metrics(dict, {}).serve("127.0.0.1", number)
    with caplog.at_level(logging.INFO):
        chosen = Metrics(dict, {}).serve("127.0.0.1", 0)
    assert f"url=http://127.0.0.1:{chosen}/metrics" in caplog.text
    assert scrape(chosen)["qsvc_jobs_total finished"] == 0


def test_names_keep_to_the_conventions_and_every_total_is_one() -> None:
    metrics = Metrics(lambda: Totals(finished=3).figures(), {"model": "fake"})
    families = list(metrics.registry.collect())
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert set(names) >= HISTOGRAMS
    for family in families:
        assert re.fullmatch(r"qsvc_[a-z_]+[a-z]", family.name), family.name
        assert family.documentation
        assert not family.name.endswith("_total")
    assert {ending.value for ending in Ending} <= {figure.card for figure in FIGURES}
    assert Totals().figures().keys() <= {figure.card for figure in FIGURES}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:00.000000Z", 5.0),
        ("1970-01-01T00:00:04.500000", 0.5),
        ("1970-01-01T00:00:09Z", 0.0),  # clocks of two machines
        ("yesterday", None),
        ("", None),
    ],
)
def test_how_long_a_job_waited(text: str, seconds: float | None) -> None:
    claimed = replace(make_claimed(enqueued_at=text), started_at=5.0)
    assert claimed.waited_seconds == seconds


def test_what_waits_shows_with_the_lines_of_batches_and_not_while_the_server_is_away(
    make_server: Callable[..., LocalServer], port: int, kill_server: Callable[[LocalServer], None]
) -> None:
    server = make_server()
    url = server.start()
    backlog = Backlog(url, [keys.DEFAULT_QUEUE, keys.queue_name("none")])
    Metrics(dict, {}, backlog.num_waiting).serve("127.0.0.1", port)
    with connect(RedisSettings.load(url=url)) as connection:
        assert scrape(port)["qsvc_waiting_jobs"] == 0
        enqueue_chat(connection, "plain")
        enqueue_chat(connection, "elsewhere", queue="qsvc:other")
        submit(connection, 3)
        assert scrape(port)["qsvc_waiting_jobs"] == 4
        kill_server(server)
        seen = scrape(port)
    assert "qsvc_waiting_jobs" not in seen
    assert "qsvc_rows" in seen
    backlog.close()


def submit(connection: Redis, num_lines: int) -> None:
    text = "\n".join(json.dumps(line) for line in chat_lines(num_lines))
    options = SubmitOptions(queue=keys.DEFAULT_QUEUE, model="m")
    submit_file(connection, BatchFile(io.BytesIO(text.encode()), "lines"), options)
