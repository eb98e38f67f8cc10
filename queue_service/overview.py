"""What `qsvc top` shows: workers, queues, open batches and the jobs that have run longest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError

from queue_service import keys
from queue_service.batches import Batch, Status, read_batch_hash
from queue_service.pace import BatchPace, Meter, Rates
from queue_service.results import send_all
from queue_service.rqcompat import moment_of

# More than these are not looked at; the first ones by name, or the newest.
_MOST_WORKERS: Final = 500
_MOST_RUNNING: Final = 5_000
_MOST_LONGEST: Final = 10
# Batches that were open before are always looked at again, the newest too; all of them now and
# then: ended ones are kept for days, and may be many.
_NEWEST_BATCHES: Final = 50
_ALL_BATCHES_SECONDS: Final = 30.0
_PAGE: Final = 500

_WORKER_FIELDS: Final = ("queues", "state", "last_heartbeat", "birth")
_JOB_FIELDS: Final = ("started_at", "worker_name")
# Of a worker's card, by the names that `WorkerView` has for them too.
_FIGURES: Final = (
    "rows",
    "kv_bytes",
    "kv_budget_bytes",
    "prefix_hits",
    "prefix_misses",
    "finished",
    "failed",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
)
_DEFAULT_ALIAS: Final = keys.alias_of(keys.DEFAULT_QUEUE)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker at one moment.

    Attributes:
        model: as its card names it, else the alias; None where neither is known.
        is_alive: its last beat is no older than its lease.
        beat_seconds: since its last beat; None where its registration has expired.
        rows: in the batch or waiting for a place in it.
        kv_budget_bytes: what keys and values may take; 0 where it does not say.
        tokens_per_second: generated, about the last ten seconds; None while it is not known.
        prompt_tokens_per_second: of the prompts of the jobs that ended, in the same time.
    """

    name: str
    model: str | None
    queues: tuple[str, ...]
    state: str
    is_alive: bool
    beat_seconds: float | None
    rows: int
    kv_bytes: int
    kv_budget_bytes: int
    prefix_hits: int
    prefix_misses: int
    finished: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None

    @property
    def kv_share(self) -> float | None:
        """The part of the budget that keys and values take; None where there is none."""
        return self.kv_bytes / self.kv_budget_bytes if self.kv_budget_bytes else None

    @property
    def hit_share(self) -> float | None:
        """The part of the rows that began with what others had computed; None before the first."""
        looked = self.prefix_hits + self.prefix_misses
        return self.prefix_hits / looked if looked else None

    def to_object(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {
            "name": self.name,
            "model": self.model,
            "queues": list(self.queues),
            "state": self.state,
            "alive": self.is_alive,
            "beat_seconds": _rounded(self.beat_seconds),
            "rows": self.rows,
            "kv_bytes": self.kv_bytes,
            "kv_budget_bytes": self.kv_budget_bytes,
            "prefix_hits": self.prefix_hits,
            "prefix_misses": self.prefix_misses,
            "finished": self.finished,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "tokens_per_second": _rounded(self.tokens_per_second),
            "prompt_tokens_per_second": _rounded(self.prompt_tokens_per_second),
        }


@dataclass(frozen=True, slots=True)
class QueueView:
    """A queue at one moment, the lanes of its batches included.

    Attributes:
        num_scheduled: jobs that are queued again later, as after a transient failure.
        num_failed: jobs in its dead letter.
        is_served: a worker that lives takes from it.
    """

    name: str
    num_waiting: int
    num_running: int
    num_scheduled: int
    num_failed: int
    is_served: bool

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing."""
        return not (self.num_waiting or self.num_running or self.num_scheduled or self.num_failed)

    def to_object(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {
            "name": self.name,
            "waiting": self.num_waiting,
            "running": self.num_running,
            "scheduled": self.num_scheduled,
            "failed": self.num_failed,
            "served": self.is_served,
        }


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch that has not ended, and its pace."""

    batch: Batch
    num_running: int
    rates: Rates

    @property
    def num_waiting(self) -> int:
        """Lines that have not ended and that no worker holds."""
        return max(0, self.batch.total - self.batch.ended - self.num_running)

    def to_object(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        batch, rates = self.batch, self.rates
        return {
            "id": batch.id,
            "model": batch.model,
            "queue": batch.queue,
            "status": batch.status.value,
            "submitted": batch.is_submitted,
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
            "cancelled": batch.cancelled,
            "running": self.num_running,
            "waiting": self.num_waiting,
            "prompt_tokens": batch.prompt_tokens,
            "cached_tokens": batch.cached_tokens,
            "completion_tokens": batch.completion_tokens,
            "tokens_per_second": _rounded(rates.tokens_per_second),
            "average_tokens_per_second": _rounded(rates.average_tokens_per_second),
            "seconds_left": _rounded(rates.seconds_left),
        }


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that a worker holds, since a number of seconds."""

    job_id: str
    worker: str
    seconds: float

    def to_object(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {"id": self.job_id, "worker": self.worker, "seconds": _rounded(self.seconds)}


@dataclass(frozen=True, slots=True)
class Overview:
    """A server at one moment.

    Attributes:
        at: seconds since 1970, the server's clock.
        is_suspended: no worker takes jobs.
        batches: those that have not ended, the oldest first.
        longest: the jobs that have run longest, the longest first.
    """

    at: float
    is_suspended: bool = False
    workers: Sequence[WorkerView] = ()
    queues: Sequence[QueueView] = ()
    batches: Sequence[BatchView] = ()
    longest: Sequence[RunningJob] = ()

    def to_object(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {
            "object": "overview",
            "at": round(self.at, 3),
            "suspended": self.is_suspended,
            "workers": [worker.to_object() for worker in self.workers],
            "queues": [queue.to_object() for queue in self.queues],
            "batches": [batch.to_object() for batch in self.batches],
            "longest_running": [job.to_object() for job in self.longest],
        }


class Observer:
    """Looks at a server again and again, and measures from one look to the next.

    A look is four round trips, and one more for each 500 batches every half minute. It takes
    nothing that is there for granted: what others wrote wrongly counts as not there.

    Args:
        lease_seconds: how long a worker without a beat counts as alive.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        connection: Redis,
        *,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._open: tuple[str, ...] = ()
        self._look_at_all = clock()
        self._paces: dict[str, BatchPace] = {}
        self._meters: dict[str, _WorkerMeters] = {}

    def look(self) -> Overview:
        """Return the server as it is now.

        Raises:
            redis.RedisError: the server is away or refuses us; the next look goes on from here.
        """
        moment = self._clock()
        (seconds, microseconds), workers, queue_keys, newest, suspended = self._ask(
            ("TIME",),
            ("SMEMBERS", f"{keys.RQ}:workers"),
            ("SMEMBERS", f"{keys.RQ}:queues"),
            ("ZREVRANGE", keys.batches(), 0, _NEWEST_BATCHES - 1),
            ("EXISTS", f"{keys.RQ}:suspended"),
        )
        now = seconds + microseconds / 1e6
        listed = self._listed_workers(workers or (), now)
        batch_ids = self._batch_ids(moment, [_text(member) for member in newest or ()])
        batches = self._open_batches(batch_ids)
        queues = _Queues.of(map(_text, queue_keys or ()), listed, batches)
        held = self._fill(queues)
        views = [self._view(batch, held.num_of(batch), moment) for batch in batches]
        self._open = tuple(batch.id for batch in batches)
        self._paces = {one: self._paces[one] for one in self._open}
        served = {queue for worker in listed if worker.is_alive for queue in worker.queues}
        return Overview(
            at=now,
            is_suspended=bool(suspended),
            workers=self._measured(listed, moment),
            queues=queues.views(served),
            batches=views,
            longest=self._longest(held, now),
        )

    def _ask(self, *commands: tuple[str | int, ...]) -> list[Any]:
        """Send commands in one round trip; a reply is None where a key has a wrong type."""
        if not commands:
            return []
        with self._connection.pipeline(transaction=False) as pipeline:
            replies = send_all(pipeline, commands).execute(raise_on_error=False)
        return [_checked(reply) for reply in replies]

    # Workers --------------------------------------------------------------------------------

    def _listed_workers(self, members: Iterable[bytes], now: float) -> list[WorkerView]:
        names = sorted(_text(key).removeprefix(keys.rq_worker("")) for key in members)
        names = names[:_MOST_WORKERS]
        commands: list[tuple[str | int, ...]] = []
        for name in names:
            commands.append(("HMGET", keys.rq_worker(name), *_WORKER_FIELDS))
            commands.append(("HGETALL", keys.worker_card(name)))
        replies = self._ask(*commands)
        hashes = [_fields(_WORKER_FIELDS, reply) for reply in replies[::2]]
        cards = [_card(reply) for reply in replies[1::2]]
        models = self._models({alias for one in hashes for alias in _aliases(one["queues"])})
        return [
            self._worker(name, registered, card, models, now)
            for name, registered, card in zip(names, hashes, cards, strict=True)
            # Workers of other applications share the server; they have no card of ours.
            if card
            or any(map(keys.is_ours, _queue_names(registered["queues"])))
            or not any(registered.values())
        ]

    def _models(self, aliases: set[str]) -> dict[str, str]:
        ordered = sorted(aliases)
        replies = self._ask(*(("HGET", keys.model_card(alias), "model") for alias in ordered))
        return {alias: _text(reply) for alias, reply in zip(ordered, replies, strict=True) if reply}

    def _worker(
        self,
        name: str,
        registered: Mapping[str, str],
        card: Mapping[str, str],
        models: Mapping[str, str],
        now: float,
    ) -> WorkerView:
        beat = moment_of(registered["last_heartbeat"])
        beat_seconds = None if beat is None else max(0.0, now - beat)
        aliases = _aliases(registered["queues"])
        known = [models[alias] for alias in aliases if alias in models]

        def number(figure: str) -> int:
            text = card.get(figure, "")
            return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0

        return WorkerView(
            name=name,
            model=next(iter(known or aliases), None),
            queues=_queue_names(registered["queues"]),
            state=registered["state"],
            is_alive=beat_seconds is not None and beat_seconds <= self._lease_seconds,
            beat_seconds=beat_seconds,
            **{figure: number(figure) for figure in _FIGURES},
        )

    def _measured(self, workers: Sequence[WorkerView], moment: float) -> list[WorkerView]:
        names = {worker.name for worker in workers}
        self._meters = {name: one for name, one in self._meters.items() if name in names}
        return [
            self._meters.setdefault(worker.name, _WorkerMeters()).measure(worker, moment)
            for worker in workers
        ]

    # Batches --------------------------------------------------------------------------------

    def _batch_ids(self, moment: float, newest: Sequence[str]) -> list[str]:
        """Return the batches to look at: those that may be open."""
        found = dict.fromkeys((*newest, *self._open))
        if moment >= self._look_at_all:
            found.update(dict.fromkeys(self._all_open()))
            self._look_at_all = moment + _ALL_BATCHES_SECONDS
        return list(found)

    def _all_open(self) -> Iterator[str]:
        start = 0
        while True:
            [members] = self._ask(("ZRANGE", keys.batches(), start, start + _PAGE - 1))
            page = [_text(member) for member in members or ()]
            statuses = self._ask(*(("HGET", keys.batch(one), "status") for one in page))
            yield from (
                batch_id
                for batch_id, status in zip(page, statuses, strict=True)
                if _is_open(status)
            )
            if len(page) < _PAGE:
                return
            start += len(page)

    def _open_batches(self, batch_ids: Sequence[str]) -> list[Batch]:
        hashes = self._ask(*(("HGETALL", keys.batch(batch_id)) for batch_id in batch_ids))
        found = []
        for batch_id, reply in zip(batch_ids, hashes, strict=True):
            raw = _hash(reply)
            if not _is_open(raw.get(b"status")):
                continue
            try:
                found.append(read_batch_hash(batch_id, raw))
            except (KeyError, ValueError):
                continue  # half written, or by somebody else
        return sorted(found, key=lambda batch: (batch.timestamps.get("created_at", 0), batch.id))

    def _view(self, batch: Batch, num_running: int, moment: float) -> BatchView:
        pace = self._paces.setdefault(batch.id, BatchPace())
        return BatchView(batch, num_running, pace.note(moment, batch, num_running))

    # Queues and what runs -------------------------------------------------------------------

    def _fill(self, queues: _Queues) -> _Held:
        """Count what is in the queues, and return what runs."""
        names = list(queues.lists)
        lists = [key for name in names for key in queues.lists[name]]
        lengths = self._ask(
            *(("LLEN", key) for key in lists),
            *(
                command
                for name in names
                for command in (
                    ("ZCARD", keys.rq_started(name)),
                    ("ZCARD", keys.rq_scheduled(name)),
                    ("ZCARD", keys.rq_failed(name)),
                    ("ZRANGE", keys.rq_started(name), 0, _MOST_RUNNING - 1),
                )
            ),
        )
        waiting = dict(zip(lists, (length or 0 for length in lengths), strict=False))
        held = _Held()
        for index, name in enumerate(names):
            at = len(lists) + 4 * index
            running, scheduled, failed, members = lengths[at : at + 4]
            queues.counts[name] = (
                sum(waiting[key] for key in queues.lists[name]),
                running or 0,
                scheduled or 0,
                failed or 0,
            )
            held.job_ids[name] = [_text(member).rpartition(":")[0] for member in members or ()]
        return held

    def _longest(self, held: _Held, now: float) -> list[RunningJob]:
        job_ids = list(dict.fromkeys(job for jobs in held.job_ids.values() for job in jobs))
        job_ids = job_ids[:_MOST_RUNNING]
        replies = self._ask(*(("HMGET", keys.rq_job(one), *_JOB_FIELDS) for one in job_ids))
        found = []
        for job_id, reply in zip(job_ids, replies, strict=True):
            job = _fields(_JOB_FIELDS, reply)
            started = moment_of(job["started_at"])
            if started is not None:
                found.append(RunningJob(job_id, job["worker_name"], max(0.0, now - started)))
        return sorted(found, key=lambda job: (-job.seconds, job.job_id))[:_MOST_LONGEST]


class _WorkerMeters:
    """Measures one worker by the counters on its card."""

    def __init__(self) -> None:
        self._generated = Meter()
        self._prompts = Meter()

    def measure(self, worker: WorkerView, moment: float) -> WorkerView:
        """Return the worker with its rates."""
        self._generated.note(moment, worker.completion_tokens)
        self._prompts.note(moment, worker.prompt_tokens)
        return replace(
            worker,
            tokens_per_second=_rate(self._generated, worker),
            prompt_tokens_per_second=_rate(self._prompts, worker),
        )


def _rate(meter: Meter, worker: WorkerView) -> float | None:
    """Return a worker's rate; one that has nothing to do has none, however fast it was."""
    is_idle = not worker.rows or not worker.is_alive
    return 0.0 if is_idle and meter.is_resting else meter.recent


@dataclass(slots=True)
class _Held:
    """The jobs that workers hold, by queue."""

    job_ids: dict[str, list[str]] = field(default_factory=dict)

    def num_of(self, batch: Batch) -> int:
        """Return how many of a batch's lines they are."""
        prefix = keys.job_id_prefix(batch.id)
        return sum(job_id.startswith(prefix) for job_id in self.job_ids.get(batch.queue, ()))


@dataclass(slots=True)
class _Queues:
    """The lists of each queue, its lanes included, and what was counted in them.

    Attributes:
        lists: keys of lists by the queue's name.
        counts: waiting, running, scheduled and failed jobs by the queue's name.
    """

    lists: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, queue_keys: Iterable[str], workers: Sequence[WorkerView], batches: Sequence[Batch]
    ) -> _Queues:
        """Return those that are ours: by their name, or because a worker of ours serves them."""
        served = {queue for worker in workers for queue in worker.queues}
        lists: dict[str, set[str]] = {}
        for name in (*served, *(batch.queue for batch in batches)):
            lists.setdefault(name, {keys.rq_queue(name)})
        for key in queue_keys:
            queue = keys.queue_of_list(key)
            if keys.is_ours(queue) or queue in served:
                lists.setdefault(queue, {keys.rq_queue(queue)}).add(key)
        return cls({name: sorted(lists[name]) for name in sorted(lists)})

    def views(self, served: set[str]) -> list[QueueView]:
        """Return those that hold something or are served."""
        views = [QueueView(name, *self.counts[name], name in served) for name in self.lists]
        return [view for view in views if view.is_served or not view.is_empty]


def _is_open(status: bytes | None) -> bool:
    try:
        return status is not None and not Status(_text(status)).is_final
    except ValueError:
        return False


def _queue_names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _aliases(queues: str) -> list[str]:
    """Return the aliases of a worker's queues, its own first; all serve the default queue."""
    names = [keys.alias_of(queue) for queue in _queue_names(queues)]
    return list(dict.fromkeys(n for n in names if n is not None and n != _DEFAULT_ALIAS))


def _checked(reply: Any) -> Any:
    """Return a reply; None for an error that one key alone is to blame for."""
    if isinstance(reply, ResponseError) and not isinstance(reply, NoPermissionError):
        return None
    if isinstance(reply, Exception):
        raise reply
    return reply


def _fields(names: Sequence[str], reply: Any) -> dict[str, str]:
    """Return the fields of a hash by name; those that are not there are empty."""
    values = reply if isinstance(reply, list) else [None] * len(names)
    return {name: _text(value) for name, value in zip(names, values, strict=True)}


def _hash(reply: Any) -> dict[bytes, bytes]:
    """Return a whole hash, in whichever of its shapes the client library has it."""
    if isinstance(reply, Mapping):
        return dict(reply)
    return dict(zip(reply[::2], reply[1::2], strict=False)) if isinstance(reply, list) else {}


def _card(reply: Any) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in _hash(reply).items()}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
