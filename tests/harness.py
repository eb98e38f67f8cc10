"""Runs workers for tests: on a thread of this process, or as children under a supervisor.

``python -m tests.harness`` is a supervisor as a process of its own: settings as a JSON line on
standard input, the fake worker as its child.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from redis import Redis
from redis.client import PubSubWorkerThread
from rq import Queue
from rq.job import Job

from queue_service import keys, tasks
from queue_service.broker import Claimed
from queue_service.payload import Encoding
from queue_service.requests import Endpoint
from queue_service.results import read_job
from queue_service.settings import (
    RedisSettings,
    RetentionSettings,
    WorkerSettings,
)
from queue_service.streams import text_of
from tests.fakes import EOS, FakeEngine, FakeTokenizer, fake_info, fake_parts
from workers.child import Reporter, ServedModel, build_worker
from workers.child_settings import ChildSettings
from workers.requests import PreparedRequest, Prompt
from workers.sampling import SamplingPlan
from workers.supervisor import Supervisor

FAKE_CHILD = (sys.executable, "-m", "tests.fake_worker")
# Seconds of work for the fake engine at 10 ms a step; `ThreadWorker.hasten` ends it at once.
LONG_TEXT = "x" * 1500
SLOW_STEP_SECONDS = 0.01

_GREEDY = SamplingPlan(temperature=0.0, top_p=1.0, seed=7)
_ROOT = Path(__file__).parent.parent
_POLL_SECONDS = 0.01

_T = TypeVar("_T")


def eventually(probe: Callable[[], _T], what: str, *, seconds: float = 15.0) -> _T:
    """Return the first true value of ``probe``; fail, naming what was missed, after a while."""
    deadline = time.monotonic() + seconds
    while not (value := probe()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(_POLL_SECONDS)
    return value


# Requests -----------------------------------------------------------------------------------


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat that the fake engine answers with ``text``."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def enqueue_chat(
    connection: Redis, text: str, queue: str = keys.DEFAULT_QUEUE, **options: Any
) -> Job:
    """Enqueue a chat as a plain RQ application does; options are those of ``Queue.enqueue``."""
    plain = Queue(queue, connection=connection, serializer="json")
    return plain.enqueue(tasks.CHAT, chat_body(text), **options)


def answer(redis: Redis, job: Job) -> str:
    """Return the text of a job's answer; it has one."""
    body = read_job(redis, job.id).body
    assert body is not None, f"{job.id} has no answer"
    return text_of(body)


def error_code(redis: Redis, job: Job) -> Any:
    """Return the code that a job failed with; it has."""
    error = read_job(redis, job.id).error
    assert error is not None, f"{job.id} has no error"
    return error["code"]


def make_claimed(
    job_id: str = "job", execution_id: str = "execution", **fields: bytes | str | int
) -> Claimed:
    """Return an execution as a claim would, without a server."""
    raw = {
        name: value if isinstance(value, bytes) else str(value).encode()
        for name, value in fields.items()
    }
    return Claimed(job_id, execution_id, keys.DEFAULT_QUEUE, raw, started_at=0.0)


def make_request(
    text: str = "answer",
    *,
    claimed: Claimed | None = None,
    prompt_ids: tuple[int, ...] | None = None,
    token_limit: int = 4096,
    sampling: SamplingPlan = _GREEDY,
    num_choices: int = 1,
    priority: int = 0,
    stop_strings: tuple[str, ...] = (),
    stream: bool = False,
) -> PreparedRequest:
    """Return a request that the fake engine answers with ``text``; greedy, seed 7."""
    return PreparedRequest(
        claimed=claimed or make_claimed(),
        endpoint=Endpoint.CHAT,
        model="fake",
        prompts=(Prompt(prompt_ids or tuple(text.encode()), token_limit),),
        samplings=(sampling,) * num_choices,
        stop_strings=stop_strings,
        stop_ids=frozenset({EOS}),
        priority=priority,
        stream=stream,
        encoding=Encoding.JSON,
    )


# Workers ------------------------------------------------------------------------------------


def worker_settings(
    url: str,
    *,
    name: str = "worker",
    alias: str = "fake",
    burst: bool = False,
    redis: Mapping[str, float] | None = None,
    **worker: Any,
) -> ChildSettings:
    """Return settings whose lease, beat and reap are short; ``worker`` overrides any of them."""
    quick = {"lease_seconds": 2, "beat_seconds": 0.2, "reap_seconds": 0.3, "grace_seconds": 5}
    return ChildSettings(
        redis=RedisSettings.load(url=url, **(redis or {})),
        worker=WorkerSettings.load(**{**quick, **worker}),
        retention=RetentionSettings.load(),
        alias=alias,
        name=name,
        burst=burst,
    )


