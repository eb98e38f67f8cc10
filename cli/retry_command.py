"""qsvc retry: run failed lines or jobs again."""

from __future__ import annotations

import click

from cli.options import redis_option, server
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
            read_job(connection, batch_or_job)  # one that is not there is an error
            count = len(batches.retry_jobs([batch_or_job]))
        else:
            count = batches.retry_failed(batch_or_job)
    click.echo(f"{count} queued again")
