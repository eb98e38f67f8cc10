"""`qsvc trace` on what a whole worker with the fake engine left of real jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from redis import Redis

from queue_service import keys
from queue_service.trace import Phase, read_traces
from tests.cli_helpers import chat_line, run_qsvc, write_lines
from tests.harness import enqueue_chat, eventually, running_worker, worker_settings


def submit(tmp_path: Path, url: str, *options: str) -> str:
    lines = [chat_line(f"line {n}", f"some words {n}", max_tokens=20) for n in range(3)]
    file = write_lines(tmp_path / "in.jsonl", lines)
    done = run_qsvc("submit", file, "--alias", "fake", "--redis", url, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_traced_batch_can_be_looked_at_line_by_line(
    tmp_path: Path, redis: Redis, redis_url: str
) -> None:
    batch_id = submit(tmp_path, redis_url, "--trace", "--stream")
    with running_worker(worker_settings(redis_url), step_seconds=0.002):
        job_ids = [f"{batch_id}-{line}" for line in (1, 2, 3)]
        eventually(lambda: all(read_traces(redis, job_id) for job_id in job_ids), "three traces")
    [trace] = read_traces(redis, job_ids[0])
    seen = [event.phase for event in trace.events]
    expected = {*Phase} - {Phase.CACHE_RESTORE}
    assert expected <= {Phase(phase) for phase in seen}
    assert trace.outcome == "finished"
    assert all(0 <= event.start_ms <= event.end_ms <= trace.total_ms + 1 for event in trace.events)
    # Steps that served several lines have one number in all of their traces.
    works = [
        {
            e.attributes["work"]
            for e in read_traces(redis, job_id)[0].events
            if "work" in e.attributes
        }
        for job_id in job_ids
    ]
    assert works[0] & works[1] & works[2]

    shown = run_qsvc("trace", *job_ids, "--redis", redis_url)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("queue.wait") == 3
    chrome = tmp_path / "trace.json"
    written = run_qsvc("trace", *job_ids, "--chrome", str(chrome), "--redis", redis_url)
    assert written.returncode == 0, written.stderr
    events = json.loads(chrome.read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {1, 2, 3}
    whole = run_qsvc("trace", batch_id, "--redis", redis_url)
    assert whole.stdout == shown.stdout
    as_json = run_qsvc("trace", job_ids[0], "--json", "--redis", redis_url)
    assert json.loads(as_json.stdout)["job_id"] == job_ids[0]

    deleted = run_qsvc("delete", batch_id, "--yes", "--redis", redis_url)
    assert deleted.returncode == 0, deleted.stderr
    assert not redis.exists(keys.trace(job_ids[0]))


def test_nothing_is_traced_unless_somebody_asks(
    tmp_path: Path, redis: Redis, redis_url: str
) -> None:
    batch_id = submit(tmp_path, redis_url)
    with running_worker(worker_settings(redis_url)):
        job = enqueue_chat(redis, "a plain job")
        eventually(lambda: job.get_status() == "finished", "the plain job's end")
    assert not read_traces(redis, f"{batch_id}-1")
    missing = run_qsvc("trace", f"{batch_id}-1", "--redis", redis_url)
    assert missing.returncode == 4
    assert "--trace" in missing.stderr
    assert "worker.trace_every" in missing.stderr


@pytest.mark.parametrize(("text", "outcome"), [("words", "finished"), ("lost words", "retried")])
def test_a_worker_may_trace_all(redis: Redis, redis_url: str, text: str, outcome: str) -> None:
    job = enqueue_chat(redis, text)
    with running_worker(worker_settings(redis_url, trace_every=1)):
        eventually(lambda: read_traces(redis, job.id), "a trace")
    assert read_traces(redis, job.id)[0].outcome == outcome
