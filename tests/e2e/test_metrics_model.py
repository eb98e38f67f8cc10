"""What a worker with the real model tells Prometheus is what its results file adds up to."""

from __future__ import annotations

import os
import signal
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cli_helpers import (
    QSVC,
    chat_line,
    read_output,
    run_qsvc,
    start_qsvc,
    wait_until,
    write_lines,
)

pytestmark = [pytest.mark.model, pytest.mark.slow]

NOTES = " ".join(f"Item {n} is in box {n * 7 % 31}." for n in range(40))
# Files to try instead of the built-in one, separated by spaces.
FILES = os.environ.get("QSVC_METRICS_FILES", "").split()


def counters(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return {
            sample.name + "".join(sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


def is_served(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.timeout(900)
def test_counters_are_the_sums_of_the_results_file(tmp_path: Path, redis_url: str) -> None:
    lines = [
        chat_line(f"plain {n}", f"Say {n} in words.", max_tokens=6, temperature=0) for n in range(4)
    ] + [
        chat_line(f"shared {n}", f"{NOTES} Where is item {n}?", max_tokens=6, temperature=0)
        for n in range(4)
    ]
    bad = {"custom_id": "bad", "method": "POST", "url": "/v1/chat/completions", "body": {}}
    files = [Path(file) for file in FILES] or [write_lines(tmp_path / "in.jsonl", [*lines, bad])]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = ("worker", "--model", "smollm2-135m", "--alias", "m", "--redis", redis_url)
    with start_qsvc(*command, "--metrics-port", str(port), program=QSVC) as worker:
        wait_until(lambda: is_served(port), "metrics are served", seconds=120)
        answers = []
        for number, file in enumerate(files):
            done = run_qsvc("submit", file, "--alias", "m", "--redis", redis_url)
            assert done.returncode == 0, done.stderr
            out = tmp_path / f"{number}.jsonl"
            batch_id = done.stdout.strip()
            run_qsvc("results", batch_id, "-o", out, "--follow", "--redis", redis_url, seconds=600)
            answers += read_output(out)
        seen = counters(port)
        worker.send_signal(signal.SIGTERM)
        worker.wait(60)
    bodies = [line["response"]["body"] for line in answers if line["error"] is None]
    usages = [body["usage"] for body in bodies]
    assert seen["qsvc_jobs_totalfinished"] == len(bodies) > 0
    for name in ("prompt_tokens", "completion_tokens"):
        assert seen[f"qsvc_{name}_total"] == sum(usage[name] for usage in usages) > 0
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert seen["qsvc_cached_prompt_tokens_total"] == cached
    assert seen["qsvc_job_seconds_count"] == len(bodies)
    if not FILES:
        assert cached > 0
        assert len(answers) == len(bodies) + 1  # a line that is refused was never a job
        assert seen["qsvc_jobs_totalfailed"] == 0
