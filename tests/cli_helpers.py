"""Helpers for tests of the client side: batch files, the qsvc command, jobs answered by hand."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from redis import Redis

from queue_service import keys
from queue_service.broker import Broker, Claimed, Ending, Outcome, Publication
from queue_service.connection import connect
from queue_service.local_server import LocalServer
from queue_service.payload import Encoding, decode_call, encode_value
from queue_service.requests import Endpoint
from queue_service.responses import Choice, FinishReason, Usage, completion_body
from queue_service.settings import RedisSettings

ROOT = Path(__file__).resolve().parents[1]
QSVC = (str(Path(sys.executable).with_name("qsvc")),)
FAKE_QSVC = (sys.executable, "-m", "tests.fake_qsvc")
KEEP_SECONDS = 3600

_T = TypeVar("_T")


# Files --------------------------------------------------------------------------------------


def chat_line(custom_id: str, content: str, **fields: Any) -> dict[str, Any]:
    """One line of a batch file; the fields are added to its body."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": content}], **fields},
    }


def chat_lines(count: int, *, start: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """Lines with the ids c1, c2 … and the prompts ``prompt 1``, ``prompt 2`` …"""
    return [chat_line(f"c{i}", f"prompt {i}", **fields) for i in range(start, start + count)]


def write_lines(path: Path, lines: Iterable[Mapping[str, Any] | str]) -> Path:
    """Write a batch file; a string is a line as it is."""
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
    return path


def read_output(path: Path) -> list[dict[str, Any]]:
    """The objects of an output file: strict UTF-8, one JSON object a line, every line ended."""
    raw = path.read_bytes()
    assert raw.endswith(b"\n") or not raw
    lines = [json.loads(line.decode("utf-8", "strict")) for line in raw.split(b"\n")[:-1]]
    assert all(isinstance(line, dict) for line in lines)
    return lines


def num_lines(path: Path) -> int:
    """The whole lines of a file that may be written to just now; 0 when it is not there."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def custom_ids_of(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in lines]


def content_of(line: Mapping[str, Any]) -> str:
    """The answer in an output line."""
    content = line["response"]["body"]["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


# Commands and processes -----------------------------------------------------------------------


def run_qsvc(
    *args: str | Path,
    program: Sequence[str] = QSVC,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    seconds: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Run the qsvc command to its end."""
    done = subprocess.run(
        [*program, *map(str, args)],
        cwd=ROOT,
        input=stdin,
        env={**os.environ, **(env or {})},
        capture_output=True,
        timeout=seconds,
        check=False,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def start_qsvc(
    *args: str | Path,
    program: Sequence[str] = FAKE_QSVC,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start the qsvc command at the head of a process group of its own."""
    return subprocess.Popen(
        [*program, *map(str, args)],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until(condition: Callable[[], _T], what: str, *, seconds: float = 30) -> _T:
    """Poll until a condition holds, and return its value; fails with ``what`` after the limit."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)
    return value


def run_servers(cache_folder: Path) -> list[LocalServer]:
    """The embedded servers of the runs that keep their state in a cache folder."""
    return [LocalServer(folder) for folder in cache_folder.glob("runs/*/server")]


def attempts(cache_folder: Path) -> dict[int, int]:
    """How often each line of the only run was claimed, from the run's own server."""
    [server] = run_servers(cache_folder)
    found = {}
    with contextlib.closing(connect(RedisSettings.load(url=server.start()))) as connection:
        for key in connection.scan_iter(keys.rq_job("batch_*")):
            line = int(key.decode().rsplit("-", 1)[1])
            found[line] = int(connection.hget(key, "qsvc_attempt") or 0)
    server.stop()
    return found


def processes(*words: str) -> list[int]:
    """Ids of living processes whose command line holds all of these."""
    listed = subprocess.run(
        ["ps", "-Aww", "-o", "pid=", "-o", "stat=", "-o", "command="],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [row for line in listed.stdout.splitlines() if len(row := line.split(None, 2)) == 3]
    return [
        int(pid)
        for pid, state, command in rows
        if not state.startswith("Z") and all(word in command for word in words)
    ]


def left_behind(cache_folder: Path) -> list[str]:
    """Workers with the fake engine and servers of a cache folder's runs that still live."""
    workers = [f"worker {pid}" for pid in processes(str(cache_folder))]
    return workers + [f"server {s.pid}" for s in run_servers(cache_folder) if s.is_running]


def assert_nothing_left_behind(cache_folder: Path) -> None:
    """Processes end within a moment of each other; one that stays is an error."""
    wait_until(lambda: not left_behind(cache_folder), "processes left behind", seconds=15)


# Jobs answered by hand ------------------------------------------------------------------------


class HandWorker:
    """Plays a worker without an engine: claims and ends jobs when a test says so."""

    def __init__(self, connection: Redis, queue: str, name: str = "hand") -> None:
        self._broker = Broker(connection, worker=name, queues=[queue], lease_seconds=60)

    def claim(self, count: int = 1000) -> list[Claimed]:
        claimed, _ = self._broker.claim(count, crash_retries=2)
        return claimed

    def answer(self, *claimed: Claimed, text: str | None = None) -> list[str]:
        """End jobs with a text, by default their own prompt; return what became of each."""
        return self._broker.finish([(one, _answered(one, text)) for one in claimed])

    def fail(self, *claimed: Claimed, code: str = "internal_error") -> list[str]:
        """End jobs with an error; return what became of each."""
        return self._broker.finish([(one, _failed(code)) for one in claimed])

    def stream(self, claimed: Claimed, number: int, *entries: Mapping[str, Any]) -> bool:
        """Write entries to a job's stream; False when the execution is not ours any more."""
        flat = [[str(part) for item in entry.items() for part in item] for entry in entries]
        [is_ours] = self._broker.publish(
            [Publication(claimed, number, [], flat)], keep_seconds=KEEP_SECONDS
        )
        return is_ours

    def answer_all(self) -> int:
        """Answer everything that is queued; return how many that was."""
        claimed = self.claim()
        assert set(self.answer(*claimed)) <= {"ok"}
        return len(claimed)


def _answered(claimed: Claimed, text: str | None) -> Outcome:
    call = decode_call(claimed.fields["data"])
    endpoint = Endpoint.of_function(call.function)
    assert endpoint is not None
    body: Any = call.args[0]
    prompt = body["messages"][-1]["content"] if endpoint is Endpoint.CHAT else body["prompt"]
    answer = completion_body(
        endpoint,
        job_id=claimed.job_id,
        model="by-hand",
        created=1_700_000_000,
        choices=[Choice(prompt if text is None else text, FinishReason.STOP, completion_tokens=3)],
        usage=Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2),
        fingerprint="fp_hand",
    )
    return Outcome(
        ending=Ending.FINISHED,
        payload=encode_value(answer, Encoding.JSON),
        error=None,
        keep_seconds=KEEP_SECONDS,
        ended_at=time.time(),
        prompt_tokens=5,
        completion_tokens=3,
        cached_tokens=2,
    )


def _failed(code: str) -> Outcome:
    message = f"it failed: {code}"
    error = {
        "message": message,
        "type": "server_error",
        "param": None,
        "code": code,
        "status_code": 500,
    }
    return Outcome(
        ending=Ending.FAILED,
        payload=f"queue_service.errors.QsvcError: {message}".encode(),
        error=error,
        keep_seconds=KEEP_SECONDS,
        ended_at=time.time(),
        stream_end=("e", "error", "code", code, "message", message),
    )
