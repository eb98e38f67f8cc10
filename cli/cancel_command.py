"""qsvc cancel: cancel a batch or a job."""

from __future__ import annotations

import click

from cli.options import redis_option, server
from cli.status_command import is_job
from queue_service.batches import Batches


@click.command("cancel", short_help="Cancel what has not ended of a batch, or a job.")
@click.argument("batch_or_job")
@redis_option
def command(batch_or_job: str, redis_url: str | None) -> None:
    """Cancel what has not ended: queued lines at once, running ones within a step or two.

    Finished lines keep their results.
    """
    with server(redis_url) as connection:
        batches = Batches(connection)
        if is_job(batch_or_job):
            done = batches.cancel_job(batch_or_job)
            click.echo("cancelled" if done else "it had ended already")
            return
        count = batches.cancel(batch_or_job)
    click.echo(f"{count} lines cancelled")
