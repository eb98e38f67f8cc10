"""The worker child: wires model, engine, publisher and RQ thread together, once."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO, TypedDict

from redis import Redis
from redis.exceptions import RedisError
from rq.version import VERSION as RQ_VERSION

from queue_service.backlog import Backlog
from queue_service.broker import Broker, Outcome
from queue_service.collector import spans_for
from queue_service.connection import Level, check_server, connect
from queue_service.errors import ConfigurationError, ModelUnavailable, QsvcError
from queue_service.responses import fingerprint
from queue_service.settings import WorkerSettings
from workers.aftercare import Aftercare
from workers.answer_forms import AnswerForms
from workers.begun import BegunNotes
from workers.child_settings import ChildSettings
from workers.ended_job import JOB_EVENT, EndedJob
from workers.exits import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_OK
from workers.generation import EngineParts, GenerationThread
from workers.generator import EngineGenerator, make_publisher
from workers.logs import configure_logging
from workers.model_info import ModelInfo
from workers.outcomes import OutcomeWriter
from workers.preparation import Limits, Preparer, PromptEncoder
from workers.requests import Result
from workers.rq_worker import BatchWorker, EngineFailed, ResultQueue
from workers.sampling import SamplingDefaults
from workers.token_history import TokenHistory
from workers.totals import Totals
from workers.tracing import Tracer
from workers.waiting_room import WaitingRoom

if TYPE_CHECKING:
    from workers.metrics import Metrics

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
# How long a thread that computes keeps the interpreter from one that has its reply. With Python's 5
# milliseconds a round trip beside two such threads took the RQ thread 11 of them, with this 3.
_SWITCH_SECONDS = 0.001
# Objects made and not freed until the collector looks for cycles among them.
_COLLECT_AFTER = 20_000


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model, made on the engine thread.

    Attributes:
        parts: what the engine thread works with.
        encoder: renders and tokenises; used by the preparation threads.
        versions: of the libraries whose change may change the output.
        forms: what is known of the model's answers.
        sampling_defaults: what a request gets that does not say.
        log_lines: what a person should know about device and weights.
        history: the tokens of chats that are kept; None where nothing is kept.
        figures: what the worker's card shows of the engine; called by any thread.
        close: called once when the worker ends, to write what waits.
    """

    parts: EngineParts
    encoder: PromptEncoder
    info: ModelInfo
    versions: str
    forms: AnswerForms = field(default_factory=AnswerForms)
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    log_lines: tuple[str, ...] = ()
    history: TokenHistory | None = None
    figures: Callable[[], Mapping[str, str]] = dict
    close: Callable[[], None] = lambda: None


class WorkerParts(TypedDict):
    """What a ``BatchWorker`` is made of, by the names of its arguments."""

    connection: Redis
    name: str
    settings: WorkerSettings
    generator: EngineGenerator
    results: ResultQueue
    outcomes: OutcomeWriter
    aftercare: Aftercare
    broker: Broker
    model_card: tuple[str, Mapping[str, str]]
    tracer: Tracer


Loader = Callable[[ChildSettings], ServedModel]


