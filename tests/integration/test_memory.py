"""Neither the submitter nor the worker grows with the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis

from queue_service import keys
from tests.cli_helpers import (
    ROOT,
    chat_line,
    num_lines,
    processes,
    start_qsvc,
    wait_until,
    write_lines,
)

NUM_WARM_UP_LINES = 500
NUM_LINES = 10_000
# Holding on to the requests alone would take more than the growth that is allowed.
PROMPT_CHARACTERS = 3500
MOST_GROWTH_KIB = 32 * 1024

# Submits one file after another and writes its results; says what each one cost.
SUBMITTER = """
import json, sys, time
from pathlib import Path
from queue_service.batch_file import open_batch
from queue_service.connection import connect
from queue_service.follow import follow
from queue_service.output import BatchOutput, InputOrder, OutputFile
from queue_service.results import BatchReader
from queue_service.settings import RedisSettings
from queue_service.submission import SubmitOptions, submit_file
from tests.integration.test_memory import memory_kib

connection = connect(RedisSettings.load(url=sys.argv[1]))
options = SubmitOptions(queue="qsvc:fake", model="fake")
for name in sys.argv[2:]:
    started = time.monotonic()
    with open_batch(name) as file:
        batch_id = submit_file(connection, file, options).batch.id
    submitted = time.monotonic()
    output = BatchOutput(
        BatchReader(connection, batch_id),
        InputOrder(connection, batch_id),
        OutputFile(Path(name).with_suffix(".out")),
    )
    output.resume()
    batch = follow(
        connection, batch_id, output, on_update=lambda *_: None, should_stop=lambda: False
    )
    resident_kib, peak_kib = memory_kib("self")
    print(json.dumps({
        "completed": batch.completed,
        "resident_kib": resident_kib,
        "peak_kib": peak_kib,
        "submit_seconds": submitted - started,
        "seconds": time.monotonic() - started,
    }), flush=True)
    sys.stdin.readline()
"""


def memory_kib(process: int | str) -> tuple[int, int]:
    """Resident memory of a process now, and the most it ever had."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmRSS"].split()[0]), int(fields["VmHWM"].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ten_thousand_lines_leave_submitter_and_worker_as_they_were(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    files = []
    for count in (NUM_WARM_UP_LINES, NUM_LINES):
        prompts = (str(i).ljust(PROMPT_CHARACTERS, "x") for i in range(count))
        lines = (chat_line(f"c{i}", text, max_tokens=1) for i, text in enumerate(prompts))
        files.append(write_lines(tmp_path / f"{count}.jsonl", lines))
    submitter = subprocess.Popen(
        [sys.executable, "-c", SUBMITTER, redis_url, *map(str, files)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with start_qsvc("worker", "--model", "fake", "--redis", redis_url) as worker, submitter:
        try:
            wait_until(lambda: redis.exists(keys.model_card("fake")), "a worker")
            [child] = processes("tests.fake_worker", os.environ["QSVC_CACHE_FOLDER"])
            assert submitter.stdin is not None
            assert submitter.stdout is not None
            warm = json.loads(submitter.stdout.readline())
            worker_resident_kib, _ = memory_kib(child)
            submitter.stdin.write("\n")
            submitter.stdin.flush()
            done = json.loads(submitter.stdout.readline())
            _, worker_peak_kib = memory_kib(child)
        finally:
            worker.terminate()
            submitter.terminate()
    assert done["completed"] == num_lines(tmp_path / f"{NUM_LINES}.out") == NUM_LINES
    submitter_growth_kib = done["peak_kib"] - warm["resident_kib"]
    worker_growth_kib = worker_peak_kib - worker_resident_kib
    print(
        f"growth: submitter {submitter_growth_kib} KiB, worker {worker_growth_kib} KiB; "
        f"submit {NUM_LINES / done['submit_seconds']:.0f} lines/s, "
        f"submit and results {NUM_LINES / done['seconds']:.0f} lines/s"
    )
    assert submitter_growth_kib < MOST_GROWTH_KIB
    assert worker_growth_kib < MOST_GROWTH_KIB
