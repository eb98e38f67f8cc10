"""qsvc retry: run failed lines or jobs again."""

from __future__ import annotations

import click

from cli.options import redis_option, say, server
from cli.status_command import is_job
from queue_service.batches import Batches
from queue_service.results import read_job


@click.command("retry", short_help="Run failed and cancelled lines again.")
@click.argument("batch_or_job")
@redis_option
def command(batch_or_job: str, redis_url: str | None) -> None:
    """Run the lines of a batch again that failed or were cancelled (or one job).

    Lines with an answer keep it; lines that were refused as invalid stay refused.
    """
    with server(redis_url) as connection:
        batches = Batches(connection)
        if is_job(batch_or_job):
            job = read_job(connection, batch_or_job)  # one that is not there is an error
            count = len(batches.retry_jobs([batch_or_job]))
            num_without_job = int(not count and job.status == "failed")
            if not count and not num_without_job:
                say(f"it is {job.status}: what failed or was cancelled can run again")
        else:
            count = batches.retry_failed(batch_or_job)
            num_without_job = batches.num_without_job(batch_or_job)
    click.echo(f"{count} queued again")
    say_without_job(num_without_job)


def say_without_job(count: int) -> None:
    """Say why so many failed lines were not queued again."""
    if count:
        what = "1 failed line is no job" if count == 1 else f"{count} failed lines are no jobs"
        say(
            f"{what}, refused before it was queued or deleted since, and cannot run again: "
            "submit what is right in a file of its own"
        )