class Reporter:
    """Tells the supervisor, in lines of JSON on standard output, how the child is doing."""

    def __init__(self, output: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = output
        self._clock = clock
        self._next = 0.0

    def report(self, event: str, **fields: Any) -> None:
        """Write one event."""
        try:
            print(json.dumps({"event": event, **fields}), file=self._output, flush=True)
        except BrokenPipeError:
            logger.debug("nobody listens to reports")

    def progress(self, num_running: int, steps: int, peak_bytes: int) -> None:
        """Report engine progress and the memory it took, at most once a second."""
        moment = self._clock()
        if moment >= self._next:
            self._next = moment + _REPORT_SECONDS
            self.report("progress", running=num_running, steps=steps, peak_bytes=peak_bytes)


def run_child(load: Loader) -> int:
    """Run one worker until it is told to stop; return the exit code.

    Settings come as the first line of standard input. When standard input ends, the supervisor
    is gone: the child gives its jobs back and ends too.
    """
    reporter = Reporter(sys.stdout)
    try:
        settings = ChildSettings.from_json(sys.stdin.readline())
        configure_logging(settings.worker.log_level)
        sys.setswitchinterval(_SWITCH_SECONDS)
        worker = build_worker(settings, load, reporter)
        _spare_the_collector()
        threading.Thread(target=_end_with_supervisor, args=(worker,), daemon=True).start()
        worker.work(burst=settings.burst)
    except EngineFailed:
        logger.exception("the engine failed; the process ends so that a new one starts clean")
        return EXIT_FAILED
    except (ConfigurationError, ModelUnavailable) as error:
        reporter.report("fatal", message=str(error), kind=type(error).__name__)
        return EXIT_CONFIGURATION
    except (QsvcError, RedisError) as error:
        reporter.report("failed", message=str(error))
        logger.error("%s", error)
        return EXIT_FAILED
    return EXIT_OK


def _spare_the_collector() -> None:
    """Keep the collector of cycles from what is loaded, and from every few hundred new objects.

    Jobs leave no cycles behind, and a full collection over all modules takes longer than a step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 20)


def build_worker(settings: ChildSettings, load: Loader, reporter: Reporter) -> BatchWorker:
    """Wire one worker; returns when the model is loaded, with nothing in Redis yet.

    Raises:
        QsvcError: the server or the model cannot be used.
    """
    parts = worker_parts(settings, settings.queues, load)
    generator, (_, card) = parts["generator"], parts["model_card"]
    totals = Totals()
    metrics = _serve_metrics(settings, generator, totals, card)
    loaded_at = time.process_time()

    def on_end(result: Result, outcome: Outcome) -> None:
        if metrics is not None:
            metrics.note_end(result, outcome)
        if settings.tells_jobs:
            ended = EndedJob.of(
                result,
                outcome,
                peak_bytes=generator.peak_bytes,
                peak_kv_bytes=generator.peak_kv_bytes,
                processor_seconds=time.process_time() - loaded_at,
            )
            reporter.report(JOB_EVENT, **ended.to_event())

    reporter.report("ready", name=settings.name, model=card["model"])
    return BatchWorker(
        settings.queues,
        **parts,
        totals=totals,
        on_end=on_end,
        # Rows, not jobs: one that has ended may have to wait long for the server.
        on_turn=lambda: reporter.progress(
            generator.num_rows, generator.steps, generator.peak_bytes
        ),
    )


def _serve_metrics(
    settings: ChildSettings, generator: EngineGenerator, totals: Totals, card: Mapping[str, str]
) -> Metrics | None:
    port = settings.worker.metrics_port
    if port is None:
        return None
    from workers.metrics import Metrics  # its library is not loaded where nobody asks

    info = {"name": settings.name, "alias": settings.alias, **card}
    backlog = Backlog(settings.redis.url, settings.queues)
    metrics = Metrics(
        lambda: {**generator.figures(), **totals.figures()}, info, backlog.num_waiting
    )
    metrics.serve(settings.worker.metrics_host, port)
    return metrics


def worker_parts(settings: ChildSettings, queues: Sequence[str], load: Loader) -> WorkerParts:
    """Make what one worker consists of; returns when the model is loaded.

    Raises:
        QsvcError: the server or the model cannot be used.
    """
    connection = connect(settings.redis)
    for finding in check_server(connection):
        if finding.level is Level.WARNING:
            logger.warning("server: %s; %s", finding.what, finding.fix)
    broker = Broker(
        connection,
        worker=settings.name,
        queues=queues,
        lease_seconds=settings.worker.lease_seconds,
    )
    results = ResultQueue()

    def deliver(result: Result) -> None:
        results.put(result)
        waiting_room.leave(result.claimed.execution_id)

    tracer = Tracer(
        settings.name, settings.worker.trace_every, spans_for("qsvc-worker", settings.name)
    )
    publisher = make_publisher(broker, settings.worker, deliver, results.fail, tracer)
    loaded: list[ServedModel] = []
    is_loaded = threading.Event()

    def make_parts() -> EngineParts:
        served = load(settings)
        loaded.append(served)
        is_loaded.set()
        return served.parts

    def on_failure(failure: BaseException) -> None:
        results.fail(failure)
        is_loaded.set()

    def on_kept(token_ids: Sequence[int]) -> None:
        if loaded[0].history is not None:
            loaded[0].history.remember(token_ids)

    engine = GenerationThread(
        make_parts,
        publisher,
        on_failure=on_failure,
        # More than run at a time: what comes next is looked for on disk, or meets its like.
        max_rows=settings.worker.most_with_engine,
        on_kept=on_kept,
        tracer=tracer,
    )
    notes = BegunNotes.of_file(settings.begun_file)
    waiting_room = WaitingRoom(
        engine.submit,
        notes,
        most=settings.worker.most_with_engine,
        at_once=max(1, settings.worker.claim_ahead // 2),
    )
    engine.start()
    is_loaded.wait()
    if not loaded:
        raise results.failure or EngineFailed("the engine thread ended without a word")
    served = loaded[0]
    for line in served.log_lines:
        logger.info("%s", line)
    publisher.start()
    generator = EngineGenerator(
        preparer=_preparer(settings, served),
        engine=engine,
        waiting_room=waiting_room,
        notes=notes,
        publisher=publisher,
        deliver=results.put,
        crash_retries=settings.worker.crash_retries,
        foresees=served.history is not None,
        tracer=tracer,
        figures=served.figures,
        on_stop=served.close,
    )
    return WorkerParts(
        connection=connection,
        name=settings.name,
        settings=settings.worker,
        generator=generator,
        results=results,
        outcomes=OutcomeWriter(
            settings.retention,
            fingerprint=fingerprint(
                served.info.digest, served.info.dtype, served.info.device, served.versions
            ),
        ),
        aftercare=Aftercare(
            connection,
            broker,
            allowed=frozenset(settings.worker.callbacks),
            redis_url=settings.redis.url,
        ),
        broker=broker,
        model_card=(settings.alias, _model_card(served.info)),
        tracer=tracer,
    )


def _preparer(settings: ChildSettings, served: ServedModel) -> Preparer:
    limits = Limits(
        context_tokens=served.info.context_length,
        vocabulary_size=served.info.vocab_size,
        eos_token_ids=served.info.eos_token_ids,
        ceiling_tokens=settings.worker.max_tokens_ceiling,
        default_tokens=settings.worker.default_max_tokens,
    )
    return Preparer(
        served.encoder,
        limits,
        model=served.info.name,
        forms=served.forms,
        defaults=served.sampling_defaults,
        allowed_callbacks=frozenset(settings.worker.callbacks),
        history=served.history,
        model_digest=served.info.digest,
    )


def _model_card(info: ModelInfo) -> dict[str, str]:
    return {
        "model": info.name,
        "digest": info.digest,
        "vocabulary_size": str(info.vocab_size),
        "context_tokens": str(info.context_length),
        "dtype": info.dtype,
        "device": info.device,
        "rq": RQ_VERSION,
    }


def _end_with_supervisor(worker: BatchWorker) -> None:
    """Wait for the end of standard input: then nobody watches over this process any more."""
    while sys.stdin.read(4096):
        pass
    logger.warning("the supervisor is gone; giving jobs back")
    for _ in range(2):
        worker.request_stop(signal.SIGTERM, None)
    # Only reached with work left when the RQ thread hangs: leases end, others take over.
    time.sleep(30)
    os._exit(EXIT_FAILED)
