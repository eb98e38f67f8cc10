"""Jobs of every kind that a worker must be able to go on with, and what is compared of answers.

The model is the demo model with a chat template that also offers tools, which its own does not.
Run as a program, this is a worker child on it that notes every token, so that what a killed one had
generated is known: ``python -m tests.kinds``, with TOKEN_LOG naming a folder.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redis import Redis
from rq import Queue

from queue_service import keys, tasks
from queue_service.connection import connect
from queue_service.results import read_job
from queue_service.settings import RedisSettings
from workers.child import ServedModel, run_child
from workers.child_settings import ChildSettings
from workers.engine import Begun, Engine, Event, RowRequest, Token

COUNTING_CHILD = (sys.executable, "-m", "tests.kinds")
LOGPROB_TOLERANCE = 1e-3

_ROOT = Path(__file__).resolve().parents[1]
# The demo model's own template, and before it what mlx-lm knows as calls in JSON.
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "You call functions. They are:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n'
    "{% elif messages[0]['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for tool_call in message['tool_calls'] or [] %}<tool_call>"
    '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SUBJECTS = (
    "a lighthouse", "the history of tea", "a train at night", "an old map", "bees in winter",
    "a harbour town", "the first telephone", "a lost key", "mountain rivers", "a paper boat",
    "the colour blue", "a clock tower", "wild horses", "a bakery at dawn", "the moon", "a violin",
)  # fmt: skip
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "notes": {
            "type": "array",
            "minItems": 4,
            "maxItems": 12,
            "items": {"type": "string", "minLength": 12, "maxLength": 60},
        },
    },
    "required": ["name", "age", "notes"],
    "additionalProperties": False,
}
_LETTER = {
    "type": "function",
    "function": {
        "name": "send_letter",
        "description": "Send a letter.",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"type": "string", "maxLength": 24},
                "lines": {
                    "type": "array",
                    "minItems": 4,
                    "items": {"type": "string", "minLength": 10, "maxLength": 60},
                },
            },
            "required": ["to", "lines"],
            "additionalProperties": False,
        },
    },
}

# What the body of each kind has beside its messages, its seed and its limit.
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0},
    "penalties": {
        "temperature": 0.9,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "min_tokens": 24,
    },
    "regex": {
        "temperature": 1.0,
        "structured_outputs": {"regex": r"([A-Z][a-z]{2,8}( [a-z]{2,9}){4,9}\. ){3,20}"},
    },
    "schema": {
        "temperature": 1.0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": _PERSON},
        },
    },
    "tools": {"temperature": 0.9, "tools": [_LETTER], "tool_choice": "required"},
    "logprobs": {"temperature": 0.8, "top_p": 0.95, "logprobs": True, "top_logprobs": 3},
    "stop": {"temperature": 1.0, "stop": ["\n\n\n", "However", "in conclusion"]},
    "choices": {"temperature": 1.0, "n": 2},
    "streaming": {"temperature": 1.0, "stream": True},
    "streaming choices": {"temperature": 0.7, "n": 2, "stream": True, "stop": ["Finally"]},
    "streaming greedy": {"temperature": 0, "stream": True},
}
KINDS = tuple(_KINDS)


@dataclass(frozen=True, slots=True)
class KindOfJob:
    """One job.

    Attributes:
        body: of its request.
    """

    job_id: str
    kind: str
    body: Mapping[str, Any]

    @property
    def streams(self) -> bool:
        """Whether its text goes to its stream."""
        return bool(self.body.get("stream"))


def jobs_of_every_kind(count: int, *, tokens: int) -> list[KindOfJob]:
    """Return so many jobs, kind after kind, the same ones each time."""
    jobs = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        subject = _SUBJECTS[number * 7 % len(_SUBJECTS)]
        text = f"Write a long story about {subject}, number {number}."
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "seed": 100 + number,
            **copy.deepcopy(dict(_KINDS[kind])),
        }
        jobs.append(KindOfJob(f"job-{number:03d}", kind, body))
    return jobs


def enqueue_jobs(connection: Redis, jobs: Iterable[KindOfJob], queue: str) -> None:
    """Enqueue jobs as an application does."""
    plain = Queue(queue, connection=connection, serializer="json")
    for job in jobs:
        plain.enqueue(tasks.CHAT, job.body, job_id=job.job_id)


def make_model(folder: Path) -> Path:
    """Write the demo model in float32, with a template that offers tools, and return its folder."""
    command = [sys.executable, "-m", "scripts.bench_peers", "export", str(folder)]
    subprocess.run(command, cwd=_ROOT, check=True, capture_output=True)
    for file in folder.glob("chat_template*"):
        file.unlink()
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "chat_template": _TEMPLATE}))
    return folder


# Answers ------------------------------------------------------------------------------------


def answers_of(connection: Redis, jobs: Iterable[KindOfJob]) -> dict[str, Mapping[str, Any]]:
    """Return the bodies of the jobs that were answered."""
    results = {job.job_id: read_job(connection, job.job_id) for job in jobs}
    return {job_id: result.body for job_id, result in results.items() if result.body is not None}


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return what is different between two answers to one request, None for nothing.

    Times are left out, and how much of the prompt others had computed, which depends on company;
    log-probabilities may differ by LOGPROB_TOLERANCE.
    """
    if len(one["choices"]) != len(other["choices"]):
        return "number of choices"
    for name in ("prompt_tokens", "completion_tokens", "completion_tokens_details"):
        if one["usage"][name] != other["usage"][name]:
            return f"{name}: {one['usage'][name]} and {other['usage'][name]}"
    for mine, yours in zip(one["choices"], other["choices"], strict=True):
        for name in ("message", "finish_reason", "index"):
            if mine[name] != yours[name]:
                return f"{name}: {mine[name]!r:.400} and {yours[name]!r:.400}"
        if not _are_alike(mine["logprobs"], yours["logprobs"]):
            return "logprobs"
    return None


