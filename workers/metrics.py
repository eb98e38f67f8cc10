"""Figures of a worker for Prometheus: totals and gauges as they stand, histograms of its jobs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from queue_service.broker import Ending, Outcome
from queue_service.errors import ConfigurationError
from workers.requests import Generated, Result

logger = logging.getLogger(__name__)

_QUEUE_SECONDS: Final = (0.01, 0.1, 1, 10, 60, 300, 1800, 3600, 4 * 3600, 12 * 3600, 24 * 3600)
_JOB_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)
_TOKEN_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_TOKENS_PER_SECOND: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of a worker's card as a metric.

    Attributes:
        card: its name on the card.
        metric: its name for Prometheus, without ``_total``.
        help: what it counts.
        is_gauge: it may fall.
        labels: what tells it from others of the same name.
    """

    card: str
    metric: str
    help: str
    is_gauge: bool = False
    labels: tuple[tuple[str, str], ...] = ()


_JOBS_HELP = "Jobs whose end was accepted, by how they ended"
_DROPS_HELP = "Segments of checkpoints that were not written, by the reason"

FIGURES: Final[tuple[Figure, ...]] = (
    *(
        Figure(ending.value, "qsvc_jobs", _JOBS_HELP, labels=(("ending", ending.value),))
        for ending in Ending
    ),
    Figure("retried", "qsvc_retries", "Ends after which a job went back to its queue"),
    Figure("refused", "qsvc_results_refused", "Ends that came too late to be accepted"),
    Figure("lost", "qsvc_leases_lost", "Jobs that were taken from this worker while they ran"),
    Figure("prompt_tokens", "qsvc_prompt_tokens", "Prompt tokens of finished jobs"),
    Figure(
        "cached_tokens",
        "qsvc_cached_prompt_tokens",
        "Prompt tokens of finished jobs that were not computed again",
    ),
    Figure("completion_tokens", "qsvc_completion_tokens", "Generated tokens of finished jobs"),
    Figure("steps", "qsvc_engine_steps", "Steps of the engine"),
    Figure("rows", "qsvc_rows", "Rows in the batch or waiting for a place in it", is_gauge=True),
    Figure("kv_bytes", "qsvc_kv_bytes", "Keys and values of running rows", is_gauge=True),
    Figure(
        "kv_budget_bytes", "qsvc_kv_budget_bytes", "What keys and values may take", is_gauge=True
    ),
    Figure("peak_bytes", "qsvc_peak_memory_bytes", "Most memory of model and rows", is_gauge=True),
    Figure("prefix_hits", "qsvc_prefix_hits", "Rows that began with what others had computed"),
    Figure("prefix_misses", "qsvc_prefix_misses", "Rows that did not"),
    Figure("prefix_tokens_saved", "qsvc_prefix_tokens_saved", "Tokens that rows did not compute"),
    Figure("checkpoint_restores", "qsvc_checkpoint_restores", "Prefixes read from disk"),
    Figure(
        "checkpoint_restored_tokens",
        "qsvc_checkpoint_restored_tokens",
        "Tokens of prefixes read from disk",
    ),
    Figure(
        "checkpoint_restores_rejected",
        "qsvc_checkpoint_restores_rejected",
        "Prefixes that were found on disk and could not be used",
    ),
    Figure(
        "checkpoint_verified",
        "qsvc_checkpoint_verified",
        "Prefixes read from disk and computed again to compare",
    ),
    Figure(
        "checkpoint_mismatches",
        "qsvc_checkpoint_mismatches",
        "Prefixes read from disk that differed from what was computed",
    ),
    Figure("checkpoint_written_bytes", "qsvc_checkpoint_written_bytes", "Bytes written to disk"),
    Figure(
        "checkpoint_evicted_bytes",
        "qsvc_checkpoint_evicted_bytes",
        "Bytes deleted to keep the budget",
    ),
    Figure(
        "checkpoint_writer_dropped_bytes",
        "qsvc_checkpoint_dropped_bytes",
        "Bytes of keys and values that were not written",
    ),
    *(
        Figure(
            f"checkpoint_writer_dropped_{reason}",
            "qsvc_checkpoint_dropped_segments",
            _DROPS_HELP,
            labels=(("reason", reason),),
        )
        for reason in ("full", "daily", "at_end")
    ),
)


