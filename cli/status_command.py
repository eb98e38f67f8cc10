"""qsvc status: where a batch or a job stands."""

from __future__ import annotations

from datetime import datetime

import click

from cli.options import json_option, print_json, redis_option, server, tell
from queue_service.batches import Batches
from queue_service.results import read_job


@click.command("status")
@click.argument("batch_or_job")
@redis_option
@json_option
def command(batch_or_job: str, redis_url: str | None, as_json: bool) -> None:
    """Show where a batch (or one job) stands."""
    with server(redis_url) as connection:
        if is_job(batch_or_job):
            job = read_job(connection, batch_or_job)
            if as_json:
                print_json(
                    {"id": job.job_id, "object": "job", "status": job.status, "error": job.error}
                )
            else:
                reason = f" ({job.error['code']}: {job.error['message']})" if job.error else ""
                tell(f"{job.job_id}  {job.status}{reason}")
            return
        batch = Batches(connection).current(batch_or_job)
    if as_json:
        print_json(batch.to_object())
        return
    counts = f"{batch.completed} completed, {batch.failed} failed, {batch.cancelled} cancelled"
    more = "" if batch.is_submitted else " so far (submit still runs or was interrupted)"
    tell(f"{batch.id}  {batch.status.value}  {batch.ended} of {batch.total}{more}: {counts}")
    tell(
        f"queue {batch.queue}, model {batch.model}, tokens {batch.prompt_tokens} in "
        f"({batch.cached_tokens} cached), {batch.completion_tokens} out"
    )
    if batch.expires_at is not None and not batch.status.is_final:
        due = datetime.fromtimestamp(batch.expires_at).astimezone()
        tell(f"what has not ended by {due:%Y-%m-%d %H:%M:%S %z} is given up")


def is_job(name: str) -> bool:
    """Whether an id is a job's: a batch's line, or anything that is no batch's id."""
    return not name.startswith("batch_") or "-" in name
