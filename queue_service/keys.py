"""Every Redis key that qsvc reads or writes is built here (docs/redis.md describes each)."""

from __future__ import annotations

import hashlib

from rq.defaults import RQ_KEY_PREFIX

RQ: str = RQ_KEY_PREFIX
PREFIX = "qsvc"
# Version of the job hash and its payload. A worker leaves jobs of a newer one where they are.
FORMAT_VERSION = 1
DEFAULT_QUEUE = "qsvc:default"
# What the last part of a lane's name begins with.
_LANE = ":batch_"


# Queues -------------------------------------------------------------------------------------


def queue_name(alias: str, priority: str | None = None) -> str:
    """Return the RQ queue of a model alias; ``priority`` is ``high``, ``low`` or None."""
    return f"{PREFIX}:{alias}" + (f":{priority}" if priority else "")


def queue_names(alias: str) -> list[str]:
    """Return the three queues of an alias in the order in which they are served."""
    return [queue_name(alias, "high"), queue_name(alias), queue_name(alias, "low")]


# Jobs of a higher queue come before all others, whatever priority their bodies name; that is less
# than half of it.
QUEUE_PRIORITY = 1 << 33


def queue_priority(queue: str) -> int:
    """Return what a queue adds to its jobs' priority: something for `:high`, less for `:low`."""
    if not queue.startswith(f"{PREFIX}:"):
        return 0
    return {"high": QUEUE_PRIORITY, "low": -QUEUE_PRIORITY}.get(queue.rpartition(":")[2], 0)


def alias_of(queue: str) -> str | None:
    """Return the alias whose queue this is, of whatever priority; None where it is not ours."""
    prefix, _, rest = queue.partition(":")
    if prefix != PREFIX or not rest:
        return None
    alias, _, last = rest.rpartition(":")
    return alias if alias and last in ("high", "low") else rest


def alias_for(model: str) -> str:
    """Return the default alias of a model: a slug of its base name, safe inside a queue name."""
    base = model.rstrip("/").rsplit("/", 1)[-1].lower()
    slug = "".join(c if c.isalnum() and c.isascii() else "-" for c in base)
    return "-".join(part for part in slug.split("-") if part) or "model"


# RQ's own keys ------------------------------------------------------------------------------


def is_ours(queue: str) -> bool:
    """Whether a queue is one of qsvc's, and none of an application's own."""
    return queue.startswith(f"{PREFIX}:")


def rq_queue(queue: str) -> str:
    """List of job ids waiting in a queue."""
    return f"{RQ}:queue:{queue}"


def queue_of_list(key: str) -> str:
    """Return the queue whose jobs wait in a list: for a lane the one that it belongs to."""
    name = key.removeprefix(rq_queue(""))
    return name.rpartition(_LANE)[0] or name


def rq_started(queue: str) -> str:
    """Sorted set of running executions (``job:execution``), scored by the end of their lease."""
    return f"{RQ}:wip:{queue}"


def rq_finished(queue: str) -> str:
    """Sorted set of finished job ids, scored by when they expire."""
    return f"{RQ}:finished:{queue}"


def rq_failed(queue: str) -> str:
    """Sorted set of failed and stopped job ids, scored by when they expire."""
    return f"{RQ}:failed:{queue}"


def rq_canceled(queue: str) -> str:
    """Sorted set of cancelled job ids, scored by when they expire."""
    return f"{RQ}:canceled:{queue}"


def rq_scheduled(queue: str) -> str:
    """Sorted set of job ids that wait for a time, scored by it."""
    return f"{RQ}:scheduled:{queue}"


def rq_job(job_id: str) -> str:
    """Hash of one job."""
    return f"{RQ}:job:{job_id}"


def rq_results(job_id: str) -> str:
    """Stream of one job's results, the newest last."""
    return f"{RQ}:results:{job_id}"


