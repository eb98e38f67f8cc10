"""qsvc delete: delete a batch with everything it owns."""

from __future__ import annotations

import click

from cli.options import redis_option, server
from queue_service.batches import Batches


@click.command("delete", short_help="Delete a batch from the server.")
@click.argument("batch_id")
@click.option("--yes", is_flag=True, help="Do not ask.")
@redis_option
def command(batch_id: str, yes: bool, redis_url: str | None) -> None:
    """Cancel a batch and delete it from the server: its jobs, results and streams.

    Files that results were written to stay.
    """
    with server(redis_url) as connection:
        batches = Batches(connection)
        batch = batches.get(batch_id)
        if not yes:
            click.confirm(f"delete {batch.total} lines and their results?", abort=True, err=True)
        batches.delete(batch_id)
    click.echo(f"{batch_id} deleted")