class ThreadWorker:
    """A worker with the fake engine on a thread of this process.

    Attributes:
        failure: what ended the worker's loop, None while it runs or after a good end.
    """

    def __init__(self, settings: ChildSettings, *, step_seconds: float = 0.0) -> None:
        self.engine = FakeEngine(max_rows=settings.worker.slots, step_seconds=step_seconds)
        self.failure: BaseException | None = None
        self._burst = settings.burst
        self.worker = build_worker(settings, self._load, Reporter(io.StringIO()))
        self._thread = threading.Thread(target=self._run, name="rq")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def hasten(self) -> None:
        """Let the engine step as fast as it can from now on."""
        self.engine.step_seconds = 0.0

    def request_stop(self) -> None:
        """Do what SIGTERM does."""
        self.worker.request_stop(signal.SIGTERM, None)

    @property
    def is_running(self) -> bool:
        """Whether the worker's loop has not returned."""
        return self._thread.is_alive()

    def join(self, seconds: float = 15.0) -> None:
        """Wait for the worker's end."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the worker did not end within {seconds:g} s"

    def _load(self, settings: ChildSettings) -> ServedModel:
        return ServedModel(fake_parts(self.engine), FakeTokenizer(), fake_info(), "fake")

    def _run(self) -> None:
        try:
            self.worker.work(burst=self._burst)
        except BaseException as failure:
            self.failure = failure
        finally:
            # A worker that failed, or could not sign off, leaves that to the end of its process.
            listener: PubSubWorkerThread | None = self.worker.pubsub_thread
            if listener is not None:
                listener.stop()
                listener.join()
            self.worker.connection.close()


@contextlib.contextmanager
def running_worker(settings: ChildSettings, *, step_seconds: float = 0.0) -> Iterator[ThreadWorker]:
    """Run a worker on a thread for the length of the block; it must not have failed by itself."""
    worker = ThreadWorker(settings, step_seconds=step_seconds)
    worker.start()
    try:
        yield worker
    finally:
        worker.request_stop()
        worker.request_stop()
        worker.join()
        if worker.failure is not None:
            raise worker.failure


class SupervisedWorker:
    """A supervisor on a thread of this process, with a child of its own.

    Attributes:
        events: the child's reports so far.
        failure: what ``Supervisor.run`` raised.
    """

    def __init__(self, settings: ChildSettings, *, command: Sequence[str] = FAKE_CHILD) -> None:
        self.events: list[Mapping[str, Any]] = []
        self.failure: BaseException | None = None
        self.supervisor = Supervisor(settings, command=command, on_event=self.events.append)
        self._thread = threading.Thread(target=self._run, name="supervisor")

    def start(self) -> None:
        """Start the thread, and with it the child."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the supervisor goes on."""
        return self._thread.is_alive()

    @property
    def num_starts(self) -> int:
        """How many children have come up so far."""
        return sum(event["event"] == "ready" for event in self.events)

    def join(self, seconds: float = 20.0) -> None:
        """Wait for the supervisor's end."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the supervisor did not end within {seconds:g} s"

    def _run(self) -> None:
        try:
            self.supervisor.run()
        except BaseException as failure:
            self.failure = failure


@contextlib.contextmanager
def supervised_worker(
    settings: ChildSettings, *, command: Sequence[str] = FAKE_CHILD
) -> Iterator[SupervisedWorker]:
    """Run a supervisor for the length of the block; its child is told to hurry at the end."""
    supervised = SupervisedWorker(settings, command=command)
    supervised.start()
    try:
        yield supervised
    finally:
        supervised.supervisor.stop()
        supervised.supervisor.stop()
        supervised.join()


def child_environment(*, step_seconds: float = 0.0) -> dict[str, str]:
    """Return the variables by which a child finds the tests' modules, and its engine its pace."""
    return {"PYTHONPATH": str(_ROOT), "FAKE_STEP_SECONDS": str(step_seconds)}


if __name__ == "__main__":
    Supervisor(ChildSettings.from_json(sys.stdin.readline()), command=FAKE_CHILD).run()