def _are_alike(mine: Any, yours: Any) -> bool:
    if isinstance(mine, float) and isinstance(yours, float):
        return abs(mine - yours) <= LOGPROB_TOLERANCE
    if isinstance(mine, dict) and isinstance(yours, dict):
        return mine.keys() == yours.keys() and all(_are_alike(mine[k], yours[k]) for k in mine)
    if isinstance(mine, list) and isinstance(yours, list):
        return len(mine) == len(yours) and all(map(_are_alike, mine, yours))
    return bool(mine == yours)


class Readers:
    """Reads the streams of jobs from their start by plain XREAD, on a thread, until they end."""

    def __init__(self, url: str, jobs: Iterable[KindOfJob]) -> None:
        self._url = url
        self._jobs = [job for job in jobs if job.streams]
        self._last = {keys.stream(job.job_id).encode(): b"0-0" for job in self._jobs}
        self._texts: dict[bytes, dict[int, str]] = {stream: {} for stream in self._last}
        self.num_restarts = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="readers")
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()

    def wrong(self, answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the jobs of which the entries, joined as they came, are not the answer."""
        self._thread.join(timeout=30)
        found = []
        for job in self._jobs:
            body, seen = answers.get(job.job_id), self._texts[keys.stream(job.job_id).encode()]
            texts = {} if body is None else {c["index"]: c["message"] for c in body["choices"]}
            if body is None or any(
                seen.get(index, "") != (message["content"] or "")
                for index, message in texts.items()
            ):
                found.append(job.job_id)
        return found

    def _run(self) -> None:
        connection = connect(RedisSettings.load(url=self._url))
        attempts: dict[tuple[bytes, int], int] = {}
        while self._last and not self._stopping.is_set():
            try:
                replies: Any = connection.xread(self._last, block=200)  # type: ignore[arg-type]
            except Exception:  # an outage may be the fault that is tried
                time.sleep(0.1)
                continue
            for stream, entries in replies:
                for entry_id, fields in entries:
                    self._last[stream] = entry_id
                    if b"e" in fields:
                        del self._last[stream]
                        break
                    choice, attempt = int(fields.get(b"c", 0)), int(fields[b"a"])
                    texts = self._texts[stream]
                    is_later = attempt > attempts.get((stream, choice), 1)
                    if is_later and fields[b"i"] == b"0" and texts.get(choice):
                        self.num_restarts += 1
                    attempts[stream, choice] = attempt
                    texts[choice] = texts.get(choice, "") + fields[b"t"].decode()
        connection.close()


# What executions generated ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Noted:
    """What a worker child did, token by token, whatever became of it.

    Attributes:
        moments: seconds since the epoch of each token, by execution.
        prefilled: tokens of prompts and of earlier executions' answers that were computed.
    """

    moments: Mapping[str, Sequence[float]]
    prefilled: Mapping[str, int]

    @property
    def num_tokens(self) -> int:
        """Tokens that all executions generated."""
        return sum(map(len, self.moments.values()))


def read_notes(folder: Path) -> Noted:
    """Read what all worker children have noted so far."""
    moments: dict[str, list[float]] = {}
    prefilled: dict[str, int] = {}
    for file in folder.glob("*.tokens"):
        for line in file.read_text().splitlines():
            what, moment, execution_id, number = line.split(" ")
            if what == "token":
                moments.setdefault(execution_id, []).append(float(moment))
            else:
                prefilled[execution_id] = prefilled.get(execution_id, 0) + int(number)
    return Noted(moments, prefilled)


class _NotingEngine:
    """Passes everything on to an engine and writes down, unbuffered, what comes of it."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._lengths: dict[str, int] = {}
        self._file = path.open("ab", buffering=0)

    def add(self, requests: Iterable[RowRequest]) -> None:
        requests = list(requests)
        for request in requests:
            length = len(request.prompt_ids) + len(request.generated_ids)
            self._lengths[request.row_id] = length
        self._engine.add(requests)

    def step(self) -> list[Event]:
        events = self._engine.step()
        lines = []
        for event in events:
            if not isinstance(event, Token | Begun):
                continue
            execution_id = event.row_id.rpartition("/")[0]
            if isinstance(event, Token):
                lines.append(f"token {time.time():.4f} {execution_id} 1\n")
            else:
                computed = self._lengths[event.row_id] - event.cached_tokens
                lines.append(f"begun {time.time():.4f} {execution_id} {computed}\n")
        if lines:
            self._file.write("".join(lines).encode())
        return events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _load(settings: ChildSettings) -> ServedModel:
    from workers.main import load

    served = load(settings)
    path = Path(os.environ["TOKEN_LOG"]) / f"{settings.name}.tokens"
    engine: Any = _NotingEngine(served.parts.engine, path)
    return replace(served, parts=replace(served.parts, engine=engine))


if __name__ == "__main__":
    code = run_child(_load)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