def rq_worker(name: str) -> str:
    """Hash of one worker as ``rq info`` shows it."""
    return f"{RQ}:worker:{name}"


# Our own keys -------------------------------------------------------------------------------


def stream(job_id: str) -> str:
    """Stream of a job's text as it is generated."""
    return f"{PREFIX}:stream:{job_id}"


def watch(job_id: str) -> str:
    """Set for a short time by whoever wants to see a job's text from now on."""
    return f"{PREFIX}:watch:{job_id}"


def trace(job_id: str) -> str:
    """List of the traces of a job's executions, each as JSON."""
    return f"{PREFIX}:trace:{job_id}"


def progress(job_id: str, execution_id: str) -> str:
    """List: how far an execution has come (a header, then packed token ids)."""
    return f"{PREFIX}:progress:{job_id}:{execution_id}"


def batch(batch_id: str) -> str:
    """Hash of one batch."""
    return f"{PREFIX}:batch:{batch_id}"


def batch_lines(batch_id: str) -> str:
    """List of the batch's lines in input order, each ``<line> <custom_id>``."""
    return f"{PREFIX}:batch:{batch_id}:lines"


def batch_done(batch_id: str) -> str:
    """Stream with one entry per line that reached its end, in the order of the ends."""
    return f"{PREFIX}:batch:{batch_id}:done"


def batch_errors(batch_id: str) -> str:
    """Hash from line number to the error of a line that was refused before queueing."""
    return f"{PREFIX}:batch:{batch_id}:errors"


def batch_outcomes(batch_id: str) -> str:
    """Bits: how each line of the batch ended, two bits a line, 0 while it has not."""
    return f"{PREFIX}:batch:{batch_id}:outcomes"


def lane(queue: str, batch_id: str) -> str:
    """RQ queue of its own that holds the waiting lines of one batch."""
    return f"{queue}:{batch_id}"


def lanes(queue: str) -> str:
    """List of a queue's lanes in the order of their turns; ``-`` is the queue itself."""
    return f"{PREFIX}:lanes:{queue}"


def aftercare(queue: str) -> str:
    """Sorted set of executions (``job:execution:ending``) to see to after their end, by when."""
    return f"{PREFIX}:aftercare:{queue}"


def submit_key(queue: str, key: str) -> str:
    """String: the batch that a caller's own key stands for."""
    digest = hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
    return f"{PREFIX}:key:{queue}:{digest}"


def synced() -> str:
    """Written to ask whether everything before it is on the server's disk."""
    return f"{PREFIX}:synced"


def closing() -> str:
    """Sorted set of ended batches whose lines still have to be given their time to expire."""
    return f"{PREFIX}:closing"


def batches() -> str:
    """Sorted set of batch ids scored by creation time."""
    return f"{PREFIX}:batches"


def model_card(alias: str) -> str:
    """Hash published by the workers that serve a model."""
    return f"{PREFIX}:model:{alias}"


def worker_card(name: str) -> str:
    """Hash with a worker's engine figures."""
    return f"{PREFIX}:worker:{name}"


def reap_lock(queue: str) -> str:
    """Held for less than one round by the worker that reaps a queue."""
    return f"{PREFIX}:reaping:{queue}"


# Ids ----------------------------------------------------------------------------------------


def batch_id(*, digest: str, queue: str, key: str) -> str:
    """Return the id of a batch: the same content, queue and key always give the same one."""
    text = "\0".join((digest, queue, key))
    return "batch_" + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def job_id(batch: str, line: int) -> str:
    """Return the id of the job that runs a batch's line."""
    return f"{job_id_prefix(batch)}{line}"


def line_of(job_id: str) -> tuple[str, str]:
    """Return the batch and the line that an id names; of no batch's job, something that is none."""
    batch, _, line = job_id.rpartition("-")
    return batch, line


def job_id_prefix(batch: str) -> str:
    """Return what the ids of all jobs of a batch begin with, and no others."""
    return f"{batch}-"