class Metrics:
    """The metrics of one worker.

    Args:
        figures: returns the numbers of the worker's card; called when somebody reads.
        info: what the worker is: model, device, name.
        waiting: returns how many jobs wait in the worker's queues, None while nobody can tell;
            called when somebody reads.
    """

    def __init__(
        self,
        figures: Callable[[], Mapping[str, str]],
        info: Mapping[str, str],
        waiting: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Card(figures, info))
        self.registry.register(_Waiting(waiting))

        def histogram(name: str, help: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(name, help, buckets=tuple(buckets), registry=self.registry)

        self._queue_wait = histogram(
            "qsvc_queue_wait_seconds", "From enqueue to claim", _QUEUE_SECONDS
        )
        self._first_token = histogram(
            "qsvc_time_to_first_token_seconds",
            "From claim to a job's first token",
            _JOB_SECONDS,
        )
        self._between_tokens = histogram(
            "qsvc_time_between_tokens_seconds",
            "Mean time between the tokens of a job with one answer",
            _TOKEN_SECONDS,
        )
        self._job = histogram("qsvc_job_seconds", "From claim to a job's last token", _JOB_SECONDS)
        self._prefill = histogram(
            "qsvc_prefill_tokens_per_second",
            "Prompt tokens that were computed for a job, by the time to its first token",
            _TOKENS_PER_SECOND,
        )
        self._decode = histogram(
            "qsvc_decode_tokens_per_second",
            "Tokens that a job generated after its first, by the time that took",
            _TOKENS_PER_SECOND,
        )

    def note_end(self, result: Result, outcome: Outcome) -> None:
        """Observe a job whose end was accepted."""
        claimed = result.claimed
        waited = claimed.waited_seconds
        if waited is not None:
            self._queue_wait.observe(waited)
        if not isinstance(result, Generated) or result.times is None:
            return
        times, claimed_at = result.times, claimed.claimed_at
        self._first_token.observe(max(0.0, times.first_token - claimed_at))
        self._job.observe(max(0.0, times.ended - claimed_at))
        prefill_seconds = times.first_token - times.began
        num_computed = outcome.prompt_tokens - outcome.cached_tokens
        if prefill_seconds > 0 and num_computed > 0 and result.request.resumed is None:
            self._prefill.observe(num_computed / prefill_seconds)
        num_after_first, seconds = result.new_tokens - 1, times.ended - times.first_token
        if num_after_first > 0 and seconds > 0:
            self._decode.observe(num_after_first / seconds)
            if len(result.choices) == 1:
                self._between_tokens.observe(seconds / num_after_first)

    def serve(self, host: str, port: int) -> int:
        """Answer HTTP requests on a thread of their own; return the port.

        Raises:
            ConfigurationError: nobody can listen there.
        """
        try:
            server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ConfigurationError(
                f"metrics cannot be served on {host}:{port} ({error.strerror or error}); choose "
                "another metrics_port for this worker"
            ) from error
        logger.info("metrics served url=http://%s:%d/metrics", host, server.server_port)
        return int(server.server_port)


class _Card:
    """Reads a worker's card when Prometheus does."""

    def __init__(self, figures: Callable[[], Mapping[str, str]], info: Mapping[str, str]) -> None:
        self._figures = figures
        self._info = info

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as they stand."""
        yield InfoMetricFamily("qsvc_worker", "What this worker is", value=dict(self._info))
        figures = self._figures()
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for figure in FIGURES:
            family = families.get(figure.metric)
            if family is None:
                kind = GaugeMetricFamily if figure.is_gauge else CounterMetricFamily
                names = [name for name, _ in figure.labels]
                family = families[figure.metric] = kind(figure.metric, figure.help, labels=names)
            values = [value for _, value in figure.labels]
            family.add_metric(values, float(figures.get(figure.card, 0)))
        yield from families.values()


class _Waiting:
    """Asks how many jobs wait when Prometheus reads. Workers of one queue tell the same number."""

    def __init__(self, waiting: Callable[[], int | None]) -> None:
        self._waiting = waiting

    def collect(self) -> Iterable[Metric]:
        """Return the metric; without a value while nobody can tell."""
        help = "Jobs that wait in this worker's queues, lines of batches included"
        yield GaugeMetricFamily("qsvc_waiting_jobs", help, value=self._waiting())
